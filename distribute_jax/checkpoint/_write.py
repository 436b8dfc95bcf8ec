"""Writes a checkpoint: each process its arrays, from copies on the host, and the chief a manifest."""

from __future__ import annotations

import hashlib
import json
import math
import time
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
from distribute_jax.checkpoint._agreement import SEEN_SECONDS, Relay, all_values
from distribute_jax.checkpoint._arrays import write_arrays, write_bytes
from distribute_jax.checkpoint._leaves import ARRAY, Leaf, Slot, Spec, digest_of, host_copy, leaf_of
from distribute_jax.checkpoint._manifest import (
    PARTS,
    WHOLE,
    Manifest,
    Part,
    part_in,
    record_of,
    record_of_text,
    text_of,
)
from distribute_jax.checkpoint._storage import Directory, Draft
from distribute_jax.processes import current_job


def write_checkpoint(
    directory: Directory, name: str, content: Content, prepare: Callable[[], None]
) -> None:
    """Writes a checkpoint so that at every moment the old one or the new one is there, whole.

    All processes of a job call it, in a thread beside the training: each writes its pieces, and the chief
    commits when all have.

    Args:
        directory: where.
        name: of the checkpoint.
        content: what this process writes.
        prepare: called before, by the process that commits.

    Raises:
        CheckpointFileError: the file system refuses, on this process or, for the chief, on another one;
            what was there is as it was.
    """
    relay = Relay(content.token)
    with _explained(directory, name, content):
        if relay.process != 0:
            _help(directory, name, content, relay)
            return
        with relay.led():
            prepare()
            with directory.draft(name, content.token) as draft:
                relay.open()
                _lead(draft, directory.path_of(name), content, relay)


def _lead(draft: Draft, where: str, content: Content, relay: Relay) -> None:
    try:
        handed = [_written(draft, content, 0)]
    except Exception:
        relay.await_others()  # they write into the folder that goes now
        raise
    for process, sha256 in relay.collected(where).items():
        handed.append(_handed_in(draft, process, sha256, relay, where))
    draft.commit(text_of(_manifest(draft.arrays, content, handed)))


def _help(directory: Directory, name: str, content: Content, relay: Relay) -> None:
    if not relay.is_open():
        return
    try:
        with _explained(directory, name, content):
            draft = directory.joined(name, content.token)
            text = json.dumps(_written(draft, content, relay.process))
            draft.hand_in(relay.process, text)
    except Exception as error:
        relay.failed(error)
        raise
    relay.done(hashlib.sha256(text.encode()).hexdigest())


@contextmanager
def _explained(directory: Directory, name: str, content: Content) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        free = directory.free_bytes()
        left = "" if free is None else f", and {free} are free there"
        raise CheckpointFileError(
            f"The checkpoint {directory.path_of(name)} could not be written: {_reason(error)}\nIt needs "
            f"{content.bytes} bytes{left}. Nothing of it was left behind, and older checkpoints are as they "
            "were. Make room, or save to another directory."
        ) from error


def _reason(error: Exception) -> str:
    """Gives the kind of an error and the end of its text, where Orbax says what the system said."""
    text = error_text(error)
    return f"{type(error).__name__}: {text if len(text) < 300 else '… ' + text[-200:]}"


def _written(draft: Draft, content: Content, process: int) -> dict[str, Any]:
    """Writes what a process has, and gives what the chief has to know of it, plain data."""
    by_orbax = [piece for piece in content.pieces if piece.is_whole and process == 0]
    rest = [piece for piece in content.pieces if not (piece.is_whole and process == 0)]
    files: dict[str, str] = {}
    parts: list[Any] = []
    for folder, pieces, fill in (
        (WHOLE, by_orbax, write_arrays),
        (f"{PARTS}{process}", rest, write_bytes),
    ):
        named = {_name_of(piece): piece.data for piece in pieces if piece.data.size}
        if named:
            files |= draft.write(folder, partial(fill, named=named))
        parts += [[p.leaf, p.data.dtype.name, asdict(_part_of(p, folder))] for p in pieces]
    return {"files": files, "parts": parts}


