"""Walks like that of the proof of sync, for other questions: parts of means, and equal random numbers.

What ``compute_average_loss`` returns is a ``Part``: the replicas' sum of it is the mean, and their mean is N
times too small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np

from distribute_jax._mesh import DATA
from distribute_jax.collectives._markers import part_gradient_p, part_of_mean_p
from distribute_jax.program._jaxprs import (
    equations,
    frames,
    is_literal,
    is_of_pmean,
    line,
    names_axis,
    user_line,
)
from distribute_jax.program._replication import (
    MIRRORED,
    RULES,
    Mark,
    Ref,
    ReplicationWalk,
    contents,
    union,
)
from distribute_jax.program._walk import LINEAR, Marks

_CALLBACKS = frozenset({"pure_callback", "io_callback", "debug_callback", "debug_print"})
SHAPES = frozenset({"broadcast_in_dim", "convert_element_type", "reshape", "squeeze"})
_OF_NUMBERS = SHAPES | {"div", "mul"}
_MAKE_MARKS = frozenset({"part_of_mean", "real_rows"})
OVER_ROWS = frozenset({"argmax", "argmin", "reduce_max", "reduce_min", "reduce_prod"})


_COLLECTIVES = "/distribute_jax/collectives/"


class Word(str):
    """A mark with a text, as a line; those of different kinds are not equal."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and str.__eq__(self, other)

    __hash__ = str.__hash__


def words_of(mark: Mark, *kinds: type[str]) -> Mark:
    """Returns the words of a mark that are of some kinds."""
    return frozenset(word for word in mark if isinstance(word, kinds))


class Part(Word):
    """The mark of a part of a mean: the line that made it."""


class ScaledPart(Part):
    """The mark of a value computed from a part, which may be a complete mean by that."""


class _SummedPart(Word):
    """The mark of the sum of parts over the replicas, which is the mean: the line that made the parts."""


class MeanOfParts(Word):
    """The mark of a mean of parts over the replicas: the line that made the parts."""


class _Gradient(Word):
    """The mark of gradients of a part: the line that made the part."""


class _SummedGradient(_SummedPart):
    """The mark of the sum of such gradients over the replicas."""


class MeanOfGradients(MeanOfParts):
    """The mark of the mean of such gradients over the replicas."""


class Constant(str):
    """The mark of an array whose elements are all one number, and by what that was divided."""

    __slots__ = ("divisors", "number")
    number: float
    divisors: tuple[float, ...]

    def __new__(cls, number: float, divisors: Sequence[float] = ()) -> Self:
        word = super().__new__(cls, f"{number}, divided by {divisors}")
        word.number, word.divisors = number, tuple(divisors)
        return word


@dataclass(frozen=True)
class Parts:
    """Where the parts of means in a program end up."""

    outputs: list[Mark]
    """The mark of each output of the program."""
    callbacks: list[tuple[str, str]]
    """The lines of callbacks that get a part, with the line that made the part."""


class NoticeWalk(ReplicationWalk):
    """Ignores collectives, for which the proof has passed."""

    def apply(self, eqn: Any, marks: Marks) -> Marks:
        return marks if eqn.primitive is part_of_mean_p else super().apply(eqn, marks)

    def is_unmarked(self, eqn: Any, marks: Marks) -> bool:
        """True for an operation on values without a mark, but for literals: most of an optimizer."""
        if eqn.primitive.name in RULES or eqn.primitive.name in _MAKE_MARKS:
            return False
        operands = [m for v, m in zip(eqn.invars, marks, strict=True) if not is_literal(v)]
        return bool(operands) and not any(operands)

    def at(self) -> str:
        """Returns the user's line, which is that of a call if JAX itself traced the function."""
        known = (user_line(eqn) for eqn in reversed(self.enclosing))
        return next(filter(None, known), "an unknown line")

    def meet(self, eqn: Any) -> None:
        """Does nothing."""


def takes_parts(jaxpr: Any) -> bool:
    """True if a step calls ``compute_average_loss``."""
    # Of a loss that is not read, the gradient alone is left.
    parts = part_of_mean_p, part_gradient_p
    return any(eqn.primitive in parts for eqn in equations(jaxpr.jaxpr))


def parts_of_means(jaxpr: Any, replicas: int) -> Parts:
    """Follows the results of ``compute_average_loss``."""
    if not takes_parts(jaxpr):
        return Parts([MIRRORED] * len(jaxpr.jaxpr.outvars), [])
    walk = _PartWalk(replicas)
    outs = walk.run(jaxpr, [MIRRORED] * len(jaxpr.jaxpr.invars))
    return Parts(outs, sorted(walk.callbacks))


