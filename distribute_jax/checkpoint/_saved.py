"""One leaf of a checkpoint as it was read: the boxes of it that this process needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from distribute_jax._errors import CheckpointDamagedError
from distribute_jax.checkpoint._copies import is_divided
from distribute_jax.checkpoint._leaf import Leaf
from distribute_jax.checkpoint._manifest import Part, Record

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
