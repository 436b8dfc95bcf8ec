"""A generative adversarial network of digits, in NNX: two networks, two optimizers, one step.

python examples/gallery/gan.py --devices 8
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import batches, command, digits
from flax import nnx

import distribute_jax as dj  # new

IMAGES = digits()[0][0].reshape(-1, 64)
NOISE = 16


class Networks(nnx.Module):
    """The generator, from noise to images, and the critic, from images to logits: is it real?"""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.generator = nnx.Sequential(
            nnx.Linear(NOISE, 128, rngs=rngs),
            nnx.relu,
            nnx.Linear(128, 128, rngs=rngs),
            nnx.relu,
            nnx.Linear(128, 64, rngs=rngs),
            nnx.sigmoid,
        )
        self.critic = nnx.Sequential(
            nnx.Linear(64, 128, rngs=rngs),
            nnx.leaky_relu,
            nnx.Linear(128, 64, rngs=rngs),
            nnx.leaky_relu,
            nnx.Linear(64, 1, rngs=rngs),
        )


def losses_of(logits: jax.Array, label: float) -> jax.Array:
    """Returns the cross-entropy of each image with a label: 1 for real, 0 for generated."""
    return optax.sigmoid_binary_cross_entropy(logits[:, 0], jnp.full(len(logits), label))


# plain: @nnx.jit
def train_step(
    nets: Networks, tools: dict[str, nnx.Optimizer], real: jax.Array, noise: jax.Array
) -> jax.Array:
    """Takes a step of the critic, then one of the generator; returns the sum of their losses."""

    def of_critic(critic: nnx.Module) -> jax.Array:
        fake = nets.generator(noise)
        losses = losses_of(critic(real), 0.9) + losses_of(critic(fake), 0.0)
        # plain: return losses.mean()
        return dj.compute_average_loss(losses)  # new

    def of_generator(generator: nnx.Module) -> jax.Array:
        losses = losses_of(nets.critic(generator(noise)), 1.0)
        # plain: return losses.mean()
        return dj.compute_average_loss(losses)  # new

    first, grads = nnx.value_and_grad(of_critic)(nets.critic)
    tools["critic"].update(nets.critic, grads)
    second, grads = nnx.value_and_grad(of_generator)(nets.generator)
    tools["generator"].update(nets.generator, grads)
    # plain: return first + second
    return dj.get_replica_context().all_reduce("sum", first + second)  # new


def new_state() -> tuple[Networks, dict[str, nnx.Optimizer]]:
    """Makes the networks from a fixed seed, and their optimizers."""
    nets = Networks(nnx.Rngs(0))
    tx = optax.adam(1e-3, b1=0.5)
    return nets, {
        # plain: "generator": nnx.Optimizer(nets.generator, tx, wrt=nnx.Param),
        # plain: "critic": nnx.Optimizer(nets.critic, tx, wrt=nnx.Param),
        "generator": dj.Optimizer(nets.generator, tx),  # new
        "critic": dj.Optimizer(nets.critic, tx),  # new
    }


def train(devices: int, steps: int = 1500) -> tuple[list[float], Networks]:
    """Returns the loss of each step, and the networks."""
    # plain: nets, tools = new_state()
    strategy = dj.MirroredStrategy(list(range(devices)))  # new
    with strategy.scope():  # new
        nets, tools = new_state()  # new
    random, losses = np.random.default_rng(1), []
    data = [
        (x, random.normal(size=(len(x), NOISE)).astype(np.float32))
        for (x,) in batches(64, steps, IMAGES)
    ]
    # plain: for batch in data:
    for batch in strategy.distribute_dataset(data):  # new
        # plain: loss = train_step(nets, tools, *batch)
        loss = strategy.run(train_step, args=(nets, tools, *batch))  # new
        losses.append(float(loss))
    return losses, nets


def sample(nets: Networks, count: int) -> np.ndarray:
    """Returns images of noise, of shape (count, 8, 8)."""
    noise = np.random.default_rng(2).normal(size=(count, NOISE)).astype(np.float32)
    return np.asarray(nets.generator(noise)).reshape(-1, 8, 8)


def report(nets: Networks) -> str:
    """Returns a text about what the critic takes for real."""
    made = sample(nets, 360).reshape(-1, 64)
    share = float(jnp.mean(nets.critic(made) > 0))
    return f"the critic takes {share:.0%} of the generator's images for real ones"


if __name__ == "__main__":
    command(train, report)
