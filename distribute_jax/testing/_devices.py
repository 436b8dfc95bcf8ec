"""The devices that checks run on, and for which numbers of replicas they suffice."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from distribute_jax._errors import ArgumentError

REPLICAS = (1, 2, 4, 8)
"""The numbers of replicas that are tried; each divides the eight examples of a full batch."""


def first_devices(count: int) -> list[jax.Device]:
    """Gives this process's first devices."""
    return list(jax.local_devices()[:count])


def replica_counts(asked: Sequence[int] | None, caller: str) -> tuple[int, ...]:
    """Gives the numbers of replicas to try; None means all for which there are devices."""
    have = len(jax.local_devices())
    if asked is None:
        return tuple(count for count in REPLICAS if count <= have)
    if isinstance(asked, int) or not asked or not set(asked) <= set(REPLICAS):
        raise ArgumentError(
            f"{caller}(replicas={asked!r}): a list of some of {', '.join(map(str, REPLICAS))}."
        )
    if max(asked) > have:
        raise ArgumentError(
            f"{caller}(replicas={list(asked)}): this process has {have} device(s). Call "
            f"dj.simulate({max(asked)}) before JAX starts, or ask for fewer."
        )
    return tuple(asked)
