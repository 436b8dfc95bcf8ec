"""What a strategy over several processes was given: who they are, and how long they wait."""

from __future__ import annotations

import logging
from typing import Any

from distribute_jax import cluster
from distribute_jax._errors import ArgumentError, NoClusterError
from distribute_jax.cluster import ClusterResolver, ClusterSpec, SimpleClusterResolver
from distribute_jax.processes._options import ClusterOptions

_LOG = logging.getLogger("distribute_jax")


def found_resolver(given: Any, caller: str) -> ClusterResolver:
    """Gives the resolver of a strategy: the one given, the one found, or one of this process alone."""
    if given is not None:
        if not isinstance(given, ClusterResolver):
            raise ArgumentError(
                f"{caller} got {given!r:.80}, which is no ClusterResolver. Pass one of "
                'dj.cluster_resolver, such as TPUClusterResolver("local"), or leave it out.'
            )
        return given
    try:
        return cluster.detect()  # loaded here, with all it looks for
    except NoClusterError:
        _LOG.info("%s: no cluster was found around this process, so it is the only worker.", caller)
        return SimpleClusterResolver(ClusterSpec({}), task_type="worker", task_id=0)


def checked_cluster_options(given: Any, caller: str) -> ClusterOptions:
    """Gives the options of a strategy, defaults for None, or raises for another object."""
    if given is None:
        return ClusterOptions()
    if not isinstance(given, ClusterOptions):
        raise ArgumentError(
            f"{caller}(cluster_options={given!r:.80}): pass dj.ClusterOptions(start_seconds=..., "
            "step_seconds=...), or leave it out."
        )
    return given
