"""Weights of plain Flax programs: what they saved with Orbax, put into a module by the names."""

from __future__ import annotations

import functools
import logging
import operator
import os
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from distribute_jax._errors import CheckpointError
from distribute_jax._mesh import put
from distribute_jax._messages import listed
from distribute_jax.checkpoint._agreement import on_all
from distribute_jax.checkpoint._arrays import as_numpy, reading
from distribute_jax.variables import Variable

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
    """Returns the folder in which Orbax wrote a tree for plain Flax; None where none is at a path.

    Raises:
        CheckpointError: there are several, as the steps and items of Orbax's ``CheckpointManager``.
    """
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
    absl = logging.getLogger("absl")
    absl.addFilter(_is_not_of_orbax)  # it warns of every item that a manager wrote
    try:
        with reading(folder) as orbax:
            if wanted is None:
                return dict(orbax.metadata(folder).item_metadata.tree)
            return orbax.restore(folder, args=as_numpy(wanted))
    finally:
        absl.removeFilter(_is_not_of_orbax)


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


def assign(variable: nnx.Variable[Any], new: Any) -> None:
    """Sets the value of a weight, in its dtype and where it is."""
    if isinstance(variable, Variable):
        variable.assign(np.asarray(new, variable[...].dtype))
        return
    old = variable.get_raw_value()
    variable.set_raw_value(put(np.asarray(new, old.dtype), old.sharding))


def load_flax(folder: Path, module: nnx.Module) -> None:
    """Sets the weights of a module to those of a folder, or on an error none.

    Raises:
        CheckpointError: their names or shapes differ.
    """
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
    found: dict[tuple[str, ...], Any] = {}
    if first.isdisjoint(node) and not node.keys().isdisjoint(_AROUND_WEIGHTS):
        for key, below in node.items():
            if isinstance(below, dict) and (key in _AROUND_WEIGHTS or first & below.keys()):
                found |= _saved_weights(below, names, (*at, key))
        return found
    for keys, leaf in jax.tree_util.tree_leaves_with_path(node):
        path = tuple(jax.tree_util.keystr(keys, simple=True, separator="\0").split("\0"))
        is_state = path[-1] == "value" and path not in names  # of an nnx.State
        found[path[:-1] if is_state else path] = (*at, *path), leaf
    return found