def _name_of(piece: Piece) -> str:
    return "_".join(map(str, [piece.leaf] if piece.is_whole else [piece.leaf, *piece.start]))


def _part_of(piece: Piece, folder: str) -> Part:
    sha256 = digest_of(piece.data)
    return Part(folder, _name_of(piece), piece.start, piece.data.shape, sha256)


def _handed_in(draft: Draft, process: int, sha256: str, relay: Relay, where: str) -> dict[str, Any]:
    """Reads what another process has handed in, once this host sees it."""
    deadline = time.monotonic() + SEEN_SECONDS
    while True:
        try:
            text = draft.handed_in(process)
        except FileNotFoundError:
            text = b""
        if hashlib.sha256(text).hexdigest() == sha256:
            handed: dict[str, Any] = json.loads(text)
            return handed
        if time.monotonic() > deadline:
            raise CheckpointFileError(
                f"The checkpoint {where} could not be written: {relay.name_of(process)} has written its "
                f"part, which {relay.name_of(0)} does not find. Give all processes a directory that all of "
                "them see."
            )
        time.sleep(0.05)


def _manifest(arrays: str, content: Content, handed: Sequence[Mapping[str, Any]]) -> Manifest:
    parts: dict[int, list[Part]] = defaultdict(list)
    dtypes: dict[int, str] = {}
    for leaf, dtype, part in (entry for one in handed for entry in one["parts"]):
        parts[leaf].append(part_in(part))
        dtypes[leaf] = dtype
    leaves = [
        record_of(spec, dtypes[i], parts[i])
        if i in parts
        else record_of_text(spec, content.texts[i])
        for i, spec in enumerate(content.specs)
    ]
    files = {name: digest for one in handed for name, digest in one["files"].items()}
    return Manifest(content.step, arrays, files, tuple(leaves), content.made_by)


_DIFFER = """\
{method}: the processes hold different things, of which one checkpoint can hold only one:
{lines}
Save what is the same on all processes: build models and optimizers in the scope of the strategy of the \
job, and leave out what belongs to one process."""

_SHARE = 32 * 2**20
"""Bytes of mirrored leaves from which a further process takes a share: a file more costs every reader."""


def check_same_tree(slots: Sequence[Slot], method: str) -> None:
    """Raises where the processes are about to save different trees.

    The numbers of arrays that the processes hold together are not compared: ``check_in_sync`` does that.

    Raises:
        CheckpointError: leaves differ, or values that each process holds for itself.
    """
    if current_job().is_alone:
        return
    own = {slot.spec.path: _identity(slot) for slot in slots}
    total = hashlib.sha256(json.dumps(own).encode()).hexdigest()
    if len(set(all_values(method, total))) == 1:
        return
    trees = all_values(method, own)
    paths = list(dict.fromkeys(path for tree in trees for path in tree))
    lines = [
        f"{path}: {trees[0].get(path, 'nothing')} on process 0, {tree.get(path, 'nothing')} on process {i}"
        for path in paths
        for i, tree in enumerate(trees)
        if tree.get(path) != trees[0].get(path)
    ]
    raise CheckpointError(_DIFFER.format(method=method, lines=listed(lines)))


def _identity(slot: Slot) -> str:
    if _is_of_all(slot.held):
        return str(slot.spec)
    return f"{slot.spec} with the sha256 {leaf_of(slot.spec.path, slot.read()).sha256[:12]}"


def copied(slots: Sequence[Slot]) -> tuple[dict[int, Any], list[Piece]]:
    """Copies what this process writes to the host.

    Of a leaf that is divided among the processes each writes the parts that it holds; of equal ones the
    first. Leaves that all hold whole are shared out by their sizes. All processes call it.

    Returns:
        The texts of the leaves that are no arrays, by their places, and the numbers.
    """
    writers = _writers([slot.spec for slot in slots])
    mine = current_job().index
    _begin_copies(slots, [writer == mine for writer in writers])
    texts: dict[int, Any] = {}
    pieces: list[Piece] = []
    for i, slot in enumerate(slots):
        if is_divided(slot.held):
            pieces += _own_parts(i, slot.held)
            continue
        value = slot.read()  # of an ON_READ variable all processes compute it together
        if writers[i] == mine:
            leaf = leaf_of(
                slot.spec.path, local_copy_of_replicated(value) if _is_of_all(value) else value
            )
            _sort_in(i, leaf, texts, pieces)
    return texts, pieces


