"""``strategy.extended``, for authors of libraries, and the deprecated names of TensorFlow 1."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from distribute_jax import _context
from distribute_jax._checks import check_methods, converting
from distribute_jax._errors import ArgumentError, PerReplicaError, warn_user
from distribute_jax._jax_private import at_top_level
from distribute_jax._mesh import cores_per_replica, local_replicas, mirrored_sharding, put
from distribute_jax._messages import PyTree
from distribute_jax._values import DistributedValues, mark_mirrored
from distribute_jax.collectives import CommunicationOptions, ReduceOp
from distribute_jax.data import (
    ArrayDataset,
    DistributedDataset,
    InputContext,
    InputOptions,
    InputReplicationMode,
    from_arrays,
)
from distribute_jax.program._arguments import check_call
from distribute_jax.strategies._cross_replica import is_value
from distribute_jax.strategies._devices import find_device
from distribute_jax.variables import Variable


@check_methods
class StrategyExtended:
    """What a library needs beyond ``Strategy``: reductions to a device, updates, and devices.

    It is ``strategy.extended``. Its methods are called in cross-replica context: outside ``run``, or
    inside ``merge_call``.

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
        device = getattr(self._strategy, "parameter_device", None)
        return (_name(device),) if device is not None else self.worker_devices

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether every array must have a static shape.

        True for every strategy, where TensorFlow has it on TPUs only: XLA compiles each step for the
        shapes of its arrays, on all devices.
        """
        return True

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduces a per-replica value, and places the result on its destinations.

        Args:
            reduce_op: ``"sum"`` or ``"mean"``.
            value: what ``run`` returned, or a per-replica value inside ``merge_call``.
            destinations: a variable or a value of ``run``, for all of the strategy's devices; or a
                device or its name, for that one.
            options: ``CommunicationOptions``, for TensorFlow's signature; XLA packs by itself.

        Returns:
            One array, mirrored or on the device.

        Raises:
            ValueError: an unknown device, something that is not a destination, ``options`` of another class,
                or what ``reduce`` refuses.

        Example:
            >>> import distribute_jax as dj
            >>> strategy = dj.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> ids = strategy.run(lambda: dj.get_replica_context().replica_id_in_sync_group)
            >>> int(strategy.extended.reduce_to("sum", ids, destinations="cpu:0"))
            1

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/StrategyExtended#reduce_to
        """
        return self._reduce_to("reduce_to", reduce_op, [(value, destinations)])[0]

    def _reduce_to(
        self, method: str, reduce_op: ReduceOp | str, pairs: list[tuple[Any, Any]]
    ) -> list[Any]:
        for _, destinations in pairs:
            if isinstance(destinations, nnx.Variable):
                self._check_variable_of_strategy(destinations, "reduce_to")
            elif not isinstance(destinations, (str, jax.Device, jax.Array, DistributedValues)):
                raise ArgumentError(
                    "strategy.extended.reduce_to: destinations must be a variable or a value that "
                    f"strategy.run returned, or one device or its name; got {destinations!r:.60}."
                )
        self._strategy._enter_method(f"strategy.extended.{method}")
        totals = self._strategy.reduce(reduce_op, [value for value, _ in pairs], axis=None)
        return [self._put(total, to) for total, (_, to) in zip(totals, pairs, strict=True)]

    def _put(self, total: Any, destinations: Any) -> Any:
        if not at_top_level():
            return total  # in a step, where every result is on the mesh
        if isinstance(destinations, (str, jax.Device)):
            return jax.device_put(total, find_device(destinations))
        storage = self._strategy._replicas.parameter_device
        to = storage.state() if storage is not None else mirrored_sharding(self._strategy.mesh)
        return jax.tree.map(lambda leaf: mark_mirrored(leaf, None), put(total, to))

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduces several per-replica values in one program: ``reduce_to`` for each pair.

        Raises:
            ValueError: as ``reduce_to``, or an entry that is not a pair.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/StrategyExtended#batch_reduce_to
        """
        with converting("batch_reduce_to", value_destination_pairs, "an iterable of pairs"):
            pairs = list(value_destination_pairs)
        for pair in pairs:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise ArgumentError(
                    "strategy.extended.batch_reduce_to takes pairs of a value and its destinations; got "
                    f"{pair!r:.80}."
                )
        return self._reduce_to("batch_reduce_to", reduce_op, pairs)

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
            group: whether to return one result rather than one for each local replica.

        Returns:
            What ``fn`` returned, or a tuple of it, one for each local replica.

        Raises:
            ValueError: an argument that differs between replicas, or a variable of another strategy.
            RuntimeError: called inside ``run``.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/StrategyExtended#update
        """
        _context.require_cross_replica("strategy.extended.update")
        self._check_variable_of_strategy(var, "update")
        check_call(args, kwargs, "strategy.extended.update(var, fn")
        for leaf in jax.tree.leaves((args, kwargs), is_leaf=is_value):
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
        if not at_top_level():
            return (result,) * int(self._strategy.num_replicas_in_sync)
        local = tuple(self._strategy.experimental_local_results(result))
        return local if len(local) > 1 else local * len(local_replicas(self._strategy.mesh))

    def value_container(self, value: Any) -> Any:
        """Returns a variable or a distributed value as it is.

        Such a value holds all of its components. The arrays of ``v.values`` are new ones that do not refer
        to the variable, so a component is returned as it is too, where TensorFlow returns its variable.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/StrategyExtended#value_container
        """
        return value

    def variable_created_in_scope(self, v: nnx.Variable[Any]) -> bool:
        """True if a variable is stored where this strategy's ``scope()`` places variables.

        Raises:
            ValueError: ``v`` is not a variable.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/StrategyExtended#variable_created_in_scope
        """
        _check_variable(v, "variable_created_in_scope")
        arrays = [
            leaf for leaf in jax.tree.leaves(v.get_raw_value()) if isinstance(leaf, jax.Array)
        ]
        if any(isinstance(array, jax.core.Tracer) for array in arrays):
            return True  # run has placed the state of its step where the strategy stores it
        devices = {device for array in arrays for device in array.sharding.device_set}
        parameter_device = getattr(self._strategy, "parameter_device", None)
        if parameter_device is None or (isinstance(v, Variable) and v.is_on_read):
            return devices == set(self._strategy.mesh.devices.flat)
        return devices == {parameter_device}

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: nnx.Variable[Any]) -> Iterator[None]:
        """Creates variables in the block where another variable of this strategy is stored.

        All variables of a strategy are stored the same way, so this only checks that the variable is one.

        Raises:
            ValueError: the variable is not of this strategy.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/StrategyExtended#colocate_vars_with
        """
        self._check_variable_of_strategy(colocate_with_variable, "colocate_vars_with")
        with self._strategy.scope():
            yield

    def _check_variable_of_strategy(self, var: Any, method: str) -> None:
        _check_variable(var, method)
        for leaf in jax.tree.leaves(var.get_raw_value()):
            is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
            sharding = leaf.sharding if is_array else None
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
            f"strategy.extended.{method} takes an nnx.Variable or dj.Variable; got {type(var).__name__}."
        )


