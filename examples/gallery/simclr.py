"""SimCLR: an encoder that learns from pairs of views of unlabelled digits, in NNX.

    python examples/gallery/simclr.py --devices 8

Each image is compared with those of the whole global batch: ``all_gather`` has them on every replica.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import batches, command, digits
from flax import nnx
from sklearn.linear_model import LogisticRegression

import distribute_jax as dj  # new

TRAIN, TEST = digits()


def view(images: np.ndarray, seed: int) -> np.ndarray:
    """Returns the images shifted by up to one pixel, with another contrast and noise."""
    random = np.random.default_rng(seed)
    moved = [np.roll(image, random.integers(-1, 2, 2), axis=(0, 1)) for image in images]
    contrast = random.uniform(0.6, 1.4, (len(images), 1, 1, 1))
    return (moved * contrast + random.normal(0, 0.1, images.shape)).astype(np.float32)


class Encoder(nnx.Module):
    """Images (batch, 8, 8, 1) to representations (batch, 64), and these to projections."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
        self.dense = nnx.Linear(512, 64, rngs=rngs)
        self.project = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the representations."""
        x = nnx.relu(self.conv2(nnx.relu(self.conv1(x))))
        return nnx.relu(self.dense(x.reshape(len(x), -1)))

    def projections(self, x: jax.Array) -> jax.Array:
        """Returns vectors of length 1."""
        z = self.project(self(x))
        return z / jnp.linalg.norm(z, axis=-1, keepdims=True)


def contrast(z: jax.Array, others: jax.Array, numbers: jax.Array) -> jax.Array:
    """Returns for each row the cross-entropy of finding its own other view among all images'."""
    logits = z @ others.T / 0.5
    return optax.softmax_cross_entropy_with_integer_labels(logits, numbers)


# plain: @nnx.jit
def train_step(
    model: Encoder, optimizer: nnx.Optimizer, a: jax.Array, b: jax.Array, numbers: jax.Array
) -> jax.Array:
    """Takes one step; the numbers are the places of the images in the global batch."""

    def loss_fn(model: Encoder) -> jax.Array:
        a_here, b_here = model.projections(a), model.projections(b)
        # plain: a_all, b_all = a_here, b_here
        a_all, b_all = dj.get_replica_context().all_gather((a_here, b_here), axis=0)  # new
        losses = contrast(a_here, b_all, numbers) + contrast(b_here, a_all, numbers)
        # plain: return losses.mean()
        return dj.compute_average_loss(losses)  # new

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    # plain: return loss
    return dj.get_replica_context().all_reduce("sum", loss)  # new


def views(steps: int, size: int = 128) -> list[tuple[np.ndarray, ...]]:
    """Returns global batches of two views, and the place of each image."""
    images = batches(size, steps, TRAIN[0], whole=True)
    numbers = np.arange(size)
    return [(view(x, 2 * i), view(x, 2 * i + 1), numbers) for i, (x,) in enumerate(images)]


def train(devices: int, steps: int = 300) -> tuple[list[float], Encoder]:
    """Returns the loss of each step, and the encoder."""
    # plain: model = Encoder(nnx.Rngs(0))
    # plain: optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
    strategy = dj.MirroredStrategy(list(range(devices)))  # new
    with strategy.scope():  # new
        model = Encoder(nnx.Rngs(0))  # new
        optimizer = dj.Optimizer(model, optax.adam(2e-3))  # new
    losses = []
    # plain: for batch in views(steps):
    for batch in strategy.distribute_dataset(views(steps)):  # new
        # plain: loss = train_step(model, optimizer, *batch)
        loss = strategy.run(train_step, args=(model, optimizer, *batch))  # new
        losses.append(float(loss))
    return losses, model


def report(model: Encoder) -> str:
    """Returns a text about shifted test images, by linear classifiers of 100 labels."""
    (x, y), moved = (TRAIN[0][:100], TRAIN[1][:100]), view(TEST[0], seed=0)
    accuracy = []
    for of in (model, lambda images: images.reshape(len(images), -1)):
        classifier = LogisticRegression(max_iter=2000).fit(np.asarray(of(x)), y)
        accuracy.append(classifier.score(np.asarray(of(moved)), TEST[1]))
    return f"accuracy on shifted test images {accuracy[0]:.3f} (from raw pixels {accuracy[1]:.3f})"


if __name__ == "__main__":
    command(train, report)
