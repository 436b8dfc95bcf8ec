"""The arrays of a checkpoint as files: those that process 0 writes by Orbax, those of others as their bytes.

Orbax writes arrays of NumPy on process 0 alone, and no array of JAX that one process of several holds for
itself.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from distribute_jax._errors import CheckpointDamagedError
from distribute_jax._messages import error_text, leaf_text

_STORED = frozenset(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)) | {
    "bool",
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
}
"""Dtypes that Orbax stores as they are; the numbers of others are stored as bytes."""

Array = np.ndarray[Any, Any]


def write_arrays(folder: Path, named: Mapping[str, Array]) -> None:
    """Writes arrays, none of them empty, to a folder that does not exist yet.

    Orbax joins nested names with dots and makes paths of them, so that names that users choose could
    collide; the manifest keeps those.
    """
    import orbax.checkpoint as ocp

    stored = {
        name: data if data.dtype.name in _STORED else _bytes(data) for name, data in named.items()
    }
    with _quiet(), orbax_alone() as orbax:
        orbax.save(folder.absolute(), args=ocp.args.PyTreeSave(stored))


def _bytes(data: Array) -> Array:
    return data.reshape(-1).view(np.uint8)


def orbax_alone() -> Any:
    """Returns an Orbax checkpointer of this process alone, which waits for no other one."""
    import orbax.checkpoint as ocp

    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process_{me}"
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Orbax from printing, once for each of its threads, the error that it then raises here."""
    with _hook_lock:
        outer_hook, logger = threading.excepthook, logging.getLogger("absl")

        def hook(failed: threading.ExceptHookArgs) -> None:
            if not type(failed.thread).__module__.startswith("orbax."):
                outer_hook(failed)

        threading.excepthook = hook
        logger.addFilter(_is_not_of_orbax)
        try:
            yield
        finally:
            logger.removeFilter(_is_not_of_orbax)
            threading.excepthook = outer_hook


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)


_hook_lock = threading.Lock()
"""Held by the one thread that has its hook in place; several managers write one after the other."""


Sizes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of some arrays, by their names."""


def read_arrays(folder: Path, sizes: Sizes) -> Mapping[str, Any]:
    """Reads some arrays of a folder, as they are stored; raises where Orbax cannot, or they are larger."""
    with reading(folder) as orbax:
        stored = orbax.metadata(folder.absolute()).item_metadata
        for name, (dtype, shape) in sizes.items():
            found = stored[name].shape
            if tuple(found) not in (shape, (size_of(dtype, shape),)):
                raise ValueError(f"array {name} has the shape {tuple(found)}, not {shape}")
        read: Mapping[str, Any] = orbax.restore(
            folder.absolute(), args=as_numpy(dict.fromkeys(sizes, 0))
        )
    return read


@contextmanager
def reading(folder: Path) -> Iterator[Any]:
    """Yields Orbax to read a folder; what it says of bytes that it did not write is an error of ours."""
    with orbax_alone() as orbax:
        try:
            yield orbax
        except PermissionError:
            raise
        except Exception as error:  # of any parser
            raise CheckpointDamagedError(
                f"Orbax cannot read {folder} ({error_text(error):.200})"
            ) from error


def as_numpy(some: Any) -> Any:
    """Returns the arguments with which Orbax reads some leaves of a tree as arrays of NumPy."""
    import orbax.checkpoint as ocp

    each = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), some)
    return ocp.args.PyTreeRestore(item=some, restore_args=each, partial_restore=True)


def write_bytes(folder: Path, named: Mapping[str, Array]) -> None:
    """Writes arrays to a folder that does not exist yet, each as a file of its little-endian bytes."""
    folder.mkdir()
    for name, data in named.items():
        (folder / name).write_bytes(_bytes(data).data)


def read_bytes(folder: Path, sizes: Sizes) -> Mapping[str, Any]:
    """Reads some of those arrays, as bytes."""
    return {name: np.fromfile(folder / name, np.uint8) for name in sizes}


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def from_stored(folder: str, path: str, stored: Any, dtype: str, shape: tuple[int, ...]) -> Array:
    """Returns the array that was stored, as such or as bytes; damaged if that is not what was saved."""
    if isinstance(stored, np.ndarray):
        if (stored.dtype.name, stored.shape) == (dtype, shape):
            return stored
        if stored.dtype == np.uint8 and stored.size == size_of(dtype, shape):
            return stored.view(dtype).reshape(shape)
    raise CheckpointDamagedError(
        f"{folder} holds {leaf_text(stored)} for {path}, which was saved as {dtype}{list(shape)}"
    )
