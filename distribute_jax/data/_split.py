"""How many examples of a batch each replica gets: pure functions of numbers.

TensorFlow divides a batch by two rules, and so does this library. In all of them ``workers`` are the
processes that have a pipeline of their own, ``replicas`` the replicas of each worker, and the total
number of replicas is their product.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Rule(enum.Enum):
    """By which of TensorFlow's rules a batch is divided."""

    A = "A"
    """By the examples that this batch has; every worker reads the same batches (AUTO, DATA)."""
    B = "B"
    """By a schedule made for full batches; every worker reads batches of its own (OFF, FILE)."""


def shares(n: int, replicas: int) -> tuple[int, ...]:
    """Divides n examples by rule A into consecutive runs of ceil(n / replicas).

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


def rows_of_worker(n: int, workers: int, worker: int, replicas: int) -> list[range]:
    """Gives the rows of a batch of n that each replica of one worker takes by rule A.

    >>> rows_of_worker(8, workers=2, worker=1, replicas=2)
    [range(4, 6), range(6, 8)]
    """
    counts = shares(n, workers * replicas)
    first = worker * replicas
    return _runs(counts[first : first + replicas], sum(counts[:first]))


def schedule(full: int, workers: int, worker: int, replicas: int) -> tuple[int, ...]:
    """Gives the sizes into which one worker cuts its full batches by rule B.

    They differ by one at most and add up to ``full``. Worker w starts w·R places further on, so that
    in every step the sizes of all workers together add up to ``full`` too.

    >>> [schedule(7, workers=2, worker=w, replicas=2) for w in range(2)]
    [(2, 2, 2, 1), (2, 1, 2, 2)]
    """
    total = workers * replicas
    floor, larger = divmod(full, total)
    sizes = (floor + 1,) * larger + (floor,) * (total - larger)
    start = worker * replicas
    return sizes[start:] + sizes[:start]


def scheduled_rows(
    n: int, full: int, workers: int, worker: int, replicas: int
) -> list[list[range]]:
    """Gives the rows of a batch of n, of ``full`` at most, by rule B: for each step and replica.

    A batch that is not full fills the scheduled sizes in order, until it has no rows left. A full
    one has as many steps as there are workers, also where replicas find nothing in some.

    >>> scheduled_rows(2, full=8, workers=1, worker=0, replicas=4)
    [[range(0, 2), range(2, 2), range(2, 2), range(2, 2)]]
    """
    runs = _runs(_filled(n, schedule(full, workers, worker, replicas)), 0)
    steps = [runs[i : i + replicas] for i in range(0, len(runs), replicas)]
    return [step for step in steps if n == full or step[0].start < n]


def scheduled_shares(n: int, full: int, replicas: int) -> tuple[int, ...]:
    """Divides n examples by rule B where there is one worker.

    >>> scheduled_shares(6, full=6, replicas=4)
    (2, 2, 1, 1)
    """
    return _filled(n, schedule(full, 1, 0, replicas))


def _filled(n: int, sizes: Sequence[int]) -> tuple[int, ...]:
    filled = []
    for size in sizes:
        filled.append(min(size, n))
        n -= filled[-1]
    return tuple(filled)


def _runs(counts: Sequence[int], start: int) -> list[range]:
    ends = [start + sum(counts[: i + 1]) for i in range(len(counts))]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


@dataclass(frozen=True)
class Division:
    """How one batch is laid out over the replicas."""

    share: int
    """Rows of each replica, padding included."""
    counts: tuple[int, ...] | None
    """Real examples of each replica, or None where every row is real."""


def laid_over(counts: Sequence[int], share: int) -> Division:
    """Pads the counted examples of each replica to one share."""
    is_full = all(count == share for count in counts)
    return Division(share, None if is_full else tuple(counts))
