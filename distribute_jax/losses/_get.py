"""``get``: a loss by its name, from a function, or a ``Loss`` as it is."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax

from distribute_jax._errors import ArgumentError
from distribute_jax._messages import error_text
from distribute_jax.losses._crossentropy import (
    BinaryCrossentropy,
    BinaryFocalCrossentropy,
    CategoricalCrossentropy,
    CategoricalFocalCrossentropy,
    SparseCategoricalCrossentropy,
)
from distribute_jax.losses._loss import FormulaLoss, Loss, one_for_each
from distribute_jax.losses._regression import (
    CategoricalHinge,
    CosineSimilarity,
    Hinge,
    Huber,
    KLDivergence,
    LogCosh,
    MeanAbsoluteError,
    MeanAbsolutePercentageError,
    MeanSquaredError,
    MeanSquaredLogarithmicError,
    Poisson,
    SquaredHinge,
)
from distribute_jax.losses._shapes import same_rank

CLASSES: tuple[type[FormulaLoss], ...] = (
    BinaryCrossentropy,
    BinaryFocalCrossentropy,
    CategoricalCrossentropy,
    CategoricalFocalCrossentropy,
    CategoricalHinge,
    CosineSimilarity,
    Hinge,
    Huber,
    KLDivergence,
    LogCosh,
    MeanAbsoluteError,
    MeanAbsolutePercentageError,
    MeanSquaredError,
    MeanSquaredLogarithmicError,
    Poisson,
    SparseCategoricalCrossentropy,
    SquaredHinge,
)

_BY_FORMULA = {cls.formula: cls for cls in CLASSES}
_BY_CLASS_NAME: dict[str, type[FormulaLoss]] = {cls.__name__: cls for cls in CLASSES}
_BY_FORMULA_NAME: dict[str, type[FormulaLoss]] = {cls.formula.__name__: cls for cls in CLASSES}
_SHORT: dict[str, type[FormulaLoss]] = {
    "bce": BinaryCrossentropy,
    "kld": KLDivergence,
    "mae": MeanAbsoluteError,
    "mape": MeanAbsolutePercentageError,
    "mse": MeanSquaredError,
    "msle": MeanSquaredLogarithmicError,
}
BY_NAME = _BY_FORMULA_NAME | _SHORT | {name.upper(): cls for name, cls in _SHORT.items()}
"""Keras's strings, each of which is also the name of the loss that it makes."""


def get(identifier: Any) -> Loss:
    """Returns the loss that an identifier stands for.

    Args:
        identifier: a ``Loss``; Keras's name of a function or a class, with Keras's defaults, so that
            predictions are probabilities; or a function with one loss for each example. The names of
            a function's parameters say which are the labels (``y_true``, ``targets``, ``labels``) and
            which the predictions (``y_pred``, ``predictions``, ``logits``); where they do not, optax's
            functions take predictions first, and all others labels first, as in Keras.

    Raises:
        ValueError: there is no such loss, or a function does not take two arguments. A function that
            gives one number for a batch raises when it is first called.

    Example:
        >>> import distribute_jax as dj, optax
        >>> dj.losses.get("mse")
        MeanSquaredError(name='mse', reduction='sum_over_batch_size')
        >>> dj.losses.get(optax.softmax_cross_entropy_with_integer_labels).name
        'softmax_cross_entropy_with_integer_labels'

    Source: https://keras.io/api/losses/
    """
    if isinstance(identifier, Loss):
        return identifier
    if isinstance(identifier, str):
        return from_name(identifier)
    if isinstance(identifier, type) and issubclass(identifier, Loss):
        return identifier()
    if _is_formula(identifier):
        return _BY_FORMULA[identifier]()
    if callable(identifier) and not isinstance(identifier, type):
        return FunctionLoss(identifier)
    raise ArgumentError(
        f"{identifier!r:.80} is not a loss. Pass an object of dj.losses, a function of (y_true, y_pred) with "
        'one loss for each example, or a name, as "mse".'
    )


def _is_formula(identifier: Any) -> bool:
    return any(identifier is formula for formula in _BY_FORMULA)


def from_name(name: str, **options: Any) -> Loss:
    """Makes the loss that Keras calls so, with options of its class."""
    if name in BY_NAME:
        return BY_NAME[name](name=name, **options)
    if name in _BY_CLASS_NAME:
        return _BY_CLASS_NAME[name](**options)
    raise ArgumentError(
        f"{name!r} is the name of no loss. The names are {', '.join(sorted(BY_NAME))}; or pass a "
        "function of (y_true, y_pred) with one loss for each example."
    )


LABELS = ("y_true", "targets", "target", "labels", "label")
PREDICTIONS = (
    "y_pred",
    "predictions",
    "prediction",
    "preds",
    "pred",
    "logits",
    "outputs",
    "output",
)

