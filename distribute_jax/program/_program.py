"""A compiled step: its trace, plan and program, its flat inputs and outputs, its time and its errors."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from distribute_jax._errors import (
    DeadlineExceededError,
    LoweringError,
    StepFailedError,
    log_once,
)
from distribute_jax._jax_private import read_raw
from distribute_jax._mesh import DATA, cores_per_replica, replicas_per_device
from distribute_jax._messages import error_text, listed
from distribute_jax.processes import describe_processes
from distribute_jax.program._jaxprs import equations, inputs_of, line, name, variables
from distribute_jax.program._lowerings import (
    COMPILERS,
    AheadOfTime,
    Compile,
    FlatStep,
    by_equation,
    compile_for_mesh,
    flat_step,
    in_one_equation,
    returned_arguments,
    with_token,
)
from distribute_jax.program._options import RunOptions
from distribute_jax.program._placement import ParameterDevice, Replicas, data_dim, share_sharding
from distribute_jax.program._plan import Plan, plan
from distribute_jax.program._replica_scan import ReplicaScan, scan_replicas
from distribute_jax.program._results import Results
from distribute_jax.program._sharded_update import SplitStep, lower_split
from distribute_jax.program._state_placement import on_parameter_device
from distribute_jax.program._trace import Call, Traced, trace


class PreparationClock:
    """Adds up the seconds of preparation; ``wait`` waits for the steps that were dispatched before."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.seconds = 0.0
        self._wait = wait
        self._runs = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Makes this the clock of the block."""
        token = _clock.set(self)
        try:
            yield
        finally:
            _clock.reset(token)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measures the block, unless it is inside another such block."""
        if self._runs:
            yield
            return
        self._wait()  # the time of earlier steps is not preparation
        self._runs, start = True, time.perf_counter()
        try:
            yield
        finally:
            self._runs = False
            self.seconds += time.perf_counter() - start


_clock: ContextVar[PreparationClock | None] = ContextVar("distribute_jax_clock", default=None)


@contextmanager
def preparing() -> Iterator[None]:
    """Marks work that is done once for a program, for the current clock."""
    clock = _clock.get()
    with nullcontext() if clock is None else clock.running():
        yield


@dataclass(eq=False)
class Program:
    """A compiled step. It serves every binding of the same structure."""

    traced: Traced
    plan: Plan
    compiled: Callable[..., list[Any]]
    order: tuple[int, ...]
    """The flat inputs in the order in which the compiled program takes them."""
    donated_state: int
    """The number of donated inputs, the first ones, that are state that the step writes."""
    read_only: tuple[int, ...]
    """Variables that are only read."""
    arrays: tuple[int, ...]
    """Captured arrays that are read."""
    simple: bool
    """True if every variable holds an array, not a pytree of arrays."""
    mesh: Mesh
    step: FlatStep
    """The function that was compiled."""
    compile: Compile
    """The function that compiled it, and compiles several steps of it."""
    has_token: bool
    """True if its last output is neither state nor a result, and only there to be waited for."""
    parameter_device: ParameterDevice | None
    """Where state is stored between steps, if not on the mesh; the program moves its inputs itself."""
    scanned: dict[int, Callable[..., list[Any]]] = field(default_factory=dict)
    """Programs of several steps, by their number."""
    padding: Any = None
    """The ``PaddingCheck``, once a partial batch was met."""
    compared: dict[Any, Program] = field(default_factory=dict)
    """Programs of the same step for ``verify``: on one device, by the shapes of their data, and with equal
    masks, by None."""
    verified: set[str] = field(default_factory=lambda: {"off"})
    """The values of ``RunOptions(verify=…)`` that require no further comparison with one device."""
    times_compared: int = 0
    """The number of comparisons with one device."""
    per_example: tuple[Any, ...] | None = None
    """For each array of the result: True, False, or why it is not known."""

    owners: dict[tuple[int, ...], tuple[weakref.ref[Any], ...]] = field(default_factory=dict)
    """The modules of each binding, by their ids; a binding without modules never dies."""

    def add_owners(self, owners: tuple[weakref.ref[Any], ...]) -> None:
        self.owners[tuple(id(ref()) for ref in owners)] = owners

    def is_alive(self) -> bool:
        """True if all modules of at least one binding are alive."""
        dead = [key for key, refs in self.owners.items() if any(ref() is None for ref in refs)]
        for key in dead:
            del self.owners[key]
        return bool(self.owners)

    @property
    def results(self) -> Results:
        """The structure of what the step returns."""
        return self.traced.results


