"""One compiled step: traced, proved, lowered, and what its flat inputs and outputs are."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from distribute_jax._errors import StepFailedError
from distribute_jax._mesh import num_replicas
from distribute_jax._messages import listed
from distribute_jax.program._layout import (
    StepShardings,
    by_equation,
    input_avals,
    replica_function,
    step_shardings,
    used_inputs,
)
from distribute_jax.program._lowerings import COMPILERS, Compile, only_state, with_token
from distribute_jax.program._options import RunOptions
from distribute_jax.program._plan import Plan, plan
from distribute_jax.program._results import Results
from distribute_jax.program._sharded_update import compile_whole, on_shares
from distribute_jax.program._state_placement import (
    ParameterDevice,
    Replicas,
    kept_shardings,
    on_parameter_device,
)
from distribute_jax.program._trace import Call, Traced, trace

_FAILED = """\
The compiled step failed after its state had been given to it, so these values are lost:
{lines}
The reason: {reason}
Restore the state from a checkpoint or a dj.snapshot, or find the failure with \
RunOptions(donate_state=False), which keeps the state."""


@dataclass(eq=False)
class Program:
    """A compiled step. It serves every binding of the same structure."""

    traced: Traced
    plan: Plan
    compiled: Callable[..., list[Any]]
    order: tuple[int, ...]
    """The flat inputs in the order in which the compiled program takes them."""
    donated: int
    """How many of the first inputs, the state that is written, are donated."""
    given: tuple[int, ...]
    """All inputs that are donated: that state, and arguments on request."""
    written: tuple[int, ...]
    """Variables that get a new value, in the order of the first outputs."""
    kept: tuple[int, ...]
    """Variables that are only read."""
    arrays: tuple[int, ...]
    """Captured arrays that are read."""
    simple: bool
    """Whether every variable holds one array, not a nest of them."""
    mesh: Mesh
    one_replica: Callable[..., list[Any]]
    """The step of one replica over the flat inputs in order, before compilation; where state is divided,
    that of all replicas over global arrays. ``compile`` takes it, and what is made of it."""
    ordered_shardings: StepShardings
    """The shardings of the inputs, in order, and of the outputs."""
    compile: Compile
    """What compiled it, and compiles several steps of it."""
    has_token: bool
    """Whether it has one more output, the last, that is neither state nor a result."""
    parameter_device: ParameterDevice | None
    """Where state is stored between steps, if not on the mesh; the program sends all of its inputs itself."""
    scanned: dict[int, Callable[..., list[Any]]] = field(default_factory=dict)
    """Programs of several steps, by their number."""
    padding: Any = None
    """What is known of the padding of partial batches, once one was met: a ``PaddingCheck``."""
    on_one_device: dict[Any, Program] = field(default_factory=dict)
    """Programs of the same step on one device, by the shapes of their data, for ``verify``."""
    verified: set[str] = field(default_factory=lambda: {"off"})
    """The values of ``RunOptions(verify=…)`` that no longer ask for a comparison with one device."""
    times_compared: int = 0
    """How often it was compared."""
    per_example: tuple[Any, ...] | None = None
    """For each array result: True, False, or why it could not be found out."""

    owners: dict[tuple[int, ...], tuple[weakref.ref[Any], ...]] = field(default_factory=dict)
    """The modules of each binding, by their ids; a binding that has none (plain arrays) is never gone."""

    def add_owners(self, owners: tuple[weakref.ref[Any], ...]) -> None:
        """Adds the modules of a binding; those of another binding of the same modules are one entry."""
        self.owners[tuple(id(ref()) for ref in owners)] = owners

    def is_wanted(self) -> bool:
        """Returns whether a model that it was compiled for is still there."""
        gone = [key for key, refs in self.owners.items() if any(ref() is None for ref in refs)]
        for key in gone:
            del self.owners[key]
        return bool(self.owners)

    def failure(self, error: Exception) -> StepFailedError:
        """Names the state that is lost with a step that failed while it ran."""
        traced = self.traced
        starts = [traced.input_starts[i] for i in traced.written]
        lost = [traced.input_names[start] for start in starts] or ["nothing but its results"]
        return StepFailedError(_FAILED.format(lines=listed(lost), reason=_short(error)))

    @property
    def results(self) -> Results:
        """The structure of what the step returns."""
        return self.traced.results


def build(call: Call, options: RunOptions, replicas: Replicas) -> Program:
    """Traces, proves, lowers and compiles a step."""
    parameter_device = replicas.parameter_device
    compiler = COMPILERS[options.lowering]
    traced = trace(call)
    decided = plan(call, traced, options)
    keeps = replicas.share_state or compiler.keeps_sharding
    sharded = kept_shardings(call.binding, call.mesh) if keeps else ()
    shardings = step_shardings(call, traced, decided, sharded)
    order, written, kept, arrays = _input_order(traced)
    avals = input_avals(call, traced)
    captured, traced = traced.arrays, traced.without_arrays()
    on_own_shares = bool(shardings.sharded_in) and not compiler.keeps_sharding
    evaluate = by_equation if on_own_shares else compiler.evaluate(call.mesh)
    one_replica = replica_function(traced, decided, shardings, captured, evaluate)
    ordered: Callable[..., list[Any]] = Reordered(one_replica, order, avals)
    donated = _donatable(traced, written, options)
    given = [*range(donated), *_donated_arguments(call, traced, order, shardings, options)]
    ordered_shardings = shardings.in_order(order)
    compile_ = compiler.compile
    if parameter_device is not None:
        compile_ = on_parameter_device(compile_, parameter_device)
    if on_own_shares:
        ordered = on_shares(call.mesh, ordered, ordered_shardings, [avals[i] for i in order])
        compile_ = compile_whole
    compile_ = with_token(compile_)
    with compiler.refusing(traced.jaxpr, num_replicas(call.mesh)):
        compiled = compile_(call, ordered, ordered_shardings, [avals[i] for i in order], given)
    nests = [jax.tree.structure(variable.get_raw_value()) for variable in call.binding.variables]
    return Program(
        traced, decided, compiled, order, donated, tuple(given), written, kept, arrays,
        simple=all(map(jax.tree_util.treedef_is_leaf, [*nests, *traced.written_trees])),
        mesh=call.mesh, one_replica=ordered, ordered_shardings=ordered_shardings,
        compile=compile_, parameter_device=parameter_device, has_token=only_state(ordered_shardings),
    )  # fmt: skip


class Reordered:
    """Calls a function of all flat inputs with only those that it uses, written state first."""

    def __init__(self, fn: Callable[..., Any], order: Sequence[int], avals: Sequence[Any]) -> None:
        self.fn, self.order, self.avals = fn, order, avals
        self.__name__ = self.__qualname__ = "step"

    def __call__(self, *flat: Any) -> Any:
        inputs = dict(zip(self.order, flat, strict=True))
        unused = [i for i in range(len(self.avals)) if i not in inputs]
        # What the program does not read needs a value of the right type only.
        for i in unused:
            inputs[i] = jnp.zeros(self.avals[i].shape, self.avals[i].dtype)
        return self.fn(*(inputs[i] for i in range(len(self.avals))))


def _input_order(
    traced: Traced,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Puts written variables first, then read ones, arrays that are read, data and counts."""
    used, starts = used_inputs(traced), traced.input_starts
    variables, arrays, _, _ = traced.sizes
    written = traced.written
    kept = tuple(
        i
        for i in range(len(starts) - 1)
        if i not in set(written) and any(used[starts[i] : starts[i + 1]])
    )
    flat = [k for i in (*written, *kept) for k in range(starts[i], starts[i + 1])]
    read = tuple(i for i in range(arrays) if used[variables + i] or _is_const(traced, i))
    flat += [variables + i for i in read]
    flat += range(variables + arrays, len(used))
    return tuple(flat), written, kept, read


