"""dj.metrics have the values of one device for any number of replicas."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import distribute_jax as dj
from distribute_jax.metrics import Accuracy, Average, Metric, MultiMetric, Welford

IGNORE_IDLE_REPLICAS = pytest.mark.filterwarnings("ignore:The global batch has")
SIZES = (16, 13, 1, 8)
"""The first is full, and the others use one program."""


def batches(*sizes: int, offset: float = 0.0) -> list[np.ndarray]:
    """Random integers, so that every sum in float32 is exact."""
    rng = np.random.default_rng(0)
    return [rng.integers(-50, 50, size=n).astype(np.float32) + offset for n in sizes]


def create(strategy: dj.Strategy, make: Any) -> Any:
    with strategy.scope():
        return make()


def run_on(strategy: dj.Strategy, step: Any, data: list[Any]) -> None:
    for batch in strategy.distribute_dataset(data):
        strategy.run(step, args=batch if isinstance(batch, tuple) else (batch,))


def columns(n: int) -> dict[str, np.ndarray]:
    """The inputs of the metrics below: numbers, weights, a mask, logits and labels."""
    (x,), rng = batches(n), np.random.default_rng(n)
    return {
        "x": x,
        "far": x + 1e4,
        "pairs": np.stack([x, 2 * x], 1),
        "w": np.abs(x),
        "keep": x > 0,
        "logits": rng.normal(size=(n, 3)).astype(np.float32),
        "labels": rng.integers(0, 3, n, dtype=np.int32),
    }


class Histogram(Metric):
    """A metric of the user, which leaves the padding out by itself."""

    def __init__(self):
        self.counts = nnx.metrics.MetricState(jnp.zeros(4, jnp.int32))

    def update(self, *, labels, **_):
        mask = dj.get_replica_context().batch_mask
        self.counts[...] += jax.nn.one_hot(labels, 4, dtype=jnp.int32).T @ mask.astype(int)

    def compute(self):
        return self.counts[...]


CASES = {
    "average": (lambda: Average("loss"), lambda d: {"loss": d["x"], "other": 1}),
    "weighted": (
        Average, lambda d: {"values": d["pairs"], "sample_weight": d["w"], "mask": d["keep"]}
    ),
    "classes": (Accuracy, lambda d: {"logits": d["logits"], "labels": d["labels"]}),
    "two classes": (
        lambda: Accuracy(threshold=0.5), lambda d: {"logits": d["logits"][:, 0], "labels": d["labels"]}
    ),
    "spread": (Welford, lambda d: {"values": d["x"]}),
    "spread far from zero": (Welford, lambda d: {"values": d["far"]}),
    "of Flax, masked": (
        nnx.metrics.Average,
        lambda d: {"values": d["x"], "mask": dj.get_replica_context().batch_mask},
    ),
    "of the user": (Histogram, lambda d: {"labels": d["labels"]}),
}  # fmt: skip
"""Metrics, and what each takes of a batch: all in one program, which compiles once."""


@functools.cache
def all_metrics(replicas: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The metrics after batches of 16, 13, 1 and 8, and what these hold in all."""
    strategy = dj.MirroredStrategy(list(range(replicas)))
    metrics = create(strategy, lambda: {name: make() for name, (make, _) in CASES.items()})

    def step(data: dict[str, jax.Array]) -> None:
        for name, (_, given) in CASES.items():
            metrics[name].update(**given(data))

    data = [columns(n) for n in SIZES]
    run_on(strategy, step, data)
    return metrics, {k: np.concatenate([part[k] for part in data]) for k in data[0]}


@IGNORE_IDLE_REPLICAS
def test_an_average_is_exact_over_full_and_partial_batches(strategy: dj.Strategy):
    """For 16, 13 and 1 examples on any number of replicas, total and count are exact."""
    metrics, everything = all_metrics(strategy.num_replicas_in_sync)
    metric, x = metrics["average"], everything["x"]
    assert int(metric.count[...]) == 38
    assert float(metric.total[...]) == x.sum()
    assert float(metric.compute()) == np.float32(x.sum()) / np.float32(38)


