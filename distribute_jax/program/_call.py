"""Executes a compiled step on the objects that it is bound to: the hot path of every step.

A step donates its state. An array that something beside its variable refers to, such as a clone of the
model, is copied first, so that it stays readable. So are arrays that share memory: JAX 0.10 crashes the
process if a buffer is donated twice or still read, and later versions fail inside XLA.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, starmap
from sys import getrefcount
from typing import Any
from weakref import WeakSet

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
from distribute_jax._mesh import program_input, put
from distribute_jax._messages import error_text, is_donated, is_key, is_runtime_failure, listed
from distribute_jax._values import PerReplica, copied_here, mark_all_mirrored
from distribute_jax.processes import calling
from distribute_jax.program._arguments import Arguments
from distribute_jax.program._binding import Binding, Contents
from distribute_jax.program._program import Program, non_finite_kind, step_failure
from distribute_jax.program._results import rebuild
from distribute_jax.program._skipped_steps import StepCounts
from distribute_jax.program._state_placement import fresh_copy
from distribute_jax.program._trace_errors import explain_compile_errors

_DONATED = """\
These arrays were donated, so their memory is reused and they can no longer be read:
{lines}
They were passed to a jax.jit with donate_argnums, or to run with RunOptions(donate_args=True). Use what \
that call returned, or pass it dj.snapshot(value)."""


class OutdatedError(Exception):
    """The state has other shapes, dtypes or tree structures than the program was compiled for."""


class BoundProgram:
    """A program together with the objects it runs on; ``step`` is the name of the function."""

    def __init__(self, program: Program, binding: Binding, step: str) -> None:
        self.program, self.binding, self.step = program, binding, step
        self.contents: Contents = []
        """The dicts and lists that the trace changed, with their contents before it."""
        self.call_log: Any = None
        """Logs what the processes of a job compare of each call; None in a single process."""
        variables, written = binding.variables, program.traced.written
        self.inputs = [variables[i] for i in (*written, *program.read_only)]
        self.outputs = [variables[i] for i in written]
        # JAX checks the types of arrays that the program takes. Of others Python may have read the shape.
        checked = {*written, *program.read_only} if program.simple else set()
        self._watched = [v for i, v in enumerate(variables) if i not in checked]
        self._types = _types_of(self._watched)
        self.skip_counts = [v for v in self.outputs if isinstance(v, StepCounts)]
        self.sources = [binding.arrays[i] for i in program.arrays]
        self.state_size = len(program.traced.old_inputs)
        """The number of arrays of state that the step writes: its first inputs, and its first outputs."""
        self.is_pure = not (self.inputs or program.step.donated or program.has_token)
        """True if there is nothing to donate, to store, or to lose by an interrupt."""
        self._num_state_inputs = 0
        self._num_possible_aliases = 0  # inputs from outside that may share memory with the state
        self.last_state: list[Any] = []
        """The state after the last call."""
        self._read_only_state: list[Any] = []
        self._donated_buffers: DonatedBuffers | None = None
        self._token: Any = None
        self._pending_outputs: list[list[Any]] = []
        self._storing: list[Any] | None = None
        self._fast_calls: dict[Any, Any] = {}
        self._all_mirrored = all(program.plan.mirrored)
        self._some_mirrored = any(program.plan.mirrored)
        arrays = range(len(program.plan.mirrored))
        self._plain_results = program.results.leaves == tuple(("array", k) for k in arrays)
        self._unflatten = program.results.treedef.unflatten
        self._crashes_on_deleted = deleted_arrays_crash(program.mesh.size)
        self._runs_on_deleted = jax.__version_info__ < (0, 12)
        _alive.add(self)

    def is_current(self) -> bool:
        """True if no variable holds what the step would be traced for again."""
        return not self._watched or _types_of(self._watched) == self._types

    def current_state(self) -> list[Any]:
        """Returns the state that the next call would start from."""
        return jax.tree.leaves(read_raw(self.inputs))

    def flat_inputs(self, values: Sequence[Any], arguments: Arguments) -> list[Any]:
        """Returns state, captured arrays, data and counts in the order of the program's inputs."""
        flat = self.flat_state(values, arguments.arrays, arguments.batches)
        if arguments.counts is not None:
            flat.append(program_input(np.asarray(arguments.counts, np.int32), self.program.mesh))
        return flat

    def flat_state(self, values: Sequence[Any], data: list[Any], batches: int) -> list[Any]:
        """Returns state and captured arrays, and then the data, some of which are ``batches``."""
        if self.is_pure and not self.sources:
            return data
        flat = read_raw(self.inputs)
        if not self.program.simple:
            flat = jax.tree.leaves(flat)
        self._read_only_state = flat[self.state_size :]
        self._num_state_inputs = len(flat)
        for _, place, root in self.sources:
            flat.append(place.get() if root is None else values[root])
        captured = len(flat) - self._num_state_inputs
        flat += data
        self._num_possible_aliases = captured + len(data) - batches
        return flat

    def release(self) -> None:
        """Drops all references, once an object that the step reached was deleted."""
        self.inputs, self.outputs, self.sources, self.skip_counts = [], [], [], []
        self._watched = []
        self.last_state, self._read_only_state = [], []
        self._token, self._pending_outputs = None, []

    def execute_pure(self, flat: list[Any]) -> list[Any]:
        """Runs a pure program."""
        if self._runs_on_deleted and not _all_alive(flat):
            self.check_readable(flat)
        try:
            return self.program.compiled(*flat)
        except Exception as error:
            return self._retry(self.program.compiled, flat, error)

    def execute(
        self, flat: list[Any], compiled: Callable[..., list[Any]] | None = None
    ) -> list[Any]:
        """Runs the program, or another one that was ``compiled`` for several steps of it."""
        # A program of several steps donates only the state.
        program = self.program
        donated = program.step.donated if compiled is None else range(program.donated_state)
        compiled = compiled or program.compiled
        state = self._num_state_inputs
        unchanged = len(self.last_state) == state and all(map(operator.is_, flat, self.last_state))
        # Another step, or the user's jit, may have donated the arrays of the last call.
        alive = not self._crashes_on_deleted or _all_alive(self.last_state)
        first = state if unchanged and alive else 0
        # Without donation JAX 0.12 refuses a deleted array itself, before the program runs.
        if (donated or self._runs_on_deleted) and not _all_alive(flat[first:]):
            self.check_readable(flat, first)
        if not unchanged:
            self.last_state = []
        phase = f"running {self.step}"
        if donated and self._copy_referenced(flat, 2 if unchanged else 1):
            unchanged = False
        if donated and self._num_possible_aliases:
            self._donated_buffers = self._donated_buffers or DonatedBuffers(
                flat, range(self.program.donated_state)
            )
            copy = self._donated_buffers.copy_aliases
            flat = calling(copy, flat, range(state, len(flat)), phase=phase)
        if donated and not (unchanged and len(donated) == self.program.donated_state):
            # The outputs of the last call do not share memory; anything else may.
            flat = calling(copy_shared, flat, donated, phase=phase)
        try:
            return self._take_token(calling(self._dispatch, compiled, flat, unchanged, phase=phase))
        except Exception as error:
            if self._pending_outputs:  # it has run, and the handler of a signal raised this
                raise
            return self._take_token(self._retry(compiled, flat, error))

    def _copy_referenced(self, flat: list[Any], references: int) -> bool:
        """Copies the donated state that more refers to than its variable, and perhaps ``last_state``."""
        end, most = self.program.donated_state, _REFERENCES_OF_LIST + references
        if not end or max(map(getrefcount, flat[:end])) <= most + 1:
            return False
        for other in _alive:  # once this one has run, their last state is not current
            if other is not self:
                other.last_state = []
        referenced = [i for i in range(end) if getrefcount(flat[i]) > most]
        for i in referenced:
            if isinstance(flat[i], jax.Array):
                flat[i] = copied_here(flat[i])
        return bool(referenced)

    def _dispatch(
        self, compiled: Callable[..., list[Any]], flat: list[Any], unchanged: bool
    ) -> list[Any]:
        """Runs the program such that no interrupt can lose its outputs: they are stored in a list in C."""
        if not self.outputs:
            return compiled(*flat)
        pending = self._pending_outputs = []
        context = (
            last_settings(),
            *_placements(flat[self._num_state_inputs :] if unchanged else flat),
        )
        call, last_context = self._fast_calls.get((compiled, unchanged), (None, None))
        if last_context == context and not (_CONFIG.jax_debug_nans or _CONFIG.jax_debug_infs):
            # The program is called, and the list extended, in C: Python handles no signal between.
            pending.extend(starmap(call, (flat,)))
            return pending[0]
        with interrupts_held_back():
            pending.extend(starmap(compiled, (flat,)))
        if (call := call_in_c(compiled)) and all(type(out) is ARRAY for out in pending[0]):
            self._fast_calls[compiled, unchanged] = call, context
        return pending[0]

    def store_pending(self) -> None:
        """Stores the outputs of a program after an exception, if the old state is not whole any more."""
        outputs = self._pending_outputs
        old = jax.tree.leaves(read_raw(self.outputs))
        # The last program may have been a check, whose outputs are not those that were being stored.
        if self._storing is not None:
            self.store(self._storing)
        elif outputs and any(map(is_donated, old)):
            self.store(self._take_token(outputs[0]))
        self._pending_outputs = []

    def _take_token(self, outs: list[Any]) -> list[Any]:
        """Keeps an output to wait for, and returns state and results."""
        self._token = outs[-1]
        return outs[:-1] if self.program.has_token else outs

    def pop_token(self) -> Any:
        """Returns an output of the last call to wait for: not state, which a later step would donate.

        It may be a result, which the user may donate.
        """
        token, self._token = self._token, None
        return token

    def check_readable(self, flat: Sequence[Any], first: int = 0) -> None:
        """Raises if an array from ``first`` on was donated."""
        # A call with Python numbers comes here each time, so without the function is_donated.
        donated = [
            i
            for i in range(first, len(flat))
            if isinstance(flat[i], jax.Array) and flat[i].is_deleted()
        ]
        if donated:
            raise DonatedError(_DONATED.format(lines=listed(self._names(donated))))

    def store(self, outs: list[Any]) -> list[Any]:
        """Writes the new state into the variables and returns the arrays of the result."""
        if not self.inputs:
            return outs
        self._storing, state = outs, self.state_size
        self.last_state, self._read_only_state = outs[:state] + self._read_only_state, []
        if self.program.simple:
            write_raw(self.outputs, outs)
        else:
            self._store_nests(outs[:state])
        self._pending_outputs, self._storing = [], None
        return outs[state:]

    def wrap(self, arrays: list[Any]) -> Any:
        """Returns the result as the user sees it."""
        program = self.program
        if self._all_mirrored:
            mark_all_mirrored(arrays, self.step)
        else:
            mirrored = program.plan.mirrored
            if self._some_mirrored:
                mark_all_mirrored(list(compress(arrays, mirrored)), self.step)
            arrays = [
                array if same else PerReplica(array, program.mesh, step=self.step, share=share)
                for array, same, share in zip(arrays, mirrored, program.plan.shares, strict=True)
            ]
        if self._plain_results:
            return self._unflatten(arrays)
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
        if is_runtime_failure(error) or non_finite_kind(error):
            lost = any(map(is_donated, flat))
            raise step_failure(self.step, self.program, error, lost=lost) from error
        self.check_readable(flat)
        differs = "differ from the types" in str(error) or not jax.tree_util.all_leaves(flat)
        if isinstance(error, TypeError) and differs:
            raise OutdatedError(error_text(error)) from error
        placed = self.placed(flat)
        if all(a is b for a, b in zip(placed, flat, strict=True)):
            with explain_compile_errors(self.step):  # pmap compiles at its first call
                raise error
        try:
            return self._dispatch(compiled, placed, unchanged=False)
        except Exception as again:
            return self._retry(compiled, placed, again)

    def placed(self, flat: list[Any]) -> list[Any]:
        """Moves inputs that are on other devices onto the mesh."""
        if self.program.parameter_device is not None:
            return flat  # the program moves them itself
        shardings = self.program.step.shardings.in_shardings(self.program.mesh)
        size = self.program.traced.sizes.data
        # A program of several steps takes the data of one step after the other.
        more = (len(flat) - len(shardings)) // size if size else 0
        wanted = (*shardings, *(shardings[len(shardings) - size :] * more))
        donated = set(self.program.step.donated)
        return [
            put(fresh_copy(x) if i in donated else x, to)
            if isinstance(x, jax.Array) and not x.sharding.is_equivalent_to(to, x.ndim)
            else x
            for i, (x, to) in enumerate(zip(flat, wanted, strict=True))
        ]

    def with_data(self, flat: list[Any], arguments: Arguments) -> list[Any]:
        """Returns the flat inputs with other data."""
        end = len(flat) - self.program.traced.sizes.counts
        return [*flat[: end - len(arguments.data)], *arguments.arrays, *flat[end:]]

    def output_names(self) -> list[str]:
        """Returns the names of all outputs: the state in the user's words, then the results."""
        traced = self.program.traced
        return [*(traced.input_names[i] for i in traced.old_inputs), *traced.results.names]

    def _names(self, indices: Sequence[int]) -> list[str]:
        names = [self.program.traced.input_names[i] for i in self.program.order]
        return [names[i] if i < len(names) else "a later batch" for i in indices]


