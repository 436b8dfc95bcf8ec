"""Feeds: global batches divided into elements on the host, and batches of a user's input function."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, zip_longest
from typing import Any, NoReturn, final

import jax
import numpy as np

from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import outside_mesh
from distribute_jax._messages import PyTree, leaf_text
from distribute_jax.data._check import Alike, check_batch
from distribute_jax.data._element import HostElement, PartsElement, Seen, check_alike
from distribute_jax.data._options import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
    PartialPolicy,
)
from distribute_jax.data._partial import ALONE, Divider, PartsDivider
from distribute_jax.data._split import Rule, Worker, shard, share_of
from distribute_jax.data._state import SAME_BATCHES, State, check_same, read_state, state_of
from distribute_jax.data.sources import Source, find_source


class Feed(ABC):
    """The elements of a dataset on the host, before they go to the devices."""

    is_infinite: bool
    """Whether an epoch has no end."""
    divides: bool
    """Whether an element is one global batch that the replicas divide."""

    @abstractmethod
    def open(self, epoch: int) -> Iterator[HostElement]:
        """Starts an epoch; a one-shot source has only one."""

    @abstractmethod
    def preview(self) -> Iterator[HostElement]:
        """Starts an epoch without using anything up."""

    @property
    @abstractmethod
    def cardinality(self) -> int | None:
        """The number of elements of an epoch, or None where it is not known before the end."""

    @abstractmethod
    def state(self, epoch: int, seen: Seen) -> State:
        """Writes down how far an epoch has come; an ArgumentError where it could not go on there."""

    @abstractmethod
    def resume(self, state: State) -> tuple[int, Seen, Iterator[HostElement]]:
        """Reads such a state: the epoch, how far it has come, and the elements that are left."""


@final
class GlobalBatches(Feed):
    """Global batches of one source, each divided among the replicas."""

    divides = True

    def __init__(
        self, source: Source, options: InputOptions, replicas: int, worker: Worker = ALONE
    ) -> None:
        self._source, self._rule = shard(source, options, worker.count, worker.index)
        self._worker = worker
        self._policy = PartialPolicy(options.partial)
        self._replicas = replicas
        self.is_infinite = self._source.is_infinite

    def open(self, epoch: int) -> Iterator[HostElement]:
        """See ``Feed.open``."""
        source = self._source
        batches = source.open_at(epoch, 0) if source.can_seek else source.open()
        return self._laid_out(batches)

    def preview(self) -> Iterator[HostElement]:
        """See ``Feed.preview``."""
        return self._laid_out(self._source.preview())

    @property
    def cardinality(self) -> int | None:
        """The source's own length; nobody knows beforehand which batches ``"drop"`` will skip.

        Nor is it known in how many steps several processes take a partial batch by rule B.
        """
        if self._policy is PartialPolicy.DROP or self._cuts_batches:
            return None
        return length_of(self._source)

    def state(self, epoch: int, seen: Seen) -> State:
        """See ``Feed.state``."""
        self._check_seekable("state")
        return state_of(self._source, length_of(self._source), epoch, seen)

    def resume(self, state: State) -> tuple[int, Seen, Iterator[HostElement]]:
        """See ``Feed.resume``."""
        self._check_seekable("restore")
        length = length_of(self._source)
        epoch, seen = read_state(state, self._source, length)
        if length is None and seen.first:
            batches = self._source.open_at(epoch, 0)
            first = next((e.seen.first for e in self._laid_out(batches)), 0)
            check_same("first_batch", seen.first, first, SAME_BATCHES)
        batches = self._source.open_at(epoch, seen.batches)
        return epoch, seen, self._laid_out(batches, seen)

    def _laid_out(
        self, batches: Iterator[PyTree], seen: Seen | None = None
    ) -> Iterator[HostElement]:
        divider = Divider(self._policy, self._replicas, self._rule, seen, self._worker)
        return laid_out(batches, divider, self._source.batching)

    @property
    def is_common(self) -> bool:
        """Whether every process reads the same batches and takes its part of each."""
        return self._rule is Rule.A

    @property
    def _cuts_batches(self) -> bool:
        """Whether one batch makes several steps."""
        return self._rule is Rule.B and self._worker.count > 1

    def _check_seekable(self, method: str) -> None:
        if self._cuts_batches:
            raise ArgumentError(
                f"iterator.{method} counts batches, but where {self._worker.count} processes read files or "
                "batches of their own, one batch makes several steps. Let every process read everything "
                'and take its part: dj.InputOptions(auto_shard_policy="data").'
            )
        if not self._source.can_seek:
            raise ArgumentError(
                f"iterator.{method} needs a source that can start at any batch, and "
                f"{self._source.text} cannot. Distribute dj.data.from_arrays(...) or a Grain dataset, "
                "or save at the end of an epoch only."
            )


def length_of(source: Source) -> int | None:
    """Gives the number of batches of an epoch, or None where the source does not know it."""
    try:
        return len(source)
    except TypeError:
        return None


def laid_out(batches: Iterable[PyTree], divider: Divider, batching: str) -> Iterator[HostElement]:
    """Gives each batch that becomes an element, with the shares of its rows.

    Raises:
        ArgumentError: a batch cannot be divided, or is not like the first one.
    """
    alike, is_first = Alike(), True
    for position, batch in enumerate(batches, divider.seen.batches):
        where = f"Batch {position} of the dataset"
        n = check_batch(batch, where, batching)
        if n > 0:
            alike.check(batch, where)
        whole = _digest(batch) if divider.is_common and is_first else None
        is_first = False
        for cut in divider.divide(n, where):
            mine = batch if len(cut.rows) == n else _rows(batch, cut.rows)
            yield HostElement(mine, cut.division, divider.seen, cut.all_counts, whole)


def _rows(batch: PyTree, rows: range) -> PyTree:
    # Inside scope() the mesh context would refuse any computation on one device.
    with outside_mesh():
        return jax.tree.map(lambda leaf: leaf[rows.start : rows.stop], batch)


def _digest(batch: PyTree) -> str:
    total = hashlib.blake2b(digest_size=8)
    for leaf in jax.tree.leaves(batch):
        total.update(np.ascontiguousarray(leaf).tobytes())
    return total.hexdigest()


_CALLED = "strategy.distribute_datasets_from_function"

DatasetFn = Callable[[InputContext], Any]


def sources_of(
    dataset_fn: DatasetFn, options: InputOptions, replicas: int, worker: Worker = ALONE
) -> list[Source]:
    """Calls the user's function, once or once for each replica, and gives what it made.

    Raises:
        ArgumentError: it is no function, returned no batches, or the options ask for sharding.
    """
    if not callable(dataset_fn):
        raise ArgumentError(
            f"{_CALLED} got {leaf_text(dataset_fn)}, which is no function. Pass one that takes a "
            "dj.InputContext and returns the batches of one replica after the other, or pass the "
            "dataset itself to strategy.distribute_dataset."
        )
    if options.auto_shard_policy not in (None, AutoShardPolicy.OFF):
        raise ArgumentError(
            f"{_CALLED} got auto_shard_policy={options.auto_shard_policy!r}, but it shards nothing. "
            "Shard in the function, by context.num_input_pipelines and context.input_pipeline_id."
        )
    per_replica = options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
    mine = replicas if per_replica else 1
    contexts = [
        InputContext(worker.count * mine, worker.index * mine + i, worker.count * replicas)
        for i in range(mine)
    ]
    return [_source(dataset_fn, context) for context in contexts]


def _source(dataset_fn: DatasetFn, context: InputContext) -> Source:
    dataset = dataset_fn(context)
    if dataset is None:
        raise ArgumentError(
            f"The function {dataset_fn!r:.60} given to {_CALLED} returned None. It must return the "
            "batches of one replica after the other: a list, a generator or a dataset."
        )
    return find_source(dataset, _CALLED)


@final
class OwnBatches(Feed):
    """Per-replica batches: of one source in turn, or of a source for each replica."""

    divides = False

    def __init__(self, sources: Sequence[Source], options: InputOptions, replicas: int) -> None:
        """Takes the sources of this process, and how many replicas it has."""
        self._sources = sources
        self._policy = PartialPolicy(options.partial)
        self._replicas = replicas
        self.is_infinite = any(source.is_infinite for source in sources)

    def open(self, epoch: int) -> Iterator[HostElement]:
        """See ``Feed.open``."""
        del epoch  # each source counts its own
        return self._laid_out([map(_kept, source.open()) for source in self._sources])

    def preview(self) -> Iterator[HostElement]:
        """See ``Feed.preview``."""
        return self._laid_out([map(_kept, source.preview()) for source in self._sources])

    @property
    def cardinality(self) -> int | None:
        """See ``Feed.cardinality``."""
        lengths = [length_of(source) for source in self._sources]
        known = [length for length in lengths if length is not None]
        if len(known) < len(lengths) or self._policy is PartialPolicy.DROP:
            return None
        return max(known) if len(known) > 1 else share_of(known[0], self._replicas)

    def state(self, epoch: int, seen: Seen) -> NoReturn:
        """See ``Feed.state``."""
        raise _cannot("state")

    def resume(self, state: State) -> NoReturn:
        """See ``Feed.resume``."""
        raise _cannot("restore")

    def _laid_out(self, batches: Sequence[Iterator[Any]]) -> Iterator[HostElement]:
        divider = PartsDivider(self._policy)
        rounds = (
            zip_longest(*batches, fillvalue=_NONE) if len(batches) > 1 else self._turns(*batches)
        )
        alike = Alike()
        for position, parts in enumerate(rounds):
            where = f"Element {position} of the dataset"
            counts = [0] * self._replicas
            for replica, part in enumerate(parts):
                if part is _NONE:
                    continue
                of_replica = f"{where}, in its batch for replica {replica},"
                source = self._sources[replica % len(self._sources)]
                counts[replica] = check_batch(part, of_replica, source.batching)
                alike.check(part, of_replica)
            mine = tuple(None if part is _NONE else part for part in parts)
            check_alike(mine, where)
            division = divider.divide(counts, where)
            if division is not None:
                yield PartsElement(mine, division, Seen(batches=position + 1))

    def _turns(self, batches: Iterator[Any]) -> Iterator[Iterable[Any]]:
        """Deals the batches out: each replica takes one, the last may find none left."""
        while dealt := list(islice(batches, self._replicas)):
            yield dealt + [_NONE] * (self._replicas - len(dealt))


_NONE: Any = object()
"""Stands for the batch of a replica whose data has ended."""


def _kept(batch: Any) -> Any:
    """Copies a batch, since an element is made of several and loaders reuse their buffers."""
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, batch)


def _cannot(method: str) -> ArgumentError:
    return ArgumentError(
        f"iterator.{method} needs global batches, but this dataset deals out the batches that a "
        "function made, and their meaning changes with the number of replicas. Use "
        "strategy.distribute_dataset(dj.data.from_arrays(...)), or keep the function's own state."
    )
