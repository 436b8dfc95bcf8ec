"""Padding: what short shares are filled with, and how it is replaced to find leaks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from input_helpers import mesh_of, values

from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import split_sharding
from distribute_jax._padding import (
    _replacer,
    is_real,
    other_paddings,
    padded_rows,
    rows_to_joined,
    uneven_to_joined,
)
from distribute_jax._values import Layout, PerReplica


@pytest.mark.parametrize(
    ("counts", "share", "rows"),
    [
        ((2, 1), 2, [0, 1, 2, 2]),
        ((1, 1), 3, [0, 0, 0, 1, 1, 1]),
        ((2, 0), 2, [0, 1, 1, 1]),  # an empty share borrows the last row before it
        ((0, 2), 2, [0, 0, 0, 1]),  # or the first row, where none is before it
        ((1, 0, 2), 2, [0, 0, 0, 0, 1, 2]),
    ],
)
def test_padding_repeats_real_rows(counts: tuple[int, ...], share: int, rows: Any):
    """A short share repeats its own last row, and an empty one a neighbour's."""
    assert padded_rows(counts, share).tolist() == rows


@pytest.mark.parametrize("in_scope", [False, True])
def test_uneven_parts_become_one_padded_batch(in_scope: bool):
    """Parts of different lengths, also empty ones, are returned exactly by .values."""
    mesh = mesh_of(4)
    parts = [
        jax.device_put(np.arange(n, dtype=np.float32) + 10 * n, mesh.devices[i])
        for i, n in enumerate((0, 3, 2, 0))
    ]
    with jax.set_mesh(mesh if in_scope else None):
        joined = uneven_to_joined(parts, mesh)
    assert joined.counts == (0, 3, 2, 0)
    assert joined.layout is Layout.JOINED
    assert joined.global_array.shape == (12,)
    assert joined.global_array.sharding == split_sharding(mesh)
    assert values(joined) == [[], [30, 31, 32], [20, 21], []]
    assert set(np.asarray(joined.global_array).tolist()) == {20, 21, 30, 31, 32}


def test_parts_on_their_devices_are_not_copied():
    """Parts of equal length, each on the device of its replica, are joined without padding or counts."""
    mesh = mesh_of(2)
    parts = [jax.device_put(jnp.ones((2, 3)) * i, mesh.devices[i]) for i in range(2)]
    joined = uneven_to_joined(parts, mesh)
    assert joined.counts is None
    shards = joined.global_array.addressable_shards
    assert [s.data.unsafe_buffer_pointer() for s in shards] == [
        part.unsafe_buffer_pointer() for part in parts
    ]


def test_replicas_of_two_devices_each_get_a_copy():
    """With a second mesh axis, every device of a replica holds the replica's part."""
    devices = np.asarray(jax.devices()[:4]).reshape(2, 2)
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.sharding.Mesh(devices, ("data", "model"), axis_types=kinds)
    joined = uneven_to_joined([jnp.asarray([1.0]), jnp.asarray([2.0, 3.0])], mesh)
    parts = {s.device: s.data.tolist() for s in joined.global_array.addressable_shards}
    assert [parts[device] for device in devices.ravel()] == [[1, 1]] * 2 + [[2, 3]] * 2


@pytest.mark.parametrize(
    "parts",
    [
        [jnp.ones((1, 2)), jnp.ones((1, 3))],
        [jnp.ones(1), jnp.ones(1, jnp.int32)],
        [jnp.ones(()), jnp.ones(())],
        [jnp.ones(2)],
    ],
    ids=["other dims", "dtypes", "no dims", "too few"],
)
def test_parts_that_differ_in_more_than_length_are_refused(parts: list[jax.Array]):
    """The message lists every part with its shape, says the rule, and what to do."""
    with pytest.raises(ArgumentError, match="do not make one batch") as error:
        uneven_to_joined(parts, mesh_of(2))
    for i in range(len(parts)):
        assert f"replica {i}: " in str(error.value)
    assert "only dim 0" in str(error.value)


def padded_batch(rows: Any, counts: tuple[int, ...]) -> PerReplica:
    mesh = mesh_of(len(counts))
    parts = np.split(np.asarray(rows), np.cumsum(counts)[:-1])
    longest = max(counts) + 1
    whole = np.concatenate(parts)[padded_rows(counts, longest)]
    array = jax.device_put(whole, split_sharding(mesh))
    return PerReplica(array, mesh, layout=Layout.JOINED, counts=counts)


