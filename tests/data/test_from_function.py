"""distribute_datasets_from_function: whose batches each replica takes, and where they end."""

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from input_helpers import all_values, batches, values

import distribute_jax as dj
from distribute_jax._errors import ArgumentError
from distribute_jax.data._dataset import set_epoch

PER_REPLICA = dj.InputOptions(experimental_replication_mode="per_replica")


def test_replicas_take_the_batches_of_one_dataset_in_turn(s2: dj.MirroredStrategy):
    """Acceptance 101: one call, with one pipeline for two replicas; no batch is divided."""
    seen = []

    def dataset_fn(context: dj.InputContext) -> list[np.ndarray]:
        seen.append(context)
        return batches(7, context.get_per_replica_batch_size(4))

    dataset = s2.distribute_datasets_from_function(dataset_fn)
    assert [all_values(dataset) for _ in range(2)] == [[[[0, 1], [2, 3]], [[4, 5], [6]]]] * 2
    assert seen == [dj.InputContext(1, 0, 2)]


def test_a_resumed_run_continues_with_the_order_of_its_epoch(s2: dj.MirroredStrategy):
    """A shuffled dataset of the function starts at the epoch that training has reached."""
    rows = dj.data.from_arrays(np.arange(8)).shuffle(seed=0).batch(4)
    whole, resumed = (s2.distribute_datasets_from_function(lambda context: rows) for _ in range(2))
    epochs = [all_values(whole) for _ in range(3)]
    set_epoch(resumed, 2)
    assert all_values(resumed) == epochs[2] != epochs[0]


def test_per_replica_calls_the_function_for_each_replica(strategy: dj.Strategy):
    """Acceptance 108: N pipelines; replica i takes the batches of the i-th call alone."""
    n = strategy.num_replicas_in_sync
    seen = []

    def dataset_fn(context: dj.InputContext) -> list[np.ndarray]:
        seen.append(context)
        return [np.full(2, 10 * context.input_pipeline_id + step) for step in range(2)]

    dataset = strategy.distribute_datasets_from_function(dataset_fn, PER_REPLICA)
    assert all_values(dataset) == [[[10 * i + step] * 2 for i in range(n)] for step in range(2)]
    assert seen == [dj.InputContext(n, i, n) for i in range(n)]
    assert dataset.cardinality == 2


def test_one_device_and_global_batches_have_no_per_replica_mode(s2: dj.MirroredStrategy):
    """Acceptance 108 and TensorFlow's OneDevice: NotImplementedError names what to call."""
    with pytest.raises(NotImplementedError, match="distribute_datasets_from_function"):
        s2.distribute_dataset(batches(4, 2), PER_REPLICA)
    one = dj.OneDeviceStrategy("cpu:0")
    with pytest.raises(NotImplementedError, match="not supported by OneDeviceStrategy"):
        one.distribute_datasets_from_function(lambda context: batches(4, 2), PER_REPLICA)
    central = dj.CentralStorageStrategy(["cpu:0", "cpu:1"])
    dataset = central.distribute_datasets_from_function(lambda context: batches(2, 2), PER_REPLICA)
    assert all_values(dataset) == [[[0, 1], [0, 1]]]


@pytest.mark.parametrize("returned", [None, 3])
def test_a_function_that_returns_no_batches_is_refused(s2: dj.MirroredStrategy, returned: Any):
    """Such as the batch size: the message says what it returned."""
    with pytest.raises(dj.ArgumentError, match=f"got from its function .* {returned}, which is"):
        s2.distribute_datasets_from_function(lambda context: returned)


@pytest.mark.parametrize(("replica", "short"), [(0, 1), (1, 0)])
def test_an_epoch_lasts_until_every_replica_is_out_of_data(
    s2: dj.MirroredStrategy, replica: int, short: int
):
    """A replica whose data has ended gets empty shares, padded with a real row of another replica."""

    def dataset_fn(context: dj.InputContext) -> list[Any]:
        steps = 3 if context.input_pipeline_id == replica else 1
        return [{"x": np.full(2, step + 1, np.int32)} for step in range(steps)]

    elements = list(s2.distribute_datasets_from_function(dataset_fn, PER_REPLICA))
    last = [2 if i == replica else 0 for i in range(2)]
    assert [[len(v) for v in e["x"].values] for e in elements] == [[2, 2], last, last]
    assert elements[2]["x"].counts[short] == 0
    assert np.asarray(elements[2]["x"].global_array).tolist() == [3] * 4