@IGNORE_IDLE_REPLICAS
def test_sample_weights_and_a_mask_combine_with_the_padding(strategy: dj.Strategy):
    """Weights and masks for each example are broadcast over the dims of the values from the left."""
    metrics, everything = all_metrics(strategy.num_replicas_in_sync)
    metric, pairs = metrics["weighted"], everything["pairs"]
    weights = np.broadcast_to((everything["w"] * everything["keep"])[:, None], pairs.shape)
    assert float(metric.weight[...]) == weights.sum()
    assert int(metric.count[...]) == 0
    assert float(metric.compute()) == pytest.approx(np.average(pairs, weights=weights), rel=1e-6)


@IGNORE_IDLE_REPLICAS
def test_accuracy_is_exact_for_several_classes_and_for_two(strategy: dj.Strategy):
    metrics, everything = all_metrics(strategy.num_replicas_in_sync)
    logits, labels = everything["logits"], everything["labels"]
    right = np.mean(logits.argmax(1) == labels)
    assert float(metrics["classes"].compute()) == pytest.approx(right, rel=1e-6)
    right = np.mean((logits[:, 0] >= 0.5) == (labels > 0))
    assert float(metrics["two classes"].compute()) == pytest.approx(right, rel=1e-6)


@IGNORE_IDLE_REPLICAS
@pytest.mark.parametrize(("name", "column"), [("spread", "x"), ("spread far from zero", "far")])
def test_welford_merges_the_replicas_by_its_rule(strategy: dj.Strategy, name: str, column: str):
    """Mean and deviation of all examples, also with empty shares and a mean of 400 deviations."""
    metrics, everything = all_metrics(strategy.num_replicas_in_sync)
    x, found = everything[column].astype(np.float64), metrics[name].compute()
    assert int(metrics[name].count[...]) == 38
    assert float(found.mean) == pytest.approx(x.mean(), rel=1e-6, abs=1e-5)
    assert float(found.standard_deviation) == pytest.approx(x.std(), rel=1e-4)
    assert float(found.standard_error_of_mean) == pytest.approx(x.std() / 38**0.5, rel=1e-4)


def test_updates_with_and_without_weights_count_together():
    metric = Average()
    metric.update(values=jnp.array([1.0, 3.0]))
    metric.update(values=jnp.array([10.0]), sample_weight=jnp.array([2.0]))
    assert float(metric.compute()) == 6.0


def test_welford_stays_accurate_over_many_small_batches(strategy: dj.Strategy):
    """Two hundred steps: small additions are not lost in large sums."""
    metric = create(strategy, Welford)
    rng = np.random.default_rng(3)
    data = [rng.normal(3.0, 0.1, 16).astype(np.float32) for _ in range(200)]
    iterator = iter(strategy.distribute_dataset(data))
    for _ in range(10):
        strategy.run_steps(lambda x: metric.update(values=x), iterator, steps=20)
    x = np.concatenate(data).astype(np.float64)
    assert float(metric.compute().mean) == pytest.approx(x.mean(), rel=1e-6)
    assert float(metric.compute().standard_deviation) == pytest.approx(x.std(), rel=1e-4)


@IGNORE_IDLE_REPLICAS
def test_a_computed_statistic_outlives_the_next_step(s2: dj.MirroredStrategy):
    """It does not share memory with the state, which is donated to the next step."""
    with s2.scope():
        metric = dj.metrics.Welford("v")
    kept = []
    for batch in s2.distribute_dataset([np.arange(8.0), np.arange(8.0) + 8]):
        s2.run(lambda v: metric.update(v=v), args=(batch,))
        kept.append(metric.compute())
    assert [float(statistics.mean) for statistics in kept] == [3.5, 7.5]


