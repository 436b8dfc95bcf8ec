"""The models of the workloads in Flax with the weights of the start, for the peers that stand on it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks._models import ConvNet, Perceptron, Transformer
from benchmarks.peers._protocol import EPSILON, LEARNING_RATE, Start


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
        return ConvNet(rngs)
    vocabulary, width = shapes["tokens.embedding"]
    length = len(start.weights["places.embedding"])
    layers = len({name.split(".")[1] for name in shapes if name.startswith("blocks.")})
    return Transformer(vocabulary, length, width, layers, rngs)


def optimizer() -> optax.GradientTransformation:
    """Returns the optimizer of every peer on JAX."""
    return optax.adam(LEARNING_RATE, eps=EPSILON)


def example_losses(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns each example's cross entropy, averaged over its places where it has several."""
    each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return each.reshape(each.shape[0], -1).mean(axis=1)
