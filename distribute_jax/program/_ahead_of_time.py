"""Plans: the memory and collectives of a step for any number of replicas, compiled without running it.

The step is built as by ``run``, with an abstract mesh, and abstract values for state and batch. XLA compiles
it for the planned number of devices, with this process's first device in place of each: no other is needed.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from distribute_jax._checks import check_int, check_optional
from distribute_jax._errors import ArgumentError, DistributeError, LoweringError
from distribute_jax._jax_private import adopt, write_raw
from distribute_jax._mesh import (
    num_replicas,
    outside_mesh,
    share_axis,
    split_sharding,
    with_replicas,
)
from distribute_jax._messages import size_text
from distribute_jax._values import Layout, PerReplica
from distribute_jax.program._aggregation import keeps_own_values
from distribute_jax.program._arguments import Arguments, check_function
from distribute_jax.program._binding import Binding, copy_contents, restore
from distribute_jax.program._hlo import Collective, collectives_of
from distribute_jax.program._lowerings import AheadOfTime
from distribute_jax.program._options import RunOptions
from distribute_jax.program._placement import PlacedLeaf, Replicas, data_dim
from distribute_jax.program._program import build
from distribute_jax.program._state_placement import check_arrays
from distribute_jax.program._trace import Call, StandIn, abstract, created_again_error, global_value
from distribute_jax.program._trace_errors import explain_compile_errors, step_name


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What a step needs on each device, known from compiling it; ``str`` shows it as a table.

    Bytes are those of one device, as XLA counts them for the platform that it was compiled for.
    """

    step: str
    """The name of the step's function."""
    strategy: str
    """The strategy's repr without its devices."""
    replicas: int
    """The number of replicas that it was compiled for."""
    platform: str
    """The platform, such as ``"cpu"``; temporaries and collectives depend on it."""
    state_bytes: Mapping[str, int]
    """Bytes of the variables that the step reaches: ``parameters``, ``optimizer`` and ``other``."""
    argument_bytes: int
    """Bytes of state and batch."""
    temporary_bytes: int
    """Bytes of activations, gradients and gathered arrays."""
    output_bytes: int
    """Bytes of new state and results."""
    alias_bytes: int
    """Bytes of outputs that reuse the memory of arguments."""
    flops: float
    """Floating-point operations of one device; the body of a loop counts once."""
    collectives: tuple[Collective, ...]
    """The collectives, with the bytes of each kind."""
    placements: tuple[PlacedLeaf, ...]
    """The placement of each array of state, as from ``strategy.placement``."""
    seconds: Mapping[str, float]
    """Seconds to ``trace``, ``lower`` and ``compile`` the step."""

    @property
    def device_bytes(self) -> int:
        """The memory that the step needs on each device: arguments, temporaries and new outputs."""
        new = self.output_bytes - self.alias_bytes
        return self.argument_bytes + self.temporary_bytes + new

    def __str__(self) -> str:
        state = ", ".join(f"{kind} {size_text(size)}" for kind, size in self.state_bytes.items())
        seconds = ", ".join(f"{stage} {time:.1f}" for stage, time in self.seconds.items())
        rows = [
            ("state", f"{size_text(sum(self.state_bytes.values()))}: {state}"),
            ("arguments", size_text(self.argument_bytes)),
            ("temporaries", size_text(self.temporary_bytes)),
            ("outputs", f"{size_text(self.output_bytes)}, {size_text(self.alias_bytes)} of it in place"),
            ("total", size_text(self.device_bytes)),
            ("flops", f"{self.flops:.3g}"),
            *((c.kind + " in a loop" * c.in_loop, f"{c.number}: {size_text(c.bytes)}")
              for c in self.collectives),
            ("state divided", _divided(self.placements)),
            ("seconds", seconds),
        ]  # fmt: skip
        number = f"{self.replicas} replica" + "s" * (self.replicas > 1)
        title = f"{self.step}: {self.strategy}, {number}; on each {self.platform} device"
        return "\n".join([title, *_aligned(rows)])


@dataclass(frozen=True)
class PlanTable:
    """Plans of one step under several strategies and numbers of replicas; ``str`` shows them in rows."""

    plans: tuple[StepPlan, ...]
    """The plans, by strategy and then by number of replicas."""
    device_memory_bytes: int | None = None
    """The memory of one device, if it was given."""
    refused: tuple[DistributeError, ...] = ()
    """Why there is no plan for the other strategies and numbers of replicas."""

    @property
    def fitting(self) -> tuple[StepPlan, ...]:
        """The plans that fit in the memory of a device; all of them if it was not given."""
        memory = self.device_memory_bytes
        return tuple(p for p in self.plans if memory is None or p.device_bytes <= memory)

    def __str__(self) -> str:
        head = ("strategy", "replicas", "state", "arguments", "temporaries", "total", "collectives")
        rows = [head, *map(_row, self.plans)]
        if self.device_memory_bytes is not None:
            fits = [plan in self.fitting for plan in self.plans]
            marks = [
                f"fits {size_text(self.device_memory_bytes)}",
                *("yes" if f else "no" for f in fits),
            ]
            rows = [(*row, mark) for row, mark in zip(rows, marks, strict=True)]
        reasons = [f"no plan: {str(error).splitlines()[0]}" for error in self.refused]
        return "\n".join([*_aligned(rows), *reasons])


