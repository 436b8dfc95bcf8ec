"""Programs serve on after a trace that changed, by the way, what they are bound to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from distribute_jax.program._entry import Entry
from distribute_jax.program._program import Program
from distribute_jax.program.binding._arguments import Arguments
from distribute_jax.program.binding._bind import Binding
from distribute_jax.program.binding._capture import roots


@contextmanager
def bound_through_traces(
    entries: MutableMapping[Any, list[Entry]],
    programs: MutableMapping[Any, Program],
    fn: Callable[..., Any],
    arguments: Arguments,
) -> Iterator[None]:
    """Binds the entries of a step anew after a block that traces it, if they held before.

    What Python does while a step is traced, such as counting calls, is not done again, so it is no
    reason to compile the programs of the same step for other batches again.

    Args:
        entries: the entries of all steps, by what is compared first at a call.
        programs: the compiled programs, by the whole key.
        fn: the step.
        arguments: of the call for which it is traced.
    """
    found = roots(fn)
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
    some: list[Entry], programs: MutableMapping[Any, Program], old: Entry, binding: Binding
) -> None:
    """Replaces an entry by one for the objects as they are now."""
    new = Entry(old.program, binding, old.step)
    new.calls = old.calls
    binding.on_release.append(new.release)
    some[some.index(old)] = new
    for key in [k for k, program in programs.items() if program is old.program]:
        if key[0] == old.binding.key:
            programs[binding.key, *key[1:]] = programs.pop(key)
