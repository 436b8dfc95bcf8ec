"""A sequence-to-sequence model that learns to add: the text ``27+85`` becomes ``211``, in NNX.

    python examples/gallery/seq2seq.py --devices 8

An encoder reads the sum, a decoder writes the result one character at a time, its last digit first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import batches, command
from flax import nnx

import distribute_jax as dj  # new

CHARACTERS = " 0123456789+="
WIDTH, ANSWERED = 128, 4


def coded(texts: list[str]) -> np.ndarray:
    """Returns the numbers of the characters, padded with those of spaces."""
    longest = max(map(len, texts))
    return np.array([[CHARACTERS.index(c) for c in text.ljust(longest)] for text in texts])


PAIRS = np.random.default_rng(0).permutation([(a, b) for a in range(100) for b in range(100)])
QUESTIONS = coded([f"{a}+{b}" for a, b in PAIRS])
ANSWERS = coded([f"={str(a + b)[::-1]} " for a, b in PAIRS])
TEST = 500


class Adder(nnx.Module):
    """Two recurrent networks; the second begins in the state in which the first ended."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(len(CHARACTERS), 16, rngs=rngs)
        self.encoder = nnx.RNN(nnx.GRUCell(16, WIDTH, rngs=rngs), return_carry=True)
        self.decoder = nnx.RNN(nnx.GRUCell(16, WIDTH, rngs=rngs), return_carry=True)
        self.head = nnx.Linear(WIDTH, len(CHARACTERS), rngs=rngs)

    def __call__(self, question: jax.Array, answer: jax.Array) -> jax.Array:
        """Returns logits of the character after each of the answer."""
        carry, _ = self.encoder(self.embed(question))
        _, hidden = self.decoder(self.embed(answer), initial_carry=carry)
        return self.head(hidden)

    def solve(self, question: jax.Array) -> jax.Array:
        """Returns the answer that is written without knowing it."""
        answer = jnp.full((len(question), 1), CHARACTERS.index("="))
        for _ in range(ANSWERED):
            following = self(question, answer)[:, -1:].argmax(-1)
            answer = jnp.concatenate([answer, following], axis=1)
        return answer


# plain: @nnx.jit
def train_step(
    model: Adder, optimizer: nnx.Optimizer, question: jax.Array, answer: jax.Array
) -> jax.Array:
    """Takes one step; the decoder sees the right characters before the one that it writes."""

    def loss_fn(model: Adder) -> jax.Array:
        logits = model(question, answer[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, answer[:, 1:]).mean(1)
        # plain: return losses.mean()
        return dj.compute_average_loss(losses)  # new

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    # plain: return loss
    return dj.get_replica_context().all_reduce("sum", loss)  # new


def train(devices: int, steps: int = 600) -> tuple[list[float], Adder]:
    """Returns the loss of each step, and the model."""
    rate = optax.cosine_decay_schedule(1e-2, steps)
    # plain: model = Adder(nnx.Rngs(0))
    # plain: optimizer = nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param)
    strategy = dj.MirroredStrategy(list(range(devices)))  # new
    with strategy.scope():  # new
        model = Adder(nnx.Rngs(0))  # new
        optimizer = dj.Optimizer(model, optax.adam(rate))  # new
    losses, data = [], batches(128, steps, QUESTIONS[TEST:], ANSWERS[TEST:])
    # plain: for batch in data:
    for batch in strategy.distribute_dataset(data):  # new
        # plain: loss = train_step(model, optimizer, *batch)
        loss = strategy.run(train_step, args=(model, optimizer, *batch))  # new
        losses.append(float(loss))
    return losses, model


def report(model: Adder) -> str:
    """Returns a text about sums that training did not contain."""
    written = nnx.jit(lambda model, q: model.solve(q))(model, QUESTIONS[:TEST])
    right = np.all(np.asarray(written)[:, : ANSWERS.shape[1]] == ANSWERS[:TEST], axis=1)
    return f"{right.mean():.1%} of {TEST} new sums are right"


if __name__ == "__main__":
    command(train, report)