_NAMED_ONLY = inspect.Parameter.KEYWORD_ONLY
_COLLECT = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class FunctionLoss(Loss):
    """A function of labels and predictions, with one loss for each example.

    Args:
        function: takes labels and predictions; ``ordered`` says in which order.
        name: under which it is reported; by default the function's own.
        reduction: as for ``Loss``.
        what: what the function is to the user, for messages.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None = None,
        reduction: str | None = "sum_over_batch_size",
        what: str = "loss",
    ) -> None:
        super().__init__(name or function_name(function) or what, reduction)
        self.function = function
        self._what = f"The {what} {self.name}"
        self._call, self.from_logits = ordered(function, self._what)

    def call(self, y_true: Any, y_pred: Any) -> jax.Array:
        """Calls the function, with a last dim of 1 that only one of the two has added or removed."""
        if _is_array(y_true) and _is_array(y_pred):
            y_true, y_pred = same_rank(y_true, y_pred)
        try:
            losses = self._call(y_true, y_pred)
        except Exception as error:
            labels, predicted = (jax.tree.map(_shape, y) for y in (y_true, y_pred))
            if type(error) in (TypeError, ValueError) and _is_of_optax(self.function):
                raise ArgumentError(
                    f"{self._what} of optax cannot take labels of {_dtype(y_true)}{labels} with predictions "
                    f"of {_dtype(y_pred)}{predicted}: {error_text(error).rstrip('.')}. Convert the labels, "
                    "class numbers as y.astype(np.int32) of shape (n,), or pass a loss of dj.losses, such as "
                    "dj.losses.SparseCategoricalCrossentropy(from_logits=True)."
                ) from error
            error.add_note(
                f"{self._what} was called with labels of shape {labels} and predictions of shape "
                f"{predicted}."
            )
            raise
        return one_for_each(self._what, losses, y_pred)


def ordered(function: Callable[..., Any], what: str) -> tuple[Callable[[Any, Any], Any], bool]:
    """Returns a function of (y_true, y_pred), and whether its predictions are called logits.

    The names of the parameters decide. Where they say nothing, optax's functions take predictions
    first, and all others labels first, as Keras does.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []  # written in C: nothing is known of it
    named = [p for p in parameters if p.kind not in _COLLECT]
    # Keywords that a partial has filled in, or that have a default, are no place for an array.
    places = [p for p in named if p.kind is not _NAMED_ONLY or p.default is p.empty]
    if len(places) < 2:
        if len(named) == len(parameters) and parameters:
            raise _not_two(what, parameters)
        return _by_place(function, first_is_predicted=_is_of_optax(function)), False
    labels, predicted = _chosen(places, _is_of_optax(function))
    needed = {p.name for p in places if p.default is p.empty} - {labels.name, predicted.name}
    if needed:
        raise _not_two(what, parameters)
    if inspect.Parameter.POSITIONAL_ONLY in (labels.kind, predicted.kind):
        call = _by_place(function, first_is_predicted=places[0] is predicted)
    else:
        call = _by_name(function, labels.name, predicted.name)
    return call, predicted.name == "logits"


def _chosen(places: list[Any], is_of_optax: bool) -> tuple[Any, Any]:
    """Picks the parameters for labels and predictions."""
    labels = next((p for p in places if p.name in LABELS), None)
    predicted = next((p for p in places if p.name in PREDICTIONS), None)
    if labels is None and predicted is None:
        first, second = places[:2]
        return (second, first) if is_of_optax else (first, second)
    if labels is None:
        labels = next(p for p in places if p is not predicted)
    if predicted is None:
        predicted = next(p for p in places if p is not labels)
    return labels, predicted


def _by_name(
    function: Callable[..., Any], labels: str, predicted: str
) -> Callable[[Any, Any], Any]:
    return lambda y_true, y_pred: function(**{labels: y_true, predicted: y_pred})


def _by_place(
    function: Callable[..., Any], *, first_is_predicted: bool
) -> Callable[[Any, Any], Any]:
    if first_is_predicted:
        return lambda y_true, y_pred: function(y_pred, y_true)
    return lambda y_true, y_pred: function(y_true, y_pred)


def unwrapped(function: Any) -> Any:
    """Returns the function inside partials and jits."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif callable(getattr(function, "__wrapped__", None)):
            function = function.__wrapped__
        else:
            return function


def function_name(function: Any) -> str:
    """Returns the name under which a function is reported, empty for a lambda."""
    inner = unwrapped(function)
    name = getattr(inner, "__name__", None) or type(inner).__name__
    return "" if name == "<lambda>" else str(name)


def _is_of_optax(function: Any) -> bool:
    return str(getattr(unwrapped(function), "__module__", "")).split(".")[0] == "optax"


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "ndim")


def _shape(leaf: Any) -> Any:
    return getattr(leaf, "shape", leaf)


def _dtype(leaf: Any) -> Any:
    return getattr(leaf, "dtype", "")


def _not_two(what: str, parameters: list[inspect.Parameter]) -> ArgumentError:
    taken = ", ".join(str(p) for p in parameters)
    return ArgumentError(
        f"{what} takes ({taken}). It is called with labels and predictions and nothing else: write "
        "lambda y_true, y_pred: ..., or fill the other arguments in with functools.partial."
    )
