"""The partial-batch policies: from the size of a batch to its shares, or None."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distribute_jax._errors import ArgumentError
from distribute_jax._user_frames import warn_user
from distribute_jax.data._element import Seen
from distribute_jax.data._options import PartialPolicy
from distribute_jax.data._split import (
    Cut,
    Division,
    Rule,
    Worker,
    cut,
    laid_over,
    rows_of_worker,
    scheduled_rows,
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
    """Lays out the batches of one epoch; what it has seen decides what a full batch is.

    Args:
        policy: what becomes of partial batches.
        replicas: the replicas of this process.
        rule: by which of TensorFlow's rules batches are divided.
        seen: how far the epoch has come.
        worker: which of the processes this is.
    """

    def __init__(
        self,
        policy: PartialPolicy,
        replicas: int,
        rule: Rule = Rule.A,
        seen: Seen | None = None,
        worker: Worker = ALONE,
    ) -> None:
        self._policy = policy
        self._local = replicas
        self._replicas = worker.count * replicas
        self._rule = rule
        self._worker = worker
        self.seen = seen or Seen()
        self._cuts: tuple[Any, list[Cut]] = None, []

    @property
    def is_common(self) -> bool:
        """Whether several processes each read the whole batch and take their part of it."""
        return self._rule is Rule.A and self._worker.count > 1

    def divide(self, n: int, where: str) -> list[Cut]:
        """Gives the steps in which the next batch, of n examples, is used: none where it is skipped."""
        before = self.seen
        self.seen = before.with_batch(n)
        if n == 0 and self._policy is not PartialPolicy.ERROR:
            return []
        share = self._share(n)
        if share is None:
            self._refuse(n, where, is_first=before.first == 0)
            return []
        key = n, share, self.seen.largest
        if self._cuts[0] != key:  # nearly all batches are alike
            self._cuts = key, self._cut(n, share)
        return self._cuts[1]

    def _cut(self, n: int, share: int) -> list[Cut]:
        everyone = shares(n, self._replicas) if self.is_common else None
        return [cut(rows, n, share or max(map(len, rows)), everyone) for rows in self._rows(n)]

    def _share(self, n: int) -> int | None:
        """Rows of each replica with padding; 0: as many as its rule needs; None: not to be used."""
        if self._policy is PartialPolicy.MASK:
            return share_of(self.seen.largest, self._replicas)
        if self._policy is PartialPolicy.SHRINK:
            return share_of(n, self._replicas) if self._rule is Rule.A else 0
        fits = n > 0 and n >= self.seen.first and n % self._replicas == 0
        return n // self._replicas if fits else None

    def _rows(self, n: int) -> list[list[range]]:
        """For each step the rows that each replica of this process takes."""
        count, index = self._worker.count, self._worker.index
        if self._rule is Rule.A:
            return [rows_of_worker(n, count, index, self._local)]
        return scheduled_rows(n, self.seen.largest, count, index, self._local)

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
        first = self.seen.first
        full = f", and the first batch has {first}" if first != n else ""
        raise ArgumentError(
            f"{what}{full}. With partial={name!r} every batch must be as large as the first one "
            f"and divide evenly.\n{_REMEDIES}"
        )


class PartsDivider:
    """Lays out elements for which each replica brings a batch of its own."""

    def __init__(self, policy: PartialPolicy) -> None:
        self._policy = policy
        self._first = 0
        self._largest = 0

    def divide(self, counts: Sequence[int], where: str) -> Division | None:
        """Lays out batches of so many examples, one a replica, or gives None where all are skipped."""
        if not any(counts) and self._policy is not PartialPolicy.ERROR:
            return None
        is_first = self._first == 0
        self._first = self._first or sum(counts)
        self._largest = max(self._largest, *counts)
        if self._policy in (PartialPolicy.MASK, PartialPolicy.SHRINK):
            return padded(self._policy, counts, self._largest)
        if any(counts) and len(set(counts)) == 1 and sum(counts) >= self._first:
            return laid_over(counts, counts[0])
        if self._policy is PartialPolicy.ERROR or is_first:
            raise self._refusal(counts, where, is_first)
        return None

    def _refusal(self, counts: Sequence[int], where: str, is_first: bool) -> ArgumentError:
        consequence = ", or no element would be left" if is_first else ""
        return ArgumentError(
            f"{where} has {', '.join(map(str, counts))} examples on its {len(counts)} replicas. With "
            f"partial={self._policy.value!r} each replica must have as many as any other, and every "
            f"element as many as the first one{consequence}.\n"
            "Batch with drop_remainder=True, or pass InputOptions(partial='mask') to "
            "strategy.distribute_datasets_from_function, which pads short batches and masks the "
            "padding."
        )


def padded(policy: PartialPolicy, counts: Sequence[int], full_share: int) -> Division:
    """Pads the shares to those of a full batch under MASK, to the longest of them under SHRINK."""
    return laid_over(counts, full_share if policy is PartialPolicy.MASK else max(counts))


def warn_of_idle_replicas(n: int, replicas: int) -> None:
    """Warns that a full batch leaves replicas without any example."""
    warn_user(
        f"The global batch has {n} examples for {replicas} replicas, so {replicas - n} of them get "
        "only padding and their work is lost. distribute_dataset takes global batches: batch with "
        f"at least {replicas}, for example replicas × the batch size of one replica, or use fewer "
        "devices."
    )
