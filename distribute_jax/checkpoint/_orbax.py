"""Arrays as files, most of them by Orbax: those of a checkpoint, and the weights of plain Flax programs.

Orbax writes arrays of NumPy on process 0 alone, and no array of JAX that one process of several holds for
itself: what other processes write is the bytes of their arrays.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from distribute_jax._errors import CheckpointDamagedError, CheckpointError
from distribute_jax._mesh import put
from distribute_jax._messages import error_text, leaf_text, listed
from distribute_jax.checkpoint._agreement import on_all
from distribute_jax.variables import Variable

_STORED = frozenset(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)) | {
    *("bool", "bfloat16", "float16", "float32", "float64", "complex64", "complex128")
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
    with _quiet(), _orbax_alone() as orbax:
        orbax.save(folder.absolute(), args=ocp.args.PyTreeSave(stored))


def _bytes(data: Array) -> Array:
    return data.reshape(-1).view(np.uint8)


def _orbax_alone() -> Any:
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
    with _hook_lock, _filtered(lambda record: not (record.exc_info and "orbax" in record.pathname)):
        outer_hook = threading.excepthook

        def hook(failed: threading.ExceptHookArgs) -> None:
            if not type(failed.thread).__module__.startswith("orbax."):
                outer_hook(failed)

        threading.excepthook = hook
        try:
            yield
        finally:
            threading.excepthook = outer_hook


@contextmanager
def _filtered(keeps: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    """Filters what Orbax logs."""
    logger = logging.getLogger("absl")
    logger.addFilter(keeps)
    try:
        yield
    finally:
        logger.removeFilter(keeps)


_hook_lock = threading.Lock()
"""Held by the one thread that has its hook in place; several managers write one after the other."""


Sizes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of some arrays, by their names."""


def read_arrays(folder: Path, sizes: Sizes) -> Mapping[str, Any]:
    """Reads some arrays of a folder, as they are stored; raises where Orbax cannot, or they are larger."""
    with _reading(folder) as orbax:
        stored = orbax.metadata(folder.absolute()).item_metadata
        for name, (dtype, shape) in sizes.items():
            stored_shape = stored[name].shape
            if tuple(stored_shape) not in (shape, (size_of(dtype, shape),)):
                raise ValueError(f"array {name} has the shape {tuple(stored_shape)}, not {shape}")
        read: Mapping[str, Any] = orbax.restore(
            folder.absolute(), args=_as_numpy(dict.fromkeys(sizes, 0))
        )
    return read


@contextmanager
def _reading(folder: Path) -> Iterator[Any]:
    """Yields Orbax to read a folder; what it says of bytes that it did not write is an error of ours."""
    with _orbax_alone() as orbax:
        try:
            yield orbax
        except PermissionError:
            raise
        except Exception as error:  # of any parser
            raise CheckpointDamagedError(
                f"Orbax cannot read {folder} ({error_text(error):.200})"
            ) from error


def _as_numpy(some: Any) -> Any:
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


_TREE = "_METADATA"
"""The file in which Orbax says what tree it wrote to a folder."""
_WRITTEN = "_CHECKPOINT_METADATA"
_NOT_WEIGHTS = (nnx.RngState, nnx.Cache, nnx.Intermediate)
_AROUND_WEIGHTS = ("params", "model", "module", "state")
_MISFIT = """\
{folder} holds the weights of another model; nothing was changed:
{lines}
The names and shapes of the module and of the one that was saved must be the same."""


def flax_folder(path: str | os.PathLike[str]) -> Path | None:
    """Returns the folder in which Orbax wrote one tree for plain Flax; None where none is at a path."""
    place = Path(path)
    if (place / _TREE).exists():
        return place.absolute()
    if not (place / _WRITTEN).exists():
        steps = sorted(
            int(p.parent.name) for p in place.glob(f"*/{_WRITTEN}") if p.parent.name.isdigit()
        )
        if steps:
            raise CheckpointError(
                f"{place} has Orbax checkpoints of steps {', '.join(map(str, steps))}. Give the path of one: "
                f"{place / str(steps[-1])}"
            )
        return None
    items = sorted(item.name for item in place.iterdir() if (item / _TREE).exists())
    if len(items) != 1:
        raise CheckpointError(
            f"{place} is an Orbax checkpoint of {len(items)} trees ({', '.join(items)}). Give the path "
            "of the one that has the weights."
        )
    return place.absolute() / items[0]


def _read(folder: Path, wanted: Mapping[str, Any] | None = None) -> Any:
    """Reads leaves of such a folder as arrays of NumPy, or by default the types of all."""
    # It warns of every item that a manager wrote.
    with _filtered(lambda record: "orbax" not in record.pathname), _reading(folder) as orbax:
        if wanted is None:
            return dict(orbax.metadata(folder).item_metadata.tree)
        return orbax.restore(folder, args=_as_numpy(wanted))


def assign(variable: nnx.Variable[Any], new: Any) -> None:
    """Sets the value of a weight, in its dtype and where it is."""
    if isinstance(variable, Variable):
        variable.assign(np.asarray(new, variable[...].dtype))
        return
    old = variable.get_raw_value()
    variable.set_raw_value(put(np.asarray(new, old.dtype), old.sharding))


def load_flax(folder: Path, module: nnx.Module) -> None:
    """Sets the weights of a module to those of a folder; none where names or shapes differ."""
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
    tree: dict[str, Any] = {}
    for at in keys.values():
        functools.reduce(lambda node, key: node.setdefault(key, {}), at[:-1], tree)[at[-1]] = 0
    values = on_all("load_weights", lambda: _read(folder, tree))
    for path, variable in wanted.items():
        assign(variable, functools.reduce(operator.getitem, keys[path], values))


def _saved_weights(
    node: Any, names: Collection[tuple[str, ...]], at: tuple[str, ...] = ()
) -> dict[tuple[str, ...], Any]:
    """Returns path and type of what plain Flax saved, by its path in a module.

    Above it are collections, such as Linen's, or other trees, such as an optimizer's.
    """
    first = {path[0] for path in names}
    weights: dict[tuple[str, ...], Any] = {}
    if first.isdisjoint(node) and not node.keys().isdisjoint(_AROUND_WEIGHTS):
        for key, below in node.items():
            if isinstance(below, dict) and (key in _AROUND_WEIGHTS or first & below.keys()):
                weights |= _saved_weights(below, names, (*at, key))
        return weights
    for keys, leaf in jax.tree_util.tree_leaves_with_path(node):
        path = tuple(jax.tree_util.keystr(keys, simple=True, separator="\0").split("\0"))
        is_state = path[-1] == "value" and path not in names  # of an nnx.State
        weights[path[:-1] if is_state else path] = (*at, *path), leaf
    return weights
