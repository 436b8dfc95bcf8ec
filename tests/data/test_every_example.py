"""For any sizes, every example appears exactly once and in order; bad input is refused."""

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from input_helpers import distribute, mesh_of, real_parts

from distribute_jax._errors import ArgumentError
from distribute_jax.data import DistributedDataset, InputOptions
from distribute_jax.data._feed import PerReplicaFeed
from distribute_jax.data.sources import find_source

SIZES = st.integers(0, 9)
REPLICAS = st.sampled_from([1, 2, 3, 4, 8])
POLICIES = st.sampled_from(["auto", "data", "off", "file"])
PARTIAL = st.sampled_from(["mask", "shrink"])
fast = settings(max_examples=30, deadline=None)


def examples(sizes: list[int]) -> list[dict[str, np.ndarray]]:
    """Batches of these sizes, whose examples are numbered consecutively, and their squares."""
    ends = np.cumsum(sizes)
    rows = [np.arange(end - n, end, dtype=np.int32) for n, end in zip(sizes, ends, strict=True)]
    return [{"x": row, "y": np.stack([row, row**2], axis=1).astype(np.float32)} for row in rows]


def elements(source: Any, replicas: int, partial: str, policy: str = "auto") -> list[dict]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return list(distribute(source, replicas, partial, auto_shard_policy=policy))


def column(elements: list[dict], name: str) -> np.ndarray:
    parts = [part for element in elements for part in real_parts(element[name])]
    return np.concatenate(parts) if parts else np.zeros(0)


@fast
@given(
    n=st.integers(0, 40),
    size=st.integers(1, 9),
    replicas=REPLICAS,
    partial=PARTIAL,
    policy=POLICIES,
)
def test_an_epoch_has_each_example_once_and_in_order(
    n: int, size: int, replicas: int, partial: str, policy: str
):
    """mask and shrink neither lose, repeat nor reorder examples by either rule; x and y stay aligned."""
    sizes = [min(size, n - i) for i in range(0, n, size)]
    epoch = elements(examples(sizes), replicas, partial, policy)
    assert column(epoch, "x").tolist() == list(range(n))
    assert column(epoch, "y").tolist() == [[i, i * i] for i in range(n)]


@fast
@given(sizes=st.lists(SIZES, max_size=9), replicas=REPLICAS, partial=PARTIAL)
def test_per_replica_batches_keep_each_example_once_and_in_order(
    sizes: list[int], replicas: int, partial: str
):
    """distribute_datasets_from_function: one dataset, whose batches the replicas take in turn."""
    options = InputOptions(partial=partial)
    feed = PerReplicaFeed([find_source(lambda: examples(sizes))], options, replicas)
    epoch = list(DistributedDataset(feed, mesh=mesh_of(replicas)))
    assert column(epoch, "x").tolist() == list(range(sum(sizes)))


@fast
@given(sizes=st.lists(st.lists(SIZES, max_size=4), min_size=1, max_size=4), partial=PARTIAL)
def test_each_replica_keeps_the_examples_of_its_dataset(sizes: list[list[int]], partial: str):
    """PER_REPLICA: whatever the lengths, each replica sees all of its dataset and nothing else."""
    sources = [find_source(lambda mine=mine: examples(mine)) for mine in sizes]
    feed = PerReplicaFeed(sources, InputOptions(partial=partial), len(sizes))
    epoch = list(DistributedDataset(feed, mesh=mesh_of(len(sizes))))
    for replica, mine in enumerate(sizes):
        parts = [list(real_parts(element["x"]))[replica] for element in epoch]
        assert [int(row) for part in parts for row in part] == list(range(sum(mine)))


@fast
@given(sizes=st.lists(SIZES, max_size=6), replicas=REPLICAS)
def test_padding_is_made_of_real_examples_of_the_same_batch(sizes: list[int], replicas: int):
    """Padded rows hold an example of their own batch, the same one in every leaf."""
    batches = [batch for batch in examples(sizes) if len(batch["x"])]
    for batch, element in zip(batches, elements(batches, replicas, "mask"), strict=True):
        x, y = (np.asarray(element[name].global_array) for name in "xy")
        assert set(x.tolist()) == set(batch["x"].tolist())
        np.testing.assert_array_equal(y, np.stack([x, x**2], axis=1))
        assert element["x"].counts == element["y"].counts


@fast
@given(sizes=st.lists(SIZES, min_size=1, max_size=6), replicas=REPLICAS)
def test_drop_and_error_agree_on_full_batches(sizes: list[int], replicas: int):
    """drop keeps the full batches, unpadded and in order; error raises if there is another one."""
    numbered = examples(sizes)
    first = next((n for n in sizes if n), 0)
    whole = [n > 0 and n >= first and n % replicas == 0 for n in sizes]
    if first % replicas:
        with pytest.raises(ArgumentError, match="no batch would be left"):
            elements(numbered, replicas, "drop")
    else:
        epoch = elements(numbered, replicas, "drop")
        kept = [b["x"] for b, keep in zip(numbered, whole, strict=True) if keep]
        assert [e["x"].counts for e in epoch] == [None] * len(kept)
        assert column(epoch, "x").tolist() == np.concatenate([[], *kept]).tolist()
    if all(whole):
        assert len(elements(numbered, replicas, "error")) == len(sizes)
    else:
        with pytest.raises(ArgumentError, match="partial='error'"):
            elements(numbered, replicas, "error")
