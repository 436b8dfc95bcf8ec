"""The base class of strategies: a mesh and a few options, from which everything else is derived."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, final

import jax
from flax import nnx
from jax.sharding import Mesh

from distribute_jax import _context, _frames
from distribute_jax._absent import getattr_with_hints
from distribute_jax._checks import refusing
from distribute_jax._errors import ContextError
from distribute_jax._mesh import DATA, num_replicas, replicas_per_device
from distribute_jax._messages import Kwargs, PyTree, StepFunction
from distribute_jax.cluster_resolver import ClusterResolver
from distribute_jax.collectives import ReduceOp
from distribute_jax.collectives._reduction import reduce_op as as_reduce_op
from distribute_jax.processes import job_of
from distribute_jax.program import ParameterDevice, Replicas, Rules, Runner, RunOptions
from distribute_jax.strategies._cross_replica import (
    gather_value,
    is_value,
    local_values,
    reduce_values,
)
from distribute_jax.strategies._devices import (
    check_axis_name,
    check_memory_kind,
    log_ignored_flags,
)
from distribute_jax.strategies._extended import StrategyExtended, V1Methods
from distribute_jax.strategies._input import InputMethods, values_from_function
from distribute_jax.strategies._model_methods import ModelMethods
from distribute_jax.strategies._scope import Scope


@dataclass(frozen=True)
class ValueContext:
    """The replica for which a ``value_fn`` makes a value.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/ValueContext
    """

    replica_id_in_sync_group: int = 0
    """The replica, 0 to N-1."""
    num_replicas_in_sync: int = 1
    """N."""


class Strategy(InputMethods, ModelMethods, V1Methods):
    """Where state is stored and where a step runs: a mesh of replicas.

    Pick one of the subclasses, build the model under :meth:`scope`, write the step for one replica,
    and :meth:`run` executes it on all. The results are those of one device, or an error says why not.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy
    """

    _resolver: ClusterResolver | None = None
    _keeps_local_values = True
    """False if the step of a replica cannot keep values that differ from those of other replicas."""

    if not TYPE_CHECKING:
        __getattr__ = getattr_with_hints("dj.Strategy")
        __reduce__ = refusing(
            "A strategy holds the devices of its process, so it cannot be pickled. Make one in each process "
            "that uses it."
        )

    def __init__(
        self,
        mesh: Mesh,
        *,
        steps_in_flight: int | None,
        parameter_device: ParameterDevice | None = None,
        shared: tuple[type[nnx.Variable[Any]], ...] = (),
        rules: Rules | None = None,
        shard_over: int | None = None,
        reshard_after_forward: bool | None = None,
        optimizer_memory_kind: str | None = None,
        axis_name: str = DATA,
    ) -> None:
        """Takes the devices along the mesh's ``"data"`` axis as replicas.

        Args:
            mesh: the devices; one replica for each index along ``"data"``.
            steps_in_flight: how many steps may be unfinished; None for no limit, or 2 on several CPU devices.
            parameter_device: where state is stored between steps; None for mirrored over the mesh.
            shared: the kinds of variables that are sharded over the replicas.
            rules: how the model is sharded over the devices of each replica.
            shard_over: how many consecutive devices shard the state; None for all.
            reshard_after_forward: as for ``FullyShardedStrategy``.
            optimizer_memory_kind: the memory that stores the state of optimizers between steps; None for
                the devices' default memory.
            axis_name: how code in ``run`` names the axis of the replicas, beside ``"data"``.
        """
        log_ignored_flags()
        name = type(self).__name__
        memory = f"{name}: optimizer_memory_kind"
        check_memory_kind(memory, optimizer_memory_kind, mesh.local_devices[0])
        self._mesh = mesh
        self._replicas = Replicas(
            mesh,
            parameter_device,
            shared,
            rules,
            name,
            shard_over,
            reshard_after_forward,
            optimizer_memory_kind,
        )
        self._axis_name = check_axis_name(axis_name, mesh, name)
        self._runner = Runner(self, self._replicas, steps_in_flight)

    @property
    @final
    def mesh(self) -> Mesh:
        """The devices as a ``jax.sharding.Mesh``; the replicas are along ``"data"``."""
        return self._mesh

    @property
    @final
    def axis_name(self) -> str:
        """How code in ``run`` names the axis of the replicas, as in ``nnx.BatchNorm(axis_name=…)``."""
        return self._axis_name

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas whose gradients are combined."""
        top = _frames.entered()
        # verify runs the step as one replica, and plan for any number of them.
        if top is not None and getattr(top.strategy, "stands_for", None) is self:
            return int(top.strategy.num_replicas_in_sync)
        return num_replicas(self._mesh)

    @property
    @final
    def cluster_resolver(self) -> Any:
        """Where the strategy got its cluster from, a ``ClusterResolver``; None for one process's devices."""
        return self._resolver

    @functools.cached_property
    def extended(self) -> StrategyExtended:
        """TensorFlow's lower-level interface, for authors of libraries."""
        return StrategyExtended(self)

    @final
    def __enter__(self) -> NoReturn:
        """Raises: the context is that of ``scope``."""
        raise ContextError("A strategy is entered by its scope: write `with strategy.scope():`.")

    @final
    def __exit__(self, *_: object) -> None:
        """Never called."""

    @final
    def scope(self) -> Scope:
        """Makes the strategy current for a ``with`` block, where models are built.

        Inside, ``get_strategy()`` is this strategy and arrays are made where it keeps state: replicated
        over its mesh, or on its parameter device. The scope may be entered again, also inside itself.

        Returns:
            A context manager that yields the strategy.

        Raises:
            RuntimeError: on entering inside ``run``, or inside another strategy's scope.

        Example:
            >>> import distribute_jax as dj
            >>> with dj.OneDeviceStrategy("cpu:0").scope() as strategy:
            ...     dj.get_strategy() is strategy
            True

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy#scope
        """
        return Scope(self, self._replicas)

    @final
    def run(
        self,
        fn: StepFunction,
        args: tuple[Any, ...] = (),
        kwargs: Kwargs | None = None,
        options: RunOptions | None = None,
    ) -> PyTree:
        """Runs a function written for one replica on all replicas, as one compiled program.

        Modules, optimizers and variables that ``fn`` gets in ``args`` or captures are updated in
        place. Where the step would leave state different on the replicas, tracing raises and names
        the variable and what it depends on.

        Args:
            fn: the step of one replica. It is traced once for each structure and shape.
            args: positional arguments. ``PerReplica`` values are split; every replica gets other arrays and
                numbers in full; bools, strings and other objects are constants.
            kwargs: keyword arguments, likewise.
            options: how to compile and check.

        Returns:
            What ``fn`` returned: arrays proved equal on all replicas as ``jax.Array``, others as
            ``PerReplica``; values that are not arrays, and bound objects, as they are.

        Raises:
            ValueError: the replicas would diverge, the arguments do not fit, padding leaks, or an array
                was captured that would go stale.
            RuntimeError: called inside ``run``, under another strategy's scope, or under a jit.

        Example:
            >>> import distribute_jax as dj
            >>> strategy = dj.OneDeviceStrategy("cpu:0")
            >>> float(strategy.run(lambda x: 2 * x, args=(3.0,)))
            6.0

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy#run
        """
        self._enter_program("strategy.run")
        _context.record_step_thread()
        return self._runner(fn, args, kwargs, options)

    @final
    def run_steps(
        self,
        fn: StepFunction,
        iterator: Iterator[PyTree],
        steps: int,
        options: RunOptions | None = None,
    ) -> PyTree:
        """Runs up to ``steps`` batches in one dispatch: they are scanned in one program.

        The numbers are those of ``steps`` calls of :meth:`run`. Where fewer batches are left, or one
        is partial, the steps run one by one, so remainders are exact. Where the iterator raises, the
        batches that came before are run and then its error is raised: the state is that of single
        steps, and no batch is lost.

        Args:
            fn: the step of one replica; a tuple from the iterator becomes its positional arguments,
                anything else its only one.
            iterator: yields distributed elements; pass the same one to each call.
            steps: how many batches to take at most.
            options: as for :meth:`run`.

        Returns:
            What ``fn`` returned, each array with a leading dim for the steps that ran (within each
            replica's value where values differ).

        Raises:
            StopIteration: no batch is left.
            ValueError: ``steps`` is not a positive int, ``iterator`` is not an iterator, or as for ``run``.

        Example:
            >>> import distribute_jax as dj, numpy as np
            >>> strategy = dj.OneDeviceStrategy("cpu:0")
            >>> batches = iter(strategy.distribute_dataset([np.ones(2), np.ones(2), np.ones(2)]))
            >>> strategy.run_steps(lambda x: x.sum(), batches, steps=2).tolist()
            [2.0, 2.0]
            >>> strategy.run_steps(lambda x: x.sum(), batches, steps=2).tolist()
            [2.0]
        """
        self._enter_program("strategy.run_steps")
        _context.record_step_thread()
        return self._runner.steps(fn, iterator, steps, options)

    _max_pending = 0
    """How many results of :meth:`_dispatch` may be pending."""

    def _dispatch(
        self, fn: StepFunction, batches: Iterator[PyTree], steps: int, options: RunOptions | None
    ) -> PyTree:
        """Runs up to ``steps`` batches of a training loop; their results may be pending, see ``_fetch``."""
        if steps == 1:
            return self.run(fn, args=next(batches), options=options)
        return self.run_steps(fn, batches, steps, options)

    def _fetch(self, results: PyTree) -> PyTree:
        """Waits for results of :meth:`_dispatch`."""
        return results

    def _sync_state(self, variables: Sequence[nnx.Variable[Any]] | None = None) -> None:
        """Writes the state after the dispatched steps back to variables; None waits for all steps first."""
        if variables is None:
            self._runner.check_skipped_steps()

    def _non_batched_results(self, fn: StepFunction, args: tuple[Any, ...]) -> list[str]:
        """Returns the names of results of a step that do not have one row for each example."""
        return self._runner.find_non_batched_results(fn, args)

    @final
    def reduce(self, reduce_op: ReduceOp | str, value: PyTree, axis: Any = None) -> PyTree:
        """Combines the replicas' values into one.

        Args:
            reduce_op: ``"sum"`` or ``"mean"``.
            value: a pytree of what ``run`` returned. A result that is equal on every replica counts
                once for each replica under SUM. In a job, what each process has for itself counts as
                its replicas' value, under SUM only if each process has one.
            axis: None combines the replicas' arrays element by element. An int or several also
                reduce those dims of each replica's array: SUM adds everything, MEAN divides by the
                total number of elements, so shares of different length are weighted correctly.

        Dtypes are those of ``ReplicaContext.all_reduce``: integers are added exactly, in the dtype of
        ``jnp.sum``, and their mean is floating.

        Returns:
            The pytree of combined arrays, on this process's first device, free to mix with any other.

        Raises:
            ValueError: another ``reduce_op``, shapes that do not fit, another host value under SUM, or
                a value that is not a number, such as a bool.
            RuntimeError: called inside ``run``.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy#reduce
        """
        self._enter_method("strategy.reduce")
        op = as_reduce_op(reduce_op)
        leaves, treedef = jax.tree.flatten(value, is_leaf=is_value)
        return jax.tree.unflatten(treedef, reduce_values(op, leaves, axis, self._mesh))

    @final
    def gather(self, value: PyTree, axis: int) -> PyTree:
        """Joins the replicas' values along a dim, in replica order.

        Args:
            value: a pytree of what ``run`` returned, each array with at least one dim.
            axis: the dim to join along; the replicas' arrays may differ in its length only.

        Returns:
            The pytree of joined arrays, on this process's first device.

        Raises:
            ValueError: a scalar, or shapes that do not fit.
            RuntimeError: called inside ``run``; use ``get_replica_context().all_gather`` there.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy#gather
        """
        if _frames.in_replica_context():
            raise ContextError(
                "strategy.gather was called inside a function given to strategy.run. Use "
                "dj.get_replica_context().all_gather(value, axis) there."
            )
        self._enter_method("strategy.gather")
        gather = functools.partial(gather_value, axis=axis, mesh=self._mesh)
        return jax.tree.map(gather, value, is_leaf=is_value)

    @final
    def experimental_local_results(self, value: PyTree) -> tuple[PyTree, ...]:
        """Returns this process's per-replica values as a tuple, in replica order.

        Args:
            value: a pytree of what ``run`` returned; a value that is not distributed is returned as it is.

        Returns:
            One pytree for each local replica; a single one where nothing in it is distributed.

        Raises:
            RuntimeError: called with a distributed value under the user's own jit.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy#experimental_local_results
        """
        leaves, treedef = jax.tree.flatten(value, is_leaf=is_value)
        parts = [local_values(leaf, self._mesh) for leaf in leaves]
        known = [part for part in parts if part is not None]
        count = len(known[0]) if known else 1
        return tuple(
            jax.tree.unflatten(
                treedef,
                [leaf if p is None else p[i] for leaf, p in zip(leaves, parts, strict=True)],
            )
            for i in range(count)
        )

    @final
    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], PyTree]
    ) -> PyTree:
        """Makes a per-replica value from a function of the replica.

        Args:
            value_fn: called once for each replica of this process with a ``ValueContext``; returns a
                pytree of arrays or numbers of one structure.

        Returns:
            The pytree, each leaf a per-replica value; plain arrays with one replica.

        Raises:
            ValueError: ``value_fn`` is not a function, or does not return a pytree of arrays and numbers.

        Example:
            >>> import distribute_jax as dj
            >>> strategy = dj.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> strategy.experimental_distribute_values_from_function(
            ...     lambda context: context.replica_id_in_sync_group)
            PerReplica:{0: array(0, dtype=int32), 1: array(1, dtype=int32)}

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy#experimental_distribute_values_from_function
        """
        self._enter_program("strategy.experimental_distribute_values_from_function")
        return values_from_function(value_fn, ValueContext, self._mesh)

    @final
    def barrier(self, name: str, timeout: float | None = None) -> None:
        """Waits until every process of the job has reached this call; no device takes part.

        A process that is alone does not wait.

        Args:
            name: what the processes wait for, the same text on all.
            timeout: seconds to wait; ``ClusterOptions.step_seconds`` if None.

        Raises:
            DeadlineExceededError: some processes did not call it in time; the message names them. It is a
                ``TimeoutError``, raised on every process that called it.
            ValueError: ``name`` is not a string, or ``timeout`` not a positive number.
            RuntimeError: called inside ``run``.

        Example:
            >>> import distribute_jax as dj
            >>> dj.get_strategy().barrier("the data is downloaded", timeout=60)
        """
        self._enter_program("strategy.barrier")
        job_of(self._mesh).barrier(name, timeout)

    def __copy__(self) -> NoReturn:
        """Refuses: two strategies with one identity would not know each other's variables."""
        raise ContextError(
            f"{self!r} cannot be copied with copy.copy. Use the strategy itself, or make a new one."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        """Makes a new strategy of the same kind on the same devices."""
        memo[id(self)] = new = object.__new__(type(self))
        vars(new).update(vars(self))
        vars(new).pop("extended", None)
        new._runner = Runner(new, self._replicas, self._runner.steps_in_flight)
        return new

    def __repr__(self) -> str:
        names = ", ".join(map(str, self._mesh.devices.flat))
        sharded = ", shard_optimizer_state=True" if self._replicas.shared == (nnx.OptState,) else ""
        over = self._replicas.shard_over
        groups = "" if over is None else f", shard_over={over}"
        reshard = self._replicas.reshard_after_forward
        groups += "" if reshard is None else f", reshard_after_forward={reshard}"
        each = replicas_per_device(self._mesh)
        several = f", replicas_per_device={each}" if each > 1 else ""
        return f"{type(self).__name__}([{names}]{sharded}{groups}{several})"

    def _enter_program(self, name: str) -> None:
        """Checks the context of a method that starts a program or makes data."""
        _context.require_method(self, name, starts_program=True)

    def _enter_method(self, name: str) -> None:
        _context.require_method(self, name)