def test_padding_repeats_the_last_real_row_before_it(s4: dj.MirroredStrategy):
    """As in global batches: a short share repeats its last row, an empty one that of its neighbour."""
    (element,) = s4.distribute_datasets_from_function(lambda context: batches(5, 3))
    assert np.asarray(element.global_array).tolist() == [0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 4, 4]
    (element,) = s4.distribute_datasets_from_function(lambda context: batches(3, 3))
    assert np.asarray(element.global_array).tolist() == [0, 1, 2] + [2] * 9


def test_a_step_masks_the_padding_of_uneven_batches(s2: dj.MirroredStrategy):
    """Inside run the mask has the real counts, so a loss over the batch is that of one device."""
    source = [np.arange(4, dtype=np.float32), np.array([9.0], np.float32)]
    (element,) = s2.distribute_datasets_from_function(lambda context: source)
    loss = s2.reduce("sum", s2.run(lambda x: dj.compute_average_loss(x), args=(element,)), None)
    assert float(loss) == pytest.approx(15 / 5)


def test_leaves_of_every_kind_are_placed(s2: dj.MirroredStrategy):
    """Host and device arrays, nests and 64-bit numbers, also inside scope(); each part on its device."""
    part = {"a": np.arange(3.0), "b": (jnp.arange(3), None)}
    short = {"a": np.arange(1.0), "b": (jnp.arange(1), None)}
    with s2.scope():
        (element,) = s2.distribute_datasets_from_function(lambda context: [short, part])
    assert values(element["a"]) == values(element["b"][0]) == [[0], [0, 1, 2]]
    assert element["a"].dtype == np.float32
    assert element["b"][1] is None
    devices = [shard.device for shard in element["a"].global_array.addressable_shards]
    assert devices == list(s2.mesh.devices.flat)
    assert np.asarray(element["a"].global_array).tolist() == [0, 0, 0, 0, 1, 2]


def test_a_generator_for_one_epoch_says_what_to_return(s2: dj.MirroredStrategy):
    """The advice takes the context, and an epoch begins with a new generator."""
    make_batches = lambda: (x for x in batches(4, 2))  # noqa: E731
    once = s2.distribute_datasets_from_function(lambda context: make_batches())
    assert all_values(once) == [[[0, 1], [2, 3]]]
    advice = "strategy.distribute_datasets_from_function(lambda context: make_batches)"
    with pytest.raises(ArgumentError, match=re.escape(advice)):
        list(once)
    again = s2.distribute_datasets_from_function(lambda context: make_batches)
    assert [all_values(again) for _ in range(2)] == [[[[0, 1], [2, 3]]]] * 2


def test_a_loader_may_reuse_its_buffer(s2: dj.MirroredStrategy):
    """Several batches make an element, and each keeps the values that it had when it was yielded."""
    buffer = np.zeros(1024, np.float32)

    def dataset_fn(context: dj.InputContext) -> Iterator[np.ndarray]:
        for i in range(4):
            buffer[:] = i
            yield buffer[: 1024 - i]

    elements = list(s2.distribute_datasets_from_function(dataset_fn))
    buffer[:] = 7
    parts = [[set(np.asarray(v).tolist()) for v in element.values] for element in elements]
    assert parts == [[{0.0}, {1.0}], [{2.0}, {3.0}]]


def counts(dataset: Any) -> list[tuple[int, tuple[int, ...] | None]]:
    return [(element.global_array.shape[0], element.counts) for element in dataset]


@pytest.mark.parametrize(
    ("partial", "expected"),
    [
        ("mask", [(6, None), (6, (2, 3)), (6, (1, 1)), (6, None), (6, (3, 0))]),
        ("shrink", [(6, None), (6, (2, 3)), (2, None), (6, None), (6, (3, 0))]),
        ("drop", [(6, None), (6, None)]),
    ],
)
def test_partial_policies(s2: dj.MirroredStrategy, partial: str, expected: list):
    """mask keeps one shape, shrink that of the longest batch, drop only elements as full as the first."""
    source = [np.ones(n, np.float32) for n in (3, 3, 2, 3, 1, 1, 3, 3, 3)]
    options = dj.InputOptions(partial=partial)
    dataset = s2.distribute_datasets_from_function(lambda context: source, options)
    assert counts(dataset) == expected


