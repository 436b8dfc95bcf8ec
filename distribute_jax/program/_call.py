"""Calls a compiled step on the objects that it is bound to: the path of every step.

Arrays that share memory are copied before they are donated: JAX 0.10 crashes the process on an argument
that is donated twice or still read, and later versions fail inside XLA.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, starmap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._errors import DonatedError
from distribute_jax._interrupts import interrupts_held_back
from distribute_jax._jax_private import (
    ARRAY,
    call_in_c,
    deleted_arrays_crash,
    last_settings,
    read_raw,
    write_raw,
)
from distribute_jax._mesh import put
from distribute_jax._messages import is_donated, is_key, listed
from distribute_jax._values import PerReplica, mark_all_mirrored
from distribute_jax.processes import doing
from distribute_jax.program._arguments import Arguments
from distribute_jax.program._binding import Binding
from distribute_jax.program._failures import failed, is_runtime_failure, not_finite
from distribute_jax.program._program import Program
from distribute_jax.program._results import rebuild
from distribute_jax.program._state_placement import fresh_copy
from distribute_jax.program._trace_errors import compilable
from distribute_jax.program._undo import StepCounts

_DONATED = """\
These arrays were given to an earlier step, which reused their memory, so they can no longer be read:
{lines}
run updates state in place: an array taken out of a variable before a step is gone after it. Keep \
dj.snapshot(model) instead of the arrays, or use RunOptions(donate_state=False)."""


class OutdatedError(Exception):
    """The state has got other shapes or dtypes than the program was compiled for."""


class BoundProgram:
    """A program together with the objects it runs on."""

    def __init__(self, program: Program, binding: Binding, step: str) -> None:
        """Prepares the lists that each call reads and writes; ``step`` is the function's name."""
        self.program, self.binding, self.step = program, binding, step
        self.contents: list[tuple[Any, Any]] = []
        """Dicts and lists that the trace changed, each with what it held before."""
        self.calls: Any = None
        """What the processes of a job compare of each call; None where this one is alone."""
        variables = binding.variables
        self.inputs = [variables[i] for i in (*program.written, *program.kept)]
        self.outputs = [variables[i] for i in program.written]
        self.guards = [v for v in self.outputs if isinstance(v, StepCounts)]
        self.sources = [binding.arrays[i] for i in program.arrays]
        self.state_size = sum(program.traced.written_sizes)
        starts = program.traced.input_starts
        self._written_inputs = sum(starts[i + 1] - starts[i] for i in program.written)
        self._state_inputs = 0
        self._loose = 0
        self.left: list[Any] = []
        """The state as the last call has left it."""
        self._kept: list[Any] = []
        self._donated: Donated | None = None
        self._finished: Any = None
        self._pending: list[list[Any]] = []
        self._steady: dict[Any, Any] = {}
        self._all_mirrored = all(program.plan.mirrored)
        self._some_mirrored = any(program.plan.mirrored)
        arrays = range(len(program.plan.mirrored))
        self._plain_results = program.results.leaves == tuple(("array", k) for k in arrays)
        self._crashes_on_deleted = deleted_arrays_crash(program.mesh.size)

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
        captured = len(flat) - self._state_inputs
        flat += [v.global_array if type(v) is PerReplica else v for v in arguments.data]
        self._loose = captured + len(arguments.data) - arguments.batches
        if arguments.counts is not None:
            flat.append(np.asarray(arguments.counts, np.int32))
        return flat

    def release(self) -> None:
        """Drops the variables, once an object that the step reached is gone."""
        self.inputs, self.outputs, self.sources, self.left, self.guards = [], [], [], [], []
        self._kept, self._finished, self._pending = [], None, []

    def execute(
        self, flat: list[Any], compiled: Callable[..., list[Any]] | None = None
    ) -> list[Any]:
        """Runs the program, or several steps of it; errors say what became of the state."""
        # Several steps in one program give away state only.
        donated = self.program.donated if compiled is None else range(self.program.donated_state)
        compiled = compiled or self.program.compiled
        state = self._state_inputs
        untouched = len(self.left) == state and all(map(operator.is_, flat, self.left))
        # Another step, or the user's own, may have taken what the last call left.
        alive = not self._crashes_on_deleted or _all_alive(self.left)
        first = state if untouched and alive else 0
        if not _all_alive(flat[first:]):
            self.check_readable(flat, first)
        if donated and self._loose:
            self._donated = self._donated or Donated(flat, range(self.program.donated_state))
            flat = self._donated.apart(flat, range(state, len(flat)))
        if donated and not (untouched and len(donated) == self.program.donated_state):
            # State that is just what the last call left is distinct; arguments may not be.
            flat = unshared(flat, donated)
        try:
            with doing(f"running {self.step}"):
                return self._done(self._dispatch(compiled, flat, untouched))
        except Exception as error:
            return self._done(self._retry(compiled, flat, error))

    def _dispatch(
        self, compiled: Callable[..., list[Any]], flat: list[Any], untouched: bool
    ) -> list[Any]:
        """Runs the program so that no interrupt comes between it and the list that keeps its outputs."""
        if not self.program.donated_state:
            return compiled(*flat)
        pending = self._pending = []
        around = (last_settings(), *_placements(flat[self._state_inputs :] if untouched else flat))
        call, same = self._steady.get((compiled, untouched), (None, None))
        if same == around and not (_CONFIG.jax_debug_nans or _CONFIG.jax_debug_infs):
            # The program is called, and the list extended, in C: Python handles no signal between.
            pending.extend(starmap(call, (flat,)))
            return pending[0]
        with interrupts_held_back():
            pending.extend(starmap(compiled, (flat,)))
        if (call := call_in_c(compiled)) and all(type(out) is ARRAY for out in pending[0]):
            self._steady[compiled, untouched] = call, around
        return pending[0]

    def finish(self) -> None:
        """Stores what a program has left, where an exception came between, and the old state is gone."""
        if self._pending and any(map(is_donated, jax.tree.leaves(read_raw(self.outputs)))):
            self.store(self._done(self._pending[0]))
        self._pending = []

    def _done(self, outs: list[Any]) -> list[Any]:
        """Keeps what there is to wait for, and returns state and results."""
        self._finished = outs[-1]
        return outs[:-1] if self.program.has_token else outs

    def finished(self) -> Any:
        """Returns an array of the last run to wait for, and keeps it no longer.

        It is not state, which a later step would take; a result may be donated by the user.
        """
        token, self._finished = self._finished, None
        return token

    def check_readable(self, flat: Sequence[Any], first: int = 0) -> None:
        """Refuses arrays from ``first`` on that were donated."""
        gone = [
            i
            for i in range(first, len(flat))
            if isinstance(flat[i], jax.Array) and flat[i].is_deleted()
        ]
        if gone:
            raise DonatedError(_DONATED.format(lines=listed(self._names(gone))))

    def store(self, outs: list[Any]) -> list[Any]:
        """Writes the new state into the variables and returns the rest: the result's arrays."""
        state = self.state_size
        self.left = [*outs[:state], *self._kept]
        if self.program.simple:
            write_raw(self.outputs, outs)
        else:
            self._store_nests(outs[:state])
        self._pending = []
        return outs[state:]

    def wrap(self, arrays: list[Any]) -> Any:
        """Turns the result's arrays into the result that the user sees."""
        program = self.program
        if self._all_mirrored:
            mark_all_mirrored(arrays, self.step)
        else:
            mirrored = program.plan.mirrored
            if self._some_mirrored:
                mark_all_mirrored(list(compress(arrays, mirrored)), self.step)
            arrays = [
                array
                if same
                else PerReplica(array, program.mesh, step=self.step, is_part_of_mean=part)
                for array, same, part in zip(arrays, mirrored, program.plan.parts, strict=True)
            ]
        if self._plain_results:
            return jax.tree.unflatten(program.results.treedef, arrays)
        return rebuild(program.results, arrays, self.binding)

    def _store_nests(self, leaves: list[Any]) -> None:
        flow = iter(leaves)
        for variable, treedef in zip(self.outputs, self.program.traced.written_trees, strict=True):
            nest = jax.tree.unflatten(treedef, [next(flow) for _ in range(treedef.num_leaves)])
            write_raw([variable], [nest])

    def _retry(
        self, compiled: Callable[..., list[Any]], flat: list[Any], error: Exception
    ) -> list[Any]:
        """Moves inputs that are on other devices and tries once more, or explains the error."""
        if is_runtime_failure(error) or not_finite(error):
            gone = any(isinstance(x, jax.Array) and x.is_deleted() for x in flat)
            raise failed(self.step, self.program, error, lost=gone) from error
        self.check_readable(flat)
        if isinstance(error, TypeError) and "differ from the types" in str(error):
            raise OutdatedError from error
        placed = self.placed(flat)
        if all(a is b for a, b in zip(placed, flat, strict=True)):
            with compilable(self.step):  # pmap compiles at its first call
                raise error
        try:
            return self._dispatch(compiled, placed, untouched=False)
        except Exception as again:
            return self._retry(compiled, placed, again)

    def placed(self, flat: list[Any]) -> list[Any]:
        """Moves inputs that are on other devices onto the mesh."""
        if self.program.parameter_device is not None:
            return flat  # the program sends them itself
        shardings = self.program.step.shardings.in_shardings(self.program.mesh)
        size = self.program.traced.sizes[2]
        # Several steps take the data of each step one after the other.
        more = (len(flat) - len(shardings)) // size if size else 0
        wanted = (*shardings, *(shardings[len(shardings) - size :] * more))
        donated = set(self.program.donated)
        return [
            put(fresh_copy(x) if i in donated else x, to)
            if isinstance(x, jax.Array) and not x.sharding.is_equivalent_to(to, x.ndim)
            else x
            for i, (x, to) in enumerate(zip(flat, wanted, strict=True))
        ]

    def with_data(self, flat: list[Any], arguments: Arguments) -> list[Any]:
        """Returns the flat inputs with other data."""
        new = [v.global_array if isinstance(v, PerReplica) else v for v in arguments.data]
        end = len(flat) - self.program.traced.sizes[3]
        return [*flat[: end - len(new)], *new, *flat[end:]]

    def output_names(self) -> list[str]:
        """Names every output: the state in the user's words, then the results."""
        traced = self.program.traced
        return [*(traced.input_names[i] for i in traced.old_inputs), *traced.results.names]

    def _names(self, indices: Sequence[int]) -> list[str]:
        names = [self.program.traced.input_names[i] for i in self.program.order]
        return [names[i] if i < len(names) else "a later batch" for i in indices]


