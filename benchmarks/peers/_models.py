"""The models that all peers train, as NumPy: names and shapes of the weights, and the batches.

Kernels map (inputs, outputs); images are (height, width, channels), and a convolution's kernel
(height, width, inputs, outputs). A peer whose framework lays them out otherwise transposes them.
The optimizer is Adam in float32, the loss is cross entropy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Work:
    """A model and its batch."""

    name: str
    model: str
    """What the peers call it: ``mlp``, ``cnn`` or ``transformer``."""
    shapes: Shapes
    data: Callable[[int], tuple[Array, Array]]
    """Draws so many examples and their labels."""
    batch: int
    """Examples in the global batch."""
    calls: int
    """Steps in one turn."""

    def weights(self) -> dict[str, Array]:
        """Draws the initial weights."""
        draw = np.random.default_rng(0)
        return {name: _initial(draw, name, shape) for name, shape in self.shapes.items()}

    def batches(self, count: int) -> tuple[Array, Array]:
        """Draws batches: inputs and labels, shapes (count, batch, ...)."""
        x, y = self.data(count * self.batch)
        return tuple(a.reshape(count, self.batch, *a.shape[1:]) for a in (x, y))  # type: ignore[return-value]


def _initial(draw: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
    if name.endswith("bias"):
        return np.zeros(shape, np.float32)
    if name.endswith("scale"):
        return np.ones(shape, np.float32)
    inputs = shape[-1] if name.endswith("embedding") else prod(shape[:-1])
    return draw.standard_normal(shape, np.float32) / np.float32(np.sqrt(inputs))


def _layer(name: str, *kernel: int) -> Shapes:
    return {f"{name}.kernel": kernel, f"{name}.bias": kernel[-1:]}


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.scale": (width,), f"{name}.bias": (width,)}


def _block(name: str, width: int) -> Shapes:
    attention: Shapes = {}
    for part in ("query", "key", "value", "out"):
        attention |= _layer(f"{name}.attention.{part}", width, width)
    return {
        **_norm(f"{name}.norm1", width),
        **attention,
        **_norm(f"{name}.norm2", width),
        **_layer(f"{name}.up", width, 4 * width),
        **_layer(f"{name}.down", 4 * width, width),
    }


def transformer_shapes(vocabulary: int, length: int, width: int, layers: int) -> Shapes:
    """Returns the weights of a language model over characters."""
    shapes: Shapes = {"tokens.embedding": (vocabulary, width), "places.embedding": (length, width)}
    for i in range(layers):
        shapes |= _block(f"blocks.{i}", width)
    return {**shapes, **_norm("norm", width), **_layer("head", width, vocabulary)}


def images(shape: tuple[int, ...], n: int) -> tuple[Array, Array]:
    """Draws images of normal numbers, and labels below 10."""
    draw = np.random.default_rng(1)
    return draw.standard_normal((n, *shape), np.float32), draw.integers(0, 10, n, np.int32)


def characters(vocabulary: int, length: int, n: int) -> tuple[Array, Array]:
    """Draws characters; the labels are the next ones."""
    tokens = np.random.default_rng(1).integers(0, vocabulary, (n, length + 1), np.int32)
    return tokens[:, :-1], tokens[:, 1:]


MLP = Work(
    name="MLP 784-512-10",
    model="mlp",
    shapes=_layer("layers.0", 784, 512) | _layer("layers.1", 512, 10),
    data=partial(images, (784,)),
    batch=256,
    calls=40,
)
CNN = Work(
    name="CNN 28×28",
    model="cnn",
    shapes=_layer("conv1", 3, 3, 1, 32)
    | _layer("conv2", 3, 3, 32, 64)
    | _layer("dense", 7 * 7 * 64, 128)
    | _layer("head", 128, 10),
    data=partial(images, (28, 28, 1)),
    batch=64,
    calls=3,
)
TRANSFORMER = Work(
    name="transformer 4 × 128, 128 characters",
    model="transformer",
    shapes=transformer_shapes(64, 128, 128, 4),
    data=partial(characters, 64, 128),
    batch=16,
    calls=3,
)
WIDE = replace(
    TRANSFORMER,
    name="transformer 4 × 256, 128 of 1024 characters",
    shapes=transformer_shapes(1024, 128, 256, 4),
    data=partial(characters, 1024, 128),
    calls=1,
)
"""Whose arrays are worth dividing."""