def _is_const(traced: Traced, array: int) -> bool:
    return array in traced.constant_arrays


def _donatable(traced: Traced, written: Sequence[int], options: RunOptions) -> int:
    """Counts the written variables whose memory the new value can take over: all or none."""
    if not options.donate_state or not COMPILERS[options.lowering].donates:
        return 0
    jaxpr, starts = traced.jaxpr.jaxpr, traced.input_starts
    ins = [jaxpr.invars[k].aval for i in written for k in range(starts[i], starts[i + 1])]
    outs = [var.aval for var in jaxpr.outvars[: sum(traced.written_sizes)]]
    fits = len(ins) == len(outs) and all(
        (old.shape, old.dtype) == (new.shape, new.dtype)
        and not jnp.issubdtype(old.dtype, jax.dtypes.extended)
        for old, new in zip(ins, outs, strict=True)
    )
    return len(ins) if fits else 0


def _donated_arguments(
    call: Call, traced: Traced, order: Sequence[int], shardings: StepShardings, options: RunOptions
) -> list[int]:
    if not options.donate_args or not COMPILERS[options.lowering].donates:
        return []
    first = traced.sizes[0] + traced.sizes[1]
    last = first + traced.sizes[2]
    data = call.arguments.data
    return [
        at
        for at, i in enumerate(order)
        if first <= i < last and not shardings.split[i] and isinstance(data[i - first], jax.Array)
    ]


def _short(error: Exception) -> str:
    """Returns the first and last line of an error's text: JAX puts C++ frames between them."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return " … ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))