def _row(plan: StepPlan) -> tuple[str, ...]:
    sizes = (
        sum(plan.state_bytes.values()), plan.argument_bytes, plan.temporary_bytes, plan.device_bytes,
        sum(collective.bytes for collective in plan.collectives),
    )  # fmt: skip
    return plan.strategy, str(plan.replicas), *map(size_text, sizes)


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(map(str.ljust, row, widths)).rstrip()


def _divided(placements: Sequence[PlacedLeaf]) -> str:
    whole = Counter(leaf.why for leaf in placements if not leaf.spec)
    reasons = "".join(f"; {why}: {number}" for why, number in whole.items())
    return f"{len(placements) - whole.total()} of {len(placements)} arrays{reasons}"


def plan(
    step: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    options: RunOptions | None = None,
    *,
    strategies: Iterable[Any],
    replicas: Iterable[int] = (8, 64, 1024),
    device_memory_bytes: int | None = None,
) -> PlanTable:
    """Plans a step under several strategies and numbers of replicas, and runs none of them.

    Args:
        step: the step of one replica, as for ``strategy.run``.
        args: positional arguments; a batch keeps its size for each replica.
        kwargs: keyword arguments.
        options: how to compile.
        strategies: the strategies to compare; a batch may be distributed by any of them.
        replicas: the numbers of replicas; one device is enough to plan for any number.
        device_memory_bytes: the memory of one device, to see in the table what fits.

    Returns:
        The plans, which ``print`` shows as a table.

    Raises:
        ValueError: as for ``strategy.plan``, if no strategy can run it with any of these numbers; or an
            argument is invalid.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> strategy = dj.OneDeviceStrategy("cpu:0")
        >>> table = dj.plan(lambda x: x * 2, (jnp.ones(256),), strategies=[strategy], replicas=(1, 64))
        >>> [plan.argument_bytes for plan in table.plans]
        [1024, 1024]
    """
    strategies = _listed("strategies", strategies, "dj.MirroredStrategy()")
    for strategy in strategies:
        if isinstance(strategy, type) or not hasattr(strategy, "plan"):
            raise ArgumentError(f"dj.plan: {strategy!r:.60} in strategies is not a strategy.")
    replicas = _listed("replicas", replicas, "8, 64")
    check_optional(check_int, "dj.plan: device_memory_bytes", device_memory_bytes)
    planned = [
        lambda number, strategy=strategy: strategy.plan(
            step, args, kwargs, options, replicas=number
        )
        for strategy in strategies
    ]
    return plan_table(planned, replicas, device_memory_bytes)


def _listed(name: str, values: Any, example: str) -> list[Any]:
    """Returns an argument that must be a list of at least one value."""
    if (
        isinstance(values, (str, Mapping))
        or not isinstance(values, Iterable)
        or not (listed := list(values))
    ):
        raise ArgumentError(
            f"dj.plan: {name} must be a non-empty list, as [{example}]; got {values!r:.60}."
        )
    return listed


def plan_table(
    planned: Iterable[Callable[[int | None], StepPlan]],
    numbers: Iterable[int | None],
    device_memory_bytes: int | None,
) -> PlanTable:
    """Plans for each number of replicas; raises only if every plan is refused."""
    plans, refused, numbers = [], [], list(numbers)
    for plan_for, number in itertools.product(planned, numbers):
        try:
            plans.append(plan_for(number))
        except DistributeError as error:
            refused.append(error)
    if refused and not plans:
        raise refused[0]
    return PlanTable(tuple(plans), device_memory_bytes, tuple(refused))


