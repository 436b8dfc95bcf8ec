"""dj.losses.get: a loss from a name or a function, and in which order a function is called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distribute_jax as dj
from distribute_jax import losses

LABELS, LOGITS = jnp.array([0, 1, 1]), jnp.array([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0]])
Y, P = jnp.array([[1.0], [2.0], [5.0]]), jnp.array([[2.0], [4.0], [4.0]])
SIGNED = (Y - P)[:, 0]
"""What a function of (labels, predictions) gives that takes their difference."""


def test_every_string_of_keras_is_a_loss_of_that_name():
    """Names of functions and classes, and short names; none expects logits, as in Keras."""
    strings = [name for name in losses.__all__ if name not in {"Loss", "get"}]
    strings = [name for name in strings if not name.endswith("_loss")]
    for short in ("bce", "kld", "mae", "mape", "mse", "msle"):
        strings += [short, short.upper()]
    assert len(strings) == 2 * 17 + 12
    for name in strings:
        loss = losses.get(name)
        assert isinstance(loss, losses.Loss)
        assert not loss.from_logits
        assert loss.reduction == "sum_over_batch_size"
        assert loss.name == name or name[0].isupper()
    assert losses.get("MSE").name == "MSE"
    assert losses.get("Huber").name == "huber_loss"


def test_get_accepts_losses_classes_and_formulas():
    loss = losses.Huber(delta=2.0)
    assert losses.get(loss) is loss
    assert isinstance(losses.get(losses.Hinge), losses.Hinge)
    found = losses.get(losses.sparse_categorical_crossentropy)
    assert found.expects == "probabilities"
    assert found.name == "sparse_categorical_crossentropy"


class Difference:
    """A callable, and a method, of (anything, anything)."""

    def __call__(self, a: Any, b: Any) -> Any:
        return a - b

    def method(self, prediction: Any, target: Any) -> Any:
        return target - prediction


def only_by_place(logits: Any, y: Any, /) -> Any:
    return y - logits


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Keras's names": lambda y_true, y_pred: y_true - y_pred,
    "the other way round": lambda y_pred, y_true: y_true - y_pred,
    "optax's names": lambda predictions, targets: targets - predictions,
    "one known, second": lambda x, labels: labels - x,
    "one known, first": lambda pred, x: x - pred,
    "no names": lambda a, b: a - b,
    "anything": lambda *args: args[0] - args[1],
    "by place": only_by_place,
    "jit": jax.jit(lambda logits, labels: labels - logits),
    "partial": functools.partial(
        lambda outputs, target, scale: scale * (target - outputs), scale=1.0
    ),
    "partial of the first": functools.partial(lambda scale, a, b: scale * (a - b), 1.0),
    "callable": Difference(),
    "bound method": Difference().method,
    "written in C": np.subtract,
}


@pytest.mark.parametrize("case", FUNCTIONS)
def test_the_names_of_the_parameters_decide_the_order(case: str):
    loss = losses.get(FUNCTIONS[case])
    np.testing.assert_array_equal(loss.per_example(Y, P)[:, 0], SIGNED)
    assert float(loss(Y, P)) == pytest.approx(float(SIGNED.mean()))
    assert float(loss(Y[:, 0], P)) == pytest.approx(float(SIGNED.mean())), "(3,) against (3, 1)"


OPTAX = {
    "entropy": (optax.softmax_cross_entropy_with_integer_labels, True),
    "jit": (jax.jit(optax.softmax_cross_entropy_with_integer_labels), True),
    "partial": (functools.partial(optax.softmax_cross_entropy_with_integer_labels, axis=-1), True),
    "squares": (optax.l2_loss, False),
    "huber": (functools.partial(optax.huber_loss, delta=0.5), False),
}


@pytest.mark.parametrize("case", OPTAX)
def test_functions_of_optax_take_predictions_first(case: str):
    function, logits = OPTAX[case]
    loss = losses.get(function)
    assert loss.from_logits is logits
    y_true, y_pred = (LABELS, LOGITS) if logits else (Y, P)
    np.testing.assert_array_equal(loss.per_example(y_true, y_pred), function(y_pred, y_true))
    assert (
        loss.name == function.func.__name__ if case in {"partial", "huber"} else function.__name__
    )


def test_an_optax_function_with_other_parameter_names_is_recognised_by_its_module():
    def distance(a: Any, b: Any) -> Any:
        return b - a

    assert losses.get(distance).per_example(Y, P).tolist() == (P - Y).tolist()
    distance.__module__ = "optax.losses"
    assert losses.get(distance).per_example(Y, P).tolist() == (Y - P).tolist()


REFUSED = {
    "a name": ("categorical", "Did you mean 'categorical_hinge' or"),
    "nothing": (None, "not a loss"),
    "a number": (3, "not a loss"),
    "a class": (Difference, "not a loss"),
    "one argument": (lambda y: y, r"takes \(y\)"),
    "an option between": (
        lambda logits, scale=1.0, labels=None: labels - logits,
        r"takes \(logits, scale=1.0, labels=None\)",
    ),
    "three arguments": (lambda y_true, y_pred, w: y_true, r"takes \(y_true, y_pred, w\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_identifiers_that_are_not_losses_are_refused(case: str):
    identifier, message = REFUSED[case]
    with pytest.raises(dj.ArgumentError, match=message):
        losses.get(identifier)


RESULTS = {
    "a mean": (lambda y_true, y_pred: jnp.mean(y_true - y_pred), r"float32\[\] for 3 examples"),
    "other rows": (lambda y_true, y_pred: jnp.zeros(2), r"float32\[2\] for 3 examples"),
    "nothing": (lambda y_true, y_pred: None, "returned NoneType None for 3 ex"),
    "pairs": (
        lambda y_true, y_pred: y_true - y_pred[:, 0],
        r"3,3\], a number for each pair of exam",
    ),
}


@pytest.mark.parametrize("case", RESULTS)
def test_a_function_that_does_not_return_one_loss_for_each_example_is_refused_when_traced(
    case: str,
):
    function, message = RESULTS[case]
    with pytest.raises(dj.ArgumentError, match=message):
        jax.eval_shape(losses.get(function), Y, P)


def test_three_losses_for_each_of_three_examples_are_not_of_pairs():
    quantiles = losses.get(lambda y_true, y_pred: (y_true - y_pred) * jnp.arange(3.0))
    assert quantiles.per_example(Y, P).shape == (3, 3)


def test_an_error_in_a_function_has_a_note_of_its_arguments():
    with pytest.raises(TypeError) as caught:
        losses.get(lambda y_true, y_pred: y_true @ y_pred).per_example(Y, P)
    assert "labels float32[3,1] and predictions float32[3,1]" in str(caught.value.__notes__)


def test_a_loss_of_the_user_defines_call():
    class Weighted(losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return 2 * (y_true["a"] - y_pred["b"])

    loss = Weighted(reduction="sum")
    assert loss.name == "Weighted"
    assert float(loss({"a": Y}, {"b": P})) == 2 * float(SIGNED.sum())
    with pytest.raises(
        NotImplementedError, match=r"Loss has to define call\(self, y_true, y_pred\)"
    ):
        losses.Loss()(Y, P)
    assert repr(loss) == "Weighted(name='Weighted', reduction='sum')"