_REFERENCES_OF_LIST = next(map(getrefcount, [object()]))
_alive: WeakSet[BoundProgram] = WeakSet()
_CONFIG: Any = jax.config
_ARRAYS = {ARRAY}
_placement = operator.attrgetter("sharding", "committed")
_is_deleted = operator.methodcaller("is_deleted")
_read_type = operator.attrgetter("shape", "dtype")


def _types_of(variables: Sequence[Any]) -> list[Any]:
    """Returns shape and dtype of each variable, or trees of them where one does not hold an array."""
    values = read_raw(variables)
    try:
        return list(map(_read_type, values))
    except AttributeError:
        return jax.tree.map(
            lambda leaf: (np.shape(leaf), getattr(leaf, "dtype", type(leaf))), values
        )


def _all_alive(state: Sequence[Any]) -> bool:
    """True if no array was donated; for hundreds of arrays several times faster than ``is_donated``."""
    try:
        return not any(map(_is_deleted, state))
    except AttributeError:  # a NumPy array that the user put into a variable
        return False


def _placements(values: Sequence[Any]) -> Iterable[Any]:
    """Returns shardings and committedness: a program that was called with equal ones takes these too."""
    if set(map(type, values)) != _ARRAYS:
        return [_placement(v) if isinstance(v, jax.Array) else type(v) for v in values]
    return map(_placement, values)


