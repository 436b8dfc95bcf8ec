"""What the thread that reads ahead has in common with the thread of the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import jax

from distribute_jax import _context


def surroundings() -> Callable[[], AbstractContextManager[None]]:
    """Gives a function that makes the surroundings of this thread in another one.

    Sources are the user's code: what they make lies where it would in the loop, with the same
    precision, and ``get_strategy`` gives the same strategy.
    """
    top = _context.entered()
    config: Any = jax.config
    x64, device = config.jax_enable_x64, config.jax_default_device

    @contextmanager
    def same() -> Iterator[None]:
        with ExitStack() as entered:
            entered.enter_context(jax.enable_x64(x64))
            entered.enter_context(jax.default_device(device))
            if top is not None:
                entered.enter_context(top.strategy.scope())
            entered.enter_context(_context.reading_ahead())
            yield

    return same
