"""From a tree to the content of a checkpoint, and back."""

from __future__ import annotations

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
from distribute_jax._tree import is_given_away, listed
from distribute_jax.checkpoint._content import Content
from distribute_jax.checkpoint._copies import check_same_tree, copied
from distribute_jax.checkpoint._directory import Directory
from distribute_jax.checkpoint._leaf import OTHER
from distribute_jax.checkpoint._manifest import Manifest, surroundings
from distribute_jax.checkpoint._reading import read_leaves
from distribute_jax.checkpoint._restore import check_fit, new_values, put_all
from distribute_jax.checkpoint._saved import needed
from distribute_jax.checkpoint._slots import Slot, Slots, is_in_place, slots_of
from distribute_jax.checkpoint._together import all_values, by_chief, on_all
from distribute_jax.processes import RESTORING, doing, job
from distribute_jax.program import one_at_a_time

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
    if jax.process_count() > 1 and job() is None:
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
    gone = [slot.spec.path for slot in slots if is_given_away(slot.held)]
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