def copy_shared(flat: list[Any], donated: Sequence[int]) -> list[Any]:
    """Copies donated arrays that share memory with other inputs."""
    keys = list(map(_buffer_key, flat))
    if len(set(keys)) == len(keys):
        return flat
    times = Counter(keys)
    flat = list(flat)
    for i in donated:
        if times[keys[i]] > 1 and isinstance(flat[i], jax.Array):
            flat[i] = jnp.copy(flat[i])
    return flat


def _buffer_key(value: Any) -> Any:
    """Returns a key that is equal for arrays that share memory."""
    if not isinstance(value, jax.Array) or is_key(value):
        return -id(value)
    return _computed(value).addressable_data(0).unsafe_buffer_pointer()


def _computed(value: jax.Array) -> jax.Array:
    """Waits for an array: its pointer would wait too, and hold the GIL, so that no watchdog can run."""
    return value.block_until_ready()


class DonatedBuffers:
    """Finds inputs that share memory with donated state, comparing only arrays of one shard shape."""

    def __init__(self, flat: Sequence[Any], donated: Sequence[int]) -> None:
        self._by_shard: dict[Any, list[int]] = {}
        for i in donated:
            self._by_shard.setdefault(_shard_type(flat[i]), []).append(i)

    def copy_aliases(self, flat: list[Any], indices: Iterable[int]) -> list[Any]:
        """Copies inputs that share memory with donated state on some device.

        Such are the shards of a variable's array, and what ``device_put`` returns for it.
        """
        for i in indices:
            value = flat[i]
            is_array = isinstance(value, jax.Array)
            candidates = self._by_shard.get(_shard_type(value)) if is_array else None
            others = [flat[j] for j in candidates or () if j != i]
            if others and _pointers([_computed(value)]) & _pointers(others):
                flat[i] = jnp.copy(value)
        return flat


def _shard_type(value: Any) -> Any:
    if not isinstance(value, jax.Array):
        return None
    return value.sharding.shard_shape(value.shape), value.dtype


def _pointers(values: Iterable[Any]) -> set[int]:
    """Returns the addresses of the shards that are computed already.

    No other shares memory with an array that is computed, so none need be waited for.
    """
    shards = (
        shard.data
        for value in values
        if isinstance(value, jax.Array) and not is_key(value)
        for shard in value.addressable_shards
    )
    return {shard.unsafe_buffer_pointer() for shard in shards if shard.is_ready()}
