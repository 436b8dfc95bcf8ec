"""Agreement of all processes on the steps of an epoch, so that they end it together.

Data may have another length on each process, and a process that stops early would leave the others
waiting in a collective. They exchange what they have read, a few steps at a time.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, islice
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import Mesh

from distribute_jax._errors import ArgumentError
from distribute_jax._messages import error_line
from distribute_jax.data._element import HostElement
from distribute_jax.data._options import InputOptions, PartialPolicy
from distribute_jax.data._split import Worker
from distribute_jax.processes import job_of


def worker_of(mesh: Mesh) -> Worker:
    job = job_of(mesh)
    return Worker(job.count, job.index)


EpochEnd: TypeAlias = Callable[[Iterator[HostElement], int | None], Iterator[HostElement]]
"""Takes the elements of this process in one epoch, and their number if it is known; yields one for each
step that all processes take together. A process whose data has ended continues with elements of only
padding until the data of every process has ended.
"""


def epoch_ends(mesh: Mesh, options: InputOptions, *, common: bool) -> EpochEnd:
    """Returns how the processes of a mesh end the epochs of a new dataset together."""
    job = job_of(mesh)
    if job.is_alone:
        return lambda elements, length: elements
    dataset, passes = next(_dataset_numbers), count(1)
    policy = PartialPolicy(options.partial)

    def next_pass(elements: Iterator[HostElement], length: int | None) -> Iterator[HostElement]:
        # A topic for each pass: messages of a pass that was left early do not reach the next.
        topic = f"the batches of dataset {dataset}, pass {next(passes)}"
        job.actions.record(f"reading {topic}")
        end = GlobalEpochEnd(partial(job.exchange, topic), job.index, policy, common)
        return end.steps(elements, length)

    return next_pass


_dataset_numbers = count(1)
"""Numbers the distributed datasets, in the same order on every process."""

_TARGET_ROUND_SECONDS = 1.0
"""How long the steps of one round should take, so that a thousand processes do not talk all the time."""

_MAX_STEPS_PER_ROUND = 8
"""Bounds the batches that wait on the host until those of the other processes are known."""


class Step(NamedTuple):
    """What one process contributes to one step."""

    counts: Sequence[int]
    """Real examples of each of its replicas."""
    share: int
    """Rows of each replica, padding included."""
    kind: str
    """The batch's structure, dtypes and sizes except dim 0."""

    @classmethod
    def of(cls, element: HostElement) -> Step:
        leaves, structure = jax.tree.flatten(element.spec)
        kinds = ", ".join(f"{leaf.dtype}{list(leaf.shape[1:])}" for leaf in leaves)
        return cls(element.counts, element.share, f"{structure} of {kinds}")


class Announcement(NamedTuple):
    """What one process announces in a round."""

    steps: Sequence[Step] = ()
    """Its next steps; fewer than requested if its data ends."""
    seconds: float = 0.0
    """How long each step of its last round took."""
    error: str | None = None
    """Why its data ended early."""
    length: int | None = None
    """Steps of its epoch, if known in advance."""
    digest: str | None = None
    """Of its first batch, if all processes should read the same batches."""

    @classmethod
    def from_json(cls, text: str) -> Announcement:
        steps, *others = json.loads(text)
        return cls([Step(*step) for step in steps], *others)


