"""Into how many parts servers divide a variable."""

from __future__ import annotations

import pytest

import distribute_jax as dj

P = dj.experimental.partitioners
CASES = [
    (P.FixedShardsPartitioner(5), {(13, 2): [5, 1], (3, 2): [3, 1], (7,): [5], (): []}),
    (P.FixedShardsPartitioner(4), {(10, 3): [4, 1]}),
    (P.MinSizePartitioner(4, 2), {(6, 1): [2, 1]}),
    (P.MinSizePartitioner(4, 10), {(6, 1): [6, 1]}),
    (P.MinSizePartitioner(8, 10), {(6, 1): [3, 1]}),
    (P.MinSizePartitioner(256 << 10, 4), {(6, 1): [1, 1]}),
    (P.MinSizePartitioner(max_shards=8), {(1024, 1024): [8, 1]}),
    (P.MinSizePartitioner(1024, 16), {(100, 8): [3, 1]}),
    (P.MinSizePartitioner(12, 9), {(5, 2): [2, 1], (13, 2): [6, 1]}),
    (P.MaxSizePartitioner(4), {(6, 1): [6, 1]}),
    (P.MaxSizePartitioner(4, 2), {(6, 1): [2, 1]}),
    (P.MaxSizePartitioner(12), {(6, 1): [2, 1]}),
    (P.MaxSizePartitioner(1024), {(6, 1): [1, 1]}),
    (P.MaxSizePartitioner(100), {(13, 5): [3, 1]}),
    (P.MaxSizePartitioner(1), {(13, 5): [13, 1]}),
]


def test_partitioners_divide_as_tensorflow_does() -> None:
    """The number of parts by number, least and greatest size; a string counts so many bytes."""
    for partitioner, wanted in CASES:
        for shape, parts in wanted.items():
            assert partitioner(shape=shape, dtype="float32") == parts, (partitioner, shape)
    assert P.MaxSizePartitioner(32, bytes_per_string=8)((12,), dtype=object) == [3]
    assert P.MinSizePartitioner(4, 9, bytes_per_string=1)((12,), dtype=str) == [3]
    assert P.FixedShardsPartitioner(2)((3, 4), "bfloat16", axis=1) == [1, 2]


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (P.FixedShardsPartitioner, ["num_shards"]),
        (P.MinSizePartitioner, ["min_shard_bytes", "max_shards", "bytes_per_string"]),
        (P.MaxSizePartitioner, ["max_shard_bytes", "max_shards", "bytes_per_string"]),
    ],
)
def test_sizes_less_than_one_are_refused_by_name(make: type, names: list[str]) -> None:
    """Each argument of each partitioner."""
    for name in names:
        with pytest.raises(ValueError, match=rf"{name} must be an integer >= 1; got 0"):
            make(
                **{"max_shard_bytes": 1} | {name: 0} if make is P.MaxSizePartitioner else {name: 0}
            )
