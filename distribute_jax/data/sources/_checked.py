"""The arguments of a dataset's methods, checked."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from distribute_jax._errors import ArgumentError
from distribute_jax._tree import leaf_text
from distribute_jax._typing import PyTree


def checked_integer(argument: str, value: Any, least: int, below: int | None = None) -> int:
    """Gives an integer argument back; ``argument`` names it, as in ``batch(size=…)``."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least or (below is not None and number >= below):
        limit = "" if below is None else f" and below {below}"
        raise ArgumentError(
            f"{argument.replace('…', repr(value)):.100}: it must be an integer of at least {least}{limit}."
        )
    return number


def checked_seed(value: Any) -> int:
    """Gives the seed of a ``shuffle`` back; 32 bits, as JAX's and Grain's seeds."""
    return checked_integer("shuffle(seed=…)", value, 0, 2**32)


def checked_buffer(size: Any) -> int | None:
    """Returns the size of a ``shuffle``'s buffer; None stays None."""
    if size is None:
        return None
    try:
        return checked_integer("shuffle(buffer_size=…)", size, 1)
    except ArgumentError as error:
        raise ArgumentError(f"{error} The seed is passed by name: shuffle(seed=0).") from None


def checked_function(fn: Callable[[PyTree], PyTree]) -> Callable[[PyTree], PyTree]:
    """Wraps the function of a ``map``, so that a forgotten ``return`` is an error."""
    if not callable(fn):
        raise ArgumentError(
            f"map(fn) got {leaf_text(fn)}. It takes a function of one example, or of one batch where the "
            "dataset is batched."
        )

    def call(value: PyTree) -> PyTree:
        result = fn(value)
        if result is None:
            raise ArgumentError(
                f"The function {fn!r:.60} given to map returned None. It must return what becomes of the "
                "example or the batch that it was given."
            )
        return result

    return call
