"""When an epoch ends on all processes: they agree on its steps, a few at a time."""

from __future__ import annotations

import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, islice
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import Mesh

from distribute_jax._errors import ArgumentError
from distribute_jax._messages import error_text
from distribute_jax.data._element import HostElement
from distribute_jax.data._options import InputOptions, PartialPolicy
from distribute_jax.data._split import Worker
from distribute_jax.processes import job_of


def worker_of(mesh: Mesh) -> Worker:
    """Returns how many processes share a mesh, and which of them this is."""
    job = job_of(mesh)
    return Worker(job.count, job.index)


EpochEnd: TypeAlias = Callable[[Iterator[HostElement], int | None], Iterator[HostElement]]
"""Returns an element of this process for each step that all processes take together in a pass.

It gets the elements of this process, and their number if that is known. A process whose data has ended goes
on with elements of padding alone until the data of every process has ended.
"""


def epoch_ends(mesh: Mesh, options: InputOptions, *, common: bool) -> EpochEnd:
    """Returns the agreement of the processes of a mesh on each pass over a new dataset.

    Each pass has a topic, so that one which is left early does not disturb the next.
    """
    job = job_of(mesh)
    if job.is_alone:
        return lambda elements, length: elements
    _distributed["datasets"] += 1
    dataset, passes = _distributed["datasets"], count(1)
    policy = PartialPolicy(options.partial)

    def next_pass(elements: Iterator[HostElement], length: int | None) -> Iterator[HostElement]:
        topic = f"the batches of dataset {dataset}, pass {next(passes)}"
        job.actions.record(f"reading {topic}")
        end = GlobalEpochEnd(partial(job.exchange, topic), job.index, policy, common)
        return end.steps(elements, length)

    return next_pass


_distributed: Counter[str] = Counter()
"""How many datasets were distributed so far, which is the same number on every process."""

_ROUND_SECONDS = 1.0
"""How long the steps of one round should last, so that a thousand processes do not talk all the time."""

_MOST_STEPS = 8
"""Steps of one round at most: so many batches wait on the host until the others' are known."""


class Step(NamedTuple):
    """What one process brings to one step."""

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
    """Its next steps, fewer than asked for where its data ends."""
    seconds: float = 0.0
    """How long each step of its last round took."""
    error: str | None = None
    """Why it has no more."""
    length: int | None = None
    """Steps of its epoch, where that is known beforehand."""
    digest: str | None = None
    """Of the first batch that it reads, where all read the same."""

    @classmethod
    def from_json(cls, text: str) -> Announcement:
        """Returns the announcement of which this is the JSON."""
        steps, *others = json.loads(text)
        return cls([Step(*step) for step in steps], *others)


@dataclass(frozen=True)
class GlobalEpochEnd:
    """Makes processes with data of different length take the same steps.

    A process whose data has ended goes on with padding alone under the policies ``mask`` and ``shrink``.
    Under ``drop`` the epoch ends with the first process whose data ends, and under ``error`` it is an
    error that they do not end together. What makes one process fail is raised by all, and none waits.
    Where all read the same batches (``common``) and know their number, one round is enough.
    """

    exchange: Callable[[str], Sequence[str]]
    """One round: each process calls it once, and gets the texts of all in order of the processes."""
    process: int
    policy: PartialPolicy
    common: bool

    def steps(self, elements: Iterator[HostElement], length: int | None) -> Iterator[HostElement]:
        if self.common:
            first, error = _next(elements, 1)
            digest = first[0].digest if first else None
            everyone = self._announce(error=_text(error), length=length, digest=digest)
            _check_lengths([one.length for one in everyone])
            _raise(error, everyone)
            elements = chain(first, elements)
            if self.process == 0 and len({one.digest for one in everyone}) > 1:
                warnings.warn(_DIFFERENT_BATCHES, stacklevel=2)
            if length is not None:
                return _exactly(elements, length)
        return self._rounds(elements)

    def _rounds(self, elements: Iterator[HostElement]) -> Iterator[HostElement]:
        last: Any = None
        requested, share, seconds = 1, 0, 0.0
        while True:
            start = time.perf_counter()
            local, error = _next(elements, requested)
            steps = [Step.of(element) for element in local]
            everyone = self._announce(steps=steps, seconds=seconds, error=_text(error))
            if last is None:
                _check_all_have_data(everyone)
            _check_steps_match(everyone, self.policy)
            agreed = self._agreed_steps(everyone)
            for number in range(agreed):
                last = local[number] if number < len(local) else last
                if self.policy is not PartialPolicy.MASK:
                    share = 0  # MASK keeps one shape, also when the process with the longest share is out
                step = [one.steps[number] if number < len(one.steps) else None for one in everyone]
                share = max(share, *(part.share for part in step if part))
                counts = [part.counts if part else [0] * len(last.counts) for part in step]
                everywhere = [*chain.from_iterable(counts)]
                yield replace(last, share=share, counts=counts[self.process], all_counts=everywhere)
            _raise(error, everyone)
            if agreed < requested:
                return
            seconds = (time.perf_counter() - start) / requested
            # It follows from what all have announced, so that all ask for as many.
            slowest = max(one.seconds for one in everyone)
            requested = min(max(int(_ROUND_SECONDS / slowest), 1), _MOST_STEPS) if slowest else 1

    def _announce(self, **fields: Any) -> list[Announcement]:
        """Returns the announcements of all processes."""
        return [*map(Announcement.from_json, self.exchange(json.dumps(Announcement(**fields))))]

    def _agreed_steps(self, everyone: Sequence[Announcement]) -> int:
        lengths = [len(one.steps) for one in everyone]
        failed = [len(one.steps) for one in everyone if one.error is not None]
        longest = min(lengths) if self.policy is PartialPolicy.DROP else max(lengths)
        if self.policy is PartialPolicy.ERROR and not failed and min(lengths) < longest:
            raise ArgumentError(
                f"The data of process {lengths.index(min(lengths))} has ended before that of another one, "
                "and with partial='error' all end together. Give every process as many batches, or pass "
                "InputOptions(partial='mask'), with which a process that is out of data goes on with "
                "masked padding."
            )
        return min([longest, *failed])


