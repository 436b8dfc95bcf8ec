"""Elements of a dataset on the host, made of global or of per-replica batches, and their positions."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._checks import check_int
from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import outside_mesh
from distribute_jax._messages import KeyPath, PyTree, is_key, leaf_text, path_text
from distribute_jax.data._check import BatchSignature
from distribute_jax.data._element import HostElement, taken
from distribute_jax.data._options import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
    PartialPolicy,
)
from distribute_jax.data._split import (
    ALONE,
    EpochProgress,
    Worker,
    shard,
    share_by_policy,
    share_of,
    shares,
    steps_of,
)
from distribute_jax.data.sources import Source, find_source

State: TypeAlias = Mapping[str, Any]
"""The position of an iterator, as a small dict that JSON can encode."""


class Feed(ABC):
    """The elements of a dataset on the host, before they go to the devices."""

    is_infinite: bool
    """True if an epoch has no end."""
    divides: bool
    """True if an element is one global batch that the replicas divide."""
    cuts_batches = False
    """True if one batch makes several steps."""
    can_change_thread = False
    """True if one thread may start to read and another continue."""

    @abstractmethod
    def open(self, epoch: int) -> Iterator[HostElement]:
        """Starts an epoch; a one-shot source has only one."""

    @abstractmethod
    def preview(self) -> Iterator[HostElement]:
        """Starts an epoch without consuming anything."""

    @property
    @abstractmethod
    def cardinality(self) -> int | None:
        """The number of elements of an epoch, or None if it is not known before the end."""

    def state(self, epoch: int, progress: EpochProgress) -> State:
        """Returns the position in an epoch; raises an ArgumentError if it cannot be resumed there."""
        raise _not_resumable("state")

    def resume(self, state: State) -> tuple[int, EpochProgress, Iterator[HostElement]]:
        """Returns the epoch of a state, its progress, and its remaining elements."""
        raise _not_resumable("restore")


@final
class GlobalBatches(Feed):
    """Global batches of one source, each divided among the replicas."""

    divides = True

    def __init__(
        self, source: Source, options: InputOptions, replicas: int, worker: Worker = ALONE
    ) -> None:
        # is_common: every process reads the same batches and takes its part of each.
        self._source, self.is_common = shard(source, options, worker)
        self._worker = worker
        self._policy = PartialPolicy(options.partial)
        self._replicas = replicas
        self.is_infinite = self._source.is_infinite
        self.cuts_batches = not self.is_common and worker.count > 1
        self.can_change_thread = worker.count == 1 and not self._source.runs_user_code

    def open(self, epoch: int) -> Iterator[HostElement]:
        return self._divided(self._source.open(epoch))

    def preview(self) -> Iterator[HostElement]:
        return self._divided(self._source.preview())

    @property
    def cardinality(self) -> int | None:
        # It is not known in advance which batches DROP will skip, nor how many steps several processes
        # make of a partial batch by rule B.
        if self._policy is PartialPolicy.DROP or self.cuts_batches:
            return None
        return self._source.length

    @property
    def _identity(self) -> State:
        """What must be equal in a state and in the dataset that resumes from it."""
        source = self._source
        sizes = {"examples": source.examples, "batch_size": source.batch_size}
        seed, length = source.seed, source.length
        return {"version": 1, "source": source.text, "seed": seed, **sizes, "batches": length}

    def state(self, epoch: int, progress: EpochProgress) -> State:
        self._check_resumable("state")
        return {
            **self._identity,
            "epoch": epoch,
            "position": progress.batches,
            "first_batch": progress.first,
            "largest_batch": progress.largest,
        }

    def resume(self, state: State) -> tuple[int, EpochProgress, Iterator[HostElement]]:
        self._check_resumable("restore")
        epoch, progress = _read_state(state, self._identity)
        if first := progress.first:  # as for a new iterator: DROP skips what is less full than it
            what = f"The first batch of the restored epoch has {first} examples"
            self._parts(first, 0, first, what)
        if self._source.batch_size is None and progress.first:
            elements = self._divided(self._source.open(epoch))
            first = next((element.progress.first for element in elements), 0)
            _check_same({"first_batch": progress.first}, {"first_batch": first})
        batches = self._source.open(epoch, progress.batches)
        return epoch, progress, self._divided(batches, progress)

    def _divided(
        self, batches: Iterator[PyTree], progress: EpochProgress | None = None
    ) -> Iterator[HostElement]:
        """Yields the elements of batches: the rows that this process takes in each step."""
        signature, progress = BatchSignature(), progress or EpochProgress()
        start, sizes, parts = progress.batches, (-1, 0, 0), []
        takes_part = self.is_common and self._worker.count > 1
        if takes_part and (length := self.cardinality) is not None:
            batches = _counted(batches, start, length)
        for position, batch in enumerate(batches, start):
            where = f"Batch {position} of the dataset"
            n = signature.check(batch, where, self._source.batching, compare_empty=False)
            digest = _digest(batch) if takes_part and position == start else None
            first, progress = progress.first, progress.with_batch(n)
            if (n, first, progress.largest) != sizes:  # most batches are as large as the last one
                sizes = n, first, progress.largest
                parts = self._parts(*sizes, f"{where} has {n} examples")
            for rows, share, counts, all_counts in parts:
                local = _rows(batch, n, rows.start, rows.stop)
                yield HostElement(local, share, counts, progress, all_counts, digest)

    def _parts(
        self, n: int, first: int, largest: int, what: str
    ) -> list[tuple[range, int, list[int], tuple[int, ...] | None]]:
        """Returns rows, share, and counts here and of all processes of each element that n rows make.

        The first batch had ``first`` rows (0 for the first itself), the largest one so far ``largest``.
        """
        workers, replicas = self._worker.count, self._worker.count * self._replicas
        all_counts = shares(n, replicas)
        share = share_by_policy(
            self._policy, all_counts, what, first=first, largest=share_of(largest, replicas)
        )
        if share is None:
            return []
        steps = steps_of(n, largest, self._worker, self._replicas, is_common=self.is_common)
        shrinks = self._policy is PartialPolicy.SHRINK and not self.is_common
        everyone = all_counts if self.is_common and workers > 1 else None
        parts = []
        for rows in steps:
            counts = [len(each) for each in rows]
            here = range(rows[0].start, rows[-1].stop)
            parts.append((here, max(counts) if shrinks else share, counts, everyone))
        return parts

    def _check_resumable(self, method: str) -> None:
        if self.cuts_batches:
            raise ArgumentError(
                f"iterator.{method} counts batches, and one makes several steps if processes read different "
                'ones. Let every process read everything: dj.InputOptions(auto_shard_policy="data").'
            )
        if not self._source.can_resume:
            raise ArgumentError(
                f"iterator.{method} needs a source that can start at any batch, and "
                f"{self._source.text} cannot. {self._source.how_to_resume}"
                "Distribute dj.data.from_arrays(...) or a Grain dataset, or save only at the end of an epoch."
            )


def _counted(batches: Iterator[PyTree], number: int, length: int) -> Iterator[PyTree]:
    """Yields all batches but the first ``number``; raises if that makes another length than expected."""
    for batch in batches:
        number += 1
        if number > length:
            break
        yield batch
    if number != length:
        actual = "more" if number > length else number
        raise ArgumentError(
            f"The length of the source is {length} batches, and an epoch had {actual}. The processes have "
            "agreed on that number, so its __len__ must be right, or be left out."
        )


_NUMBERS = ("epoch", "position", "first_batch", "largest_batch")


def _read_state(state: State, identity: State) -> tuple[int, EpochProgress]:
    """Returns the epoch and progress in a state; raises an ArgumentError if it is not one of this source."""
    try:
        saved = {name: state[name] for name in identity}
        epoch, position, first, largest = (check_int(name, state[name], 0) for name in _NUMBERS)
        if saved == identity and identity["batches"] is not None:
            check_int("position", position, 0, identity["batches"] + 1)
    except (TypeError, LookupError, ArgumentError) as error:
        raise ArgumentError(
            f"iterator.restore got {state!r:.80}, which is not what iterator.state() returned: "
            f"{type(error).__name__}: {error}"
        ) from None
    _check_same(saved, identity)
    return epoch, EpochProgress(position, first, largest)


def _check_same(saved: State, identity: State) -> None:
    """Raises if a field of a state has another value than this dataset."""
    differing = {name: saved[name] for name in identity if saved[name] != identity[name]}
    if differing:
        now = {name: identity[name] for name in differing}
        raise ArgumentError(
            f"iterator.restore got a state with {differing}, but this dataset has {now}, so the next batch "
            "would be a different one. Distribute the same examples, in the same global batches, shuffled "
            "with the same seed."
        )


def _rows(batch: PyTree, n: int, start: int, stop: int) -> PyTree:
    """Returns rows start to stop of a batch of n; one row, which becomes padding, if there are none."""
    if (start, stop) == (0, n):
        return batch
    rows = slice(start, stop) if stop > start else slice(n - 1, n)
    # Inside scope() the mesh context would refuse any computation on one device.
    with outside_mesh():
        return jax.tree.map(lambda leaf: taken(leaf, rows), batch)


def _digest(batch: PyTree) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for leaf in jax.tree.leaves(batch):
        bits = jax.random.key_data(leaf) if is_key(leaf) else leaf
        digest.update(np.ascontiguousarray(bits).tobytes())
    return digest.hexdigest()


_METHOD = "strategy.distribute_datasets_from_function"

DatasetFn = Callable[[InputContext], Any]


def sources_of(
    dataset_fn: DatasetFn, options: InputOptions, replicas: int, worker: Worker = ALONE
) -> list[Source]:
    """Calls the user's function once for this process or for each of its replicas; returns the sources."""
    if options.auto_shard_policy not in (None, AutoShardPolicy.OFF):
        raise ArgumentError(
            f"{_METHOD} got auto_shard_policy={options.auto_shard_policy!r}, but it shards nothing. "
            "Shard in the function, by context.num_input_pipelines and context.input_pipeline_id."
        )
    per_replica = options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
    pipelines = replicas if per_replica else 1
    contexts = [
        InputContext(worker.count * pipelines, i, worker.count * replicas)
        for i in range(worker.index * pipelines, (worker.index + 1) * pipelines)
    ]
    return [find_source(dataset_fn(context), _METHOD) for context in contexts]


