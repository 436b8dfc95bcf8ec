"""Writes and reads arrays by Orbax or as raw bytes, and loads weights that plain Flax programs saved.

Orbax writes NumPy arrays on process 0 only, and refuses a JAX array that is local to one of several
processes. So the other processes write their arrays as raw bytes.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from distribute_jax._errors import CheckpointDamagedError, CheckpointError
from distribute_jax._mesh import put
from distribute_jax._messages import error_text, leaf_text, listed
from distribute_jax.checkpoint._agreement import on_all
from distribute_jax.variables import Variable

_ORBAX_DTYPES = frozenset(
    f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)
) | {*("bool", "bfloat16", "float16", "float32", "float64", "complex64", "complex128")}
"""Dtypes that Orbax supports; arrays of others are stored as bytes."""

Array = np.ndarray[Any, Any]


def write_arrays(folder: Path, named: Mapping[str, Array]) -> None:
    """Writes arrays by Orbax, none of them empty, to a folder that does not exist yet.

    The names are numbers, and the users' names are in the manifest: Orbax makes paths of nested names joined
    with dots, which could collide.
    """
    import orbax.checkpoint as ocp

    stored = {
        name: data if data.dtype.name in _ORBAX_DTYPES else _bytes(data)
        for name, data in named.items()
    }
    with _local_checkpointer() as orbax:
        orbax.save(folder.absolute(), args=ocp.args.PyTreeSave(stored))


def _bytes(data: Array) -> Array:
    return data.reshape(-1).view(np.uint8)


def _local_checkpointer() -> Any:
    """Returns an Orbax checkpointer that does not wait for other processes."""
    import orbax.checkpoint as ocp

    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process_{me}"
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


@contextmanager
def _filtered_log(keeps: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    logger = logging.getLogger("absl")
    logger.addFilter(keeps)
    try:
        yield
    finally:
        logger.removeFilter(keeps)


Sizes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of arrays, by their names."""


def read_arrays(folder: Path, sizes: Sizes) -> Mapping[str, Any]:
    """Reads some arrays of a folder by Orbax; raises before that if the shape of one is not as expected."""
    with _reading(folder) as orbax:
        stored = orbax.metadata(folder.absolute()).item_metadata
        for name, (dtype, shape) in sizes.items():
            stored_shape = stored[name].shape
            if tuple(stored_shape) not in (shape, (byte_count(dtype, shape),)):
                raise ValueError(f"array {name} has the shape {tuple(stored_shape)}, not {shape}")
        read: Mapping[str, Any] = orbax.restore(
            folder.absolute(), args=_as_numpy(dict.fromkeys(sizes, 0))
        )
    return read


@contextmanager
def _reading(folder: Path) -> Iterator[Any]:
    """Yields an Orbax checkpointer, whose errors are raised as ``CheckpointDamagedError``."""
    with _local_checkpointer() as orbax:
        try:
            yield orbax
        except Exception as error:  # of any parser
            if isinstance(error, MemoryError) or _is_of_machine(error):
                raise
            raise CheckpointDamagedError(
                f"Orbax cannot read {folder} ({error_text(error):.200})"
            ) from error


def _is_of_machine(error: Exception) -> bool:
    """True if the files may be whole: a lack of rights or descriptors must not set a checkpoint aside."""
    of_files = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
    return isinstance(error, OSError) and not isinstance(error, of_files)


def _as_numpy(some: Any) -> Any:
    """Returns the arguments with which Orbax reads a part of a tree as NumPy arrays."""
    import orbax.checkpoint as ocp

    each = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), some)
    return ocp.args.PyTreeRestore(item=some, restore_args=each, partial_restore=True)


def write_bytes(folder: Path, named: Mapping[str, Array]) -> None:
    """Writes arrays to a folder that does not exist yet, each as a file of little-endian bytes."""
    folder.mkdir()
    for name, data in named.items():
        (folder / name).write_bytes(_bytes(data).data)


def read_bytes(folder: Path, sizes: Sizes) -> Mapping[str, Any]:
    return {name: np.fromfile(folder / name, np.uint8) for name in sizes}


