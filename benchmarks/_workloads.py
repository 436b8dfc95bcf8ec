"""What is trained in the benchmarks: models, with their batch, loss and optimizer.

Every benchmark takes its workloads from here, and so does every peer: ``initial_weights`` and ``batch``
give as plain NumPy arrays what all of them start from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from benchmarks._models import ConvNet, Perceptron, ResNet50, TiedTransformer, Transformer

Array = np.ndarray[Any, Any]
Params = dict[str, Any]
"""Weights by their names, such as ``layers.0.kernel``."""


def adam() -> optax.GradientTransformation:
    """Returns the usual optimizer."""
    return optax.adam(1e-3)


def momentum() -> optax.GradientTransformation:
    """Returns the optimizer under which divided state has the bits of mirrored state."""
    return optax.sgd(0.1, momentum=0.9)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model with its data, its batch and its optimizer. The loss is cross entropy."""

    name: str
    model: Callable[[nnx.Rngs], nnx.Module]
    data: Callable[[int], tuple[Array, Array]]
    """Draws so many examples and their integer labels, always the same ones."""
    batch: int
    """Examples in the global batch."""
    batches: int = 20
    """Batches of one epoch, where epochs are measured."""
    optimizer: Callable[[], optax.GradientTransformation] = adam
    by_hand: Callable[[Params, Any], Any] | None = None
    """The model as a function of its weights, where it is short; else Flax's ``split`` and ``merge`` make
    one."""

    def first_batch(self) -> tuple[Array, Array]:
        """Draws one global batch on the host."""
        return self.data(self.batch)

    def variables(self) -> int:
        """Counts the arrays of weights and optimizer state, and a step's number."""
        params = initial_weights(self)
        return len(params) + len(jax.tree.leaves(jax.eval_shape(self.optimizer().init, params))) + 1


def example_losses(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns each example's cross entropy, averaged over its places where it has several."""
    each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return each.reshape(each.shape[0], -1).mean(axis=1)


def initial_weights(work: Workload) -> dict[str, Array]:
    """Returns the weights that every way of training starts from, as NumPy arrays by name."""
    state = nnx.state(work.model(nnx.Rngs(0)), nnx.Param)
    return {_name(path): np.asarray(value) for path, value in nnx.to_flat_state(state)}


def forward_of(work: Workload) -> Callable[[Params, Any], Any]:
    """Returns the model as a pure function of its weights and a batch."""
    if work.by_hand is not None:
        return work.by_hand
    graph, *parts = nnx.split(work.model(nnx.Rngs(0)), nnx.Param, ...)
    state, rest = parts
    names = [_name(path) for path, _ in nnx.to_flat_state(state)]
    structure = jax.tree.structure(state)

    def forward(params: Params, x: Any) -> Any:
        state = jax.tree.unflatten(structure, [params[name] for name in names])
        return nnx.merge(graph, state, rest)(x)

    return forward


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def dense_layers(params: Params, x: Any) -> Any:
    """The perceptron, written by hand."""
    last = len(params) // 2 - 1
    for i in range(last):
        x = nnx.relu(x @ params[f"layers.{i}.kernel"] + params[f"layers.{i}.bias"])
    return x @ params[f"layers.{last}.kernel"] + params[f"layers.{last}.bias"]


def perceptron(name: str, sizes: tuple[int, ...], batch: int) -> Workload:
    """Returns a workload of dense layers: features before the first layer, and after each."""
    return Workload(
        name=name,
        model=partial(Perceptron, sizes),
        data=partial(features, sizes[0], sizes[-1]),
        batch=batch,
        by_hand=dense_layers,
    )


def features(width: int, classes: int, n: int) -> tuple[Array, Array]:
    """Draws examples of normal numbers."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((n, width), np.float32)
    return x, draw.integers(0, classes, n, np.int32)


def images(size: int, channels: int, classes: int, n: int) -> tuple[Array, Array]:
    """Draws images of normal numbers."""
    x, y = features(size * size * channels, classes, n)
    return x.reshape(n, size, size, channels), y


def characters(vocabulary: int, length: int, n: int) -> tuple[Array, Array]:
    """Draws characters; the labels are the next ones."""
    tokens = np.random.default_rng(0).integers(0, vocabulary, (n, length + 1), np.int32)
    return tokens[:, :-1], tokens[:, 1:]


def tied_transformer(mode: str) -> Workload:
    """Returns a language model whose blocks are in a loop, or in a scan, rematerialised or not."""
    way = {"loop": "looped", "scan": "scanned", "remat": "scanned, rematerialised"}[mode]
    return Workload(
        name=f"{way} transformer 4 × 256",
        model=partial(TiedTransformer, 1024, 256, 4, mode),
        data=partial(characters, 1024, 128),
        batch=16,
        optimizer=momentum,
    )


MLP = perceptron("MLP 784-512-10", (784, 512, 10), batch=256)
DEEP = perceptron("MLP of 40 layers, 16 wide", (16,) * 41, batch=16)
CNN = Workload(name="CNN 28×28", model=ConvNet, data=partial(images, 28, 1, 10), batch=64)
TRANSFORMER = Workload(
    name="transformer 4 × 128, 128 characters",
    model=partial(Transformer, 64, 128, 128, 4),
    data=partial(characters, 64, 128),
    batch=16,
    batches=4,
)
RESNET50 = Workload(
    name="ResNet-50 shapes, group norm",
    model=ResNet50,
    data=partial(images, 224, 3, 1000),
    batch=8,
    optimizer=momentum,
)
WORKLOADS = (MLP, CNN, TRANSFORMER, DEEP, RESNET50)
"""All of them. The last is for memory and compilation only."""
