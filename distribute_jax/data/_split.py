"""Sharding: which rows of a batch each replica gets, and which part of a source each process reads.

TensorFlow divides batches by two rules, and so does this library. Rule A divides the examples that a batch
really has, if all workers read the same batches (AUTO, DATA). Rule B applies a schedule for full batches,
if each worker divides its batches independently (OFF, FILE). ``workers`` are the processes that have an
input pipeline, ``replicas`` the replicas of each worker; their product is the number of all replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, cast

from distribute_jax._errors import ArgumentError, warn_user
from distribute_jax.data._options import HINT_REFUSED, AutoShardPolicy, InputOptions, PartialPolicy
from distribute_jax.data.sources import Source


@dataclass(frozen=True)
class Worker:
    """The number of processes, and the index of this one."""

    count: int = 1
    index: int = 0


ALONE = Worker()


def shares(n: int, replicas: int) -> tuple[int, ...]:
    """Divides n examples by rule A: shares of ceil(n / replicas), of which the last are shorter or empty."""
    share = share_of(n, replicas)
    return tuple(min(max(n - i * share, 0), share) for i in range(replicas))


def share_of(n: int, replicas: int) -> int:
    """Returns ceil(n / replicas), the largest share."""
    return -(-n // replicas)


def schedule(full: int, workers: int, worker: int, replicas: int) -> tuple[int, ...]:
    """Returns the sizes into which one worker divides its full batches by rule B.

    They differ by at most one and add up to ``full``. The sizes of worker w are rotated by w * replicas,
    so that in every step those of all workers together add up to ``full`` too.
    """
    total = workers * replicas
    floor, larger = divmod(full, total)
    sizes = (floor + 1,) * larger + (floor,) * (total - larger)
    start = worker * replicas
    return sizes[start:] + sizes[:start]


def steps_of(
    n: int, full: int, worker: Worker, replicas: int, *, is_common: bool
) -> list[list[range]]:
    """Returns the rows of a batch of n for each step of one worker and each of its replicas.

    By rule A there is one step. By rule B a batch of fewer than ``full`` rows fills the scheduled sizes in
    order until it has no rows left. A full one makes as many steps as there are workers, even if some
    replicas get no rows.
    """
    if is_common:
        return [_runs(shares(n, worker.count * replicas))[worker.index * replicas :][:replicas]]
    runs = _runs(schedule(full, worker.count, worker.index, replicas), n)
    steps = [runs[i : i + replicas] for i in range(0, len(runs), replicas)]
    return [step for step in steps if n == full or step[0].start < n]


def _runs(sizes: Sequence[int], n: int | None = None) -> list[range]:
    """Returns consecutive ranges of these sizes, cut off at row n."""
    ends = [min(end, n) if n is not None else end for end in accumulate(sizes)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


class EpochProgress(NamedTuple):
    """The position in an epoch, and the batch sizes so far, which determine the size of a full batch."""

    batches: int = 0
    """Batches taken from the source, including skipped ones."""
    first: int = 0
    """Examples of the first batch that had any; 0 before it."""
    largest: int = 0
    """Examples of the largest batch."""

    def with_batch(self, n: int) -> EpochProgress:
        """Returns the progress after one more batch of n examples."""
        return EpochProgress(self.batches + 1, self.first or n, max(self.largest, n))


def share_by_policy(
    policy: PartialPolicy, counts: Sequence[int], what: str, *, first: int, largest: int
) -> int | None:
    """Returns the rows of each replica, padding included, or None if the policy skips the element.

    ``counts`` are the examples of each replica, ``first`` those of the first element (0 for the first
    itself), and ``largest`` is the largest share so far.
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
        f"{what} for {len(counts)} replicas{compared}. With partial={policy.value!r} all replicas must get "
        f"the same number of examples, and every batch must be as large as the first one"
        f"{'' if first else ', or no batch would be left'}.\nChoose a batch size that divides evenly and "
        "leave out the remainder, or pass InputOptions(partial='mask'), which pads such batches and masks "
        "the padding."
    )


def choose_policy(
    requested: AutoShardPolicy | None, source: Source, workers: int
) -> AutoShardPolicy:
    """Returns the policy that applies: the user's option, else that of the source, else AUTO's choice."""
    policy = requested
    if policy is None:
        policy = AutoShardPolicy[source.auto_shard_policy or "AUTO"]
    if policy is AutoShardPolicy.HINT:
        raise ArgumentError(f"{source.text} has the option auto_shard_policy=HINT. {HINT_REFUSED}")
    if policy is AutoShardPolicy.FILE and workers > 1 and (source.num_files or 0) < workers:
        files = "no files that are known" if source.num_files is None else source.num_files
        raise ArgumentError(
            f"AutoShardPolicy.FILE needs a file for each of the {workers} processes, but {source.text} "
            f"reads {files}. Give dj.data.from_files or one of tf.data's readers at least {workers} files, "
            'or let every process read everything: dj.InputOptions(auto_shard_policy="data").'
        )
    if policy is not AutoShardPolicy.AUTO:
        return policy
    if workers == 1 or source.num_files is None:
        return AutoShardPolicy.DATA
    if source.num_files >= workers:
        return AutoShardPolicy.FILE
    warn_user(
        f"{source.text} reads {source.num_files} files for {workers} processes, so every process reads "
        f"all of them and takes its part of each batch. Write at least {workers} files, or choose this "
        'with dj.InputOptions(auto_shard_policy="data").'
    )
    return AutoShardPolicy.DATA


def shard(source: Source, options: InputOptions, worker: Worker) -> tuple[Source, bool]:
    """Returns the source that one worker reads, and whether all workers read the same batches (rule A)."""
    policy = choose_policy(cast("Any", options.auto_shard_policy), source, worker.count)
    if policy is AutoShardPolicy.FILE and worker.count > 1:
        source = source.shard_files(worker.count, worker.index)
    return source, policy is AutoShardPolicy.DATA
