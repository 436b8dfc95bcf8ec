"""The partial-batch policies: from the size of a batch to the rows of each replica, or to no step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distribute_jax._errors import ArgumentError
from distribute_jax._user_frames import warn_user
from distribute_jax.data._element import EpochProgress
from distribute_jax.data._options import PartialPolicy
from distribute_jax.data._split import (
    Division,
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

_REMEDIES = (
    "Choose a global batch size that the number of replicas divides, or pass "
    "InputOptions(partial='mask') to strategy.distribute_dataset, which pads such batches and "
    "masks the padding."
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
        self._replicas = worker.count * replicas
        self._rule = rule
        self._worker = worker
        self.progress = progress or EpochProgress()
        self._latest: tuple[Any, list[ShardRows]] = None, []

    @property
    def is_common(self) -> bool:
        """Whether several processes each read the whole batch and take their part of it."""
        return self._rule is Rule.A and self._worker.count > 1

    def divide(self, n: int, where: str) -> list[ShardRows]:
        """Returns the steps in which the next batch, of n examples, is used; none if it is skipped."""
        before = self.progress
        self.progress = before.with_batch(n)
        if n == 0 and self._policy is not PartialPolicy.ERROR:
            return []
        share = self._share(n)
        if share is None:
            self._refuse(n, where, is_first=before.first == 0)
            return []
        key = n, share, self.progress.largest
        if self._latest[0] != key:  # nearly all batches have the same size
            self._latest = key, self._steps(n, share)
        return self._latest[1]

    def _share(self, n: int) -> int | None:
        """Rows of each replica with padding; 0: as many as its rule needs; None: not to be used."""
        if self._policy is PartialPolicy.MASK:
            return share_of(self.progress.largest, self._replicas)
        if self._policy is PartialPolicy.SHRINK:
            return share_of(n, self._replicas) if self._rule is Rule.A else 0
        is_full = n > 0 and n >= self.progress.first and n % self._replicas == 0
        return n // self._replicas if is_full else None

    def _steps(self, n: int, share: int) -> list[ShardRows]:
        count, index = self._worker.count, self._worker.index
        if self._rule is Rule.A:
            steps = [rows_of_worker(n, count, index, self._local)]
        else:
            steps = scheduled_rows(n, self.progress.largest, count, index, self._local)
        all_counts = shares(n, self._replicas) if self.is_common else None
        return [shard_rows(rows, n, share or max(map(len, rows)), all_counts) for rows in steps]

    def _refuse(self, n: int, where: str, is_first: bool) -> None:
        name = self._policy.value
        what = f"{where} has {n} examples for {self._replicas} replicas"
        if self._policy is PartialPolicy.DROP:
            if is_first:
                raise ArgumentError(
                    f"{what}, and with partial={name!r} a batch that does not divide is skipped: "
                    f"this first batch is the measure, so no batch would be left.\n{_REMEDIES}"
                )
            return
        first = self.progress.first
        full = f", and the first batch has {first}" if first != n else ""
        raise ArgumentError(
            f"{what}{full}. With partial={name!r} every batch must be as large as the first one "
            f"and divide evenly.\n{_REMEDIES}"
        )


class PartsDivider:
    """Divides elements for which each replica brings a batch."""

    def __init__(self, policy: PartialPolicy) -> None:
        self._policy = policy
        self._first = 0
        self._largest = 0

    def divide(self, counts: Sequence[int], where: str) -> Division | None:
        """Returns the division of batches of so many examples, one a replica; None if all are skipped."""
        if not any(counts) and self._policy is not PartialPolicy.ERROR:
            return None
        is_first = self._first == 0
        self._first = self._first or sum(counts)
        self._largest = max(self._largest, *counts)
        if self._policy is PartialPolicy.MASK:
            return Division.of(counts, self._largest)
        if self._policy is PartialPolicy.SHRINK:
            return Division.of(counts, max(counts))
        if any(counts) and len(set(counts)) == 1 and sum(counts) >= self._first:
            return Division.of(counts, counts[0])
        if self._policy is PartialPolicy.DROP and not is_first:
            return None
        consequence = ", or no element would be left" if is_first else ""
        raise ArgumentError(
            f"{where} has {', '.join(map(str, counts))} examples on its {len(counts)} replicas. With "
            f"partial={self._policy.value!r} each replica must have as many as any other, and every "
            f"element as many as the first one{consequence}.\n"
            "Batch with drop_remainder=True, or pass InputOptions(partial='mask') to "
            "strategy.distribute_datasets_from_function, which pads short batches and masks the padding."
        )


def warn_of_idle_replicas(n: int, replicas: int) -> None:
    """Warns that a full batch leaves replicas without any example."""
    warn_user(
        f"The global batch has {n} examples for {replicas} replicas, so {replicas - n} of them get "
        "only padding and their work is lost. distribute_dataset takes global batches: batch with "
        f"at least {replicas}, for example replicas × the batch size of one replica, or use fewer "
        "devices."
    )
