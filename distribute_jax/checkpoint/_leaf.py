"""One leaf of a checkpoint: what kind of value it is, and its copy on the host."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._tree import is_key
from distribute_jax._values import DistributedValues
from distribute_jax.data import DistributedIterator

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