@pytest.mark.exhaustive
def test_weights_in_welford_equal_repeated_values(strategy: dj.Strategy):
    metric = create(strategy, Welford)
    x = np.arange(13, dtype=np.float32)
    w = (np.arange(13) % 4).astype(np.float32)

    def step(x, w):
        metric.update(values=x, sample_weight=w, mask=x != 7)

    run_on(strategy, step, [(x[:8], w[:8]), (x[8:], w[8:])])
    repeated = np.repeat(x, (w * (x != 7)).astype(int))
    assert float(metric.weight[...]) == len(repeated)
    assert float(metric.compute().mean) == pytest.approx(repeated.mean(), rel=1e-6)
    assert float(metric.compute().standard_deviation) == pytest.approx(repeated.std(), rel=1e-5)


def test_an_update_of_welford_without_values_changes_nothing(s4: dj.MirroredStrategy):
    """There is no division by 0, and a later update is correct."""
    metric = create(s4, Welford)
    (batch,) = s4.distribute_dataset([np.arange(8.0, dtype=np.float32)])

    def step(x, least):
        metric.update(values=x, mask=x > least)

    s4.run(step, args=(batch, 100.0))
    assert (float(metric.mean[...]), float(metric.m2[...])) == (0.0, 0.0)
    s4.run(step, args=(batch, -1.0))
    assert float(metric.compute().standard_deviation) == pytest.approx(np.arange(8.0).std())


def test_metrics_of_flax_are_exact_on_full_batches(strategy: dj.Strategy):
    """Flax's metrics, updated inside run, have the sums of the global batches."""
    welford, average = create(strategy, lambda: (nnx.metrics.Welford(), nnx.metrics.Average()))
    data = batches(8, 16, 16, offset=100.0)
    run_on(strategy, lambda x: [m.update(values=x) for m in (welford, average)], data)
    x = np.concatenate(data)
    expected = {"count": 40, "mean": x.mean(), "m2": 40 * x.var(), "total": x.sum()}
    for metric, names in ((welford, ("count", "mean", "m2")), (average, ("count", "total"))):
        assert nnx.to_pure_dict(nnx.state(metric)).keys() == {*names}
        for name in names:
            found = getattr(metric, name)[...]
            np.testing.assert_allclose(found, expected[name], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("make", [nnx.metrics.Welford, nnx.metrics.Average])
def test_metrics_of_flax_that_forget_the_mask_are_refused_on_a_partial_batch(
    s4: dj.MirroredStrategy, make: Any
):
    metric = create(s4, make)
    with pytest.raises(ValueError, match="metric") as caught:
        run_on(s4, lambda x: metric.update(values=x), batches(8, 5))
    assert isinstance(caught.value, dj.PaddingLeakError)
    assert int(metric.count[...]) == 8


@IGNORE_IDLE_REPLICAS
def test_flax_average_with_the_mask_is_exact_on_a_partial_batch(strategy: dj.Strategy):
    metrics, everything = all_metrics(strategy.num_replicas_in_sync)
    expected = pytest.approx(everything["x"].mean(), rel=1e-6)
    assert float(metrics["of Flax, masked"].compute()) == expected


@pytest.mark.parametrize(("replicas", "expected"), [(2, 5.0), (4, 15.0)])
def test_one_number_of_each_replica_counts_once(replicas: int, expected: float):
    """As in TensorFlow's Mean of 0 and 10, and of 0, 10, 20 and 30; also after a reset."""
    strategy = dj.MirroredStrategy(list(range(replicas)))
    metrics = create(strategy, lambda: (Average(), nnx.metrics.Average()))

    def step():
        for metric in metrics:
            metric.update(values=10.0 * dj.get_replica_context().replica_id_in_sync_group)

    for _ in range(2):
        strategy.run(step)
        for metric in metrics:
            assert float(metric.compute()) == expected
            assert int(metric.count[...]) == replicas
            metric.reset()


def test_a_reset_outside_run_keeps_the_placement_and_the_program(s4: dj.MirroredStrategy):
    metrics = create(s4, lambda: [Average(), Welford()])
    (batch,) = s4.distribute_dataset(batches(8))

    def step(x):
        for metric in metrics:
            metric.update(values=x)

    s4.run(step, args=(batch,))
    first = jax.tree.map(np.asarray, nnx.state(metrics))
    for metric in metrics:
        metric.reset()
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(nnx.state(metrics)))
    assert all(len(x.sharding.device_set) == 4 for x in jax.tree.leaves(nnx.state(metrics)))
    s4.run(step, args=(batch,))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(metrics), first)
    assert s4._runner.programs() == 1


