"""What one process writes of a checkpoint: copies on the host, so that training may go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from distribute_jax.checkpoint._leaf import Spec


@dataclass(frozen=True)
class Piece:
    """A box of one leaf: all of it, or what the devices of this process hold."""

    leaf: int
    """Which leaf of the tree."""
    data: np.ndarray[Any, Any]
    """Its numbers; of random keys, their data."""
    start: tuple[int, ...]
    """Where the box begins in the whole."""
    is_whole: bool
    """Whether it is all of the leaf."""


@dataclass(frozen=True)
class Content:
    """What is to be written, as one process has it."""

    step: int | None
    """The step, or None for a checkpoint that is none of a manager's."""
    token: str
    """A text that no other checkpoint has, the same on all processes."""
    specs: list[Spec]
    """All leaves of the tree."""
    texts: Mapping[int, Any]
    """What JSON holds for the leaves that are no arrays."""
    pieces: list[Piece]
    """The numbers that this process writes."""
    made_by: Mapping[str, Any]

    @property
    def bytes(self) -> int:
        """How much space the pieces need, before Orbax compresses them."""
        return sum(piece.data.nbytes for piece in self.pieces)
