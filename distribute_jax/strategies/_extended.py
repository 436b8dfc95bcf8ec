"""``strategy.extended``: TensorFlow's lower-level interface, for authors of libraries."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from distribute_jax import _context
from distribute_jax._errors import ArgumentError, PerReplicaError
from distribute_jax._jax_private import at_top_level
from distribute_jax._mesh import (
    cores_per_replica,
    mirrored_sharding,
    num_replicas,
    outside_mesh,
    put,
)
from distribute_jax._messages import is_key
from distribute_jax._values import (
    DistributedValues,
    Layout,
    PerReplica,
    UnevenPerReplica,
    mark_mirrored,
    reading,
)
from distribute_jax.collectives import ReduceOp
from distribute_jax.collectives._dtypes import check_summable
from distribute_jax.collectives._options import checked_options, reduce_op as as_reduce_op
from distribute_jax.program._arguments import check_call
from distribute_jax.strategies._cross_replica import (
    combined_replicas,
    note_combined,
    on_host_device,
    reduce_value,
)
from distribute_jax.strategies._devices import find_device
from distribute_jax.variables import Variable


class StrategyExtended:
    """What a library needs beyond ``Strategy``: reductions to a place, updates, and devices.

    ``strategy.extended`` gives it. Its methods belong to cross-replica context: the outside of
    ``run``, or the inside of ``merge_call``.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/StrategyExtended
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device of each replica, the first of several, as ``"cpu:0"``."""
        mesh = self._strategy.mesh
        return tuple(map(_name, mesh.devices.flat[:: cores_per_replica(mesh)]))

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices that hold variables between steps."""
        home = getattr(self._strategy, "parameter_device", None)
        return (_name(home),) if home is not None else self.worker_devices

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether every array must have a static shape.

        True for every strategy, where TensorFlow has it on TPUs only: XLA compiles each step for the
        shapes of its arrays, on all devices.
        """
        return True

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: Any, destinations: Any, options: Any = None
    ) -> Any:
        """Combines a per-replica value, and puts the result where it is wanted.

        Args:
            reduce_op: ``"sum"`` or ``"mean"``.
            value: what ``run`` returned, or a per-replica value inside ``merge_call``.
            destinations: a variable or a value of ``run``, for all of the strategy's devices; or a
                device or its name, for that one.
            options: ``CommunicationOptions``, for TensorFlow's signature; XLA packs by itself.

        Returns:
            One array, mirrored or on the device.

        Raises:
            ValueError: an unknown device, something else than a destination, ``options`` that are none, or
                what ``reduce`` refuses.

        Example:
            >>> import distribute_jax as dj
            >>> strategy = dj.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> ids = strategy.run(lambda: dj.get_replica_context().replica_id_in_sync_group)
            >>> int(strategy.extended.reduce_to("sum", ids, destinations="cpu:0"))
            1

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/StrategyExtended#reduce_to
        """
        return self._reduce_to("reduce_to", reduce_op, [(value, destinations)], options)[0]

    def _reduce_to(
        self, method: str, reduce_op: ReduceOp | str, pairs: list[tuple[Any, Any]], options: Any
    ) -> list[Any]:
        checked_options(options, f"strategy.extended.{method}")
        for _, destinations in pairs:
            self._check_destinations(destinations)
        self._strategy._enter_method(f"strategy.extended.{method}")
        values, op = [value for value, _ in pairs], as_reduce_op(reduce_op)
        if at_top_level():
            totals = reduce_together(op, values, self._strategy.mesh)
        else:
            totals = self._strategy.reduce(op, values, axis=None)
        return [self._put(total, to) for total, (_, to) in zip(totals, pairs, strict=True)]

    def _put(self, total: Any, destinations: Any) -> Any:
        if not at_top_level():
            return total  # in a compiled step every result is on the mesh
        if isinstance(destinations, (str, jax.Device)):
            return jax.device_put(total, find_device(destinations))
        storage = self._strategy._replicas.parameter_device
        to = storage.results if storage is not None else mirrored_sharding(self._strategy.mesh)
        mirrored = put(total, to)
        return jax.tree.map(lambda leaf: mark_mirrored(leaf, None), mirrored)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: Any = None,
    ) -> list[Any]:
        """Does ``reduce_to`` for several pairs of a value and its destinations, in one program.

        Raises:
            ValueError: as ``reduce_to``, or an entry that is not a pair.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/StrategyExtended#batch_reduce_to
        """
        pairs = [_pair(entry) for entry in value_destination_pairs]
        return self._reduce_to("batch_reduce_to", reduce_op, pairs, options)

    def update(
        self,
        var: nnx.Variable[Any],
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls ``fn(var, *args, **kwargs)`` in the strategy's scope, to update a variable on all replicas.

        Args:
            var: a variable of this strategy.
            fn: the update, such as ``lambda v, x: v.assign_add(x)``.
            args: its further arguments, equal for all replicas.
            kwargs: its keyword arguments, likewise.
            group: whether to give one result rather than one for each local replica.

        Returns:
            What ``fn`` returned, or a tuple of it, one for each local replica.

        Raises:
            ValueError: an argument that differs between replicas, or a variable of another strategy.
            RuntimeError: called inside ``run``.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/StrategyExtended#update
        """
        _context.require_cross_replica("strategy.extended.update")
        self._check_own(var, "update")
        check_call(args, kwargs, fn, "strategy.extended.update(var, fn")
        for leaf in jax.tree.leaves((args, kwargs), is_leaf=_is_distributed):
            if isinstance(leaf, DistributedValues):
                raise PerReplicaError(
                    f"strategy.extended.update got {leaf!r}, which differs between replicas, so the "
                    "variable's replicas would drift apart. Reduce it first: "
                    "strategy.extended.reduce_to('mean', value, destinations=var)."
                )
        with self._strategy.scope():
            result = fn(var, *args, **(kwargs or {}))
        if group:
            return result
        replicas = int(self._strategy.num_replicas_in_sync)
        if not at_top_level():
            return (result,) * replicas
        local = tuple(self._strategy.experimental_local_results(result))
        return local if len(local) > 1 else local * replicas

    def value_container(self, value: Any) -> Any:
        """Returns a variable or a distributed value as it is.

        Such a value holds all of its components, and ``v.values`` makes new arrays of them, which do not
        know whose they are: a component comes back as it is too, where TensorFlow gives its variable.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/StrategyExtended#value_container
        """
        return value

    def variable_created_in_scope(self, v: nnx.Variable[Any]) -> bool:
        """Returns whether a variable is stored where this strategy's ``scope()`` puts variables.

        Raises:
            ValueError: ``v`` is not a variable.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/StrategyExtended#variable_created_in_scope
        """
        _check_variable(v, "variable_created_in_scope")
        arrays = [
            leaf for leaf in jax.tree.leaves(v.get_raw_value()) if isinstance(leaf, jax.Array)
        ]
        if any(isinstance(array, jax.core.Tracer) for array in arrays):
            return True  # run has laid all state of its step where the strategy keeps it
        devices = {device for array in arrays for device in array.sharding.device_set}
        home = getattr(self._strategy, "parameter_device", None)
        own = isinstance(v, Variable) and v.is_on_read
        on_mesh = own or home is None
        return devices == (set(self._strategy.mesh.devices.flat) if on_mesh else {home})

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: nnx.Variable[Any]) -> Iterator[None]:
        """Creates variables in the block where another variable of this strategy is stored.

        All variables of a strategy are stored the same way, so this only checks that the variable is one.

        Raises:
            ValueError: the variable is not of this strategy.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/StrategyExtended#colocate_vars_with
        """
        self._check_own(colocate_with_variable, "colocate_vars_with")
        with self._strategy.scope():
            yield

    def _check_destinations(self, destinations: Any) -> None:
        if isinstance(destinations, nnx.Variable):
            self._check_own(destinations, "reduce_to")
        elif not isinstance(destinations, (str, jax.Device, jax.Array, DistributedValues)):
            raise ArgumentError(
                f"strategy.extended.reduce_to got destinations={destinations!r:.60}. It takes a variable or "
                "a value that strategy.run returned, for all of the strategy's devices, or one device, as "
                'jax.devices()[0], or its name, as "cpu:0".'
            )

    def _check_own(self, var: Any, method: str) -> None:
        _check_variable(var, method)
        leaves = jax.tree.leaves(var.get_raw_value())
        shardings = [leaf.sharding for leaf in leaves if not _is_traced(leaf)]
        for sharding in shardings:
            mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
            if mesh is not None and mesh.size > 1 and not self.variable_created_in_scope(var):
                raise ArgumentError(
                    f"strategy.extended.{method} got a variable that was made under another strategy, "
                    f"over {[str(d) for d in mesh.devices.flat]}. `colocate_with_variable` and `var` "
                    "must be made under this strategy's scope()."
                )


