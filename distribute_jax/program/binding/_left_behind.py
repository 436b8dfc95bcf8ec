"""Arrays of a trace that the step left in the user's objects: found, named, and taken out again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from distribute_jax._errors import StaleCaptureError
from distribute_jax._internals import read_raw
from distribute_jax._tree import listed
from distribute_jax.program.binding._bind import Binding

_LEFT = """\
The step left arrays in objects that outlive it:
{lines}
They have numbers only while the step is traced, which happens once, so later code could not read \
them. Return the array instead; state that a step changes lives in a variable made before, \
state = nnx.Variable(value), and state[...] = value in the step. Numbers for a log go out with \
jax.debug.callback."""


@contextmanager
def contents_restored_on_error(binding: Binding) -> Iterator[None]:
    """Puts dicts, lists and attributes back as they were, if tracing the step fails."""
    containers = binding.watch.containers
    before: list[Any] = [container.copy() for container in containers]
    try:
        yield
    except BaseException:
        for container, old in zip(containers, before, strict=True):
            if isinstance(container, dict):
                container.clear()
                container.update(old)
            else:
                container[:] = old
        raise


def check_left_behind(binding: Binding) -> None:
    """Raises where an object that the step reaches holds an array of a trace that has ended."""
    left = [name for name, place, _ in binding.arrays if _is_traced(place.get())]
    raws = read_raw(binding.variables)
    left += [
        f"{name} ({type(variable).__name__})"
        for name, variable, raw in zip(binding.names, binding.variables, raws, strict=True)
        if any(map(_is_traced, jax.tree.leaves(raw)))
    ]
    if left:
        raise StaleCaptureError(_LEFT.format(lines=listed(left)))


def _is_traced(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)
