"""Grain's MapDataset, IterDataset and DataLoader."""

import time
from typing import Any

import grain
import numpy as np
import pytest
from source_helpers import Pair, assert_two_epochs, cut

from distribute_jax.data.sources import find_source

N = np.arange(11, dtype=np.int32)


def example(i: int) -> Any:
    return {"x": (N[i], N[i] / np.float32(2)), "pair": Pair(N[i] > 3, None)}


TABLE = {"x": (N, N / np.float32(2)), "pair": Pair(N > 3, None)}


def make(kind: str, operations: Any = ()) -> Any:
    """Eleven examples in batches of four."""
    if kind == "MapDataset":
        return grain.MapDataset.range(11).map(example).batch(4)
    if kind == "IterDataset":
        return grain.MapDataset.range(11).map(example).to_iter_dataset().batch(4)
    return grain.DataLoader(
        data_source=[example(i) for i in range(11)],
        sampler=grain.samplers.SequentialSampler(11),
        operations=[grain.transforms.Batch(4)],
        shard_options=grain.sharding.NoSharding(),
    )


KINDS = ["MapDataset", "IterDataset", "DataLoader"]


@pytest.mark.parametrize("kind", KINDS)
def test_batches_keep_structure_order_and_values(strategy, kind):
    """A dataclass, a tuple, None, three dtypes, and the partial last batch, in two epochs."""
    assert_two_epochs(strategy, make(kind), cut(TABLE, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_resumes_anywhere(kind):
    """open yields what an uninterrupted epoch yields from there."""
    source = find_source(make(kind))
    whole = [batch["x"][0].tolist() for batch in source.open()]
    assert source.can_resume
    for position in range(4):
        resumed = source.open(0, position)
        assert [batch["x"][0].tolist() for batch in resumed] == whole[position:]


def test_a_map_dataset_is_shuffled_again_in_each_epoch():
    """Epoch e is what Grain gives in the e-th pass of the repeated dataset, from any position."""
    dataset = grain.MapDataset.range(11).shuffle(7).batch(4)
    expected = [batch.tolist() for batch in dataset.repeat(3)]
    source = find_source(dataset)
    got = [batch.tolist() for epoch in range(3) for batch in source.open(epoch)]
    assert got == expected
    assert got[:3] != got[3:6]
    assert [batch.tolist() for batch in source.open(1, 2)] == expected[5:6]
    assert source.length == 3


def test_filtered_elements_do_not_count_as_batches():
    """A filter after batch removes batches: the position counts the remaining ones."""
    source = find_source(grain.MapDataset.range(8).batch(2).filter(lambda batch: batch[0] != 2))
    assert [batch.tolist() for batch in source.open(0, 1)] == [[4, 5], [6, 7]]
    assert [batch.tolist() for batch in source.open(1, 2)] == [[6, 7]]
    assert source.length is None


def test_an_endless_dataset_is_recognised():
    """repeat() without a number, before batch: infinite, and it can be resumed."""
    source = find_source(grain.MapDataset.range(4).repeat().batch(3))
    assert source.is_infinite
    assert source.length is None
    assert next(source.open(0, 2)).tolist() == [2, 3, 0]
    assert next(source.open()).tolist() == [0, 1, 2]


def test_only_a_few_batches_are_read_ahead():
    """Grain's default is 500."""
    read = []
    dataset = grain.MapDataset.range(1000).batch(1).map(lambda batch: read.append(1) or batch)
    batches = find_source(dataset).open()
    next(batches)
    time.sleep(0.2)
    assert 1 <= len(read) < 20


def test_leaving_the_loop_closes_grains_iterator():
    """Its threads and processes end at once, not at garbage collection."""
    made, closed = [], []

    class Numbers(grain.DatasetIterator):
        def __next__(self):
            return np.arange(2)

        def get_state(self):
            return {}

        def set_state(self, state):
            pass

        def close(self):
            closed.append(True)

    class Endless(grain.IterDataset):
        def __iter__(self):
            made.append(Numbers())
            return made[-1]

    batches = find_source(Endless()).open()
    next(batches)
    assert closed == []
    batches.close()
    assert closed


def test_an_unbatched_dataset_says_to_batch(s2):
    """Grain does not know the shapes of its elements; the message names the kind of the source."""
    examples = grain.MapDataset.range(4)
    loader = grain.DataLoader(data_source=examples, sampler=grain.samplers.SequentialSampler(4))
    for source, remedy in [
        (examples, r"Call \.batch\(256\) on this grain\.MapDataset"),
        (examples.to_iter_dataset(), r"Call \.batch\(256\) on this Grain \w*IterDataset"),
        (loader, r"Add grain\.transforms\.Batch\(256\) to the operations of this Grain DataLoader"),
    ]:
        with pytest.raises(ValueError, match=remedy):
            next(iter(s2.distribute_dataset(source)))
