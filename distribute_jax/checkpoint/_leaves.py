"""The leaves of a checkpoint: where each is kept in a tree, its kind, and its copy on the host."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from distribute_jax._errors import CheckpointError
from distribute_jax._messages import is_donated, is_key, listed
from distribute_jax._values import DistributedValues
from distribute_jax.data import DistributedIterator
from distribute_jax.variables import Variable, VariableAggregation

_NO_VALUE = (
    "an ON_READ variable with aggregation=NONE, of which nothing says how its replicas' values become "
    "one. Make it with aggregation=dj.VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA, or save its "
    ".values"
)


@dataclass(frozen=True)
class Slot:
    """One place of a tree."""

    spec: Spec
    held: Any
    """What stands there now, which says where a new value belongs; the variable, if it is ON_READ."""
    put: Callable[[Any], None]
    """Sets a new value."""
    aggregated: Callable[[], Any] | None = None
    """Gives the one value that is saved, where several are held: one for each replica."""
    owner: tuple[int, int] | None = None
    """Which variable, and which part of it: one that stands at two places has one value."""

    def read(self) -> Any:
        """Gives the value as it is saved."""
        return self.held if self.aggregated is None else self.aggregated()


@dataclass(frozen=True)
class Slots:
    """All places of a tree, and what becomes of it when they get new values."""

    places: list[Slot]
    rebuilt: Callable[[], Any]
    """Gives the tree with what was put: the same objects, and new containers for plain arrays."""


def slots_of(tree: Any) -> Slots:
    """Finds every leaf of a tree.

    Raises:
        CheckpointError: the tree cannot be walked, or two leaves have the same path.
    """
    try:
        paths, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_whole)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"The tree cannot be walked: {error}. The keys of a dict must be of one type that sorts, "
            "such as str."
        ) from error
    leaves = [leaf for _, leaf in paths]
    places: list[Slot] = []
    for i, (path, leaf) in enumerate(paths):
        places += _slots_at(jax.tree_util.keystr(path), leaf, leaves, i)
    _check_unique(places)
    return Slots(places, lambda: jax.tree.unflatten(structure, leaves))


def is_in_place(tree: Any) -> bool:
    """Tells whether every leaf of a tree belongs to an object that is changed, not replaced."""
    return all(map(_is_changed_in_place, jax.tree.leaves(tree, is_leaf=_is_whole)))


def _is_whole(node: Any) -> bool:
    return node is None or isinstance(node, DistributedValues) or _is_changed_in_place(node)


def _is_changed_in_place(node: Any) -> bool:
    return isinstance(node, (nnx.Variable, nnx.Pytree, DistributedIterator))


def _check_unique(places: list[Slot]) -> None:
    names = [slot.spec.path for slot in places]
    twice = sorted({name for name in names if names.count(name) > 1}) if _repeats(names) else []
    if twice:
        raise CheckpointError(
            f"Several leaves of the tree have the same path:\n{listed(twice)}\nA checkpoint tells leaves "
            "apart by their paths. Give the fields of the custom nodes different names."
        )


def _repeats(names: list[str]) -> bool:
    return len(set(names)) < len(names)


def _slots_at(path: str, leaf: Any, leaves: list[Any], i: int) -> Iterator[Slot]:
    if isinstance(leaf, nnx.Variable):
        yield from _of_variable(path, leaf)
    elif isinstance(leaf, nnx.Pytree):
        yield from _of_node(path, leaf)
    elif isinstance(leaf, DistributedIterator):
        yield Slot(spec_of(path, leaf), leaf, leaf.restore)
    else:
        yield Slot(spec_of(path, leaf), leaf, lambda new: _set(leaves, i, new))


def _of_node(path: str, node: Any) -> Iterator[Slot]:
    for names, leaf in nnx.to_flat_state(nnx.state(node)):
        own = path + "".join(map(_written, names))
        if isinstance(leaf, nnx.Variable):
            yield from _of_variable(own, leaf)
        else:
            yield _of_attribute(own, node, names, leaf)


def _of_attribute(path: str, node: Any, names: Any, leaf: Any) -> Slot:
    def put(new: Any) -> None:
        nnx.update(node, nnx.from_flat_state([(names, new)]))

    return Slot(spec_of(path, leaf), leaf, put)


def _of_variable(path: str, variable: nnx.Variable[Any]) -> Iterator[Slot]:
    if isinstance(variable, Variable) and variable.is_on_read:
        yield _of_components(path, variable)
        return
    raw = variable.get_raw_value()
    paths, structure = jax.tree_util.tree_flatten_with_path(raw, is_leaf=lambda x: x is None)
    leaves = [leaf for _, leaf in paths]
    for i, (inner, leaf) in enumerate(paths):
        own = path + jax.tree_util.keystr(inner)

        def put(new: Any, i: int = i) -> None:
            leaves[i] = new
            variable.set_raw_value(jax.tree.unflatten(structure, leaves))

        yield Slot(spec_of(own, leaf), leaf, put, owner=(id(variable), i))


def _of_components(path: str, variable: Variable) -> Slot:
    """An ON_READ variable is saved as what it reads as, and restored so that it reads as that."""
    if variable.aggregation is VariableAggregation.NONE:
        return Slot(Spec(path, OTHER, _NO_VALUE), variable, variable.set_raw_value)
    raw = variable.get_raw_value()
    shape = raw.shape[1:] if is_donated(raw) else variable.values[0].shape
    spec = Spec(path, ARRAY, raw.dtype.name, shape)
    return Slot(spec, variable, variable.set_raw_value, variable.get_value, (id(variable), 0))


def _written(name: Any) -> str:
    """Writes one step of a path so that no two steps read alike, whatever the name holds."""
    if isinstance(name, str) and name.isidentifier():
        return f".{name}"
    return f"[{name!r}]"


def _set(leaves: list[Any], i: int, new: Any) -> None:
    leaves[i] = new


ARRAY = "array"
KEY = "random key"
PYTHON = "Python"
ITERATOR = "iterator"
OTHER = "other"

PLAIN = (bool, int, float, complex, str, type(None))


@dataclass(frozen=True)
class Spec:
    """What has to be the same for a saved leaf to fit where it is restored."""

    path: str
    """Where the leaf stands, as the user would write it: ``['model'].layers[0].kernel``."""
    kind: str
    """One of the constants of this file."""
    dtype: str = ""
    """The name of an array's dtype, a random key's implementation, or a Python value's type."""
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Reads like ``float32[3,2]``."""
        sizes = f"[{','.join(map(str, self.shape))}]"
        if self.kind == ARRAY:
            return f"{self.dtype}{sizes}"
        if self.kind == KEY:
            return f"random key {self.dtype}{sizes}"
        return {PYTHON: f"a Python {self.dtype}", ITERATOR: "an iterator"}.get(
            self.kind, self.dtype
        )


@dataclass(frozen=True)
class Leaf:
    """A leaf's value on the host, which nothing that runs later can change."""

    spec: Spec
    data: np.ndarray[Any, Any] | None = None
    """The numbers of an array or a random key."""
    text: Any = None
    """What JSON holds for a Python value or an iterator."""

    @property
    def sha256(self) -> str:
        """A digest of the little-endian bytes, or of the JSON text."""
        return digest_of_text(self.text) if self.data is None else digest_of(self.data)


