"""When an epoch ends on all processes: they agree on its steps, a few at a time."""

from __future__ import annotations

import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh

from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import is_local, local_replicas
from distribute_jax._messages import error_text
from distribute_jax.data._element import HostElement
from distribute_jax.data._options import InputOptions, PartialPolicy
from distribute_jax.data._partial import ALONE
from distribute_jax.data._split import Worker
from distribute_jax.processes import Job, job


def worker_of(mesh: Mesh) -> Worker:
    """Tells how many processes share a mesh, and which of them this is."""
    found = job()
    if is_local(mesh) or found is None:
        return ALONE
    return Worker(found.count, found.index)


def ends_of_epochs(mesh: Mesh, options: InputOptions, *, common: bool) -> Callable[[], EndOfData]:
    """Gives what makes, for each pass over a new dataset, the agreement on its steps.

    All processes distribute the same datasets and pass over them in the same order. Each pass talks
    about itself alone, so that one which is left early does not disturb the next.

    Args:
        mesh: the strategy's mesh.
        options: what becomes of partial batches.
        common: whether all processes read the same batches.
    """
    found = job()
    if is_local(mesh) or found is None:
        return OneProcess
    _made["datasets"] += 1
    number, passes = _made["datasets"], Counter[str]()
    worker, replicas = Worker(found.count, found.index), len(local_replicas(mesh))

    def next_pass() -> EndOfData:
        passes["all"] += 1
        talk = _Talk(found, f"the batches of dataset {number}, pass {passes['all']}")
        policy = PartialPolicy(options.partial)
        return Agreed(talk, worker, replicas, policy=policy, common=common)

    return next_pass


class _Talk:
    """Rounds of talk over the coordination service: an ``Exchange``."""

    def __init__(self, found: Job, topic: str) -> None:
        self._job, self._topic = found, topic

    def __call__(self, said: Said) -> Sequence[Said]:
        """See ``Exchange``."""
        return [from_text(text) for text in self._job.exchange(self._topic, as_text(said))]


_made: Counter[str] = Counter()
"""How many datasets were distributed so far, which is the same number on every process."""


class EndOfData(Protocol):
    """An agreement between processes on how many steps an epoch has.

    All processes run the same compiled steps together, so a process whose data has ended goes on
    with elements of padding alone until the data of every process has ended.
    """

    def steps(self, elements: Iterator[HostElement], length: int | None) -> Iterator[HostElement]:
        """Gives the elements of one process for each step that the processes take together.

        Args:
            elements: this process's own.
            length: how many they are, or None where that is not known before the end.

        Returns:
            The same elements, and then ``last.masked(replicas)`` for each step for which only other
            processes have data.
        """


class OneProcess:
    """One process agrees with itself: the epoch ends with its own elements."""

    def steps(self, elements: Iterator[HostElement], length: int | None) -> Iterator[HostElement]:
        """See ``EndOfData.steps``."""
        del length
        return elements


_SECONDS = 1.0
"""How long the steps of one round should last, so that a thousand processes do not talk all the time."""

_MOST = 8
"""Steps of one round at most: so many batches wait on the host until the others' are known."""


class Step(NamedTuple):
    """What one process brings to one step."""

    counts: tuple[int, ...]
    """Real examples of each of its replicas."""
    share: int
    """Rows of each replica, padding included."""
    kind: str
    """The batch's structure, dtypes and sizes except dim 0."""


@dataclass(frozen=True)
class Said:
    """What one process says in a round: numbers and text alone, so that it can be sent."""

    steps: tuple[Step, ...] = ()
    """Its next steps, fewer than asked for where its data ends."""
    seconds: float = 0.0
    """How long each step of its last round took."""
    error: str | None = None
    """Why it has no more."""
    length: int | None = None
    """Steps of its epoch, where that is known beforehand."""
    first: str | None = None
    """A digest of the first batch that it reads, where all read the same."""


def as_text(said: Said) -> str:
    """Writes down what a process says, to be sent."""
    return json.dumps(asdict(said))


