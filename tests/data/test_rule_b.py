"""Datasets of one process under OFF: TensorFlow's rule B, with every partial policy."""

import pytest
from input_helpers import all_values, batches, distribute

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