class _PartWalk(NoticeWalk):
    """Marks parts of means; a sum over the replicas clears the mark."""

    def __init__(self, axis_size: int) -> None:
        super().__init__(axis_size)
        self.callbacks: set[tuple[str, str]] = set()

    def apply(self, eqn: Any, marks: Marks) -> Marks:
        name = eqn.primitive.name
        if self.is_unmarked(eqn, marks):
            return [MIRRORED] * len(eqn.outvars)
        if eqn.primitive in (part_of_mean_p, part_gradient_p):
            return [self._made(eqn, marks)]
        if is_sum(eqn):
            return list(map(_summed, marks))
        if names_axis(eqn, DATA):
            return [MIRRORED] * len(eqn.outvars)
        if name in RULES:
            return super().apply(eqn, marks)
        if name in _OF_NUMBERS:
            number, *others = map(number_of, eqn.invars, marks)
            if number is not None and None not in others:
                return [frozenset({Constant(number * (factor_of(name, eqn, marks) or 1))})]
        if not (mark := union(marks)):
            return [MIRRORED] * len(eqn.outvars)
        if name in _CALLBACKS:
            parts = words_of(mark, Part) - words_of(mark, ScaledPart)
            self.callbacks |= {(self.at(), part) for part in parts}
        is_summed = words_of(mark, _SummedPart, MeanOfParts)
        mark = (self._after_sum if is_summed else self._before_sum)(name, eqn, marks)
        floating = [jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in eqn.outvars]
        return [mark if is_float else MIRRORED for is_float in floating]

    def _made(self, eqn: Any, marks: Marks) -> Mark:
        """Returns the mark of a part, or of its cotangent, which a scaled loss multiplies."""
        if eqn.primitive is part_of_mean_p:
            return frozenset({Part(self.at())})
        number = number_of(eqn.invars[0], marks[0])
        return frozenset({_Gradient(self.at())}) if number and abs(number) < 2 else MIRRORED

    def _after_sum(self, name: str, eqn: Any, marks: Marks) -> Mark:
        """Returns the mark of what is computed from a sum of parts; ``all_reduce("mean")`` divides it."""
        factor, mark = factor_of(name, eqn, marks), union(marks)
        is_division = name == "div" and factor == 1 / self.axis_size < 1
        if is_division and (any(_COLLECTIVES in f for f in frames(eqn)) or is_of_pmean(eqn)):
            gradients = map(MeanOfGradients, words_of(marks[0], _SummedGradient))
            return frozenset(gradients) or frozenset(
                map(MeanOfParts, words_of(marks[0], _SummedPart))
            )
        if factor is not None and factor < 2:  # as by a learning rate
            return words_of(mark, _SummedGradient, MeanOfGradients)
        keeps = name in LINEAR or eqn.params.get("y") == 1  # a first power, in moments of optax
        return words_of(mark, Part, _SummedPart, MeanOfParts) if keeps else MIRRORED

    def _before_sum(self, name: str, eqn: Any, marks: list[Mark]) -> Mark:
        """Returns the mark of what is computed from parts."""
        parts, gradients = words_of(union(marks), Part), words_of(union(marks), _Gradient)
        factor = factor_of(name, eqn, marks)
        if name in LINEAR or factor is not None:
            # Times the replicas or the batch it is complete; times 0.1 it is a term of a sum of losses.
            return parts | gradients if factor is None or factor < 2 else MIRRORED
        return gradients | {ScaledPart(part) for part in parts}


def _summed(mark: Mark) -> Mark:
    parts = words_of(mark, Part) - words_of(mark, ScaledPart)
    gradients = map(_SummedGradient, words_of(mark, _Gradient))
    return frozenset(map(_SummedPart, parts)).union(gradients)


def factor_of(name: str, eqn: Any, marks: Sequence[Mark]) -> float | None:
    """Returns the size of the number by which an equation scales a value, None for another equation."""
    if name not in ("mul", "div"):
        return None
    numbers = [number_of(atom, mark) for atom, mark in zip(eqn.invars, marks, strict=True)]
    number = numbers[1] if numbers[1] is not None or name == "div" else numbers[0]
    return number if number is None else abs(1 / number if name == "div" and number else number)


def is_sum(eqn: Any) -> bool:
    """True if an equation sums over the replicas."""
    is_psum = eqn.primitive.name in ("psum", "psum_invariant") and names_axis(eqn, DATA)
    return is_psum or eqn.primitive.name == "cross_device_sum"


