"""Packing: TensorFlow's groups by size, pieces of about equal size, and unpacking."""

from __future__ import annotations

import pytest

from distribute_jax.collectives._all_reduce import groups_by_size, split_points


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
