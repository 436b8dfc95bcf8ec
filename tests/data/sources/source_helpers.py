"""Checks that every source must pass, under the strategy of the ``strategy`` fixture."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest

import distribute_jax as dj


@jax.tree_util.register_dataclass
@dataclass
class Pair:
    """A container that a user registers."""

    left: Any
    right: Any


def real_rows(element: Any) -> Any:
    """The element with one NumPy array at each leaf: the real examples of all replicas, in order."""

    def join(leaf: dj.PerReplica) -> np.ndarray:
        whole = np.asarray(leaf.global_array)
        if leaf.counts is None:
            return whole
        parts = np.split(whole, len(leaf.counts))
        return np.concatenate([part[:n] for part, n in zip(parts, leaf.counts, strict=True)])

    return jax.tree.map(join, element, is_leaf=lambda leaf: isinstance(leaf, dj.PerReplica))


def epoch_of(dataset: Iterable[Any]) -> list[Any]:
    """One epoch of a distributed dataset, as the user's batches."""
    with warnings.catch_warnings():
        # Batches of four or five leave some of eight replicas idle, which is as good a test.
        warnings.filterwarnings("ignore", "The global batch has [45] examples")
        return [real_rows(element) for element in dataset]


def assert_same(got: list[Any], expected: list[Any]) -> None:
    """The batches have the expected structures, dtypes (32 bits for 64) and values."""
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert jax.tree.structure(one) == jax.tree.structure(other)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            b = np.asarray(b)
            assert a.dtype == jax.dtypes.canonicalize_dtype(b.dtype)
            np.testing.assert_array_equal(a, b.astype(a.dtype))


def assert_two_epochs(strategy: dj.Strategy, source: Any, expected: list[Any]) -> None:
    """Two epochs yield the expected batches, under each policy for the partial one."""
    dataset = strategy.distribute_dataset(source)
    for _ in range(2):
        assert_same(epoch_of(dataset), expected)
    sizes = [len(jax.tree.leaves(batch)[0]) for batch in expected]
    is_whole = [n == sizes[0] and n % strategy.num_replicas_in_sync == 0 for n in sizes]
    assert not all(is_whole)

    def by(partial: str) -> list[Any]:
        return epoch_of(strategy.distribute_dataset(source, dj.InputOptions(partial=partial)))

    assert_same(by("shrink"), expected)
    with pytest.raises(dj.ArgumentError, match="partial='error'"):
        by("error")
    if any(is_whole):
        assert_same(by("drop"), [one for one, keep in zip(expected, is_whole, strict=True) if keep])
    else:
        with pytest.raises(dj.ArgumentError, match="no batch would be left"):
            by("drop")


def cut(tree: Any, size: int) -> list[Any]:
    """The rows of a tree of arrays in batches, the last one partial."""
    n = len(jax.tree.leaves(tree)[0])
    return [jax.tree.map(lambda leaf, i=i: leaf[i : i + size], tree) for i in range(0, n, size)]
