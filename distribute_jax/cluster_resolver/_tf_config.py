"""Resolves the cluster that the environment variable TF_CONFIG describes.

A complete value::

    {"cluster": {"chief": ["host0:2222"], "worker": ["host1:2222", "host2:2222"], "ps": ["host3:2222"]},
     "task": {"type": "worker", "index": 1},
     "rpc_layer": "grpc", "environment": "cloud", "session_master": "host0:2222"}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from distribute_jax._errors import ArgumentError, ArgumentTypeError, TFConfigError
from distribute_jax.cluster_resolver._base import ClusterResolver, with_layer
from distribute_jax.cluster_resolver._spec import ClusterSpec

TF_CONFIG = "TF_CONFIG"


class TFConfigClusterResolver(ClusterResolver):
    """The cluster that the environment variable ``TF_CONFIG`` describes, read anew at each call.

    Without the variable the cluster is empty: one process. What the constructor or a setter was given wins
    over the variable.

    Args:
        task_type: the job of this process.
        task_id: its index in the job.
        rpc_layer: put in front of addresses.
        environment: what ``environment`` gives.

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
        >>> del os.environ["TF_CONFIG"]

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
        self._given_environment = environment

    @classmethod
    def is_present(cls) -> bool:
        """Tells whether TF_CONFIG describes a cluster; ``{}`` does not, and malformed text raises."""
        return bool(read_tf_config().cluster)

    def cluster_spec(self) -> ClusterSpec:
        """See ``ClusterResolver.cluster_spec``: empty where TF_CONFIG is unset or has no cluster."""
        return read_tf_config().cluster

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """See ``ClusterResolver.master``: of this task, and empty for a cluster of one task.

        A ``session_master`` in TF_CONFIG wins.
        """
        config = read_tf_config()
        if config.session_master is not None:
            return config.session_master
        if sum(map(config.cluster.num_tasks, config.cluster.jobs)) <= 1:
            return ""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            task_type, task_id = self._own_task()
        address = config.cluster.task_address(task_type, task_id)
        return with_layer(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> Mapping[str, int]:
        """See ``ClusterResolver.num_accelerators``: of this task where none is named."""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        return super().num_accelerators(task_type, task_id, config_proto)

    @property
    def environment(self) -> str:
        """What the constructor was given, or else TF_CONFIG says."""
        given = self._given_environment
        return read_tf_config().environment if given is None else given

    def _found_task_type(self) -> str | None:
        return read_tf_config().task_type

    def _found_task_id(self) -> int | None:
        return read_tf_config().task_id

    def _found_rpc_layer(self) -> str | None:
        return read_tf_config().rpc_layer


_EXAMPLE = (
    'TF_CONFIG=\'{"cluster": {"worker": ["host0:2222", "host1:2222"]}, '
    '"task": {"type": "worker", "index": 0}}\''
)


@dataclass(frozen=True)
class TFConfig:
    """The parts of TF_CONFIG; each is empty where the variable does not say."""

    cluster: ClusterSpec = field(default_factory=lambda: ClusterSpec({}))
    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str | None = None
    environment: str = ""
    session_master: str | None = None


def read_tf_config() -> TFConfig:
    """Reads the variable as it is now."""
    return parse_tf_config(os.environ.get(TF_CONFIG, ""))


def parse_tf_config(text: str) -> TFConfig:
    """Reads the text of the variable; an empty one says nothing."""
    config = _object(_loaded(text), "the whole") if text.strip() else {}
    task = _object(config.get("task") or {}, "its 'task'")
    return TFConfig(
        cluster=_cluster(config.get("cluster") or {}),
        task_type=_text(task, "type", "its task's 'type'"),
        task_id=_index(task.get("index")),
        rpc_layer=_text(config, "rpc_layer", "its 'rpc_layer'"),
        environment=_text(config, "environment", "its 'environment'") or "",
        session_master=_text(config, "session_master", "its 'session_master'"),
    )


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise TFConfigError(
            f"The environment variable TF_CONFIG is not JSON ({error.msg}). It was {text!r:.300}, and "
            f"must be like {_EXAMPLE}. It goes wrong at",
            error.doc,
            error.pos,
        ) from None


def _object(value: Any, part: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(part, value, "an object in braces")
    return value


def _cluster(cluster: Any) -> ClusterSpec:
    for job, tasks in _object(cluster, "its 'cluster'").items():
        if not isinstance(tasks, (list, dict)):
            raise _wrong(
                f"the job {job!r} of its cluster", tasks, "a list of addresses 'host:port'"
            )
        if isinstance(tasks, dict):  # JSON has strings for keys
            cluster = {**cluster, job: {_key(job, key): tasks[key] for key in tasks}}
    try:
        return ClusterSpec(cluster)
    except (ArgumentTypeError, ArgumentError) as error:
        raise ArgumentError(
            f"TF_CONFIG, its 'cluster': {error} It must be like {_EXAMPLE}."
        ) from None


def _key(job: str, key: str) -> int:
    if not (key.isascii() and key.isdigit()):
        raise _wrong(f"an index in the job {job!r} of its cluster", key, "a number, 0 or more")
    return int(key)


def _text(holder: Mapping[str, Any], name: str, part: str) -> str | None:
    value = holder.get(name)
    if value is not None and not isinstance(value, str):
        raise _wrong(part, value, "a string")
    return value


def _index(value: Any) -> int | None:
    """Gives the index of the task, which TensorFlow also takes as a string of digits."""
    if value is None:
        return None
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    is_digits = isinstance(value, str) and value.isascii() and value.isdigit()
    if not (is_number or is_digits):
        raise _wrong("its task's 'index'", value, "a number, 0 or more")
    return int(value)


def _wrong(part: str, value: Any, wanted: str) -> ArgumentError:
    return ArgumentError(
        f"The environment variable TF_CONFIG is malformed: {part} is {value!r:.200} and must be {wanted}. "
        f"The variable must be like {_EXAMPLE}."
    )
