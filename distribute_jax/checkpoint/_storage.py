"""The interface of a place for checkpoints, and the choice between a disk and an object store."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from distribute_jax._errors import ArgumentError
from distribute_jax.checkpoint._bucket import BucketDirectory, bucket_of
from distribute_jax.checkpoint._disk import DiskDirectory

_CUT = re.compile(r"(gs|gcs|s3|az|abfs|memory):/[^/]")
"""What ``pathlib.Path`` makes of a URL."""

_PATTERN = re.compile(r"[*?\[]")


def is_url(text: str) -> bool:
    """Tells whether a text is the URL of an object store rather than a path."""
    return "://" in text


def directory_of(method: str, path: str | os.PathLike[str]) -> Directory:
    """Gives the directory that a path or a URL means.

    Raises:
        ArgumentError: it is no path and no URL that can be opened.
        MissingPackageError: the client of an object store is not installed.
    """
    text = os.fspath(path)
    if is_url(text):
        return BucketDirectory(bucket_of(method, text))
    if _CUT.match(text):
        url = text.replace(":/", "://", 1)
        raise ArgumentError(
            f"{method} got {path!r}: a Path keeps one slash of a URL. Pass the text: {url!r}."
        )
    check_no_pattern(method, text)
    return DiskDirectory(Path(text).absolute())


def check_no_pattern(method: str, text: str) -> None:
    """Refuses a path on a disk under which Orbax would not find what it has saved."""
    path = os.path.abspath(text)
    if _PATTERN.search(path):
        raise ArgumentError(
            f"{method} got {path!r}: Orbax reads *, ? and [ in a path as a pattern of names, and would not "
            "find what it has saved. Choose a path without these characters."
        )


class Draft(Protocol):
    """A checkpoint that is being written, and counts only once its manifest is there."""

    @property
    def arrays(self) -> str:
        """The name of the folder with its arrays."""

    def write(self, folder: str, fill: Callable[[Path], None]) -> Mapping[str, str]:
        """Writes a folder below that of the arrays; gives the sha256 of each file, by its path from there.

        Args:
            folder: a name that no other process uses.
            fill: writes the files into a folder of this machine that it makes.
        """

    def hand_in(self, process: int, text: str) -> None:
        """Leaves a text for the process that will commit."""

    def handed_in(self, process: int) -> bytes:
        """Gives what a process has left, and removes it.

        Raises:
            FileNotFoundError: it cannot be seen, or not yet.
        """

    def commit(self, manifest: str) -> None:
        """Makes the checkpoint count, in the place of an older one of the same name."""


class Directory(Protocol):
    """A place that holds checkpoints, each under a name of its own.

    Every method raises an ``OSError`` where the place refuses.
    """

    def __str__(self) -> str: ...

    @property
    def place(self) -> Path | str:
        """Gives where it is, for the user."""

    def path_of(self, name: str) -> str:
        """Gives where a checkpoint is, for messages."""

    def names(self) -> list[str]:
        """Gives what may be checkpoints; of an object store only those with a manifest."""

    def holds(self, name: str) -> bool:
        """Tells whether there is something that may be a checkpoint of this name."""

    def check_free(self, name: str, *, overwrite: bool) -> None:
        """Raises where a checkpoint may not be written under a name.

        Raises:
            CheckpointError: there is one, and ``overwrite`` is False.
            CheckpointFileError: something else is there.
        """

    def prepare(self, name: str) -> None:
        """Makes the place, and removes what killed programs left of names that match an expression."""

    def draft(self, name: str, token: str) -> AbstractContextManager[Draft]:
        """Begins to write, in the process that commits; what did not come to that is removed."""

    def joined(self, name: str, token: str) -> Draft:
        """Takes part in what another process has begun."""

    def read(self, name: str, file: str) -> bytes:
        """Gives the content of a file of a checkpoint."""

    def arrays(
        self, name: str, folder: str, files: Mapping[str, str]
    ) -> AbstractContextManager[Path]:
        """Gives a folder of arrays of a checkpoint, on this machine, as it was written.

        Raises:
            CheckpointDamagedError: a file is missing, or has another sha256 than here.
        """

    def remove(self, name: str) -> None:
        """Removes a checkpoint, so that it is never seen half removed."""

    def set_aside(self, name: str) -> str | None:
        """Lets a damaged checkpoint count no more; gives its new name, None where that is not allowed."""

    def were_set_aside(self) -> list[str]:
        """Gives the names that damaged checkpoints got, in this and earlier runs."""

    def free_bytes(self) -> int | None:
        """Gives how many bytes are free; None where nobody can tell."""

    def write_probe(self, name: str, text: str) -> None:
        """Makes the place, and writes a small file that the other processes look for."""

    def read_probe(self, name: str) -> str | None:
        """Gives the text of that file; None where it cannot be seen."""

    def remove_probe(self, name: str) -> None:
        """Removes it."""
