"""From what a user passes to where checkpoints are."""

from __future__ import annotations

import os
import re
from pathlib import Path

from distribute_jax._errors import ArgumentError
from distribute_jax.checkpoint._bucket import bucket_of
from distribute_jax.checkpoint._bucket_directory import BucketDirectory
from distribute_jax.checkpoint._directory import Directory
from distribute_jax.checkpoint._disk_directory import DiskDirectory

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
