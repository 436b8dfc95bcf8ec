"""From what a user passes to where checkpoints are."""

from __future__ import annotations

import os
from pathlib import Path

from distribute_jax.checkpoint._directory import Directory
from distribute_jax.checkpoint._disk_directory import DiskDirectory


def is_url(text: str) -> bool:
    """Tells whether a text is the URL of an object store rather than a path."""
    return "://" in text


def directory_of(method: str, path: str | os.PathLike[str]) -> Directory:
    """Gives the directory that a path or a URL means."""
    return DiskDirectory(Path(path).absolute())
