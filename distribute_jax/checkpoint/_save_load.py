"""Saves a tree as one checkpoint, and loads it."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from distribute_jax import _context
from distribute_jax._errors import (
    CheckpointError,
    CheckpointFileError,
    DonatedError,
    UnsupportedError,
)
from distribute_jax._messages import is_donated, listed
from distribute_jax.checkpoint._agreement import all_values, by_chief, check_shared, on_all, write
from distribute_jax.checkpoint._leaves import OTHER, Slot, Slots, is_in_place, slots_of
from distribute_jax.checkpoint._manifest import Manifest, surroundings
from distribute_jax.checkpoint._read import (
    check_fit,
    manifest_of,
    needed,
    new_values,
    put_all,
    read_leaves,
)
from distribute_jax.checkpoint._storage import Directory, check_no_pattern, directory_of, is_url
from distribute_jax.checkpoint._write import Content, check_same_tree, copied, write_checkpoint
from distribute_jax.processes import RESTORING, current_job, doing
from distribute_jax.program import one_at_a_time


def save(path: str | os.PathLike[str], tree: Any, *, overwrite: bool = True) -> None:
    """Saves a tree to a folder, and returns when it is on the disk.

    All processes of a job call it, with a folder that all of them see; each writes what it holds of arrays
    that are divided among them, and the first one commits.

    At every moment the folder holds the old checkpoint or the new one, whole, also if the program is
    killed. The format is that of :class:`CheckpointManager`, and so is what a tree may hold.

    Args:
        path: the folder, or the URL of one in an object store; it is made, with the folders above it.
        tree: an NNX object, or a nest of objects, arrays and Python values.
        overwrite: whether an older checkpoint at this place is replaced.

    Raises:
        CheckpointError: the tree holds what cannot be saved, or there is one and ``overwrite=False``.
        CheckpointFileError: the folder cannot be written, or holds something else; or the processes of a
            job do not all see it.
    """
    directory, name = _parted("save", path)
    check_place("save")
    check_shared("save", directory)
    content = content_of(tree, None, "save")

    def prepare() -> None:
        directory.check_free(name, overwrite=overwrite)
        directory.prepare(re.escape(name))

    write("save", lambda: write_checkpoint(directory, name, content, prepare))


def _parted(method: str, path: str | os.PathLike[str]) -> tuple[Directory, str]:
    """Gives the directory of a checkpoint, and its name there."""
    text = os.fspath(path)
    if not is_url(text):
        check_no_pattern(method, text)
    parent, name = os.path.split(text.rstrip("/") if is_url(text) else os.path.abspath(text))
    return directory_of(method, parent), name


def load(path: str | os.PathLike[str], tree: Any) -> Any:
    """Puts what ``save`` saved into a tree of the same leaves, for any strategy.

    All processes of a job call it; each reads and compares what it puts on its devices, and all load or none.

    Args:
        path: the folder.
        tree: as it was saved. NNX objects, variables and iterators are changed in place; other
            entries of a dict are replaced in that dict. On an error nothing is changed.

    Returns:
        The tree with the saved values: the same object for an NNX object or a dict.

    Raises:
        CheckpointError: there is no checkpoint, or leaves are missing, extra, or of another shape or
            dtype.
        CheckpointDamagedError: what is there is not what was saved.
    """
    check_place("load")
    directory, name = _parted("load", path)
    return restored(directory, name, lambda: _manifest(directory, name), tree, "load")


def _manifest(directory: Directory, name: str) -> Manifest:
    if not directory.holds(name):
        raise CheckpointError(f"There is no checkpoint at {directory.path_of(name)}.")
    return manifest_of(directory, name)


_NOT_SAVED = """\
{method} cannot save everything in the tree:
{lines}
A checkpoint holds NNX objects, variables, arrays, random keys, distributed iterators, and Python numbers, \
strings and None. Save what can be rebuilt from those, and leave out the rest."""

_GONE = """\
{method} got arrays that an earlier step has taken:
{lines}
Save the variables that hold the new ones, or arrays that the step returned."""


def check_place(method: str) -> None:
    """Raises inside ``run``, under the user's jit, and where the processes cannot talk."""
    _context.require_loop(method)
    _context.require_cross_replica(method)
    _context.require_untraced(method)
    if jax.process_count() > 1 and current_job().is_alone:
        raise UnsupportedError(
            f"{method} was called in a job of {jax.process_count()} processes that no strategy has "
            "connected. Make dj.MultiWorkerMirroredStrategy() first: they save and load together."
        )