def number_of(atom: Any, mark: Mark) -> float | None:
    """Returns the number that all elements are, if it is known."""
    if isinstance(atom, jex_core.Literal) and np.isrealobj(atom.val):
        return float(atom.val) if np.ndim(atom.val) == 0 else None
    if len(mark) == 1 and isinstance(word := next(iter(mark)), Constant):
        return word.number
    return None


def sums_over_rows(eqn: Any, operand: int) -> bool:
    """True if an operation adds up the rows of an operand, as the gradient of a weight does."""
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        contracted, _ = params["dimension_numbers"]
        return 0 in contracted[operand]
    if name == "conv_general_dilated":  # that of a kernel exchanges batch and features
        return bool(params["dimension_numbers"].out_spec[0] != 0)
    return name == "scatter-add" or (name == "reduce_sum" and 0 in params["axes"])


DRAWING = frozenset({"random_bits", "random_gamma", "rng_bit_generator"})

STREAM: Mark = frozenset({"a random stream"})
"""The mark of random streams, and of all that is computed from them."""


class _Seed(Word):
    """The mark of a value computed from a seed and nothing that differs: the line of the seed."""


class _Draw(Word):
    """The mark of numbers for each row of a share, drawn with a mirrored key: the line that draws."""


class EqualWalk(NoticeWalk):
    """Finds random numbers that are equal on all replicas, and collectives of equal values."""

    def __init__(self, replicas: int, rows: int) -> None:
        """``rows`` is the length of a share of the batch, 0 if there is no batch."""
        super().__init__(replicas)
        self.rows = rows
        self.seeds: set[str] = set()
        """The lines that seed a key with which every replica then draws the same numbers."""
        self.draws: set[str] = set()
        """The lines that draw a number for each row, as it is used, with a mirrored key."""
        self._operands = MIRRORED
        self._reductions: dict[int, tuple[Any, Mark]] = {}

    def apply(self, eqn: Any, marks: Marks) -> Marks:
        # A value from a stream keeps its mark alone, also after the replica id is folded in.
        marks = [m if isinstance(m, Ref) or not m >= STREAM else STREAM for m in marks]
        self._operands = mark = union(marks)
        if eqn.primitive.name == "random_seed" and not mark:
            return [frozenset({_Seed(self.at())})]
        if eqn.primitive.name in DRAWING:
            if mark and all(isinstance(word, _Seed) for word in mark):
                self.seeds |= mark
            # rng_bit_generator returns the numbers after the key.
            if not mark and self.rows > 1 and self.rows in eqn.outvars[-1].aval.shape[:1]:
                return [MIRRORED] * (len(eqn.outvars) - 1) + [frozenset({_Draw(self.at())})]
        outs, draws = super().apply(eqn, marks), words_of(mark, _Draw)
        if not draws or eqn.primitive.name in RULES:
            return outs
        if self._are_for_rows(eqn, contents(marks)):
            self.draws |= draws
        return [out - draws if _moves_rows(eqn) else out for out in outs]

    def _are_for_rows(self, eqn: Any, marks: Sequence[Mark]) -> bool:
        """True if draws meet values of each replica, or are multiplied by weights, as latents are.

        Noise for weights may have as many rows.
        """
        if eqn.primitive.name in _PRODUCTS:
            by_weights = not any(map(_differs, marks))
            return by_weights and any(
                words_of(mark, _Draw) and not sums_over_rows(eqn, k) for k, mark in enumerate(marks)
            )
        return any(map(_differs, marks))

    def meet(self, eqn: Any) -> None:
        """Notes the collective, with all marks that it gets while loops are walked again."""
        _, before = self._reductions.get(id(eqn), (eqn, MIRRORED))
        self._reductions[id(eqn)] = eqn, union([before, self._operands])

    def equal_reductions(self) -> list[str] | None:
        """Returns the lines of collectives, or None if an operand of one differs between replicas.

        Random numbers of each replica, as for dropout, count as equal, since the examples are.
        """
        if any(_differs(mark) for _, mark in self._reductions.values()):
            return None
        return sorted({line(eqn) for eqn, _ in self._reductions.values()})


_PRODUCTS = frozenset({"conv_general_dilated", "dot_general"})


def _differs(mark: Mark) -> bool:
    """True if a value differs between replicas by more than a random stream."""
    return bool(mark - STREAM - words_of(mark, _Draw, _Seed))


def _moves_rows(eqn: Any) -> bool:
    """True if dim 0 of an operand is not that of the result."""
    name, params = eqn.primitive.name, eqn.params
    dims = params.get("permutation", params.get("broadcast_dimensions", (0,)))
    return (
        name in _PRODUCTS
        or dims[:1] != (0,)
        or (name in {*OVER_ROWS, "reduce_sum"} and 0 in params["axes"])
    )