def _check_variable(var: Any, method: str) -> None:
    if not isinstance(var, nnx.Variable):
        raise ArgumentError(
            f"strategy.extended.{method} got {type(var).__name__}, which is not a variable. Pass an "
            "nnx.Variable or dj.Variable made under strategy.scope()."
        )


def _pair(entry: Any) -> tuple[Any, Any]:
    if not isinstance(entry, (tuple, list)) or len(entry) != 2:
        raise ArgumentError(
            f"strategy.extended.batch_reduce_to got {entry!r:.80} among the pairs. Each is a value and its "
            "destinations: [(value, variable), (other, 'cpu:0')]."
        )
    return entry[0], entry[1]


def _name(device: jax.Device) -> str:
    return f"{device.platform}:{device.id}"


def _is_distributed(leaf: Any) -> bool:
    return isinstance(leaf, (DistributedValues, nnx.Variable))


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, jax.Array)


def reduce_together(op: ReduceOp, values: list[Any], mesh: Mesh) -> list[Any]:
    """Does ``strategy.reduce`` with ``axis=None`` for each of several nests.

    Whole per-replica arrays, which is what gradients are, go through one program; others, such as
    batches with padding, each through its own.
    """
    leaves, treedef = jax.tree.flatten(values, is_leaf=_is_value)
    whole = [i for i, leaf in enumerate(leaves) if _is_whole(leaf, mesh)]
    results = [
        None if i in whole else reduce_value(op, leaf, None, mesh) for i, leaf in enumerate(leaves)
    ]
    parts = [leaves[i] for i in whole]
    if parts:
        named = (("the value", jax.ShapeDtypeStruct(p.part_shape, p.dtype)) for p in parts)
        check_summable(named, "strategy.reduce")
        for part in parts:
            note_combined(f"strategy.extended.batch_reduce_to({op.value!r})", part)
        program = _compiled(op, tuple(p.layout for p in parts), mesh)
        with ExitStack() as stack:
            for part in parts:
                stack.enter_context(reading(part))
            stack.enter_context(outside_mesh())
            for i, total in zip(whole, program([p.global_array for p in parts]), strict=True):
                results[i] = on_host_device(total)
    nests: list[Any] = jax.tree.unflatten(treedef, results)
    return nests


@functools.lru_cache(maxsize=256)
def _compiled(
    op: ReduceOp, layouts: tuple[Layout, ...], mesh: Mesh
) -> Callable[..., list[jax.Array]]:
    replicas = num_replicas(mesh)

    def combine(arrays: list[jax.Array]) -> list[jax.Array]:
        pairs = zip(arrays, layouts, strict=True)
        return [combined_replicas(op, array, layout, replicas) for array, layout in pairs]

    return jax.jit(combine, out_shardings=mirrored_sharding(mesh))


def _is_whole(leaf: Any, mesh: Mesh) -> bool:
    """Returns whether a value is one array with an equal part, all of it real, for each replica."""
    if not isinstance(leaf, PerReplica) or isinstance(leaf, UnevenPerReplica) or leaf.mesh != mesh:
        return False
    return leaf.counts is None and leaf.ambiguous is None and not is_key(leaf.global_array)


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, (DistributedValues, nnx.Variable))
