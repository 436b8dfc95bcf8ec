"""The end of an epoch if another process has more data than this one."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from input_helpers import batches, mesh_of, values

import distribute_jax as dj
from distribute_jax.data import DistributedDataset, InputOptions
from distribute_jax.data._element import HostElement
from distribute_jax.data._feed import Feed, GlobalBatches, PerReplicaFeed
from distribute_jax.data.sources import find_source


class TwoMore:
    """Agrees with another process, which has two more steps of data, one of many agreements."""

    def __init__(self) -> None:
        self.lengths: list[int | None] = []

    def steps(self, elements: Iterator[HostElement], length: int | None) -> Iterator[HostElement]:
        self.lengths.append(length)
        for element in elements:
            last = element
            yield element
        for _ in range(2):
            yield dataclasses.replace(last, counts=(0, 0), all_counts=(0, 0))


def feed(kind: str) -> Feed:
    options = InputOptions()
    if kind == "global":
        return GlobalBatches(find_source(batches(7, 4)), options, 2)
    return PerReplicaFeed([find_source(batches(7, 2))], options, 2)


@pytest.mark.parametrize("kind", ["global", "from a function"])
def test_a_process_whose_data_has_ended_continues_with_padding(kind: str):
    """Its shares are empty, in the shapes of the epoch, so nothing is compiled again."""
    ends = TwoMore()
    dataset = DistributedDataset(feed(kind), mesh=mesh_of(2), ends=ends.steps)
    elements = list(dataset)
    expected = [[[0, 1], [2, 3]], [[4, 5], [6]], [[], []], [[], []]]
    assert [values(element) for element in elements] == expected
    assert {element.part_shape for element in elements} == {(2,)}
    assert elements[2].counts == (0, 0)
    assert ends.lengths == [2]


def test_padding_alone_adds_nothing_to_a_step(s2: dj.MirroredStrategy):
    """A masked loss over an element of padding is 0, not NaN, and repeats only real rows."""
    dataset = DistributedDataset(feed("global"), mesh=s2.mesh, ends=TwoMore().steps)
    *_, padding = dataset
    assert set(np.asarray(padding.global_array).tolist()) <= set(range(7))
    assert float(s2.reduce("sum", padding, axis=0)) == 0


def test_the_position_does_not_count_padding():
    """Steps after the end of this process's data do not count for its position."""
    ends = TwoMore()
    source = find_source(dj.data.from_arrays(np.arange(7)).batch(4))
    fed = GlobalBatches(source, InputOptions(), 2)
    dataset = DistributedDataset(fed, mesh=mesh_of(2), ends=ends.steps)
    iterator = iter(dataset)
    next(iterator)
    saved = iterator.state()
    assert [next(iterator).counts for _ in range(3)] == [(2, 1), (0, 0), (0, 0)]
    assert iterator.state()["position"] == 2
    iterator.restore(saved)
    assert len(list(iterator)) == 3
    assert ends.lengths == [2, 1]
