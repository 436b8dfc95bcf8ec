"""``Loss``: one loss for each example, and its reduction over the global batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from distribute_jax._errors import ArgumentError, ContextError
from distribute_jax._messages import promoting
from distribute_jax.collectives._markers import part_of_mean
from distribute_jax.strategies import get_replica_context


class Loss:
    """The base of losses. Called inside ``run``, a loss gives this replica's part of its value.

    Summed over the replicas, the parts are the value of one device on the real examples of the global
    batch; their summed gradients are those of one device. The padding of a partial batch does not
    count, whatever it holds.

    Your own loss defines ``call(y_true, y_pred)``, which gives one loss for each example.

    Args:
        name: under which the loss is reported; by default that of the class.
        reduction: ``"sum_over_batch_size"`` or ``"mean"``: the sum of the weighted losses over their
            number, further dims such as time included; ``"mean_with_sample_weight"``: over the sum
            of the weights; ``"sum"``; ``"none"`` or None: the weighted losses themselves, shape
            (batch, ...), 0 in the padding.
        dtype: the floating dtype that predictions are converted to. By default float32, or theirs
            where that is wider, so that losses of bfloat16 outputs are exact to float32.

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
    """Whether predictions are logits, where a loss has the choice."""
    _expects: ClassVar[str | None] = None
    """What the predictions are where they are no logits; see ``expects``."""

    def __init__(
        self,
        name: str | None = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> None:
        kind = type(self).__name__
        if name is not None and not isinstance(name, str):
            raise ArgumentError(
                f"{kind}(name={name!r:.60}): a name is a str. Options of a loss are passed by keyword."
            )
        self.name = name or kind
        self.reduction = checked_reduction(kind, reduction)
        self.dtype = _checked_dtype(kind, dtype)

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
        """Returns the losses before weights and reduction.

        Args:
            y_true: labels, dim 0 the batch; per replica.
            y_pred: predictions, dim 0 the batch; per replica.

        Returns:
            Losses of shape (batch, ...), per replica.

        Raises:
            ValueError: shapes that do not match, or not one loss for each example.
        """
        losses = self.call(y_true, jax.tree.map(self._converted, y_pred))
        return one_for_each(f"The loss {self.name}", losses, y_pred)

    @promoting
    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> jax.Array:
        """Returns this replica's part of the loss over the global batch; see the class."""
        context = replica_context(type(self).__name__)
        losses = self.per_example(y_true, y_pred)
        weights = None
        if sample_weight is not None:
            weights = aligned_weights(type(self).__name__, sample_weight, losses)
        counted = self._counted(y_true, losses)
        return reduced(type(self).__name__, self.reduction, losses, weights, counted, context)

    def _counted(self, y_true: Any, losses: jax.Array) -> jax.Array | None:
        """Returns which losses count in a mean, bools of their shape; None where all do."""
        return None

    def _converted(self, leaf: Any) -> Any:
        if not jnp.issubdtype(getattr(leaf, "dtype", int), jnp.floating):
            return leaf
        found = jnp.asarray(leaf)
        return found.astype(self.dtype or jnp.promote_types(found.dtype, jnp.float32))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r}, reduction={self.reduction!r})"


class FormulaLoss(Loss):
    """A loss that is a formula with options; each subclass names its formula."""

    formula: ClassVar[Callable[..., jax.Array]]
    """Takes y_true, y_pred and the options, and gives one loss for each example."""

    def __init__(
        self,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(name or type(self).formula.__name__, reduction, dtype)
        self._options = options
        vars(self).update(options)

    def call(self, y_true: Any, y_pred: Any) -> jax.Array:
        """Returns one loss for each example, as ``Loss.call`` says."""
        return type(self).formula(y_true, y_pred, **self._options)


def one_for_each(what: str, losses: Any, y_pred: Any) -> jax.Array:
    """Checks that there is one loss, or one array of losses, for each example."""
    shape = getattr(losses, "shape", None)
    if shape is None:
        raise ArgumentError(
            f"{what} gave {losses!r:.60}, which is not an array. Return one number for each example, an "
            "array of shape (batch,)."
        )
    if shape == ():
        raise ArgumentError(
            f"{what} gave one number for the whole batch. No replica knows the whole batch, so it "
            "cannot be exact: return one number for each example, without the mean or the sum over "
            "dim 0; the mean over the global batch is taken for you."
        )
    rows = [leaf.shape[0] for leaf in jax.tree.leaves(y_pred) if getattr(leaf, "shape", ())]
    if rows and shape[0] != rows[0]:
        raise ArgumentError(
            f"{what} gave an array of shape {tuple(shape)} for {rows[0]} examples. Return one number "
            "for each example: keep the batch as dim 0 and do not flatten it."
        )
    found = jnp.asarray(losses)
    return found if jnp.issubdtype(found.dtype, jnp.floating) else found.astype(jnp.float32)


def _checked_dtype(kind: str, dtype: Any) -> Any:
    if dtype is None:
        return None
    try:
        made = jnp.dtype(dtype)
    except TypeError:
        made = None
    if made is None or not jnp.issubdtype(made, jnp.floating):
        raise ArgumentError(
            f"{kind}(dtype={dtype!r:.60}): a loss is computed in a floating dtype. Leave it out for "
            "float32."
        )
    return made


REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight", "sum", "none", None)
"""Keras's names; the first two mean the same, as do the last two."""


def checked_reduction(name: str, reduction: Any) -> Any:
    """Returns the reduction back, or raises where there is none of that name."""
    if (reduction is not None and not isinstance(reduction, str)) or reduction not in REDUCTIONS:
        known = ", ".join(repr(known) for known in REDUCTIONS)
        raise ArgumentError(
            f"{name}(reduction={reduction!r}): the reductions are {known}. Leave it out for the mean "
            "over the global batch."
        )
    return reduction


def aligned_weights(name: str, sample_weight: Any, losses: jax.Array) -> jax.Array:
    """Returns the weights with as many dims as the losses, matched from the left."""
    try:
        weights = jnp.asarray(sample_weight).astype(losses.dtype)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"{name} got sample_weight={sample_weight!r:.60}, which is not an array of numbers. Pass one "
            "number for each example, shape (batch,)."
        ) from error
    given = weights.shape
    if weights.ndim == losses.ndim + 1 and given[-1] == 1:
        weights = weights[..., 0]
    rows = weights.shape[:1] in ((), losses.shape[:1])
    dims = zip(weights.shape[1:], losses.shape[1:], strict=False)
    if not rows or weights.ndim > losses.ndim or any(n not in (1, size) for n, size in dims):
        raise ArgumentError(
            f"{name} got sample_weight of shape {given} for losses of shape {losses.shape}. Its dims "
            "are matched with those of the losses from the left: pass one number for each example, "
            "shape (batch,), or one for each loss."
        )
    return weights.reshape(weights.shape + (1,) * (losses.ndim - weights.ndim))


