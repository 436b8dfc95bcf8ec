"""The marks of sums and means over one replica's examples, and of what is computed from them.

Rows of the batch that are added up are a ``_Total``; divided by their number it is a ``ShareMean``, of which
the replicas' sum, ``SumOfMeans``, is N times the mean over the batch. Another function of totals and means is
a ``NonlinearShare``, and ``Combined`` once the replicas add it up; rows into which such values go are
``MixedRows``. A gradient takes the mean the other way round: its cotangent, the same number for each row, is
``_MeanWeights``, and the sum of rows that were multiplied by it is a ``ShareMean``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import isclose, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._mesh import DATA
from distribute_jax.collectives._markers import part_gradient_p, part_of_mean_p, unreduced_p
from distribute_jax.program._jaxprs import consts_and_carries, names_axis
from distribute_jax.program._notice_marks import (
    OVER_ROWS,
    SHAPES,
    Constant,
    NoticeWalk,
    Word,
    factor_of,
    is_sum,
    number_of,
    sums_over_rows,
    words_of,
)
from distribute_jax.program._padding_marks import evaluate
from distribute_jax.program._replication import MIRRORED, RULES, Mark, Ref, contents, union
from distribute_jax.program._walk import COMPARISONS, IDENTITIES, LINEAR, Marks


class _OfShares(Word):
    """The mark of what is computed from one replica's examples: a line."""


class ShareMean(_OfShares):
    """A mean over one replica's examples."""


class _PartOfMean(_OfShares):
    """What ``compute_average_loss`` returned, of which the replicas' sum is the mean over the batch."""


class NonlinearShare(_OfShares):
    """A function of such means or parts, a ratio of sums, or a maximum or sort over a share."""


class SumOfMeans(_OfShares):
    """The sum of a ``ShareMean`` over the replicas."""


class RescaledSum(SumOfMeans):
    """A ``SumOfMeans`` scaled by a computed value: as a clipped gradient it may equal that of one device."""


class Combined(_OfShares):
    """What the replicas combined of a ``NonlinearShare``."""


class MixedRows(_OfShares):
    """Rows that depend on other rows of their share."""


class _Extreme(NonlinearShare):
    """A maximum or minimum, which may be subtracted for the range of an exponential only."""


class _Across(Word):
    """The mark of rows in another dim than the first, as to be compared with all rows: the dim."""


class _Centered(_OfShares):
    """Rows from which a sum or mean of their share was subtracted."""


class _MeanWeights(_OfShares):
    """The cotangent of a mean over one replica's examples, and the rows computed from it."""


class _Total(Word):
    """The mark of a sum over one replica's examples: the number of elements."""


class _Merged(Word):
    """The mark of rows that a reshape merged with other dims: the length of dim 0."""


_ROWS: Mark = frozenset({"rows of the batch"})
_LINEAR = LINEAR | {"dynamic_slice", "gather", "max", "rev", "slice", "split"}
_NONLINEAR = frozenset({
    "abs", "cbrt", "cholesky", "cos", "eigh", "erf", "exp", "exp2", "expm1", "integer_pow", "log", "log1p",
    "logistic", "lu", "pow", "qr", "rsqrt", "sin", "sqrt", "square", "svd", "tanh",
})  # fmt: skip
_SAME_DIMS = IDENTITIES | {"convert_element_type", "neg"}
_MIXES = frozenset({"add", "add_any", "div", "max", "min", "mul", "pow", "select_n", "sub"})
_SQUARES = frozenset({"abs", "integer_pow", "mul", "reshape", "square"})


def means_of_shares(
    jaxpr: Any, batch: Sequence[bool], replicas: int, rows: int, *, normalizes: bool
) -> list[Mark]:
    """Returns which outputs are means over the ``rows`` of one replica, or computed from such means.

    ``batch`` says which inputs have these rows; ``normalizes`` that rows may be normalized by their share,
    as in batch norm.
    """
    walk = _MeanWalk(replicas, rows, normalizes)
    return walk.run(jaxpr, [_ROWS if has_rows else MIRRORED for has_rows in batch])


