"""What a scheduled closure will return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._values import PerReplica


class RemoteValue:
    """An array that a worker computes, or has computed.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/coordinator/RemoteValue
    """

    def __init__(self, wait: Callable[[], Any]) -> None:
        """Takes what waits for the array, and returns it or raises the worker's error."""
        self._wait = wait

    def get(self) -> Any:
        """Waits for the value and returns it as ``strategy.run`` does, or raises the error of its closure."""
        return self._wait()

    def fetch(self) -> Any:
        """Waits for the value and returns it as a NumPy array, or raises the error of its closure.

        Where several workers make an update and differ in the value, it is a tuple of arrays.
        """
        value = self._wait()
        several = isinstance(value, PerReplica)
        return tuple(map(_fetched, value.values)) if several else _fetched(value)


def _fetched(value: Any) -> Any:
    """Returns an array of NumPy, which has no random keys: those stay as they are."""
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return value if is_key else np.asarray(value)
