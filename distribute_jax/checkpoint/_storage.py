"""The interface of a place for checkpoints, and the choice between a disk and an object store."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from distribute_jax._errors import ArgumentError
from distribute_jax.checkpoint._bucket import bucket_directory
from distribute_jax.checkpoint._disk import DiskDirectory

_URL_AS_PATH = re.compile(r"(gs|gcs|s3|az|abfs|memory):/[^/]")
"""What ``pathlib.Path`` makes of a URL."""


def is_url(text: str) -> bool:
    """Returns whether a text is the URL of an object store rather than a path."""
    return "://" in text


def directory_of(method: str, path: str | os.PathLike[str]) -> Directory:
    """Returns the directory at a path or a URL."""
    text = os.fspath(path)
    if is_url(text):
        return bucket_directory(method, text)
    if _URL_AS_PATH.match(text):
        url = text.replace(":/", "://", 1)
        raise ArgumentError(
            f"{method} got {path!r}: a Path keeps one slash of a URL. Pass the text: {url!r}."
        )
    check_no_pattern(method, text)
    return DiskDirectory(Path(text).absolute())


def check_no_pattern(method: str, text: str) -> None:
    """Raises for a path under which Orbax would not find what it has saved."""
    path = os.path.abspath(text)
    if re.search(r"[*?\[]", path):
        raise ArgumentError(
            f"{method} got {path!r}: Orbax reads *, ? and [ in a path as a pattern of names, and would not "
            "find what it has saved. Choose a path without these characters."
        )


class Directory(Protocol):
    """A place that holds checkpoints, each under a name; paths of files are relative to the place.

    A draft is a checkpoint that is being written, known by its name and a token; it counts once it is
    committed. Every method raises an ``OSError`` where the place refuses.
    """

    @property
    def place(self) -> Path | str:
        """Where it is, for the user."""

    def path_of(self, name: str) -> str:
        """Returns where a checkpoint is, for messages."""

    def names(self) -> list[str]:
        """Returns what may be checkpoints; in an object store only those with a manifest."""

    def holds(self, name: str) -> bool:
        """Returns whether something is there that may be a checkpoint of this name."""

    def check_free(self, name: str, *, overwrite: bool) -> None:
        """Raises where a checkpoint may not be written under a name."""

    def prepare(self, name: str) -> None:
        """Makes the place, and removes what killed programs left of names that match an expression."""

    def draft(self, name: str, token: str) -> AbstractContextManager[None]:
        """Begins a draft, in the process that commits it; one that is not committed is removed."""

    def notes(self, name: str, token: str) -> str:
        """Returns the folder of a draft where the processes leave notes for the chief."""

    def write_arrays(
        self, name: str, token: str, folder: str, fill: Callable[[Path], None]
    ) -> Mapping[str, str]:
        """Writes a folder of arrays into a draft, which ``fill`` makes on this machine.

        Returns the sha256 of each file, by its path below the arrays.
        """

    def commit(self, name: str, token: str, manifest: str) -> None:
        """Makes a draft count, in place of an older checkpoint of the same name."""

    def read(self, path: str) -> bytes:
        """Returns the content of a file."""

    def write(self, path: str, data: bytes) -> None:
        """Writes a small file, and makes the place."""

    def remove_file(self, path: str) -> None:
        """Removes a file, if it is there."""

    def arrays(
        self, name: str, folder: str, files: Mapping[str, str], largest: int | None = None
    ) -> AbstractContextManager[Path]:
        """Opens a folder of arrays on this machine; it is damaged where a file has another sha256.

        It is damaged too where a file is larger than the largest may be.
        """

    def remove(self, name: str) -> None:
        """Removes a checkpoint, so that it is never seen half removed."""

    def set_aside(self, name: str) -> str | None:
        """Renames a damaged checkpoint; returns its new name, None where that is not allowed."""

    def were_set_aside(self) -> list[str]:
        """Returns the names of damaged checkpoints, of this and earlier runs."""

    def free_bytes(self) -> int | None:
        """Returns how many bytes are free; None where that is unknown."""
