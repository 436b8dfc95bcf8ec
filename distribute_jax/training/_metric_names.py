"""The metrics of ``compile``, from names, functions and objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
from flax import nnx

from distribute_jax._absent import describe_foreign
from distribute_jax._checks import brief
from distribute_jax._errors import ArgumentError
from distribute_jax._messages import not_a_name, promoting
from distribute_jax.losses import Loss
from distribute_jax.losses._get import BY_NAME, CLASSES, FunctionLoss, from_name
from distribute_jax.metrics import AUC, Average, Precision, Recall
from distribute_jax.metrics._keras import accuracy, binary_accuracy, cosine_similarity, top_k
from distribute_jax.metrics._metric import in_snake_case
from distribute_jax.training._objective import Objective, output_name

PerExample = Callable[[Any, Any], jax.Array]

_SHAPE_DEPENDENT = ("accuracy", "acc")
_FORMULAS: Mapping[str, PerExample] = {
    name: partial(top_k if "top_k" in name else accuracy, name)
    for kind in ("categorical_accuracy", "top_k_categorical_accuracy")
    for name in (kind, f"sparse_{kind}")
} | {"cosine_similarity": cosine_similarity}
_CLASS_NAMES = {
    "".join(part.capitalize() for part in name.split("_")): name
    for name in (*_FORMULAS, "binary_accuracy")
}
"""The names of Keras's classes, which strings may also have."""
_STATEFUL = {"auc": AUC, "precision": Precision, "recall": Recall}
"""Names of metrics that are not a mean over the examples."""
_NAMES = {*_SHAPE_DEPENDENT, *_FORMULAS, "binary_accuracy", *BY_NAME, *_STATEFUL}
_CLASSES = {*_CLASS_NAMES, *(cls.__name__ for cls in CLASSES)}


def per_example(identifier: Any, loss: Any, y_true: Any, y_pred: Any) -> PerExample:
    """Returns the function of a metric, which has one value per example.

    ``"accuracy"`` depends on the shapes, as in Keras: predictions of one number per example are binary;
    labels with one dim less, or of one number per example, are class numbers; others are one-hot. If the
    loss of the same output takes logits, so do its metrics: the binary threshold is 0, and a cross-entropy
    is that of logits; Keras would treat both as probabilities. ``"cosine_similarity"`` is positive for
    vectors that agree, and the loss of that name negative, as in Keras.
    """
    logits = bool(getattr(loss, "from_logits", False))
    if isinstance(identifier, str):
        return _from_name(identifier, logits, y_true, y_pred)
    if isinstance(identifier, Loss):
        return identifier.per_example
    return FunctionLoss(identifier, what="metric").per_example


def _from_name(name: str, logits: bool, y_true: Any, y_pred: Any) -> PerExample:
    binary = partial(binary_accuracy, threshold=0.0 if logits else 0.5)
    if name.lower() in _SHAPE_DEPENDENT:
        return _accuracy_for_shapes(name, binary, y_true, y_pred)
    formula = _CLASS_NAMES.get(name, name)
    if formula == "binary_accuracy":
        return binary
    if formula in _FORMULAS:
        return _FORMULAS[formula]
    if name in BY_NAME or name in _CLASSES:
        loss = from_name(name)
        if "from_logits" in vars(loss):
            loss = from_name(name, from_logits=logits)
        return loss.per_example
    raise unknown_metric(name)


def unknown_metric(name: str) -> ArgumentError:
    return ArgumentError(
        f"{not_a_name('a metric', name, _NAMES)} Or pass a function of (y_true, y_pred), or a metric of "
        "dj.metrics."
    )


def _accuracy_for_shapes(name: str, binary: PerExample, y_true: Any, y_pred: Any) -> PerExample:
    """Returns the accuracy that Keras uses for these shapes."""
    true, predicted = getattr(y_true, "shape", None), getattr(y_pred, "shape", None)
    if true is None or predicted is None:
        raise ArgumentError(
            f"The metric {name!r} depends on the shapes of labels and predictions, and one of them is a "
            "pytree of arrays. Pass a dict of metrics, by output."
        )
    if len(predicted) < 2 or predicted[-1] == 1:
        return binary
    if len(true) < len(predicted) or true[-1] == 1:
        return _FORMULAS["sparse_categorical_accuracy"]
    return _FORMULAS["categorical_accuracy"]


class FunctionMean(Average):
    """The mean over the examples of a function, or name, of targets and outputs.

    ``key`` selects the loss of the same output in the objective.
    """

    def __init__(self, identifier: Any, objective: Objective, key: Any, weighted: bool) -> None:
        super().__init__()
        self.identifier, self.key, self.weighted = identifier, key, weighted
        self.objective = objective

    @promoting
    def update_from(self, y: Any, outputs: Any, weight: Any) -> None:
        loss = self.objective.losses.get(self.key)
        function = per_example(self.identifier, loss, y, outputs)
        self.update(values=function(y, outputs), sample_weight=weight if self.weighted else None)


def metric_slots(
    metrics: Any, objective: Objective, weighted: bool
) -> Iterator[tuple[Any, str, str, Any]]:
    """Yields output key, name prefix, name and metric object for each metric of ``compile``."""
    if isinstance(metrics, dict):
        outputs = [
            (key, f"{output_name(key)}_", identifiers) for key, identifiers in metrics.items()
        ]
    else:
        key = None if objective.is_single else next(iter(objective.losses))
        outputs = [(key, "", [] if metrics is None else metrics)]
    for key, prefix, identifiers in outputs:
        for identifier in identifiers if isinstance(identifiers, (list, tuple)) else [identifiers]:
            name, metric = _resolve(identifier, objective, key, weighted)
            yield key, prefix, name, metric


def _resolve(metric: Any, objective: Objective, key: Any, weighted: bool) -> tuple[str, Any]:
    if isinstance(metric, str) and metric.lower() in _STATEFUL:
        return metric, _STATEFUL[metric.lower()]()
    if isinstance(metric, str) and metric.lower() not in _NAMES and metric not in _NAMES | _CLASSES:
        raise unknown_metric(metric)
    if isinstance(metric, nnx.metrics.Metric):
        name = getattr(metric, "name", None)
        return name if isinstance(name, str) else in_snake_case(metric), metric
    if isinstance(metric, type) and issubclass(metric, nnx.metrics.Metric):
        raise ArgumentError(
            f"metrics got the class {metric.__name__}. Pass an object, with its parentheses: "
            f"{metric.__name__}()."
        )
    is_function = callable(metric) and not isinstance(metric, type) and not describe_foreign(metric)
    if isinstance(metric, str) or is_function:
        function_name = getattr(metric, "__name__", type(metric).__name__)
        name = metric if isinstance(metric, str) else function_name
        return name, FunctionMean(metric, objective, key, weighted)
    raise ArgumentError(
        "metrics must be metrics of dj.metrics or nnx, functions of (y_true, y_pred), or names "
        f'such as "accuracy"; got {brief(metric)}.'
    )
