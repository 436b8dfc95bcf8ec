"""``create``, ``placement`` and ``plan``: making, placing and planning a model before a step runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar, final

import flax
import jax
import jax.extend.core as jex_core
from flax import nnx

from distribute_jax._errors import ArgumentError, ProcessesDifferError
from distribute_jax._messages import Kwargs, StepFunction, error_text, is_array, leaf_text
from distribute_jax.processes import job_of
from distribute_jax.program import (
    Path,
    PlacedLeaf,
    PlainArray,
    Replicas,
    RunOptions,
    StepPlan,
    modules_of,
)

M = TypeVar("M")


class ModelMethods:
    """The methods of ``Strategy`` that make, place and plan a model."""

    @final
    def create(self: Any, make: Callable[[], M]) -> M:
        """Makes a model whose arrays are created where they are stored, so that no device holds all of it.

        The numbers are those of the same function under :meth:`scope`, to rounding where XLA fuses an
        initializer differently. Use it for a model that does not fit on one device.

        Args:
            make: returns a module, a ``TrainState``, or a pytree of them, such as ``(model, optimizer)``. It
                is traced: its arrays come from ``jax.numpy`` and ``nnx.Rngs``.

        Returns:
            What ``make`` returned.

        Raises:
            ValueError: ``make`` is not a function that returns a module, reads numbers of what it
                computes, as ``float(x)``, or uses an ``nnx.Rngs`` that was made before.
            RuntimeError: called inside ``run``, or the processes of a job would make different models.

        Example:
            >>> import distribute_jax as dj
            >>> from flax import nnx
            >>> strategy = dj.FullyShardedStrategy(["cpu:0", "cpu:1"])
            >>> layer = strategy.create(lambda: nnx.Linear(64, 32, rngs=nnx.Rngs(0)))
            >>> tuple(layer.kernel.sharding.spec)
            (None, 'data')
        """
        self._enter_program("strategy.create")
        if isinstance(make, nnx.Pytree):
            raise ArgumentError(_NOT_A_FACTORY.format(got=f"{make!r:.60}"))
        with self.scope():
            return _created(make, self._replicas)

    @final
    def placement(self: Any, model: Any) -> list[PlacedLeaf]:
        """Returns how the devices divide the state of a model, before anything runs.

        Args:
            model: a module, an optimizer, a ``TrainState``, or a pytree of them, in ``tuple``, ``list`` or
                ``dict``. A ``jax.ShapeDtypeStruct``, as of ``jax.eval_shape``, stands for an array.

        Returns:
            For each array, by path: ``path``, ``shape`` of the whole array, ``spec``, the ``PartitionSpec``
            over :attr:`mesh` (empty where each device has the whole), and ``why``.

        Raises:
            ValueError: ``model`` holds no state.

        Example:
            >>> import distribute_jax as dj
            >>> from flax import nnx
            >>> layer = nnx.Linear(64, 32, use_bias=False, rngs=nnx.Rngs(0))
            >>> tuple(dj.FullyShardedStrategy(["cpu:0", "cpu:1"]).placement(layer)[0].spec)
            (None, 'data')
        """
        is_leaf = jax.tree_util.treedef_is_leaf(jax.tree.structure(model))
        nest = jax.tree.map(_with_shape, model, is_leaf=lambda x: isinstance(x, _OF_FLAX))
        leaves = [] if is_leaf else _leaves_of(nest, nnx.state(nest))
        if not (state := [(v, path) for v, path in leaves if v is not None]):
            raise ArgumentError(
                f"strategy.placement got {leaf_text(model)}, which is not a pytree of variables and arrays. "
                "Pass the module, or (module, optimizer); of a dj.Model its module."
            )
        if self._replicas.rules and all(isinstance(v, nnx.OptState) for v, _ in state):
            raise ArgumentError(
                "strategy.placement: by rules the state of an optimizer is divided as its parameters. Pass "
                "both: strategy.placement((model, optimizer))."
            )
        return self._replicas.rows(*zip(*state, strict=True))

    @final
    def plan(
        self: Any,
        step: StepFunction,
        args: tuple[Any, ...] = (),
        kwargs: Kwargs | None = None,
        options: RunOptions | None = None,
        *,
        replicas: int | None = None,
    ) -> StepPlan:
        """Compiles a step for any number of replicas, and returns what it needs; nothing runs.

        The variables that the step reaches keep their values and their places. The devices of the
        replicas need not exist: XLA compiles for the kind of device that the strategy has.

        Args:
            step: the step of one replica, as for :meth:`run`.
            args: positional arguments. A batch keeps its size for each replica; a ``jax.ShapeDtypeStruct``
                stands for an array.
            kwargs: keyword arguments, likewise.
            options: how to compile and check.
            replicas: the number of replicas; those of the strategy if None.

        Returns:
            Bytes on each device, collectives and placements, which ``print`` shows as a table.

        Raises:
            ValueError: as for :meth:`run`; or ``replicas`` is not a positive int.

        Example:
            >>> import distribute_jax as dj, jax.numpy as jnp
            >>> strategy = dj.OneDeviceStrategy("cpu:0")
            >>> plan = strategy.plan(lambda x: 2 * x, args=(jnp.ones(256),), replicas=64)
            >>> plan.replicas, plan.argument_bytes
            (64, 1024)
        """
        self._enter_program("strategy.plan")
        return self._runner.plan(step, args, kwargs, options, replicas)


_OF_FLAX = (nnx.Pytree, nnx.Variable)


def _with_shape(leaf: Any) -> Any:
    """Returns a leaf that ``nnx.state`` keeps, in place of a shape."""
    return PlainArray(leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf


def _created(make: Callable[[], M], replicas: Replicas) -> M:
    """Makes modules by one compiled program that computes each array where it is stored."""
    parts: list[Any] = []

    def leaves() -> list[Any]:
        model = make()
        _mark_traced_attributes(model)
        graph, state = nnx.split(model)
        flat, tree = jax.tree.flatten(state)
        if not flat or not all(map(is_array, flat)):
            raise ArgumentError(_NOT_A_FACTORY.format(got=f"one that returns {model!r:.60}"))
        named = _leaves_of(model, state)
        variables = [v for v, _ in named if v is not None]
        paths = [path for v, path in named if v is not None]
        shardings = iter(replicas.shardings(variables, lambda: paths))
        parts[:] = graph, tree, [
            (next(shardings) if v is not None else None) or replicas.state(getattr(leaf, "shape", ()))
            for v, _ in named
            for leaf in ([v] if v is None else jax.tree.leaves(v))
        ]  # fmt: skip
        return flat

    try:
        closed = jax.make_jaxpr(leaves)()
    except jax.errors.JAXTypeError as error:
        raise ArgumentError(_NOT_TRACED.format(reason=error_text(error))) from error
    except flax.errors.TraceContextError as error:
        raise ArgumentError(_CHANGES_OUTER_STATE) from error
    graph, tree, shardings = parts
    lowered = jax.jit(jex_core.jaxpr_as_fun(closed), out_shardings=shardings).lower()
    _check_same_program(lowered, replicas)
    return nnx.merge(graph, jax.tree.unflatten(tree, lowered.compile()()))


def _mark_traced_attributes(nest: Any) -> None:
    """Marks arrays that modules hold as plain attributes: Flax does so itself, except while it is traced."""
    for root in modules_of(nest).values():
        for _, node in list(nnx.iter_graph(root)):
            for key, value in list(vars(node).items()) if isinstance(node, nnx.Pytree) else ():
                if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(value)):
                    setattr(node, key, nnx.data(value))


def _leaves_of(nest: Any, state: Any) -> list[tuple[nnx.Variable[Any] | None, Path]]:
    """Returns the variables of a pytree and their paths.

    An array outside of modules counts as a parameter; for one that a module holds beside its variables there
    is None.
    """
    roots, variables = modules_of(nest), []
    for keys, value in jax.tree.leaves_with_path(
        state, is_leaf=lambda x: isinstance(x, nnx.Variable)
    ):
        path = tuple(key.key for key in keys)
        # Paths begin at the module, whatever container it is in.
        inside = next((path[i:] for i in range(len(path) + 1) if path[:i] in roots), None)
        variable = value if isinstance(value, nnx.Variable) else PlainArray(value)
        variables.append(
            (variable if inside is None or variable is value else None, inside or path)
        )
    return variables


def _check_same_program(lowered: Any, replicas: Replicas) -> None:
    """Raises unless all processes of the job make the same model."""
    job = job_of(replicas.mesh)
    if job.is_alone:
        return
    digest = hashlib.sha256(lowered.as_text().encode()).hexdigest()
    if len(set(job.exchange("strategy.create", digest))) > 1:
        raise ProcessesDifferError(
            "The processes of the job make different models in strategy.create. Build the same model in "
            "every process, from the same seed, for example nnx.Rngs(0)."
        )


_NOT_A_FACTORY = """\
strategy.create: make must be a function that returns a module, such as lambda: Model(nnx.Rngs(0)); \
got {got}."""
_CHANGES_OUTER_STATE = """\
strategy.create: make changes an nnx.Rngs or a module that was made before it. Make it in the function: \
lambda: Model(nnx.Rngs(0))."""
_NOT_TRACED = """\
strategy.create computes all state in one compiled program, and the function that makes the model reads \
numbers that are only known when it runs: {reason}
Make arrays with jax.numpy and nnx.Rngs, or make the model under strategy.scope(), whole on each device."""