def test_a_reset_inside_run_empties_the_metric(s4: dj.MirroredStrategy):
    kinds = Average, Welford, nnx.metrics.Average, nnx.metrics.Welford
    metrics = create(s4, lambda: [make() for make in kinds])

    def update(x):
        for metric in metrics:
            metric.update(values=x)

    def reset():
        for metric in metrics:
            metric.reset()

    run_on(s4, update, batches(8))
    s4.run(reset)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(nnx.state(metrics)))
    run_on(s4, update, batches(8))
    assert [int(metric.count[...]) for metric in metrics] == [8] * 4


@pytest.mark.parametrize("make", [Average, Welford, nnx.metrics.Average, nnx.metrics.Welford])
def test_reset_and_update_in_one_step_is_refused_and_says_what_to_do(
    s4: dj.MirroredStrategy, make: Any
):
    metric = create(s4, make)

    def step(x):
        metric.reset()
        metric.update(values=x)

    with pytest.raises(ValueError, match="reset a metric outside of run"):
        run_on(s4, step, batches(8))


def test_writing_one_part_of_welford_is_refused_if_the_replicas_differ(s4: dj.MirroredStrategy):
    """A mean is not a sum, so additions to it alone cannot be summed."""
    metric = create(s4, Welford)

    def step(x):
        metric.mean[...] += x.sum()

    with pytest.raises(ValueError, match=r"metric\.mean"):
        run_on(s4, step, batches(8))


def test_compute_inside_run_before_and_after_an_update(s4: dj.MirroredStrategy):
    """Before it, the value over all replicas; after it, that of the old state and this replica's values."""
    metric = create(s4, Average)
    (batch,) = s4.distribute_dataset([np.arange(8.0, dtype=np.float32)])
    s4.run(lambda x: metric.update(values=x), args=(batch,))

    def step(x):
        before = metric.compute()
        metric.update(values=x)
        return before, metric.compute()

    before, after = s4.run(step, args=(batch,))
    assert isinstance(before, dj.Mirrored)
    assert float(before) == 3.5
    shares = [(28 + 4 * r + 1) / 10 for r in range(4)]
    np.testing.assert_allclose(s4.experimental_local_results(after), shares, rtol=1e-6)
    assert float(metric.compute()) == 3.5


@pytest.mark.exhaustive
def test_metrics_pass_the_comparison_with_one_device(s4: dj.MirroredStrategy):
    """verify runs the step on one device as well and compares every variable of the metrics."""
    metric = create(s4, lambda: MultiMetric(mean=Average(), spread=Welford()))
    for x in batches(8, 5):
        dj.testing.check_equals_one_device(s4, lambda x: metric.update(values=x), (x,))


def test_many_metrics_in_one_call(strategy: dj.Strategy):
    """Each uses the keywords that it knows; masks and weights are for all, or by name."""
    metrics = create(
        strategy,
        lambda: MultiMetric(
            accuracy=Accuracy(0.5), loss=Average("loss"), flax=nnx.metrics.Average()
        ),
    )

    def step(x):
        metrics.update(
            logits=x,
            labels=jnp.ones_like(x, jnp.int32),
            loss=x,
            values=x,
            mask={"flax": x >= 4},
            sample_weight={"loss": x},
        )

    run_on(strategy, step, [np.arange(8.0, dtype=np.float32)])
    found = {name: float(value) for name, value in metrics.compute().items()}
    assert found == {"accuracy": 7 / 8, "loss": 5.0, "flax": 5.5}
    metrics.reset()
    assert int(metrics.flax.count[...]) == 0


