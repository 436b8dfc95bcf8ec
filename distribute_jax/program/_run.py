"""Implements ``strategy.run``: looks the program of a call up, executes it, and limits steps in flight."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import jax

from distribute_jax._errors import ArgumentError, StepsSkippedError
from distribute_jax._mesh import explicit_transfers, is_local
from distribute_jax._messages import StepFunction
from distribute_jax._values import PerReplica
from distribute_jax.processes import activity, calling, stepped
from distribute_jax.program._across_processes import note_outputs
from distribute_jax.program._ahead_of_time import StepPlan, plan_step
from distribute_jax.program._arguments import Arguments, check_call, flatten_arguments, full_batch
from distribute_jax.program._binding import step_lock
from distribute_jax.program._cache import ProgramCache, Request
from distribute_jax.program._call import BoundProgram, OutdatedError
from distribute_jax.program._capture import captures, unwrap_jit
from distribute_jax.program._multi_step import can_scan, run_scanned, stacked_results, take_batches
from distribute_jax.program._notice_marks import takes_parts
from distribute_jax.program._options import (
    UNVERIFIED,
    RunOptions,
    are_of_library,
    checked_run_options,
)
from distribute_jax.program._padding_check import (
    is_proved,
    is_proved_but_for_norms,
    run_checked_for_leaks,
)
from distribute_jax.program._placement import Replicas
from distribute_jax.program._program import Program, naming_step, preparing, step_failure
from distribute_jax.program._result_rows import find_non_batched_results, wrap_partial
from distribute_jax.program._skipped_steps import CHECK_DELAY, check_counts, copy_counts
from distribute_jax.program._trace_errors import step_name
from distribute_jax.program._verify import verify

_MAX_REMEMBERED_COMPARISONS = 1024
_MAX_COMPARED_CALLS = 3
"""A step that does not change state, as during warm-up from a learning rate of 0, is compared again."""


_OTHER_TYPES = """\
{step} cannot take its inputs, as far as JAX sees them now: {reason}
Arrays of 64 bits that were made under jax_enable_x64 can be used only under it: convert them, or set it."""


class Runner:
    """Runs steps on the replicas of one strategy.

    At most ``steps_in_flight`` steps are dispatched and not finished. None means no limit, except on several
    CPU devices, where it means 2, since more can deadlock there.
    """

    def __init__(self, strategy: Any, replicas: Replicas, steps_in_flight: int | None) -> None:
        self._strategy, self._replicas, self._mesh = strategy, replicas, replicas.mesh
        self._is_local = is_local(self._mesh)
        self._activity = activity()
        divided = replicas.state_mesh if replicas.divides_arguments else None
        self._flatten_arguments = functools.partial(flatten_arguments, divided=divided)
        self.cache = ProgramCache(strategy, replicas)
        self._compared: dict[Any, None] = {}
        may_deadlock = self._mesh.size > 1 and self._mesh.devices.flat[0].platform == "cpu"
        self.steps_in_flight = min(steps_in_flight or 2, 2) if may_deadlock else steps_in_flight
        self._in_flight: deque[tuple[Any, Program, str]] = deque()
        self._counts: deque[tuple[list[Any], list[Any], int]] = deque()

    def __call__(self, fn: StepFunction, args: Any, kwargs: Any, options: RunOptions | None) -> Any:
        """Runs a step once on each replica."""
        if type(args) is not tuple or kwargs is not None:
            check_call(args, kwargs)
        options = checked_run_options(options)
        fn = unwrap_jit(fn)
        args, kwargs = tuple(args), kwargs or {}
        with step_lock:
            captured = captures(fn)
            repeated = self.cache.repeated(captured, args, kwargs, options)
            if repeated is not None:
                try:
                    return self._launch(*repeated)
                except OutdatedError:
                    pass  # it is bound again below
            arguments = self._flatten_arguments(args, kwargs, self._mesh)
            return self._run(Request(fn, arguments, options, captured))

    def steps(
        self, fn: StepFunction, iterator: Iterator[Any], steps: int, options: RunOptions | None
    ) -> Any:
        """Runs up to ``steps`` steps; in one program if the batches are full and of one signature."""
        options = checked_run_options(options)
        fn = unwrap_jit(fn)
        # Without the lock: a thread that makes the batches may take a snapshot or run a step.
        elements, error = take_batches(iterator, steps)
        with step_lock:
            batches = [self._flatten_arguments(element, {}, self._mesh) for element in elements]
            result = self._run_batches(fn, batches, steps, options)
        if error is not None:
            # The batches were taken from the iterator, so they are run, as single steps would be.
            error.add_note(
                f"strategy.run_steps ran {step_name(fn)} on the {len(batches)} batches that came before "
                "this error: the state includes them, but their results are lost."
            )
            raise error
        return result

    def find_non_batched_results(self, fn: StepFunction, args: tuple[Any, ...]) -> list[str]:
        """Returns the names of the results that do not have one row for each example."""
        with step_lock:
            request = Request(fn, self._flatten_arguments(args, {}, self._mesh), UNVERIFIED)
            entry = self.entry(request)
            with self.cache.tracing(request):
                return find_non_batched_results(self.cache.call(request, entry.binding), entry)

    def plan(
        self,
        fn: StepFunction,
        args: Any,
        kwargs: Any,
        options: RunOptions | None,
        number: int | None,
    ) -> StepPlan:
        """Compiles a step for a number of replicas, without running it."""
        check_call(args, kwargs, "strategy.plan(step")
        options = checked_run_options(options)
        leaves = jax.tree.leaves((args, kwargs), is_leaf=lambda x: isinstance(x, PerReplica))
        # The batch may be distributed by another strategy: only its shares matter.
        mesh = next((x.mesh for x in leaves if isinstance(x, PerReplica)), self._mesh)
        with step_lock:
            shapes = (jax.ShapeDtypeStruct,)
            arguments = self._flatten_arguments(tuple(args), kwargs or {}, mesh, more=shapes)
            planned = unwrap_jit(fn), arguments, options
            return plan_step(self._strategy, self._replicas, *planned, number)

    def programs(self) -> int:
        """Returns the number of compiled programs for objects that are alive."""
        self.cache.remove_dead()
        return len(self.cache.programs)

    def entry(self, request: Request) -> BoundProgram:
        """Returns the program bound to what a call reaches; compiles it if there is none."""
        return self.cache.lookup(request) or self.cache.bind(request)

    def _run(self, request: Request) -> Any:
        entry = self.entry(request)
        try:
            return self._execute(request, entry)
        except OutdatedError:  # the shapes or dtypes of the state have changed since
            entry = self.cache.bind(request, warn=False)
        try:
            return self._execute(request, entry)
        except OutdatedError as error:
            raise ArgumentError(_OTHER_TYPES.format(step=entry.step, reason=error)) from error

    def _execute(self, request: Request, entry: BoundProgram) -> Any:
        arguments = request.arguments
        is_padded = arguments.counts is not None and not arguments.has_all_rows
        if is_padded and (full := self._full_batch(request, entry)):
            return self._run(Request(request.fn, full, request.options))
        if request.options.verify not in entry.program.verified:
            self._verify(request, entry)
        flat = entry.flat_inputs(request.roots, arguments)
        if (log := entry.call_log) is not None:
            log.record(entry.last_state, flat, arguments.data)
        if is_padded:
            self._wait(flat)
            return self._run_partial(request, entry, flat)
        return self._launch(entry, flat)

    def _launch(self, entry: BoundProgram, flat: list[Any]) -> Any:
        is_alone = self.steps_in_flight is None and self._is_local and not self._activity.watched
        if entry.is_pure and is_alone:  # nothing to wait for, to store or to report
            return entry.wrap(entry.execute_pure(flat))
        self._wait(flat)
        return entry.wrap(self._advance(entry, entry.execute, flat))

    def _advance(
        self,
        entry: BoundProgram,
        run: Callable[[list[Any]], list[Any]],
        inputs: list[Any],
        steps: int = 1,
    ) -> list[Any]:
        """Runs a program and stores the new state, even if interrupted; returns the arrays of the result."""
        try:
            arrays = entry.store(run(inputs))
            self._note_dispatched(entry, arrays, steps)
        except BaseException:
            entry.store_pending()
            if (token := entry.pop_token()) is not None and self.steps_in_flight is not None:
                self._in_flight.append((token, entry.program, entry.step))
            raise
        return arrays

    def _wait(self, flat: list[Any]) -> None:
        """Waits until fewer than ``steps_in_flight`` steps are unfinished.

        Without a limit an unread loop over several simulated devices can deadlock on two cores; the limit
        also bounds memory.
        """
        if self.steps_in_flight is None or len(self._in_flight) < self.steps_in_flight:
            return
        token, program, step = self._in_flight[0]
        if token is None or token.is_deleted():
            token = next((x for x in flat if isinstance(x, jax.Array)), None)
        if token is not None and not token.is_deleted():
            try:
                calling(token.block_until_ready, phase=f"waiting for {step}")
            except jax.errors.JaxRuntimeError as error:
                self._in_flight.clear()
                raise step_failure(step, program, error, lost=True) from error
        self._in_flight.popleft()

    def _note_dispatched(self, entry: BoundProgram, arrays: list[Any], steps: int) -> None:
        token = entry.pop_token()
        stepped(steps, token)
        if not self._is_local:
            note_outputs(entry, arrays, self._mesh)
        if self.steps_in_flight is not None:
            self._in_flight.append((token, entry.program, entry.step))
        if entry.skip_counts:
            self._counts.append(
                (entry.skip_counts, list(map(copy_counts, entry.skip_counts)), steps)
            )
            self.check_skipped_steps(CHECK_DELAY)

    def check_skipped_steps(self, delay: int = 0) -> None:
        """Raises if too many steps in a row were skipped; ignores the last ``delay`` dispatches."""
        while len(self._counts) > delay:
            variables, counts, steps = self._counts.popleft()
            try:
                for variable, count in zip(variables, counts, strict=True):
                    check_counts(variable, count, steps)
            except StepsSkippedError:
                self._counts.clear()
                raise

    def _full_batch(self, request: Request, entry: BoundProgram) -> Arguments | None:
        """Returns the batch without padding for a step of the library, whose code the user cannot change.

        That is a batch norm's in ``fit``. If all replicas have equally many examples, as one replica always
        has, the step is compiled for that number. Else each computes on the rows of all, and counts its own.
        """
        if not are_of_library(request.options):
            return None
        call = self.cache.call(request, entry.binding)
        with self._proving(request, entry):
            if is_proved(call, entry):
                return None
            args, kwargs = full_batch(request.arguments)
            full = self._flatten_arguments(args, kwargs, self._mesh)
            full.has_all_rows = full.counts is not None
            call = replace(call, arguments=full)
            is_exact = not full.has_all_rows or is_proved_but_for_norms(call, entry)
        return full if is_exact else None

    def _run_partial(self, request: Request, entry: BoundProgram, flat: list[Any]) -> Any:
        call = self.cache.call(request, entry.binding)
        run = functools.partial(run_checked_for_leaks, call, entry, request.roots)
        with self._proving(request, entry):
            arrays = self._advance(entry, run, flat)
        return wrap_partial(call, entry, arrays)

    @contextmanager
    def _proving(self, request: Request, entry: BoundProgram) -> Iterator[None]:
        is_checked = entry.program.padding is not None  # else it is traced with other padding
        tracing = nullcontext() if is_checked else self.cache.tracing(request, entry)
        clock = nullcontext() if is_checked else preparing()
        with naming_step(entry.step, entry.program), tracing, clock:
            yield

    def _verify(self, request: Request, entry: BoundProgram) -> None:
        """Compares a call with one device; with ``"auto"`` once for a step and the objects it is bound to."""
        arguments, options = request.arguments, request.options
        kinds = zip(arguments.leaves, arguments.kinds, strict=True)
        static = [(type(leaf), leaf) for leaf, kind in kinds if kind == "static"]
        # What is right for equal shares may be wrong for those of a partial batch.
        is_partial = arguments.counts is not None and not takes_parts(entry.program.traced.jaxpr)
        key = (entry.binding.key, arguments.treedef, options.check_sync, is_partial, *static)
        if options.verify == "auto" and key in self._compared:
            entry.program.verified.add("auto")
            return
        call = self.cache.call(request, entry.binding)
        program = entry.program
        tracing, transfers = self.cache.tracing(request, entry), explicit_transfers()
        with naming_step(entry.step, program), tracing, preparing(), transfers:
            is_conclusive = verify(call, entry, request.roots, options)
        program.times_compared += 1
        is_conclusive = is_conclusive or program.times_compared > _MAX_COMPARED_CALLS
        if options.verify != "always" and is_conclusive:
            program.verified |= {"auto", options.verify}
            self._compared[key] = None
            if len(self._compared) > _MAX_REMEMBERED_COMPARISONS:
                del self._compared[next(iter(self._compared))]

    def _run_batches(
        self, fn: StepFunction, batches: list[Arguments], steps: int, options: RunOptions
    ) -> Any:
        # "first" and "always" compare results as well, and so single steps.
        scans = options.verify in ("off", "auto") and options.lowering != "pmap"
        if scans and can_scan(batches, steps):
            request = Request(fn, batches[0], options)
            entry = self.entry(request)
            with suppress(OutdatedError):  # the single steps bind it again
                if options.verify not in entry.program.verified:
                    self._verify(request, entry)
                if entry.program.traced.keeps_types():
                    # The state is kept nowhere: a second reference to it would cost a copy.
                    self._wait(entry.current_state())
                    if (log := entry.call_log) is not None:
                        log.record(entry.last_state, entry.current_state(), (), len(batches))
                    run = functools.partial(run_scanned, entry, request.roots)
                    return entry.wrap(self._advance(entry, run, batches, len(batches)))
        return stacked_results([self._run(Request(fn, batch, options)) for batch in batches])
