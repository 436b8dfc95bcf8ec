"""From one loss for each example to this replica's part of one number for the global batch."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from distribute_jax._errors import ArgumentError
from distribute_jax.collectives._part_of_mean import part_of_mean
from distribute_jax.losses._terms import examples, real_rows

REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight", "sum", "none", None)
"""Keras's names; the first two mean the same, as do the last two."""


def checked_reduction(name: str, reduction: Any) -> Any:
    """Gives the reduction back, or raises where there is none of that name."""
    if (reduction is not None and not isinstance(reduction, str)) or reduction not in REDUCTIONS:
        known = ", ".join(repr(known) for known in REDUCTIONS)
        raise ArgumentError(
            f"{name}(reduction={reduction!r}): the reductions are {known}. Leave it out for the mean "
            "over the global batch."
        )
    return reduction


def aligned_weights(name: str, sample_weight: Any, losses: jax.Array) -> jax.Array:
    """Gives the weights with as many dims as the losses, matched from the left.

    Args:
        name: the loss, for messages.
        sample_weight: shape (), (batch,), (batch, 1) or that of the losses; per replica.
        losses: shape (batch, ...), per replica.

    Raises:
        ArgumentError: the weights are no numbers, or their shape is another.
    """
    try:
        weights = jnp.asarray(sample_weight).astype(losses.dtype)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"{name} got sample_weight={sample_weight!r:.60}, which is no array of numbers. Pass one "
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
    """Gives this replica's part; summed over the replicas it is the value of one device.

    Args:
        name: the loss, for messages.
        reduction: one of ``REDUCTIONS``.
        losses: shape (batch, ...), per replica.
        weights: of a shape that broadcasts against the losses, or None.
        counted: bools of the losses' shape, False where a loss does not count; None where all do.
        context: the replica context.
    """
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