@dataclass(frozen=True)
class GlobalEpochEnd:
    """Makes processes with data of different length take the same steps.

    A process whose data has ended continues with only padding under the policies ``mask`` and ``shrink``.
    Under ``drop`` the epoch ends when the data of any process ends, and under ``error`` it is an
    error if they do not end together. A failure of one process is raised by all, so that none waits.
    If all read the same batches (``common``) and know their number, one round is enough.
    """

    exchange: Callable[[str], Sequence[str]]
    """One round: each process calls it once, and gets the texts of all processes in order."""
    process: int
    policy: PartialPolicy
    common: bool

    def steps(self, elements: Iterator[HostElement], length: int | None) -> Iterator[HostElement]:
        if self.common:
            first, error = _take(elements, 1)
            digest = first[0].digest if first else None
            announced = self._announce(error, length=length, digest=digest)
            _check_lengths([each.length for each in announced])
            _raise_failure(error, announced)
            elements = chain(first, elements)
            if self.process == 0 and len({each.digest for each in announced}) > 1:
                warnings.warn(_DIFFERENT_BATCHES.format("their first batches differ"), stacklevel=2)
            if length is not None:
                return elements
        return self._rounds(elements)

    def _rounds(self, elements: Iterator[HostElement]) -> Iterator[HostElement]:
        last: Any = None
        requested, share, seconds = 1, 0, 0.0
        while True:
            start = time.perf_counter()
            local, error = _take(elements, requested)
            steps = [Step.of(element) for element in local]
            announced = self._announce(error, steps=steps, seconds=seconds)
            if last is None:
                _check_all_have_data(announced)
            _check_steps_match(announced, self.policy)
            agreed = self._agreed_steps(announced)
            ended = {len(each.steps) for each in announced if each.error is None}
            if self.common and self.process == 0 and len(ended) > 1:
                warnings.warn(_DIFFERENT_BATCHES.format("some have more of them"), stacklevel=2)
            for number in range(agreed):
                last = local[number] if number < len(local) else last
                if self.policy is not PartialPolicy.MASK:
                    share = 0  # MASK keeps one shape, also after the process with the longest share
                step = [e.steps[number] if number < len(e.steps) else None for e in announced]
                share = max(share, *(part.share for part in step if part))
                counts = [part.counts if part else [0] * len(last.counts) for part in step]
                all_counts = [*chain.from_iterable(counts)]
                if any(all_counts):  # else only processes whose part of it is empty have a batch
                    mine = counts[self.process]
                    yield replace(last, share=share, counts=mine, all_counts=all_counts)
            _raise_failure(error, announced)
            if agreed < requested:
                return
            seconds = (time.perf_counter() - start) / requested
            # Computed from what all have announced, so that all request the same number.
            slowest = max(each.seconds for each in announced)
            fitting = int(_TARGET_ROUND_SECONDS / slowest) if slowest else 1
            requested = min(max(fitting, 1), _MAX_STEPS_PER_ROUND)

    def _announce(self, error: BaseException | None, **fields: Any) -> list[Announcement]:
        local = Announcement(error=None if error is None else error_line(error), **fields)
        return [*map(Announcement.from_json, self.exchange(json.dumps(local)))]

    def _agreed_steps(self, announced: Sequence[Announcement]) -> int:
        lengths = [len(each.steps) for each in announced]
        failed = [len(each.steps) for each in announced if each.error is not None]
        longest = min(lengths) if self.policy is PartialPolicy.DROP else max(lengths)
        if self.policy is PartialPolicy.ERROR and not failed and min(lengths) < longest:
            raise ArgumentError(
                f"The data of process {lengths.index(min(lengths))} has ended before that of another, and "
                "partial='error' requires all to end together. Give every process the same number of "
                "batches, or pass InputOptions(partial='mask'), with which a process that is out of data "
                "continues with masked padding."
            )
        return min([longest, *failed])


def _check_lengths(lengths: Sequence[int | None]) -> None:
    if len(set(lengths)) > 1:
        lines = "\n".join(f"  process {i}: {length} batches" for i, length in enumerate(lengths))
        raise ArgumentError(
            f"All processes read the same batches, but their sources differ:\n{lines}\nGive every process "
            "the same data, or different data with strategy.distribute_datasets_from_function."
        )


def _check_all_have_data(announced: Sequence[Announcement]) -> None:
    without = [i for i, each in enumerate(announced) if not each.steps and each.error is None]
    if without and any(each.steps for each in announced):
        raise ArgumentError(
            f"Process {without[0]} has no batches, and other processes have some, so it does not know "
            "what the batches look like. Give every process at least one batch, or let every process read "
            'everything, in strategy.distribute_dataset with dj.InputOptions(auto_shard_policy="data").'
        )


def _raise_failure(error: BaseException | None, announced: Sequence[Announcement]) -> None:
    """Raises this process's error, or an error that names the process that failed."""
    if error is not None:
        raise error
    for process, each in enumerate(announced):
        if each.error is not None:
            raise ArgumentError(
                f"The input of process {process} failed, so no process can take the next step:\n"
                f"  {each.error}\nIts traceback is in the output of process {process}."
            )


def _check_steps_match(announced: Sequence[Announcement], policy: PartialPolicy) -> None:
    """Raises, on every process, if the batches of a step would not make one array."""
    fixed = policy in (PartialPolicy.DROP, PartialPolicy.ERROR)
    for number in range(max(len(each.steps) for each in announced)):
        kinds: dict[str, int] = {}
        for process, each in enumerate(announced):
            for step in each.steps[number : number + 1]:
                size = f", {step.share} examples for each replica" if fixed else ""
                kinds.setdefault(step.kind + size, process)
        if len(kinds) > 1:
            lines = "\n".join(f"  process {process}: {kind}" for kind, process in kinds.items())
            raise ArgumentError(
                f"The processes have different batches for one step:\n{lines}\nAll processes run one "
                "program, so their batches must have the same keys, dtypes and sizes, and without masks "
                "the same number of examples. Pad them to one size, for example."
            )


def _take(
    elements: Iterator[HostElement], count: int
) -> tuple[list[HostElement], BaseException | None]:
    """Returns up to ``count`` elements, and the error that ended them early."""
    taken: list[HostElement] = []
    try:
        for element in islice(elements, count):
            taken.append(element)  # noqa: PERF402 - elements before an error are kept
    except BaseException as error:  # every error must reach the other processes
        return taken, error
    return taken, None


_DIFFERENT_BATCHES = (
    "All processes should read the same batches and take their part of each, but {}: some examples may "
    "be trained on twice and others never. Give every process the same data and the same shuffling seed, or "
    "different data: strategy.distribute_datasets_from_function, or "
    'dj.InputOptions(auto_shard_policy="off"). If only random augmentation differs, ignore this warning.'
)
