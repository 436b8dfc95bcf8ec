"""The marks of sums and means over one replica's examples, and of what is computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose, prod
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._mesh import DATA
from distribute_jax.collectives._markers import unreduced_p
from distribute_jax.program._jaxprs import consts_and_carries, names_axis
from distribute_jax.program._padding_marks import evaluate
from distribute_jax.program._remark_walks import (
    KEEPS,
    OVER_ROWS,
    SCATTER_ADDS,
    SHAPES,
    Constant,
    RemarkWalk,
    number_of,
    sums_over_rows,
)
from distribute_jax.program._replication import MIRRORED, RULES, Mark, Ref, contents, union
from distribute_jax.program._walk import Marks


class _OfShares(str):
    """A mark with a line; those of different kinds are not equal."""

    __slots__ = ("at",)
    at: str

    def __new__(cls, at: str) -> Self:
        word = super().__new__(cls, f"{cls.__name__} {at}")
        word.at = at
        return word


class ShareMean(_OfShares):
    """A mean over one replica's examples."""


class NonlinearShare(_OfShares):
    """A function of such means, a ratio of sums, or a maximum or sort over one replica's examples."""


class SumOfMeans(_OfShares):
    """The sum of a ``ShareMean`` over the replicas."""


class Combined(_OfShares):
    """What the replicas combined of a ``NonlinearShare``."""


class _Centered(_OfShares):
    """Rows from which a sum or mean of their share was subtracted."""


class _MeanWeights(_OfShares):
    """The cotangent of a mean over one replica's examples, and the rows computed from it."""


class _Total(str):
    """The mark of a sum over one replica's examples: the number of elements."""

    __slots__ = ()


class _Merged(str):
    """The mark of rows that a reshape merged with other dims: the length of dim 0."""

    __slots__ = ()


_ROWS: Mark = frozenset({"rows of the batch"})
_LINEAR = KEEPS | {"dynamic_slice", "gather", "max", "part_of_mean", "rev", "slice", "split"}
_NONLINEAR = frozenset({
    "abs", "exp", "exp2", "expm1", "integer_pow", "log", "log1p", "logistic", "pow", "rsqrt", "sqrt",
    "square", "tanh",
})  # fmt: skip
_SQUARES = frozenset({"abs", "integer_pow", "mul", "reshape", "square"})


def means_of_shares(jaxpr: Any, batch: Sequence[bool], replicas: int, rows: int) -> list[Mark]:
    """Returns which outputs are means over the ``rows`` of one replica, or computed from such means.

    ``batch`` says which inputs have these rows.
    """
    walk = _MeanWalk(replicas, rows)
    return walk.run(jaxpr, [_ROWS if has_rows else MIRRORED for has_rows in batch])