def test_elements_without_examples_are_skipped_or_refused(s2: dj.MirroredStrategy):
    """An element without any example is skipped, except under partial="error"."""
    source = [np.ones(n, np.float32) for n in (0, 0, 2, 2)]
    assert counts(s2.distribute_datasets_from_function(lambda context: source)) == [(4, None)]
    options = dj.InputOptions(partial="error")
    with pytest.raises(ArgumentError, match="Element 0 of the dataset has 0, 0 examples"):
        list(s2.distribute_datasets_from_function(lambda context: source, options))


@pytest.mark.parametrize("partial", ["drop", "error"])
def test_a_partial_first_element_is_refused_if_the_others_must_match_it(
    s2: dj.MirroredStrategy, partial: str
):
    """drop and error both refuse it, with the figures of each replica and the remedy."""
    options = dj.InputOptions(partial=partial)
    dataset = s2.distribute_datasets_from_function(lambda context: batches(3, 2), options)
    with pytest.raises(ArgumentError, match=r"has 2, 1 examples.*no batch would be left") as error:
        next(iter(dataset))
    assert "partial='mask'" in str(error.value)


def test_spec_and_cardinality(s2: dj.MirroredStrategy):
    """The spec describes one replica's batch; seven batches make four elements; a generator has no length."""
    dataset = s2.distribute_datasets_from_function(lambda context: batches(14, 2))
    assert dataset.element_spec == jax.ShapeDtypeStruct((2,), jnp.int32)
    assert dataset.cardinality == len(list(dataset)) == 4
    generator = s2.distribute_datasets_from_function(lambda context: iter(batches(14, 2)))
    assert generator.element_spec.shape == (2,)
    assert generator.cardinality is None
    assert len(list(generator)) == 4


@pytest.mark.parametrize(
    ("dataset_fn", "message"),
    [
        ([np.ones(2)], "dataset_fn must be a function"),
        (lambda context: [np.ones(2), np.ones((2, 3))], r"float32\[2,3\], in the first.*32\[2\]"),
        (lambda context: [np.ones((2, 4)), np.ones((2, 3))], r"64\[2,4\] and float64\[2,3\]"),
        (lambda context: [{"x": np.ones(2)}, {"y": np.ones(2)}], "another structure"),
        (lambda context: [np.ones(2), 3], "for replica 1,"),
        (lambda context: [np.ones(2), None], "for replica 1,"),
    ],
)
def test_bad_per_replica_batches_are_named(s2: dj.MirroredStrategy, dataset_fn: Any, message: str):
    """Each ArgumentError names the batch and the rule."""
    with pytest.raises(ArgumentError, match=message):
        list(s2.distribute_datasets_from_function(dataset_fn))


def test_a_policy_that_would_shard_is_refused(s2: dj.MirroredStrategy):
    """Nothing is sharded here; the message names the fields of the context to shard by."""
    with pytest.raises(ArgumentError, match=r"context\.input_pipeline_id"):
        s2.distribute_datasets_from_function(
            lambda context: batches(4, 2), dj.InputOptions(auto_shard_policy="data")
        )
    off = dj.InputOptions(auto_shard_policy="off")
    assert s2.distribute_datasets_from_function(lambda context: batches(4, 2), off).cardinality == 1


def test_per_replica_batches_have_no_state(s2: dj.MirroredStrategy):
    """A position in per-replica batches means nothing on other replicas; state() says what to use."""
    iterator = iter(s2.distribute_datasets_from_function(lambda context: batches(4, 2)))
    with pytest.raises(ArgumentError, match=r"iterator\.state.*distribute_dataset\("):
        iterator.state()
    with pytest.raises(ArgumentError, match=r"iterator\.restore.*distribute_dataset\("):
        iterator.restore({"version": 1})
