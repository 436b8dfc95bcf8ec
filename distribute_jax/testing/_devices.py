"""The devices that checks run on, and for which numbers of replicas they suffice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from distribute_jax._errors import ArgumentError

REPLICAS = (1, 2, 4, 8)
"""The numbers of replicas that are tried; each divides the eight examples of a full batch."""


def first_devices(count: int) -> list[jax.Device]:
    """Gives this process's first devices."""
    return list(jax.local_devices()[:count])


def replica_counts(
    asked: Sequence[int] | None, caller: str, possible: Sequence[int] = REPLICAS
) -> tuple[int, ...]:
    """Gives the numbers of replicas to try; None means all possible for which there are devices."""
    have = len(jax.local_devices())
    if asked is None:
        return tuple(count for count in possible if count <= have)
    check_replicas(asked, caller)
    if max(asked) > have:
        raise ArgumentError(
            f"{caller}(replicas={list(asked)}): this process has {have} device(s). Call "
            f"dj.simulate({max(asked)}) before JAX starts, or ask for fewer."
        )
    return tuple(asked)


def check_replicas(asked: Any, caller: str) -> None:
    """Refuses what is no list of numbers of replicas; how many devices there are is not asked."""
    is_list = isinstance(asked, (list, tuple)) and len(asked) > 0
    if not is_list or not all(count in REPLICAS for count in asked):
        raise ArgumentError(
            f"{caller}(replicas={asked!r}): a list of some of {', '.join(map(str, REPLICAS))}."
        )
