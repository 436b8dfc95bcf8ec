"""Reads a checkpoint: the parts that this process needs, compared with their digests, into a tree."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._errors import (
    ArgumentError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointFileError,
)
from distribute_jax._mesh import outside_mesh, put
from distribute_jax._messages import listed
from distribute_jax.checkpoint._arrays import Wanted, read_arrays, read_bytes
from distribute_jax.checkpoint._leaves import (
    ARRAY,
    ITERATOR,
    KEY,
    PYTHON,
    Leaf,
    Slot,
    Spec,
    digest_of,
    digest_of_text,
    python_value,
)
from distribute_jax.checkpoint._manifest import MANIFEST, PARTS, Manifest, Part, Record, manifest_in
from distribute_jax.checkpoint._storage import Directory
from distribute_jax.checkpoint._write import is_divided
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


def manifest_of(directory: Directory, name: str) -> Manifest:
    """Reads the manifest of a checkpoint.

    Raises:
        CheckpointDamagedError: it is missing or not what was written.
        CheckpointFileError: it cannot be read.
    """
    where = directory.path_of(name)
    try:
        text = directory.read(name, MANIFEST)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise CheckpointDamagedError(
            f"{where} has no {MANIFEST}, so it was not written to its end"
        ) from error
    except OSError as error:
        raise CheckpointFileError(f"{where} cannot be read: {error}") from error
    return manifest_in(where, text)


def read_leaves(
    directory: Directory, name: str, manifest: Manifest, needed: Callable[[Record], Sequence[Part]]
) -> list[Saved]:
    """Reads the leaves of a checkpoint, each part compared with its digest.

    Args:
        directory: where.
        name: of the checkpoint.
        manifest: its manifest.
        needed: which parts of a leaf this process needs; no other file is read.

    Raises:
        CheckpointDamagedError: a file is missing or was changed, or a part has another digest.
        CheckpointFileError: there is no right to read it.
    """
    where = directory.path_of(name)
    wanted = [needed(record) for record in manifest.leaves]
    data: dict[tuple[str, str], np.ndarray[Any, Any]] = {}
    for folder in dict.fromkeys(part.folder for parts in wanted for part in parts):
        named = {
            part.name: Wanted(record.spec.path, record.dtype, part.shape)
            for record, parts in zip(manifest.leaves, wanted, strict=True)
            for part in parts
            if part.folder == folder
        }
        try:
            found = _read_folder(directory, name, manifest, folder, named)
        except OSError as error:
            raise CheckpointFileError(f"{where} cannot be read: {error}") from error
        data |= {(folder, name): array for name, array in found.items()}
    leaves = [
        Saved(record, [(part, data[part.folder, part.name]) for part in parts])
        for record, parts in zip(manifest.leaves, wanted, strict=True)
    ]
    changed = [leaf.record.spec.path for leaf in leaves if not _is_as_saved(leaf)]
    if changed:
        raise CheckpointDamagedError(
            f"{where} holds other numbers than were saved (the sha256 differs) for\n{listed(changed)}"
        )
    return leaves


def _read_folder(
    directory: Directory, name: str, manifest: Manifest, folder: str, named: Mapping[str, Wanted]
) -> dict[str, np.ndarray[Any, Any]]:
    by_bytes = folder.startswith(PARTS)
    files = {
        file.removeprefix(f"{folder}/"): digest
        for file, digest in manifest.files.items()
        if file.startswith(f"{folder}/")
    }
    if by_bytes:  # files of parts that this process does not need are left alone
        files = {file: digest for file, digest in files.items() if file in named}
    with directory.arrays(name, f"{manifest.arrays}/{folder}", files) as local:
        return (read_bytes if by_bytes else read_arrays)(local, named)


def _is_as_saved(leaf: Saved) -> bool:
    if not leaf.record.dtype:
        return digest_of_text(leaf.record.text) == leaf.record.sha256
    return all(digest_of(data) == part.sha256 for part, data in leaf.boxes)


Box = tuple[slice, ...]


@dataclass(frozen=True)
class Saved:
    """What was read of a leaf."""

    record: Record
    boxes: Sequence[tuple[Part, np.ndarray[Any, Any]]]
    """The numbers of the parts that were needed."""

    @property
    def leaf(self) -> Leaf:
        """Gives all of it."""
        if not self.record.dtype:
            return Leaf(self.record.spec, text=self.record.text)
        whole = tuple(slice(0, size) for size in self.record.shape)
        return Leaf(self.record.spec, self.box(whole))

    def box(self, wanted: Box) -> np.ndarray[Any, Any]:
        """Gives a box of its numbers, out of the parts that lie in it.

        Raises:
            CheckpointDamagedError: the parts leave a gap there.
        """
        if len(self.boxes) == 1 and self.boxes[0][0].box == wanted:
            return self.boxes[0][1]
        out = np.empty([dim.stop - dim.start for dim in wanted], np.dtype(self.record.dtype))
        filled = 0
        for part, data in self.boxes:
            shared = common(part.box, wanted)
            if shared is None:
                continue
            out[_within(shared, wanted)] = data[_within(shared, part.box)]
            filled += math.prod(dim.stop - dim.start for dim in shared)
        if filled != out.size:
            raise CheckpointDamagedError(
                f"The parts of {self.record.spec.path} hold {filled} of the {out.size} numbers of {wanted}"
            )
        return out


def common(left: Box, right: Box) -> Box | None:
    """Gives what two boxes share; None where that is nothing."""
    pairs = zip(left, right, strict=True)
    shared = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs)
    return None if any(dim.start >= dim.stop for dim in shared) else shared


def _within(box: Box, outer: Box) -> Box:
    """Gives a box by its place in one around it."""
    pairs = zip(box, outer, strict=True)
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in pairs)


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Gives the box that an index of JAX means; dims behind those of the index are whole."""
    whole = [slice(None)] * (len(shape) - len(index))
    pairs = zip([*index, *whole], shape, strict=True)
    return tuple(slice(*dim.indices(size)[:2]) for dim, size in pairs)


def needed(record: Record, held: Any) -> list[Part]:
    """Gives the parts of a leaf that this process needs, to put it where the present value lies."""
    if len(record.parts) < 2 or not is_divided(held):
        return list(record.parts)
    boxes = [box_of(index, record.shape) for index in own_indices(held).values()]
    return [part for part in record.parts if any(common(part.box, box) for box in boxes)]


def own_indices(held: jax.Array) -> Mapping[Any, Any]:
    """Gives the index of each of this process's devices in an array."""
    return held.sharding.addressable_devices_indices_map(held.shape)
