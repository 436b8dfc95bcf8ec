"""Packing: TensorFlow's groups by size, about equal cuts, and the arrays back as they were."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from distribute_jax.collectives._all_reduce import cuts, groups_by_size, sum_packed


@pytest.mark.parametrize(
    ("sizes", "limit", "wanted"),
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
def test_a_pack_is_closed_once_it_holds_more_than_the_limit(
    sizes: list[int], limit: int, wanted: list[list[int]]
):
    """Sizes in elements of four bytes, as in TensorFlow's rule."""
    groups = groups_by_size([4 * size for size in sizes], limit)
    assert [[sizes[i] for i in group] for group in groups] == wanted
    assert [i for group in groups for i in group] == list(range(len(sizes)))


@pytest.mark.parametrize(
    ("size", "pieces", "wanted"),
    [
        (10, 1, []),
        (10, 2, [5]),
        (10, 3, [3, 6]),
        (2, 5, [1]),
        (0, 3, []),
        (7, 7, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_a_vector_is_cut_into_equal_pieces_and_the_last_takes_the_rest(
    size: int, pieces: int, wanted: list[int]
):
    assert cuts(size, pieces) == wanted


@pytest.mark.exhaustive
@pytest.mark.parametrize("packs", [0, 1, 2, 3, 50])
@pytest.mark.parametrize("limit", [0, 1, 16, 1000])
def test_what_was_packed_comes_back_in_its_shape_dtype_and_order(packs: int, limit: int):
    arrays = [
        jnp.arange(6.0).reshape(2, 3),
        jnp.arange(3, dtype=jnp.int32),
        jnp.zeros((0, 2)),
        jnp.float32(7),
        jnp.arange(4, dtype=jnp.bfloat16),
        jnp.arange(5, dtype=jnp.int32)[:, None],
    ]
    seen = []

    def double(array: Any) -> Any:
        seen.append(array)
        return array + array

    result = sum_packed(arrays, double, num_packs=packs, bytes_per_pack=limit)
    for array, total in zip(arrays, result, strict=True):
        assert total.dtype == array.dtype
        np.testing.assert_array_equal(np.float32(total), 2 * np.float32(array))
    assert sum(array.size for array in seen) == sum(array.size for array in arrays)
