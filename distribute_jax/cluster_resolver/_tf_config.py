"""The cluster that the environment variable TF_CONFIG describes.

A complete value::

    {"cluster": {"chief": ["host0:2222"], "worker": ["host1:2222", "host2:2222"], "ps": ["host3:2222"]},
     "task": {"type": "worker", "index": 1},
     "rpc_layer": "grpc", "environment": "cloud", "session_master": "host0:2222"}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, ClassVar

from distribute_jax._errors import ArgumentError, TFConfigError
from distribute_jax.cluster_resolver._base import ClusterResolver, ClusterSpec

TF_CONFIG = "TF_CONFIG"

_EXAMPLE = (
    'TF_CONFIG=\'{"cluster": {"worker": ["host0:2222", "host1:2222"]}, '
    '"task": {"type": "worker", "index": 0}}\''
)


class TFConfigClusterResolver(ClusterResolver):
    """The cluster that the environment variable ``TF_CONFIG`` describes, read at each call.

    Without the variable the cluster is empty: one process. Values passed to the constructor or a setter
    take precedence over the variable.

    Args:
        task_type: the job of this process.
        task_id: its index in the job.
        rpc_layer: put in front of addresses.
        environment: the value of ``environment``.

    Raises:
        TFConfigError: at a call: the variable is not JSON; a ``json.JSONDecodeError``.
        ArgumentError: at a call: a part of it is malformed; a ``ValueError``.

    Example:
        >>> import distribute_jax as dj, json, os
        >>> os.environ["TF_CONFIG"] = json.dumps(
        ...     {"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 1}}
        ... )
        >>> resolver = dj.cluster_resolver.TFConfigClusterResolver()
        >>> resolver.num_processes, resolver.process_id, resolver.coordinator_address
        (2, 1, 'a:2222')

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/TFConfigClusterResolver
    """

    variables: ClassVar[tuple[str, ...]] = (TF_CONFIG,)

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._fixed_environment = environment

    _SET_TASK = (
        'Add "task": {"type": "worker", "index": 0}, with the index of this process, to TF_CONFIG, as in '
        f"{_EXAMPLE}."
    )

    @classmethod
    def is_present(cls) -> bool:
        """True if TF_CONFIG describes a cluster; ``{}`` does not, and malformed text raises."""
        return bool(_cluster(_read()))

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster; an empty one where TF_CONFIG is unset or has no cluster."""
        return _cluster(_read())

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns the address of a task, of this one by default; empty for a cluster of one task.

        A ``session_master`` in TF_CONFIG takes precedence.
        """
        session_master: str | None = _read().get("session_master")
        if session_master is not None:
            return session_master
        spec = self.cluster_spec()
        if sum(map(spec.num_tasks, spec.jobs)) <= 1:
            return ""
        return super().master(task_type, task_id, rpc_layer)

    @property
    def environment(self) -> str:
        """The environment passed to the constructor, or else that of TF_CONFIG."""
        fixed = self._fixed_environment
        return _read().get("environment") or "" if fixed is None else fixed

    def _accelerators(self, task_type: str | None, task_id: int | None) -> Mapping[str, int]:
        return super()._accelerators(
            self.task_type if task_type is None else task_type,
            self.task_id if task_id is None else task_id,
        )

    def _detected_task(self) -> tuple[str | None, int | None]:
        task = _object(_read().get("task") or {}, "its 'task'")
        index = task.get("index")
        return task.get("type"), None if index is None else _index(index, "its task's 'index'")

    def _detected_rpc_layer(self) -> str | None:
        return _read().get("rpc_layer")


def _read() -> Mapping[str, Any]:
    text = os.environ.get(TF_CONFIG, "").strip()
    try:
        return _object(json.loads(text or "{}"), "the whole")
    except (json.JSONDecodeError, RecursionError) as error:
        reason, at = getattr(error, "msg", "too many brackets"), getattr(error, "pos", 0)
        raise TFConfigError(
            f"The environment variable TF_CONFIG is not JSON ({reason}). It was {text!r:.300}, and "
            f"must be like {_EXAMPLE}. The error is at",
            text,
            at,
        ) from None


def _object(value: Any, part: str) -> Mapping[str, Any]:
    if isinstance(value, dict):
        return value
    raise _malformed(part, value, "an object in braces")


def _cluster(config: Mapping[str, Any]) -> ClusterSpec:
    jobs: dict[str, Any] = {}
    for job, tasks in _object(config.get("cluster") or {}, "its 'cluster'").items():
        if isinstance(tasks, dict):  # JSON has strings for keys
            part = f"an index in the job {job!r} of its cluster"
            jobs[job] = {_index(index, part): address for index, address in tasks.items()}
        else:
            jobs[job] = tasks
    try:
        return ClusterSpec(jobs)
    except ArgumentError as error:
        raise ArgumentError(
            f"TF_CONFIG, its 'cluster': {error} It must be like {_EXAMPLE}."
        ) from None


def _index(value: Any, part: str) -> int:
    """Returns an index; TensorFlow accepts digits in a string too."""
    if not str(value).isdecimal():
        raise _malformed(part, value, "an int >= 0")
    return int(value)


def _malformed(part: str, value: Any, expected: str) -> ArgumentError:
    return ArgumentError(
        f"The environment variable TF_CONFIG is malformed: {part} is {value!r:.200} and must be {expected}. "
        f"The variable must be like {_EXAMPLE}."
    )
