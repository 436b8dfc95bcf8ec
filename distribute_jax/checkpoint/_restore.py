"""Puts the leaves of a checkpoint into a tree: all of them, or none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._errors import ArgumentError, CheckpointError
from distribute_jax._mesh import outside_mesh, put
from distribute_jax._tree import listed
from distribute_jax.checkpoint._copies import is_divided
from distribute_jax.checkpoint._leaf import ARRAY, ITERATOR, KEY, PYTHON, Leaf, Spec, python_value
from distribute_jax.checkpoint._manifest import Record
from distribute_jax.checkpoint._saved import Saved, box_of, own_indices
from distribute_jax.checkpoint._slots import Slot
from distribute_jax.variables import Variable, components_for

_MISFIT = """\
The checkpoint {where} does not fit the tree that it should be restored into; nothing was changed:
{lines}
Every leaf must be in both, with one shape and dtype. Build the model, the optimizer and the dict as they \
were when it was saved."""

_BASES = {
    "bool": np.bool_,
    "int": np.integer,
    "float": np.floating,
    "complex": np.complexfloating,
}
"""The dtypes that each type of Python number stands for."""


def check_fit(where: str, records: Sequence[Record], slots: Sequence[Slot]) -> None:
    """Raises a CheckpointError that lists every leaf that is missing, extra or different."""
    saved = {record.spec.path: record for record in records}
    here = {slot.spec.path: slot for slot in slots}
    faults = [
        f"{path}: expected {record.spec} (saved), got {_got(here.get(path))}"
        for path, record in saved.items()
        if path not in here or not _fits(record, here[path].spec)
    ]
    faults += [
        f"{path}: expected nothing (not in the checkpoint), got {slot.spec}"
        for path, slot in here.items()
        if path not in saved
    ]
    faults += _shared_faults(saved, slots)
    if faults:
        raise CheckpointError(_MISFIT.format(where=where, lines=listed(faults)))


def _got(slot: Slot | None) -> str:
    return "nothing" if slot is None else str(slot.spec)


def _fits(record: Record, here: Spec) -> bool:
    if (record.spec.kind, record.spec.dtype, record.spec.shape) == (
        here.kind,
        here.dtype,
        here.shape,
    ):
        return True
    if record.spec.kind == ARRAY and here.kind == PYTHON:
        # A step counter that began as a Python number is an array once a compiled step returned it.
        return record.spec.shape == () and _kind(record.spec.dtype) == here.dtype
    if record.spec.kind == PYTHON and here.kind == ARRAY and here.shape == ():
        return record.spec.dtype == _kind(here.dtype) and _holds(here.dtype, record)
    return False


def _kind(dtype: str) -> str:
    """Gives the name of the Python type that a dtype is for."""
    for name, base in _BASES.items():
        if jnp.issubdtype(np.dtype(dtype), base):
            return name
    return ""


def _holds(dtype: str, record: Record) -> bool:
    """Tells whether an array of a dtype holds a Python number exactly."""
    value = np.asarray(python_value(Leaf(record.spec, text=record.text)))
    try:
        return value.astype(dtype).astype(value.dtype).tobytes() == value.tobytes()
    except OverflowError:
        return False


def _shared_faults(saved: Mapping[str, Record], slots: Sequence[Slot]) -> Iterator[str]:
    """Says where one variable stands at two places for which different values were saved."""
    first: dict[Any, Record] = {}
    for slot in slots:
        record = saved.get(slot.spec.path)
        if slot.owner is None or record is None:
            continue
        other = first.setdefault(slot.owner, record)
        if other.sha256 != record.sha256:
            yield (
                f"{slot.spec.path}: expected another value than {other.spec.path} (saved), got one "
                "variable at both places"
            )


def new_values(leaves: Sequence[Saved], slots: Sequence[Slot]) -> list[Any]:
    """Makes the new value of each slot, where the present one lies, and puts none of them yet."""
    saved = {leaf.record.spec.path: leaf for leaf in leaves}
    with outside_mesh():  # where the present value lies counts, not which scope is open
        return [_new_value(saved[slot.spec.path], slot) for slot in slots]


def _new_value(saved: Saved, slot: Slot) -> Any:
    if is_divided(slot.held):
        return _divided(saved, slot)
    leaf = saved.leaf
    data = leaf.data
    if data is None:
        if slot.spec.kind != ARRAY:
            return leaf.text if slot.spec.kind == ITERATOR else python_value(leaf)
        data = np.asarray(python_value(leaf)).astype(slot.spec.dtype)
    if slot.spec.kind == KEY:
        return _placed(_key(data, slot.held), slot)
    if isinstance(slot.held, jax.Array):
        return _placed(data, slot)
    if isinstance(slot.held, np.ndarray):
        return np.array(data, dtype=slot.held.dtype)
    if isinstance(slot.held, Variable):
        return _checked(components_for(slot.held, data), data, slot)
    is_jax = slot.spec.kind == PYTHON and jax.dtypes.canonicalize_dtype(data.dtype) == data.dtype
    return jnp.asarray(data) if is_jax else data[()]


def _divided(saved: Saved, slot: Slot) -> jax.Array:
    """Makes an array that the processes hold together: each puts what its own devices hold."""
    held, record = slot.held, saved.record
    parts = []
    for device, index in own_indices(held).items():
        data = saved.box(box_of(index, record.shape))
        part = _key(data, held) if slot.spec.kind == KEY else data
        parts.append(_checked(jax.device_put(part, device), part, slot))
    return jax.make_array_from_single_device_arrays(held.shape, held.sharding, parts)


def _key(data: np.ndarray[Any, Any], held: jax.Array) -> jax.Array:
    key: jax.Array = jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(held))
    return key


def _placed(value: Any, slot: Slot) -> jax.Array:
    """Gives a value the placement of the array that it replaces."""
    held = slot.held
    fixed = held.committed or len(held.sharding.device_set) > 1
    new = put(value, held.sharding) if fixed else jnp.asarray(value)
    return _checked(new, value, slot)


def _checked(new: jax.Array, value: Any, slot: Slot) -> jax.Array:
    if new.dtype != value.dtype:
        raise CheckpointError(
            f"{slot.spec.path} is {value.dtype}, which JAX would make {new.dtype} of here. Set "
            "jax.config.update('jax_enable_x64', True), as it was when the array was made."
        )
    return new


def put_all(values: Sequence[Any], slots: Sequence[Slot]) -> None:
    """Puts every new value. Only an iterator can refuse its own, so iterators come first."""
    pairs = list(zip(slots, values, strict=True))
    _put_iterators([(slot, value) for slot, value in pairs if slot.spec.kind == ITERATOR])
    for slot, value in pairs:
        if slot.spec.kind != ITERATOR:
            slot.put(value)


def _put_iterators(pairs: Sequence[tuple[Slot, Any]]) -> None:
    undo: list[Callable[[], None]] = []
    for slot, state in pairs:
        try:
            before = slot.held.state()
            slot.put(state)
        except ArgumentError as error:
            for back in undo:
                back()
            raise CheckpointError(f"{slot.spec.path}: {error} Nothing was changed.") from error
        undo.append(functools.partial(slot.put, before))
