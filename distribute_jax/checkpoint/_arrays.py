"""The arrays of a checkpoint as files: those that process 0 writes by Orbax, those of others as their bytes.

Orbax writes arrays of NumPy on process 0 alone, and no array of JAX that one process of several holds for
itself.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Wanted:
    """An array that a folder should hold."""

    path: str
    """The leaf that it belongs to, for messages."""
    dtype: str
    shape: tuple[int, ...]


def write_arrays(folder: Path, named: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Writes arrays to a folder that does not exist yet.

    Orbax joins nested names with dots and makes paths of them, so that names that users choose could
    collide; the manifest keeps those. It takes no array without elements: nothing is lost of one.
    """
    import orbax.checkpoint as ocp

    stored = {name: _stored(data) for name, data in named.items() if data.size}
    if not stored:
        folder.mkdir()
        return
    with _quiet(), _orbax() as orbax:
        orbax.save(folder.absolute(), args=ocp.args.PyTreeSave(stored))


def _orbax() -> Any:
    """Gives an Orbax of this process alone, which waits for no other one."""
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
        told = threading.excepthook

        def hook(failed: threading.ExceptHookArgs) -> None:
            if not type(failed.thread).__module__.startswith("orbax."):
                told(failed)

        threading.excepthook = hook
        logging.getLogger("absl").addFilter(_is_no_failed_thread)
        try:
            yield
        finally:
            logging.getLogger("absl").removeFilter(_is_no_failed_thread)
            threading.excepthook = told


def _is_no_failed_thread(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)


_hook_lock = threading.Lock()
"""Held by the one thread that has its hook in place; several managers write one after the other."""


def _stored(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return data if data.dtype.name in _STORED else data.reshape(-1).view(np.uint8)


def read_arrays(folder: Path, wanted: Mapping[str, Wanted]) -> dict[str, np.ndarray[Any, Any]]:
    """Reads some arrays of a folder.

    Raises:
        CheckpointDamagedError: Orbax cannot read them, or they are not what the manifest says.
    """
    names = [name for name, array in wanted.items() if 0 not in array.shape]
    found = _read(folder, names) if names else {}
    return {name: _data(folder, found.get(name), array) for name, array in wanted.items()}


def _read(folder: Path, names: Sequence[str]) -> Mapping[str, Any]:
    import orbax.checkpoint as ocp

    as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    some = ocp.args.PyTreeRestore(
        item=dict.fromkeys(names, 0), restore_args=as_numpy, partial_restore=True
    )
    with _orbax() as orbax:
        try:
            found: Mapping[str, Any] = orbax.restore(folder.absolute(), args=some)
        except PermissionError:
            raise
        except Exception as error:  # whatever a parser says of bytes that are not what was written
            raise CheckpointDamagedError(
                f"Orbax cannot read {folder} ({error_text(error):.200})"
            ) from error
    return found


def _data(folder: Path, found: Any, wanted: Wanted) -> np.ndarray[Any, Any]:
    dtype = np.dtype(wanted.dtype)
    if 0 in wanted.shape:
        return np.zeros(wanted.shape, dtype)
    if isinstance(found, np.ndarray) and wanted.dtype not in _STORED and found.dtype == np.uint8:
        is_all = found.size == math.prod(wanted.shape) * dtype.itemsize
        found = found.view(dtype).reshape(wanted.shape) if is_all else found
    if not isinstance(found, np.ndarray) or (found.dtype, found.shape) != (dtype, wanted.shape):
        raise CheckpointDamagedError(
            f"{folder} holds {leaf_text(found)} for {wanted.path}, which was saved as "
            f"{wanted.dtype}{list(wanted.shape)}"
        )
    return found


def write_bytes(folder: Path, named: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Writes arrays to a folder that does not exist yet, each as a file of its little-endian bytes."""
    folder.mkdir()
    for name, data in named.items():
        (folder / name).write_bytes(data.reshape(-1).view(np.uint8).data)


def read_bytes(folder: Path, wanted: Mapping[str, Wanted]) -> dict[str, np.ndarray[Any, Any]]:
    """Reads some of those arrays.

    Raises:
        CheckpointDamagedError: one has another size than the manifest says.
    """
    return {name: _from_bytes(folder / name, array) for name, array in wanted.items()}


def _from_bytes(file: Path, wanted: Wanted) -> np.ndarray[Any, Any]:
    if 0 in wanted.shape:
        return np.zeros(wanted.shape, wanted.dtype)
    data = np.fromfile(file, np.uint8)
    dtype = np.dtype(wanted.dtype)
    if data.size != math.prod(wanted.shape) * dtype.itemsize:
        raise CheckpointDamagedError(
            f"{file} has {data.size} bytes for {wanted.path}, which was saved as "
            f"{wanted.dtype}{list(wanted.shape)}"
        )
    return data.view(dtype).reshape(wanted.shape)
