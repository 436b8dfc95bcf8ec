"""An output to wait for, where a step gives nothing but state, which the next step takes away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from distribute_jax.program.lowering._lower import Layouts
from distribute_jax.program.lowering._lowerings import Compile, Compiled
from distribute_jax.program.tracing._trace import Call


def only_state(lies: Layouts) -> bool:
    """Tells whether every output of a step is state."""
    return len(lies.mirrored) == lies.state


def with_token(compile_step: Compile) -> Compile:
    """Gives a lowering whose programs have one more output, the last, where all others are state.

    All outputs of a program are there at once, so a number that costs nothing tells when the state is,
    also when a later step has taken that. Without it the loop would wait for the newest step.
    """

    def compile_with_token(
        call: Call, step: Compiled, lies: Layouts, avals: Sequence[Any], donated: Sequence[int]
    ) -> Compiled:
        if not only_state(lies):
            return compile_step(call, step, lies, avals, donated)
        more = replace(lies, mirrored=(*lies.mirrored, True))
        return compile_step(call, _and_token(step), more, avals, donated)

    return compile_with_token


def _and_token(step: Compiled) -> Callable[..., list[Any]]:
    def and_token(*flat: Any) -> list[Any]:
        return [*step(*flat), jnp.ones((), jnp.uint32)]

    and_token.__name__ = and_token.__qualname__ = getattr(step, "__name__", "step")
    return and_token