def from_text(text: str) -> Said:
    """Reads what a process has said."""
    fields = json.loads(text)
    steps = (Step(tuple(counts), share, kind) for counts, share, kind in fields.pop("steps"))
    return Said(steps=tuple(steps), **fields)


class Exchange(Protocol):
    """One round of talk: each process calls it once and hears all."""

    def __call__(self, said: Said) -> Sequence[Said]:
        """Gives what every process said in this round, in the order of the processes."""


class Agreed:
    """Processes with data of different length take the same steps: an ``EndOfData``.

    A process whose data has ended goes on with padding alone under the policies ``mask`` and ``shrink``.
    Under ``drop`` the epoch ends with the first process whose data ends, and under ``error`` it is an
    error that they do not end together. What makes one process fail is raised by all, and none waits.

    Args:
        exchange: the round of talk.
        worker: which of the processes this is.
        replicas: the replicas of this process, as many as those of any other.
        policy: what becomes of partial batches.
        common: whether all read the same batches, so that one round is enough where their number is
            known.
    """

    def __init__(
        self,
        exchange: Exchange,
        worker: Worker,
        replicas: int,
        *,
        policy: PartialPolicy,
        common: bool,
    ) -> None:
        self._exchange = exchange
        self._worker = worker
        self._replicas = replicas
        self._policy = policy
        self._common = common

    def steps(self, elements: Iterator[HostElement], length: int | None) -> Iterator[HostElement]:
        """See ``EndOfData.steps``."""
        if self._common:
            first, error = _next(elements, 1)
            digest = first[0].whole if first else None
            said = self._exchange(Said(error=_text(error), length=length, first=digest))
            _check_lengths([one.length for one in said])
            _raise(error, said)
            elements = chain(first, elements)
            if self._worker.index == 0 and len({one.first for one in said}) > 1:
                warnings.warn(_OTHER_BATCHES, stacklevel=2)
            if length is not None:
                return _as_many(elements, length)
        return self._rounds(elements)

    def _rounds(self, elements: Iterator[HostElement]) -> Iterator[HostElement]:
        last: HostElement | None = None
        asked, share, seconds = 1, 0, 0.0
        while True:
            start = time.perf_counter()
            mine, error = _next(elements, asked)
            steps = tuple(_step(element, self._replicas) for element in mine)
            said = self._exchange(Said(steps, seconds, _text(error)))
            if last is None:
                _check_all_have_data(said)
            _check_alike(said, self._policy)
            taken = self._taken(said)
            for number in range(taken):
                last = mine[number] if number < len(mine) else last
                brought = [one.steps[number : number + 1] for one in said]
                share = max(self._least(share), *(step.share for one in brought for step in one))
                yield self._agreed(last, share, brought)
            _raise(error, said)
            if taken < asked:
                return
            seconds = (time.perf_counter() - start) / asked
            asked = _steps_of_a_round(said)

    def _least(self, share: int) -> int:
        # MASK keeps one shape for the whole epoch, also when the process with the longest share is out.
        return share if self._policy is PartialPolicy.MASK else 0

    def _taken(self, said: Sequence[Said]) -> int:
        lengths = [len(one.steps) for one in said]
        failed = [len(one.steps) for one in said if one.error is not None]
        longest = min(lengths) if self._policy is PartialPolicy.DROP else max(lengths)
        if self._policy is PartialPolicy.ERROR and not failed and min(lengths) < longest:
            raise ArgumentError(_UNEVEN.format(process=lengths.index(min(lengths))))
        return min([longest, *failed])

    def _agreed(self, last: Any, share: int, brought: Sequence[Sequence[Step]]) -> HostElement:
        nothing = (0,) * self._replicas
        counts = [one[0].counts if one else nothing for one in brought]
        everyone = [count for of_process in counts for count in of_process]
        agreed: HostElement = last.agreed(share, counts[self._worker.index], everyone)
        return agreed


def _steps_of_a_round(said: Sequence[Said]) -> int:
    """Follows from what all have heard, so that all ask for as many."""
    slowest = max(one.seconds for one in said)
    return min(max(int(_SECONDS / slowest), 1), _MOST) if slowest > 0 else 1


