"""Writes a checkpoint from copies on the host: each process its arrays, the chief the manifest."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from distribute_jax._errors import CheckpointError, CheckpointFileError
from distribute_jax._mesh import local_copy_of_replicated
from distribute_jax._messages import error_text, is_key, listed
from distribute_jax.checkpoint._agreement import WriteCoordinator, all_values, await_file
from distribute_jax.checkpoint._leaves import ARRAY, Slot, Spec, digest_of, host_copy, saved_value
from distribute_jax.checkpoint._manifest import (
    ARRAYS,
    PARTS,
    WHOLE,
    Manifest,
    Part,
    Record,
    make_record,
    manifest_text,
    parse_part,
)
from distribute_jax.checkpoint._orbax import write_arrays, write_bytes
from distribute_jax.checkpoint._storage import Directory
from distribute_jax.processes import current_job

_DIFFER = """\
{method}: these differ between the processes, and a checkpoint can hold only one of each:
{lines}
Save what is the same on all processes: build models and optimizers in the scope of the strategy of the \
job, and leave out what belongs to one process."""

_NO_ROOM = [*map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))]

_MIN_BYTES_PER_WRITER = 32 * 2**20
"""Bytes of mirrored leaves for each process that writes some: every further file costs readers time."""


@dataclass(frozen=True)
class Piece:
    """A box of one leaf: the complete leaf, or a shard of this process."""

    leaf: int
    """The index of the leaf in the tree."""
    data: np.ndarray[Any, Any]
    """For random keys, their data."""
    start: tuple[int, ...]
    """The index of its first element in the leaf."""
    is_whole: bool

    @property
    def name(self) -> str:
        return "_".join(map(str, [self.leaf] if self.is_whole else [self.leaf, *self.start]))


@dataclass(frozen=True)
class Draft:
    """A checkpoint to be written, with the data that this process writes."""

    directory: Directory
    name: str
    step: int | None
    """None for a checkpoint that is not saved by a manager."""
    token: str
    """Unique to this checkpoint, and the same on all processes."""
    specs: list[Spec]
    """Of all leaves of the tree."""
    texts: Mapping[int, Any]
    """JSON data of the leaves that are not arrays."""
    pieces: list[Piece]
    made_by: Mapping[str, Any]

    def note(self, process: int) -> str:
        """Returns the path of the file in which a process lists, for the chief, what it has written."""
        return f"{self.directory.draft_folder(self.name, self.token)}/{process}.part"


def write_checkpoint(draft: Draft, prepare: Callable[[], None]) -> None:
    """Writes a checkpoint so that at every moment the old one or the new one is there, complete.

    All processes of a job call it, in a background thread: the chief calls ``prepare``, each process writes
    its pieces, and the chief commits when all have.
    """
    job = current_job()
    coordinator = WriteCoordinator(job, draft.token)
    with _explained_errors(draft):
        if job.index:
            _write_as_helper(draft, coordinator)
            return
        with coordinator.leading():
            prepare()
            with draft.directory.draft(draft.name, draft.token):
                coordinator.open()
                try:
                    written = [_write_pieces(draft, 0)]
                except Exception:
                    coordinator.await_reports()  # the others still write into the folder to be removed
                    raise
                written += _notes_of_others(draft, coordinator)
                draft.directory.commit(draft.name, draft.token, _manifest(draft, written))


def _notes_of_others(draft: Draft, coordinator: WriteCoordinator) -> Iterator[dict[str, Any]]:
    where = draft.directory.path_of(draft.name)
    for process, sha256 in coordinator.collect(where).items():
        text = await_file(draft.directory, draft.note(process), sha256)
        if text is None:
            raise CheckpointFileError(
                f"The checkpoint {where} could not be written: {current_job().name_of(process)} has written "
                f"its part, which {current_job().name_of(0)} does not find. Give all processes a directory "
                "that all of them see."
            )
        draft.directory.remove_file(draft.note(process))
        yield json.loads(text)


def _write_as_helper(draft: Draft, coordinator: WriteCoordinator) -> None:
    if not coordinator.await_open():
        return
    me = current_job().index
    try:
        with _explained_errors(draft):
            text = json.dumps(_write_pieces(draft, me)).encode()
            draft.directory.write(draft.note(me), text)
    except Exception as error:
        coordinator.report(error=str(error))
        raise
    coordinator.report(sha256=hashlib.sha256(text).hexdigest())


@contextmanager
def _explained_errors(draft: Draft) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        text = error_text(error)  # Orbax puts the system's message at its end
        size, needs = sum(piece.data.nbytes for piece in draft.pieces), ""
        if size and any(reason in text for reason in _NO_ROOM):
            free = draft.directory.free_bytes()
            needs = (
                f"It needs {size} bytes{'' if free is None else f', and {free} are free there'}. "
            )
        text = text if len(text) < 300 else f"{text[:100]} … {text[-200:]}"
        raise CheckpointFileError(
            f"The checkpoint {draft.directory.path_of(draft.name)} could not be written: "
            f"{type(error).__name__}: {text}\n{needs}Nothing of it was left behind, and older checkpoints "
            "are as they were. Remove the cause, or save to another directory."
        ) from error


def _write_pieces(draft: Draft, process: int) -> dict[str, Any]:
    """Writes this process's pieces; returns digests and parts for the manifest, as JSON data."""
    by_orbax = [piece for piece in draft.pieces if piece.is_whole and process == 0]
    by_bytes = [piece for piece in draft.pieces if not (piece.is_whole and process == 0)]
    files: dict[str, str] = {}
    parts: list[Any] = []
    for folder, pieces, fill in (
        (WHOLE, by_orbax, write_arrays),
        (f"{PARTS}{process}", by_bytes, write_bytes),
    ):
        named = {piece.name: piece.data for piece in pieces if piece.data.size}
        if named:
            fill_named = partial(fill, named=named)
            files |= draft.directory.write_arrays(draft.name, draft.token, folder, fill_named)
        for piece in pieces:
            part = Part(folder, piece.name, piece.start, piece.data.shape, digest_of(piece.data))
            parts.append([piece.leaf, piece.data.dtype.name, asdict(part)])
    return {"files": files, "parts": parts}