_CONFIG: Any = jax.config
_ARRAYS = {ARRAY}
_placement = operator.attrgetter("sharding", "committed")
_is_deleted = operator.methodcaller("is_deleted")


def _all_alive(state: Sequence[Any]) -> bool:
    """Returns whether what the last call left is still there; another step may have taken it since.

    With hundreds of variables this is several times faster than to look for those that are gone.
    """
    try:
        return not any(map(_is_deleted, state))
    except AttributeError:  # a NumPy array that the user put into a variable
        return False


def _placements(values: Sequence[Any]) -> Iterable[Any]:
    """Returns where values are stored, which tells whether JAX has called a program with such before."""
    if set(map(type, values)) != _ARRAYS:
        return [_placement(v) if isinstance(v, jax.Array) else type(v) for v in values]
    return map(_placement, values)


def unshared(flat: list[Any], donated: Sequence[int]) -> list[Any]:
    """Copies donated arrays that occur twice, so that nothing is donated that is still read."""
    keys = list(map(_memory, flat))
    if len(set(keys)) == len(keys):
        return flat
    times = Counter(keys)
    flat = list(flat)
    for i in donated:
        if times[keys[i]] > 1 and isinstance(flat[i], jax.Array):
            flat[i] = jnp.copy(flat[i])
    return flat


