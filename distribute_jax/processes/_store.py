"""What one process of the job tells the others: text under a key, on the coordination service."""

from __future__ import annotations

from typing import Any

import jax

_PREFIX = "distribute_jax/"
_DEADLINE, _EXISTS = "DEADLINE_EXCEEDED", "ALREADY_EXISTS"
_AT_ONCE = 1000
"""Milliseconds for a text that is there."""


class Store:
    """The key-value store that ``jax.distributed`` keeps on process 0.

    No device takes part in it, so it works while a step hangs, and before the first one.
    """

    def __init__(self, client: Any) -> None:
        """Wraps the client of a process."""
        self._client = client

    def put(self, key: str, text: str) -> None:
        """Stores a text, over an older one."""
        self._client.key_value_set(_PREFIX + key, text, allow_overwrite=True)

    def put_first(self, key: str, text: str) -> str:
        """Stores a text where there is none yet; gives the one that stands."""
        try:
            self._client.key_value_set(_PREFIX + key, text)
        except jax.errors.JaxRuntimeError as error:
            if _EXISTS not in str(error):
                raise
            return str(self._client.blocking_key_value_get(_PREFIX + key, _AT_ONCE))
        return text

    def get(self, key: str, seconds: float) -> str | None:
        """Waits for a text; None where it has not come in time."""
        try:
            milliseconds = max(int(seconds * 1000), 1)
            found: str = self._client.blocking_key_value_get(_PREFIX + key, milliseconds)
        except jax.errors.JaxRuntimeError as error:
            if _DEADLINE not in str(error):
                raise
            return None
        return found

    def under(self, folder: str) -> dict[str, str]:
        """Gives all that is stored under a key that ends with a slash, by the rest of the key."""
        start = len(_PREFIX + folder)
        found = self._client.key_value_dir_get(_PREFIX + folder)
        return {key[start:]: text for key, text in found}

    def remove(self, folder: str) -> None:
        """Forgets all that is stored under a key that ends with a slash."""
        self._client.key_value_delete(_PREFIX + folder)
