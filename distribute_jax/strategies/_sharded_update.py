"""The option ``shard_optimizer_state``, as strategies of mirrored weights take it."""

from __future__ import annotations

from typing import Any

from distribute_jax._errors import ArgumentError


def checked_sharding(given: Any, caller: str) -> bool:
    """Checks that the option is a bool."""
    if not isinstance(given, bool):
        raise ArgumentError(
            f"{caller}(shard_optimizer_state={given!r}): it is True, each replica keeps its share of the "
            "optimizer's state, or False, each keeps all of it."
        )
    return given
