"""Synchronous data parallelism in which each replica is a model divided over several devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from distribute_jax._checks import check_int
from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import DATA, replica_mesh
from distribute_jax.cluster_resolver import ClusterResolver
from distribute_jax.processes import ClusterOptions
from distribute_jax.program import Rules
from distribute_jax.strategies._base import Strategy
from distribute_jax.strategies._devices import check_replicas_per_device, devices_of_job


class ModelParallelStrategy(Strategy):
    """Trains replicas that are each divided over several devices, by rules.

    The devices form a mesh ``("data", "model")``: a row of ``model`` devices is one replica. Rules say which
    arrays a replica divides over its devices, and XLA partitions the computation accordingly; the step is
    that of one replica on one device, unchanged. With ``fully_sharded`` the replicas divide parameters and
    optimizer state too, as in ``FullyShardedStrategy``. The numbers are those of one device to rounding.

    Args:
        devices: as in ``MirroredStrategy``; their number is a multiple of ``model``. Consecutive devices form
            one replica.
        model: how many devices each replica has.
        rules: how arrays are divided. A key with a ``PartitionSpec`` is a regular expression, searched in the
            path of a variable that :meth:`placement` shows; the first match decides. A key with a mesh axis
            or None is the name of a logical axis in the metadata of a Flax variable
            (``nnx.with_partitioning(init, ("embed", "mlp"))``). A spec is for the last dims of an array,
            since stacked layers have more in front. Optimizer state is divided as its parameter.
        fully_sharded: whether the replicas divide parameters and optimizer state.
        replicas_per_device: how many replicas each row of devices runs, one after the other.
        cluster_resolver: as in ``FullyShardedStrategy``; the devices of a replica are of one process.
        cluster_options: how long the processes wait for each other.
        optimizer_memory_kind: as in ``MirroredStrategy``.
        steps_in_flight: as in ``MirroredStrategy``.
        axis_name: as in ``MirroredStrategy``.

    Raises:
        ValueError: an argument is invalid; a rule names an unknown axis, ``"data"``, or one
            axis twice. When a model is placed: a rule does not fit a shape, or has matched no variable yet.

    Example:
        >>> import distribute_jax as dj
        >>> from flax import nnx
        >>> from jax.sharding import PartitionSpec
        >>> rules = {r"kernel": PartitionSpec(None, "model")}
        >>> strategy = dj.ModelParallelStrategy(["cpu:0", "cpu:1"], model=2, rules=rules)
        >>> layer = strategy.create(lambda: nnx.Linear(64, 32, rngs=nnx.Rngs(0)))
        >>> tuple(layer.kernel.sharding.spec)
        (None, 'model')

    Source: Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053; Xu et al., "GSPMD", 2021,
    https://arxiv.org/abs/2105.04663
    """

    def __init__(
        self,
        devices: Sequence[Any] | None = None,
        *,
        model: int,
        rules: Mapping[str, PartitionSpec | str | None],
        fully_sharded: bool = True,
        replicas_per_device: int = 1,
        cluster_resolver: ClusterResolver | None = None,
        cluster_options: ClusterOptions | None = None,
        optimizer_memory_kind: str | None = None,
        steps_in_flight: int | None = None,
        axis_name: str = DATA,
    ) -> None:
        name = type(self).__name__
        check_int(f"{name}: model", model)
        each = check_replicas_per_device(name, replicas_per_device)
        self._resolver = cluster_resolver
        every = devices_of_job(devices, cluster_resolver, cluster_options, name)
        here = [d for d in every if d.process_index == jax.process_index()]
        if len(here) % model:
            raise ArgumentError(
                f"{name}: the {len(here)} devices of a process are not a multiple of model={model}."
            )
        mesh = replica_mesh(np.asarray(every, dtype=object).reshape(-1, model), each, [model])
        super().__init__(
            mesh,
            steps_in_flight=steps_in_flight,
            shared=(nnx.Variable,) if fully_sharded else (),
            rules=Rules(rules, mesh, name),
            optimizer_memory_kind=optimizer_memory_kind,
            axis_name=axis_name,
        )
