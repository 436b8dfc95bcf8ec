"""Losses over the global batch: exact for any number of replicas, to the last example."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from distribute_jax._errors import ArgumentError
from distribute_jax.losses._terms import examples, real_terms, replica_context


def compute_average_loss(
    per_example_loss: jax.Array,
    sample_weight: jax.Array | None = None,
    global_batch_size: Any = None,
) -> jax.Array:
    """Gives this replica's part of the mean loss over the global batch.

    Summed over the replicas it is the mean over the real examples of the global batch, so its summed
    gradients are those of one device. Padding of a partial batch is left out by itself.

    Args:
        per_example_loss: one loss for each example of the per-replica batch; further dims, as the
            tokens of a sequence, are summed.
        sample_weight: weights that scale the terms, broadcast from the left; the divisor stays the
            number of examples, as in TensorFlow.
        global_batch_size: what to divide by. By default the number of real examples of the global
            batch; a value that is passed is obeyed.

    Returns:
        A scalar, per replica.

    Raises:
        ValueError: the loss is a scalar already, its dim 0 is not the batch, the weights do not fit it, or
            the batch size is not above 0.
        RuntimeError: called in cross-replica context.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> float(dj.compute_average_loss(jnp.array([1.0, 3.0])))
        2.0

    Source: https://www.tensorflow.org/api_docs/python/tf/nn/compute_average_loss
    """
    context = replica_context("compute_average_loss")
    losses = jnp.asarray(per_example_loss)
    if losses.ndim == 0:
        raise ArgumentError(
            "compute_average_loss got a scalar. It needs one loss for each example, since only then "
            "can it divide by the examples of the global batch: leave the mean out of the loss."
        )
    if sample_weight is not None:
        weights = jnp.asarray(sample_weight, losses.dtype)
        _check_weights(weights.shape, losses.shape)
        losses = losses * weights.reshape(weights.shape + (1,) * (losses.ndim - weights.ndim))
    if context.is_padded:
        losses = real_terms("compute_average_loss", losses, context.batch_mask)
    if global_batch_size is None:
        global_batch_size = examples(context, losses.shape[0])
    elif not isinstance(global_batch_size, jax.core.Tracer) and not global_batch_size > 0:
        raise ArgumentError(
            f"compute_average_loss(global_batch_size={global_batch_size!r}): the loss is divided by it, "
            "so it is a number above 0. Leave it out to divide by the real examples of the global batch."
        )
    return jnp.divide(jnp.sum(losses), global_batch_size)


def _check_weights(weights: tuple[int, ...], losses: tuple[int, ...]) -> None:
    fits = len(weights) <= len(losses) and all(
        w in (1, size) for w, size in zip(weights, losses, strict=False)
    )
    if not fits:
        raise ArgumentError(
            f"compute_average_loss got sample_weight of shape {weights} for losses of shape {losses}. Give "
            f"one weight for each example, shape {losses[:1]}, or one for each loss."
        )


def scale_regularization_loss(regularization_loss: jax.Array) -> jax.Array:
    """Gives this replica's part of a loss that does not depend on the batch.

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
