"""``save`` and ``load``: a tree as one checkpoint; ``CheckpointManager`` uses the same functions."""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from distribute_jax import _context
from distribute_jax._errors import (
    ArgumentError,
    CheckpointError,
    CheckpointFileError,
    DonatedError,
    UnsupportedError,
)
from distribute_jax._messages import is_donated, listed
from distribute_jax.checkpoint._agreement import (
    all_values,
    by_chief,
    check_shared,
    on_all,
    write,
    write_probe,
)
from distribute_jax.checkpoint._leaves import ITERATOR, OTHER, Slot, is_in_place, slots_of
from distribute_jax.checkpoint._manifest import Manifest, made_by
from distribute_jax.checkpoint._read import (
    check_fit,
    manifest_of,
    new_values,
    put_values,
    read_leaves,
)
from distribute_jax.checkpoint._storage import Directory, DiskDirectory, bucket_directory
from distribute_jax.checkpoint._write import Draft, check_same_tree, copy_to_host, write_checkpoint
from distribute_jax.processes import RESTORING, current_job, doing
from distribute_jax.program import step_lock

_NOT_SAVED = """\
{method} cannot save everything in the tree:
{lines}
A checkpoint holds NNX objects, variables, arrays, random keys, distributed iterators, and Python numbers, \
strings and None. Save what can be rebuilt from those, and leave out the rest."""

_OF_A_MODEL = ' Of a dj.Model these are {"module": model.module, "optimizer": model.optimizer}.'

_DONATED = """\
{method} got arrays that were donated to an earlier step:
{lines}
Save the variables that hold the new ones, or arrays that the step returned."""


def save(path: str | os.PathLike[str], tree: Any, *, overwrite: bool = True) -> None:
    """Saves a tree to a folder, and returns when it is on the disk.

    All processes of a job call it, with a folder that all of them see; each writes what it holds of arrays
    that are divided among them, and the first one commits.

    At every moment the folder holds the old checkpoint or the new one, complete, even if the program is
    killed. The format is that of :class:`CheckpointManager`, and so is what a tree may hold.
    """
    directory, name = _directory_and_name("save", path)
    check_context("save")
    check_shared("save", directory)
    draft = make_draft(directory, name, tree, None, "save")

    def prepare() -> None:
        directory.check_free(name, overwrite=overwrite)
        directory.prepare(re.escape(name))

    write("save", lambda: write_checkpoint(draft, prepare))


def load(path: str | os.PathLike[str], tree: Any, *, partial: bool = False) -> Any:
    """Puts what ``save`` saved into a tree of the same leaves, under any strategy.

    All processes of a job call it; each reads and compares what it puts on its devices, and all load or none.
    The tree is changed in place and returned; with ``partial`` the checkpoint may have more leaves.
    """
    check_context("load")
    # Below the folder no link is followed; the user's path may be one.
    directory, name = _directory_and_name(
        "load", path if _is_url(os.fspath(path)) else os.path.realpath(path)
    )

    def manifest() -> Manifest:
        if not directory.exists(name):
            raise CheckpointError(f"There is no checkpoint at {directory.path_of(name)}.")
        whole = manifest_of(directory, name)
        if not partial:
            return whole
        paths = {slot.spec.path for slot in slots_of(tree)[0]}
        return replace(whole, leaves=tuple(x for x in whole.leaves if x.spec.path in paths))

    return restore_tree(directory, name, manifest, tree, "load")


def _directory_and_name(method: str, path: str | os.PathLike[str]) -> tuple[Directory, str]:
    text = str(directory_of(method, path))
    parent, name = os.path.split(text)
    if _is_url(text) and not _is_url(parent):
        raise ArgumentError(f"{method} got {text!r}. Give a folder in that store: '{text}/model'.")
    return directory_of(method, parent), name


def directory_of(method: str, path: str | os.PathLike[str]) -> Directory:
    """Returns the directory that a path or URL selects."""
    text = os.fspath(path)
    if _is_url(text):
        return bucket_directory(method, text)
    if _URL_AS_PATH.match(text):
        url = text.replace(":/", "://", 1)
        raise ArgumentError(
            f"{method} got {path!r}: a Path keeps one slash of a URL. Pass the text: {url!r}."
        )
    text = os.path.abspath(os.path.expanduser(text))
    encoding = sys.getfilesystemencoding()
    is_utf_8 = text.isascii() or (encoding == "utf-8" and not re.search(r"[\ud800-\udfff]", text))
    if re.search(r"[*?\[\\]", text) or not is_utf_8:
        raise ArgumentError(
            f"{method} got {text!r}: Orbax would not find again what it saves in a path with *, ?, [, a "
            f"backslash or bytes that are not UTF-8 (the encoding of names is {encoding}). Choose a path "
            "without them."
        )
    return DiskDirectory(Path(text))


