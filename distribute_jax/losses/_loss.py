"""``Loss``: one loss for each example, and its exact reduction over the global batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp

from distribute_jax._absent import getattr_with_hints
from distribute_jax._checks import check_choice, check_number, converting, is_integer
from distribute_jax._errors import ArgumentError, ContextError, log_once
from distribute_jax._messages import leaf_text, promoting, real_array
from distribute_jax._padding import align, real_mask
from distribute_jax.collectives._markers import part_of_mean
from distribute_jax.collectives._reduction import as_dtype, wide
from distribute_jax.strategies import get_replica_context


class Loss:
    """The base class of losses. Called inside ``run``, a loss returns this replica's part of its value.

    The parts of all replicas add up to the value on one device for the real examples of the global
    batch, and their gradients to the gradient on one device. The padding of a partial batch does not
    count, whatever it contains.

    A loss of your own defines ``call(y_true, y_pred)``, which returns one loss for each example.

    Args:
        name: the name under which the loss is reported; by default that of the class.
        reduction: ``"sum_over_batch_size"`` or ``"mean"``: the sum of the weighted losses over their
            number, further dims such as time included; ``"mean_with_sample_weight"``: over the sum
            of the weights; ``"sum"``; ``"none"`` or None: the weighted losses themselves, shape
            (batch, ...), 0 in the padding.
        dtype: the floating dtype that predictions are converted to. By default float32, or theirs
            if that is wider, so that losses of bfloat16 outputs have the precision of float32.

    Raises:
        ValueError: there is no such reduction; when called, shapes that do not match.
        RuntimeError: called in cross-replica context.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> loss = dj.losses.MeanSquaredError()
        >>> float(loss(jnp.array([1.0, 2.0]), jnp.array([[1.0], [4.0]])))
        2.0
        >>> class Cubed(dj.losses.Loss):
        ...     def call(self, y_true, y_pred):
        ...         return jnp.abs(y_pred - y_true) ** 3
        >>> float(Cubed(reduction="sum")(jnp.array([1.0, 2.0]), jnp.array([1.0, 4.0])))
        8.0

    Source: https://keras.io/api/losses/
    """

    from_logits: bool = False
    """True if predictions are logits; False for losses that have no such option."""
    takes_class_numbers: bool = False
    """True if labels are class numbers, which must be among the classes."""
    _expects: ClassVar[str | None] = None
    """What predictions are if they are not logits; see ``expects``."""

    if not TYPE_CHECKING:
        __getattr__ = getattr_with_hints("dj.losses.Loss")

    def __init__(
        self,
        name: str | None = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> None:
        kind = type(self).__name__
        check_choice(f"{kind}: reduction", reduction, REDUCTIONS)
        self.name, self.reduction = name or kind, reduction
        finfo: Any = jnp.finfo
        with converting(f"{kind}: dtype", dtype, "a floating dtype"):
            self.dtype = None if dtype is None else finfo(dtype).dtype

    @property
    def expects(self) -> str | None:
        """What predictions must be: ``"probabilities"`` over the classes, ``"probability"`` each, or None."""
        return None if self.from_logits else self._expects

    def call(self, y_true: Any, y_pred: Any) -> jax.Array:
        """Returns one loss for each example; a subclass defines it.

        Args:
            y_true: labels, dim 0 the batch; per replica.
            y_pred: predictions, dim 0 the batch; per replica.
        """
        raise NotImplementedError(f"{type(self).__name__} has to define call(self, y_true, y_pred)")

    @promoting
    def per_example(self, y_true: Any, y_pred: Any) -> jax.Array:
        """Returns the losses before weighting and reduction.

        Args:
            y_true: labels, dim 0 the batch; per replica.
            y_pred: predictions, dim 0 the batch; per replica.

        Returns:
            Losses of shape (batch, ...), per replica.

        Raises:
            ValueError: shapes that do not match, or not one loss for each example.
        """
        with converting(
            f"{self.name}: y_pred", y_pred, "arrays, in a tree whose keys can be sorted"
        ):
            predicted = jax.tree.map(self._converted, y_pred)
        what = getattr(self, "_what", f"The loss {self.name}")
        losses = one_for_each(what, self.call(y_true, predicted), y_pred)
        if self._are_of_pairs(losses.shape, y_true, predicted):
            raise ArgumentError(
                f"{what} returned {leaf_text(losses)}, a number for each pair of examples: "
                "labels and predictions of different shapes were broadcast. Compare arrays of one shape. A "
                "function gets labels of shape (n,) as (n, 1) if that is the shape of the predictions."
            )
        return losses

    def _are_of_pairs(self, shape: tuple[int, ...], y_true: Any, y_pred: Any) -> bool:
        """True for losses of shape (n, n, ...) which for n + 1 examples have (n + 1, n + 1, ...)."""
        n = shape[0]
        if len(shape) == 1 or shape[1] != n or n == 1:
            return False
        with suppress(Exception):  # a loss of examples of another number may be an error
            more = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((n + 1, *leaf.shape[1:]), leaf.dtype),
                (y_true, y_pred),
            )
            return jax.eval_shape(self.call, *more).shape[:2] == (n + 1, n + 1)
        return False

    @promoting
    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> jax.Array:
        """Returns this replica's part of the loss over the global batch; see the class."""
        name = type(self).__name__
        replica = _replica_context(name)
        narrow = self.per_example(y_true, y_pred)
        # A sum or count in float16 can overflow although the mean does not.
        losses = as_dtype(narrow, wide(narrow.dtype))
        terms, weights = losses, None
        if sample_weight is not None:
            weights = _weights(name, sample_weight, losses.shape, losses.dtype)
            terms = losses * weights
        real = real_mask(name, "losses", losses.shape, replica)
        counted = self._counted(y_true, losses)
        keep = real if counted is None else counted if real is None else real & counted
        terms = _masked(terms, keep)
        if self.reduction in ("none", None):
            return as_dtype(terms, narrow.dtype)
        total = jnp.sum(terms)
        if self.reduction == "sum":
            return as_dtype(total, narrow.dtype)
        if self.reduction != "mean_with_sample_weight" or weights is None:
            weights = None if counted is None else jnp.ones((), losses.dtype)
        if weights is not None:
            part = _divided_by_weights(total, weights, losses.shape, keep, replica)
        else:
            # In floating point: a large batch of images has more terms than an int32 counts.
            count = jnp.asarray(_examples(replica, losses.shape[0]), total.dtype)
            part = total / (count * float(math.prod(losses.shape[1:])))
        return _marked(as_dtype(part, narrow.dtype), replica)

    def _counted(self, y_true: Any, losses: jax.Array) -> jax.Array | None:
        """Returns a mask of the losses that count in a mean; None if all do."""
        return None

    def _converted(self, leaf: Any) -> Any:
        if not jnp.issubdtype(getattr(leaf, "dtype", int), jnp.floating):
            return leaf
        array = real_array(type(self).__name__, "y_pred", leaf)
        return array.astype(self.dtype or jnp.promote_types(array.dtype, jnp.float32))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r}, reduction={self.reduction!r})"


