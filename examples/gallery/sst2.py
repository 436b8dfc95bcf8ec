"""Text classification like SST-2, in Linen: does a sentence praise a film? With dropout.

    python examples/gallery/sst2.py --devices 8

Sentences are made by rules, of different lengths, and padded.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import batches, command
from flax.training.train_state import TrainState

import distribute_jax as dj  # new

GOOD, BAD = ["good", "great", "moving", "funny"], ["bad", "dull", "silly", "boring"]
THINGS = ["film", "plot", "cast", "music", "ending"]
WORDS = ["", "UNKNOWN", "the", "is", "not", "very", "and", "but", *GOOD, *BAD, *THINGS]
DROPOUT, LONGEST = 0.3, 14


def clause(random: np.random.Generator, praise: bool) -> list[str]:
    """Returns words that praise or do not, by an adjective or the negation of its opposite."""
    negated = random.random() < 0.4
    adjective = (GOOD if praise != negated else BAD)[random.integers(4)]
    very = ["very"] * int(random.random() < 0.5)
    return ["the", THINGS[random.integers(5)], "is", *["not"] * negated, *very, adjective]


def sentence(random: np.random.Generator) -> tuple[list[str], bool]:
    """Returns one or two clauses and the label; what follows "but" decides."""
    praise = bool(random.random() < 0.5)
    joint = ["", "and", "but"][random.integers(3)]
    first = [*clause(random, praise != (joint == "but")), joint] if joint else []
    return [*first, *clause(random, praise)], praise


def corpus(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens (count, LONGEST), padded with 0, and labels."""
    random = np.random.default_rng(seed)
    made = [sentence(random) for _ in range(count)]
    rows = [[WORDS.index(word) for word in words] for words, _ in made]
    tokens = np.array([row + [0] * (LONGEST - len(row)) for row in rows], np.int32)
    return tokens, np.array([praise for _, praise in made], np.float32)


TRAIN, TEST = corpus(4000, 0), corpus(500, 1)


class Classifier(nn.Module):
    """A recurrent network in both directions, attention over the words, and one logit."""

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool) -> jax.Array:
        """Returns a logit for each sentence; padding has no influence on it."""
        real = tokens > 0
        x = nn.Dropout(DROPOUT, deterministic=not train)(nn.Embed(len(WORDS), 16)(tokens))
        forward, backward = (nn.RNN(nn.GRUCell(16)) for _ in range(2))
        x = nn.Bidirectional(forward, backward)(x, seq_lengths=real.sum(1))
        scores = jnp.where(real, nn.Dense(1)(nn.tanh(nn.Dense(16)(x)))[..., 0], -1e9)
        x = jnp.einsum("bl,blf->bf", nn.softmax(scores), x)
        return nn.Dense(1)(nn.Dropout(DROPOUT, deterministic=not train)(x))[:, 0]


def new_state() -> TrainState:
    """Makes parameters from a fixed seed, and the optimizer's state."""
    model = Classifier()
    params = model.init(jax.random.key(0), TRAIN[0][:1], train=False)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


# plain: @jax.jit
def train_step(
    state: TrainState, key: jax.Array, x: jax.Array, y: jax.Array
) -> tuple[TrainState, jax.Array]:
    """Takes one step."""
    key = jax.random.fold_in(key, state.step)
    replica = dj.get_replica_context()  # new
    key = jax.random.fold_in(key, replica.replica_id_in_sync_group)  # new

    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn(params, x, True, rngs={"dropout": key})
        losses = optax.sigmoid_binary_cross_entropy(logits, y)
        # plain: return losses.mean()
        return dj.compute_average_loss(losses)  # new

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    loss, grads = replica.all_reduce("sum", (loss, grads))  # new
    return state.apply_gradients(grads=grads), loss


def train(devices: int, steps: int = 120) -> tuple[list[float], TrainState]:
    """Returns the loss of each step, and the state after the last."""
    key = jax.random.key(1)
    # plain: state = new_state()
    strategy = dj.MirroredStrategy(list(range(devices)))  # new
    with strategy.scope():  # new
        state = new_state()  # new
    losses = []
    # plain: for batch in batches(64, steps, *TRAIN):
    for batch in strategy.distribute_dataset(batches(64, steps, *TRAIN)):  # new
        # plain: state, loss = train_step(state, key, *batch)
        state, loss = strategy.run(train_step, args=(state, key, *batch))  # new
        losses.append(float(loss))
    return losses, state


def report(state: TrainState) -> str:
    """Returns a text about the test sentences."""
    praise = state.apply_fn(state.params, TEST[0], train=False) > 0
    return f"test accuracy {float(jnp.mean(praise == TEST[1])):.3f}"


if __name__ == "__main__":
    command(train, report)
