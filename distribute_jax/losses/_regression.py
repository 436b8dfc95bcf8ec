"""Regression losses, divergences of distributions, and hinge losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from distribute_jax.losses._loss import FormulaLoss
from distribute_jax.losses._shapes import EPSILON, checked_axis, pair


def mean_squared_error(y_true: Any, y_pred: Any) -> jax.Array:
    """Returns ``mean((y_true - y_pred) ** 2)`` over the last axis.

    Args:
        y_true: labels, shape (batch, ...).
        y_pred: predictions of the same shape; a last dim of 1 may be missing in one of the two.

    Returns:
        Shape (batch, ...) without the last dim; arrays of shape (batch,), for which Keras returns a
        scalar, keep their shape.

    Raises:
        ValueError: the shapes do not match. Nothing is broadcast.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> dj.losses.mean_squared_error(jnp.array([1.0, 2.0]), jnp.array([[1.0], [4.0]])).tolist()
        [0.0, 4.0]

    Source: https://keras.io/api/losses/regression_losses/
    """
    labels, predicted = pair("mean_squared_error", y_true, y_pred)
    return jnp.mean(jnp.square(labels - predicted), axis=-1)


def mean_absolute_error(y_true: Any, y_pred: Any) -> jax.Array:
    """Returns ``mean(abs(y_true - y_pred))`` over the last axis; shapes as ``mean_squared_error``."""
    labels, predicted = pair("mean_absolute_error", y_true, y_pred)
    return jnp.mean(jnp.abs(labels - predicted), axis=-1)


def mean_absolute_percentage_error(y_true: Any, y_pred: Any) -> jax.Array:
    """Returns ``100 * mean(abs((y_true - y_pred) / y_true))`` over the last axis.

    The divisor is at least 1e-7 in size. Shapes as ``mean_squared_error``.
    """
    labels, predicted = pair("mean_absolute_percentage_error", y_true, y_pred)
    relative = jnp.abs((labels - predicted) / jnp.maximum(jnp.abs(labels), EPSILON))
    return 100.0 * jnp.mean(relative, axis=-1)


def mean_squared_logarithmic_error(y_true: Any, y_pred: Any) -> jax.Array:
    """Returns ``mean((log(y_true + 1) - log(y_pred + 1)) ** 2)`` over the last axis.

    Values below 1e-7 become 1e-7. Shapes as ``mean_squared_error``.
    """
    labels, predicted = pair("mean_squared_logarithmic_error", y_true, y_pred)
    first = jnp.log(jnp.maximum(predicted, EPSILON) + 1.0)
    return jnp.mean(jnp.square(first - jnp.log(jnp.maximum(labels, EPSILON) + 1.0)), axis=-1)


def cosine_similarity(y_true: Any, y_pred: Any, axis: int = -1) -> jax.Array:
    """Returns minus the cosine of the angle between labels and predictions; 0 for a vector of zeros.

    Args:
        y_true: labels, shape (batch, ...).
        y_pred: predictions of the same shape.
        axis: the dim of the vectors.
    """
    labels, predicted = pair("cosine_similarity", y_true, y_pred)
    axis = checked_axis("cosine_similarity", axis, predicted.ndim)
    return -jnp.sum(_normalized(labels, axis) * _normalized(predicted, axis), axis=axis)


def _normalized(vectors: jax.Array, axis: int) -> jax.Array:
    # The maximum is inside the root, so that the gradient for a vector of zeros is not NaN.
    squares = jnp.sum(jnp.square(vectors), axis=axis, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.maximum(squares, EPSILON**2))


def huber(y_true: Any, y_pred: Any, delta: float = 1.0) -> jax.Array:
    """Returns the mean over the last axis of half the squared error, which is linear beyond ``delta``.

    Args:
        y_true: labels, shape (batch, ...).
        y_pred: predictions of the same shape.
        delta: the error beyond which the loss is linear.
    """
    labels, predicted = pair("huber", y_true, y_pred)
    return jnp.mean(
        optax.huber_loss(predicted, labels, delta=jnp.asarray(delta, labels.dtype)), axis=-1
    )


def log_cosh(y_true: Any, y_pred: Any) -> jax.Array:
    """Returns ``mean(log(cosh(y_pred - y_true)))`` over the last axis; shapes as ``mean_squared_error``."""
    labels, predicted = pair("log_cosh", y_true, y_pred)
    return jnp.mean(optax.log_cosh(predicted, labels), axis=-1)


class MeanSquaredError(FormulaLoss, formula=mean_squared_error):
    """The mean of the squared errors; see ``mean_squared_error``, and ``Loss`` for the arguments."""


class MeanAbsoluteError(FormulaLoss, formula=mean_absolute_error):
    """The mean of the absolute errors; see ``mean_absolute_error``, and ``Loss`` for the arguments."""


class MeanAbsolutePercentageError(FormulaLoss, formula=mean_absolute_percentage_error):
    """The mean error in percent of the labels; see ``mean_absolute_percentage_error`` and ``Loss``."""


class MeanSquaredLogarithmicError(FormulaLoss, formula=mean_squared_logarithmic_error):
    """The mean squared error of logarithms; see ``mean_squared_logarithmic_error`` and ``Loss``."""


class LogCosh(FormulaLoss, formula=log_cosh):
    """The logarithm of the hyperbolic cosine of the error; see ``log_cosh`` and ``Loss``."""


@dataclass(repr=False, eq=False)
class CosineSimilarity(FormulaLoss, formula=cosine_similarity):
    """Minus the cosine similarity; see ``cosine_similarity``, and ``Loss`` for the other arguments."""

    axis: int = -1
    reduction: str | None = "sum_over_batch_size"
    name: str = "cosine_similarity"
    dtype: Any = None


@dataclass(repr=False, eq=False)
class Huber(FormulaLoss, formula=huber):
    """Squared error near 0, absolute error beyond; see ``huber``, and ``Loss`` for the other arguments."""

    delta: float = 1.0
    reduction: str | None = "sum_over_batch_size"
    name: str = "huber_loss"
    dtype: Any = None


def kl_divergence(y_true: Any, y_pred: Any) -> jax.Array:
    """Returns ``sum(y_true * log(y_true / y_pred))`` over the last axis, both clipped to 1e-7 ... 1."""
    labels, predicted = pair("kl_divergence", y_true, y_pred)
    labels, predicted = jnp.clip(labels, EPSILON, 1), jnp.clip(predicted, EPSILON, 1)
    return jnp.sum(labels * jnp.log(labels / predicted), axis=-1)


def poisson(y_true: Any, y_pred: Any) -> jax.Array:
    """Returns ``mean(y_pred - y_true * log(y_pred + 1e-7))`` over the last axis: predictions are rates."""
    labels, predicted = pair("poisson", y_true, y_pred)
    return jnp.mean(predicted - labels * jnp.log(predicted + EPSILON), axis=-1)


class KLDivergence(FormulaLoss, formula=kl_divergence, expects="probability"):
    """The Kullback-Leibler divergence; see ``kl_divergence``, and ``Loss`` for the arguments."""


class Poisson(FormulaLoss, formula=poisson):
    """The Poisson loss of rates; see ``poisson``, and ``Loss`` for the arguments."""


def hinge(y_true: Any, y_pred: Any) -> jax.Array:
    """Returns ``mean(max(1 - y_true * y_pred, 0))`` over the last axis, for labels -1 and 1, or 0 and 1.

    Every label 0 counts as -1, so that the loss of an example does not depend on its batch; Keras
    converts labels only if all of the batch are 0 or 1. Shapes as ``mean_squared_error``.
    """
    return jnp.mean(_margins("hinge", y_true, y_pred), axis=-1)


def squared_hinge(y_true: Any, y_pred: Any) -> jax.Array:
    """Returns ``mean(max(1 - y_true * y_pred, 0) ** 2)`` over the last axis; labels as ``hinge``."""
    return jnp.mean(jnp.square(_margins("squared_hinge", y_true, y_pred)), axis=-1)


def _margins(name: str, y_true: Any, y_pred: Any) -> jax.Array:
    labels, predicted = pair(name, y_true, y_pred)
    labels = jnp.where(labels == 0, -1, labels)
    return jnp.maximum(1.0 - labels * predicted, 0.0)


def categorical_hinge(y_true: Any, y_pred: Any) -> jax.Array:
    """Returns ``max(neg - pos + 1, 0)`` for one-hot labels, shape (batch, ..., classes).

    ``pos`` is the prediction of the true class, ``neg`` the largest of the others, at least 0.
    """
    labels, predicted = pair("categorical_hinge", y_true, y_pred)
    pos = jnp.sum(labels * predicted, axis=-1)
    return jnp.maximum(jnp.max((1.0 - labels) * predicted, axis=-1) - pos + 1.0, 0.0)


class Hinge(FormulaLoss, formula=hinge):
    """The hinge loss for two classes; see ``hinge``, and ``Loss`` for the arguments."""


class SquaredHinge(FormulaLoss, formula=squared_hinge):
    """The squared hinge loss for two classes; see ``squared_hinge``, and ``Loss`` for the arguments."""


class CategoricalHinge(FormulaLoss, formula=categorical_hinge):
    """The hinge loss for several classes; see ``categorical_hinge``, and ``Loss`` for the arguments."""
