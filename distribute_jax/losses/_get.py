"""``get``: a loss by its name, from a function, or a ``Loss`` as it is."""

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
from distribute_jax._messages import error_text, leaf_text, not_a_name
from distribute_jax.losses import _crossentropy, _regression
from distribute_jax.losses._loss import FormulaLoss, Loss, one_for_each
from distribute_jax.losses._shapes import same_rank

CLASSES: tuple[type[FormulaLoss], ...] = tuple(FormulaLoss.__subclasses__())
"""Those of ``_crossentropy`` and ``_regression``, which are loaded."""

_BY_CLASS_NAME = {cls.__name__: cls for cls in CLASSES}
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
"""Keras's strings, each of which is also the name of the loss that it makes."""


def get(identifier: Any) -> Loss:
    """Returns the loss that an identifier stands for.

    Args:
        identifier: a ``Loss``; Keras's name of a function or a class, with Keras's defaults, so that
            predictions are probabilities; or a function with one loss for each example. The names of
            a function's parameters tell labels (``y_true``, ``targets``, ``labels``) from predictions
            (``y_pred``, ``predictions``, ``logits``); where they do not, optax's functions take
            predictions first, and all others labels first, as in Keras.

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
    elsewhere = is_foreign(identifier) and describe_foreign(identifier)
    if is_function(identifier) and not (
        elsewhere or isinstance(identifier, (type, nnx.metrics.Metric))
    ):
        return FunctionLoss(identifier)
    raise ArgumentError(
        f"{brief(identifier)} is not a loss. Pass an object of dj.losses, a function of (y_true, y_pred) "
        'with one loss for each example, or a name, as "mse".'
    )


def from_name(name: str, **options: Any) -> Loss:
    """Makes the loss that Keras calls so, with options of its class."""
    if name in BY_NAME:
        return BY_NAME[name](name=name, **options)
    if name in _BY_CLASS_NAME:
        return _BY_CLASS_NAME[name](**options)
    raise ArgumentError(
        f"{not_a_name('a loss', name, BY_NAME)} Or pass a function of (y_true, y_pred) with one loss for "
        "each example."
    )


LABELS = ("y_true", "targets", "target", "labels", "label")
PREDICTIONS = (
    *("y_pred", "predictions", "prediction", "preds", "pred"),
    *("logits", "outputs", "output"),
)


class FunctionLoss(Loss):
    """A function of labels and predictions; ``what`` it is to the user is for messages."""

    def __init__(self, function: Callable[..., Any], what: str = "loss") -> None:
        super().__init__(_function_name(function) or what)
        self.function = function
        of_optax = optax.softmax_cross_entropy_with_integer_labels
        self.takes_class_numbers = _unwrapped(function) is of_optax
        self._what = f"The {what}" if self.name == what else f"The {what} {self.name}"
        self._call, self.from_logits = ordered(function, self._what)

    def call(self, y_true: Any, y_pred: Any) -> jax.Array:
        """Calls the function, with a last dim of 1 that only one of the two has added or removed."""
        if hasattr(y_true, "ndim") and hasattr(y_pred, "ndim"):
            y_true, y_pred = same_rank(y_true, y_pred)
        try:
            losses = self._call(y_true, y_pred)
        except Exception as error:
            labels, predicted = (jax.tree.map(leaf_text, y) for y in (y_true, y_pred))
            if type(error) in (TypeError, ValueError) and _is_of_optax(self.function):
                raise ArgumentError(
                    f"{self._what} of optax cannot take labels {labels} with predictions {predicted}: "
                    f"{error_text(error).rstrip('.')}. Convert the labels, class numbers as "
                    "y.astype(np.int32) of shape (n,), or pass a loss of dj.losses, such as "
                    "dj.losses.SparseCategoricalCrossentropy(from_logits=True)."
                ) from error
            error.add_note(
                f"{self._what} was called with labels {labels} and predictions {predicted}."
            )
            raise
        return one_for_each(self._what, losses, y_pred)


def ordered(function: Callable[..., Any], what: str) -> tuple[Callable[[Any, Any], Any], bool]:
    """Returns a function of (y_true, y_pred), and whether its predictions are called logits.

    The names of the parameters decide. Where they do not, optax's functions take predictions
    first, and all others labels first, as Keras does.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []  # written in C: nothing is known of it
    first, second, *others = (*(p.name for p in parameters), "", "")
    if not takes(function, None, None) or {*others} & {*LABELS, *PREDICTIONS}:
        signature = ", ".join(map(str, parameters))
        raise ArgumentError(
            f"{what} takes ({signature}). It is called with labels and predictions and nothing else: write "
            "lambda y_true, y_pred: ..., or fill the other arguments in with functools.partial."
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
    """Returns the name under which a function is reported, empty for a lambda."""
    inner = _unwrapped(function)
    name = getattr(inner, "__name__", None) or type(inner).__name__
    return "" if name == "<lambda>" else str(name)


def _is_of_optax(function: Any) -> bool:
    return str(getattr(_unwrapped(function), "__module__", "")).split(".")[0] == "optax"
