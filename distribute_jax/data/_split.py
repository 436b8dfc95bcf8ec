"""Sharding: how many examples of a batch each replica gets, and which part of a source a process reads.

TensorFlow divides a batch by two rules, and so does this library. In all of them ``workers`` are the
processes that have a pipeline of their own, ``replicas`` the replicas of each worker, and the total
number of replicas is their product.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from distribute_jax._errors import ArgumentError
from distribute_jax._user_frames import warn_user
from distribute_jax.data._options import HINT_REFUSED, AutoShardPolicy, InputOptions
from distribute_jax.data.sources import Source


class Rule(enum.Enum):
    """By which of TensorFlow's rules a batch is divided."""

    A = "A"
    """By the examples that this batch has; every worker reads the same batches (AUTO, DATA)."""
    B = "B"
    """By a schedule made for full batches; every worker reads batches of its own (OFF, FILE)."""


@dataclass(frozen=True)
class Worker:
    """Which of the processes this is."""

    count: int = 1
    """How many processes there are."""
    index: int = 0
    """Which of them, from 0."""


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


@dataclass(frozen=True)
class Cut:
    """One step of one process: consecutive rows of a batch, and how they are laid out."""

    rows: range
    """The rows; one of them, which stands for padding, where the process has none."""
    division: Division
    """Over the replicas of this process."""
    all_counts: tuple[int, ...] | None = None
    """Real examples of each replica of all processes, where that is known and some row is padding."""


def cut(rows: Sequence[range], n: int, share: int, everyone: Sequence[int] | None = None) -> Cut:
    """Makes the step in which the replicas of a process take these rows of a batch of n."""
    first, last = rows[0].start, rows[-1].stop
    taken = range(first, last) if last > first else range(n - 1, n)
    all_counts = laid_over(everyone, share).counts if everyone else None
    return Cut(taken, laid_over([len(one) for one in rows], share), all_counts)


def laid_over(counts: Sequence[int], share: int) -> Division:
    """Pads the counted examples of each replica to one share."""
    is_full = all(count == share for count in counts)
    return Division(share, None if is_full else tuple(counts))


def files_of(num_files: int, workers: int, worker: int) -> range:
    """Gives the files that one worker reads under FILE.

    >>> list(files_of(3, workers=2, worker=0))
    [0, 2]
    """
    return range(worker, num_files, workers)


def choose_policy(asked: AutoShardPolicy | None, source: Source, workers: int) -> AutoShardPolicy:
    """Gives the policy that holds: OFF, FILE or DATA.

    The user's option comes first, then the source's own, then AUTO. With one worker nothing is
    sharded, and the policy only says by which rule batches are divided.

    Raises:
        ArgumentError: HINT; or FILE where some worker would have no file.
    """
    policy = _own_policy(source) if asked is None else asked
    if policy is AutoShardPolicy.HINT:
        raise ArgumentError(f"{source.text} has the option auto_shard_policy=HINT. {HINT_REFUSED}")
    if policy is AutoShardPolicy.FILE and workers > 1:
        _check_files(source, workers)
    if policy is not AutoShardPolicy.AUTO:
        return policy
    if workers == 1 or source.num_files is None:
        return AutoShardPolicy.DATA
    if source.num_files >= workers:
        return AutoShardPolicy.FILE
    _warn_of_few_files(source, workers)
    return AutoShardPolicy.DATA


def shard(source: Source, options: InputOptions, workers: int, worker: int) -> tuple[Source, Rule]:
    """Gives what one worker reads, and the rule by which its batches are divided."""
    policy = choose_policy(cast("Any", options.auto_shard_policy), source, workers)
    if policy is AutoShardPolicy.DATA:
        return source, Rule.A
    if policy is AutoShardPolicy.OFF or workers == 1:
        return source, Rule.B
    part = source.shard_files(workers, worker)
    if part is None:
        raise _no_files(source)
    return part, Rule.B


def _own_policy(source: Source) -> AutoShardPolicy:
    return AutoShardPolicy[(source.own_policy or "auto").upper()]


def _check_files(source: Source, workers: int) -> None:
    if source.num_files is None:
        raise _no_files(source)
    if source.num_files < workers:
        raise ArgumentError(
            f"AutoShardPolicy.FILE gives each of the {workers} processes files of its own, but "
            f"{source.text} reads {source.num_files}. Write the data to at least {workers} files, "
            'or let every process read all of it: dj.InputOptions(auto_shard_policy="data").'
        )


def _no_files(source: Source) -> ArgumentError:
    return ArgumentError(
        f"AutoShardPolicy.FILE divides files among the processes, but {source.text} reads none that "
        "it knows of. Use dj.data.from_files or one of tf.data's readers, or let every process read "
        'everything: dj.InputOptions(auto_shard_policy="data").'
    )


def _warn_of_few_files(source: Source, workers: int) -> None:
    warn_user(
        f"{source.text} reads {source.num_files} files for {workers} processes, too few to give each "
        "its own, so every process reads all of them and takes its part of each batch. Write at "
        f'least {workers} files, or choose this with dj.InputOptions(auto_shard_policy="data").'
    )