def byte_count(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def from_stored(folder: str, path: str, stored: Any, dtype: str, shape: tuple[int, ...]) -> Array:
    """Returns a stored array in its dtype and shape; raises if it cannot be the one that was saved."""
    if isinstance(stored, np.ndarray):
        if (stored.dtype.name, stored.shape) == (dtype, shape):
            return stored
        if stored.dtype == np.uint8 and stored.size == byte_count(dtype, shape):
            return stored.view(dtype).reshape(shape)
    raise CheckpointDamagedError(
        f"{folder} holds {leaf_text(stored)} for {path}, which was saved as {dtype}{list(shape)}"
    )


_TREE_METADATA = "_METADATA"
"""Orbax's description of the tree in a folder."""
_CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"
_NOT_WEIGHTS = (nnx.RngState, nnx.Cache, nnx.Intermediate)
_WRAPPER_KEYS = ("params", "model", "module", "state")
_MISFIT = """\
{folder} holds the weights of another model; nothing was changed:
{lines}
The names and shapes of the module and of the one that was saved must be the same."""


def find_flax_folder(path: str | os.PathLike[str]) -> Path | None:
    """Returns the folder of the one tree that Orbax has written at a path; None if there is none."""
    folder = Path(path).expanduser()
    if (folder / _TREE_METADATA).exists():
        return folder.absolute()
    trees = sorted(found.parent for found in folder.glob(f"*/{_TREE_METADATA}"))
    trees += sorted(found.parent for found in folder.glob(f"*/{_CHECKPOINT_METADATA}"))
    if trees and (len(trees) > 1 or not (folder / _CHECKPOINT_METADATA).exists()):
        raise CheckpointError(
            f"{folder} holds several trees or steps of Orbax. Give the path of the one that has the "
            f"weights, such as {trees[-1]}."
        )
    return trees[0].absolute() if trees else None


def _read(folder: Path, wanted: Mapping[str, Any] | None = None) -> Any:
    """Reads some leaves as NumPy arrays; by default the metadata of all."""
    # Orbax warns of every item that its own manager has written.
    with _filtered_log(lambda record: "orbax" not in record.pathname), _reading(folder) as orbax:
        if wanted is None:
            return dict(orbax.metadata(folder).item_metadata.tree)
        return orbax.restore(folder, args=_as_numpy(wanted))


def assign(variable: nnx.Variable[Any], new: Any) -> None:
    """Sets the value of a weight, keeping its dtype and sharding."""
    if isinstance(variable, Variable):
        variable.assign(np.asarray(new, variable[...].dtype))
        return
    old = variable.get_raw_value()
    variable.set_raw_value(put(np.asarray(new, old.dtype), old.sharding))


def load_flax(folder: Path, module: nnx.Module) -> None:
    """Sets the weights of a module to those of a folder; none if names or shapes differ."""
    graph = [(tuple(map(str, path)), node) for path, node in nnx.iter_graph(module)]
    variables = {path: node for path, node in graph if isinstance(node, nnx.Variable)}
    wanted = {path: v for path, v in variables.items() if not isinstance(v, _NOT_WEIGHTS)}
    saved = _saved_weights(on_all("load_weights", lambda: _read(folder)), variables)
    extra = [".".join(path) for path in saved if path not in variables]
    lines = []
    for path, variable in wanted.items():
        name, shape = ".".join(path), variable[...].shape
        if path not in saved:
            near = get_close_matches(name, extra, 1)
            lines.append(f"{name}: not saved" + (f"; {near[0]}?" if near else ""))
        elif saved[path][1].shape != shape:
            lines.append(f"{name}: {saved[path][1].shape} saved, {shape} in the module")
    if lines or extra:
        lines += [f"{name}: saved, and not in the module" for name in extra]
        raise CheckpointError(_MISFIT.format(folder=folder, lines=listed(lines)))
    keys = {path: saved[path][0] for path in wanted}
    tree = unflatten_dict(dict.fromkeys(keys.values(), 0))
    values = flatten_dict(on_all("load_weights", lambda: _read(folder, tree)))
    for path, variable in wanted.items():
        assign(variable, values[keys[path]])


def _saved_weights(
    node: Any, names: Collection[tuple[str, ...]], at: tuple[str, ...] = ()
) -> dict[tuple[str, ...], Any]:
    """Returns the saved path and the metadata of each weight, by its path in the module.

    The weights may be below collections, such as Linen's, and beside other trees, such as an optimizer's.
    """
    first = {path[0] for path in names}
    weights: dict[tuple[str, ...], Any] = {}
    if first.isdisjoint(node) and not node.keys().isdisjoint(_WRAPPER_KEYS):
        for key, below in node.items():
            if isinstance(below, dict) and (key in _WRAPPER_KEYS or first & below.keys()):
                weights |= _saved_weights(below, names, (*at, key))
        return weights
    for keys, leaf in jax.tree_util.tree_leaves_with_path(node):
        path = tuple(jax.tree_util.keystr(keys, simple=True, separator="\0").split("\0"))
        is_state = path[-1] == "value" and path not in names  # saved as an nnx.State
        weights[path[:-1] if is_state else path] = (*at, *path), leaf
    return weights
