"""Metrics of ``compile`` from names and functions: one value for each example."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from distribute_jax._errors import ArgumentError
from distribute_jax.losses import Loss, cosine_similarity
from distribute_jax.losses._crossentropy import class_numbers
from distribute_jax.losses._get import BY_NAME, CLASSES, FunctionLoss, from_name
from distribute_jax.losses._shapes import pair, predictions

_NUMBERS = "For labels that are class numbers it is sparse_{name}."


def binary_accuracy(y_true: Any, y_pred: Any, threshold: float = 0.5) -> jax.Array:
    """Gives the share of the last dim where a prediction above the threshold meets a 1, else a 0."""
    labels, predicted = pair("binary_accuracy", y_true, y_pred)
    return jnp.mean(labels == (predicted > threshold), axis=-1, dtype=jnp.float32)


def categorical_accuracy(y_true: Any, y_pred: Any) -> jax.Array:
    """Gives 1 where the largest prediction is at the one of a one-hot label, else 0."""
    name = "categorical_accuracy"
    labels, predicted = pair(name, y_true, y_pred, _NUMBERS.format(name=name))
    found = jnp.argmax(predicted, axis=-1) == jnp.argmax(labels, axis=-1)
    return found.astype(jnp.float32)


def sparse_categorical_accuracy(y_true: Any, y_pred: Any) -> jax.Array:
    """Gives 1 where the largest prediction is at the class number of the label, else 0."""
    predicted = predictions("sparse_categorical_accuracy", y_pred)
    labels = class_numbers("sparse_categorical_accuracy", y_true, predicted, -1)
    return (jnp.argmax(predicted, axis=-1) == labels).astype(jnp.float32)


def top_k_categorical_accuracy(y_true: Any, y_pred: Any, k: int = 5) -> jax.Array:
    """Gives 1 where the class of a one-hot label is among the k largest predictions, else 0."""
    name = "top_k_categorical_accuracy"
    labels, predicted = pair(name, y_true, y_pred, _NUMBERS.format(name=name))
    return _in_top_k(jnp.argmax(labels, axis=-1), predicted, k)


def sparse_top_k_categorical_accuracy(y_true: Any, y_pred: Any, k: int = 5) -> jax.Array:
    """Gives 1 where the class number of the label is among the k largest predictions, else 0."""
    predicted = predictions("sparse_top_k_categorical_accuracy", y_pred)
    labels = class_numbers("sparse_top_k_categorical_accuracy", y_true, predicted, -1)
    return _in_top_k(labels, predicted, k)


def _in_top_k(labels: jax.Array, predicted: jax.Array, k: int) -> jax.Array:
    """Says where fewer than k predictions are larger than that of the label; ties are in, as in Keras."""
    classes = predicted.shape[-1]
    place = jnp.clip(labels, 0, classes - 1)[..., None]
    own = jnp.take_along_axis(predicted, place, axis=-1)
    larger = jnp.sum(predicted > own, axis=-1)
    known = (labels >= 0) & (labels < classes) & jnp.isfinite(own[..., 0])
    return (known & (larger < k)).astype(jnp.float32)


PerExample = Callable[[Any, Any], jax.Array]

_BY_SHAPE = ("accuracy", "acc")
_FORMULAS: Mapping[str, PerExample] = {
    "categorical_accuracy": categorical_accuracy,
    "sparse_categorical_accuracy": sparse_categorical_accuracy,
    "top_k_categorical_accuracy": top_k_categorical_accuracy,
    "sparse_top_k_categorical_accuracy": sparse_top_k_categorical_accuracy,
    "cosine_similarity": lambda y_true, y_pred: -cosine_similarity(y_true, y_pred),
}
_CLASS_NAMES = {
    "".join(part.capitalize() for part in name.split("_")): name
    for name in (*_FORMULAS, "binary_accuracy")
}
"""Keras's classes of the same metrics, by the names that strings may also have."""


def named(identifier: Any, loss: Any, y_true: Any, y_pred: Any) -> tuple[str, PerExample]:
    """Gives the name under which Keras reports a metric, and its value for each example.

    ``"accuracy"`` follows the shapes, as in Keras: predictions with one number each are of two
    classes, labels with a dim less, or with one number each, are class numbers, others are one-hot.
    Where the loss takes logits, so do its metrics: the threshold of two classes is 0, and a
    cross-entropy is that of logits; Keras would take both for probabilities. ``"cosine_similarity"``
    is positive for vectors that agree, the loss of that name negative, as in Keras.

    Args:
        identifier: a name of Keras, a function with one value for each example, or a ``Loss``.
        loss: the loss of the same output, a ``Loss`` or None.
        y_true: labels, or anything with their shape.
        y_pred: predictions, or anything with their shape.

    Raises:
        ArgumentError: there is no such metric, or a function does not take two arguments.
    """
    logits = bool(getattr(loss, "from_logits", False))
    if isinstance(identifier, str):
        return identifier, _from_name(identifier, logits, y_true, y_pred)
    if isinstance(identifier, Loss):
        return identifier.name, identifier.per_example
    if callable(identifier) and not isinstance(identifier, type):
        function = FunctionLoss(identifier, what="metric")
        return function.name, function.per_example
    raise ArgumentError(
        f"{identifier!r:.80} is no metric. Pass a metric of dj.metrics, a name of Keras, as "
        '"accuracy", or a function of (y_true, y_pred) with one value for each example.'
    )


def _from_name(name: str, logits: bool, y_true: Any, y_pred: Any) -> PerExample:
    binary = partial(binary_accuracy, threshold=0.0 if logits else 0.5)
    if name.lower() in _BY_SHAPE:
        return _of_shapes(name, binary, y_true, y_pred)
    known = _CLASS_NAMES.get(name, name)
    if known == "binary_accuracy":
        return binary
    if known in _FORMULAS:
        return _FORMULAS[known]
    if name in BY_NAME or name in {cls.__name__ for cls in CLASSES}:
        made = from_name(name)
        takes_logits = "from_logits" in vars(made)
        return (from_name(name, from_logits=logits) if takes_logits else made).per_example
    names = sorted({*_BY_SHAPE, *_FORMULAS, "binary_accuracy", *BY_NAME})
    raise ArgumentError(
        f"{name!r} is the name of no metric. The names are {', '.join(names)}; or pass a metric of "
        "dj.metrics, or a function of (y_true, y_pred) with one value for each example."
    )


def _of_shapes(name: str, binary: PerExample, y_true: Any, y_pred: Any) -> PerExample:
    """Chooses the accuracy by the shapes of labels and predictions, as Keras does."""
    true, predicted = getattr(y_true, "shape", None), getattr(y_pred, "shape", None)
    if true is None or predicted is None:
        raise ArgumentError(
            f"The metric {name!r} is chosen by the shapes of labels and predictions, and one of them is "
            "no array but a nest. Give each output metrics of its own."
        )
    if len(predicted) < 2 or predicted[-1] == 1:
        return binary
    if len(true) < len(predicted) or true[-1] == 1:
        return sparse_categorical_accuracy
    return categorical_accuracy