_URL_AS_PATH = re.compile(r"(gs|gcs|s3|az|abfs|memory):/[^/]")
"""A URL after ``pathlib.Path`` has removed a slash."""


def _is_url(text: str) -> bool:
    return "://" in text


def check_context(method: str) -> None:
    """Raises inside ``run``, under the user's jit, and if the processes cannot communicate."""
    _context.require_loop_thread(method)
    _context.require_cross_replica(method)
    _context.require_untraced(method)
    if jax.process_count() > 1 and current_job().is_alone:
        raise UnsupportedError(
            f"{method} was called in a job of {jax.process_count()} processes that no strategy has "
            "connected. Make dj.MultiWorkerMirroredStrategy() first: they save and load together."
        )


def make_draft(directory: Directory, name: str, tree: Any, step: int | None, method: str) -> Draft:
    """Copies what this process writes of a tree to the host; afterwards the tree may change."""
    check_context(method)
    _context.fetch_state(lambda: _wanted_state(tree, step))
    with step_lock:  # a step of another thread could donate arrays, or leave tracers
        slots = on_all(method, lambda: _readable_slots(tree, method))
        check_same_tree(slots, name, method)
        token = by_chief(method, lambda: secrets.token_hex(4))
        texts, pieces = copy_to_host(slots)
    arrays = (slot.current for slot in slots if isinstance(slot.current, jax.Array))
    origin = made_by(max((len(array.sharding.device_set) for array in arrays), default=1))
    return Draft(directory, name, step, token, [s.spec for s in slots], texts, pieces, origin)


def _wanted_state(tree: Any, step: int | None) -> tuple[set[int], bool]:
    """Returns the ids of the variables, and True with a number of steps or the position of an iterator."""
    slots, _ = slots_of(tree)
    variables = {slot.owner[0] for slot in slots if slot.owner}
    return variables, step is not None or any(slot.spec.kind == ITERATOR for slot in slots)


def check_can_save(directory: Directory, tree: Any, method: str) -> None:
    """Raises what a save would, for a program that saves before it exits and not earlier."""
    for slot in _readable_slots(tree, method):
        if slot.spec.kind == ITERATOR:
            slot.current.state()  # raises if its source cannot seek
    if current_job().is_alone:  # else tried when the newest step was looked for
        directory.remove_file(write_probe(directory))


def _readable_slots(tree: Any, method: str) -> list[Slot]:
    slots, _ = slots_of(tree)
    faults = [f"{slot.spec.path}: {slot.spec}" for slot in slots if slot.spec.kind == OTHER]
    if faults:
        text = _NOT_SAVED.format(method=method, lines=listed(faults))
        is_model = any(fault.endswith("a distribute_jax.Model") for fault in faults)
        raise CheckpointError(text + _OF_A_MODEL * is_model)
    donated = [slot.spec.path for slot in slots if is_donated(slot.current)]
    if donated:
        raise DonatedError(_DONATED.format(method=method, lines=listed(donated)))
    return slots


def restore_tree(
    directory: Directory, name: str, manifest_of: Callable[[], Manifest], tree: Any, method: str
) -> Any:
    """Restores a checkpoint into a tree; on an error nothing is changed."""
    where = directory.path_of(name)

    def read(manifest: Manifest) -> tuple[list[Slot], Callable[[], Any], list[Any]]:
        slots, rebuild = slots_of(tree)
        check_fit(where, manifest.leaves, slots)
        return slots, rebuild, new_values(read_leaves(directory, name, manifest, slots), slots)

    with step_lock, doing(RESTORING):  # a step of another thread would overwrite the new values
        manifest = on_all(method, manifest_of)
        _check_same_checkpoint(method, where, manifest)
        slots, rebuild, values = on_all(method, lambda: read(manifest))
        on_all(method, lambda: put_values(values, slots))
    new = rebuild()
    if not isinstance(tree, MutableMapping):
        return new
    for key in [key for key in tree if not is_in_place(tree[key])]:
        tree[key] = new[key]
    return tree


def _check_same_checkpoint(method: str, where: str, manifest: Manifest) -> None:
    """Raises if the processes have read different checkpoints, each of which has a unique token."""
    read = all_values(method, [where, manifest.arrays])
    if len({arrays for _, arrays in read}) > 1:
        lines = "\n".join(f"  process {i}: {', '.join(one)}" for i, one in enumerate(read[:8]))
        raise CheckpointFileError(
            f"{method}: the processes have read different checkpoints:\n{lines}\nGive all of them the same "
            "path, in a directory that all of them see."
        )


def check_target(tree: Any, method: str) -> None:
    check_context(method)
    if not isinstance(tree, MutableMapping) and not is_in_place(tree):
        raise CheckpointError(
            f"{method} got a {type(tree).__name__} with arrays or Python values, which cannot be changed "
            "in place. Put it into a dict, whose entries are then replaced: "
            'tree = {"state": state}; manager.restore_latest(tree); state = tree["state"].'
        )
