"""A variational autoencoder of digits, in NNX.

    python examples/gallery/vae.py --devices 8

The noise of an image depends only on its index, so it is the same on any number of devices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import batches, command, digits
from flax import nnx

import distribute_jax as dj  # new

TRAIN, TEST = ((images.reshape(-1, 64), np.arange(len(images))) for images, _ in digits())
CODE = 8


class VAE(nnx.Module):
    """An image to the mean and the log variance of its code, and a code to the logits of an image."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.encoder = nnx.Linear(64, 128, rngs=rngs)
        self.mean, self.log_variance = (nnx.Linear(128, CODE, rngs=rngs) for _ in range(2))
        self.decoder = nnx.Linear(CODE, 128, rngs=rngs)
        self.pixels = nnx.Linear(128, 64, rngs=rngs)

    def decode(self, code: jax.Array) -> jax.Array:
        """Returns the logits of the pixels."""
        return self.pixels(nnx.relu(self.decoder(code)))

    def losses(self, x: jax.Array, keys: jax.Array) -> jax.Array:
        """Returns the negative evidence lower bound of each image."""
        hidden = nnx.relu(self.encoder(x))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        noise = jax.vmap(lambda key: jax.random.normal(key, (CODE,)))(keys)
        logits = self.decode(mean + jnp.exp(0.5 * log_variance) * noise)
        divergence = -0.5 * (1 + log_variance - mean**2 - jnp.exp(log_variance)).sum(-1)
        return optax.sigmoid_binary_cross_entropy(logits, x).sum(-1) + divergence


def keys_of(key: jax.Array, numbers: jax.Array) -> jax.Array:
    """Returns a key for each image."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers)


# plain: @nnx.jit
def train_step(
    model: VAE, optimizer: nnx.Optimizer, key: jax.Array, x: jax.Array, numbers: jax.Array
) -> jax.Array:
    """Takes one step."""

    def loss_fn(model: VAE) -> jax.Array:
        losses = model.losses(x, keys_of(key, numbers))
        # plain: return losses.mean()
        return dj.compute_average_loss(losses)  # new

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    # plain: return loss
    return dj.get_replica_context().all_reduce("sum", loss)  # new


def train(devices: int, steps: int = 600) -> tuple[list[float], VAE]:
    """Returns the loss of each step, and the model."""
    # plain: model = VAE(nnx.Rngs(0))
    # plain: optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
    strategy = dj.MirroredStrategy(list(range(devices)))  # new
    with strategy.scope():  # new
        model = VAE(nnx.Rngs(0))  # new
        optimizer = dj.Optimizer(model, optax.adam(2e-3))  # new
    losses: list[float] = []
    # plain: for batch in batches(128, steps, *TRAIN):
    for batch in strategy.distribute_dataset(batches(128, steps, *TRAIN)):  # new
        key = jax.random.key(len(losses))
        # plain: loss = train_step(model, optimizer, key, *batch)
        loss = strategy.run(train_step, args=(model, optimizer, key, *batch))  # new
        losses.append(float(loss))
    return losses, model


def sample(model: VAE, count: int) -> np.ndarray:
    """Returns images of codes that are drawn, of shape (count, 8, 8)."""
    codes = jax.random.normal(jax.random.key(0), (count, CODE))
    return np.asarray(nnx.sigmoid(model.decode(codes))).reshape(-1, 8, 8)


def report(model: VAE) -> str:
    """Returns a text about the test images."""
    losses = model.losses(TEST[0], keys_of(jax.random.key(0), TEST[1]))
    return f"negative ELBO of test images {float(losses.mean()):.2f}"


if __name__ == "__main__":
    command(train, report)
