"""``tf.distribute.experimental.partitioners``: they decide into how many parts a variable is divided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax.numpy as jnp

from distribute_jax._checks import check_int

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]


class Partitioner:
    """Decides into how many parts each variable is divided. Any function with this signature will do.

    Example:
        >>> import distribute_jax as dj
        >>> class OnlyLarge(dj.experimental.partitioners.Partitioner):
        ...     def __call__(self, shape, dtype, axis=0):
        ...         return [2 if shape[0] >= 1000 else 1, *[1] * (len(shape) - 1)]
        >>> OnlyLarge()(shape=(1000, 64), dtype="float32")
        [2, 1]

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/partitioners/Partitioner
    """

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Returns the number of parts along each dim; more than 1 only along ``axis``.

        Args:
            shape: the shape of the variable.
            dtype: its dtype.
            axis: the dim along which it may be divided.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define __call__(shape, dtype, axis=0), which returns the number of "
            "parts along each dim."
        )


class FixedShardsPartitioner(Partitioner):
    """Divides each variable into a fixed number of parts, or into its rows if there are fewer.

    Args:
        num_shards: the number of parts.

    Raises:
        ValueError: ``num_shards`` is less than 1.

    Example:
        >>> import distribute_jax as dj
        >>> dj.experimental.partitioners.FixedShardsPartitioner(5)(shape=(13, 2), dtype="float32")
        [5, 1]

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/partitioners/FixedShardsPartitioner
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = check_int("FixedShardsPartitioner: num_shards", num_shards)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Returns the number of parts along each dim."""
        return _divided(shape, axis, lambda rows: self._num_shards)


class MinSizePartitioner(Partitioner):
    """Divides a variable into as many parts as possible of at least a minimal size.

    TensorFlow rounds the number of parts up, so its parts may be smaller.

    Args:
        min_shard_bytes: the minimal size of a part.
        max_shards: the maximal number of parts.
        bytes_per_string: the size of a string.

    Raises:
        ValueError: an argument is less than 1.

    Example:
        >>> import distribute_jax as dj
        >>> partitioner = dj.experimental.partitioners.MinSizePartitioner(max_shards=8)
        >>> partitioner(shape=(1024, 1024), dtype="float32"), partitioner(shape=(100, 64), dtype="float32")
        ([8, 1], [1, 1])

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/partitioners/MinSizePartitioner
    """

    def __init__(
        self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16
    ) -> None:
        name = "MinSizePartitioner"
        self._least = check_int(f"{name}: min_shard_bytes", min_shard_bytes)
        self._most = check_int(f"{name}: max_shards", max_shards)
        self._string = check_int(f"{name}: bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Returns the number of parts along each dim."""
        row = _row_bytes(shape, dtype, axis, self._string)
        return _divided(shape, axis, lambda rows: min(rows // -(-self._least // row), self._most))


class MaxSizePartitioner(Partitioner):
    """Divides a variable into as few parts as possible of at most a maximal size.

    Args:
        max_shard_bytes: the maximal size of a part; one of a single row may be larger.
        max_shards: the maximal number of parts; None for no limit.
        bytes_per_string: the size of a string.

    Raises:
        ValueError: an argument is less than 1.

    Example:
        >>> import distribute_jax as dj
        >>> dj.experimental.partitioners.MaxSizePartitioner(100)(shape=(13, 5), dtype="float32")
        [3, 1]

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/partitioners/MaxSizePartitioner
    """

    def __init__(
        self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16
    ) -> None:
        name = "MaxSizePartitioner"
        self._most_bytes = check_int(f"{name}: max_shard_bytes", max_shard_bytes)
        most = 2**63 if max_shards is None else max_shards
        self._most = check_int(f"{name}: max_shards", most)
        self._string = check_int(f"{name}: bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Returns the number of parts along each dim."""
        most_rows = max(1, self._most_bytes // _row_bytes(shape, dtype, axis, self._string))
        return _divided(shape, axis, lambda rows: min(-(-rows // most_rows), self._most))


def _row_bytes(shape: Sequence[int], dtype: Any, axis: int, bytes_per_string: int) -> int:
    kind = jnp.dtype(dtype)
    size = bytes_per_string if kind.kind in "SUO" else kind.itemsize
    return max(1, prod([int(n) for i, n in enumerate(shape) if i != axis % len(shape)]) * size)


def _divided(shape: Sequence[int], axis: int, parts_of: Callable[[int], int]) -> list[int]:
    parts = [1] * len(shape)
    if parts:
        parts[axis] = max(1, min(parts_of(int(shape[axis])), int(shape[axis])))
    return parts