@IGNORE_IDLE_REPLICAS
def test_a_metric_of_the_user_is_summed(strategy: dj.Strategy):
    metrics, everything = all_metrics(strategy.num_replicas_in_sync)
    counts = np.bincount(everything["labels"], minlength=4)
    np.testing.assert_array_equal(metrics["of the user"].compute(), counts)
    metric = Histogram()
    metric.counts[...] += 1
    metric.reset()
    assert not np.asarray(metric.compute()).any()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int8, jnp.uint8, bool])
def test_small_dtypes_are_summed_in_float32(dtype: Any):
    """A sum of a thousand ones would not fit bfloat16 or int8."""
    for metric in (Average(), Welford()):
        metric.update(values=jnp.ones(1000, dtype))
        assert int(metric.count[...]) == 1000
        assert float(jax.tree.leaves(metric.compute())[0]) == 1.0


def test_integers_of_64_bits_are_not_truncated():
    metric = Average()
    metric.update(values=np.array([2**40, 0]))
    assert float(metric.compute()) == 2.0**39


def test_a_masked_nan_does_not_count():
    metric, spread = Average(), Welford()
    for each in (metric, spread):
        each.update(values=jnp.array([1.0, jnp.nan]), mask=jnp.array([True, False]))
    assert float(metric.compute()) == 1.0
    assert float(spread.compute().mean) == 1.0


def test_an_empty_average_is_nan_as_in_flax():
    assert np.isnan(Average().compute())
    assert np.isnan(Welford().compute().standard_deviation)
    assert float(Welford().compute().mean) == 0.0