@final
class PerReplicaFeed(Feed):
    """Per-replica batches: the replicas take turns at one source, or each replica has its source."""

    divides = False

    def __init__(self, sources: Sequence[Source], options: InputOptions, replicas: int) -> None:
        self._sources = sources
        self._policy = PartialPolicy(options.partial)
        self._replicas = replicas
        self.is_infinite = any(source.is_infinite for source in sources)

    def open(self, epoch: int) -> Iterator[HostElement]:
        return self._elements([source.open(epoch) for source in self._sources])

    def preview(self) -> Iterator[HostElement]:
        return self._elements([source.preview() for source in self._sources])

    @property
    def cardinality(self) -> int | None:
        lengths = [source.length for source in self._sources]
        known = [length for length in lengths if length is not None]
        if len(known) < len(lengths) or self._policy is PartialPolicy.DROP:
            return None
        return max(known) if len(known) > 1 else share_of(known[0], self._replicas)

    def _elements(self, sources: Sequence[Iterator[Any]]) -> Iterator[HostElement]:
        signature, first, largest = BatchSignature(), 0, 0
        each = [map(_copied, batches) for batches in sources]
        if len(each) == 1:  # the replicas take turns
            each *= self._replicas
        for position, parts in enumerate(zip_longest(*each, fillvalue=_ENDED)):
            where = f"Element {position} of the dataset"
            counts = [0] * self._replicas
            for replica, part in enumerate(parts):
                if part is _ENDED:
                    continue
                of_replica = f"{where}, in its batch for replica {replica},"
                source = self._sources[replica % len(self._sources)]
                counts[replica] = signature.check(
                    part, of_replica, source.batching, compare_empty=True
                )
            largest = max(largest, *counts)
            what = f"{where} has {', '.join(map(str, counts))} examples"
            share = share_by_policy(self._policy, counts, what, first=first, largest=largest)
            first = first or sum(counts)
            if share is not None:
                batch = _joined([part for part in parts if part is not _ENDED], where)
                yield HostElement(batch, share, counts, EpochProgress(batches=position + 1))


