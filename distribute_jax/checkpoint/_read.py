"""Restores a checkpoint: reads the parts that this process needs, verifies digests, sets the leaves."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
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
from distribute_jax.checkpoint._leaves import (
    ARRAY,
    ITERATOR,
    KEY,
    PYTHON,
    Slot,
    Spec,
    digest_of,
    python_value,
)
from distribute_jax.checkpoint._manifest import (
    MANIFEST,
    PARTS,
    Manifest,
    Part,
    Record,
    parse_manifest,
)
from distribute_jax.checkpoint._orbax import Sizes, byte_count, from_stored, read_arrays, read_bytes
from distribute_jax.checkpoint._storage import Directory
from distribute_jax.checkpoint._write import is_sharded
from distribute_jax.variables import Variable, components_for

_MISFIT = """\
The checkpoint {where} does not fit the tree that it should be restored into; nothing was changed:
{lines}
Every leaf must be in both, with one shape and dtype. Build the model, the optimizer and the dict as they \
were when it was saved. Model.load reads what Model.save wrote, with the optimizer of compile, and \
load_weights what save_weights wrote."""
_OTHER_OPTIMIZER = """\
The checkpoint {where} was saved with another optimizer: its opt_state differs, first at {first}. Nothing \
was changed. Restore it with that optimizer; after that, a new one continues from its weights."""

Box = tuple[slice, ...]


@dataclass(frozen=True)
class StoredLeaf:
    """A leaf, as far as this process has read it."""

    record: Record
    parts: Sequence[tuple[Part, np.ndarray[Any, Any]]]

    def value(self) -> Any:
        """Returns the complete array, or the JSON data."""
        if not self.record.dtype:
            return self.record.text
        return self.box(tuple(slice(0, size) for size in self.record.shape))

    def box(self, box: Box) -> np.ndarray[Any, Any]:
        """Returns a box of the array; raises if the parts do not cover it."""
        if len(self.parts) == 1 and self.parts[0][0].box == box:
            return self.parts[0][1]
        out = np.empty([dim.stop - dim.start for dim in box], np.dtype(self.record.dtype))
        filled = 0
        for part, data in self.parts:
            shared = intersection(part.box, box)
            if shared is not None:
                out[_relative_to(shared, box)] = data[_relative_to(shared, part.box)]
                filled += math.prod(dim.stop - dim.start for dim in shared)
        if filled != out.size:
            raise CheckpointDamagedError(
                f"The parts of {self.record.spec.path} hold {filled} of the {out.size} numbers of {box}"
            )
        return out


def intersection(left: Box, right: Box) -> Box | None:
    pairs = zip(left, right, strict=True)
    shared = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs)
    return None if any(dim.start >= dim.stop for dim in shared) else shared


def _relative_to(box: Box, outer: Box) -> Box:
    """Returns a box in the coordinates of one that contains it."""
    pairs = zip(box, outer, strict=True)
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in pairs)


def local_boxes(array: jax.Array, shape: Sequence[int]) -> dict[Any, Box]:
    """Returns the box that each local device holds; dims of ``shape`` beyond the array's are complete."""
    indices = array.sharding.addressable_devices_indices_map(array.shape)
    whole = [slice(None)] * (len(shape) - array.ndim)
    return {
        device: tuple(
            slice(*dim.indices(size)[:2])
            for dim, size in zip([*(index or ()), *whole], shape, strict=True)
        )
        for device, index in indices.items()
    }


def needed_parts(record: Record, current: Any) -> list[Part]:
    """Returns the parts that this process needs for its shards of the present value."""
    if len(record.parts) < 2 or not is_sharded(current):
        return list(record.parts)
    boxes = local_boxes(current, record.shape).values()
    return [part for part in record.parts if any(intersection(part.box, box) for box in boxes)]


def manifest_of(directory: Directory, name: str) -> Manifest:
    """Reads the manifest of a checkpoint; raises if it is missing or damaged."""
    where = directory.path_of(name)
    try:
        text = directory.read(f"{name}/{MANIFEST}")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise CheckpointDamagedError(
            f"{where} has no {MANIFEST}, so it was not written to its end, or is not a checkpoint of "
            "this library: those are folders. Steps of a CheckpointManager are read by its restore_latest, "
            "weights in a file of PyTorch or Keras by its own functions, and set as arrays: "
            "model.set_weights([np.asarray(w) for w in weights])"
        ) from error
    except OSError as error:
        raise CheckpointFileError(f"{where} cannot be read: {error}") from error
    return parse_manifest(where, text)


