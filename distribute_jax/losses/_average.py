"""Losses over the global batch: exact for any number of replicas, to the last example."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from distribute_jax._errors import ArgumentError
from distribute_jax._messages import promoting
from distribute_jax.collectives._dtypes import as_dtype, mean_dtype, wide
from distribute_jax.collectives._markers import part_of_mean
from distribute_jax.losses._loss import examples, over_sum, real_rows, real_terms, replica_context


@promoting
def compute_average_loss(
    per_example_loss: jax.Array,
    sample_weight: jax.Array | None = None,
    global_batch_size: Any = None,
    *,
    divide_by: str = "examples",
) -> jax.Array:
    """Returns this replica's part of the mean loss over the global batch.

    Summed over the replicas it is the mean over the real examples of the global batch, so its summed
    gradients are those of one device. Padding of a partial batch is left out by itself.

    Args:
        per_example_loss: one loss for each example of the per-replica batch; further dims, as the
            tokens of a sequence, are summed.
        sample_weight: weights that scale the terms, broadcast from the left; the divisor stays the
            number of examples, as in TensorFlow, unless ``divide_by`` says otherwise.
        global_batch_size: what to divide by. By default the number of real examples of the global
            batch; a value that is passed is obeyed.
        divide_by: ``"examples"``, or ``"weights"``: the sum of the weights of the global batch, over all
            replicas and further dims, as for a loss per token. The weights need not be spread evenly; where
            all of them are 0 the loss is 0.

    Returns:
        A scalar, per replica.

    Raises:
        ValueError: the loss is a scalar already, its dim 0 is not the batch, the weights do not fit it,
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
    context = replica_context("compute_average_loss")
    losses = jnp.asarray(per_example_loss)
    if losses.ndim == 0:
        raise ArgumentError(
            "compute_average_loss got a scalar. It needs one loss for each example, since only then "
            "can it divide by the examples of the global batch: leave the mean out of the loss."
        )
    by_weights = _divides_by_weights(divide_by, sample_weight, global_batch_size)
    if sample_weight is not None:
        weights = jnp.asarray(
            sample_weight, wide(mean_dtype(losses.dtype)) if by_weights else losses.dtype
        )
        _check_weights(weights.shape, losses.shape)
        weights = weights.reshape(weights.shape + (1,) * (losses.ndim - weights.ndim))
        if by_weights:
            return _marked(_over_weights(losses, weights, context), context)
        losses = losses * weights
    if context.is_padded:
        losses = real_terms("compute_average_loss", losses, context.batch_mask)
    own_size = global_batch_size is not None
    if global_batch_size is None:
        global_batch_size = examples(context, losses.shape[0])
    elif not isinstance(global_batch_size, jax.core.Tracer) and not global_batch_size > 0:
        raise ArgumentError(
            f"compute_average_loss(global_batch_size={global_batch_size!r}): the loss is divided by it, "
            "so it is a number above 0. Leave it out to divide by the real examples of the global batch."
        )
    part = jnp.divide(jnp.sum(losses), global_batch_size)
    return part if own_size else _marked(part, context)


def _marked(part: jax.Array, context: Any) -> jax.Array:
    return part_of_mean(part) if context.num_replicas_in_sync > 1 else part


def _divides_by_weights(divide_by: Any, sample_weight: Any, global_batch_size: Any) -> bool:
    if divide_by not in ("examples", "weights"):
        raise ArgumentError(
            f'compute_average_loss(divide_by={divide_by!r}): divide_by must be "examples" or "weights".'
        )
    if divide_by == "examples":
        return False
    if sample_weight is None or global_batch_size is not None:
        raise ArgumentError(
            'compute_average_loss(divide_by="weights") divides by the sum of the weights: pass '
            "sample_weight, and leave global_batch_size out."
        )
    return True


def _over_weights(losses: jax.Array, weights: jax.Array, context: Any) -> jax.Array:
    """Returns this replica's part of the weighted mean; added up in float32 at least."""
    terms = as_dtype(losses, weights.dtype) * weights
    real = None
    if context.is_padded:
        real = real_rows("compute_average_loss", losses, context.batch_mask)
        terms = jnp.where(real, terms, 0)
    part = over_sum(jnp.sum(terms), jnp.broadcast_to(weights, losses.shape), real, context)
    return as_dtype(part, mean_dtype(losses.dtype))


def _check_weights(weights: tuple[int, ...], losses: tuple[int, ...]) -> None:
    fits = len(weights) <= len(losses) and all(
        w in (1, size) for w, size in zip(weights, losses, strict=False)
    )
    if not fits:
        raise ArgumentError(
            f"compute_average_loss got sample_weight of shape {weights} for losses of shape {losses}. Give "
            f"one weight for each example, shape {losses[:1]}, or one for each loss."
        )


@promoting
def scale_regularization_loss(regularization_loss: jax.Array) -> jax.Array:
    """Returns this replica's part of a loss that does not depend on the batch.

    Args:
        regularization_loss: a loss such as a penalty on the weights, summed to a scalar here.

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
    context = replica_context("scale_regularization_loss")
    total = jnp.sum(jnp.asarray(regularization_loss))
    return jnp.divide(total, context.num_replicas_in_sync)
