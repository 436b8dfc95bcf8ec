"""Cross-entropy losses: for two classes, for one-hot labels, and for class numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from distribute_jax._checks import converting
from distribute_jax._messages import real_array
from distribute_jax.losses._loss import FormulaLoss, check_smoothing
from distribute_jax.losses._shapes import (
    checked_axis,
    clipped,
    log_probabilities,
    mismatch,
    pair,
    predictions,
)


def binary_crossentropy(
    y_true: Any,
    y_pred: Any,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> jax.Array:
    """Returns ``-mean(y_true * log(p) + (1 - y_true) * log(1 - p))`` over an axis.

    Args:
        y_true: 0 or 1, or probabilities, shape (batch, ...).
        y_pred: probabilities of that shape, clipped to 1e-7 ... 1 - 1e-7; or logits.
        from_logits: whether predictions are logits, of which ``p`` is the sigmoid; then nothing is clipped.
        label_smoothing: 0 to 1: labels move towards 0.5 by half of it.
        axis: the dim of the mean.

    Returns:
        Shape (batch, ...) without the axis.

    Raises:
        ValueError: the shapes do not match.

    Example:
        >>> import distribute_jax as dj
        >>> losses = dj.losses.binary_crossentropy([[0, 1], [0, 0]], [[0.6, 0.4], [0.4, 0.6]])
        >>> [round(loss, 3) for loss in losses.tolist()]
        [0.916, 0.714]

    Source: https://keras.io/api/losses/probabilistic_losses/
    """
    name = "binary_crossentropy"
    labels, predicted, axis = _two_classes(name, y_true, y_pred, label_smoothing, axis)
    if from_logits:
        return jnp.mean(optax.sigmoid_binary_cross_entropy(predicted, labels), axis=axis)
    return jnp.mean(_crossentropy(labels, predicted), axis=axis)


def binary_focal_crossentropy(
    y_true: Any,
    y_pred: Any,
    apply_class_balancing: bool = False,
    alpha: float = 0.25,
    gamma: float = 2.0,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> jax.Array:
    """Returns ``binary_crossentropy`` in which well predicted examples have small weights.

    Each term is multiplied by ``(1 - p_t) ** gamma``, where ``p_t`` is the probability of the true label.

    Args:
        y_true: 0 or 1, shape (batch, ...).
        y_pred: probabilities or logits of that shape.
        apply_class_balancing: whether ones are also multiplied by alpha, and zeros by 1 - alpha.
        alpha: the weight of ones.
        gamma: how strongly well predicted examples are down-weighted; 0 for not at all.
        from_logits: whether predictions are logits.
        label_smoothing: 0 to 1: labels move towards 0.5 by half of it.
        axis: the dim of the mean.
    """
    name = "binary_focal_crossentropy"
    labels, predicted, axis = _two_classes(name, y_true, y_pred, label_smoothing, axis)
    if from_logits:
        predicted = jax.nn.sigmoid(predicted)
    p_t = labels * predicted + (1.0 - labels) * (1.0 - predicted)
    losses = (1.0 - p_t) ** gamma * _crossentropy(labels, predicted)
    if apply_class_balancing:
        losses = losses * (labels * alpha + (1.0 - labels) * (1.0 - alpha))
    return jnp.mean(losses, axis=axis)


def _crossentropy(labels: jax.Array, probabilities: jax.Array) -> jax.Array:
    p = clipped(probabilities)
    return -(labels * jnp.log(p) + (1.0 - labels) * jnp.log(1.0 - p))


def _two_classes(
    name: str, y_true: Any, y_pred: Any, label_smoothing: float, axis: int
) -> tuple[jax.Array, jax.Array, int]:
    labels, predicted = pair(name, y_true, y_pred)
    check_smoothing(name, label_smoothing)
    if label_smoothing:
        labels = labels * (1.0 - label_smoothing) + 0.5 * label_smoothing
    return labels, predicted, checked_axis(name, axis, predicted.ndim)


@dataclass(repr=False, eq=False)
class BinaryCrossentropy(FormulaLoss, formula=binary_crossentropy, expects="probability"):
    """Binary cross-entropy; see ``binary_crossentropy``, and ``Loss`` for the other arguments.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> loss = dj.losses.BinaryCrossentropy(from_logits=True)
        >>> round(float(loss(jnp.array([0, 1]), jnp.array([[0.0], [0.0]]))), 4)
        0.6931
    """

    from_logits: bool = False
    label_smoothing: float = 0.0
    axis: int = -1
    reduction: str | None = "sum_over_batch_size"
    name: str = "binary_crossentropy"
    dtype: Any = None


@dataclass(repr=False, eq=False)
class BinaryFocalCrossentropy(
    FormulaLoss, formula=binary_focal_crossentropy, expects="probability"
):
    """Binary focal cross-entropy; see ``binary_focal_crossentropy`` and ``Loss``."""

    apply_class_balancing: bool = False
    alpha: float = 0.25
    gamma: float = 2.0
    from_logits: bool = False
    label_smoothing: float = 0.0
    axis: int = -1
    reduction: str | None = "sum_over_batch_size"
    name: str = "binary_focal_crossentropy"
    dtype: Any = None


_ONE_HOT = (
    "It takes one-hot labels of the shape of the predictions. For class numbers use "
    "dj.losses.SparseCategoricalCrossentropy, for two classes dj.losses.BinaryCrossentropy."
)


def categorical_crossentropy(
    y_true: Any,
    y_pred: Any,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> jax.Array:
    """Returns ``-sum(y_true * log(p))`` over the classes.

    Args:
        y_true: one-hot labels, or probabilities, shape (batch, ..., classes).
        y_pred: probabilities of that shape, divided by their sum and clipped to 1e-7 ... 1 - 1e-7; or
            logits.
        from_logits: whether predictions are logits, of which ``p`` is the softmax; then nothing is clipped.
        label_smoothing: 0 to 1: this much of each label is spread equally over all classes.
        axis: the dim of the classes.

    Returns:
        Shape (batch, ...) without the classes.

    Raises:
        ValueError: the shapes do not match, or labels are class numbers.

    Example:
        >>> import distribute_jax as dj
        >>> y_true, y_pred = [[0, 1, 0], [0, 0, 1]], [[0.05, 0.95, 0.0], [0.1, 0.8, 0.1]]
        >>> losses = dj.losses.categorical_crossentropy(y_true, y_pred)
        >>> [round(loss, 3) for loss in losses.tolist()]
        [0.051, 2.303]

    Source: https://keras.io/api/losses/probabilistic_losses/
    """
    name = "categorical_crossentropy"
    labels, predicted, axis = _one_hot(name, y_true, y_pred, label_smoothing, axis)
    return -jnp.sum(labels * log_probabilities(predicted, axis, from_logits), axis=axis)


def categorical_focal_crossentropy(
    y_true: Any,
    y_pred: Any,
    alpha: Any = 0.25,
    gamma: float = 2.0,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> jax.Array:
    """Returns ``-sum(alpha * (1 - p) ** gamma * y_true * log(p))`` over the classes.

    Args:
        y_true: one-hot labels, shape (batch, ..., classes).
        y_pred: probabilities or logits of that shape.
        alpha: the weight of the loss, a number, or one for each class.
        gamma: how strongly well predicted examples are down-weighted; 0 for not at all.
        from_logits: whether predictions are logits.
        label_smoothing: 0 to 1: this much of each label is spread equally over all classes.
        axis: the dim of the classes.
    """
    name = "categorical_focal_crossentropy"
    labels, predicted, axis = _one_hot(name, y_true, y_pred, label_smoothing, axis)
    if from_logits:
        predicted = jax.nn.softmax(predicted, axis=axis)
    p = clipped(predicted / jnp.sum(predicted, axis=axis, keepdims=True))
    class_weights = real_array(name, "alpha", alpha).astype(p.dtype)
    with converting(f"{name}: alpha", alpha, "a number, or one for each class"):
        weights = class_weights * (1.0 - p) ** gamma
    return -jnp.sum(weights * labels * jnp.log(p), axis=axis)


def _one_hot(
    name: str, y_true: Any, y_pred: Any, label_smoothing: float, axis: int
) -> tuple[jax.Array, jax.Array, int]:
    predicted = predictions(name, y_pred)
    labels = real_array(name, "y_true", y_true).astype(predicted.dtype)
    if labels.shape != predicted.shape or predicted.ndim < 2:
        raise mismatch(name, labels.shape, predicted.shape, _ONE_HOT)
    axis = checked_axis(name, axis, predicted.ndim)
    check_smoothing(name, label_smoothing)
    if label_smoothing:
        labels = labels * (1.0 - label_smoothing) + label_smoothing / labels.shape[axis]
    return labels, predicted, axis


@dataclass(repr=False, eq=False)
class CategoricalCrossentropy(
    FormulaLoss, formula=categorical_crossentropy, expects="probabilities"
):
    """Cross-entropy of one-hot labels; see ``categorical_crossentropy`` and ``Loss``.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> loss = dj.losses.CategoricalCrossentropy(from_logits=True)
        >>> round(float(loss(jnp.eye(2), jnp.zeros((2, 2)))), 4)
        0.6931
    """

    from_logits: bool = False
    label_smoothing: float = 0.0
    axis: int = -1
    reduction: str | None = "sum_over_batch_size"
    name: str = "categorical_crossentropy"
    dtype: Any = None


@dataclass(repr=False, eq=False)
class CategoricalFocalCrossentropy(
    FormulaLoss, formula=categorical_focal_crossentropy, expects="probabilities"
):
    """Focal cross-entropy of one-hot labels; see ``categorical_focal_crossentropy`` and ``Loss``."""

    alpha: Any = 0.25
    gamma: float = 2.0
    from_logits: bool = False
    label_smoothing: float = 0.0
    axis: int = -1
    reduction: str | None = "sum_over_batch_size"
    name: str = "categorical_focal_crossentropy"
    dtype: Any = None


_CLASS_NUMBERS = (
    "It takes class numbers, of the shape of the predictions without the classes. For one-hot labels use "
    "dj.losses.CategoricalCrossentropy."
)


def sparse_categorical_crossentropy(
    y_true: Any,
    y_pred: Any,
    from_logits: bool = False,
    ignore_class: int | None = None,
    axis: int = -1,
) -> jax.Array:
    """Returns ``-log(p)`` of the true class.

    Args:
        y_true: class numbers, shape (batch, ...) or (batch, ..., 1).
        y_pred: probabilities, shape (batch, ..., classes), divided by their sum and clipped to 1e-7 ...
            1 - 1e-7; or logits.
        from_logits: whether predictions are logits, of which ``p`` is the softmax; then nothing is clipped.
        ignore_class: a class number whose examples have no loss, such as -1 or 255 for unknown pixels.
        axis: the dim of the classes.

    Returns:
        Shape (batch, ...); 0 where the label is ignored; NaN where it is not a class, as in TensorFlow
        on GPUs.

    Raises:
        ValueError: the shapes do not match, or labels are one-hot.

    Example:
        >>> import distribute_jax as dj
        >>> losses = dj.losses.sparse_categorical_crossentropy(
        ...     [1, 2], [[0.05, 0.95, 0.0], [0.1, 0.8, 0.1]]
        ... )
        >>> [round(loss, 3) for loss in losses.tolist()]
        [0.051, 2.303]

    Source: https://keras.io/api/losses/probabilistic_losses/
    """
    name = "sparse_categorical_crossentropy"
    predicted = predictions(name, y_pred)
    labels = class_numbers(name, y_true, predicted, axis)
    axis = checked_axis(name, axis, predicted.ndim)
    counted = None if ignore_class is None else labels != ignore_class
    if counted is not None:
        # Before the logarithm, so that the gradient of an ignored row of zeros or NaN is not NaN.
        predicted = jnp.where(jnp.expand_dims(counted, axis), predicted, 1.0)
        labels = jnp.where(counted, labels, 0)
    classes = predicted.shape[axis]
    indices = jnp.expand_dims(jnp.clip(labels, 0, classes - 1), axis)
    logs = log_probabilities(predicted, axis, from_logits)
    losses = -jnp.take_along_axis(logs, indices, axis=axis).squeeze(axis)
    losses = jnp.where((labels >= 0) & (labels < classes), losses, jnp.nan)
    return losses if counted is None else jnp.where(counted, losses, 0)


def class_numbers(name: str, y_true: Any, predicted: jax.Array, axis: int) -> jax.Array:
    """Returns labels as integers of the shape of the predictions without the classes."""
    labels = real_array(name, "y_true", y_true)
    if predicted.ndim < 2:
        raise mismatch(name, labels.shape, predicted.shape, _CLASS_NUMBERS)
    axis = checked_axis(name, axis, predicted.ndim)
    expected = predicted.shape[:axis] + predicted.shape[axis + 1 :]
    if labels.shape == (*expected, 1):
        labels = labels[..., 0]
    if labels.shape != expected:
        raise mismatch(name, labels.shape, predicted.shape, _CLASS_NUMBERS)
    return labels.astype(jnp.int32)


@dataclass(repr=False, eq=False)
class SparseCategoricalCrossentropy(
    FormulaLoss, formula=sparse_categorical_crossentropy, expects="probabilities"
):
    """Cross-entropy of class numbers; see ``sparse_categorical_crossentropy``, and ``Loss``.

    With ``ignore_class`` a mean is over the losses that count, as in Keras.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> loss = dj.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
        >>> round(float(loss(jnp.array([0, 1, -1]), jnp.zeros((3, 2)))), 4)
        0.6931
    """

    from_logits: bool = False
    ignore_class: int | None = None
    reduction: str | None = "sum_over_batch_size"
    axis: int = -1
    name: str = "sparse_categorical_crossentropy"
    dtype: Any = None

    takes_class_numbers = True

    def _counted(self, y_true: Any, losses: jax.Array) -> jax.Array | None:
        if self.ignore_class is None:
            return None
        return jnp.asarray(y_true).reshape(losses.shape).astype(jnp.int32) != self.ignore_class
