"""The models in Flax, for the peers that stand on it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.peers._protocol import EPSILON, LEARNING_RATE, Start


class Perceptron(nnx.Module):
    """Dense layers with ``relu`` between them."""

    def __init__(self, sizes: list[int], rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairwise(sizes)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, features) to logits (batch, classes)."""
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


class CNN(nnx.Module):
    """Two convolutions, each halved by its largest values, and two dense layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 32, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (3, 3), rngs=rngs)
        self.dense = nnx.Linear(7 * 7 * 64, 128, rngs=rngs)
        self.head = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images (batch, 28, 28, 1) to logits (batch, 10)."""
        for conv in (self.conv1, self.conv2):
            x = nnx.max_pool(nnx.relu(conv(x)), (2, 2), strides=(2, 2))
        x = nnx.relu(self.dense(x.reshape(x.shape[0], -1)))
        return self.head(x)


class Block(nnx.Module):
    """Causal attention and a feed-forward part, each behind a layer norm."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = (nnx.LayerNorm(width, epsilon=1e-6, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, length, width) to the same shape."""
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.relu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    """A language model over characters."""

    def __init__(
        self, vocabulary: int, length: int, width: int, layers: int, rngs: nnx.Rngs
    ) -> None:
        self.tokens = nnx.Embed(vocabulary, width, rngs=rngs)
        self.places = nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, epsilon=1e-6, rngs=rngs)
        self.head = nnx.Linear(width, vocabulary, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps characters (batch, length) to logits (batch, length, vocabulary)."""
        h = self.tokens(x) + self.places(jnp.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def model_of(start: Start) -> Any:
    """Builds the model with its initial weights."""
    model = _untrained(start)
    params = nnx.state(model, nnx.Param)
    names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(params)]
    leaves, structure = jax.tree.flatten(params)
    named = zip(names, leaves, strict=True)
    values = [jnp.asarray(start.weights[name].reshape(leaf.shape)) for name, leaf in named]
    nnx.update(model, jax.tree.unflatten(structure, values))
    return model


def _untrained(start: Start) -> nnx.Module:
    shapes, rngs = {name: value.shape for name, value in start.weights.items()}, nnx.Rngs(0)
    if start.model == "mlp":
        kernels = [shape for shape in shapes.values() if len(shape) == 2]
        return Perceptron([kernels[0][0], *(kernel[1] for kernel in kernels)], rngs)
    if start.model == "cnn":
        return CNN(rngs)
    vocabulary, width = shapes["tokens.embedding"]
    length = len(start.weights["places.embedding"])
    layers = len({name.split(".")[1] for name in shapes if name.startswith("blocks.")})
    return Transformer(vocabulary, length, width, layers, rngs)


def optimizer() -> optax.GradientTransformation:
    """Gives the optimizer of every peer on JAX."""
    return optax.adam(LEARNING_RATE, eps=EPSILON)


def example_losses(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Gives each example's cross entropy, averaged over its places where it has several."""
    each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return each.reshape(each.shape[0], -1).mean(axis=1)
