"""The leaves of a tree copied to the host, each by the process that will write it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from distribute_jax._errors import CheckpointError
from distribute_jax._mesh import whole_here
from distribute_jax._tree import is_key, listed
from distribute_jax.checkpoint._content import Piece
from distribute_jax.checkpoint._leaf import ARRAY, Leaf, Spec, host_copy, leaf_of
from distribute_jax.checkpoint._slots import Slot
from distribute_jax.checkpoint._together import all_values
from distribute_jax.processes import job

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
    if job() is None:
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
    mine = 0 if (found := job()) is None else found.index
    _begin_copies(slots, [writer == mine for writer in writers])
    texts: dict[int, Any] = {}
    pieces: list[Piece] = []
    for i, slot in enumerate(slots):
        if is_divided(slot.held):
            pieces += _own_parts(i, slot.held)
            continue
        value = slot.read()  # of an ON_READ variable all processes compute it together
        if writers[i] == mine:
            leaf = leaf_of(slot.spec.path, whole_here(value) if _is_of_all(value) else value)
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
    found = job()
    count = 1 if found is None else min(found.count, 1 + sum(sizes) // _SHARE)
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
