"""Each loss equals its formula in NumPy, and Keras 3.15 on a few inputs; which outputs it refuses."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribute_jax as dj
from distribute_jax import losses
from distribute_jax.losses._shapes import check_probabilities

RNG = np.random.default_rng(0)
Y, P = RNG.normal(size=(2, 5, 3))
BITS = (Y > 0).astype(float)
IDS = np.array([0, 1, 2, 1, 0])
ONE_HOT = np.eye(3)[IDS]
SIGMOID = 1 / (1 + np.exp(-P))
SOFTMAX = np.exp(P) / np.exp(P).sum(-1, keepdims=True)
LOG_SOFTMAX = np.log(SOFTMAX)
OWN = LOG_SOFTMAX[np.arange(5), IDS]


def smoothed(labels: Any, amount: float, classes: int) -> Any:
    return labels * (1 - amount) + amount / classes


def entropy(labels: Any, p: Any) -> Any:
    return -(labels * np.log(p) + (1 - labels) * np.log(1 - p))


def unit(x: Any, axis: int) -> Any:
    return x / np.sqrt((x**2).sum(axis, keepdims=True))


LOGITS = {"from_logits": True}
HUBER = np.where(np.abs(P - Y) <= 0.5, (P - Y) ** 2 / 2, 0.5 * np.abs(P - Y) - 0.125)
LOGS = np.log(np.maximum(P, 1e-7) + 1) - np.log(np.maximum(Y, 1e-7) + 1)
BALANCED = smoothed(BITS, 0.2, 2)
P_T = BALANCED * SIGMOID + (1 - BALANCED) * (1 - SIGMOID)
FOCAL = (1 - P_T) ** 1.5 * entropy(BALANCED, SIGMOID) * (0.3 * BALANCED + 0.7 * (1 - BALANCED))
WRONG = ((1 - ONE_HOT) * P).max(-1)
HINGES = np.maximum(1 - (2 * BITS - 1) * P, 0)

CASES: dict[str, tuple[str, dict[str, Any], Any, Any, Any]] = {
    "mse": ("MeanSquaredError", {}, Y, P, ((Y - P) ** 2).mean(-1)),
    "mae": ("MeanAbsoluteError", {}, Y, P, np.abs(Y - P).mean(-1)),
    "mape": ("MeanAbsolutePercentageError", {}, Y, P, 100 * np.abs((Y - P) / Y).mean(-1)),
    "msle": ("MeanSquaredLogarithmicError", {}, Y, P, (LOGS**2).mean(-1)),
    "cosine": ("CosineSimilarity", {}, Y, P, -(unit(Y, -1) * unit(P, -1)).sum(-1)),
    "cosine of zeros": ("CosineSimilarity", {}, Y, 0 * P, np.zeros(5)),
    "huber": ("Huber", {"delta": 0.5}, Y, P, HUBER.mean(-1)),
    "log cosh": ("LogCosh", {}, Y, P, np.log(np.cosh(P - Y)).mean(-1)),
    "binary": ("BinaryCrossentropy", {}, BITS, SIGMOID, entropy(BITS, SIGMOID).mean(-1)),
    "binary of logits": ("BinaryCrossentropy", LOGITS, BITS, P, entropy(BITS, SIGMOID).mean(-1)),
    "binary, smoothed": (
        "BinaryCrossentropy", {"label_smoothing": 0.2}, BITS, SIGMOID, entropy(BALANCED, SIGMOID).mean(-1)
    ),
    "binary focal": (
        "BinaryFocalCrossentropy",
        {"apply_class_balancing": True, "alpha": 0.3, "gamma": 1.5, "label_smoothing": 0.2, **LOGITS},
        BITS, P, FOCAL.mean(-1),
    ),
    "categorical": ("CategoricalCrossentropy", {}, ONE_HOT, SOFTMAX, -OWN),
    "categorical of shares": ("CategoricalCrossentropy", {}, ONE_HOT, 7 * SOFTMAX, -OWN),
    "categorical, smoothed": (
        "CategoricalCrossentropy", {"label_smoothing": 0.1, **LOGITS}, ONE_HOT, P,
        -(smoothed(ONE_HOT, 0.1, 3) * LOG_SOFTMAX).sum(-1),
    ),
    "categorical, axis 1": ("CategoricalCrossentropy", {"axis": 1}, ONE_HOT, SOFTMAX, -OWN),
    "categorical focal": (
        "CategoricalFocalCrossentropy", {"alpha": [0.1, 0.2, 0.3], "gamma": 1.0, **LOGITS}, ONE_HOT, P,
        -np.array([0.1, 0.2, 0.3])[IDS] * (1 - np.exp(OWN)) * OWN,
    ),
    "sparse": ("SparseCategoricalCrossentropy", {}, IDS, SOFTMAX, -OWN),
    "sparse of logits": ("SparseCategoricalCrossentropy", LOGITS, IDS[:, None], P, -OWN),
    "sparse, float labels": ("SparseCategoricalCrossentropy", LOGITS, IDS * 1.0, P, -OWN),
    "sparse, ignoring": (
        "SparseCategoricalCrossentropy", {"ignore_class": 1, **LOGITS}, IDS, P, np.where(IDS == 1, 0, -OWN)
    ),
    "poisson": ("Poisson", {}, abs(Y), abs(P), (abs(P) - abs(Y) * np.log(abs(P))).mean(-1)),
    "kl": (
        "KLDivergence", {}, np.roll(SOFTMAX, 1, 0), SOFTMAX,
        (np.roll(SOFTMAX, 1, 0) * (np.roll(LOG_SOFTMAX, 1, 0) - LOG_SOFTMAX)).sum(-1),
    ),
    "hinge": ("Hinge", {}, BITS, P, HINGES.mean(-1)),
    "hinge of -1 and 1": ("Hinge", {}, 2 * BITS - 1, P, HINGES.mean(-1)),
    "squared hinge": ("SquaredHinge", {}, BITS, P, (HINGES**2).mean(-1)),
    "categorical hinge": (
        "CategoricalHinge", {}, ONE_HOT, P, np.maximum(WRONG - (ONE_HOT * P).sum(-1) + 1, 0)
    ),
}  # fmt: skip


@functools.cache
def computed() -> dict[str, Any]:
    """Each loss for each example, its function, and the default reduction: one program."""

    def compute(inputs: dict[str, Any]) -> dict[str, Any]:
        results = {}
        for case, (y_true, y_pred) in inputs.items():
            name, options, *_ = CASES[case]
            loss = getattr(losses, name)(**options)
            formula = type(loss).formula(y_true, y_pred, **options)
            results[case] = loss.per_example(y_true, y_pred), formula, loss(y_true, y_pred)
        return results

    return jax.jit(compute)({case: (of[2], of[3]) for case, of in CASES.items()})


@pytest.mark.parametrize("case", CASES)
def test_each_loss_equals_its_formula(case: str):
    """The class for each example, its function, and the default reduction."""
    _, options, y_true, _, expected = CASES[case]
    found, by_function, reduced = computed()[case]
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(by_function, found)
    mean = (
        np.mean(expected, where=y_true != options.get("ignore_class"))
        if y_true.ndim == 1
        else expected.mean()
    )
    assert float(reduced) == pytest.approx(mean, rel=2e-5, abs=1e-6)


def test_every_class_and_every_function_is_in_the_table_of_formulas():
    public = {name for name in losses.__all__ if name[0].isupper()} - {"Loss"}
    assert public == {name for name, *_ in CASES.values()}
    functions = {getattr(losses, name).formula.__name__ for name in public}
    assert functions <= set(losses.__all__)


KERAS = {
    "mean_squared_error": 0.31,
    "huber": 0.155,
    "log_cosh": 0.1471,
    "poisson": 0.7291,
    "binary_crossentropy": 0.8149,
    "binary_focal_crossentropy": 0.2678,
    "hinge": 1.3,
    "squared_hinge": 1.86,
    "kl_divergence": 0.4581,
    "categorical_hinge": 1.4,
}


def test_numbers_of_keras():
    """The results of Keras 3.15.1 for a small input, to four digits."""
    y_true, y_pred = [[0.0, 1.0], [0.0, 0.0]], [[0.6, 0.4], [0.4, 0.6]]
    found = jax.jit(
        lambda: {name: jnp.mean(getattr(losses, name)(y_true, y_pred)) for name in KERAS}
    )()
    assert found == pytest.approx(KERAS, abs=6e-5)


@pytest.mark.exhaustive
def test_logits_far_from_zero_have_losses_and_gradients():
    """Log-sum-exp, rather than the logarithm of a probability that was rounded to 0."""
    sparse = losses.SparseCategoricalCrossentropy(from_logits=True)
    binary = losses.BinaryCrossentropy(from_logits=True)
    logits = jnp.array([[200.0, 0.0]])
    assert float(sparse(jnp.array([1]), logits)) == 200.0
    assert float(binary(jnp.array([[0.0, 1.0]]), logits)) == pytest.approx(100.35, abs=0.01)
    assert jax.grad(lambda x: sparse(jnp.array([1]), x))(logits).tolist() == [[1.0, -1.0]]
    clipped = losses.SparseCategoricalCrossentropy()
    assert float(clipped(jnp.array([1]), jnp.array([[1.0, 0.0]]))) == pytest.approx(
        16.118, abs=1e-3
    )


@pytest.mark.exhaustive
def test_gradients_at_edge_cases_are_finite():
    """Vectors of zeros, certain probabilities, and an ignored row that holds NaN."""
    cosine = jax.grad(lambda p: losses.CosineSimilarity()(jnp.ones((2, 3)), p))(jnp.zeros((2, 3)))
    certain = jax.grad(lambda p: losses.BinaryCrossentropy()(jnp.ones((2, 1)), p))(
        jnp.zeros((2, 1))
    )
    ignoring = losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    rows = jnp.array([[0.0, 0.0], [jnp.nan, 0.0]])
    ignored = jax.grad(lambda p: ignoring(jnp.array([0, -1]), p))(rows)
    for gradient in (cosine, certain, ignored):
        assert np.isfinite(gradient).all()
    assert ignored.tolist() == [[-0.5, 0.5], [0.0, 0.0]]


def test_the_loss_of_a_label_that_is_not_a_class_is_nan():
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    found = loss.per_example(jnp.array([0, 2, -1]), jnp.zeros((3, 2)))
    assert np.isnan(found).tolist() == [False, True, True]


@pytest.mark.exhaustive
def test_losses_of_narrow_outputs_are_computed_in_float32_by_default():
    y = jnp.full((4, 3), 1 / 3, jnp.bfloat16)
    assert losses.MeanSquaredError().per_example(y, y).dtype == jnp.float32
    assert losses.MeanSquaredError(dtype="bfloat16").per_example(y, y).dtype == jnp.bfloat16
    certain = losses.binary_crossentropy(jnp.zeros((1, 1)), jnp.ones((1, 1), jnp.bfloat16))
    assert np.isfinite(certain).all()


SHAPES = [
    ((5,), (5, 1), (5,)),
    ((5, 1), (5,), (5,)),
    ((5,), (5,), (5,)),
    ((5, 4), (5, 4, 1), (5,)),
    ((5, 4, 3), (5, 4, 3), (5, 4)),
]


@pytest.mark.parametrize(("true", "predicted", "expected"), SHAPES)
def test_a_last_dim_of_one_is_added_or_removed_as_in_keras(
    true: Any, predicted: Any, expected: Any
):
    """Two arrays of one dim keep one loss for each example, for which Keras takes the mean."""
    y = np.arange(np.prod(true), dtype=np.float32).reshape(true)
    found = losses.mean_squared_error(y, y.reshape(predicted) + 1)
    assert found.shape == expected
    np.testing.assert_array_equal(found, np.ones(expected))


MISMATCHES = {
    "other": ("mean_squared_error", (4, 3), (4, 2), r"\(4, 3\) and y_pred of shape \(4, 2\)"),
    "broadcast": ("mean_squared_error", (4, 1), (4, 4), r"\(4, 1\) and y_pred of shape \(4, 4\)"),
    "rows": ("hinge", (3, 1), (4, 1), r"\(3, 1\) and y_pred of shape \(4, 1\)"),
    "square": ("mean_absolute_error", (4,), (4, 4), r"\(4,\) and y_pred of shape \(4, 4\)"),
    "no batch": ("poisson", (), (), "whose dim 0 is the batch"),
    "class numbers": ("categorical_crossentropy", (4,), (4, 3), "SparseCategoricalCrossentropy"),
    "one-hot": ("sparse_categorical_crossentropy", (4, 3), (4, 3), "CategoricalCrossentropy"),
    "no classes": ("sparse_categorical_crossentropy", (4,), (4,), "class numbers"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_shapes_that_do_not_match_are_refused(case: str):
    name, true, predicted, message = MISMATCHES[case]
    with pytest.raises(dj.ArgumentError, match=message):
        getattr(losses, name)(np.zeros(true), np.zeros(predicted))


ARGUMENTS = {
    "axis of the batch": (lambda: losses.cosine_similarity(Y, P, axis=0), "dim 0 is the batch"),
    "axis too large": (lambda: losses.binary_crossentropy(BITS, SIGMOID, axis=2), "with 2 dims"),
    "smoothing": (lambda: losses.BinaryCrossentropy(label_smoothing=2), "at most 1; got 2"),
    "reduction": (
        lambda: losses.Hinge("average"),
        "'mean_with_sample_weight', 'sum', 'none', None",
    ),
    "name": (lambda: losses.Loss(True), "name must be None or a str"),
    "dtype": (lambda: losses.Poisson(dtype="int32"), "floating dtype"),
    "no dtype": (lambda: losses.Poisson(dtype="float31"), "floating dtype"),
    "a nest": (lambda: losses.Hinge()({"a": Y}, {"a": P}), "each has its loss and metrics"),
    "text": (lambda: losses.hinge(Y, "high"), "not an array of numbers"),
    "complex": (lambda: losses.hinge(Y, P + 1j), "real numbers"),
}


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
@pytest.mark.parametrize("case", ARGUMENTS)
def test_invalid_arguments_are_refused(case: str):
    make, message = ARGUMENTS[case]
    with pytest.raises(dj.ArgumentError, match=message):
        make()


NO_PROBABILITIES: dict[str, tuple[losses.Loss, Any, str]] = {
    "logits": (losses.get("sparse_categorical_crossentropy"), P, "outside of 0 to 1"),
    "sigmoids": (losses.CategoricalCrossentropy(), SIGMOID, "sum to .*, not 1"),
    "focal": (losses.CategoricalFocalCrossentropy(axis=1), SIGMOID, "sum to .*, not 1"),
    "binary": (losses.get("bce"), P, "outside of 0 to 1"),
    "too large": (losses.BinaryFocalCrossentropy(), SIGMOID + 1, "outside of 0 to 1"),
    "half": (losses.CategoricalCrossentropy(), jnp.asarray(SIGMOID, jnp.bfloat16), "not 1"),
}


@pytest.mark.parametrize("case", NO_PROBABILITIES)
def test_outputs_that_are_not_probabilities_are_refused_with_advice_for_logits(case: str):
    loss, outputs, message = NO_PROBABILITIES[case]
    with pytest.raises(dj.ArgumentError, match=message) as caught:
        check_probabilities(loss, outputs)
    assert f"dj.losses.{type(loss).__name__}(from_logits=True)" in str(caught.value)


def test_the_advice_for_a_loss_without_from_logits_is_a_softmax():
    with pytest.raises(dj.ArgumentError, match=r"jax.nn.softmax\(outputs\)"):
        check_probabilities(losses.KLDivergence(), P)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_probabilities_pass_in_every_dtype(dtype: Any):
    """Narrow dtypes are rounded: three times a third in bfloat16 is 1.002."""
    thirds = np.asarray(jnp.full((4, 3), 1 / 3, dtype))
    check_probabilities(losses.SparseCategoricalCrossentropy(), thirds)
    check_probabilities(losses.BinaryCrossentropy(), jnp.asarray(SIGMOID, dtype))


def test_losses_without_expectations_and_outputs_of_nan_pass():
    for loss in (
        losses.SparseCategoricalCrossentropy(from_logits=True),
        losses.MeanSquaredError(),
        losses.get(lambda y_true, y_pred: y_true - y_pred),
    ):
        assert loss.expects is None
        check_probabilities(loss, P)
    check_probabilities(losses.CategoricalCrossentropy(), np.full((2, 3), np.nan))
