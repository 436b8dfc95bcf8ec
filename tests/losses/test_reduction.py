"""dj.losses under a strategy: the value of one device for any number of replicas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribute_jax as dj

IGNORE_IDLE_REPLICAS = pytest.mark.filterwarnings("ignore:The global batch has")
REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight", "sum")
SIZES = (16, 13, 1)
CLASSES = 3


def batch(n: int) -> dict[str, np.ndarray]:
    """Labels, logits and weights of a batch; weights have every shape that a loss takes."""
    rng = np.random.default_rng(n)
    return {
        "x": rng.normal(size=(n, 4, CLASSES)).astype(np.float32),
        "ids": rng.integers(-1, CLASSES, size=(n, 4), dtype=np.int32),
        "w": rng.integers(0, 4, size=n).astype(np.float32),
        "w1": rng.integers(0, 4, size=(n, 1)).astype(np.float32),
        "wt": rng.integers(0, 4, size=(n, 4)).astype(np.float32),
    }


def step(data: dict[str, jax.Array]) -> dict[Any, jax.Array]:
    """Returns the parts of every reduction with every shape of weights, in one program."""
    sparse, parts = dj.losses.SparseCategoricalCrossentropy, {}
    for reduction in REDUCTIONS:
        for weights in ("", "w", "w1", "wt"):
            squares = dj.losses.MeanSquaredError(reduction=reduction)
            ignoring = sparse(from_logits=True, ignore_class=-1, reduction=reduction)
            given = data[weights] if weights else None
            key = f"{reduction} {weights}"
            parts[f"{key} mse"] = squares(jnp.zeros_like(data["x"]), data["x"], given)
            parts[f"{key} ignoring"] = ignoring(data["ids"], data["x"], sample_weight=given)
    return parts


def expected(data: dict[str, np.ndarray]) -> dict[Any, float]:
    """The same by formulas in NumPy, for the global batch."""
    x = data["x"].astype(np.float64)
    squares = (x**2).mean(-1)
    logs = x - np.log(np.exp(x).sum(-1, keepdims=True))
    places = np.maximum(data["ids"], 0)[..., None]
    counts = data["ids"] >= 0
    entropies = np.where(counts, -np.take_along_axis(logs, places, -1)[..., 0], 0)
    found = {}
    for reduction in REDUCTIONS:
        for weights in ("", "w", "w1", "wt"):
            w = data[weights].reshape(len(x), -1) if weights else np.ones((1, 1))
            w = np.broadcast_to(w, squares.shape)
            by_weight = reduction == "mean_with_sample_weight" and weights
            for name, losses, counted in (
                ("mse", squares, np.ones_like(counts)),
                ("ignoring", entropies, counts),
            ):
                divisor = (w * counted).sum() if by_weight else counted.sum()
                divisor = 1 if reduction == "sum" else divisor or 1
                found[f"{reduction} {weights} {name}"] = (losses * w).sum() / divisor
    return found


@IGNORE_IDLE_REPLICAS
def test_every_reduction_is_that_of_one_device_on_full_and_partial_batches(strategy: dj.Strategy):
    """16, 13 and 1 examples with time steps; weights per example and per time step; ignored classes."""
    data = [batch(n) for n in SIZES]
    for given, distributed in zip(data, strategy.distribute_dataset(data), strict=True):
        found = strategy.reduce("sum", strategy.run(step, args=(distributed,)), axis=None)
        for key, value in expected(given).items():
            assert float(found[key]) == pytest.approx(value, rel=2e-5, abs=1e-6), (
                key,
                len(given["x"]),
            )


KERAS = {
    # tf_distribute.md 7.3: y = w·x with w = 1, x = 1 ... n, labels 0, batches of 8 or 5: loss, w after
    "mse 8": (8, lambda: dj.losses.MeanSquaredError(), None, 25.5, 0.49),
    "mse 5": (5, lambda: dj.losses.MeanSquaredError(), None, 11.0, 0.78),
    "sum 8": (8, lambda: dj.losses.MeanSquaredError(reduction="sum"), None, 204.0, -3.08),
    "weights 8": (8, lambda: dj.losses.get("mse"), [1, 1, 1, 1, 0, 0, 0, 0], 3.75, 0.925),
}


@IGNORE_IDLE_REPLICAS
def test_gradients_are_those_of_one_device_and_padding_of_nan_does_not_count(strategy: dj.Strategy):
    """Keras's numbers on one device; those of several differ in TensorFlow for partial batches."""

    def step(x: jax.Array, of_cases: dict[str, jax.Array]) -> Any:
        real = dj.get_replica_context().batch_mask[:, None]

        def part(slope: jax.Array, case: str, w: jax.Array) -> jax.Array:
            _, make, weights, *_ = KERAS[case]
            y_pred = jnp.where(real, slope * x, jnp.nan)
            return make()(jnp.zeros(len(x)), y_pred, None if weights is None else w)

        parts = {case: jax.value_and_grad(part)(1.0, case, w) for case, w in of_cases.items()}
        return dj.get_replica_context().all_reduce("sum", parts)

    for n in (8, 5):
        cases = {case: of for case, of in KERAS.items() if of[0] == n}
        x = np.arange(1, n + 1, dtype=np.float32)[:, None]
        w = {case: np.asarray(of[2] or np.ones(n), np.float32) for case, of in cases.items()}
        (batch,) = strategy.distribute_dataset([(x, w)])
        for case, (found, gradient) in strategy.run(step, args=batch).items():
            *_, loss, after = KERAS[case]
            assert float(found) == pytest.approx(loss), case
            assert 1 - 0.01 * float(gradient) == pytest.approx(after, rel=1e-5), case


