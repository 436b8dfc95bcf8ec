"""Flattens a tree into the leaves that a checkpoint stores, and copies them to the host."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from distribute_jax._errors import CheckpointError
from distribute_jax._messages import is_array, is_donated, is_key, is_numeric, listed
from distribute_jax._values import DistributedValues
from distribute_jax.data import DistributedIterator
from distribute_jax.variables import Variable, VariableAggregation

ARRAY = "array"
KEY = "random key"
PYTHON = "Python"
ITERATOR = "iterator"
OTHER = "other"

_MAX_DEPTH = 200
"""Levels of a tree beyond which it is taken to contain itself; JAX fails at less than 1000."""

_NO_AGGREGATION = (
    "an ON_READ variable with aggregation=NONE, which leaves open how the replicas' values become one. "
    "Make it with aggregation=dj.VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA, or save its .values"
)


@dataclass(frozen=True)
class Spec:
    """Path, kind, dtype and shape of a leaf: those of the saved leaf and of its target must be equal."""

    path: str
    """In the user's notation: ``['model'].layers[0].kernel``."""
    kind: str
    """One of the constants of this file."""
    dtype: str = ""
    """The name of an array's dtype, a random key's implementation, or a Python value's type."""
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        sizes = f"[{','.join(map(str, self.shape))}]"
        texts = {
            ARRAY: f"{self.dtype}{sizes}",
            KEY: f"random key {self.dtype}{sizes}",
            PYTHON: "None" if self.dtype == "NoneType" else f"a Python {self.dtype}",
            ITERATOR: "an iterator",
        }
        return texts.get(self.kind, self.dtype)


@dataclass(frozen=True)
class Slot:
    """A leaf of a tree, with how to read and to replace it."""

    spec: Spec
    current: Any
    """The present value, whose sharding a new one gets; for an ON_READ variable the variable itself."""
    put: Callable[[Any], None]
    aggregated: Callable[[], Any] | None = None
    """Returns the value to save, if each replica has its own."""
    owner: tuple[int, int] | None = None
    """The id of the variable and the index in it; equal for one variable at two places of a tree."""

    def read(self) -> Any:
        """Returns the value to save."""
        return self.current if self.aggregated is None else self.aggregated()


def slots_of(tree: Any) -> tuple[list[Slot], Callable[[], Any]]:
    """Returns every leaf of a tree, and a function for the tree once new values were put."""
    too_deep: list[Any] = []

    def is_leaf(path: Any, node: Any) -> bool:
        # What this raised, and a RecursionError, would leave Python's recursion count raised (Python 3.11).
        if len(path) > _MAX_DEPTH:
            too_deep.append(path)
        return bool(too_deep) or _is_leaf(node)

    try:
        paths, structure = jax.tree_util.tree_flatten_with_path(
            tree, is_leaf=is_leaf, is_leaf_takes_path=True
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"The tree cannot be walked: {str(error).rstrip('.')}. The keys of a dict must be of one type "
            "that sorts, such as str."
        ) from error
    if too_deep:
        raise CheckpointError(
            f"The tree has more than {_MAX_DEPTH} levels at {jax.tree_util.keystr(too_deep[0][:4])}…: a "
            "dict or list there contains itself. A checkpoint stores a tree: leave that entry out."
        )
    leaves = [leaf for _, leaf in paths]
    slots: list[Slot] = []
    for i, (path, leaf) in enumerate(paths):
        put = functools.partial(leaves.__setitem__, i)
        slots += _slots_at(jax.tree_util.keystr(path), leaf, put)
    repeated = [path for path, n in Counter(slot.spec.path for slot in slots).items() if n > 1]
    if repeated:
        raise CheckpointError(
            f"Several leaves of the tree have the same path:\n{listed(sorted(repeated))}\nA checkpoint "
            "tells leaves apart by their paths. Give the fields of the custom nodes different names."
        )
    return slots, lambda: jax.tree.unflatten(structure, leaves)


def is_in_place(tree: Any) -> bool:
    """True if every leaf of a tree belongs to an object that is changed in place."""
    return all(map(_is_changed_in_place, jax.tree.leaves(tree, is_leaf=_is_leaf)))


def iterators_in(tree: Any) -> list[DistributedIterator]:
    leaves = jax.tree.leaves(tree, is_leaf=_is_leaf)
    return [leaf for leaf in leaves if isinstance(leaf, DistributedIterator)]


def _is_leaf(node: Any) -> bool:
    return node is None or isinstance(node, DistributedValues) or _is_changed_in_place(node)


def _is_changed_in_place(node: Any) -> bool:
    return isinstance(node, (nnx.Variable, nnx.Pytree, DistributedIterator))