def _memory(value: Any) -> Any:
    """Returns what is equal for array objects that share memory."""
    is_plain = isinstance(value, jax.Array) and not is_key(value)
    return value.addressable_data(0).unsafe_buffer_pointer() if is_plain else -id(value)


class Donated:
    """The kinds of the arrays that a program is given, so that few must be looked at closely."""

    def __init__(self, flat: Sequence[Any], donated: Sequence[int]) -> None:
        self._by_kind: dict[Any, list[int]] = {}
        for i in donated:
            self._by_kind.setdefault(_kind(flat[i]), []).append(i)

    def apart(self, flat: list[Any], loose: Iterable[int]) -> list[Any]:
        """Copies arrays that come from outside and are, on some device, the memory of given state.

        Such are the parts of a variable's array, and what ``device_put`` makes of it.
        """
        for i in loose:
            value = flat[i]
            candidates = self._by_kind.get(_kind(value)) if isinstance(value, jax.Array) else None
            if candidates and _pointers([value]) & _pointers(flat[j] for j in candidates if j != i):
                flat[i] = jnp.copy(value)
        return flat


def _kind(value: Any) -> Any:
    """Arrays that share memory have parts of one shape and dtype."""
    if not isinstance(value, jax.Array):
        return None
    return value.sharding.shard_shape(value.shape), value.dtype


def _pointers(values: Iterable[Any]) -> set[int]:
    return {
        shard.data.unsafe_buffer_pointer()
        for value in values
        if isinstance(value, jax.Array) and not is_key(value)
        for shard in value.addressable_shards
    }
