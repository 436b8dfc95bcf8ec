"""Losses over the global batch: exact for any number of replicas, to the last example."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from distribute_jax._checks import check_choice, check_number
from distribute_jax._errors import ArgumentError
from distribute_jax._messages import promoting, real_array
from distribute_jax._padding import align, real_mask
from distribute_jax._user_frames import log_once
from distribute_jax.collectives._dtypes import as_dtype, mean_dtype, wide
from distribute_jax.losses._loss import examples, kept, marked, over_sum, replica_context

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
    replica = replica_context(_NAME)
    losses = real_array(_NAME, "per_example_loss", per_example_loss)
    if losses.ndim == 0:
        raise ArgumentError(
            "compute_average_loss got a scalar. It needs one loss for each example, since only then "
            "can it divide by the examples of the global batch: leave the mean out of the loss."
        )
    by_weights = _divides_by_weights(divide_by, sample_weight, global_batch_size)
    keep = real_mask(_NAME, "losses", losses.shape, replica)
    if sample_weight is not None:
        dtype = wide(mean_dtype(losses.dtype)) if by_weights else losses.dtype
        array = real_array(_NAME, "sample_weight", sample_weight).astype(dtype)
        weights = align(_NAME, "sample_weight", array, "losses", losses.shape)
        terms = as_dtype(losses, dtype) * weights
        if by_weights:
            part = over_sum(jnp.sum(kept(terms, keep)), weights, losses.shape, keep, replica)
            return marked(as_dtype(part, mean_dtype(losses.dtype)), replica)
        losses = terms
    total = jnp.sum(kept(losses, keep))
    _note_pairs(losses.shape)
    if global_batch_size is None:
        return marked(jnp.divide(total, examples(replica, losses.shape[0])), replica)
    if not isinstance(global_batch_size, jax.core.Tracer):
        check_number(f"{_NAME}: global_batch_size", global_batch_size)
    if isinstance(global_batch_size, int):
        global_batch_size = float(global_batch_size)  # which may be more than an int32 holds
    return jnp.divide(total, global_batch_size)


_SQUARE = (
    "compute_average_loss got losses of shape %s, as many as there are pairs of examples. If that is because "
    "labels have shape (n,) and predictions (n, 1), compare predictions[:, 0]."
)


def _note_pairs(shape: tuple[int, ...]) -> None:
    """Logs once a matrix with a loss for each pair of examples, which is seldom meant."""
    if len(shape) == 2 and shape[0] == shape[1] > 1:
        log_once(_SQUARE, shape)


def _divides_by_weights(divide_by: Any, sample_weight: Any, global_batch_size: Any) -> bool:
    check_choice("compute_average_loss: divide_by", divide_by, ("examples", "weights"))
    if divide_by == "weights" and (sample_weight is None or global_batch_size is not None):
        raise ArgumentError(
            'compute_average_loss(divide_by="weights") divides by the sum of the weights: pass '
            "sample_weight, and leave global_batch_size out."
        )
    return bool(divide_by == "weights")


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
    replica = replica_context("scale_regularization_loss")
    name = "scale_regularization_loss"
    total = jnp.sum(real_array(name, "regularization_loss", regularization_loss))
    return jnp.divide(total, replica.num_replicas_in_sync)
