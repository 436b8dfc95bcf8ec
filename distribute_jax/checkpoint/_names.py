"""The names of the files of a checkpoint, and the comparison of those that are there with those written."""

from __future__ import annotations

from collections.abc import Mapping

from distribute_jax._errors import CheckpointDamagedError
from distribute_jax._tree import listed

MANIFEST = "manifest.json"
ARRAYS = "arrays-"
"""How the name of a folder with arrays begins; a token follows."""
WHOLE, PARTS = "whole-0", "parts-"
"""Below it: what process 0 writes by Orbax, and how the name begins of what each writes as bytes."""
DAMAGED = "damaged"
"""What is added to the name of what was set aside."""


def is_step(name: str) -> bool:
    """Tells whether a name is that of a step."""
    return name.isascii() and name.isdecimal() and str(int(name)) == name


def check_files(folder: object, found: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Raises before Orbax reads bytes that it did not write: its threads would outlive the error."""
    faults = [
        f"{name}: {'other bytes than were written' if name in found else 'missing'}"
        for name, digest in wanted.items()
        if found.get(name) != digest
    ]
    if faults:
        raise CheckpointDamagedError(f"{folder} is not what was written:\n{listed(faults)}")