_ENDED: Any = object()
"""Stands for the batch of a replica whose data has ended."""


def _copied(batch: Any) -> Any:
    # An element consists of several batches, and loaders reuse their buffers.
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, batch)


def _joined(parts: Sequence[PyTree], where: str) -> PyTree:
    """Concatenates the replicas' batches along dim 0; raises if other dims differ."""

    def join(path: KeyPath, *leaves: Any) -> Any:
        if len({leaf.shape[1:] for leaf in leaves}) > 1:
            texts = " and ".join(dict.fromkeys(map(leaf_text, leaves)))
            raise ArgumentError(
                f"{where} has a batch for each replica, and these cannot be concatenated: "
                f"{path_text(path, 'batch')} is {texts}. Only dim 0, the number of examples, may differ "
                "between replicas: pad the other dims to one size."
            )
        if all(map(is_key, leaves)):
            with outside_mesh():
                return jnp.concatenate(leaves)
        return np.concatenate(leaves)

    return jax.tree.map_with_path(join, *parts)


def _not_resumable(method: str) -> ArgumentError:
    return ArgumentError(
        f"iterator.{method} needs global batches, but this dataset has per-replica batches made by a "
        "function, whose meaning changes with the number of replicas. Use "
        "strategy.distribute_dataset(dj.data.from_arrays(...)), or keep the function's state yourself."
    )