def reduced(
    name: str,
    reduction: str | None,
    losses: jax.Array,
    weights: jax.Array | None,
    counted: jax.Array | None,
    context: Any,
) -> jax.Array:
    """Returns this replica's part; summed over the replicas it is the value of one device."""
    keep = counted
    if context.is_padded:
        real = real_rows(name, losses, context.batch_mask)
        keep = real if counted is None else real & counted
    terms = losses if weights is None else losses * weights
    if keep is not None:
        terms = jnp.where(keep, terms, 0)
    if reduction in ("none", None):
        return terms
    total = jnp.sum(terms)
    if reduction == "sum":
        return total
    part = _divided(reduction, total, losses, weights, counted, keep, context)
    return part_of_mean(part) if context.num_replicas_in_sync > 1 else part


def _divided(
    reduction: str | None,
    total: jax.Array,
    losses: jax.Array,
    weights: jax.Array | None,
    counted: jax.Array | None,
    keep: jax.Array | None,
    context: Any,
) -> jax.Array:
    if reduction == "mean_with_sample_weight" and weights is not None:
        return over_sum(total, jnp.broadcast_to(weights, losses.shape), keep, context)
    if counted is not None:
        return over_sum(total, jnp.ones(losses.shape, losses.dtype), keep, context)
    # In floating point: a large batch of images has more terms than an int32 counts.
    count = jnp.asarray(examples(context, losses.shape[0]), total.dtype)
    return total / (count * float(math.prod(losses.shape[1:])))


def over_sum(
    total: jax.Array, weights: jax.Array, keep: jax.Array | None, context: Any
) -> jax.Array:
    """Divides by the sum of the weights of all replicas; where that is 0 the part is 0."""
    if keep is not None:
        weights = jnp.where(keep, weights, 0)
    divisor = context.all_reduce("sum", jnp.sum(weights))
    return jnp.where(divisor == 0, 0, total / jnp.where(divisor == 0, 1, divisor))


def replica_context(name: str) -> Any:
    """Returns the replica context for a function of this name, which has no meaning elsewhere."""
    context = get_replica_context()
    if context is None:
        raise ContextError(
            f"You are calling `{name}` in cross replica context, while it was expected to be called "
            "in replica context: call it inside the function given to strategy.run."
        )
    return context


def real_rows(name: str, losses: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the mask of a partial batch with as many dims as the losses have."""
    if losses.shape[0] != mask.shape[0]:
        raise ArgumentError(
            f"{name} got {losses.shape[0]} losses for a replica's share of "
            f"{mask.shape[0]} examples, so it cannot tell which belong to the padding of this partial "
            "batch. Give it one loss for each example: keep the batch as dim 0 and do not flatten it."
        )
    return mask.reshape(mask.shape + (1,) * (losses.ndim - 1))


def real_terms(name: str, losses: jax.Array, mask: jax.Array) -> jax.Array:
    """Leaves the terms of the padding out; ``where`` rather than ``*``, since NaN times 0 is NaN."""
    return jnp.where(real_rows(name, losses, mask), losses, 0)


def examples(context: Any, rows: int) -> Any:
    """Counts the real examples of the global batch."""
    return context.real_examples if context.is_padded else rows * context.num_replicas_in_sync