def read_leaves(
    directory: Directory, name: str, manifest: Manifest, slots: Sequence[Slot]
) -> list[StoredLeaf]:
    """Reads the parts that this process needs for a tree that fits, and verifies their digests."""
    where = directory.path_of(name)
    current = {slot.spec.path: slot.current for slot in slots}
    parts_of = [needed_parts(record, current[record.spec.path]) for record in manifest.leaves]
    sizes: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = defaultdict(dict)
    for record, parts in zip(manifest.leaves, parts_of, strict=True):
        for part in parts:
            if 0 not in part.shape:
                sizes[part.folder][part.name] = record.dtype, part.shape
    try:
        stored = {f: _read_folder(directory, name, manifest, f, sizes[f]) for f in sizes}
    except FileNotFoundError as error:
        raise CheckpointDamagedError(f"{where} was removed while it was read: {error}") from error
    except OSError as error:
        raise CheckpointFileError(f"{where} cannot be read: {error}") from error

    def array_of(record: Record, part: Part) -> np.ndarray[Any, Any]:
        if 0 in part.shape:
            return np.zeros(part.shape, record.dtype)
        folder = f"{where}/{manifest.arrays}/{part.folder}"
        data = stored[part.folder].get(part.name)
        return from_stored(folder, record.spec.path, data, record.dtype, part.shape)

    leaves = [
        StoredLeaf(record, [(part, array_of(record, part)) for part in parts])
        for record, parts in zip(manifest.leaves, parts_of, strict=True)
    ]
    changed = [leaf.record.spec.path for leaf in leaves if not _is_intact(leaf)]
    if changed:
        raise CheckpointDamagedError(
            f"{where} holds other numbers than were saved (the sha256 differs) for\n{listed(changed)}"
        )
    return leaves


def _read_folder(
    directory: Directory, name: str, manifest: Manifest, folder: str, sizes: Sizes
) -> Mapping[str, Any]:
    by_bytes = folder.startswith(PARTS)
    files = {
        file.removeprefix(f"{folder}/"): digest
        for file, digest in manifest.files.items()
        if file.startswith(f"{folder}/")
    }
    if by_bytes:  # files of other parts are not read
        files = {file: digest for file, digest in files.items() if file in sizes}
    largest = max(byte_count(*size) for size in sizes.values()) if by_bytes else None
    with directory.arrays(name, f"{manifest.arrays}/{folder}", files, largest) as local:
        return (read_bytes if by_bytes else read_arrays)(local, sizes)


def _is_intact(leaf: StoredLeaf) -> bool:
    if not leaf.record.dtype:
        return digest_of(leaf.record.text) == leaf.record.sha256
    return all(digest_of(data) == part.sha256 for part, data in leaf.parts)


def check_fit(where: str, records: Sequence[Record], slots: Sequence[Slot]) -> None:
    """Raises if leaves are missing, extra or different, and lists all of them."""
    saved = {record.spec.path: record for record in records}
    specs = {slot.spec.path: slot.spec for slot in slots}
    faults = [
        f"{path}: expected {record.spec} (saved), got {specs.get(path, 'nothing')}"
        for path, record in saved.items()
        if path not in specs or not _fits(record, specs[path])
    ]
    faults += [
        f"{path}: expected nothing (not in the checkpoint), got {spec}"
        for path, spec in specs.items()
        if path not in saved
    ]
    faults += _conflicts_of_shared_variables(saved, slots)
    if faults and all(".opt_state" in fault.partition(":")[0] for fault in faults):
        raise CheckpointError(
            _OTHER_OPTIMIZER.format(where=where, first=faults[0].partition(":")[0])
        )
    if faults:
        raise CheckpointError(_MISFIT.format(where=where, lines=listed(faults)))


def _fits(record: Record, spec: Spec) -> bool:
    if record.spec == spec:
        return True
    if record.spec.kind == ARRAY and spec.kind == PYTHON:
        # A step counter that was a Python number becomes an array when a compiled step returns it.
        return record.spec.shape == () and _python_type(record.spec.dtype) == spec.dtype
    if record.spec.kind == PYTHON and spec.kind == ARRAY and spec.shape == ():
        return record.spec.dtype == _python_type(spec.dtype) and _is_exact(spec.dtype, record)
    return False