class _MeanWalk(NoticeWalk):
    """Marks sums over the rows of one replica, their quotients, and what the replicas combine of these."""

    def __init__(self, replicas: int, rows: int, normalizes: bool) -> None:
        super().__init__(replicas)
        self._rows, self._normalizes = rows, normalizes

    def constant(self, value: Any) -> Mark:
        is_number = np.ndim(value) == 0 and np.isrealobj(value) and not isinstance(value, jax.Array)
        return frozenset({Constant(float(value))}) if is_number else MIRRORED

    def apply(self, eqn: Any, marks: Marks) -> Marks:
        if self.is_unmarked(eqn, marks):
            return [MIRRORED] * len(eqn.outvars)
        if eqn.primitive in (part_gradient_p, unreduced_p):
            return marks
        if eqn.primitive is part_of_mean_p and self.axis_size > 1:
            return [union(contents(marks)) | {_PartOfMean(self.at())}]
        if eqn.primitive.name == "scan":  # which takes the rows one by one
            first = sum(consts_and_carries(eqn))
            taken = (
                m if isinstance(m, Ref) or words_of(m, _MeanWeights) else m - _ROWS
                for m in marks[first:]
            )
            marks = [*marks[:first], *taken]
        is_plain = is_sum(eqn) or names_axis(eqn, DATA) or eqn.primitive.name == "scatter-add"
        if eqn.primitive.name in RULES and not is_plain:
            outs = super().apply(eqn, marks)
            if eqn.primitive.name != "scan":
                return outs
            _, kept = consts_and_carries(eqn)  # dim 0 of what is stacked is not that of the rows
            stacked = (m if isinstance(m, Ref) or not m & _ROWS else MIRRORED for m in outs[kept:])
            return [*outs[:kept], *stacked]
        return self.by_rule(_MeanWalk._plain, eqn, contents(marks)) or [MIRRORED] * len(eqn.outvars)

    def _plain(self, eqn: Any, marks: Marks) -> Marks:
        """Returns the marks after an operation without a body, or a collective."""
        name, mark = eqn.primitive.name, union(marks)
        if name == "real_rows":  # replicas have different numbers of them
            return [_ROWS]
        if is_sum(eqn):
            return [_over_replicas(mark) for mark in marks]
        if name == "integer_pow" and eqn.params["y"] == 1:  # in moments of optax
            name = "copy"
        if not mark or names_axis(eqn, DATA):
            mark = frozenset(map(Combined, words_of(mark, MixedRows)))
        elif mark & _ROWS:
            mark = self._of_rows(name, eqn, marks)
        else:
            numbers = [number_of(*pair) for pair in zip(eqn.invars, marks, strict=True)]
            if None not in numbers:
                divisors = [d for w in mark if isinstance(w, Constant) for d in w.divisors]
                mark = self._folded(name, numbers, divisors, eqn.outvars[0].aval.shape)
            else:
                mark = self._of_means(name, eqn, numbers, marks)
        return [self._in(var.aval, mark) for var in eqn.outvars]

    def _in(self, aval: Any, mark: Mark) -> Mark:
        if mark & _ROWS and not words_of(mark, _MeanWeights):
            if self._has_rows(aval.shape, mark):
                return mark
            mark = _nonlinear(mark, MixedRows)
        return mark if jnp.issubdtype(aval.dtype, jnp.number) else MIRRORED

    def _has_rows(self, shape: tuple[int, ...], mark: Mark) -> bool:
        """True if dim 0 of an array with the mark of rows is that of the rows."""
        merged = map(int, words_of(mark, _Merged))
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
                has_rows = has_all or (shape[0] > 1 and rows % shape[0] == 0)
                return has_rows and all(round(other) % replicas for other in others)
        return False

    def _of_rows(self, name: str, eqn: Any, marks: Marks) -> Mark:
        """Returns the mark of an operation on the rows of a share."""
        dim = _dim_of_rows(name, eqn, marks)
        if weights := words_of(union(marks), _MeanWeights):
            sums = (
                words_of(m, _MeanWeights) and sums_over_rows(eqn, k) for k, m in enumerate(marks)
            )
            moves = name == "broadcast_in_dim" and dim != 0  # of a mean in each example
            kept = MIRRORED if moves else _ROWS | weights
            return frozenset(map(ShareMean, weights)) if any(sums) else kept
        if name == "stack" and eqn.params["axis"] == 0:
            return MIRRORED
        mixed = self._mixed(name, eqn, marks)
        if name == "sub" and marks[0] & _ROWS and _of_one_share(marks[1]):
            mixed |= marks[0] | {_Centered(self.at())}  # the mean of their squares is a variance
            return mixed
        weighted = name == "dot_general" and dim == 0 and mixed  # as by attention to all rows
        if not weighted and (over := self._over_rows(name, eqn, marks)) is not None:
            return over
        if dim != 0:
            return _nonlinear(mixed, MixedRows) | (MIRRORED if dim is None else {_Across(str(dim))})
        is_square = name in _SQUARES and eqn.invars[0] is eqn.invars[-1]
        merged = words_of(union(marks), _Merged)
        joins = name == "reshape" or (name == "concatenate" and all(m & _ROWS for m in marks))
        if joins and (length := eqn.outvars[0].aval.shape[:1]):
            merged |= {_Merged(length[0])} if length[0] % self._rows == 0 else MIRRORED
        return (marks[0] if is_square else _ROWS) | merged | mixed

    def _over_rows(self, name: str, eqn: Any, marks: Marks) -> Mark | None:
        """Returns the mark of a sum, maximum or sort over the rows; None for other operations."""
        if name == "dot_general" and any(
            m & _ROWS and sums_over_rows(eqn, k) for k, m in enumerate(marks)
        ):
            return _nonlinear(union(marks), MixedRows, _Centered) or frozenset({_Total(self._rows)})
        shape, axes = eqn.invars[0].aval.shape, eqn.params.get("axes", ())
        if name == "scatter-add" and shape[:1] != (self._rows,):  # sums of segments, counts
            return frozenset({_Total(0)})
        if not (marks[0] & _ROWS and self._has_rows(shape, marks[0])):
            return None
        if name == "reduce_sum" and 0 in axes:
            total = frozenset({_Total(prod(shape[axis] for axis in axes))})
            return _nonlinear(marks[0], MixedRows, _Centered) or total
        if name == "sort" and eqn.params["dimension"] == 0:
            mixed = words_of(marks[0], MixedRows)
            # Examples are also sorted by whole numbers, as of experts or lengths, and put back later.
            is_rank = mixed or jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating)
            at = self.at()
            return _ROWS | mixed | {MixedRows(at)} if is_rank else frozenset({NonlinearShare(at)})
        if name == "top_k" and len(shape) == 1:
            return frozenset({NonlinearShare(self.at())})
        return frozenset({_Extreme(self.at())}) if name in OVER_ROWS and 0 in axes else None

    def _mixed(self, name: str, eqn: Any, marks: Marks) -> Mark:
        """Returns the marks of rows that depend on others, and that of an operation that mixes them."""
        # The indices of a gather may sort rows, which are put back later.
        mixed = words_of(union(marks[:1] if name == "gather" else marks), MixedRows)
        is_mixed = name in _MIXES | COMPARISONS and bool(words_of(union(marks), _Across))
        if name in _MIXES and not self._normalizes:
            scales = name in ("div", "mul")
            shares = (m for m in marks if not m & _ROWS)
            is_mixed |= any(_of_one_share(m, extremes=scales) for m in shares)
        if name == "dot_general":
            used = zip(*eqn.params["dimension_numbers"], strict=True)
            dims = [(_dim(m), {*c, *b}) for m, (c, b) in zip(marks, used, strict=True)]
            is_mixed = all(dim is not None and dim not in by for dim, by in dims)
        return mixed | {MixedRows(self.at())} if is_mixed else mixed

    def _of_means(self, name: str, eqn: Any, numbers: Sequence[float | None], marks: Marks) -> Mark:
        """Returns the mark of an operation on sums and means."""
        factor = factor_of(name, eqn, marks)
        marks = [m - words_of(m, Constant) for m in marks]
        mark = union(marks)
        if factor:
            return self._divided(mark, 1 / factor)
        is_product = (name in ("mul", "dot_general") and all(marks)) or (name == "div" and marks[1])
        if is_product or name in _NONLINEAR:
            is_share = _of_one_share(mark)
            return frozenset({NonlinearShare(self.at())}) if is_share else words_of(mark, Combined)
        if name in OVER_ROWS and any(type(word) is ShareMean for word in mark):
            return frozenset({NonlinearShare(self.at())})  # as the largest of means
        # A count that is kept from being 0, as by jnp.maximum(count, 1), is still one.
        is_total = all(m or n is not None for m, n in zip(marks, numbers, strict=True))
        kept = words_of(mark, _OfShares, *[_Total] * is_total) if name in _LINEAR else MIRRORED
        if name in ("div", "mul", "select_n") and not is_total:
            sums = words_of(kept, SumOfMeans)
            kept = (kept - sums).union(map(RescaledSum, sums))
        return kept | words_of(mark, _Across) if name in _SAME_DIMS else kept

    def _divided(self, mark: Mark, number: float) -> Mark:
        """Returns the mark of a value divided by a number."""
        totals = list(map(int, words_of(mark, _Total)))
        if totals:
            # The examples of all replicas may be as many as these elements: then it is a part of a mean.
            is_part = isclose(number, self._rows * self.axis_size)
            is_rows = isclose(self._rows, number) and self._rows != self.axis_size
            is_mean = is_rows or any(isclose(total, number) for total in totals)
            if is_part:
                parts = {_PartOfMean(self.at())} if self.axis_size > 1 else MIRRORED
                return (mark - words_of(mark, _Total)) | parts
            return frozenset({ShareMean(self.at())}) if is_mean else mark
        if not isclose(number, self.axis_size):
            return mark
        # By the number of replicas: a part of a mean, or the mean over the replicas.
        return mark - words_of(mark, ShareMean, SumOfMeans)