def _exactly(elements: Iterator[HostElement], length: int) -> Iterator[HostElement]:
    number = 0
    for number, element in enumerate(elements, 1):
        if number > length:
            break
        yield element
    if number != length:
        actual = "more" if number > length else number
        raise ArgumentError(
            f"The length of the source is {length} batches, and an epoch had {actual}. The processes have "
            "agreed on that number, so its length must be right, or it must have none."
        )


def _check_lengths(lengths: Sequence[int | None]) -> None:
    if len(set(lengths)) > 1:
        lines = "\n".join(f"  process {i}: {length} batches" for i, length in enumerate(lengths))
        raise ArgumentError(
            f"All processes read the same batches, but their sources differ:\n{lines}\nGive every process "
            "the same data, or different data with strategy.distribute_datasets_from_function."
        )


def _check_all_have_data(everyone: Sequence[Announcement]) -> None:
    without = [i for i, one in enumerate(everyone) if not one.steps and one.error is None]
    if without and any(one.steps for one in everyone):
        raise ArgumentError(
            f"Process {without[0]} has no batch at all, and other processes have some, so it does not know "
            "what the batches look like. Give every process at least one batch, or let every process read "
            'everything: dj.InputOptions(auto_shard_policy="data").'
        )


def _raise(error: BaseException | None, everyone: Sequence[Announcement]) -> None:
    """Raises what ended this process's data, or the news that another's failed."""
    if error is not None:
        raise error
    for process, one in enumerate(everyone):
        if one.error is not None:
            raise ArgumentError(
                f"The input of process {process} failed, so no process can take the next step:\n"
                f"  {one.error}\nIts traceback is in the output of process {process}."
            )


def _check_steps_match(everyone: Sequence[Announcement], policy: PartialPolicy) -> None:
    """Raises, on every process, if the batches of a step would not make one array."""
    fixed = policy in (PartialPolicy.DROP, PartialPolicy.ERROR)
    for number in range(max(len(one.steps) for one in everyone)):
        kinds: dict[str, int] = {}
        for process, one in enumerate(everyone):
            for step in one.steps[number : number + 1]:
                size = f", {step.share} examples for each replica" if fixed else ""
                kinds.setdefault(step.kind + size, process)
        if len(kinds) > 1:
            lines = "\n".join(f"  process {process}: {kind}" for kind, process in kinds.items())
            raise ArgumentError(
                f"The processes bring different batches to one step:\n{lines}\nAll processes run one "
                "program, so their batches must have the same keys, dtypes and sizes, and without masks "
                "as many examples. Pad them, for example, to one size."
            )


def _next(
    elements: Iterator[HostElement], count: int
) -> tuple[list[HostElement], BaseException | None]:
    """Returns the next elements, and the error that came in place of one."""
    local: list[HostElement] = []
    try:
        for element in islice(elements, count):
            local.append(element)  # noqa: PERF402 - what came before an error is kept
    except BaseException as error:  # whatever it is, the others must hear of it
        return local, error
    return local, None


def _text(error: BaseException | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error_text(error)}"


_DIFFERENT_BATCHES = (
    "All processes are to read the same batches and to take their part of each, but their first batches "
    "differ: some examples may be trained on twice and others never. Give every process the same data and "
    "the same seed for its shuffling, or different data: strategy.distribute_datasets_from_function, or "
    'dj.InputOptions(auto_shard_policy="off"). Random changes of the images may stay: this is a warning only.'
)