ROWS = {
    "floats": np.array([[1.5, 0.0], [2.5, 1.0], [0.0, 0.0]], np.float32),
    "equal floats": np.full((3, 2), 3, np.float32),
    "zeros": np.zeros((3, 2), np.float32),
    "infinities": np.full((3, 2), np.inf, np.float32),
    "bfloat16": np.array([1, 1, 2], jnp.bfloat16),
    "complex": np.array([1j, 0, 2], np.complex64),
    "large integers": np.array([2**31 - 1] * 3, np.int32),
    "labels": np.array([0, 0, 7], np.uint8),
    "bools": np.array([True, True, False]),
    "equal bools": np.array([True, True, True]),
    "one row": np.array([[4, 0]], np.int32),
    "one float row": np.array([[4, 0]], np.float32),
}


@pytest.mark.parametrize("name", ROWS)
def test_other_paddings_change_only_padding(name: str):
    """Real rows keep their bits, each padded row changes in one of the two, and all values are plausible."""
    rows = ROWS[name]
    counts = (2, 1, 0, 0) if len(rows) == 3 else (1, 0, 0, 0)
    batch = padded_batch(rows, counts)
    real = is_real(counts, batch.part_shape[0])
    old = np.asarray(batch.global_array)
    differs = np.zeros(len(old), bool)
    for (changed,) in other_paddings([batch]):
        new = np.asarray(changed.global_array)
        assert changed.counts == counts
        assert changed.global_array.sharding == batch.global_array.sharding
        np.testing.assert_array_equal(new[real], old[real])
        differs |= (new != old).reshape(len(new), -1).any(axis=1)
        allowed = {*rows.ravel().tolist(), *(rows / 2).ravel().tolist(), 0, 1, 0.5}
        assert set(new.ravel().tolist()) <= allowed
    first_is_unlike_last = (rows[0] != rows[-1]).any()
    assert (
        differs[~real].all() if first_is_unlike_last or (rows == rows[0]).all() else differs.any()
    )
    assert not differs[real].any()


def test_other_paddings_use_complete_examples():
    """Image and label of a padded row come from the same real example: the first, then the last."""
    images = np.array([[10.0], [20], [30], [40], [50]], np.float32)
    labels = np.array([1, 2, 3, 4, 5], np.int32)
    batch = [padded_batch(leaf, (2, 2, 1, 0)) for leaf in (images, labels)]
    padding = ~is_real((2, 2, 1, 0), 3)
    for changed, expected in zip(other_paddings(batch), (1, 5), strict=True):
        image, label = (np.asarray(leaf.global_array) for leaf in changed)
        np.testing.assert_array_equal(image[:, 0], label * 10)
        assert set(label[padding].tolist()) == {expected}


def test_returned_rows_become_a_batch_again():
    """Stacked shares become one array divided over the replicas, with the same real rows."""
    batch = padded_batch(np.arange(5.0, dtype=np.float32), (2, 2, 1, 0))
    stacked = PerReplica(batch.global_array.reshape(4, -1), batch.mesh, counts=batch.counts)
    joined = rows_to_joined(stacked)
    assert (joined.layout, joined.counts) == (Layout.JOINED, batch.counts)
    assert joined.global_array.sharding == batch.global_array.sharding
    np.testing.assert_array_equal(joined.global_array, batch.global_array)


def test_other_padding_is_the_same_every_time_and_compiles_once():
    """Two calls agree, and batches with other remainders use the same compiled function."""
    mesh = mesh_of(2)
    _replacer.cache_clear()
    batch = padded_batch(np.arange(4.0, dtype=np.float32), (2, 2))
    (once,), (again,) = (next(other_paddings([batch])) for _ in range(2))
    np.testing.assert_array_equal(once.global_array, again.global_array)
    other = PerReplica(batch.global_array, mesh, layout=Layout.JOINED, counts=(2, 1))
    list(other_paddings([other]))
    assert _replacer(mesh)._cache_size() == 1


def test_leaves_of_different_shares_are_changed_together():
    """Two batches of one call may be padded to different lengths; a full leaf between them stays."""
    short = padded_batch(np.array([1, 2, 3]), (2, 1))
    long = uneven_to_joined([jnp.arange(1), jnp.arange(4)], mesh_of(2))
    full = PerReplica(jnp.ones(4), mesh_of(2), layout=Layout.JOINED)
    first, last = other_paddings([short, full, long])
    assert first[1] is last[1] is full
    for i, old in ((0, short), (2, long)):
        real = is_real(old.counts, old.part_shape[0])
        equal = [
            np.asarray(new[i].global_array) == np.asarray(old.global_array) for new in (first, last)
        ]
        assert (equal[0] & equal[1]).tolist() == real.tolist()


def test_leaves_without_padding_are_not_touched():
    """A full batch has no padding to replace: the same objects come back."""
    full = PerReplica(jnp.ones(4), mesh_of(2), layout=Layout.JOINED)
    assert [changed[0] is full for changed in other_paddings([full])] == [True, True]
    assert list(other_paddings([])) == [[], []]