def _slots_at(path: str, leaf: Any, put: Callable[[Any], None]) -> Iterator[Slot]:
    if isinstance(leaf, nnx.Variable):
        yield from _slots_of_variable(path, leaf)
    elif isinstance(leaf, nnx.Pytree):
        for names, value in nnx.to_flat_state(nnx.state(leaf)):
            inner = path + "".join(map(_key_text, names))
            if isinstance(value, nnx.Variable):
                yield from _slots_of_variable(inner, value)
            else:
                yield Slot(spec_of(inner, value), value, functools.partial(_update, leaf, names))
    elif isinstance(leaf, DistributedIterator):
        yield Slot(spec_of(path, leaf), leaf, leaf.restore)
    else:
        yield Slot(spec_of(path, leaf), leaf, put)


def _update(node: Any, names: Any, new: Any) -> None:
    nnx.update(node, nnx.from_flat_state([(names, new)]))


def _slots_of_variable(path: str, variable: nnx.Variable[Any]) -> Iterator[Slot]:
    if isinstance(variable, Variable) and variable.is_on_read:
        yield _slot_of_components(path, variable)
        return
    raw = variable.get_raw_value()
    paths, structure = jax.tree_util.tree_flatten_with_path(raw, is_leaf=lambda x: x is None)
    leaves = [leaf for _, leaf in paths]

    def put(i: int, new: Any) -> None:
        leaves[i] = new
        variable.set_raw_value(jax.tree.unflatten(structure, leaves))

    for i, (inner, leaf) in enumerate(paths):
        spec = spec_of(path + jax.tree_util.keystr(inner), leaf)
        yield Slot(spec, leaf, functools.partial(put, i), owner=(id(variable), i))


def _slot_of_components(path: str, variable: Variable) -> Slot:
    """Returns the slot of an ON_READ variable, which is saved as the value that it reads as."""
    if variable.aggregation is VariableAggregation.NONE:
        return Slot(Spec(path, OTHER, _NO_AGGREGATION), variable, variable.set_raw_value)
    raw = variable.get_raw_value()
    shape = raw.shape[1:] if is_donated(raw) else variable.values[0].shape
    spec = Spec(path, ARRAY, raw.dtype.name, shape)
    return Slot(spec, variable, variable.set_raw_value, variable.get_value, (id(variable), 0))


def _key_text(name: Any) -> str:
    """Returns the text of one key of a path, distinct for distinct keys."""
    return f".{name}" if isinstance(name, str) and name.isidentifier() else f"[{name!r}]"


def spec_of(path: str, value: Any) -> Spec:
    """Describes a leaf without reading its values."""
    if isinstance(value, np.ma.MaskedArray):
        return Spec(path, OTHER, "a masked array, whose mask would be lost; save values and mask")
    if is_key(value):
        return Spec(path, KEY, str(jax.random.key_impl(value)), value.shape)
    if is_array(value) and is_numeric(value.dtype):
        return Spec(path, ARRAY, value.dtype.name, value.shape)
    if type(value) in (bool, int, float, complex, str, type(None)):
        return Spec(path, PYTHON, type(value).__name__)
    if isinstance(value, DistributedIterator):
        return Spec(path, ITERATOR)
    if isinstance(value, (np.ndarray, np.generic)):
        text = f"a NumPy array of dtype {value.dtype}"
    elif isinstance(value, DistributedValues):
        text = "one value for each replica (PerReplica); combine them first, with strategy.reduce"
    else:
        text = f"a {type(value).__module__}.{type(value).__qualname__}"
    return Spec(path, OTHER, text)


def saved_value(spec: Spec, value: Any) -> Any:
    """Copies a value to the host: an array, or JSON data for a Python value or an iterator."""
    if spec.kind == KEY:
        return host_copy(jax.random.key_data(value))
    if spec.kind == ARRAY:
        return host_copy(value)
    return value.state() if spec.kind == ITERATOR else _json_value(value)


def host_copy(value: Any) -> np.ndarray[Any, Any]:
    """Copies an array to the host, in little-endian byte order.

    On a CPU ``jax.device_get`` alone is a view of the array's buffer, which may be donated to the next step.
    """
    host = np.asarray(jax.device_get(value))
    return np.array(host, dtype=host.dtype.newbyteorder("<"), order="C", copy=True)


def digest_of(value: Any) -> str:
    """Returns the sha256 of the bytes of an array from ``host_copy``, or of JSON data."""
    if isinstance(value, np.ndarray):
        return hashlib.sha256(value.reshape(-1).view(np.uint8).data).hexdigest()
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _json_value(value: Any) -> Any:
    """Returns JSON data for a Python value; floats as the hex of their bytes, so that they stay exact."""
    if isinstance(value, complex):
        return [_json_value(value.real), _json_value(value.imag)]
    return np.float64(value).tobytes().hex() if isinstance(value, float) else value


def python_value(spec: Spec, text: Any) -> Any:
    if spec.dtype == "complex":
        return complex(*map(_float, text))
    return _float(text) if spec.dtype == "float" else text


def _float(text: str) -> float:
    return float(np.frombuffer(bytes.fromhex(text), np.float64)[0])
