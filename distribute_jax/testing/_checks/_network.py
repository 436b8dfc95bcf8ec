"""A linear model, its data, and its training by hand in NumPy, for the checks of training."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

_RATE, _MOMENTUM, _NORM = 0.2, 0.9, 1.0


class Trained(NamedTuple):
    """What training gave: the loss of each step, and at the end bias and kernel with their momenta."""

    losses: Any
    parameters: Any
    momenta: Any


def model() -> Any:
    """Three weights and a bias."""
    return nnx.Linear(3, 1, rngs=nnx.Rngs(0))


def transformation() -> Any:
    """Clipping, which must see the gradient of the global batch, and momentum, which is state."""
    return optax.chain(optax.clip_by_global_norm(_NORM), optax.sgd(_RATE, momentum=_MOMENTUM))


def data(sizes: tuple[int, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Makes global batches of inputs and targets."""
    rng = np.random.default_rng(0)
    draw = [(rng.normal(size=(n, 3)), rng.normal(size=n)) for n in sizes]
    return [(x.astype(np.float32), y.astype(np.float32)) for x, y in draw]


def example_losses(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Gives the loss of each example."""
    return jnp.square(model(x)[:, 0] - y)


def trained(losses: Any, model: Any, optimizer: Any) -> Trained:
    """Copies what training gave to the host."""
    return Trained(np.asarray(losses, np.float32), _arrays(model), _arrays(optimizer))


def _arrays(node: Any) -> list[np.ndarray]:
    leaves = map(np.asarray, jax.tree.leaves(nnx.state(node)))
    return [leaf for leaf in leaves if leaf.ndim]


def by_hand(start: list[np.ndarray], sizes: tuple[int, ...]) -> Trained:
    """Trains on whole batches from a bias and a kernel, with the gradients worked out on paper."""
    b, w = (leaf.astype(np.float64) for leaf in start)
    momenta, losses = [np.zeros_like(b), np.zeros_like(w)], []
    for x, y in data(sizes):
        error = x @ w + b - y[:, None]
        losses.append((error**2).mean())
        gradients = [2 * error.mean(0), 2 * x.T @ error / len(x)]
        norm = np.sqrt(sum((g**2).sum() for g in gradients))
        scale = min(1.0, _NORM / norm)
        momenta = [_MOMENTUM * m + scale * g for m, g in zip(momenta, gradients, strict=True)]
        b, w = b - _RATE * momenta[0], w - _RATE * momenta[1]
    rounded = [np.float32(leaf) for leaf in (b, w, *momenta)]
    return Trained(np.asarray(losses, np.float32), rounded[:2], rounded[2:])
