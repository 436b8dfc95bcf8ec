"""``dj.data.from_arrays``: structure, order, seeking and errors."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from source_helpers import Pair, assert_two_epochs, cut, epoch_of

import distribute_jax as dj
from distribute_jax.data.sources import find_source

X = np.arange(22, dtype=np.float32).reshape(11, 2)
NEST = {
    "image": (X, X[:, 0].astype(np.float16)),
    "label": Pair(np.arange(11, dtype=np.int8), None),
    "mask": [np.arange(11) % 2 == 0, {"wide": np.arange(11)}],
    "jax": jnp.arange(11, dtype=jnp.bfloat16),
}


def test_any_nest_of_arrays_keeps_its_structure_dtypes_and_values(strategy):
    """Dicts, tuples, lists, a dataclass, None, six dtypes and a JAX array, the last batch partial."""
    assert_two_epochs(strategy, dj.data.from_arrays(NEST).batch(4), cut(NEST, 4))


def test_the_order_is_the_same_on_any_number_of_devices_and_new_in_each_epoch(strategy):
    """Each epoch has all rows once; no version may change the order of a seed."""
    dataset = strategy.distribute_dataset(
        dj.data.from_arrays(np.arange(10)).shuffle(seed=3).batch(4)
    )
    epochs = [np.concatenate(epoch_of(dataset)).tolist() for _ in range(3)]
    assert epochs[0] == [6, 1, 8, 5, 2, 7, 9, 4, 3, 0]
    assert epochs[1] == [9, 7, 8, 3, 5, 6, 4, 0, 2, 1]
    assert sorted(epochs[2]) == list(range(10))


def rows(batches: Iterable[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def numbers(n: int = 5) -> dj.data.ArrayDataset:
    return dj.data.from_arrays(np.arange(n))


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (numbers().batch(2), [[0, 1], [2, 3], [4]]),
        (numbers().batch(2, drop_remainder=True), [[0, 1], [2, 3]]),
        (numbers().repeat(2).batch(4), [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4]]),
        (numbers().batch(4).repeat(2), [[0, 1, 2, 3], [4], [0, 1, 2, 3], [4]]),
        (numbers().map(lambda row: row * 10).batch(3), [[0, 10, 20], [30, 40]]),
        (numbers().batch(3).map(lambda batch: batch * 10), [[0, 10, 20], [30, 40]]),
        (numbers(1).batch(4).repeat(3), [[0], [0], [0]]),
        (numbers(3).repeat(2).repeat(2).batch(12), [[0, 1, 2] * 4]),
    ],
)
def test_batch_repeat_and_map_in_either_order(dataset, expected):
    """As in tf.data: repeat before batch fills batches across passes; map applies to examples or batches."""
    assert rows(dataset) == expected
    assert len(dataset) == len(expected)


PIPELINES = {
    "plain": numbers(7).batch(3),
    "shuffled": numbers(7).shuffle(seed=1).batch(3),
    "repeated rows": numbers(7).shuffle(seed=1).repeat(2).batch(3),
    "repeated batches": numbers(7).shuffle(seed=1).batch(3).repeat(2),
    "shuffled batches": numbers(7).batch(3).shuffle(seed=1),
    "mapped rows": numbers(7).shuffle(seed=1).map(lambda row: row + 1).batch(3),
    "mapped batches": numbers(7).shuffle(seed=1).batch(3).map(lambda batch: batch + 1),
    "dropped": numbers(7).shuffle(seed=1).batch(3, drop_remainder=True),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_any_position_of_any_epoch_can_be_reached(name):
    """From (epoch, position) on, the batches are those of an uninterrupted run."""
    source = find_source(PIPELINES[name])
    assert source.can_resume
    epochs = [rows(source.open(epoch)) for epoch in range(3)]
    assert [len(epoch) for epoch in epochs] == [source.length] * 3
    for epoch, position in ((2, 0), (0, 1), (1, source.length - 1), (1, source.length)):
        again = find_source(PIPELINES[name])
        assert rows(again.open(epoch, position)) == epochs[epoch][position:]


@pytest.mark.parametrize("when", ["before batch", "after batch"])
def test_an_endless_dataset_is_reshuffled_in_every_pass_and_resumes(when):
    """It has no length and is infinite; every pass has every row."""
    dataset = numbers().shuffle(seed=0)
    dataset = dataset.repeat().batch(5) if when == "before batch" else dataset.batch(5).repeat()
    source = find_source(dataset)
    assert source.is_infinite
    assert source.length is None
    passes = [batch.tolist() for batch in islice(source.open(), 6)]
    assert all(sorted(one) == [0, 1, 2, 3, 4] for one in passes)
    assert len({tuple(one) for one in passes}) > 1
    assert next(find_source(dataset).open(0, 4)).tolist() == passes[4]
    assert sorted(next(source.open()).tolist()) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="repeated without end"):
        dataset.repeat(2)


def test_consecutive_rows_are_not_copied():
    """Without shuffling a batch is a view of the user's array."""
    (batch,) = dj.data.from_arrays(X).batch(11)
    assert np.shares_memory(batch, X)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"x": np.ones(3), "y": np.ones(4)}, r"different length[\s\S]*arrays\['y'\]: float64\[4\]"),
        ({"x": np.ones(3), "y": np.float32(1)}, r"arrays\['y'\]: float32\[\]"),
        ({"x": [1, 2, 3]}, r"arrays\['x'\]\[0\]: int 1[\s\S]*np.asarray"),
        ({"x": np.ones((0, 2))}, r"without any example[\s\S]*arrays\['x'\]: float64\[0,2\]"),
        ({}, "no arrays"),
        (None, "no arrays"),
        ({"k": jax.random.split(jax.random.key(0), 3)}, r"arrays\['k'\]"),
    ],
    ids=["lengths", "scalar", "list", "empty", "no leaf", "None", "keys"],
)
def test_trees_that_are_not_a_table_are_refused(tree, message):
    """Different lengths, leaves without rows, and no rows at all: each error names the leaf."""
    with pytest.raises(dj.ArgumentError, match=message):
        dj.data.from_arrays(tree)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: d.batch(0), r"batch\(size\) must be an integer >= 1; got 0"),
        (lambda d: d.batch(2.5), "batch: size must be an integer; got 2.5"),
        (lambda d: d.batch(True), r"batch\(size\).* got True"),
        (lambda d: d.batch(8, drop_remainder=True), "would leave no batch of 5"),
        (lambda d: d.batch(2).batch(2), "already batched"),
        (lambda d: d.repeat(0), r"repeat\(n\).* got 0"),
        (lambda d: d.shuffle(seed=-1), r"shuffle\(seed\).* got -1"),
        (lambda d: d.shuffle(0), r"shuffle\(buffer_size\).* got 0"),
        (lambda d: d.shuffle(seed=2**32), "< 4294967296"),
        (lambda d: d.repeat().batch(2).shuffle(), "Shuffle first"),
        (lambda d: d.map(3), "map: fn must be a function; got 3"),
        (lambda d: list(d.map(lambda row: None).batch(2)), "returned None"),
        (lambda d: list(d.batch(2).map(lambda batch: None)), "returned None"),
        (lambda d: list(d.map(lambda i: np.ones(i)).batch(2)), "example: float64.0. and float64.1"),
        (lambda d: list(d.map(lambda i: {"a" * int(i): i}).batch(2)), "different structures"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    """Each is a ValueError that shows the call."""
    with pytest.raises(ValueError, match=message):
        call(numbers())


def test_distributing_an_unbatched_dataset_is_refused(s2):
    """The message says to batch."""
    with pytest.raises(ValueError, match=r"strategy.distribute_dataset got.*\.batch\(256\)"):
        s2.distribute_dataset(numbers())
    with pytest.raises(ValueError, match="A function of map after batch takes and returns whole"):
        next(iter(s2.distribute_dataset(numbers().batch(2).map(np.sum))))


def test_distributing_masked_arrays_is_refused(s2):
    """from_arrays accepts them, since map may fill them."""
    masked = np.ma.masked_array([1, 2], [True, False])
    dataset = s2.distribute_dataset(dj.data.from_arrays({"x": masked}).shuffle(seed=0).batch(2))
    with pytest.raises(dj.ArgumentError, match=r"batch\['x'\]"):
        next(iter(dataset))


def test_the_positional_argument_of_shuffle_is_the_buffer_size_as_in_tf_data():
    """All examples are in memory, so any size shuffles all of them; the seed is keyword-only."""
    orders = [[int(row) for row in numbers(99).shuffle(*size)] for size in ((), (1,), (1000,))]
    assert orders[0] == orders[1] == orders[2] != list(range(99))
    assert orders[0] != [int(row) for row in numbers(99).shuffle(1000, seed=1)]
    with pytest.raises(TypeError):
        numbers(99).shuffle(1000, 1)  # type: ignore[misc]


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(1, 30),
    size=st.integers(1, 12),
    passes=st.integers(1, 3),
    seed=st.none() | st.integers(0, 2**32 - 1),
    before=st.booleans(),
    data=st.data(),
)
def test_every_row_appears_once_in_a_pass_from_any_position(n, size, passes, seed, before, data):
    """For any lengths, sizes, seeds and repetitions: complete epochs, and the rest from any position."""
    dataset = numbers(n) if seed is None else numbers(n).shuffle(seed=seed)
    dataset = dataset.repeat(passes).batch(size) if before else dataset.batch(size).repeat(passes)
    source = find_source(dataset)
    first, second = rows(source.open(0)), rows(source.open(1))
    for epoch in (first, second):
        assert len(epoch) == source.length
        flat = [row for batch in epoch for row in batch]
        for start in range(0, n * passes, n):
            one = flat[start : start + n]
            assert one == list(range(n)) if seed is None else sorted(one) == list(range(n))
    position = data.draw(st.integers(0, source.length))
    assert rows(find_source(dataset).open(1, position)) == second[position:]
