"""Checks of labels and predictions: equal shapes without broadcasting, clipping, probabilities."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._errors import ArgumentError
from distribute_jax._messages import real_array
from distribute_jax.losses._loss import Loss


def pair(name: str, y_true: Any, y_pred: Any, hint: str = "") -> tuple[jax.Array, jax.Array]:
    """Returns labels and predictions as arrays of equal shape and dtype.

    A last dim of 1 that only one of them has is added or removed, as in Keras. Two arrays of shape
    (batch,) become (batch, 1), so that a mean over the last axis keeps the batch.
    """
    predicted = predictions(name, y_pred)
    labels = real_array(name, "y_true", y_true).astype(predicted.dtype)
    shapes = labels.shape, predicted.shape
    labels, predicted = same_rank(labels, predicted)
    if labels.shape != predicted.shape or not predicted.ndim:
        raise mismatch(name, *shapes, hint or "They have one shape, whose dim 0 is the batch.")
    if predicted.ndim == 1:
        return labels[:, None], predicted[:, None]
    return labels, predicted


def predictions(name: str, y_pred: Any) -> jax.Array:
    """Returns predictions as a floating array."""
    predicted = real_array(name, "y_pred", y_pred)
    if not jnp.issubdtype(predicted.dtype, jnp.floating):
        return predicted.astype(jnp.float32)
    return predicted


def same_rank(labels: jax.Array, predicted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Adds or removes a last dim of 1 if one of the two has one dim more, as in Keras."""
    if labels.ndim == predicted.ndim + 1 and labels.shape[-1] == 1:
        if predicted.ndim == 1:
            return labels, predicted[:, None]
        return labels[..., 0], predicted
    if labels.ndim and predicted.ndim == labels.ndim + 1 and predicted.shape[-1] == 1:
        if labels.ndim == 1:
            return labels[:, None], predicted
        return labels, predicted[..., 0]
    return labels, predicted


def checked_axis(name: str, axis: Any, ndim: int) -> int:
    """Returns a non-negative axis; raises if it is out of range or the batch."""
    is_int = isinstance(axis, (int, np.integer)) and not isinstance(axis, bool)
    if not is_int or not -ndim <= axis < ndim or axis % ndim == 0:
        raise ArgumentError(
            f"{name}(axis={axis!r}) got predictions with {ndim} dims, of which dim 0 is the batch: the "
            "axis is another of them. Pass axis=-1 for the last."
        )
    return int(axis) % ndim


def mismatch(name: str, true: Any, predicted: Any, hint: str) -> ArgumentError:
    """Returns the error for labels and predictions whose shapes do not match."""
    return ArgumentError(
        f"{name} got y_true of shape {tuple(true)} and y_pred of shape {tuple(predicted)}. {hint}"
    )


EPSILON = 1e-7
"""Keras's epsilon, which keeps divisors and arguments of logarithms away from 0."""


def clipped(probabilities: jax.Array) -> jax.Array:
    """Clips probabilities to 1e-7 ... 1 - 1e-7, or to what a narrower dtype can distinguish from 0 and 1."""
    finfo: Any = jnp.finfo
    epsilon = max(EPSILON, float(finfo(probabilities.dtype).epsneg))
    return jnp.clip(probabilities, epsilon, 1.0 - epsilon)


def log_probabilities(predicted: jax.Array, axis: int, from_logits: bool) -> jax.Array:
    """Returns the logarithms of probabilities, normalised over an axis."""
    if from_logits:
        return jax.nn.log_softmax(predicted, axis=axis)
    return jnp.log(clipped(predicted / jnp.sum(predicted, axis=axis, keepdims=True)))


TOLERANCE = 1e-3
"""The rounding error that probabilities may have."""


def check_probabilities(loss: Loss, y_pred: Any) -> None:
    """Raises if a loss that expects probabilities got something else, most likely logits."""
    if loss.expects is None:
        return
    array = np.asarray(y_pred)
    # bfloat16 rounds each probability, and therefore their sum, by a relative error of at most 2**-8.
    tolerance = 2.0**-8 if array.dtype.itemsize == 2 else TOLERANCE
    values = array.astype(np.float64)
    fault = ""
    outside = values[(values < -tolerance) | (values > 1 + tolerance)]
    if outside.size:
        fault = f"one of them is {outside.flat[0]:.6g}, outside of 0 to 1"
    elif loss.expects == "probabilities" and values.ndim > 1:
        sums = values.sum(axis=getattr(loss, "axis", -1))
        off = sums[np.abs(sums - 1) > tolerance]
        fault = f"those of an example sum to {off.flat[0]:.6g}, not 1" if off.size else ""
    if not fault:
        return
    advice = "Apply a softmax to the model's outputs, jax.nn.softmax(outputs)"
    if "from_logits" in vars(loss):
        advice = f"For logits write dj.losses.{type(loss).__name__}(from_logits=True)"
    over = "over the classes" if loss.expects == "probabilities" else "between 0 and 1"
    raise ArgumentError(
        f"The loss {loss.name} expects probabilities {over}, and the first outputs of the model are not: "
        f"{fault}. {advice}."
    )
