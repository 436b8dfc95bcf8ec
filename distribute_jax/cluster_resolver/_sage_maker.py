"""The hosts of a SageMaker training job."""

from __future__ import annotations

import json
import os
from typing import ClassVar

from distribute_jax._errors import ClusterError
from distribute_jax.cluster_resolver._base import WORKER, ClusterResolver
from distribute_jax.cluster_resolver._spec import ClusterSpec


class SageMakerClusterResolver(ClusterResolver):
    """The hosts of the SageMaker training job that this process is part of: a worker on each.

    Args:
        port: the port of every worker.
        task_type: the job of this process.
        task_id: its index in the job.
        rpc_layer: put in front of addresses.
        environment: the value of ``environment``.

    Raises:
        ClusterError: at a call: a variable is missing or malformed; a ``RuntimeError``.

    Example:
        >>> import distribute_jax as dj, os
        >>> os.environ["SM_HOSTS"], os.environ["SM_CURRENT_HOST"] = '["algo-2", "algo-1"]', "algo-1"
        >>> resolver = dj.cluster_resolver.SageMakerClusterResolver()
        >>> resolver.cluster_spec().as_dict(), resolver.task_id
        ({'worker': ['algo-1:2223', 'algo-2:2223']}, 0)

    Source: https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md
    """

    variables: ClassVar[tuple[str, ...]] = ("SM_HOSTS", "SM_CURRENT_HOST")
    _hint = "Not running in a SageMaker training job?"

    def __init__(
        self,
        port: int = 2223,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self._port = port
        self._task_type = task_type or WORKER
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._environment = environment or ""

    def cluster_spec(self) -> ClusterSpec:
        """Returns the hosts as workers, sorted by name."""
        return ClusterSpec({WORKER: [f"{host}:{self._port}" for host in self._hosts()]})

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns the address of a task, of this one by default; empty for a single host."""
        return super().master(task_type, task_id, rpc_layer) if len(self._hosts()) > 1 else ""

    def _detected_task(self) -> tuple[str | None, int | None]:
        hosts, this_host = self._hosts(), os.environ.get("SM_CURRENT_HOST")
        if this_host not in hosts:
            raise ClusterError(
                f"SageMakerClusterResolver: SM_CURRENT_HOST={this_host!r} is not one of the hosts {hosts} "
                "in SM_HOSTS. SageMaker sets both; do not set them by hand."
            )
        return WORKER, hosts.index(this_host)

    def _hosts(self) -> list[str]:
        text = self._variable("SM_HOSTS")
        try:
            hosts = json.loads(text)
        except json.JSONDecodeError:
            hosts = None
        if not isinstance(hosts, list) or not hosts or not all(isinstance(h, str) for h in hosts):
            raise ClusterError(
                f"SageMakerClusterResolver: SM_HOSTS={text!r:.200} must be a JSON list of hosts, such as "
                '["algo-1", "algo-2"].'
            )
        return sorted(hosts)
