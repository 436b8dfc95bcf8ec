"""Chooses between a disk and an object store by the path or URL of a directory."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TypeAlias

from distribute_jax._errors import ArgumentError
from distribute_jax.checkpoint._bucket import BucketDirectory, bucket_directory
from distribute_jax.checkpoint._disk import DiskDirectory

Directory: TypeAlias = DiskDirectory | BucketDirectory
"""Both have the same methods, which ``DiskDirectory`` documents."""

_URL_AS_PATH = re.compile(r"(gs|gcs|s3|az|abfs|memory):/[^/]")
"""A URL after ``pathlib.Path`` has removed a slash."""


def is_url(text: str) -> bool:
    return "://" in text


def directory_of(method: str, path: str | os.PathLike[str]) -> Directory:
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
    """Raises for a path with wildcards, below which Orbax would not find what it has saved."""
    path = os.path.abspath(text)
    if re.search(r"[*?\[]", path):
        raise ArgumentError(
            f"{method} got {path!r}: Orbax reads *, ? and [ in a path as a pattern of names, and would not "
            "find what it has saved. Choose a path without these characters."
        )
