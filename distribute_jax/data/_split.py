"""How many examples of a batch each replica gets: pure functions of numbers."""

from __future__ import annotations

from dataclasses import dataclass


def shares(n: int, replicas: int) -> tuple[int, ...]:
    """Divides n examples into consecutive runs of ceil(n / replicas).

    Trailing runs are shorter or empty. TensorFlow spreads every batch so, from the number of
    examples that it really has, under the policies AUTO and DATA.

    >>> shares(6, 4)
    (2, 2, 2, 0)
    """
    share = share_of(n, replicas)
    return tuple(min(max(n - i * share, 0), share) for i in range(replicas))


def share_of(n: int, replicas: int) -> int:
    """Gives the largest share of n examples, ceil(n / replicas)."""
    return -(-n // replicas)


@dataclass(frozen=True)
class Division:
    """How one batch is laid out over the replicas."""

    share: int
    """Rows of each replica, padding included."""
    counts: tuple[int, ...] | None
    """Real examples of each replica, or None where every row is real."""


def divide(n: int, replicas: int, share: int) -> Division:
    """Spreads n examples as ``shares`` says, each share padded to the given length."""
    counts = None if n == replicas * share else shares(n, replicas)
    return Division(share, counts)
