"""One compiled step, and one call of it on bound state: the path that every step takes."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from distribute_jax._errors import DonatedError, StepFailedError
from distribute_jax._internals import read_raw, write_raw
from distribute_jax._mesh import mirrored_sharding, split_sharding
from distribute_jax._tree import listed
from distribute_jax._values import PerReplica, mark_mirrored
from distribute_jax.program._arguments import Arguments
from distribute_jax.program._bind import Binding
from distribute_jax.program._lower import (
    Layouts,
    compile_pmap,
    compile_shard_map,
    input_avals,
    layouts,
    replica_function,
    used_inputs,
)
from distribute_jax.program._options import RunOptions
from distribute_jax.program._plan import Plan, plan
from distribute_jax.program._results import Results, rebuild
from distribute_jax.program._trace import Call, Traced, trace


class OutdatedError(Exception):
    """The state has got other shapes or dtypes than the program was compiled for."""


@dataclass(eq=False)
class Program:
    """A compiled step. It serves every binding of the same structure."""

    traced: Traced
    plan: Plan
    lies: Layouts
    compiled: Callable[..., list[Any]]
    order: tuple[int, ...]
    """The flat inputs in the order in which the compiled program takes them."""
    donated: int
    """How many of the first inputs are given away."""
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
    """The step of one replica over the flat inputs in order, before compilation."""
    ordered_lies: Layouts
    """How the inputs, in order, and the outputs lie on the mesh."""
    scanned: dict[int, Callable[..., list[Any]]] = field(default_factory=dict)
    """Programs of several steps, by their number."""
    padding_checked: bool = False
    """Whether it was seen that padding cannot reach state or results."""
    verified: bool = False
    """Whether it was seen to equal the step on one device."""
    per_example: tuple[Any, ...] | None = None
    """For each array result: True, False, or why it could not be found out."""

    owners: list[tuple[weakref.ref[Any], ...]] = field(default_factory=list)
    """The modules of each binding; a binding that has none (plain arrays) is never gone."""

    def is_wanted(self) -> bool:
        """Tells whether a model that it was compiled for is still there."""
        self.owners = [o for o in self.owners if all(ref() is not None for ref in o)]
        return bool(self.owners)

    def failure(self, error: Exception) -> StepFailedError:
        """Says which state is lost with a step that failed while it ran."""
        traced = self.traced
        starts = [traced.input_starts[i] for i in traced.written]
        lost = [traced.input_names[start] for start in starts] or ["nothing but its results"]
        return StepFailedError(_FAILED.format(lines=listed(lost), reason=_short(error)))

    @property
    def results(self) -> Results:
        """The structure of what the step returns."""
        return self.traced.results


def build(call: Call, options: RunOptions) -> Program:
    """Traces, proves, lowers and compiles a step."""
    traced = trace(call)
    decided = plan(call, traced, options)
    lies = layouts(call, traced, decided)
    order, written, kept, arrays = _input_order(traced)
    avals = input_avals(call, traced)
    one_replica = replica_function(
        traced, decided, lies, [place.get() for _, place, _ in call.binding.arrays]
    )
    ordered = _Reordered(one_replica, order, avals)
    donated = _donatable(traced, order, avals, written, options)
    given = [*range(donated), *_donated_arguments(call, traced, order, lies, options)]
    compiler = compile_pmap if options.lowering == "pmap" else compile_shard_map
    compiled = compiler(call, ordered, _permuted(lies, order), [avals[i] for i in order], given)
    sizes = [b - a for a, b in zip(traced.input_starts, traced.input_starts[1:], strict=False)]
    return Program(
        traced, decided, lies, compiled, order, donated, written, kept, arrays,
        simple=all(size == 1 for size in sizes) and set(traced.written_sizes) <= {1},
        mesh=call.mesh, one_replica=ordered, ordered_lies=_permuted(lies, order),
    )  # fmt: skip


class _Reordered:
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


def _donatable(
    traced: Traced,
    order: Sequence[int],
    avals: Sequence[Any],
    written: Sequence[int],
    options: RunOptions,
) -> int:
    """Counts the written variables whose memory the new value can take over: all or none."""
    if not options.donate_state or options.lowering == "pmap":
        return 0
    inputs = sum(traced.input_starts[i + 1] - traced.input_starts[i] for i in written)
    outs = traced.jaxpr.jaxpr.outvars[: sum(traced.written_sizes)]
    fits = inputs == len(outs) and all(
        (aval.shape, aval.dtype) == (out.aval.shape, out.aval.dtype)
        and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)
        for aval, out in zip((avals[i] for i in order), outs, strict=False)
    )
    return inputs if fits else 0


def _donated_arguments(
    call: Call, traced: Traced, order: Sequence[int], lies: Layouts, options: RunOptions
) -> list[int]:
    if not options.donate_args or options.lowering == "pmap":
        return []
    first = traced.sizes[0] + traced.sizes[1]
    last = first + traced.sizes[2]
    data = call.arguments.data
    return [
        at
        for at, i in enumerate(order)
        if first <= i < last and not lies.split[i] and isinstance(data[i - first], jax.Array)
    ]


def _permuted(lies: Layouts, order: Sequence[int]) -> Layouts:
    return Layouts(
        stacked=tuple(lies.stacked[i] for i in order),
        split=tuple(lies.split[i] for i in order),
        mirrored=lies.mirrored,
    )


class Entry:
    """A program together with the objects it runs on."""

    def __init__(self, program: Program, binding: Binding) -> None:
        """Prepares the lists that each call reads and writes."""
        self.program, self.binding = program, binding
        variables = binding.variables
        self.inputs = [variables[i] for i in (*program.written, *program.kept)]
        self.outputs = [variables[i] for i in program.written]
        self.sources = [binding.arrays[i] for i in program.arrays]
        self.state_size = sum(program.traced.written_sizes)
        starts = program.traced.input_starts
        self._written_inputs = sum(starts[i + 1] - starts[i] for i in program.written)
        self._state_inputs = 0
        self._loose = 0
        self._known: list[Any] = []
        self._kept: list[Any] = []

    def inputs_now(self) -> list[Any]:
        """Reads the state that the next call would start from."""
        return jax.tree.leaves(read_raw(self.inputs))

    def flat_inputs(self, values: Sequence[Any], arguments: Arguments) -> list[Any]:
        """Reads state, captured arrays, data and counts in the order of the program."""
        flat = read_raw(self.inputs)
        if not self.program.simple:
            flat = jax.tree.leaves(flat)
        self._kept = flat[self._written_inputs :]
        self._state_inputs = len(flat)
        for _, place, root in self.sources:
            flat.append(place.get() if root is None else values[root])
        loose = len(flat) - self._state_inputs
        for value in arguments.data:
            if type(value) is PerReplica:
                flat.append(value.global_array)
            else:
                flat.append(value)
                loose += 1
        self._loose = loose
        if arguments.counts is not None:
            flat.append(np.asarray(arguments.counts, np.int32))
        return flat

    def release(self) -> None:
        """Lets go of the variables, once an object that the step reached is gone."""
        self.inputs, self.outputs, self.sources, self._known = [], [], [], []
        self._kept = []

    def execute(
        self, flat: list[Any], compiled: Callable[..., list[Any]] | None = None
    ) -> list[Any]:
        """Runs the program, or several steps of it; errors say what became of the state."""
        compiled = compiled or self.program.compiled
        donated = self.program.donated
        state = self._state_inputs
        untouched = len(self._known) == state and all(map(operator.is_, flat, self._known))
        self._check_readable(flat, state if untouched else 0)
        # State that is just what the last call left is distinct; loose arrays may be part of it.
        if donated and not (untouched and not self._loose) and len(set(map(id, flat))) != len(flat):
            flat = _unshared(flat, donated)
        try:
            return compiled(*flat)
        except Exception as error:
            return self._retry(compiled, flat, error)

    def _check_readable(self, flat: list[Any], first: int) -> None:
        """Refuses arrays that were given away; JAX 0.10 crashes the process on them.

        State that is just what the last call left need not be asked again: that would cost as much
        as the rest of the call.
        """
        gone = [
            i
            for i in range(first, len(flat))
            if isinstance(flat[i], jax.Array) and flat[i].is_deleted()
        ]
        if gone:
            raise DonatedError(_DONATED.format(lines=listed(self._names(gone))))

    def store(self, outs: list[Any]) -> list[Any]:
        """Writes the new state into the variables and gives the rest: the result's arrays."""
        state = self.state_size
        self._known = [*outs[:state], *self._kept]
        if self.program.simple:
            write_raw(self.outputs, outs)
        else:
            self._store_nests(outs[:state])
        return outs[state:]

    def wrap(self, arrays: list[Any]) -> Any:
        """Turns the result's arrays into the result that the user sees."""
        program = self.program
        wrapped = [
            mark_mirrored(array) if mirrored else PerReplica(array, program.mesh)
            for array, mirrored in zip(arrays, program.plan.mirrored, strict=True)
        ]
        return rebuild(program.results, wrapped, self.binding)

    def _store_nests(self, leaves: list[Any]) -> None:
        flow = iter(leaves)
        for variable, treedef in zip(self.outputs, self.program.traced.written_trees, strict=True):
            nest = jax.tree.unflatten(treedef, [next(flow) for _ in range(treedef.num_leaves)])
            write_raw([variable], [nest])

    def _retry(
        self, compiled: Callable[..., list[Any]], flat: list[Any], error: Exception
    ) -> list[Any]:
        """Places inputs that lie on other devices and tries once more, or explains the error."""
        gone = [i for i, x in enumerate(flat) if isinstance(x, jax.Array) and x.is_deleted()]
        if gone:
            raise self.program.failure(error) from error
        if isinstance(error, TypeError) and "differ from the types" in str(error):
            raise OutdatedError from error
        placed = self.placed(flat)
        if all(a is b for a, b in zip(placed, flat, strict=True)):
            raise error
        return compiled(*placed)

    def placed(self, flat: list[Any]) -> list[Any]:
        """Puts inputs that lie elsewhere onto the mesh."""
        whole, split = mirrored_sharding(self.program.mesh), split_sharding(self.program.mesh)
        lies, size = self.program.ordered_lies.split, self.program.traced.sizes[2]
        # Several steps take the data of each step one after the other.
        more = (len(flat) - len(lies)) // size if size else 0
        wanted = [split if s else whole for s in (*lies, *(lies[len(lies) - size :] * more))]
        return [
            jax.device_put(x, to)
            if isinstance(x, jax.Array) and not x.sharding.is_equivalent_to(to, x.ndim)
            else x
            for x, to in zip(flat, wanted, strict=True)
        ]

    def with_data(self, flat: list[Any], arguments: Arguments) -> list[Any]:
        """Gives the flat inputs with other data."""
        new = [v.global_array if isinstance(v, PerReplica) else v for v in arguments.data]
        end = len(flat) - self.program.traced.sizes[3]
        return [*flat[: end - len(new)], *new, *flat[end:]]

    def output_names(self) -> list[str]:
        """Names every output: the state in the user's words, then the results."""
        traced = self.program.traced
        first = [traced.input_starts[i] for i in traced.written]
        state = [
            traced.input_names[start + k] if k < size else "state"
            for start, size in zip(first, traced.written_sizes, strict=True)
            for k in range(size)
        ]
        return [*state, *traced.results.names]

    def _names(self, indices: Sequence[int]) -> list[str]:
        names = [self.program.traced.input_names[i] for i in self.program.order]
        return [names[i] if i < len(names) else "a later batch" for i in indices]


def _short(error: Exception) -> str:
    """Gives the first and last line of an error's text: JAX puts C++ frames between them."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return " … ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))


def _unshared(flat: list[Any], donated: int) -> list[Any]:
    """Copies donated arrays that occur twice, so that nothing is given away that is still read."""
    times: dict[int, int] = {}
    for x in flat:
        times[id(x)] = times.get(id(x), 0) + 1
    copied = [jnp.copy(x) if times[id(x)] > 1 else x for x in flat[:donated]]
    return copied + flat[donated:]


_DONATED = """\
These arrays were given to an earlier step, which reused their memory, so they can no longer be read:
{lines}
run updates state in place: an array taken out of a variable before a step is gone after it. Keep \
dj.snapshot(model) instead of the arrays, or use RunOptions(donate_state=False)."""

_FAILED = """\
The compiled step failed after its state had been given to it, so these values are lost:
{lines}
The reason: {reason}
Restore the state from a checkpoint or a dj.snapshot, or find the failure with \
RunOptions(donate_state=False), which keeps the state."""
