"""The directory of a manager: one checkpoint for each step, named after it."""

from __future__ import annotations

import operator
from typing import SupportsIndex

from distribute_jax._errors import ArgumentError, CheckpointDamagedError, CheckpointFileError
from distribute_jax.checkpoint._directory import Directory
from distribute_jax.checkpoint._manifest import Manifest
from distribute_jax.checkpoint._names import is_step
from distribute_jax.checkpoint._reading import manifest_of


def checked_step(step: SupportsIndex) -> int:
    """Gives the number of a step that a user passed."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise ArgumentError(f"A step is an int of at least 0; got {step!r}.")
    return number


def folders(directory: Directory) -> list[int]:
    """Gives the steps that are there, complete or not, in ascending order."""
    try:
        names = directory.names()
    except OSError as error:
        raise CheckpointFileError(f"{directory} cannot be read: {error}") from error
    return sorted(int(name) for name in names if is_step(name))


def read_step(directory: Directory, step: int) -> Manifest:
    """Reads the manifest of a step.

    Raises:
        CheckpointDamagedError: it is missing, or of another step.
    """
    manifest = manifest_of(directory, str(step))
    if manifest.step != step:
        raise CheckpointDamagedError(
            f"{directory.path_of(str(step))} holds step {manifest.step}: it was renamed"
        )
    return manifest


def is_complete(directory: Directory, step: int) -> bool:
    """Tells whether a step was written to its end."""
    try:
        read_step(directory, step)
    except CheckpointDamagedError:
        return False
    return True


def prune(directory: Directory, keep: int | None, newest: int) -> None:
    """Removes the oldest steps, so that ``keep`` remain, ``newest`` among them."""
    if keep is None:
        return
    older = [step for step in folders(directory) if step != newest]
    for step in older[: max(0, len(older) - (keep - 1))]:
        directory.remove(str(step))
