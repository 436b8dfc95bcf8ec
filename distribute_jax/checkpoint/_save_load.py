"""One checkpoint in a folder of its own."""

from __future__ import annotations

import os
import re
from typing import Any

from distribute_jax._errors import CheckpointError
from distribute_jax.checkpoint._directory import Directory
from distribute_jax.checkpoint._manifest import Manifest
from distribute_jax.checkpoint._places import check_no_pattern, directory_of, is_url
from distribute_jax.checkpoint._reading import manifest_of
from distribute_jax.checkpoint._state import check_place, content_of, restored
from distribute_jax.checkpoint._together import check_shared, write
from distribute_jax.checkpoint._writing import write_checkpoint


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
