"""A loss per token: the sum over the replicas is the ratio of two sums over the global batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribute_jax as dj

IGNORE_IDLE_REPLICAS = pytest.mark.filterwarnings("ignore:The global batch has")


def sentences(n: int) -> dict[str, np.ndarray]:
    """Tokens with weights: the first half of the sentences has many, the second few or no tokens."""
    rng = np.random.default_rng(n)
    weights = (rng.random((n, 6)) < 0.8).astype(np.float32)
    weights[n // 2 :, 1:] = 0
    weights[-2:] = 0
    return {"x": rng.normal(size=(n, 6, 3)).astype(np.float32), "w": weights}


def one_device(slope: np.ndarray, data: dict[str, np.ndarray]) -> Any:
    """The loss and its gradient."""
    errors, total = data["x"] @ slope - 1.0, np.sum(data["w"]) or 1.0
    gradient = np.einsum("nt,nti->i", 2 * errors * data["w"], data["x"])
    return np.sum(errors**2 * data["w"]) / total, gradient / total


def step(data: dict[str, jax.Array], slope: jax.Array) -> Any:
    def part(slope: jax.Array) -> jax.Array:
        losses = ((data["x"] @ slope) - 1.0) ** 2
        return dj.compute_average_loss(losses, data["w"], divide_by="weights")

    return dj.get_replica_context().all_reduce("sum", jax.value_and_grad(part)(slope))


@IGNORE_IDLE_REPLICAS
def test_loss_and_gradient_are_those_of_one_device_for_any_division_of_the_weights(
    strategy: dj.Strategy,
):
    """Full and partial batches, shares without weights, and a batch whose weights are all 0."""
    slope = np.array([0.5, -1.0, 2.0], np.float32)
    nothing = sentences(8)
    nothing["w"][:] = 0
    data = [sentences(8), sentences(13), sentences(3), nothing]
    for given, batch in zip(data, strategy.distribute_dataset(data), strict=True):
        loss, gradient = strategy.run(step, args=(batch, slope))
        expected, slopes = one_device(slope, given)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        np.testing.assert_allclose(gradient, slopes, rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
def test_gradients_go_through_weights_that_depend_on_the_model(strategy: dj.Strategy):
    """The divisor is part of the loss: its gradient is summed over the replicas as well."""
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)

    def part(scale: jax.Array, x: jax.Array) -> jax.Array:
        return dj.compute_average_loss(x[:, 0] ** 2, jnp.exp(scale * x[:, 1]), divide_by="weights")

    def both(x: jax.Array) -> Any:
        return dj.get_replica_context().all_reduce("sum", jax.grad(part)(jnp.float32(0.5), x))

    def whole(scale: Any) -> Any:
        weights = jnp.exp(scale * x[:, 1])
        return jnp.sum(x[:, 0] ** 2 * weights) / jnp.sum(weights)

    (batch,) = strategy.distribute_dataset([x])
    found = float(strategy.run(both, args=(batch,)))
    assert found == pytest.approx(float(jax.grad(whole)(0.5)), rel=1e-5)


def test_a_weight_for_each_example_counts_for_each_of_its_tokens(s2: dj.MirroredStrategy):
    """As in the reduction "mean_with_sample_weight"; narrow losses are summed in float32."""
    losses = np.arange(2 * 600, dtype=np.float32).reshape(2, 600) % 7
    (batch,) = s2.distribute_dataset([(losses, np.array([1, 3]))])

    def means(losses: jax.Array, weights: jax.Array) -> Any:
        parts = [
            dj.compute_average_loss(losses.astype(dtype), weights, divide_by="weights")
            for dtype in (jnp.float32, jnp.bfloat16, jnp.int32)
        ]
        assert [part.dtype.name for part in parts] == ["float32", "bfloat16", "float32"]
        return dj.get_replica_context().all_reduce("sum", [p.astype(jnp.float32) for p in parts])

    expected = (losses * [[1], [3]]).sum() / (4 * 600)
    found = np.asarray(s2.run(means, args=batch))
    np.testing.assert_allclose(found[[0, 2]], expected, rtol=1e-6)
    np.testing.assert_allclose(found[1], expected, rtol=5e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"divide_by": "weights"}, "pass sample_weight, and leave global_batch_size out"),
        ({"divide_by": "tokens"}, "must be one of 'examples', 'weights'; got 'tokens'"),
        (
            {"divide_by": "weights", "sample_weight": 1.0, "global_batch_size": 8},
            "leave global_batch_size out",
        ),
    ],
)
def test_arguments_that_exclude_each_other_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(dj.ArgumentError, match=message):
        dj.compute_average_loss(jnp.ones(4), **arguments)