def digest_of(data: np.ndarray[Any, Any]) -> str:
    """Gives the sha256 of the bytes of an array, which is little-endian and in C's order."""
    return hashlib.sha256(data.reshape(-1).view(np.uint8).data).hexdigest()


def digest_of_text(text: Any) -> str:
    """Gives the sha256 of what JSON holds."""
    return hashlib.sha256(json.dumps(text, sort_keys=True).encode()).hexdigest()


def spec_of(path: str, value: Any) -> Spec:
    """Describes what stands in a tree, without reading its numbers."""
    if is_key(value):
        return Spec(path, KEY, str(jax.random.key_impl(value)), value.shape)
    if isinstance(value, (jax.Array, np.ndarray, np.generic)) and _has_bytes(value.dtype):
        return Spec(path, ARRAY, value.dtype.name, value.shape)
    if isinstance(value, PLAIN) and type(value) in PLAIN:
        return Spec(path, PYTHON, type(value).__name__)
    if isinstance(value, DistributedIterator):
        return Spec(path, ITERATOR)
    return Spec(path, OTHER, _called(value))


def _has_bytes(dtype: Any) -> bool:
    """Tells whether numbers of a dtype are their bytes: objects, texts and records are not."""
    return bool(jnp.issubdtype(dtype, np.number) or dtype == np.bool_)


def _called(value: Any) -> str:
    if isinstance(value, (np.ndarray, np.generic)):
        return f"a NumPy array of dtype {value.dtype}"
    if isinstance(value, DistributedValues):
        return "one value for each replica (PerReplica); combine them first, with strategy.reduce"
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def leaf_of(path: str, value: Any) -> Leaf:
    """Copies a value to the host."""
    spec = spec_of(path, value)
    if spec.kind == KEY:
        return Leaf(spec, host_copy(jax.random.key_data(value)))
    if spec.kind == ARRAY:
        return Leaf(spec, host_copy(value))
    if spec.kind == ITERATOR:
        return Leaf(spec, text=value.state())
    return Leaf(spec, text=written(value))


def host_copy(value: Any) -> np.ndarray[Any, Any]:
    """Copies an array to memory of its own, little-endian.

    On a CPU NumPy would look at the memory of the array itself, which the next step may take.
    """
    host = np.asarray(value)
    return np.array(host, dtype=host.dtype.newbyteorder("<"), order="C", copy=True)


def written(value: Any) -> Any:
    """Gives what JSON holds for a Python value: floats bit by bit."""
    if isinstance(value, complex):
        return [written(value.real), written(value.imag)]
    return np.float64(value).tobytes().hex() if isinstance(value, float) else value


def python_value(leaf: Leaf) -> Any:
    """Gives the Python value that was written."""
    if leaf.spec.dtype == "complex":
        return complex(*map(_float, leaf.text))
    return _float(leaf.text) if leaf.spec.dtype == "float" else leaf.text


def _float(text: str) -> float:
    return float(np.frombuffer(bytes.fromhex(text), np.float64)[0])
