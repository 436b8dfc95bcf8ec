"""The workloads are what they are called, and every way of training starts from the same weights."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks._workloads import (
    CNN,
    DEEP,
    MLP,
    RESNET50,
    TRANSFORMER,
    Workload,
    forward_of,
    initial_weights,
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("work", [MLP, CNN, TRANSFORMER, DEEP], ids=lambda work: work.name)
def test_the_pure_function_with_the_exported_weights_is_the_model(work: Workload) -> None:
    """Names and order of the weights are right, or the logits would differ."""
    weights, (x, _) = initial_weights(work), work.data(2)
    assert all(type(value) is np.ndarray for value in weights.values())
    expected = work.model(nnx.Rngs(0))(x)
    np.testing.assert_allclose(forward_of(work)(weights, x), expected, rtol=1e-5, atol=1e-5)


def test_the_names_are_those_of_the_attributes() -> None:
    shapes = {name: value.shape for name, value in initial_weights(MLP).items()}
    assert shapes == {
        "layers.0.kernel": (784, 512),
        "layers.0.bias": (512,),
        "layers.1.kernel": (512, 10),
        "layers.1.bias": (10,),
    }


def test_the_data_is_the_same_each_time_and_a_batch_is_its_beginning_in_shape() -> None:
    (x, y), (again, _) = TRANSFORMER.first_batch(), TRANSFORMER.first_batch()
    np.testing.assert_array_equal(x, again)
    np.testing.assert_array_equal(x[:, 1:], y[:, :-1])  # the labels are the next characters
    assert x.shape == (16, 128)


@pytest.mark.exhaustive
def test_resnet_has_the_weights_of_resnet_50() -> None:
    """25,557,032 numbers in the published network, its norms included, and 161 arrays."""
    shapes = jax.eval_shape(lambda: nnx.state(RESNET50.model(nnx.Rngs(0)), nnx.Param))
    leaves = jax.tree.leaves(shapes)
    assert sum(leaf.size for leaf in leaves) == 25_557_032
    assert len(leaves) == 161
