"""Arrays that share memory: nothing is given away to a step that is still read, or given twice.

JAX 0.10 crashes the process on such arguments, and later versions fail inside XLA.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from distribute_jax._tree import is_key


def unshared(flat: list[Any], given: Sequence[int], same: Callable[[Any], Any]) -> list[Any]:
    """Copies donated arrays that occur twice, so that nothing is given away that is still read."""
    keys = list(map(same, flat))
    if len(set(keys)) == len(keys):
        return flat
    times = Counter(keys)
    flat = list(flat)
    for i in given:
        if times[keys[i]] > 1 and isinstance(flat[i], jax.Array):
            flat[i] = jnp.copy(flat[i])
    return flat


def memory(value: Any) -> Any:
    """Tells arrays apart by their memory, which two array objects may share."""
    is_plain = isinstance(value, jax.Array) and not is_key(value)
    return value.addressable_data(0).unsafe_buffer_pointer() if is_plain else -id(value)


class Donated:
    """The kinds of the arrays that a program is given, so that few must be looked at closely."""

    def __init__(self, flat: Sequence[Any], given: Sequence[int]) -> None:
        self._by_kind: dict[Any, list[int]] = {}
        for i in given:
            self._by_kind.setdefault(_kind(flat[i]), []).append(i)

    def apart(self, flat: list[Any], loose: Iterable[int]) -> list[Any]:
        """Copies arrays that come from outside and are, on some device, the memory of given state.

        Such are the parts of a variable's array, and what ``device_put`` makes of it.
        """
        for i in loose:
            value = flat[i]
            alike = self._by_kind.get(_kind(value)) if isinstance(value, jax.Array) else None
            if alike and _pointers([value]) & _pointers(flat[j] for j in alike if j != i):
                flat[i] = jnp.copy(value)
        return flat


def _kind(value: Any) -> Any:
    """Arrays that share memory have parts of one shape and dtype."""
    if not isinstance(value, jax.Array):
        return None
    return value.sharding.shard_shape(value.shape), value.dtype


def _pointers(values: Iterable[Any]) -> set[int]:
    return {
        shard.data.unsafe_buffer_pointer()
        for value in values
        if isinstance(value, jax.Array) and not is_key(value)
        for shard in value.addressable_shards
    }