class _MeanWalk(RemarkWalk):
    """Marks sums over the rows of one replica, their quotients, and what the replicas combine of these."""

    def __init__(self, replicas: int, rows: int) -> None:
        super().__init__(replicas)
        self._rows = rows

    def constant(self, value: Any) -> Mark:
        is_number = np.ndim(value) == 0 and np.isrealobj(value) and not isinstance(value, jax.Array)
        return frozenset({Constant(float(value))}) if is_number else MIRRORED

    def after(self, eqn: Any, marks: Marks) -> Marks:
        if eqn.primitive is unreduced_p:
            return marks
        if eqn.primitive.name == "scan":  # which takes the rows one by one
            first = sum(consts_and_carries(eqn))
            taken = [m if isinstance(m, Ref) or _weights(m) else m - _ROWS for m in marks[first:]]
            marks = [*marks[:first], *taken]
        is_plain = _is_sum(eqn) or names_axis(eqn, DATA) or eqn.primitive.name in SCATTER_ADDS
        if eqn.primitive.name in RULES and not is_plain:
            return super().after(eqn, marks)
        return self.by_rule(_MeanWalk._plain, eqn, contents(marks)) or [MIRRORED] * len(eqn.outvars)

    def _plain(self, eqn: Any, marks: Marks) -> Marks:
        """Returns the marks after an operation without a body, or a collective."""
        if _is_sum(eqn):
            return [_over_replicas(mark) for mark in marks]
        name, mark = eqn.primitive.name, union(marks)
        if name == "integer_pow" and eqn.params["y"] == 1:  # in moments of optax
            name = "copy"
        if not mark or names_axis(eqn, DATA):
            mark = MIRRORED
        elif mark & _ROWS:
            mark = self._of_rows(name, eqn, marks)
        else:
            numbers = [number_of(*pair) for pair in zip(eqn.invars, marks, strict=True)]
            if None not in numbers:
                divisors = [d for w in mark if isinstance(w, Constant) for d in w.divisors]
                mark = self._folded(name, numbers, divisors, eqn.outvars[0].aval.shape)
            else:
                mark = self._of_means(name, numbers, marks)
        return [self._in(var.aval, mark) for var in eqn.outvars]

    def _in(self, aval: Any, mark: Mark) -> Mark:
        if mark & _ROWS and not _weights(mark):
            return mark if self._has_rows(aval.shape, mark) else MIRRORED
        return mark if jnp.issubdtype(aval.dtype, jnp.number) else MIRRORED

    def _has_rows(self, shape: tuple[int, ...], mark: Mark) -> bool:
        """True if dim 0 of an array with the mark of rows is that of the rows."""
        merged = (int(word) for word in mark if isinstance(word, _Merged))
        return shape[:1] == (self._rows,) or (shape[0] if shape else 0) in merged

    def _folded(
        self, name: str, numbers: Sequence[Any], divisors: list[float], shape: tuple[int, ...]
    ) -> Mark:
        """Returns the mark of what is computed from numbers: a divisor of ``jnp.var``, or a cotangent."""
        if name in SHAPES:
            if self._is_mean_weight(divisors, shape):
                return _ROWS | {_MeanWeights(self.at())}
            return frozenset({Constant(numbers[0], divisors)})
        if name == "div":
            divisors += numbers[1:]
        if name == "mul":  # by one by the number of replicas
            divisors += [1 / number for number in numbers if isclose(number * self.axis_size, 1)]
        result = evaluate(name, [np.float64(number) for number in numbers])
        return MIRRORED if result is None else frozenset({Constant(float(result), divisors)})

    def _is_mean_weight(self, divisors: list[float], shape: tuple[int, ...]) -> bool:
        """True for the cotangent of a mean over the elements, or over the rows, of an array of the share.

        A step may also take a few of the rows at a time.
        """
        size, rows, replicas = prod(shape), self._rows, self.axis_size
        # With as many elements as examples of all replicas it may be the cotangent of a part of a mean.
        if min(size, rows) < 2 or size in (rows * replicas, shape[0] * replicas):
            return False
        has_all, others = shape[0] % rows == 0, list(divisors)
        # Of a few rows, a part may be divided by as many as there are rows in the share.
        for divisor in (size, rows) if has_all else (size,):
            if divisor in others:
                others.remove(divisor)
                has_rows = has_all or rows % shape[0] == 0
                return has_rows and all(round(other) % replicas for other in others)
        return False

    def _of_rows(self, name: str, eqn: Any, marks: Marks) -> Mark:
        """Returns the mark of an operation on the rows of a share."""
        if weights := _weights(union(marks)):
            is_sum = any(_weights(m) and sums_over_rows(eqn, k) for k, m in enumerate(marks))
            return frozenset(ShareMean(word.at) for word in weights) if is_sum else _ROWS | weights
        if name == "stack" and eqn.params["axis"] == 0:
            return MIRRORED
        if name == "sub" and marks[0] & _ROWS and _of_one_share(marks[1]):
            return marks[0] | {_Centered(self.at())}  # the mean of their squares is a variance
        shape, axes = eqn.invars[0].aval.shape, eqn.params.get("axes", ())
        if marks[0] & _ROWS and self._has_rows(shape, marks[0]):
            centered = frozenset(NonlinearShare(w.at) for w in marks[0] if isinstance(w, _Centered))
            if name == "reduce_sum" and 0 in axes:
                return centered or frozenset({_Total(prod(shape[axis] for axis in axes))})
            is_sort = name == "sort" and eqn.params["dimension"] == 0
            is_sort = is_sort or (name == "top_k" and len(shape) == 1)
            if is_sort or (name in OVER_ROWS and 0 in axes):
                return frozenset({NonlinearShare(self.at())})
        if name == "dot_general" and any(
            m & _ROWS and sums_over_rows(eqn, k) for k, m in enumerate(marks)
        ):
            return frozenset({_Total(self._rows)})
        is_square = name in _SQUARES and eqn.invars[0] is eqn.invars[-1]
        merged: Mark = frozenset(word for word in union(marks) if isinstance(word, _Merged))
        if name == "reshape" and (length := eqn.outvars[0].aval.shape[:1]):
            merged |= {_Merged(length[0])} if length[0] % self._rows == 0 else MIRRORED
        return (marks[0] if is_square else _ROWS) | merged

    def _of_means(self, name: str, numbers: Sequence[float | None], marks: Marks) -> Mark:
        """Returns the mark of an operation on sums and means."""
        marks = [frozenset(w for w in m if not isinstance(w, Constant)) for m in marks]
        mark = union(marks)
        if name in ("mul", "div"):
            number = numbers[1] if name == "div" or numbers[1] is not None else numbers[0]
            if number:
                return self._divided(mark, number if name == "div" else 1 / number)
            is_nonlinear = all(marks)  # a product or ratio of two
        else:
            is_nonlinear = name in _NONLINEAR
        if is_nonlinear:
            combined = frozenset(word for word in mark if isinstance(word, Combined))
            return frozenset({NonlinearShare(self.at())}) if _of_one_share(mark) else combined
        # A count that is kept from being 0, as by jnp.maximum(count, 1), is still one.
        is_total = all(m or n is not None for m, n in zip(marks, numbers, strict=True))
        kept = (_OfShares, _Total) if is_total else _OfShares
        return frozenset(word for word in mark if name in _LINEAR and isinstance(word, kept))

    def _divided(self, mark: Mark, number: float) -> Mark:
        """Returns the mark of a value divided by a number."""
        totals = [int(word) for word in mark if isinstance(word, _Total)]
        if totals:
            # The examples of all replicas may be as many as these elements: then it is a part of a mean.
            is_part = isclose(number, self._rows * self.axis_size)
            is_rows = isclose(self._rows, number) and self._rows != self.axis_size
            is_mean = is_rows or any(isclose(total, number) for total in totals)
            if is_part:
                return frozenset(word for word in mark if not isinstance(word, _Total))
            return frozenset({ShareMean(self.at())}) if is_mean else mark
        if not isclose(number, self.axis_size):
            return mark
        # By the number of replicas: a part of a mean, or the mean over the replicas.
        return frozenset(word for word in mark if not isinstance(word, (ShareMean, SumOfMeans)))


def _is_sum(eqn: Any) -> bool:
    return eqn.primitive.name == "cross_device_sum" or (
        eqn.primitive.name in ("psum", "psum_invariant") and names_axis(eqn, DATA)
    )


def _weights(mark: Mark) -> frozenset[_MeanWeights]:
    return frozenset(word for word in mark if isinstance(word, _MeanWeights))


def _over_replicas(mark: Mark) -> Mark:
    """Returns the mark of the sum of a value over the replicas."""
    means = (SumOfMeans(word.at) for word in mark if isinstance(word, ShareMean))
    return frozenset(means) | {
        Combined(word.at) for word in mark if isinstance(word, NonlinearShare)
    }


def _of_one_share(mark: Mark) -> bool:
    """True if a value is computed from sums or means over one replica's examples."""
    return any(isinstance(word, (_Total, ShareMean, NonlinearShare)) for word in mark)