def build(
    call: Call,
    options: RunOptions,
    replicas: Replicas,
    ahead: AheadOfTime | None = None,
    traced: Traced | None = None,
) -> Program:
    """Traces, proves, lowers and compiles a step; ``ahead`` of time if the mesh is abstract."""
    compile_, arrays = COMPILERS[options.lowering], call.binding.captured_arrays()
    is_jit = options.lowering == "shard_map"
    traced = traced or trace(call)
    decided = plan(call, traced, options)
    sharded = replicas.shardings(call.binding.variables, call.binding.paths)
    sharded = (*sharded, *(None,) * traced.sizes.arrays, *call.arguments.shardings)
    shares = any(to is not None and data_dim(to.spec) is not None for to in sharded)
    several = replicas_per_device(call.mesh) > 1
    order, read_only, read_arrays = input_order(traced)
    evaluate = in_one_equation if is_jit and not shares and not several else by_equation
    step = flat_step(call, traced, decided, order, arrays, evaluate, sharded)
    donated_state = 0
    if options.donate_state and is_jit and _can_donate(traced):
        donated_state = len(traced.old_inputs)
    arguments = _donated_arguments(call, traced, step) if options.donate_args and is_jit else []
    step = replace(
        step,
        donated=(*range(donated_state), *arguments),
        ahead=ahead,
        reshard_after_forward=replicas.reshard_after_forward,
    )
    if replicas.divides_arguments:
        _log_replicated_arguments(call, traced, replicas.state_mesh)
    if replicas.parameter_device is not None:
        compile_ = on_parameter_device(compile_, replicas.parameter_device)
    _check_callbacks(traced, call.mesh, replicas.state_mesh if shares else call.mesh)
    if shares:
        step = lower_split(step, ReplicaScan if several else SplitStep)
        compile_ = compile_for_mesh
    elif several:
        step = scan_replicas(step)
    has_token = len(step.shardings.mirrored) == step.shardings.state
    if has_token:
        step = with_token(step)
    compiled = compile_(step)
    inputs = read_raw([call.binding.variables[i] for i in (*traced.written, *read_only)])
    leaf = jax.tree.structure(0)
    return Program(
        traced, decided, compiled, order, donated_state, read_only, read_arrays,
        simple=jax.tree_util.all_leaves(inputs) and all(tree == leaf for tree in traced.written_trees),
        mesh=call.mesh, step=step, compile=compile_,
        parameter_device=replicas.parameter_device, has_token=has_token,
    )  # fmt: skip


def _check_callbacks(traced: Traced, mesh: Mesh, state_mesh: Mesh) -> None:
    """Raises for callbacks that return arrays, with automatic axes, two meshes or in a plan: JAX has none."""
    is_plan, where = isinstance(mesh, AbstractMesh), "on replicas of several devices"
    if state_mesh != mesh:
        where = "with shard_over"
    elif not is_plan and (cores_per_replica(mesh) == 1 or mesh.shape[DATA] == 1):
        return
    text = _PLANNED_CALLBACK if is_plan else _CALLBACK
    for eqn in equations(traced.jaxpr.jaxpr):
        if name(eqn) in ("pure_callback", "io_callback"):
            raise LoweringError(text.format(what=name(eqn), line=line(eqn), where=where))


_CALLBACK = """\
{what} at {line} cannot run {where}: JAX does not compile it there.
Compute what it returns before the step and pass it in args; to look at values use jax.debug.callback. A \
strategy without shard_over, with one device for each replica, runs it."""

_PLANNED_CALLBACK = """\
strategy.plan: {what} at {line} cannot be planned, since JAX compiles it only for devices that exist.
Plan a step that takes in args what it returns; jax.debug.callback can be planned."""


def _log_replicated_arguments(call: Call, traced: Traced, mesh: Mesh) -> None:
    """Logs replicated state among the arguments that could be sharded over the replicas."""
    first = traced.sizes.first_data
    shardings = (*call.arguments.shardings, *(None,) * len(call.arguments.data))
    replicated = {
        i: traced.input_names[i]
        for _, i in returned_arguments(call, traced)
        if i >= first  # else it is a variable
        and shardings[i - first] is None
        and share_sharding(call.arguments.data[i - first], mesh)
    }
    if replicated:
        log_once(_REPLICATED_ARGUMENTS, len(replicated), listed(list(replicated.values()), 3))