def _python_type(dtype: str) -> str:
    """Returns the name of the Python type that corresponds to a dtype."""
    return type(np.zeros((), dtype).item()).__name__


def _is_exact(dtype: str, record: Record) -> bool:
    """True if an array of this dtype represents a saved Python number exactly."""
    value = np.asarray(python_value(record.spec, record.text))
    try:
        return value.astype(dtype).astype(value.dtype).tobytes() == value.tobytes()
    except OverflowError:
        return False


def _conflicts_of_shared_variables(
    saved: Mapping[str, Record], slots: Sequence[Slot]
) -> Iterator[str]:
    """Yields a line for each variable at two places of the tree whose saved values differ."""
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


def new_values(leaves: Sequence[StoredLeaf], slots: Sequence[Slot]) -> list[Any]:
    """Creates the new value of each slot, in the sharding of the present one, without setting it."""
    saved = {leaf.record.spec.path: leaf for leaf in leaves}
    with outside_mesh():  # so that an open scope has no influence on the sharding
        return [_new_value(saved[slot.spec.path], slot) for slot in slots]


def _new_value(leaf: StoredLeaf, slot: Slot) -> Any:
    current, spec = slot.current, slot.spec
    if is_sharded(current):
        return _sharded(leaf, slot)
    data = leaf.value()
    if not leaf.record.dtype:
        if spec.kind == ITERATOR:
            return data
        data = python_value(leaf.record.spec, data)
        if spec.kind != ARRAY:
            return data
        data = np.asarray(data).astype(spec.dtype)
    if spec.kind == KEY:
        return _placed(_key(data, current), slot)
    if isinstance(current, jax.Array):
        return _placed(data, slot)
    if isinstance(current, np.ndarray):
        return np.array(data, dtype=current.dtype)
    if isinstance(current, Variable):
        return _checked(components_for(current, data), data, slot)
    is_jax = spec.kind == PYTHON and jax.dtypes.canonicalize_dtype(data.dtype) == data.dtype
    return jnp.asarray(data) if is_jax else data[()]


def _sharded(leaf: StoredLeaf, slot: Slot) -> jax.Array:
    """Returns an array sharded over the processes, each of which places what its devices store."""
    current, parts = slot.current, []
    for device, box in local_boxes(current, leaf.record.shape).items():
        data = leaf.box(box)
        part = _key(data, current) if slot.spec.kind == KEY else data
        parts.append(_checked(jax.device_put(part, device), part, slot))
    return jax.make_array_from_single_device_arrays(current.shape, current.sharding, parts)


def _key(data: np.ndarray[Any, Any], current: jax.Array) -> jax.Array:
    impl = jax.random.key_impl(current)
    return jax.random.wrap_key_data(jax.device_put(data), impl=impl)


def _placed(value: Any, slot: Slot) -> jax.Array:
    """Puts a value into the sharding of the array that it replaces."""
    current = slot.current
    is_fixed = current.committed or len(current.sharding.device_set) > 1
    new = put(value, current.sharding) if is_fixed else jnp.asarray(value)
    return _checked(new, value, slot)


def _checked(new: jax.Array, value: Any, slot: Slot) -> jax.Array:
    if new.dtype != value.dtype:
        raise CheckpointError(
            f"{slot.spec.path} is {value.dtype}, which JAX would make {new.dtype} of here. Set "
            "jax.config.update('jax_enable_x64', True), as it was when the array was made."
        )
    return new


def put_values(values: Sequence[Any], slots: Sequence[Slot]) -> None:
    """Sets all new values, or none. Iterators, the only ones that can refuse theirs, come first."""
    pairs = sorted(zip(slots, values, strict=True), key=lambda pair: pair[0].spec.kind != ITERATOR)
    with ExitStack() as undo:
        for slot, value in pairs:
            is_iterator = slot.spec.kind == ITERATOR
            try:
                before = slot.current.state() if is_iterator else None
                slot.put(value)
            except ArgumentError as error:
                raise CheckpointError(f"{slot.spec.path}: {error} Nothing was changed.") from error
            if is_iterator:
                undo.callback(slot.put, before)
        undo.pop_all()
