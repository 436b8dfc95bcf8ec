"""Datasets of one process under OFF: TensorFlow's rule B, with every partial policy."""

import numpy as np
import pytest
from input_helpers import all_values, batches, distribute

from distribute_jax._errors import ArgumentError

OFF = {"auto_shard_policy": "off"}


@pytest.mark.parametrize("policy", ["off", "file"])
def test_partial_batches_fill_the_schedule_of_full_ones(policy: str):
    """Acceptance 87: OFF and FILE end with [8, 9] on the first replica; AUTO and DATA spread them."""
    full = [[0, 1], [2, 3], [4, 5], [6, 7]]
    dataset = distribute(batches(10, 8), 4, auto_shard_policy=policy)
    assert all_values(dataset) == [full, [[8, 9], [], [], []]]
    for spread in ("auto", "data"):
        dataset = distribute(batches(10, 8), 4, auto_shard_policy=spread)
        assert all_values(dataset) == [full, [[8], [9], [], []]]


@pytest.mark.parametrize("partial", ["mask", "shrink"])
def test_a_full_batch_that_does_not_divide_has_shares_that_differ_by_one(partial: str):
    """Acceptance 87: a batch of 6 on four replicas is [2, 2, 1, 1], padded to shares of 2."""
    (element,) = distribute(batches(6, 6), 4, partial, **OFF)
    assert element.counts == (2, 2, 1, 1)
    assert element.part_shape == (2,)
    assert [value.tolist() for value in element.values] == [[0, 1], [2, 3], [4], [5]]


def shapes(dataset: object) -> list[tuple[int, tuple[int, ...] | None]]:
    return [(element.global_array.shape[0], element.counts) for element in dataset]


def test_mask_keeps_one_shape():
    """Every element has the shape of the first; only full ones have no counts."""
    source = [np.ones(n, np.float32) for n in (8, 7, 2, 8)]
    assert shapes(distribute(source, 4, "mask", **OFF)) == [
        (8, None),
        (8, (2, 2, 2, 1)),
        (8, (2, 0, 0, 0)),
        (8, None),
    ]


def test_shrink_pads_to_the_longest_scheduled_share():
    """A batch of one needs shares of one, a batch of two the scheduled two."""
    source = [np.ones(n, np.float32) for n in (8, 1, 2)]
    assert shapes(distribute(source, 4, "shrink", **OFF)) == [
        (8, None),
        (4, (1, 0, 0, 0)),
        (8, (2, 0, 0, 0)),
    ]


def test_drop_and_error_ask_for_whole_batches_as_under_rule_a():
    """A batch is whole where it is as large as the first one and divides; the rule is no matter."""
    source = [np.ones(n, np.float32) for n in (8, 4, 8)]
    assert shapes(distribute(source, 4, "drop", **OFF)) == [(8, None), (8, None)]
    with pytest.raises(ArgumentError, match="Batch 1 of the dataset has 4 examples"):
        list(distribute(source, 4, "error", **OFF))