_REPLICATED_ARGUMENTS = """\
%s arrays of state that the step takes as arguments, and returns, are replicated on each device:
%s
Make them with strategy.create(lambda: TrainState.create(...)), so that the replicas divide them."""


def input_order(traced: Traced) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Returns the flat inputs in the order of the program, the variables only read, and the arrays read.

    Written variables come first, then those that are only read, arrays, data and counts.
    """
    jaxpr, sizes, written = traced.jaxpr.jaxpr, traced.sizes, set(traced.written)
    read_or_returned = set(variables([*inputs_of(jaxpr.eqns), *jaxpr.outvars]))
    used = [v in read_or_returned for v in jaxpr.invars]
    others = (i for i in range(len(traced.input_starts) - 1) if i not in written)
    read_only = tuple(i for i in others if any(used[k] for k in traced.inputs_of(i)))
    read_arrays = tuple(
        i for i in range(sizes.arrays) if used[sizes.state + i] or i in traced.constant_arrays
    )
    state = [k for i in (*traced.written, *read_only) for k in traced.inputs_of(i)]
    order = (*state, *(sizes.state + i for i in read_arrays), *range(sizes.first_data, len(used)))
    return order, read_only, read_arrays


def _can_donate(traced: Traced) -> bool:
    """True if the new state can reuse the memory of the old: all of it or none."""
    state = traced.jaxpr.out_avals[: len(traced.old_inputs)]
    keys = any(jnp.issubdtype(aval.dtype, jax.dtypes.extended) for aval in state)
    return not keys and traced.keeps_types()


def _donated_arguments(call: Call, traced: Traced, step: FlatStep) -> list[int]:
    """Returns the inputs that are mirrored arrays in the arguments."""
    data = call.arguments.data
    first = len(step.avals) - traced.sizes.counts - len(data)
    return [
        at
        for at, value in enumerate(data, first)
        if not step.shardings.split[at] and isinstance(value, jax.Array)
    ]


_LOST = """\
The compiled step failed after its state had been donated to it, so these values are lost:
{lines}
The reason: {reason}
Restore the state from a checkpoint or a dj.snapshot. To find the failure, use \
RunOptions(donate_state=False), which keeps the state."""

_INTACT = """\
The compiled step failed while it ran; the state is as before the call.
The reason: {reason}"""

_NOT_FINITE = """\
{step} computed a {kind}, which jax.debug_nans or jax.debug_infs forbids. {state}
To find the line, call the function itself on the batch of one replica, without strategy.run: there JAX \
stops at the first operation that computes one."""


def step_failure(step: str, program: Program, error: Exception, *, lost: bool) -> Exception:
    """Returns the error of a step that failed while it ran; ``lost`` if its state was donated."""
    traced, text = program.traced, str(error)
    names = [traced.input_names[traced.input_starts[i]] for i in traced.written]
    lines = listed(names or ["nothing but its results"])
    what = (_LOST if lost else _INTACT).format(lines=lines, reason=error_text(error))
    if "Timed out" in text or "DEADLINE_EXCEEDED" in text:
        return DeadlineExceededError(f"{step}: {what}{describe_processes()}")
    if kind := non_finite_kind(error):
        state = what.split("\nThe reason:")[0] if lost else "The state is as before the call."
        return FloatingPointError(_NOT_FINITE.format(step=step, kind=kind, state=state))
    return StepFailedError(f"{step}: {what}{describe_processes()}")


def non_finite_kind(error: Exception) -> str | None:
    """Returns ``nan`` or ``inf`` for an error that JAX raises because of its debugging flags."""
    config: Any = jax.config
    if not (config.jax_debug_nans or config.jax_debug_infs) or len(error.args) != 2:
        return None
    return error.args[1] if error.args[1] in ("nan", "inf") else None


@contextmanager
def naming_step(step: str, program: Program) -> Iterator[None]:
    """Names the step in failures of the checks, which run it on copies of the state."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise step_failure(step, program, error, lost=False) from error
