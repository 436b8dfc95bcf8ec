"""``get``: the loss for a name, a function or a class."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

from distribute_jax._absent import describe_foreign, is_foreign
from distribute_jax._checks import brief, is_function, takes
from distribute_jax._errors import ArgumentError
from distribute_jax._messages import leaf_text, not_a_name
from distribute_jax.losses import _crossentropy, _regression
from distribute_jax.losses._loss import FormulaLoss, Loss, one_for_each
from distribute_jax.losses._shapes import same_rank

CLASSES: tuple[type[FormulaLoss], ...] = tuple(FormulaLoss.__subclasses__())
"""The classes of ``_crossentropy`` and ``_regression``, which were imported above."""

BY_CLASS_NAME = {cls.__name__: cls for cls in CLASSES}
_BY_FORMULA_NAME = {cls.formula.__name__: cls for cls in CLASSES}
_SHORT = {
    "bce": _crossentropy.BinaryCrossentropy,
    "kld": _regression.KLDivergence,
    "mae": _regression.MeanAbsoluteError,
    "mape": _regression.MeanAbsolutePercentageError,
    "mse": _regression.MeanSquaredError,
    "msle": _regression.MeanSquaredLogarithmicError,
}
BY_NAME = _BY_FORMULA_NAME | _SHORT | {name.upper(): cls for name, cls in _SHORT.items()}
"""Keras's strings, each of which becomes the name of the loss."""


def get(identifier: Any) -> Loss:
    """Returns the loss that an identifier stands for.

    Args:
        identifier: a ``Loss``; Keras's name of a function or a class, with Keras's defaults, so that
            predictions are probabilities; or a function that returns one loss for each example. Labels
            and predictions are recognised by the names of its parameters (``y_true``, ``targets``,
            ``labels``; ``y_pred``, ``predictions``, ``logits``); with other names, optax's functions
            take predictions first, and all others labels first, as in Keras.

    Returns:
        The loss; a ``Loss`` is returned as it is.

    Raises:
        ValueError: there is no such loss, or a function does not take two arguments. A function that
            returns one number for a batch raises when it is first called.

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
    for cls in CLASSES:
        if identifier is cls.formula:
            return cls()
    is_other_framework = is_foreign(identifier) and describe_foreign(identifier)
    if is_function(identifier) and not (
        is_other_framework or isinstance(identifier, (type, nnx.metrics.Metric))
    ):
        return FunctionLoss(identifier)
    raise ArgumentError(
        f"{brief(identifier)} is not a loss. Pass an object of dj.losses, a function of (y_true, y_pred) "
        'that returns one loss for each example, or a name such as "mse".'
    )


def from_name(name: str) -> Loss:
    """Returns the loss of a name in Keras."""
    if name in BY_NAME:
        return BY_NAME[name](name=name)
    if name in BY_CLASS_NAME:
        return BY_CLASS_NAME[name]()
    raise ArgumentError(
        f"{not_a_name('a loss', name, BY_NAME)} Or pass a function of (y_true, y_pred) that returns one loss "
        "for each example."
    )


LABELS = ("y_true", "targets", "target", "labels", "label")
PREDICTIONS = (
    *("y_pred", "predictions", "prediction", "preds", "pred"),
    *("logits", "outputs", "output"),
)


class FunctionLoss(Loss):
    """A loss that calls a user's function; messages call it ``what``."""

    _followed_in_steps = ("function", "name", "reduction", "dtype")

    def __init__(self, function: Callable[..., Any], what: str = "loss") -> None:
        super().__init__(_function_name(function) or what)
        self.function = function
        sparse = optax.softmax_cross_entropy_with_integer_labels
        self.takes_class_numbers = _unwrapped(function) is sparse
        self._what = f"The {what}" if self.name == what else f"The {what} {self.name}"
        self._call, self.from_logits = ordered(function, self._what)

    def call(self, y_true: Any, y_pred: Any) -> jax.Array:
        """Calls the function, after adding or removing a last dim of 1 that only one argument has."""
        if hasattr(y_true, "ndim") and hasattr(y_pred, "ndim"):
            y_true, y_pred = same_rank(y_true, y_pred)
        try:
            losses = self._call(y_true, y_pred)
        except Exception as error:
            labels, predicted = (jax.tree.map(leaf_text, y) for y in (y_true, y_pred))
            error.add_note(
                f"{self._what} was called with labels {labels} and predictions {predicted}."
            )
            raise
        return one_for_each(self._what, losses, y_pred)


def ordered(function: Callable[..., Any], what: str) -> tuple[Callable[[Any, Any], Any], bool]:
    """Returns a function of (y_true, y_pred), and whether its parameter for predictions is ``logits``.

    The order of its parameters follows from their names, as ``get`` describes.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []  # a function in C without a signature
    first, second, *others = (*(p.name for p in parameters), "", "")
    if not takes(function, None, None) or {*others} & {*LABELS, *PREDICTIONS}:
        signature = ", ".join(map(str, parameters))
        raise ArgumentError(
            f"{what} takes ({signature}). It is called only with labels and predictions: write "
            "lambda y_true, y_pred: ..., or bind the other arguments with functools.partial."
        )
    predicted_first = first in PREDICTIONS or second in LABELS
    if not predicted_first and first not in LABELS and second not in PREDICTIONS:
        predicted_first = _is_of_optax(function)
    if predicted_first:
        return lambda y_true, y_pred: function(y_pred, y_true), first == "logits"
    return function, second == "logits"


def _unwrapped(function: Any) -> Any:
    """Returns the function inside partials and jits."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif callable(getattr(function, "__wrapped__", None)):
            function = function.__wrapped__
        else:
            return function


def _function_name(function: Any) -> str:
    """Returns the name of a function in reports; empty for a lambda."""
    inner = _unwrapped(function)
    name = getattr(inner, "__name__", None) or type(inner).__name__
    return "" if name == "<lambda>" else str(name)


def _is_of_optax(function: Any) -> bool:
    return str(getattr(_unwrapped(function), "__module__", "")).split(".")[0] == "optax"
