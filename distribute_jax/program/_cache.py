"""The cache of compiled programs: lookup through later traces, and a warning about recompilation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from distribute_jax._user_frames import warn_user
from distribute_jax.program._arguments import Arguments
from distribute_jax.program._binding import Binding
from distribute_jax.program._call import BoundProgram
from distribute_jax.program._capture import captures
from distribute_jax.program._program import Program


@contextmanager
def looked_up_by_trace(
    entries: MutableMapping[Any, list[BoundProgram]],
    programs: MutableMapping[Any, Program],
    fn: Callable[..., Any],
    arguments: Arguments,
) -> Iterator[None]:
    """Binds the entries of a step again after a block that traces it, if they held before.

    What Python does while a step is traced, such as counting calls, is not done again, so it is no
    reason to compile the programs of the same step for other batches again.

    Args:
        entries: the entries of all steps, by what is compared first at a call.
        programs: the compiled programs, by the whole key.
        fn: the step.
        arguments: of the call for which it is traced.
    """
    found = captures(fn)
    values = found.values + arguments.bound
    held = [
        (head, entry, entry.binding.captured())
        for head, some in entries.items()
        if head[0] == tuple(found.key)
        for entry in some
        if entry.binding.holds(values)
    ]
    yield
    for head, entry, arrays in held:
        if entry in entries.get(head, ()) and not entry.binding.holds(values):
            binding = Binding(fn, arguments)
            if binding.reaches_same(entry.binding.variables, arrays):
                _bind_again(entries[head], programs, entry, binding)


def _bind_again(
    some: list[BoundProgram],
    programs: MutableMapping[Any, Program],
    old: BoundProgram,
    binding: Binding,
) -> None:
    """Replaces an entry by one for the objects as they are now."""
    new = BoundProgram(old.program, binding, old.step)
    new.calls = old.calls
    binding.on_release.append(new.release)
    some[some.index(old)] = new
    for key in [k for k, program in programs.items() if program is old.program]:
        if key[0] == old.binding.key:
            programs[binding.key, *key[1:]] = programs.pop(key)


_MANY = 5
_REMEMBERED = 256


class Recompilations:
    """Counts the programs of each step on its own models, and what the last one was made for.

    The same step on another model is another count: five models of one class are no mistake.
    """

    def __init__(self) -> None:
        """Starts with no step seen."""
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
            what = (
                ", ".join(changed[:4])
                or "an object or function that it captures is a new one at each call"
            )
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
