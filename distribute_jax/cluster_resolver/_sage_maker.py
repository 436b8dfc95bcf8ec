"""The hosts of a SageMaker training job."""

from __future__ import annotations

import json
import os
from typing import ClassVar

from distribute_jax._errors import ClusterError
from distribute_jax.cluster_resolver._base import WORKER, ClusterResolver, value_of, with_layer
from distribute_jax.cluster_resolver._spec import ClusterSpec

HOSTS = "SM_HOSTS"
CURRENT_HOST = "SM_CURRENT_HOST"

_NAME = "SageMakerClusterResolver"
_HINT = "Not running in a SageMaker training job?"


class SageMakerClusterResolver(ClusterResolver):
    """The hosts of the SageMaker training job that this process is part of: a worker on each.

    Args:
        port: the port of every worker.
        task_type: the job of this process.
        task_id: its index in the job.
        rpc_layer: put in front of addresses.
        environment: what ``environment`` gives.

    Raises:
        ClusterError: at a call: a variable is missing or malformed; a ``RuntimeError``.

    Example:
        >>> import distribute_jax as dj, os
        >>> os.environ["SM_HOSTS"], os.environ["SM_CURRENT_HOST"] = '["algo-2", "algo-1"]', "algo-1"
        >>> resolver = dj.cluster_resolver.SageMakerClusterResolver()
        >>> resolver.cluster_spec().as_dict(), resolver.task_id
        ({'worker': ['algo-1:2223', 'algo-2:2223']}, 0)
        >>> del os.environ["SM_HOSTS"], os.environ["SM_CURRENT_HOST"]

    Source: https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md
    """

    variables: ClassVar[tuple[str, ...]] = (HOSTS, CURRENT_HOST)

    def __init__(
        self,
        port: int = 2223,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self._port = port
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._environment = environment or ""

    def cluster_spec(self) -> ClusterSpec:
        """See ``ClusterResolver.cluster_spec``: the hosts, sorted by name."""
        return ClusterSpec({"worker": [f"{host}:{self._port}" for host in _hosts()]})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """See ``ClusterResolver.master``: of this task, and empty for a single host."""
        spec = self.cluster_spec()
        if spec.num_tasks("worker") <= 1:
            return ""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            task_type, task_id = self._own_task()
        return with_layer(spec.task_address(task_type, task_id), rpc_layer or self._rpc_layer)

    def _found_task_type(self) -> str | None:
        return WORKER

    def _found_task_id(self) -> int | None:
        return _own_index()


def _hosts() -> list[str]:
    text = value_of(HOSTS, _NAME, _HINT)
    try:
        hosts = json.loads(text)
    except json.JSONDecodeError:
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) for host in hosts):
        raise ClusterError(
            f'{_NAME}: {HOSTS}={text!r:.200} must be a JSON list of hosts, such as ["algo-1", "algo-2"].'
        )
    return sorted(hosts)


def _own_index() -> int:
    hosts, own = _hosts(), os.environ.get(CURRENT_HOST)
    if own not in hosts:
        raise ClusterError(
            f"{_NAME}: {CURRENT_HOST}={own!r} is none of the hosts {hosts} that {HOSTS} names. "
            "SageMaker sets both; do not set them by hand."
        )
    return hosts.index(own)
