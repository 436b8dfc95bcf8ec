"""Caches the compiled programs of a strategy: looks them up at each call of ``run``, or builds them.

A newly compiled step that differs from one device by design is logged, once for each reason.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
from flax import nnx

from distribute_jax import _context
from distribute_jax._errors import LoweringError, warn_user
from distribute_jax._mesh import num_replicas
from distribute_jax.processes import COMPILING, doing
from distribute_jax.program._across_processes import CallLog, agree_on_values, check_same_program
from distribute_jax.program._aggregation import Combine
from distribute_jax.program._ahead_of_time import plan_step
from distribute_jax.program._arguments import Arguments, RepeatedArguments, check_function
from distribute_jax.program._binding import (
    Binding,
    check_leaked_tracers,
    contents_as_before,
    contents_restored_on_error,
    copy_contents,
)
from distribute_jax.program._call import BoundProgram
from distribute_jax.program._capture import Captures, captures
from distribute_jax.program._jaxprs import needed_only
from distribute_jax.program._notices import Notice
from distribute_jax.program._options import (
    UNVERIFIED,
    RunOptions,
    are_of_library,
    default_run_options,
)
from distribute_jax.program._placement import Replicas
from distribute_jax.program._program import Program, build, naming_step, preparing
from distribute_jax.program._replica_context import draws_per_replica
from distribute_jax.program._state_placement import divide_state, place_state
from distribute_jax.program._trace import Call, created_again_error, store_first_values
from distribute_jax.program._trace_errors import explain_compile_errors, step_name

_MAX_PROGRAMS = 64
_NO_CALL: Any = (None, None, None)
_log = logging.getLogger("distribute_jax")

_NEEDS_REPLICATED = """\
RunOptions(lowering="{lowering}") replicates all state on each device, but under {strategy} the replicas \
share the state of optimizers. Use RunOptions(lowering="shard_map"), the default, or make the strategy \
without shard_optimizer_state=True."""


class Request:
    """One call of ``run``: the step, what it reaches directly, its arguments and options."""

    __slots__ = ("arguments", "fn", "lookup_key", "options", "roots")

    def __init__(
        self,
        fn: Callable[..., Any],
        arguments: Arguments,
        options: RunOptions,
        captured: Captures | None = None,
    ) -> None:
        captured = captured or captures(fn)
        self.fn, self.arguments, self.options = fn, arguments, options
        self.roots = captured.values + arguments.bound
        """The objects that are compared by identity with those that a program is bound to."""
        default = options is UNVERIFIED or options is default_run_options()
        self.lookup_key = (
            tuple(captured.key), arguments.signature, None if default else _compiled_options(options),
        )  # fmt: skip
        """Code, signature and options, which are hashed before the roots are compared."""


class ProgramCache:
    """Programs by what they were compiled for, and by the objects that they are bound to."""

    def __init__(self, strategy: Any, replicas: Replicas) -> None:
        self._strategy, self._replicas = strategy, replicas
        self._bound: dict[Any, list[BoundProgram]] = {}
        self.programs: OrderedDict[Any, Program] = OrderedDict()
        self._repeatable: dict[Any, tuple[BoundProgram, RunOptions, RepeatedArguments]] = {}
        """The last call of each step, by its code."""
        self._recompilations = Recompilations()
        self._noticed: set[tuple[str, Any]] = set()

    def lookup(self, request: Request) -> BoundProgram | None:
        """Returns the program that is bound to what a call reaches, if there is one."""
        for entry in self._bound.get(request.lookup_key, ()):
            if entry.binding.matches(request.roots) and entry.is_current():
                self._note_repeatable(request, entry)
                return entry
        return None

    def _note_repeatable(self, request: Request, entry: BoundProgram) -> None:
        """Notes a call without anything to check or to log before its program runs again."""
        arguments, verified = request.arguments, entry.program.verified
        if arguments.is_repeatable and request.options.verify in verified and not entry.call_log:
            args, kwargs = arguments.unflatten(arguments.leaves)
            repeated = RepeatedArguments(args, kwargs, arguments.batches)
            self._repeatable[request.lookup_key[0]] = entry, request.options, repeated

    def repeated(
        self, captured: Captures, args: tuple[Any, ...], kwargs: dict[str, Any], options: RunOptions
    ) -> tuple[BoundProgram, list[Any]] | None:
        """Returns program and inputs of a call like the last one of its step; None for any other call."""
        entry, last_options, arguments = self._repeatable.get(tuple(captured.key), _NO_CALL)
        if options is not last_options or (arrays := arguments.arrays(args, kwargs)) is None:
            return None
        if not (entry.binding.matches(captured.values) and entry.is_current()):
            return None
        return entry, entry.flat_state(captured.values, arrays, arguments.batches)

    def call(self, request: Request, binding: Binding) -> Call:
        """Returns the call that is traced for a request."""
        return Call(request.fn, binding, request.arguments, self._strategy, self._replicas.mesh)

    def bind(self, request: Request, *, warn: bool = True, may_create: bool = True) -> BoundProgram:
        """Binds a program to what a call reaches; builds one if there is none for it."""
        fn, arguments, lookup_key = request.fn, request.arguments, request.lookup_key
        name = step_name(fn)
        check_function(fn)
        if _context.plan_hooks:
            show = _context.plan_hooks.pop()
            planned = fn, arguments, request.options
            show(functools.partial(plan_step, self._strategy, self._replicas, *planned))
        self.remove_dead()
        binding = Binding(fn, arguments)
        check_leaked_tracers(binding)
        placement = self._place(name, binding, request, warn=warn)
        key = (binding.key, placement, *lookup_key[1:])
        program = self.programs.get(key)
        single_call = None
        if program is None:
            call = self.call(request, binding)
            contents = copy_contents(binding.containers())
            with (
                contents_restored_on_error(contents), explain_compile_errors(name), preparing(),
                doing(f"{COMPILING} {name}"),
            ):  # fmt: skip
                before, captured = binding, binding.captured_arrays()
                with self.tracing(request):
                    program = build(call, request.options, self._replicas)
                if program.traced.created:
                    self._create(request, call, program, may_create=may_create)
                    return self.bind(request, warn=warn, may_create=False)
                # Side effects of the trace, such as counting calls, must not compile the step again.
                binding = Binding(fn, arguments)
                check_leaked_tracers(binding)
            self._recompilations.note(fn, before, arguments)
            if num_replicas(self._replicas.mesh) > 1:
                self._log_notices(binding, program, request.options)
            if binding.reaches_same(before, captured):
                key = (binding.key, placement, *lookup_key[1:])
                self._add(key, program)
            else:  # The step moved variables or arrays: the program is right for this call only.
                single_call = before.with_arrays(captured)
        fingerprint = check_same_program(
            name, program, arguments, binding, placement, request.options, self._strategy,
            self._replicas.mesh,
        )  # fmt: skip
        if single_call is not None:
            entry = BoundProgram(program, single_call, name)
            entry.contents = contents
            return entry
        self.programs.move_to_end(key)
        program.add_owners(binding.owners())
        entry = BoundProgram(program, binding, name)
        entry.call_log = CallLog(entry, fingerprint) if fingerprint else None
        binding.on_release.append(entry.release)
        others = [e for e in self._bound.get(lookup_key, ()) if not _replaces(entry, e)]
        self._bound[lookup_key] = [entry, *others][:_MAX_PROGRAMS]
        return entry

    def _log_notices(self, binding: Binding, program: Program, options: RunOptions) -> None:
        """Logs each reason why a newly compiled step differs from one device, once."""
        for notice in _notices(binding, program):
            if notice.key not in self._noticed:
                self._noticed.add(notice.key)
                # The library's own steps draw random numbers on each replica by design.
                is_expected = notice.text is _RANDOM and are_of_library(options)
                level = logging.INFO if is_expected else logging.WARNING
                _log.log(level, notice.text, *notice.named)

    def _add(self, key: Any, program: Program) -> None:
        """Adds a program, and evicts the least recently used one if there are too many."""
        self.programs[key] = program
        if len(self.programs) > _MAX_PROGRAMS:
            _, oldest = self.programs.popitem(last=False)
            for bound in self._bound.values():
                bound[:] = [e for e in bound if e.program is not oldest]

    @contextmanager
    def tracing(self, request: Request, entry: BoundProgram | None = None) -> Iterator[None]:
        """Binds the programs of a step again after a block that traces it, if they matched before.

        Side effects of the trace, such as counting calls, must not compile the programs of the same step
        for other batches again.
        """
        before = [
            (key, bound, bound.binding.captured_arrays())
            for key, entries in self._bound.items()
            if key[0] == request.lookup_key[0]
            for bound in entries
            if bound.binding.matches(request.roots)
        ]
        with contents_as_before(entry.contents if entry is not None else []):
            yield
        for key, bound, arrays in before:
            if bound in self._bound.get(key, ()) and not bound.binding.matches(request.roots):
                binding = Binding(request.fn, request.arguments)
                if binding.reaches_same(bound.binding, arrays):
                    self._rebind(self._bound[key], bound, binding)

    def _rebind(self, entries: list[BoundProgram], old: BoundProgram, binding: Binding) -> None:
        new = BoundProgram(old.program, binding, old.step)
        new.call_log = old.call_log
        binding.on_release.append(new.release)
        entries[entries.index(old)] = new
        for key in [k for k, program in self.programs.items() if program is old.program]:
            if key[0] == old.binding.key:
                self.programs[binding.key, *key[1:]] = self.programs.pop(key)

    def _place(
        self, step: str, binding: Binding, request: Request, *, warn: bool
    ) -> tuple[Any, ...]:
        """Places state where it is stored between steps, and returns the sharding of each leaf."""
        shardings = self._replicas.shardings(binding.variables, binding.paths)
        lowering = request.options.lowering
        if any((*shardings, *request.arguments.shardings)) and lowering == "pmap":
            raise LoweringError(
                _NEEDS_REPLICATED.format(strategy=self._strategy, lowering=lowering)
            )
        place_state(binding, self._replicas, shardings, warn=warn)
        agree_on_values(step, binding, self._replicas.mesh)
        divide_state(binding, shardings)
        return shardings

    def _create(self, request: Request, call: Call, program: Program, *, may_create: bool) -> None:
        """Computes and stores the first values of variables that a step creates."""
        created, step = program.traced.created, step_name(call.fn)
        entry = BoundProgram(program, call.binding, step)
        arrays = entry.execute(entry.flat_inputs(request.roots, call.arguments))
        with naming_step(
            step, program
        ):  # it is not in flight, so the step must not begin before it ends
            jax.block_until_ready(arrays)
        store_first_values(created, entry.wrap(arrays))
        if not may_create:
            raise created_again_error(created)

    def remove_dead(self) -> None:
        """Removes programs and entries whose models were deleted, so that no call can use them again."""
        alive = {key: [e for e in old if e.binding.alive] for key, old in list(self._bound.items())}
        self._bound = {key: entries for key, entries in alive.items() if entries}
        self._repeatable = {}
        for key in [k for k, program in self.programs.items() if not program.is_alive()]:
            del self.programs[key]


@functools.lru_cache(maxsize=64)
def _compiled_options(options: RunOptions) -> RunOptions | None:
    """Returns the options that change the program; None for the default."""
    compiled = replace(options, verify="off")
    return None if compiled == UNVERIFIED else compiled


def _replaces(new: BoundProgram, old: BoundProgram) -> bool:
    """True if an entry would keep alive parts of a model that were replaced since."""
    if list(map(id, old.binding.variables)) == list(map(id, new.binding.variables)):
        return old.program is new.program
    return bool(old.binding.model_ids & new.binding.model_ids)


_WARN_AT = 5
_MAX_COUNTED_STEPS = 256


class Recompilations:
    """Counts the programs of each step, with the shapes and constants of the last one.

    The same step on another model is counted separately: to train five models of one class is not a
    mistake.
    """

    def __init__(self) -> None:
        self._seen: dict[Any, tuple[int, dict[str, Any], tuple[Any, ...]]] = {}

    def note(self, fn: Any, binding: Binding, arguments: Arguments) -> None:
        """Counts a program; warns at the fifth for the same code and models."""
        name = step_name(fn)  # wrappers share their code, but not their name
        code = (binding.key[0], name, frozenset(binding.model_ids))
        facts = {**binding.statics, **_argument_facts(arguments)}
        times, before, owners = self._seen.get(code, (0, {}, ()))
        if any(owner() is None for owner in owners):
            times, before = 0, {}  # the id of a deleted model was reused
        if len(self._seen) > _MAX_COUNTED_STEPS:
            self._seen.clear()
        self._seen[code] = (times + 1, facts, binding.owners())
        if times + 1 == _WARN_AT:
            changed = [
                f"{name} ({before[name]} then {facts[name]})"
                for name in facts
                if name in before and before[name] != facts[name]
            ]
            unknown = "an object or function that it captures is a new one at each call"
            what = ", ".join(changed[:4]) or unknown
            warn_user(
                f"{name} was compiled {_WARN_AT} times. What changed last: "
                f"{what}. Each new value or shape compiles a new program: pass a number that changes "
                "in args, where it is data, and keep batch shapes equal."
            )


def _argument_facts(arguments: Arguments) -> dict[str, Any]:
    facts = zip(arguments.names, arguments.kinds, arguments.leaves, strict=True)
    described: dict[str, Any] = {}
    for name, kind, leaf in facts:
        if kind == "static":
            described[name] = leaf
        elif kind == "data":
            value = getattr(leaf, "global_array", leaf)
            described[name] = getattr(value, "shape", type(value).__name__)
        else:
            described[name] = type(leaf).__name__
    return described


_STATISTICS = (
    "%s (%s) uses the statistics of each replica's share of the batch and averages its running "
    "statistics, so this step is not exactly that of one device. For statistics of the whole batch make "
    'it with axis_name="data".'
)
_MEAN = (
    "%s (%s) ends a step as the mean of the replicas' values, each computed from its share of the batch, so "
    "this step is not exactly that of one device. For the value of the whole batch, combine in the step "
    'what it is computed from: dj.get_replica_context().all_reduce("mean", statistics).'
)
_RANDOM = (
    "%s (%s) draws different random numbers on each replica, so this step is not exactly that of one "
    "device. To compare runs, turn randomness off with model.eval(), or let the stream draw the same "
    "numbers on all replicas with dj.same_on_all_replicas(stream)."
)


def _notices(binding: Binding, program: Program) -> Iterator[Notice]:
    rules = iter(program.plan.combine)
    nodes = dict(zip(binding.node_names, binding.nodes, strict=True))
    traced = program.traced
    jaxpr = traced.jaxpr.jaxpr
    _, needed = needed_only(jaxpr, range(len(jaxpr.outvars)))
    starts = zip(binding.variables, traced.input_starts, strict=False)
    # Keys that are drawn and not used, as an RNN's for its first carry, which is zeros.
    ignored = {id(v) for v, start in starts if isinstance(v, nnx.RngKey) and start not in needed}
    for index in program.traced.written:
        rule = list(itertools.islice(rules, len(traced.inputs_of(index))))
        variable, name = binding.variables[index], binding.names[index]
        owner = name.rpartition(".")[0]
        node = nodes[owner]() if owner in nodes else None
        # A variable may be captured by itself.
        path, about = (owner, node) if node is not None else (name, variable)
        named = (path, type(about).__name__)
        if Combine.MEAN in rule:
            yield Notice(_STATISTICS if hasattr(node, "axis_name") else _MEAN, named, about)
        is_ignored = id(getattr(node, "key", None)) in ignored
        if (
            isinstance(variable, nnx.RngCount)
            and draws_per_replica(variable, node)
            and not is_ignored
        ):
            yield Notice(_RANDOM, named, about)
    yield from program.plan.notices