def _manifest(draft: Draft, written: Sequence[Mapping[str, Any]]) -> str:
    parts: dict[int, list[Part]] = defaultdict(list)
    dtypes: dict[int, str] = {}
    for leaf, dtype, part in (entry for one in written for entry in one["parts"]):
        parts[leaf].append(parse_part(part))
        dtypes[leaf] = dtype
    leaves = tuple(
        make_record(spec, dtypes[i], parts[i])
        if i in parts
        else Record(spec, digest_of(draft.texts[i]), draft.texts[i])
        for i, spec in enumerate(draft.specs)
    )
    files = {name: digest for one in written for name, digest in one["files"].items()}
    arrays = ARRAYS + draft.token
    return manifest_text(Manifest(draft.step, arrays, files, leaves, draft.made_by))


def check_same_tree(slots: Sequence[Slot], name: str, method: str) -> None:
    """Raises if the processes are about to save different steps, leaves or local values.

    Values of global arrays are not compared; ``check_in_sync`` does that.
    """
    if current_job().is_alone:
        return
    local = {"the step or name": name} | {slot.spec.path: _identity(slot) for slot in slots}
    total = hashlib.sha256(json.dumps(local).encode()).hexdigest()
    if len(set(all_values(method, total))) == 1:
        return
    first, *others = all_values(method, local)
    lines = [
        f"{path}: {first.get(path, 'nothing')} on process 0, {tree.get(path, 'nothing')} on process {i}"
        for path in dict.fromkeys(path for tree in [first, *others] for path in tree)
        for i, tree in enumerate(others, 1)
        if tree.get(path) != first.get(path)
    ]
    raise CheckpointError(_DIFFER.format(method=method, lines=listed(lines)))


def _identity(slot: Slot) -> str:
    if _is_global(slot.current):
        return str(slot.spec)
    return f"{slot.spec} with the sha256 {digest_of(saved_value(slot.spec, slot.read()))[:12]}"


def copy_to_host(slots: Sequence[Slot]) -> tuple[dict[int, Any], list[Piece]]:
    """Copies what this process writes to the host: JSON data, by the index of the leaf, and arrays.

    Of a leaf that is sharded over the processes, each process writes its shards, and of equal shards the
    first. Of the other leaves, each is written by one process, chosen by size. All processes call it.
    """
    me = current_job().index
    writers = _writers([slot.spec for slot in slots], current_job().count)
    _begin_copies(slots, [writer == me for writer in writers])
    texts: dict[int, Any] = {}
    pieces: list[Piece] = []
    for i, slot in enumerate(slots):
        if is_sharded(slot.current):
            pieces += _local_parts(i, slot.current)
            continue
        value = slot.read()  # collective for an ON_READ variable
        if writers[i] != me:
            continue
        value = local_copy_of_replicated(value) if isinstance(value, jax.Array) else value
        data = saved_value(slot.spec, value)
        if isinstance(data, np.ndarray):
            pieces.append(Piece(i, data, (0,) * data.ndim, is_whole=True))
        else:
            texts[i] = data
    return texts, pieces


def _begin_copies(slots: Sequence[Slot], are_local: Sequence[bool]) -> None:
    """Starts all device-to-host copies, so that they overlap."""
    for slot, is_local in zip(slots, are_local, strict=True):
        array = slot.current
        if not isinstance(array, jax.Array) or is_key(array):
            continue
        if is_sharded(array):
            for shard in array.addressable_shards:
                if shard.replica_id == 0:
                    shard.data.copy_to_host_async()
        elif is_local:
            array.copy_to_host_async()


def _local_parts(i: int, array: jax.Array) -> Iterator[Piece]:
    """Yields the shards that this process writes."""
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            data = host_copy(jax.random.key_data(shard.data) if is_key(array) else shard.data)
            start = [dim.start or 0 for dim in shard.index]
            start += [0] * (data.ndim - len(start))  # the dims of a key's data
            yield Piece(i, data, tuple(start), is_whole=False)


def _writers(specs: Sequence[Spec], count: int) -> list[int]:
    """Returns which process writes each leaf, so that all write about as many bytes."""
    sizes = [_size(spec) for spec in specs]
    loads = [0] * min(count, 1 + sum(sizes) // _MIN_BYTES_PER_WRITER)
    writers = []
    for size in sizes:
        least = loads.index(min(loads))
        writers.append(least if size else 0)
        loads[least] += size
    return writers


def _size(spec: Spec) -> int:
    return math.prod(spec.shape) * np.dtype(spec.dtype).itemsize if spec.kind == ARRAY else 0


def _is_global(value: Any) -> bool:
    """True if an array is stored on devices of several processes."""
    raw = value.get_raw_value() if isinstance(value, nnx.Variable) else value
    return any(
        isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        for leaf in jax.tree.leaves(raw)
    )


def is_sharded(value: Any) -> bool:
    """True if an array is sharded over the processes, each of which has only a part."""
    return isinstance(value, jax.Array) and _is_global(value) and not value.is_fully_replicated
