"""A residual network in Linen as on ImageNet, written for ``pmap``; its step is unchanged.

    python examples/gallery/resnet.py --devices 8

Batch norm over all replicas, label smoothing, a penalty on the weights, Nesterov momentum, a learning
rate with warm-up and cosine decay.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from common import batches, command, digits
from flax.training.train_state import TrainState

import distribute_jax as dj  # new

TRAIN, TEST = digits()


class Block(nn.Module):
    """Two convolutions, and the input added to what they return."""

    features: int
    strides: int
    norm: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns images with ``features`` channels."""
        conv = partial(nn.Conv, self.features, use_bias=False)
        y = nn.relu(self.norm()(conv((3, 3), self.strides)(x)))
        y = self.norm(scale_init=nn.initializers.zeros_init())(conv((3, 3))(y))
        if x.shape != y.shape:
            x = self.norm()(conv((1, 1), self.strides)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A stem and three blocks: images (batch, 8, 8, 1) to logits (batch, 10)."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns one row of logits for each image."""
        norm = partial(nn.BatchNorm, not train, axis_name="batch" if train else None, momentum=0.9)
        x = nn.relu(norm()(nn.Conv(8, (3, 3), use_bias=False)(x)))
        for features, strides in ((8, 1), (16, 2), (32, 2)):
            x = Block(features, strides, norm)(x)
        return nn.Dense(10)(x.mean((1, 2)))


class State(TrainState):
    """Parameters, the optimizer's state, and the statistics of batch norm."""

    batch_stats: Any


def new_state(steps: int) -> State:
    """Makes the state from a fixed seed."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.2, steps // 10 + 1, steps)
    variables = ResNet().init(jax.random.key(0), TRAIN[0][:1], train=False)
    tx = optax.sgd(rate, momentum=0.9, nesterov=True)
    return State.create(apply_fn=ResNet().apply, tx=tx, **variables)


def train_step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
    """Takes one step on a device's share of the batch."""

    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, x, True, mutable=["batch_stats"])
        targets = optax.smooth_labels(jax.nn.one_hot(y, 10), 0.1)
        penalty = sum(jnp.sum(p**2) for p in jax.tree.leaves(params) if p.ndim > 1)
        return optax.softmax_cross_entropy(logits, targets).mean() + 1e-4 * penalty, new

    (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    loss, grads = jax.lax.pmean((loss, grads), axis_name="batch")
    return state.apply_gradients(grads=grads, **new), loss


def train(devices: int, steps: int = 150) -> tuple[list[float], State]:
    """Returns the loss of each step, and the state after the last."""
    # plain: step = jax.pmap(train_step, axis_name="batch", devices=jax.devices()[:devices])
    # plain: state = jax.tree.map(lambda leaf: jnp.stack([leaf] * devices), new_state(steps))
    strategy = dj.MirroredStrategy(list(range(devices)), axis_name="batch")  # new
    with strategy.scope():  # new
        state = new_state(steps)  # new
    losses = []
    # plain: for x, y in batches(64, steps, *TRAIN, whole=True):
    for batch in strategy.distribute_dataset(batches(64, steps, *TRAIN, whole=True)):  # new
        # plain: x, y = x.reshape(devices, -1, 8, 8, 1), y.reshape(devices, -1)
        # plain: state, loss = step(state, x, y)
        # plain: losses.append(float(loss[0]))
        state, loss = strategy.run(train_step, args=(state, *batch))  # new
        losses.append(float(loss))  # new
    # plain: return losses, jax.tree.map(lambda leaf: leaf[0], state)
    return losses, state  # new


def report(state: State) -> str:
    """Returns a text about the test images."""
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    right = state.apply_fn(variables, TEST[0], train=False).argmax(-1) == TEST[1]
    return f"test accuracy {float(jnp.mean(right)):.3f}"


if __name__ == "__main__":
    command(train, report)