@IGNORE_IDLE_REPLICAS
def test_none_returns_the_weighted_losses_with_zeros_in_the_padding(s4: dj.MirroredStrategy):
    def step(x: jax.Array, w: jax.Array) -> Any:
        losses = dj.losses.MeanAbsoluteError(reduction=None)(jnp.zeros(len(x)), x, w)
        return losses, dj.get_replica_context().all_reduce("sum", losses.sum())

    x, w = np.arange(1, 7, dtype=np.float32), np.arange(6, dtype=np.float32)
    (batch,) = s4.distribute_dataset([(x, w)])
    losses, total = s4.run(step, args=batch)
    np.testing.assert_array_equal(s4.gather(losses, axis=0), x * w)
    assert float(total) == (x * w).sum()


def test_a_mean_over_weights_of_zero_is_zero_as_in_keras():
    y = np.ones((3, 1), np.float32)
    loss = dj.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    ignoring = dj.losses.SparseCategoricalCrossentropy(ignore_class=0, from_logits=True)
    both = jax.jit(
        lambda: (
            loss(y, 2 * y, sample_weight=np.zeros(3)),
            ignoring(np.zeros(3, int), np.ones((3, 2))),
        )
    )
    assert both() == (0.0, 0.0)


def test_a_scalar_weight_scales_everything():
    y = jnp.ones((3, 1))
    assert float(dj.losses.MeanSquaredError()(y, 3 * y, sample_weight=0.5)) == 2.0


def test_a_mean_in_float16_does_not_overflow_where_its_sum_or_count_does(s2: dj.MirroredStrategy):
    """The loss was infinite, or 0 with gradients of 0: its sum or count was above 65504."""
    losses = np.full((4, 40_000), 3, np.float16)
    (batch,) = s2.distribute_dataset([losses])

    def parts(losses: jax.Array) -> Any:
        y, weights = jnp.zeros_like(losses)[..., None], jnp.ones_like(losses)
        by_weights = dj.losses.MeanAbsoluteError("mean_with_sample_weight", dtype="float16")
        means = [
            dj.losses.MeanAbsoluteError(dtype="float16")(y, losses[..., None]),
            by_weights(y, losses[..., None], weights),
            dj.compute_average_loss(10_000 * losses[:, 0]),
        ]
        assert {mean.dtype.name for mean in means} == {"float16"}
        return dj.get_replica_context().all_reduce("sum", jnp.stack(means))

    assert s2.run(parts, args=(batch,)).tolist() == [3, 3, 30_000]


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.uint8])
def test_weights_of_losses_that_are_integers_keep_their_fractions(
    s2: dj.MirroredStrategy, dtype: Any
):
    """Weights of 0.5 became 0, the dtype of the losses."""
    (batch,) = s2.distribute_dataset([(np.ones(4, dtype), np.full(4, 0.5))])

    def mean(losses: jax.Array, weights: jax.Array) -> Any:
        return dj.get_replica_context().all_reduce("sum", dj.compute_average_loss(losses, weights))

    assert float(s2.run(mean, args=batch)) == 0.5


WEIGHTS = {
    "rows": (np.ones(2), r"\(2,\) for losses of shape \(3, 4\)"),
    "times": (np.ones((3, 2)), r"\(3, 2\) for losses of shape \(3, 4\)"),
    "dims": (np.ones((3, 4, 2)), r"\(3, 4, 2\) for losses"),
    "text": ("heavy", "not an array of numbers"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_that_do_not_fit_are_refused(case: str):
    weights, message = WEIGHTS[case]
    with pytest.raises(dj.ArgumentError, match=message):
        dj.losses.MeanSquaredError()(np.ones((3, 4, 2)), np.ones((3, 4, 2)), weights)


def test_in_cross_replica_context_a_loss_is_refused(s2: dj.MirroredStrategy):
    with s2.scope(), pytest.raises(dj.ContextError, match="`MeanSquaredError` in cross replica"):
        dj.losses.MeanSquaredError()(jnp.ones(2), jnp.ones(2))


def test_flattened_losses_are_refused_for_a_partial_batch(s2: dj.MirroredStrategy):
    """It is unknown which of them belong to the padding."""
    (batch,) = s2.distribute_dataset([np.ones((3, 4), np.float32)])
    with pytest.raises(dj.ArgumentError, match=r"got losses with 8 rows.* 2 examples"):
        s2.run(lambda x: dj.losses.MeanSquaredError()(x.ravel(), x.ravel()), args=(batch,))
