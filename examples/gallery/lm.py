"""A transformer that learns a grammar from sentences packed into rows, in NNX.

    python examples/gallery/lm.py --devices 8

The loss is one per token. Rows, and so replicas, have different numbers of tokens.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import batches, command
from flax import nnx

import distribute_jax as dj  # new

GRAMMAR = {  # Every alternative is equally likely, and a sentence has one derivation.
    "S": ["ONE sees END", "ONE likes END", "MANY see END", "MANY like END"],
    "ONE": ["a THING", "every THING", "a ADJ THING", "every ADJ THING"],
    "MANY": ["some THINGS", "many THINGS", "some ADJ THINGS", "many ADJ THINGS"],
    "END": [".", "ONE .", "MANY ."],
    "ADJ": ["old", "small", "red", "happy"],
    "THING": ["cat", "dog", "bird", "child"],
    "THINGS": ["cats", "dogs", "birds", "children"],
}
WORDS = ["", "START", *sorted({w for r in GRAMMAR.values() for w in " ".join(r).split()})]
LENGTH, WIDTH = 32, 32


def derive(symbol: str, random: np.random.Generator) -> list[int]:
    """Returns the tokens that a symbol becomes."""
    if symbol not in GRAMMAR:
        return [WORDS.index(symbol)]
    alternative = GRAMMAR[symbol][random.integers(len(GRAMMAR[symbol]))]
    return [token for part in alternative.split() for token in derive(part, random)]


def packed(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of tokens and of the numbers of their sentences; 0 is padding."""
    random = np.random.default_rng(seed)
    tokens, segments = np.zeros((2, rows, LENGTH), np.int32)
    for row in range(rows):
        start, number, limit = 0, 1, random.integers(10, LENGTH)
        while (end := start + 1 + len(sentence := derive("S", random))) <= limit:
            tokens[row, start:end], segments[row, start:end] = [1, *sentence], number
            start, number = end, number + 1
    return tokens, segments


def entropy(symbol: str) -> np.ndarray:
    """Returns the expected nats and tokens of what a symbol becomes."""
    if symbol not in GRAMMAR:
        return np.array([0.0, 1.0])
    parts = [sum(entropy(part) for part in row.split()) for row in GRAMMAR[symbol]]
    return np.mean(parts, axis=0) + np.array([math.log(len(parts)), 0.0])


TRAIN, TEST = packed(2000, 0), packed(250, 1)


class LM(nnx.Module):
    """Two layers of attention within a sentence: (batch, length) to logits (batch, length, words)."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(len(WORDS), WIDTH, rngs=rngs)
        self.place = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.attention = nnx.List(
            nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs) for _ in range(2)
        )
        self.wide = nnx.List(nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))
        self.head = nnx.Linear(WIDTH, len(WORDS), rngs=rngs)

    def __call__(self, tokens: jax.Array, segments: jax.Array) -> jax.Array:
        """Returns logits of the next word."""
        x = self.embed(tokens) + self.place(jnp.arange(tokens.shape[1]))
        mask = jnp.tril(segments[:, None, :, None] == segments[:, None, None, :])
        for attention, wide in zip(self.attention, self.wide, strict=True):
            x = x + attention(x, mask=mask)
            x = x + nnx.relu(wide(x))
        return self.head(x)


def losses_and_weights(
    model: LM, tokens: jax.Array, segments: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the loss of each token, and 1 where it is of the sentence of the one before it."""
    logits = model(tokens[:, :-1], segments[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return losses, same.astype(jnp.float32)


# plain: @nnx.jit
def train_step(
    model: LM, optimizer: nnx.Optimizer, tokens: jax.Array, segments: jax.Array
) -> jax.Array:
    """Takes one step."""

    def loss_fn(model: LM) -> jax.Array:
        losses, weights = losses_and_weights(model, tokens, segments)
        # plain: return (losses * weights).sum() / weights.sum()
        return dj.compute_average_loss(losses, weights, divide_by="weights")  # new

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    # plain: return loss
    return dj.get_replica_context().all_reduce("sum", loss)  # new


def train(devices: int, steps: int = 300) -> tuple[list[float], LM]:
    """Returns the loss of each step, and the model."""
    # plain: model = LM(nnx.Rngs(0))
    # plain: optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    strategy = dj.MirroredStrategy(list(range(devices)))  # new
    with strategy.scope():  # new
        model = LM(nnx.Rngs(0))  # new
        optimizer = dj.Optimizer(model, optax.adam(1e-2))  # new
    losses = []
    # plain: for batch in batches(64, steps, *TRAIN):
    for batch in strategy.distribute_dataset(batches(64, steps, *TRAIN)):  # new
        # plain: loss = train_step(model, optimizer, *batch)
        loss = strategy.run(train_step, args=(model, optimizer, *batch))  # new
        losses.append(float(loss))
    return losses, model


def report(model: LM) -> str:
    """Returns a text about the test sentences."""
    losses, weights = losses_and_weights(model, *TEST)
    perplexity = float(jnp.exp((losses * weights).sum() / weights.sum()))
    nats, tokens = entropy("S")
    return f"test perplexity {perplexity:.3f} (of the grammar {math.exp(nats / tokens):.3f})"


if __name__ == "__main__":
    command(train, report)
