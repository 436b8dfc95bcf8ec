"""The leaves of a checkpoint: where each is kept in a tree, its kind, and its copy on the host."""

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

_NO_VALUE = (
    "an ON_READ variable with aggregation=NONE, of which nothing says how its replicas' values become "
    "one. Make it with aggregation=dj.VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA, or save its "
    ".values"
)


@dataclass(frozen=True)
class Spec:
    """What has to be the same for a saved leaf to fit where it is restored."""

    path: str
    """Where the leaf is, as the user would write it: ``['model'].layers[0].kernel``."""
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
            PYTHON: f"a Python {self.dtype}",
            ITERATOR: "an iterator",
        }
        return texts.get(self.kind, self.dtype)


@dataclass(frozen=True)
class Slot:
    """One place of a tree."""

    spec: Spec
    current: Any
    """The present value, whose placement a new one takes; of an ON_READ variable the variable."""
    put: Callable[[Any], None]
    """Sets a new value."""
    aggregated: Callable[[], Any] | None = None
    """Returns the one value that is saved, where each replica has one."""
    owner: tuple[int, int] | None = None
    """Which variable, and which part of it: one that stands at two places has one value."""

    def read(self) -> Any:
        """Returns the value as it is saved."""
        return self.current if self.aggregated is None else self.aggregated()


def slots_of(tree: Any) -> tuple[list[Slot], Callable[[], Any]]:
    """Returns every leaf of a tree, and a function for the tree once new values were put."""
    try:
        paths, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_leaf)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"The tree cannot be walked: {error}. The keys of a dict must be of one type that sorts, "
            "such as str."
        ) from error
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
    """Returns whether every leaf of a tree belongs to an object that is changed, not replaced."""
    return all(map(_is_changed_in_place, jax.tree.leaves(tree, is_leaf=_is_leaf)))


def _is_leaf(node: Any) -> bool:
    return node is None or isinstance(node, DistributedValues) or _is_changed_in_place(node)


def _is_changed_in_place(node: Any) -> bool:
    return isinstance(node, (nnx.Variable, nnx.Pytree, DistributedIterator))


def _slots_at(path: str, leaf: Any, put: Callable[[Any], None]) -> Iterator[Slot]:
    if isinstance(leaf, nnx.Variable):
        yield from _slots_of_variable(path, leaf)
    elif isinstance(leaf, nnx.Pytree):
        for names, value in nnx.to_flat_state(nnx.state(leaf)):
            inner = path + "".join(map(_name_text, names))
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
    """An ON_READ variable is saved as what it reads as, and restored so that it reads as that."""
    if variable.aggregation is VariableAggregation.NONE:
        return Slot(Spec(path, OTHER, _NO_VALUE), variable, variable.set_raw_value)
    raw = variable.get_raw_value()
    shape = raw.shape[1:] if is_donated(raw) else variable.values[0].shape
    spec = Spec(path, ARRAY, raw.dtype.name, shape)
    return Slot(spec, variable, variable.set_raw_value, variable.get_value, (id(variable), 0))


def _name_text(name: Any) -> str:
    """Writes one step of a path so that no two steps read the same, whatever the name is."""
    return f".{name}" if isinstance(name, str) and name.isidentifier() else f"[{name!r}]"


def spec_of(path: str, value: Any) -> Spec:
    """Describes a leaf, without reading its numbers."""
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
    """Copies a value to the host: an array, or for a Python value or an iterator what JSON holds."""
    if spec.kind == KEY:
        return host_copy(jax.random.key_data(value))
    if spec.kind == ARRAY:
        return host_copy(value)
    return value.state() if spec.kind == ITERATOR else _json_value(value)


def host_copy(value: Any) -> np.ndarray[Any, Any]:
    """Copies an array to memory of the host, little-endian.

    On a CPU NumPy would look at the memory of the array itself, which the next step may take.
    """
    host = np.asarray(value)
    return np.array(host, dtype=host.dtype.newbyteorder("<"), order="C", copy=True)


def digest_of(value: Any) -> str:
    """Returns the sha256 of the bytes of an array as ``host_copy`` returns it, or of what JSON holds."""
    if isinstance(value, np.ndarray):
        return hashlib.sha256(value.reshape(-1).view(np.uint8).data).hexdigest()
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _json_value(value: Any) -> Any:
    """Returns what JSON holds for a Python value: floats bit by bit."""
    if isinstance(value, complex):
        return [_json_value(value.real), _json_value(value.imag)]
    return np.float64(value).tobytes().hex() if isinstance(value, float) else value


def python_value(spec: Spec, text: Any) -> Any:
    """Returns the Python value for which JSON held a text."""
    if spec.dtype == "complex":
        return complex(*map(_float, text))
    return _float(text) if spec.dtype == "float" else text


def _float(text: str) -> float:
    return float(np.frombuffer(bytes.fromhex(text), np.float64)[0])