def _sort_in(i: int, leaf: Leaf, texts: dict[int, Any], pieces: list[Piece]) -> None:
    if leaf.data is None:
        texts[i] = leaf.text
    else:
        pieces.append(Piece(i, leaf.data, (0,) * leaf.data.ndim, is_whole=True))


def _begin_copies(slots: Sequence[Slot], writes: Sequence[bool]) -> None:
    """Lets all copies run at once; the loop that follows then waits for each."""
    for slot, is_mine in zip(slots, writes, strict=True):
        if not isinstance(slot.held, jax.Array) or is_key(slot.held):
            continue
        if is_divided(slot.held):
            for shard in slot.held.addressable_shards:
                if shard.replica_id == 0:
                    shard.data.copy_to_host_async()
        elif is_mine:
            slot.held.copy_to_host_async()


def _own_parts(i: int, held: jax.Array) -> list[Piece]:
    """Gives the parts of a divided array that this process writes."""
    return [
        Piece(i, data, starts_of(shard.index, data.ndim), is_whole=False)
        for shard in held.addressable_shards
        if shard.replica_id == 0
        for data in [host_copy(jax.random.key_data(shard.data) if is_key(held) else shard.data)]
    ]


def starts_of(index: Sequence[slice], ndim: int) -> tuple[int, ...]:
    """Gives where a box begins; dims behind those of the index, as of a key's data, are whole."""
    return (*(dim.start or 0 for dim in index), *[0] * (ndim - len(index)))


def _writers(specs: Sequence[Spec]) -> list[int]:
    """Says which process writes each leaf that all of them hold whole."""
    sizes = [_size(spec) for spec in specs]
    count = min(current_job().count, 1 + sum(sizes) // _SHARE)
    loads = [0] * count
    writers = []
    for size in sizes:
        least = loads.index(min(loads))
        writers.append(least if size else 0)
        loads[least] += size
    return writers


def _size(spec: Spec) -> int:
    return math.prod(spec.shape) * np.dtype(spec.dtype).itemsize if spec.kind == ARRAY else 0


def _is_of_all(held: Any) -> bool:
    """Tells whether the processes hold an array together."""
    raw = held.get_raw_value() if isinstance(held, nnx.Variable) else held
    return any(
        isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        for leaf in jax.tree.leaves(raw)
    )


def is_divided(held: Any) -> bool:
    """Tells whether the processes hold an array together, of which each has only a part."""
    return isinstance(held, jax.Array) and _is_of_all(held) and not held.is_fully_replicated


@dataclass(frozen=True)
class Piece:
    """A box of one leaf: all of it, or what the devices of this process hold."""

    leaf: int
    """Which leaf of the tree."""
    data: np.ndarray[Any, Any]
    """Its numbers; of random keys, their data."""
    start: tuple[int, ...]
    """Where the box begins in the whole."""
    is_whole: bool
    """Whether it is all of the leaf."""


@dataclass(frozen=True)
class Content:
    """What is to be written, as one process has it."""

    step: int | None
    """The step, or None for a checkpoint that is none of a manager's."""
    token: str
    """A text that no other checkpoint has, the same on all processes."""
    specs: list[Spec]
    """All leaves of the tree."""
    texts: Mapping[int, Any]
    """What JSON holds for the leaves that are no arrays."""
    pieces: list[Piece]
    """The numbers that this process writes."""
    made_by: Mapping[str, Any]

    @property
    def bytes(self) -> int:
        """How much space the pieces need, before Orbax compresses them."""
        return sum(piece.data.nbytes for piece in self.pieces)