class OfFormula:
    """A class of a formula, which takes y_true, y_pred and options and returns one loss per example."""

    formula: ClassVar[Callable[..., jax.Array]]

    def __init_subclass__(
        cls, formula: Callable[..., jax.Array] | None = None, **options: Any
    ) -> None:
        super().__init_subclass__(**options)
        if formula is not None:
            cls.formula = staticmethod(formula)


class FormulaLoss(OfFormula, Loss):
    """A loss that calls a function; a subclass with options is a dataclass of them, in Keras's order."""

    def __init_subclass__(cls, expects: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._expects = expects or cls._expects

    def __init__(
        self,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(name or type(self).formula.__name__, reduction, dtype)

    def __post_init__(self) -> None:
        FormulaLoss.__init__(self, self.reduction, self.name, self.dtype)
        check_smoothing(type(self).__name__, getattr(self, "label_smoothing", 0))

    def call(self, y_true: Any, y_pred: Any) -> jax.Array:
        fields = getattr(type(self), "__dataclass_fields__", {}).keys()
        options = {name: getattr(self, name) for name in fields - {"reduction", "name", "dtype"}}
        return type(self).formula(y_true, y_pred, **options)


def one_for_each(what: str, losses: Any, y_pred: Any) -> jax.Array:
    """Returns losses as a floating array; raises unless there is one, or one array, for each example."""
    shape = getattr(losses, "shape", ())
    rows = [leaf.shape[0] for leaf in jax.tree.leaves(y_pred) if getattr(leaf, "shape", ())]
    if not shape or (rows and shape[0] != rows[0]):
        raise ArgumentError(
            f"{what} returned {leaf_text(losses)}{f' for {rows[0]} examples' if rows else ''}. Return one "
            "number for each example, an array whose dim 0 is the batch: the library takes the mean over "
            "the global batch, of which a replica has only its share. To leave examples out, give them a "
            "sample_weight of 0, with reduction='mean_with_sample_weight' for the mean over the others."
        )
    array = jnp.asarray(losses)
    return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(jnp.float32)


def check_smoothing(name: str, label_smoothing: Any) -> None:
    check_number(f"{name}: label_smoothing", label_smoothing, at_least=0, most=1)


REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight", "sum", "none", None)
"""Keras's names; the first two are equivalent, as are the last two."""


def _weights(name: str, sample_weight: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    array = real_array(name, "sample_weight", sample_weight).astype(dtype)
    return align(name, "sample_weight", array, "losses", shape)


def _masked(terms: jax.Array, keep: jax.Array | None) -> jax.Array:
    """Sets terms that do not count to 0, by ``where`` rather than ``*``, since NaN times 0 is NaN."""
    return terms if keep is None else jnp.where(keep, terms, 0)


def _marked(part: jax.Array, replica: Any) -> jax.Array:
    return part_of_mean(part) if replica.num_replicas_in_sync > 1 else part


def _divided_by_weights(
    total: jax.Array,
    weights: jax.Array,
    shape: tuple[int, ...],
    keep: jax.Array | None,
    replica: Any,
) -> jax.Array:
    """Divides by the sum of the weights of all replicas; returns 0 if that is 0."""
    divisor = replica.all_reduce("sum", jnp.sum(_masked(jnp.broadcast_to(weights, shape), keep)))
    return jnp.where(divisor == 0, 0, total / jnp.where(divisor == 0, 1, divisor))


def _replica_context(name: str) -> Any:
    replica = get_replica_context()
    if replica is None:
        raise ContextError(
            f"You are calling `{name}` in cross replica context, while it was expected to be called "
            "in replica context: call it inside the function given to strategy.run."
        )
    return replica


def _examples(replica: Any, rows: int) -> Any:
    """Returns the number of real examples of the global batch."""
    return replica.real_examples if replica.is_padded else rows * replica.num_replicas_in_sync


_NAME = "compute_average_loss"


@promoting
def compute_average_loss(
    per_example_loss: jax.Array,
    sample_weight: jax.Array | None = None,
    global_batch_size: Any = None,
    *,
    divide_by: str = "examples",
) -> jax.Array:
    """Returns this replica's part of the mean loss over the global batch.

    The parts of all replicas add up to the mean over the real examples of the global batch, and their
    gradients to the gradient on one device. The padding of a partial batch does not count.

    Args:
        per_example_loss: one loss for each example of the per-replica batch; further dims, such as the
            tokens of a sequence, are summed.
        sample_weight: weights of the losses, broadcast from the left. The divisor is still the number of
            examples, as in TensorFlow, unless ``divide_by="weights"``.
        global_batch_size: what to divide by. By default the number of real examples of the global
            batch; a number that is passed is used as it is.
        divide_by: ``"examples"``, or ``"weights"``: the sum of the weights of the global batch, over all
            replicas and further dims, as for a loss per token. The weights need not be spread evenly; where
            all of them are 0 the loss is 0.

    Returns:
        A scalar, per replica.

    Raises:
        ValueError: the loss is already a scalar, its dim 0 is not the batch, the weights do not fit it,
            the batch size is not above 0, or it is divided by weights that are not passed.
        RuntimeError: called in cross-replica context.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> float(dj.compute_average_loss(jnp.array([1.0, 3.0])))
        2.0
        >>> tokens, mask = jnp.array([[1.0, 3.0], [5.0, 7.0]]), jnp.array([[1, 1], [1, 0]])
        >>> float(dj.compute_average_loss(tokens, sample_weight=mask, divide_by="weights"))
        3.0

    Source: https://www.tensorflow.org/api_docs/python/tf/nn/compute_average_loss
    """
    replica = _replica_context(_NAME)
    losses = real_array(_NAME, "per_example_loss", per_example_loss)
    dtype = losses.dtype if jnp.issubdtype(losses.dtype, jnp.floating) else jnp.result_type(float)
    losses = as_dtype(losses, wide(dtype))  # a sum in float16 can overflow where its mean does not
    if losses.ndim == 0:
        raise ArgumentError(
            "compute_average_loss got a scalar. It needs one loss for each example, which it divides by "
            "the number of examples of the global batch: leave the mean out of the loss."
        )
    check_choice(f"{_NAME}: divide_by", divide_by, ("examples", "weights"))
    by_weights = divide_by == "weights"
    if by_weights and (sample_weight is None or global_batch_size is not None):
        raise ArgumentError(
            'compute_average_loss(divide_by="weights") divides by the sum of the weights: pass '
            "sample_weight, and leave global_batch_size out."
        )
    keep = real_mask(_NAME, "losses", losses.shape, replica)
    weights: Any = None  # given, if by_weights
    if sample_weight is not None:
        weights = _weights(_NAME, sample_weight, losses.shape, losses.dtype)
        losses = losses * weights
    total = jnp.sum(_masked(losses, keep))
    if by_weights:
        part = _divided_by_weights(total, weights, losses.shape, keep, replica)
        return _marked(as_dtype(part, dtype), replica)
    if losses.ndim == 2 and losses.shape[0] == losses.shape[1] > 1:
        log_once(_SQUARE, losses.shape)
    if global_batch_size is None:
        part = jnp.divide(total, _examples(replica, losses.shape[0]))
        return _marked(as_dtype(part, dtype), replica)
    if not isinstance(global_batch_size, jax.core.Tracer) or global_batch_size.ndim:
        check_number(f"{_NAME}: global_batch_size", global_batch_size)
    rows, replicas = losses.shape[0], replica.num_replicas_in_sync
    if not replica.is_padded and replica.real_examples == rows * replicas:
        is_share = is_integer(global_batch_size) and global_batch_size == rows
        replica.divides_by_share = is_share and replicas > 1
    if is_integer(global_batch_size):
        global_batch_size = float(global_batch_size)  # it may exceed an int32
    return as_dtype(jnp.divide(total, global_batch_size), dtype)


_SQUARE = (
    "compute_average_loss got losses of shape %s, one for each pair of examples. If labels have shape (n,) "
    "and predictions (n, 1), they were broadcast: compare predictions[:, 0]."
)


@promoting
def scale_regularization_loss(regularization_loss: jax.Array) -> jax.Array:
    """Returns this replica's part of a loss that does not depend on the batch.

    Args:
        regularization_loss: a loss such as a penalty on the weights; an array is summed.

    Returns:
        The scalar divided by the number of replicas, so that the sum over them is the loss.

    Raises:
        RuntimeError: called in cross-replica context.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> float(dj.scale_regularization_loss(jnp.array([1.0, 2.0])))
        3.0

    Source: https://www.tensorflow.org/api_docs/python/tf/nn/scale_regularization_loss
    """
    name = "scale_regularization_loss"
    replica = _replica_context(name)
    total = jnp.sum(real_array(name, "regularization_loss", regularization_loss))
    return _marked(jnp.divide(total, replica.num_replicas_in_sync), replica)