def _name(device: jax.Device) -> str:
    return f"{device.platform}:{device.id}"


T = TypeVar("T")


class V1Methods:
    """The deprecated methods of ``Strategy``."""

    def experimental_distribute_datasets_from_function(
        self: Any, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Older name of ``distribute_datasets_from_function``."""
        _warn(
            "experimental_distribute_datasets_from_function",
            "distribute_datasets_from_function(fn)",
        )
        return self.distribute_datasets_from_function(dataset_fn, options)

    def experimental_make_numpy_dataset(
        self, numpy_input: PyTree, session: Any = None
    ) -> ArrayDataset:
        """Makes a dataset of single examples: batch it, then distribute it.

        Args:
            numpy_input: a pytree of arrays with the examples along dim 0; lists of arrays are stacked.
            session: accepted for TensorFlow's signature.

        Raises:
            ValueError: the arrays of a list differ in shape, or what ``dj.data.from_arrays`` refuses.

        Source: https://www.tensorflow.org/api_docs/python/tf/compat/v1/distribute/Strategy#experimental_make_numpy_dataset
        """
        del session
        _warn("experimental_make_numpy_dataset", "dj.data.from_arrays(x).batch(256)", method=False)
        return from_arrays(_stacked(numpy_input))

    def make_dataset_iterator(self: Any, dataset: Any) -> V1Iterator:
        """Distributes a dataset of global batches, and returns an iterator over it.

        Source: https://www.tensorflow.org/api_docs/python/tf/compat/v1/distribute/Strategy#make_dataset_iterator
        """
        _warn("make_dataset_iterator", "distribute_dataset(ds)")
        return V1Iterator(self.distribute_dataset(dataset))

    def make_input_fn_iterator(
        self: Any,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> V1Iterator:
        """Distributes the batches of a function's datasets, and returns an iterator over them.

        Source: https://www.tensorflow.org/api_docs/python/tf/compat/v1/distribute/Strategy#make_input_fn_iterator
        """
        _warn("make_input_fn_iterator", "distribute_datasets_from_function(fn)")
        options = InputOptions(experimental_replication_mode=replication_mode)
        return V1Iterator(self.distribute_datasets_from_function(input_fn, options))

    def experimental_run(
        self: Any, fn: Callable[..., Any], input_iterator: Iterator[Any] | None = None
    ) -> PyTree:
        """Runs a step on the next element of an iterator, its only argument, or on none.

        Source: https://www.tensorflow.org/api_docs/python/tf/compat/v1/distribute/Strategy#experimental_run
        """
        _warn("experimental_run", "run(fn, args=(next(iterator),))")
        return self.run(fn, args=() if input_iterator is None else (next(input_iterator),))

    def unwrap(self: Any, value: PyTree) -> tuple[PyTree, ...]:
        """Older name of ``experimental_local_results``."""
        _warn("unwrap", "experimental_local_results(value)")
        return self.experimental_local_results(value)

    def update_config_proto(self, config_proto: T) -> T:
        """Returns the configuration unchanged: there is no session to configure."""
        _warn("update_config_proto", "no call at all: a mesh needs no session", method=False)
        return config_proto


class V1Iterator(Iterator[Any]):
    """An iterator over a distributed dataset that ``initialize`` restarts."""

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._iterator: Iterator[Any] | None = None

    def initialize(self) -> list[Any]:
        """Starts the next epoch; no operations are left to run, so the list is empty."""
        self._iterator = iter(self._dataset)
        return []

    def __next__(self) -> PyTree:
        """Returns the next element; the first call starts an epoch."""
        if self._iterator is None:
            self._iterator = iter(self._dataset)
        return next(self._iterator)

    get_next = __next__


def _stacked(tree: PyTree) -> PyTree:
    """Stacks each list of arrays along a new dim 0, as tf.data does."""

    def stack(node: Any) -> Any:
        try:
            return np.asarray(node) if isinstance(node, list) else node
        except ValueError:
            raise ArgumentError(
                "strategy.experimental_make_numpy_dataset stacks the arrays of a list, which must have one "
                f"shape; got {', '.join(str(np.shape(array)) for array in node)}."
            ) from None

    return jax.tree.map(stack, tree, is_leaf=lambda node: isinstance(node, list))


def _warn(older: str, modern: str, *, method: bool = True) -> None:
    text = f"strategy.{older} is deprecated. Use {'strategy.' if method else ''}{modern}."
    warn_user(text, DeprecationWarning)
