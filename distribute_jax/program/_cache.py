"""The compiled programs of a strategy: looked up at each call of ``run``, built where none serves it."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from distribute_jax import _context
from distribute_jax._errors import LoweringError
from distribute_jax._mesh import num_replicas
from distribute_jax._user_frames import warn_user
from distribute_jax.processes import COMPILING, doing
from distribute_jax.program._across_processes import Calls, agree_on_values, check_same_program
from distribute_jax.program._ahead_of_time import StepPlan, plan_step
from distribute_jax.program._arguments import Arguments, check_function
from distribute_jax.program._binding import (
    Binding,
    check_leaked_tracers,
    contents_as_before,
    contents_of,
    contents_restored_on_error,
)
from distribute_jax.program._call import BoundProgram
from distribute_jax.program._capture import captures
from distribute_jax.program._failures import Notices
from distribute_jax.program._options import UNVERIFIED, RunOptions, default_run_options
from distribute_jax.program._placement import Replicas
from distribute_jax.program._preparation import preparing
from distribute_jax.program._program import Program, build
from distribute_jax.program._state_placement import divide_state, place_state
from distribute_jax.program._trace import Call, give_first_values, made_again
from distribute_jax.program._trace_errors import compilable, step_name

_MOST_PROGRAMS = 64

_WHOLE = """\
RunOptions(lowering="{lowering}") keeps all state whole on each device, but under {strategy} the replicas \
share the state of optimizers. Use RunOptions(lowering="shard_map"), the default, or make the strategy \
without shard_optimizer_state=True."""


class Request:
    """One call of ``run``, analysed once: the step, what it reaches directly, its arguments and options."""

    __slots__ = ("arguments", "fn", "head", "options", "values")

    def __init__(self, fn: Callable[..., Any], arguments: Arguments, options: RunOptions) -> None:
        captured = captures(fn)
        self.fn, self.arguments, self.options = fn, arguments, options
        self.values = captured.values + arguments.bound
        """What is compared by identity with what a program is bound to."""
        default = options is UNVERIFIED or options is default_run_options()
        self.head = (
            tuple(captured.key), arguments.signature, None if default else _compiled_options(options),
        )  # fmt: skip
        """What is compared first: code, signature and options, quick to hash."""


class ProgramCache:
    """Programs by what they were compiled for, and by the objects that they are bound to."""

    def __init__(
        self,
        strategy: Any,
        replicas: Replicas,
        execute: Callable[[BoundProgram, list[Any]], list[Any]],
    ) -> None:
        """Starts empty; ``execute`` runs a program once, for a step that makes variables."""
        self._strategy, self._replicas, self._execute = strategy, replicas, execute
        self._bound: dict[Any, list[BoundProgram]] = {}
        self.programs: OrderedDict[Any, Program] = OrderedDict()
        self._recompilations = Recompilations()
        self._notices = Notices()

    def lookup(self, request: Request) -> BoundProgram | None:
        """Returns the program that is bound to what a call reaches, if there is one."""
        for entry in self._bound.get(request.head, ()):
            if entry.binding.holds(request.values):
                return entry
        return None

    def call(self, request: Request, binding: Binding) -> Call:
        """Returns what is traced for a request."""
        return Call(request.fn, binding, request.arguments, self._strategy, self._replicas.mesh)

    def plan(
        self, fn: Callable[..., Any], arguments: Arguments, options: RunOptions, number: int | None
    ) -> StepPlan:
        """Compiles a step for a number of replicas, without running it."""
        return plan_step(self._strategy, self._replicas, fn, arguments, options, number)

    def bind(self, request: Request, *, warn: bool = True, may_create: bool = True) -> BoundProgram:
        """Binds a program to what a call reaches, and builds it where none serves it."""
        fn, arguments, head = request.fn, request.arguments, request.head
        name = step_name(fn)
        check_function(fn)
        if _context.plan_hooks:
            show = _context.plan_hooks.pop()
            show(functools.partial(self.plan, fn, arguments, request.options))
        self.forget_dead()
        binding = Binding(fn, arguments)
        check_leaked_tracers(binding)
        placement = self._place(name, binding, request, warn=warn)
        key = (binding.key, placement, *head[1:])
        program = self.programs.get(key)
        once = None
        if program is None:
            self._recompilations.note(fn, binding, arguments)
            call = self.call(request, binding)
            contents = contents_of(binding.watch.containers)
            with (
                contents_restored_on_error(contents), compilable(name), preparing(),
                doing(f"{COMPILING} {name}"),
            ):  # fmt: skip
                before, captured = binding, binding.captured()
                with self.tracing(request):
                    program = build(call, request.options, self._replicas)
                if program.traced.created:
                    self._create(request, call, program, may_create=may_create)
                    return self.bind(request, warn=warn, may_create=False)
                # What Python did while it was traced, such as counting calls, is not done again.
                binding = Binding(fn, arguments)
                check_leaked_tracers(binding)
            if num_replicas(self._replicas.mesh) > 1:
                # In the library's own steps what differs from one device does so by design.
                self._notices.give(binding, program, quietly=request.options is UNVERIFIED)
            if binding.reaches_same(before.variables, captured):
                key = (binding.key, placement, *head[1:])
                self._keep(key, program)
            else:  # The step moved, removed or added some: the program serves this call alone.
                once = before.with_arrays(captured)
        fingerprint = check_same_program(name, program, arguments, self._replicas.mesh)
        if once is not None:
            entry = BoundProgram(program, once, name)
            entry.contents = contents
            return entry
        self.programs.move_to_end(key)
        program.add_owners(binding.owners())
        entry = BoundProgram(program, binding, name)
        entry.calls = Calls(entry, fingerprint) if fingerprint else None
        binding.on_release.append(entry.release)
        kept = [e for e in self._bound.get(head, ()) if _stays(e, entry)]
        self._bound[head] = [entry, *kept][:_MOST_PROGRAMS]
        return entry

    def _keep(self, key: Any, program: Program) -> None:
        """Keeps a program for later calls, in place of the one that was used the longest ago."""
        self.programs[key] = program
        if len(self.programs) > _MOST_PROGRAMS:
            _, oldest = self.programs.popitem(last=False)
            for bound in self._bound.values():
                bound[:] = [e for e in bound if e.program is not oldest]

    @contextmanager
    def tracing(self, request: Request, entry: BoundProgram | None = None) -> Iterator[None]:
        """Binds the programs of a step again after a block that traces it, if they held before.

        What Python does while a step is traced, such as counting calls, is not done again, so it is no
        reason to compile the programs of the same step for other batches again.
        """
        before = [
            (head, bound, bound.binding.captured())
            for head, some in self._bound.items()
            if head[0] == request.head[0]
            for bound in some
            if bound.binding.holds(request.values)
        ]
        with contents_as_before(entry.contents if entry is not None else []):
            yield
        for head, bound, arrays in before:
            if bound in self._bound.get(head, ()) and not bound.binding.holds(request.values):
                binding = Binding(request.fn, request.arguments)
                if binding.reaches_same(bound.binding.variables, arrays):
                    self._bind_again(self._bound[head], bound, binding)

    def _bind_again(self, some: list[BoundProgram], old: BoundProgram, binding: Binding) -> None:
        new = BoundProgram(old.program, binding, old.step)
        new.calls = old.calls
        binding.on_release.append(new.release)
        some[some.index(old)] = new
        for key in [k for k, program in self.programs.items() if program is old.program]:
            if key[0] == old.binding.key:
                self.programs[binding.key, *key[1:]] = self.programs.pop(key)

    def _place(
        self, step: str, binding: Binding, request: Request, *, warn: bool
    ) -> tuple[Any, ...]:
        """Places state where it is stored between steps, and returns how each leaf is sharded."""
        shardings = self._replicas.shardings(binding.variables, binding.paths)
        lowering = request.options.lowering
        if any((*shardings, *request.arguments.shardings)) and lowering == "pmap":
            raise LoweringError(_WHOLE.format(strategy=self._strategy, lowering=lowering))
        place_state(binding, self._replicas, shardings, warn=warn)
        agree_on_values(step, binding, self._replicas.mesh)
        divide_state(binding, shardings)
        return shardings

    def _create(self, request: Request, call: Call, program: Program, *, may_create: bool) -> None:
        """Computes the first values of variables that a step makes."""
        created = program.traced.created
        entry = BoundProgram(program, call.binding, step_name(call.fn))
        arrays = self._execute(entry, entry.flat_inputs(request.values, call.arguments))
        give_first_values(created, entry.wrap(arrays))
        if not may_create:
            raise made_again(created)

    def forget_dead(self) -> None:
        """Removes what no call can use again: a model that it was compiled for is gone."""
        for head, entries in list(self._bound.items()):
            self._bound[head] = [e for e in entries if e.binding.alive]
            if not self._bound[head]:
                del self._bound[head]
        for key in [k for k, program in self.programs.items() if not program.is_wanted()]:
            del self.programs[key]


@functools.lru_cache(maxsize=64)
def _compiled_options(options: RunOptions) -> RunOptions | None:
    """Leaves out what changes nothing about the program; None for the default."""
    without = replace(options, verify="off")
    return None if without == UNVERIFIED else without


def _stays(old: BoundProgram, new: BoundProgram) -> bool:
    """Returns whether an entry is kept beside a new one: it must not keep replaced parts alive."""
    if list(map(id, old.binding.variables)) == list(map(id, new.binding.variables)):
        return old.program is not new.program
    return not old.binding.shares_roots(new.binding)


_MANY = 5
_REMEMBERED = 256


class Recompilations:
    """Counts the programs of each step on its own models, and what the last one was made for.

    The same step on another model is another count: five models of one class are no mistake.
    """

    def __init__(self) -> None:
        self._seen: dict[Any, tuple[int, dict[str, Any], tuple[Any, ...]]] = {}

    def note(self, fn: Any, binding: Binding, arguments: Arguments) -> None:
        """Notes that a program is being built; warns at the fifth for the same code and models."""
        name = getattr(fn, "__name__", None)  # wrappers share their code, and not their name
        code = (binding.key[0], name, frozenset(binding.anchors))
        facts = {**binding.statics, **_argument_facts(arguments)}
        times, before, owners = self._seen.get(code, (0, {}, ()))
        if any(owner() is None for owner in owners):
            times, before = 0, {}  # another model has got the identity of one that is gone
        if len(self._seen) > _REMEMBERED:
            self._seen.clear()
        self._seen[code] = (times + 1, facts, binding.owners())
        if times + 1 == _MANY:
            changed = [
                f"{name} ({before[name]} then {facts[name]})"
                for name in facts
                if name in before and before[name] != facts[name]
            ]
            new = "an object or function that it captures is a new one at each call"
            what = ", ".join(changed[:4]) or new
            warn_user(
                f"{getattr(fn, '__qualname__', fn)} was compiled {_MANY} times. What changed last: "
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
