"""CommunicationOptions: TensorFlow's defaults, validation and merge; how arrays are packed by size."""

from __future__ import annotations

from typing import Any

import pytest

import distribute_jax as dj
from distribute_jax.collectives._all_reduce import groups_by_size, split_points

Options = dj.experimental.CommunicationOptions
Implementation = dj.experimental.CommunicationImplementation


def test_the_defaults_and_the_order_of_arguments_are_those_of_tensorflow():
    assert Options() == Options(0, None, Implementation.AUTO)
    assert [i.value for i in Implementation] == ["AUTO", "RING", "NCCL"]
    assert dj.experimental.CollectiveCommunication is Implementation


@pytest.mark.parametrize("name", ["ring", "RING", "Ring", Implementation.RING])
def test_an_implementation_is_accepted_by_name_in_any_letter_case(name: Any):
    assert Options(implementation=name).implementation is Implementation.RING


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bytes_per_pack": -1}, r"bytes_per_pack\) must be an integer >= 0; got -1"),
        ({"timeout_seconds": -0.1}, r"timeout_seconds\) must be a number >= 0.*; got -0\.1"),
        ({"timeout_seconds": float("nan")}, r"timeout_seconds\) must be a number >= 0.*; got nan"),
        ({"timeout_seconds": "2"}, "timeout_seconds must be None or a number; got '2'"),
        ({"implementation": "gloo"}, r"implementation\).*'auto', 'ring', 'nccl'.*got 'gloo'"),
    ],
)
def test_values_out_of_range_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Options(**arguments)


def test_merge_overrides_by_values_that_are_not_the_default():
    base = Options(bytes_per_pack=8, timeout_seconds=5.0, implementation="ring")
    assert base.merge(None) == base
    assert base.merge(Options()) == base
    assert base.merge(Options(bytes_per_pack=2)) == Options(2, 5.0, "ring")
    assert base.merge(Options(timeout_seconds=0)) == Options(8, 0, "ring")
    assert base.merge(Options(implementation="nccl")) == Options(8, 5.0, "nccl")
    assert Options().merge(base) == base
    with pytest.raises(ValueError, match=r"merge: options must be .* got 3"):
        base.merge(3)


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ([2, 2, 4, 1, 3], 16, [[2, 2, 4], [1, 3]]),  # 16 bytes held do not close a pack, 32 do
        ([4, 4, 4], 16, [[4, 4], [4]]),
        ([1, 1, 1, 1], 4, [[1, 1], [1, 1]]),
        ([1, 1, 1, 1], 1, [[1], [1], [1], [1]]),
        ([1, 1, 1, 1], 0, [[1, 1, 1, 1]]),  # no limit
        ([9], 4, [[9]]),  # never cut
        ([], 4, []),
    ],
)
def test_a_pack_is_closed_once_it_exceeds_the_limit(
    sizes: list[int], limit: int, expected: list[list[int]]
):
    """Sizes in elements of four bytes, as in TensorFlow's rule."""
    groups = groups_by_size([4 * size for size in sizes], limit)
    assert [[sizes[i] for i in group] for group in groups] == expected
    assert [i for group in groups for i in group] == list(range(len(sizes)))


@pytest.mark.parametrize(
    ("size", "pieces", "expected"),
    [
        (10, 1, []),
        (10, 2, [5]),
        (10, 3, [3, 6]),
        (2, 5, [1]),
        (0, 3, []),
        (7, 7, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_a_vector_is_split_into_equal_pieces_and_the_last_takes_the_rest(
    size: int, pieces: int, expected: list[int]
):
    assert split_points(size, pieces) == expected