def _over_replicas(mark: Mark) -> Mark:
    """Returns the mark of the sum of a value over the replicas."""
    means = map(SumOfMeans, words_of(mark, ShareMean))
    return frozenset(means).union(map(Combined, words_of(mark, NonlinearShare)))


def _of_one_share(mark: Mark, *, extremes: bool = True) -> bool:
    """True if a value is computed from sums or means over one replica's examples."""
    known = mark if extremes else mark - words_of(mark, _Extreme)
    return bool(words_of(known, _Total, ShareMean, _PartOfMean, NonlinearShare))


def _nonlinear(mark: Mark, *kinds: type[_OfShares]) -> Mark:
    """Returns the mark of sums of rows with marks of these kinds."""
    return frozenset(map(NonlinearShare, words_of(mark, *kinds)))


def _dim(mark: Mark) -> int | None:
    """Returns the dim of a value that has the rows of a share."""
    return 0 if mark & _ROWS else next(map(int, words_of(mark, _Across)), None)


def _dim_of_rows(name: str, eqn: Any, marks: Marks) -> int | None:
    """Returns the dim of the result that has the rows of the operands, if it is known."""
    if name == "transpose":
        return int(eqn.params["permutation"].index(0))
    if name == "broadcast_in_dim":
        return int(eqn.params["broadcast_dimensions"][0])
    if name == "gather" and marks[1] & _ROWS:
        offsets = eqn.params["dimension_numbers"].offset_dims
        return next(dim for dim in itertools.count() if dim not in offsets)
    if name != "dot_general":
        return 0
    contracted, batched = eqn.params["dimension_numbers"]
    if batched[0]:
        firsts = [m & _ROWS and dims[0] == 0 for m, dims in zip(marks, batched, strict=True)]
        return 0 if any(firsts) else None
    left = len(contracted[0]) < eqn.invars[0].aval.ndim
    return 0 if marks[0 if left else 1] & _ROWS else None