def content_of(tree: Any, step: int | None, method: str) -> Content:
    """Copies what this process writes of a tree to the host, so that the tree may change from then on.

    Returns:
        What is to be written.

    Raises:
        CheckpointError: leaves that cannot be saved, all of them listed; or that differ between processes.
        DonatedError: arrays that are gone already.
    """
    check_place(method)
    with one_at_a_time:  # a step of another thread would take some of the arrays, or hold tracers
        slots = on_all(method, lambda: _readable_slots(tree, method))
        check_same_tree(slots, method)
        token = by_chief(method, lambda: secrets.token_hex(4))
        texts, pieces = copied(slots)
    specs = [slot.spec for slot in slots]
    return Content(step, token, specs, texts, pieces, surroundings(_devices(slots)))


def _readable_slots(tree: Any, method: str) -> list[Slot]:
    slots = slots_of(tree).places
    faults = [f"{slot.spec.path}: {slot.spec}" for slot in slots if slot.spec.kind == OTHER]
    if faults:
        raise CheckpointError(_NOT_SAVED.format(method=method, lines=listed(faults)))
    gone = [slot.spec.path for slot in slots if is_donated(slot.held)]
    if gone:
        raise DonatedError(_GONE.format(method=method, lines=listed(gone)))
    return slots


def _devices(slots: Sequence[Slot]) -> int:
    held = (slot.held for slot in slots if isinstance(slot.held, jax.Array))
    return max((len(array.sharding.device_set) for array in held), default=1)


def restored(
    directory: Directory, name: str, manifest_of: Callable[[], Manifest], tree: Any, method: str
) -> Any:
    """Puts a checkpoint into a tree: all of it, or on any error nothing.

    NNX objects, variables and iterators are changed in place. Everything else is replaced: in the
    dict that was given, if it is one.
    """
    where = directory.path_of(name)
    with one_at_a_time, doing(RESTORING):  # a step of another thread would write what it began with
        manifest = on_all(method, manifest_of)
        _check_same_checkpoint(method, where, manifest)
        read = on_all(method, lambda: _read(directory, name, manifest, tree))
        on_all(method, lambda: put_all(read.values, read.slots.places))
    new = read.slots.rebuilt()
    if not isinstance(tree, MutableMapping):
        return new
    for key in [key for key in tree if not is_in_place(tree[key])]:
        tree[key] = new[key]
    return tree


@dataclass(frozen=True)
class _Read:
    """A checkpoint that fits a tree, and has not changed it yet."""

    slots: Slots
    values: list[Any]


def _read(directory: Directory, name: str, manifest: Manifest, tree: Any) -> _Read:
    slots = slots_of(tree)
    check_fit(directory.path_of(name), manifest.leaves, slots.places)
    held = {slot.spec.path: slot.held for slot in slots.places}
    own = lambda record: needed(record, held[record.spec.path])  # noqa: E731
    leaves = read_leaves(directory, name, manifest, own)
    return _Read(slots, new_values(leaves, slots.places))


def _check_same_checkpoint(method: str, where: str, manifest: Manifest) -> None:
    """Raises where the processes have read different files: no two checkpoints' arrays have one name."""
    found = all_values(method, f"{where}, {manifest.arrays}")
    if len({text.rpartition(", ")[2] for text in found}) > 1:
        lines = "\n".join(f"  process {i}: {text}" for i, text in enumerate(found[:8]))
        raise CheckpointFileError(
            f"{method}: the processes have read different checkpoints:\n{lines}\nGive all of them the same "
            "path, in a directory that all of them see."
        )


def check_target(tree: Any, method: str) -> None:
    """Raises where new values would have no place to go."""
    check_place(method)
    if not isinstance(tree, MutableMapping) and not is_in_place(tree):
        raise CheckpointError(
            f"{method} got a {type(tree).__name__} with arrays or Python values, which cannot be changed "
            "in place. Put it into a dict, whose entries are then replaced: "
            'tree = {"state": state}; manager.restore_latest(tree); state = tree["state"].'
        )