def plan_step(
    strategy: Any,
    replicas: Replicas,
    fn: Callable[..., Any],
    arguments: Arguments,
    options: RunOptions,
    number: int | None,
) -> StepPlan:
    """Compiles a step for a number of replicas, without changing any variable."""
    if options.lowering == "pmap":
        raise LoweringError(
            'strategy.plan: RunOptions(lowering="pmap") compiles only when it runs. Leave it out.'
        )
    check_function(fn)
    if number is None:
        number = num_replicas(replicas.mesh)
    else:
        number = check_int("replicas", number, below=_MOST_REPLICAS)
    mesh = with_replicas(replicas.mesh, number)
    local = [d for d in replicas.mesh.devices.flat if d.process_index == jax.process_index()]
    data = [_on_replicas(value, mesh) for value in arguments.data]
    pairs = zip(data, arguments.shardings or [None] * len(data), strict=True)
    abstract_replicas = replace(replicas, mesh=mesh, parameter_device=None)
    over = abstract_replicas.state_mesh
    kept = tuple(to and _kept_over(to, value, over) for value, to in pairs)
    arguments = replace(arguments.with_data(data), shardings=kept)
    binding = Binding(fn, arguments)
    contents = copy_contents(binding.containers())
    try:
        with outside_mesh(), explain_compile_errors(step_name(fn)):
            for may_create in (True, False):
                check_arrays(binding, jax.ShapeDtypeStruct)
                ahead = AheadOfTime(local[0])
                call = Call(fn, binding, arguments, StandIn(strategy, number), mesh)
                program = build(call, options, abstract_replicas, ahead)
                if not program.traced.created:
                    break
                if not may_create:
                    raise created_again_error(program.traced.created)
                _give_shapes(program.traced.created, number)
                binding = Binding(fn, arguments)
            return _planned(strategy, call, ahead, abstract_replicas)
    finally:
        restore(contents)


def _on_replicas(value: Any, mesh: Any) -> Any:
    """Returns an abstract batch for the replicas of a mesh, with the same size for each."""
    if not isinstance(value, PerReplica):
        return value
    number, shape = num_replicas(mesh), value.part_shape
    joined = value.layout is Layout.JOINED
    shape = (number * shape[0], *shape[1:]) if joined else (number, *shape)
    array: Any = jax.ShapeDtypeStruct(shape, value.dtype)
    return PerReplica(array, mesh, layout=value.layout, counts=value.counts)


def _kept_over(to: NamedSharding, value: Any, mesh: Any) -> NamedSharding | None:
    """Returns the sharding of an argument over a mesh of another size."""
    axes, axis = list(to.spec), share_axis(mesh)
    if (dim := data_dim(to.spec)) is not None:
        axes[dim] = None if value.shape[dim] % mesh.shape[axis] else axis
    return NamedSharding(mesh, PartitionSpec(*axes))


def _give_shapes(created: Sequence[nnx.Variable[Any]], number: int) -> None:
    """Replaces the initial values of variables that the step created by their shapes."""
    adopt(created)
    for variable in created:
        raw = abstract(variable.get_raw_value())
        if keeps_own_values(variable):
            raw = jax.ShapeDtypeStruct((number, *raw.shape), raw.dtype)
        write_raw([variable], [raw])


def _planned(strategy: Any, call: Call, ahead: AheadOfTime, replicas: Replicas) -> StepPlan:
    binding = call.binding
    placements = replicas.rows(binding.variables, binding.paths())
    rows = iter(placements)
    state = Counter({"parameters": 0, "optimizer": 0, "other": 0})
    for variable in binding.variables:
        is_stacked = keeps_own_values(variable)
        leaves = jax.tree.leaves(global_value(variable, call.mesh))
        for leaf, row in zip(leaves, rows, strict=False):
            sharding = (
                split_sharding(call.mesh)
                if is_stacked
                else NamedSharding(replicas.state_mesh, row.spec)
            )
            local = sharding.shard_shape(jnp.shape(leaf))
            state[_kind(variable)] += prod(local) * getattr(leaf, "dtype", jnp.int32.dtype).itemsize
    memory = ahead.compiled.memory_analysis()
    times = zip(("trace", "lower", "compile"), itertools.pairwise(ahead.times), strict=True)
    return StepPlan(
        step=step_name(call.fn),
        strategy=re.sub(r"\[.*?\](, )?", "", repr(strategy)).removesuffix("()"),
        replicas=num_replicas(call.mesh),
        platform=ahead.device.platform,
        state_bytes=dict(state),
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        flops=float((ahead.compiled.cost_analysis() or {}).get("flops", 0.0)),
        collectives=tuple(collectives_of(ahead.compiled.as_text())),
        placements=tuple(placements),
        seconds={stage: end - start for stage, (start, end) in times},
    )


def _kind(variable: nnx.Variable[Any]) -> str:
    if isinstance(variable, nnx.OptState):
        return "optimizer"
    return "parameters" if isinstance(variable, nnx.Param) else "other"


_MOST_REPLICAS = 1 << 20
"""JAX takes 10 s to make a mesh of so many devices, and minutes for ten times as many."""
