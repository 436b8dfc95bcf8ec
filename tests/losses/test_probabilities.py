"""A loss that expects probabilities refuses other outputs."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import distribute_jax as dj
from distribute_jax import losses
from distribute_jax.losses._shapes import check_probabilities

LOGITS = np.random.default_rng(0).normal(size=(4, 7)).astype(np.float32)
SOFTMAX = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
SIGMOID = 1 / (1 + np.exp(-LOGITS))

REFUSED: dict[str, tuple[losses.Loss, Any, str]] = {
    "logits": (losses.get("sparse_categorical_crossentropy"), LOGITS, "outside of 0 to 1"),
    "sigmoids": (losses.CategoricalCrossentropy(), SIGMOID, "sum to .*, not 1"),
    "focal": (losses.CategoricalFocalCrossentropy(axis=1), SIGMOID, "sum to .*, not 1"),
    "binary": (losses.get("bce"), LOGITS, "outside of 0 to 1"),
    "too large": (losses.BinaryFocalCrossentropy(), SIGMOID + 1, "outside of 0 to 1"),
    "half": (losses.CategoricalCrossentropy(), jnp.asarray(SIGMOID, jnp.bfloat16), "not 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_outputs_that_are_not_probabilities_are_refused_with_advice_for_logits(case: str):
    loss, outputs, message = REFUSED[case]
    with pytest.raises(dj.ArgumentError, match=message) as caught:
        check_probabilities(loss, outputs)
    assert f"dj.losses.{type(loss).__name__}(from_logits=True)" in str(caught.value)


def test_the_advice_for_a_loss_without_from_logits_is_a_softmax():
    with pytest.raises(dj.ArgumentError, match=r"jax.nn.softmax\(outputs\)"):
        check_probabilities(losses.KLDivergence(), LOGITS)


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
        check_probabilities(loss, LOGITS)
    check_probabilities(losses.CategoricalCrossentropy(), np.full((2, 3), np.nan))
