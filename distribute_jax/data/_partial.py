"""The partial-batch policies: from the size of a batch to the rows of each replica, or to no step."""

from __future__ import annotations

from collections.abc import Sequence

from distribute_jax._errors import ArgumentError
from distribute_jax._user_frames import warn_user
from distribute_jax.data._element import EpochProgress
from distribute_jax.data._options import PartialPolicy
from distribute_jax.data._split import (
    Rule,
    ShardRows,
    Worker,
    rows_of_worker,
    scheduled_rows,
    shard_rows,
    share_of,
    shares,
)

ALONE = Worker()


def share_by_policy(
    policy: PartialPolicy, counts: Sequence[int], what: str, *, first: int, largest: int
) -> int | None:
    """Returns the rows of each replica with padding, or None if the policy skips the element.

    ``counts`` are the examples of each replica, ``first`` those of the first element (0 if this is the
    first one), ``largest`` the largest share so far.
    """
    examples = sum(counts)
    if not examples and policy is not PartialPolicy.ERROR:
        return None
    if policy is PartialPolicy.MASK:
        return largest
    if policy is PartialPolicy.SHRINK:
        return max(counts)
    if examples >= max(first, 1) and len(set(counts)) == 1:
        return counts[0]
    if policy is PartialPolicy.DROP and first:
        return None
    compared = f", and the first one has {first}" if first not in (0, examples) else ""
    raise ArgumentError(
        f"{what} for {len(counts)} replicas{compared}. With partial={policy.value!r} every replica must get "
        f"as many examples as any other, and every batch must be as large as the first one"
        f"{'' if first else ', or no batch would be left'}.\nChoose a batch size that divides evenly and "
        "leave out the remainder, or pass InputOptions(partial='mask'), which pads such batches and masks "
        "the padding."
    )


class Divider:
    """Divides the batches of one epoch; its progress decides what a full batch is.

    ``replicas`` are those of this process.
    """

    def __init__(
        self,
        policy: PartialPolicy,
        replicas: int,
        rule: Rule = Rule.A,
        progress: EpochProgress | None = None,
        worker: Worker = ALONE,
    ) -> None:
        self._policy = policy
        self._local = replicas
        self._rule = rule
        self._worker = worker
        self.progress = progress or EpochProgress()

    @property
    def is_common(self) -> bool:
        """Whether several processes each read the whole batch and take their part of it."""
        return self._rule is Rule.A and self._worker.count > 1

    def divide(self, n: int, where: str) -> list[ShardRows]:
        """Returns the steps in which the next batch, of n examples, is used; none if it is skipped."""
        first, self.progress = self.progress.first, self.progress.with_batch(n)
        count, index, replicas = self._worker.count, self._worker.index, self._local
        counts, largest = shares(n, count * replicas), self.progress.largest
        share = share_by_policy(
            self._policy,
            counts,
            f"{where} has {n} examples",
            first=first,
            largest=share_of(largest, count * replicas),
        )
        if share is None:
            return []
        if self._rule is Rule.A:
            rows = rows_of_worker(n, count, index, replicas)
            return [shard_rows(rows, n, share, counts if self.is_common else None)]
        steps = scheduled_rows(n, largest, count, index, replicas)
        shrinks = self._policy is PartialPolicy.SHRINK
        return [shard_rows(s, n, max(map(len, s)) if shrinks else share) for s in steps]


def warn_of_idle_replicas(n: int, replicas: int) -> None:
    """Warns that a full batch leaves replicas without any example."""
    warn_user(
        f"The global batch has {n} examples for {replicas} replicas, so {replicas - n} of the replicas "
        "get only padding and their work is lost. distribute_dataset takes global batches: batch with "
        f"at least {replicas}, for example replicas × the batch size of one replica, or use fewer "
        "devices."
    )