def _as_many(elements: Iterator[HostElement], length: int) -> Iterator[HostElement]:
    number = 0
    for number, element in enumerate(elements, 1):
        if number > length:
            break
        yield element
    if number != length:
        given = "more" if number > length else number
        raise ArgumentError(
            f"The source said that an epoch has {length} batches, and gave {given}. The processes have "
            "agreed on that number, so its length must be right, or it must have none."
        )


def _check_lengths(lengths: Sequence[int | None]) -> None:
    if len(set(lengths)) > 1:
        lines = "\n".join(f"  process {i}: {length} batches" for i, length in enumerate(lengths))
        raise ArgumentError(
            f"All processes read the same batches, but their sources differ:\n{lines}\nGive every process "
            "the same data, or data of its own with strategy.distribute_datasets_from_function."
        )


def _check_all_have_data(said: Sequence[Said]) -> None:
    without = [i for i, one in enumerate(said) if not one.steps and one.error is None]
    if without and any(one.steps for one in said):
        raise ArgumentError(_NOTHING.format(process=without[0]))


def _raise(error: BaseException | None, said: Sequence[Said]) -> None:
    """Raises what ended this process's data, or the news that another's failed."""
    if error is not None:
        raise error
    failed = next((i for i, one in enumerate(said) if one.error is not None), None)
    if failed is not None:
        raise ArgumentError(
            f"The input of process {failed} failed, so no process can take the next step:\n"
            f"  {said[failed].error}\nIts traceback stands in the output of process {failed}."
        )


def _check_alike(said: Sequence[Said], policy: PartialPolicy) -> None:
    """Raises, on every process, where the batches of a step would not make one array."""
    fixed = policy in (PartialPolicy.DROP, PartialPolicy.ERROR)
    for number in range(max(len(one.steps) for one in said)):
        found: dict[str, int] = {}
        for process, one in enumerate(said):
            for step in one.steps[number : number + 1]:
                size = f", {step.share} examples for each replica" if fixed else ""
                found.setdefault(step.kind + size, process)
        if len(found) > 1:
            lines = "\n".join(f"  process {process}: {kind}" for kind, process in found.items())
            raise ArgumentError(
                f"The processes bring different batches to one step:\n{lines}\n{_ALIKE}"
            )


def _next(
    elements: Iterator[HostElement], count: int
) -> tuple[list[HostElement], BaseException | None]:
    found: list[HostElement] = []
    try:
        for element in islice(elements, count):
            found.append(element)  # noqa: PERF402 - what came before an error is kept
    except BaseException as error:  # whatever it is, the others must hear of it
        return found, error
    return found, None


def _step(element: HostElement, replicas: int) -> Step:
    leaves, structure = jax.tree.flatten(element.spec)
    kind = f"{structure} of " + ", ".join(f"{leaf.dtype}{list(leaf.shape[1:])}" for leaf in leaves)
    return Step(element.counts(replicas), element.division.share, kind)


def _text(error: BaseException | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error_text(error)}"


_NOTHING = (
    "Process {process} has no batch at all, and other processes have some, so it does not know what the "
    "batches look like. Give every process at least one batch, or let every process read everything: "
    'dj.InputOptions(auto_shard_policy="data").'
)
_UNEVEN = (
    "The data of process {process} has ended before that of another one, and with partial='error' all end "
    "together. Give every process as many batches, or pass InputOptions(partial='mask'), with which a "
    "process that is out of data goes on with masked padding."
)
_ALIKE = (
    "All processes run one program, so their batches have the same keys, dtypes and sizes, and without "
    "masks as many examples. Make them alike, for example by padding to one size."
)
_OTHER_BATCHES = (
    "All processes are to read the same batches and to take their part of each, but their first batches "
    "differ: some examples may be trained on twice and others never. Give every process the same data and "
    "the same seed for its shuffling, or data of its own: strategy.distribute_datasets_from_function, or "
    'dj.InputOptions(auto_shard_policy="off"). Random changes of the images may stay: this is a warning only.'
)
