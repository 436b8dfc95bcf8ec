"""An equation of a step beside the same one where the shares have another length."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, Protocol

import numpy as np
from jax.extend.core import Jaxpr

from distribute_jax.program.proof._marks import ClosedJaxpr, line, name
from distribute_jax.program.proof._padding_marks import Mark

Shape = tuple[int, ...]


class Walk(Protocol):
    """What a rule may ask of the pass that applies it."""

    shares: tuple[int, int]


class Pair:
    """An equation of the step, and the same one where the shares have another length."""

    def __init__(self, eqn: Any, other: Any) -> None:
        """Takes both equations."""
        self.eqn, self.other = eqn, other
        self.name: str = eqn.primitive.name if eqn is not None else ""

    @functools.cached_property
    def where(self) -> str:
        """The operation and the user's line."""
        return f"{name(self.eqn)} at {line(self.eqn)}" if self.eqn is not None else "a result"

    @property
    def is_alike(self) -> bool:
        """Whether both are the same operation on as many operands."""
        return (
            self.eqn.primitive is self.other.primitive
            and len(self.eqn.invars) == len(self.other.invars)
            and len(self.eqn.outvars) == len(self.other.outvars)
        )

    @property
    def has_refs(self) -> bool:
        """Whether it reads or writes a ref."""
        return any(_is_ref(var) for var in (*self.eqn.invars, *self.eqn.outvars))

    @property
    def varies(self) -> bool:
        """Whether an output has another shape where the shares have another length."""
        return any(a != b for a, b in map(self.out, range(len(self.eqn.outvars))))

    def operand(self, index: int) -> tuple[Shape, Shape]:
        """Returns both shapes of an operand."""
        return _shape(self.eqn.invars[index]), _shape(self.other.invars[index])

    def out(self, index: int = 0) -> tuple[Shape, Shape]:
        """Returns both shapes of an output."""
        return _shape(self.eqn.outvars[index]), _shape(self.other.outvars[index])

    def dtype(self, index: int = 0) -> Any:
        """Returns the dtype of an operand."""
        return self.eqn.invars[index].aval.dtype

    def varying(self, index: int = 0) -> list[int]:
        """Returns the dims of an output whose length differs."""
        return [d for d, (a, b) in enumerate(zip(*self.out(index), strict=True)) if a != b]

    def params(self, key: str) -> tuple[Any, Any]:
        """Returns both values of a parameter."""
        return self.eqn.params[key], self.other.params[key]

    def changed_params(self, allowed: Collection[str] = ()) -> bool:
        """Returns whether a parameter other than those allowed differs."""
        two = self.other.params
        return any(
            key not in allowed and not _same(v, two.get(key)) for key, v in self.eqn.params.items()
        )


def _shape(atom: Any) -> Shape:
    return tuple(getattr(atom.aval, "shape", ()))


def _is_ref(var: Any) -> bool:
    return type(var.aval).__name__ == "AbstractRef" or bool(getattr(var.aval, "has_qdd", False))


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, (Jaxpr, ClosedJaxpr)):
        return str(one) == str(other)
    if isinstance(one, (tuple, list)) and type(one) is type(other):
        return len(one) == len(other) and all(map(_same, one, other))
    try:
        return bool(np.all((one == other) | ((one != one) & (other != other))))
    except (TypeError, ValueError):
        return False


Rule = Callable[[Walk, Pair, list[Mark]], "list[Mark] | None"]
