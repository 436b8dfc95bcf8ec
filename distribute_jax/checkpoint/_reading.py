"""Reads a checkpoint: of each leaf what this process needs, every part compared with its digest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from distribute_jax._errors import CheckpointDamagedError, CheckpointFileError
from distribute_jax._tree import listed
from distribute_jax.checkpoint._arrays import Wanted, read_arrays, read_bytes
from distribute_jax.checkpoint._directory import Directory
from distribute_jax.checkpoint._leaf import digest_of, digest_of_text
from distribute_jax.checkpoint._manifest import Manifest, Part, Record, manifest_in
from distribute_jax.checkpoint._names import MANIFEST, PARTS
from distribute_jax.checkpoint._saved import Saved


def manifest_of(directory: Directory, name: str) -> Manifest:
    """Reads the manifest of a checkpoint.

    Raises:
        CheckpointDamagedError: it is missing or not what was written.
        CheckpointFileError: it cannot be read.
    """
    where = directory.path_of(name)
    try:
        text = directory.read(name, MANIFEST)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise CheckpointDamagedError(
            f"{where} has no {MANIFEST}, so it was not written to its end"
        ) from error
    except OSError as error:
        raise CheckpointFileError(f"{where} cannot be read: {error}") from error
    return manifest_in(where, text)


def read_leaves(
    directory: Directory, name: str, manifest: Manifest, needed: Callable[[Record], Sequence[Part]]
) -> list[Saved]:
    """Reads the leaves of a checkpoint, each part compared with its digest.

    Args:
        directory: where.
        name: of the checkpoint.
        manifest: its manifest.
        needed: which parts of a leaf this process needs; no other file is read.

    Raises:
        CheckpointDamagedError: a file is missing or was changed, or a part has another digest.
        CheckpointFileError: there is no right to read it.
    """
    where = directory.path_of(name)
    wanted = [needed(record) for record in manifest.leaves]
    data: dict[tuple[str, str], np.ndarray[Any, Any]] = {}
    for folder in dict.fromkeys(part.folder for parts in wanted for part in parts):
        named = {
            part.name: Wanted(record.spec.path, record.dtype, part.shape)
            for record, parts in zip(manifest.leaves, wanted, strict=True)
            for part in parts
            if part.folder == folder
        }
        try:
            found = _read_folder(directory, name, manifest, folder, named)
        except OSError as error:
            raise CheckpointFileError(f"{where} cannot be read: {error}") from error
        data |= {(folder, name): array for name, array in found.items()}
    leaves = [
        Saved(record, [(part, data[part.folder, part.name]) for part in parts])
        for record, parts in zip(manifest.leaves, wanted, strict=True)
    ]
    changed = [leaf.record.spec.path for leaf in leaves if not _is_as_saved(leaf)]
    if changed:
        raise CheckpointDamagedError(
            f"{where} holds other numbers than were saved (the sha256 differs) for\n{listed(changed)}"
        )
    return leaves


def _read_folder(
    directory: Directory, name: str, manifest: Manifest, folder: str, named: Mapping[str, Wanted]
) -> dict[str, np.ndarray[Any, Any]]:
    by_bytes = folder.startswith(PARTS)
    files = {
        file.removeprefix(f"{folder}/"): digest
        for file, digest in manifest.files.items()
        if file.startswith(f"{folder}/")
    }
    if by_bytes:  # files of parts that this process does not need are left alone
        files = {file: digest for file, digest in files.items() if file in named}
    with directory.arrays(name, f"{manifest.arrays}/{folder}", files) as local:
        return (read_bytes if by_bytes else read_arrays)(local, named)


def _is_as_saved(leaf: Saved) -> bool:
    if not leaf.record.dtype:
        return digest_of_text(leaf.record.text) == leaf.record.sha256
    return all(digest_of(data) == part.sha256 for part, data in leaf.boxes)
