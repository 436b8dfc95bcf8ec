"""Train a Linen CNN with batch norm and dropout, in a TrainState, over several replicas.

    python examples/linen_digits.py

The state is an argument and a result of the step; with ``donate_args=True`` its memory is reused.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import distribute_jax as dj

Batch = tuple[np.ndarray, np.ndarray]


class CNN(nn.Module):
    """Images (batch, 8, 8, 1) to logits (batch, 10); ``axis_name="data"`` synchronises the norm."""

    dropout: float = 0.3
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns one row of logits for each image."""
        x = nn.Conv(16, (3, 3))(x)
        x = nn.BatchNorm(use_running_average=not train, axis_name=self.axis_name, momentum=0.9)(x)
        x = nn.relu(nn.Conv(32, (3, 3), strides=2)(nn.relu(x)))
        x = nn.Dropout(self.dropout, deterministic=not train)(x.reshape(x.shape[0], -1))
        return nn.Dense(10)(x)


class State(TrainState):
    """Everything that a step changes, and the key for its random numbers."""

    batch_stats: Any
    key: jax.Array


def make_state(strategy: dj.Strategy, model: CNN) -> State:
    """Makes the state from a fixed seed, mirrored over the strategy's devices."""
    with strategy.scope():
        init = jax.jit(model.init, static_argnames="train")
        variables = init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)), train=False)
        key, tx = jax.random.key(1), optax.adam(3e-3)
        return State.create(apply_fn=model.apply, tx=tx, key=key, **variables)


def train_step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
    """Takes one step on this replica's share of the global batch."""
    replica = dj.get_replica_context()
    key = jax.random.fold_in(state.key, state.step)
    # Without the replica id every replica would drop the same units.
    rngs = {"dropout": jax.random.fold_in(key, replica.replica_id_in_sync_group)}

    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, changed = state.apply_fn(variables, x, True, mutable=["batch_stats"], rngs=rngs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return dj.compute_average_loss(losses), changed["batch_stats"]

    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    loss, grads = replica.all_reduce("sum", (loss, grads))
    stats = replica.all_reduce("mean", stats)
    return state.apply_gradients(grads=grads, batch_stats=stats), loss


def test_step(state: State, x: jax.Array, y: jax.Array) -> jax.Array:
    """Counts the correct predictions among the real examples of the global batch."""
    replica = dj.get_replica_context()
    logits = state.apply_fn({"params": state.params, "batch_stats": state.batch_stats}, x, False)
    return replica.all_reduce("sum", jnp.sum((logits.argmax(-1) == y) & replica.batch_mask))


def load_data() -> tuple[Batch, Batch]:
    """Returns 1,437 images and labels to train on and 360 to test with, always the same ones."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = (digits.images[order, ..., None] / 16).astype(np.float32), digits.target[order]
    return (images[:1437], labels[:1437]), (images[1437:], labels[1437:])


def train(strategy: dj.Strategy, state: State, data: Batch, epochs: int) -> State:
    """Trains for some epochs, each without the last examples, which do not fill a batch."""
    (images, labels), options = data, dj.RunOptions(donate_args=True)
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(labels))
        rows = order[: len(order) // 64 * 64].reshape(-1, 64)
        for batch in strategy.distribute_dataset([(images[r], labels[r]) for r in rows]):
            state, loss = strategy.run(train_step, args=(state, *batch), options=options)
        print(f"epoch {epoch + 1}/{epochs}  loss of the last step {float(loss):.4f}")
    return state


def accuracy_on(strategy: dj.Strategy, state: State, data: Batch) -> float:
    """Returns the accuracy over exactly the images of the data."""
    (batch,) = strategy.distribute_dataset([data])
    return int(strategy.run(test_step, args=(state, *batch))) / len(data[1])


def main() -> None:
    """Trains, and prints the accuracy on the test images."""
    dj.simulate(8)  # without this line, the GPUs, TPU cores or CPU that JAX finds
    strategy = dj.MirroredStrategy()
    training, test = load_data()
    state = train(strategy, make_state(strategy, CNN()), training, epochs=8)
    print(f"Test accuracy: {accuracy_on(strategy, state, test):.4f}")


if __name__ == "__main__":
    main()
