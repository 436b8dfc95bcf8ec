"""``run``: finds the compiled program for a call, or builds it."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from distribute_jax._errors import LoweringError
from distribute_jax._mesh import num_replicas
from distribute_jax._messages import StepFunction
from distribute_jax.processes import COMPILING, doing, stepped
from distribute_jax.program._across_processes import (
    Calls,
    agree_on_values,
    check_same_program,
    note_call,
    note_outputs,
)
from distribute_jax.program._arguments import Arguments, check_call, check_function, take_apart
from distribute_jax.program._binding import (
    Binding,
    check_leaked_tracers,
    contents_restored_on_error,
)
from distribute_jax.program._cache import Recompilations, looked_up_by_trace
from distribute_jax.program._call import BoundProgram, OutdatedError
from distribute_jax.program._capture import Captures, captures, without_jit
from distribute_jax.program._failures import Notices, failed, named
from distribute_jax.program._lowerings import COMPILERS
from distribute_jax.program._multi_step import (
    can_scan,
    run_scanned,
    scans,
    stacked_results,
    take_batches,
)
from distribute_jax.program._options import (
    UNVERIFIED,
    RunOptions,
    checked_run_options,
    default_run_options,
)
from distribute_jax.program._padding_check import run_checked_for_leaks
from distribute_jax.program._program import Program, build
from distribute_jax.program._result_rows import find_non_batched_results, wrap_partial
from distribute_jax.program._state_placement import (
    ParameterDevice,
    divide_state,
    is_shared,
    kept_shardings,
    place_state,
)
from distribute_jax.program._trace import Call, check_made_once, give_first_values
from distribute_jax.program._trace_errors import compilable, step_name
from distribute_jax.program._verify import verify

_MOST_PROGRAMS = 64
_MOST_COMPARED = 1024
_ENOUGH = 3
"""So many calls of a step that changes nothing are compared, as of one that warms up from a rate of 0."""

_WHOLE = """\
RunOptions(lowering="{lowering}") keeps all state whole on each device, but under {strategy} the replicas \
share the state of optimizers. Use RunOptions(lowering="shard_map"), the default, or make the strategy \
without shard_optimizer_state=True."""

# While a step is traced the user's own objects hold tracers, which no other thread may see.
one_at_a_time = threading.RLock()


class Runner:
    """The programs of one strategy."""

    def __init__(
        self,
        strategy: Any,
        mesh: Mesh,
        steps_in_flight: int | None,
        parameter_device: ParameterDevice | None = None,
        *,
        shares: bool = False,
    ) -> None:
        """Starts with no program.

        Args:
            strategy: what code inside a step sees as its strategy.
            mesh: the mesh of the replicas.
            steps_in_flight: how many steps may be dispatched and not finished; None for no limit on
                accelerators, and 2 on CPU, where more can deadlock.
            parameter_device: where state is stored between steps; None for mirrored over the mesh.
            shares: whether the replicas share the state of optimizers, rather than all hold it.
        """
        self._strategy, self._mesh, self._parameter_device = strategy, mesh, parameter_device
        self.shares = shares
        self._entries: dict[Any, list[BoundProgram]] = {}
        self._programs: OrderedDict[Any, Program] = OrderedDict()
        self._recompilations = Recompilations()
        self._notices = Notices()
        self._compared: dict[Any, None] = {}
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        self.steps_in_flight = min(steps_in_flight or 2, 2) if on_cpu else steps_in_flight
        self._in_flight: deque[tuple[Any, Program, str]] = deque()

    def for_strategy(self, strategy: Any) -> Runner:
        """Returns a runner like this one, with no program yet, for another strategy on its mesh."""
        return Runner(
            strategy, self._mesh, self.steps_in_flight, self._parameter_device, shares=self.shares
        )

    def __call__(
        self,
        fn: StepFunction,
        args: Any,
        kwargs: dict[str, Any] | None,
        options: RunOptions | None,
    ) -> Any:
        """Runs a step once for each replica."""
        if type(args) is not tuple or kwargs is not None:
            check_call(args, kwargs)
        options = checked_run_options(options)
        fn = without_jit(fn)
        with one_at_a_time:
            arguments = take_apart(tuple(args), kwargs or {}, self._mesh)
            return self._run(fn, arguments, options)

    def steps(
        self, fn: StepFunction, iterator: Iterator[Any], steps: int, options: RunOptions | None
    ) -> Any:
        """Runs up to ``steps`` steps, in one program where the batches are full and of one signature."""
        options = checked_run_options(options)
        fn = without_jit(fn)
        with one_at_a_time:
            return self._steps(fn, iterator, steps, options)

    def find_non_batched_results(self, fn: StepFunction, args: tuple[Any, ...]) -> list[str]:
        """Names the results of a step that do not have one row for each example."""
        with one_at_a_time:
            arguments = take_apart(args, {}, self._mesh)
            entry, _ = self.entry(fn, arguments, UNVERIFIED)
            with self._tracing(fn, arguments):
                return find_non_batched_results(self._call(fn, entry, arguments), entry)

    def _steps(
        self, fn: StepFunction, iterator: Iterator[Any], steps: int, options: RunOptions
    ) -> Any:
        taken, error = take_batches(iterator, steps)
        batches = [take_apart(b, {}, self._mesh) for b in taken]
        result = self._run_batches(fn, batches, steps, options)
        if error is not None:
            # Those batches are gone from the iterator, so they are run, as single steps would be.
            error.add_note(
                f"strategy.run_steps ran {step_name(fn)} on the {len(batches)} batches that came before "
                "this error: the state includes them, their results are lost."
            )
            raise error
        return result

    def _run_batches(
        self, fn: StepFunction, batches: list[Arguments], steps: int, options: RunOptions
    ) -> Any:
        asked = options.verify in ("first", "always")
        if can_scan(batches, steps) and not asked and COMPILERS[options.lowering].scans:
            entry, values = self.entry(fn, batches[0], options)
            if options.verify not in entry.program.verified:
                self._verify(fn, entry, batches[0], options, values)
            if scans(entry.program):
                call = self._call(fn, entry, batches[0])
                self._wait(entry.inputs_now())
                note_call(entry, entry.inputs_now(), (), self._mesh, len(batches))
                run = functools.partial(run_scanned, call, entry, values)
                return entry.wrap(self._advance(entry, run, batches, len(batches)))
        return stacked_results([self._run(fn, batch, options) for batch in batches])

    def _run(self, fn: StepFunction, arguments: Arguments, options: RunOptions) -> Any:
        entry, values = self.entry(fn, arguments, options)
        try:
            return self._execute(fn, arguments, options, entry, values)
        except OutdatedError:
            head = _head(captures(fn), arguments, options)
        entry = self._enter(head, fn, arguments, options, warn=False)
        return self._execute(fn, arguments, options, entry, values)

    def _execute(
        self,
        fn: StepFunction,
        arguments: Arguments,
        options: RunOptions,
        entry: BoundProgram,
        values: list[Any],
    ) -> Any:
        if options.verify not in entry.program.verified:
            self._verify(fn, entry, arguments, options, values)
        flat = entry.flat_inputs(values, arguments)
        self._wait(flat)
        note_call(entry, flat, arguments.data, self._mesh)
        if arguments.counts is not None:
            return self._run_partial(self._call(fn, entry, arguments), entry, values, flat)
        return entry.wrap(self._advance(entry, entry.execute, flat))

    def _advance(
        self,
        entry: BoundProgram,
        run: Callable[[list[Any]], list[Any]],
        inputs: list[Any],
        steps: int = 1,
    ) -> list[Any]:
        """Runs a program and stores what it leaves, whatever interrupts that; returns its results."""
        try:
            arrays = entry.store(run(inputs))
            self._dispatched(entry, arrays, steps)
        except BaseException:
            entry.finish()
            if (token := entry.finished()) is not None and self.steps_in_flight is not None:
                self._in_flight.append((token, entry.program, entry.step))
            raise
        return arrays

    def _verify(
        self,
        fn: StepFunction,
        entry: BoundProgram,
        arguments: Arguments,
        options: RunOptions,
        values: list[Any],
    ) -> None:
        """Compares a call with one device; unasked, once for a step and what it is bound to."""
        kinds = zip(arguments.leaves, arguments.kinds, strict=True)
        static = [(type(leaf), leaf) for leaf, kind in kinds if kind == "static"]
        key = (entry.binding.key, arguments.treedef, options.check_sync, *static)
        if options.verify == "auto" and key in self._compared:
            entry.program.verified.add("auto")
            return
        with named(entry.step, entry.program), self._tracing(fn, arguments):
            enough = verify(self._call(fn, entry, arguments), entry, values, options)
        entry.program.times_compared += 1
        if options.verify != "always" and (enough or entry.program.times_compared > _ENOUGH):
            entry.program.verified |= {"auto", options.verify}
            self._compared[key] = None
            if len(self._compared) > _MOST_COMPARED:
                del self._compared[next(iter(self._compared))]

    def _run_partial(
        self, call: Call, entry: BoundProgram, values: list[Any], flat: list[Any]
    ) -> Any:
        traces = (
            nullcontext()
            if entry.program.padding is not None
            else self._tracing(call.fn, call.arguments)
        )
        run = functools.partial(run_checked_for_leaks, call, entry, values)
        with named(entry.step, entry.program), traces:
            arrays = self._advance(entry, run, flat)
        return wrap_partial(call, entry, arrays)

    def _tracing(self, fn: StepFunction, arguments: Arguments) -> AbstractContextManager[None]:
        return looked_up_by_trace(self._entries, self._programs, fn, arguments)

    def _call(self, fn: StepFunction, entry: BoundProgram, arguments: Arguments) -> Call:
        return Call(fn, entry.binding, arguments, self._strategy, self._mesh)

    def entry(
        self, fn: StepFunction, arguments: Arguments, options: RunOptions
    ) -> tuple[BoundProgram, list[Any]]:
        """Returns the program bound to what this call reaches, compiled if need be."""
        found = captures(fn)
        values = found.values + arguments.bound
        head = _head(found, arguments, options)
        for entry in self._entries.get(head, ()):
            if entry.binding.holds(values):
                return entry, values
        return self._enter(head, fn, arguments, options), values

    def programs(self) -> int:
        """Counts the compiled programs that are kept for objects still alive."""
        self._forget_dead()
        return len(self._programs)

    def _enter(
        self,
        head: Any,
        fn: StepFunction,
        arguments: Arguments,
        options: RunOptions,
        *,
        warn: bool = True,
        may_create: bool = True,
    ) -> BoundProgram:
        check_function(fn)
        self._forget_dead()
        binding = Binding(fn, arguments)
        check_leaked_tracers(binding)
        placement = self._place(step_name(fn), binding, options, warn=warn)
        key = (binding.key, placement, *head[1:])
        program = self._programs.get(key)
        once = None
        if program is None:
            self._recompilations.note(fn, binding, arguments)
            call = Call(fn, binding, arguments, self._strategy, self._mesh)
            compiling = doing(f"{COMPILING} {step_name(fn)}")
            with contents_restored_on_error(binding), compilable(step_name(fn)), compiling:
                before, captured = binding, binding.captured()
                with self._tracing(fn, arguments):
                    program = build(call, options, self._parameter_device, shares=self.shares)
                if program.traced.created:
                    self._create(call, program, may_create=may_create)
                    return self._enter(head, fn, arguments, options, warn=warn, may_create=False)
                # What Python did while it was traced, such as counting calls, is not done again.
                binding = Binding(fn, arguments)
                check_leaked_tracers(binding)
            if num_replicas(self._mesh) > 1:
                self._notices.give(binding, program)
            if binding.reaches_same(before.variables, captured):
                key = (binding.key, placement, *head[1:])
                self._programs[key] = program
                if len(self._programs) > _MOST_PROGRAMS:
                    self._drop(self._programs.popitem(last=False)[1])
            else:  # The step moved, removed or added some: the program serves this call alone.
                once = before.with_arrays(captured)
        fingerprint = check_same_program(step_name(fn), program, arguments, self._mesh)
        if once is not None:
            return BoundProgram(program, once, step_name(fn))
        self._programs.move_to_end(key)
        program.add_owners(binding.owners())
        entry = BoundProgram(program, binding, step_name(fn))
        entry.calls = Calls(entry, fingerprint) if fingerprint else None
        binding.on_release.append(entry.release)
        kept = [e for e in self._entries.get(head, ()) if _stays(e, entry)]
        self._entries[head] = [entry, *kept][:_MOST_PROGRAMS]
        return entry

    def _place(
        self, step: str, binding: Binding, options: RunOptions, *, warn: bool
    ) -> tuple[Any, ...]:
        """Places state where it is stored between steps, and returns how each leaf is sharded."""
        if self.shares and not COMPILERS[options.lowering].shares:
            raise LoweringError(_WHOLE.format(strategy=self._strategy, lowering=options.lowering))
        keeps_all = COMPILERS[options.lowering].keeps_sharding
        place_state(
            binding,
            self._mesh,
            self._parameter_device,
            keeps=lambda variable: keeps_all or (self.shares and is_shared(variable)),
            warn=warn,
        )
        agree_on_values(step, binding, self._mesh)
        if self.shares:
            divide_state(binding, self._mesh)
        return kept_shardings(binding, self._mesh) if keeps_all or self.shares else ()

    def _create(self, call: Call, program: Program, *, may_create: bool) -> None:
        """Computes the first values of variables that a step makes."""
        created = program.traced.created
        entry = BoundProgram(program, call.binding, step_name(call.fn))
        values = captures(call.fn).values + call.arguments.bound
        flat = entry.flat_inputs(values, call.arguments)
        arrays = self._advance(entry, entry.execute, flat, steps=0)
        give_first_values(created, entry.wrap(arrays))
        check_made_once([] if may_create else [str(v.name) for v in created])

    def _drop(self, program: Program) -> None:
        for head, entries in list(self._entries.items()):
            self._entries[head] = [e for e in entries if e.program is not program]

    def _forget_dead(self) -> None:
        for head, entries in list(self._entries.items()):
            self._entries[head] = [e for e in entries if e.binding.alive]
            if not self._entries[head]:
                del self._entries[head]
        for key in [k for k, program in self._programs.items() if not program.is_wanted()]:
            del self._programs[key]

    def _wait(self, flat: list[Any]) -> None:
        """Waits until few enough steps are unfinished.

        On two cores an unread loop over several simulated devices can otherwise deadlock, and
        everywhere the bound also bounds memory.
        """
        if self.steps_in_flight is None or len(self._in_flight) < self.steps_in_flight:
            return
        token, program, step = self._in_flight[0]
        if token is None or token.is_deleted():
            token = next((x for x in flat if isinstance(x, jax.Array)), None)
        if token is not None and not token.is_deleted():
            try:
                with doing(f"waiting for {step}"):
                    token.block_until_ready()
            except jax.errors.JaxRuntimeError as error:
                self._in_flight.clear()
                raise failed(step, program, error, lost=True) from error
        self._in_flight.popleft()

    def _dispatched(self, entry: BoundProgram, arrays: list[Any], steps: int = 1) -> None:
        token = entry.finished()
        stepped(steps, token)
        note_outputs(entry, arrays, self._mesh)
        if self.steps_in_flight is not None:
            self._in_flight.append((token, entry.program, entry.step))


def _head(found: Captures, arguments: Arguments, options: RunOptions) -> tuple[Any, ...]:
    """Returns what is compared first at every call: code, signature and options, quick to hash."""
    asked = (
        None
        if options is UNVERIFIED or options is default_run_options()
        else _compiled_alike(options)
    )
    return tuple(found.key), arguments.signature, asked


@functools.lru_cache(maxsize=64)
def _compiled_alike(options: RunOptions) -> RunOptions | None:
    """Leaves out what changes nothing about the program; None for the default."""
    without = replace(options, verify="off")
    return None if without == UNVERIFIED else without


def _stays(old: BoundProgram, new: BoundProgram) -> bool:
    """Returns whether an entry is kept beside a new one: it must not keep replaced parts alive."""
    if list(map(id, old.binding.variables)) == list(map(id, new.binding.variables)):
        return old.program is not new.program
    return not old.binding.shares_roots(new.binding)