WRONG = {
    "no values": (Average, {"loss": 1.0}, "needs values="),
    "text": (Average, {"values": "a"}, "not an array of numbers"),
    "complex": (Average, {"values": 1j}, "real numbers"),
    "a key": (Average, {"values": jax.random.key}, "not an array of numbers"),
    "long mask": (Average, {"values": np.ones(3), "mask": np.ones(2, bool)}, "from the left"),
    "deep mask": (Average, {"values": np.ones(3), "mask": np.ones((3, 2), bool)}, "from the left"),
    "float mask": (Average, {"values": np.ones(3), "mask": np.ones(3)}, "mask > 0"),
    "weights": (Welford, {"values": np.ones(3), "sample_weight": np.ones(4)}, "from the left"),
    "one-hot": (
        Accuracy,
        {"logits": np.ones((3, 2)), "labels": np.ones((3, 2), int)},
        "not one-hot",
    ),
    "weights that Flax ignores": (
        lambda: MultiMetric(a=nnx.metrics.Average()),
        {"values": jnp.ones(3), "sample_weight": jnp.ones(3)},
        r"sample_weight, which a \(Average\)",
    ),
    "mask that Flax ignores": (
        lambda: MultiMetric(a=nnx.metrics.Welford()),
        {"values": jnp.ones(3), "mask": jnp.ones(3, bool)},
        r"mask, which a \(Welford\)",
    ),
    "unknown name": (
        lambda: MultiMetric(a=Average()),
        {"values": jnp.ones(3), "mask": {"b": jnp.ones(3, bool)}},
        "for b. It has the metrics a",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(case: str):
    make, kwargs, text = WRONG[case]
    metric = make()
    before = jax.tree.map(np.asarray, nnx.state(metric))
    with pytest.raises(ValueError, match=text) as caught:
        metric.update(**kwargs)
    assert isinstance(caught.value, dj.DistributeError)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(metric), before)


def test_wrong_constructors_are_named():
    with pytest.raises(ValueError, match="not a metric"):
        MultiMetric(a=Average)
    with pytest.raises(ValueError, match="threshold must be None or a number"):
        Accuracy("loss")


def test_a_per_replica_value_outside_run_is_refused(s2: dj.MirroredStrategy):
    metric = create(s2, Average)
    (batch,) = s2.distribute_dataset(batches(4))
    with pytest.raises(ValueError, match=r"Use strategy\.reduce") as caught:
        metric.update(values=batch)
    assert isinstance(caught.value, dj.PerReplicaError)
    metric.update(values=s2.gather(s2.run(lambda x: x, args=(batch,)), axis=0))
    assert int(metric.count[...]) == 4


def test_flattened_values_of_a_partial_batch_are_refused(s4: dj.MirroredStrategy):
    """It is unknown which of them belong to the padding."""
    metric = create(s4, Average)
    with pytest.raises(ValueError, match="do not flatten it"):
        run_on(s4, lambda x: metric.update(values=jnp.stack([x, x]).ravel()), batches(8, 5))


def test_the_base_class_names_what_is_missing():
    with pytest.raises(NotImplementedError, match="Metric has to define update"):
        Metric().update()
    with pytest.raises(NotImplementedError, match="Metric has to define compute"):
        Metric().compute()


@pytest.mark.exhaustive
def test_keras_classes_and_methods_are_exact_over_partial_batches(s4: dj.MirroredStrategy):
    """Each metric equals its mean over all examples, with Keras's names and methods."""
    rng = np.random.default_rng(0)
    outputs = rng.uniform(0.1, 0.9, (13, 3)).astype(np.float32)
    outputs /= outputs.sum(axis=1, keepdims=True)
    ids = rng.integers(0, 3, 13)
    one_hot = np.eye(3, dtype=np.float32)[ids]
    metrics = dj.metrics
    by_class = {
        metrics.SparseCategoricalAccuracy: np.mean(outputs.argmax(1) == ids),
        metrics.CategoricalAccuracy: np.mean(outputs.argmax(1) == ids),
        metrics.BinaryAccuracy: np.mean((outputs > 0.5) == one_hot),
        metrics.TopKCategoricalAccuracy: 1.0,
        metrics.RootMeanSquaredError: np.sqrt(np.mean((outputs - one_hot) ** 2)),
        metrics.MeanAbsoluteError: np.mean(np.abs(outputs - one_hot)),
        metrics.SparseCategoricalCrossentropy: -np.mean(np.log(outputs[range(13), ids])),
        metrics.FalseNegatives: np.sum((outputs <= 0.5) & (one_hot == 1)),
        metrics.Sum: np.sum(ids),
        metrics.Mean: np.mean(ids),
    }
    instances = [create(s4, functools.partial(cls, name="mine")) for cls in by_class]

    def step(ids: Any, one_hot: Any, outputs: Any) -> None:
        for metric in instances:
            if isinstance(metric, metrics.Mean):
                metric.update_state(ids)
            else:
                labels = ids if type(metric).__name__.startswith("Sparse") else one_hot
                metric(labels, outputs)

    run_on(s4, step, [(ids[r], one_hot[r], outputs[r]) for r in (slice(8), slice(8, None))])
    for metric, expected in zip(instances, by_class.values(), strict=True):
        assert metric.name == "mine"
        assert float(metric.result()) == pytest.approx(expected, rel=1e-6), metric
        metric.reset_state()
        assert not float(metric(ids[:0]) if isinstance(metric, metrics.Sum) else 0)


def test_a_function_of_the_user_is_averaged_with_weights():
    """Its keywords are checked when the metric is created."""
    metric = dj.metrics.MeanMetricWrapper(lambda y_true, y_pred, power: y_pred**power, power=2)
    metric.update_state(jnp.zeros(2), jnp.array([1.0, 3.0]), sample_weight=jnp.array([3.0, 1.0]))
    assert float(metric.result()) == 3.0
    with pytest.raises(TypeError, match="exponent"):
        dj.metrics.MeanSquaredError(exponent=2)
