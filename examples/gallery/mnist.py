"""Flax's first example: a Linen CNN with a ``TrainState`` that reads digits.

    python examples/gallery/mnist.py --devices 8

The state is an argument and a result of the step, as under ``jax.jit``.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from common import batches, command, digits
from flax.training.train_state import TrainState

import distribute_jax as dj  # new

TRAIN, TEST = digits()


class CNN(nn.Module):
    """Two convolutions and two dense layers: images (batch, 8, 8, 1) to logits (batch, 10)."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns one row of logits for each image."""
        x = nn.max_pool(nn.relu(nn.Conv(16, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.relu(nn.Conv(32, (3, 3))(x)).reshape(len(x), -1)
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x)))


def new_state() -> TrainState:
    """Makes parameters from a fixed seed, and the optimizer's state."""
    model = CNN()
    params = model.init(jax.random.key(0), TRAIN[0][:1])
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(5e-3))


# plain: @jax.jit
def train_step(state: TrainState, x: jax.Array, y: jax.Array) -> tuple[TrainState, jax.Array]:
    """Takes one step."""

    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn(params, x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        # plain: return losses.mean()
        return dj.compute_average_loss(losses)  # new

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    loss, grads = dj.get_replica_context().all_reduce("sum", (loss, grads))  # new
    return state.apply_gradients(grads=grads), loss


def train(devices: int, steps: int = 200) -> tuple[list[float], TrainState]:
    """Returns the loss of each step, and the state after the last."""
    # plain: state = new_state()
    strategy = dj.MirroredStrategy(list(range(devices)))  # new
    with strategy.scope():  # new
        state = new_state()  # new
    losses = []
    # plain: for batch in batches(64, steps, *TRAIN):
    for batch in strategy.distribute_dataset(batches(64, steps, *TRAIN)):  # new
        # plain: state, loss = train_step(state, *batch)
        state, loss = strategy.run(train_step, args=(state, *batch))  # new
        losses.append(float(loss))
    return losses, state


def report(state: TrainState) -> str:
    """Returns a text about the test images."""
    right = state.apply_fn(state.params, TEST[0]).argmax(-1) == TEST[1]
    return f"test accuracy {float(jnp.mean(right)):.3f}"


if __name__ == "__main__":
    command(train, report)
