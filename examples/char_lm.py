"""Train a character-level transformer on Python's standard library, and generate text with it.

    python examples/char_lm.py                    8 simulated devices, on any machine
    python examples/char_lm.py --use 4            only four of them
    python examples/char_lm.py --devices real     the GPUs, TPU cores or CPU that JAX finds
    python examples/char_lm.py --strategy fully_sharded    each device keeps a share of the model
    python examples/char_lm.py --strategy model_parallel   two devices compute each layer together
    python examples/char_lm.py --plan             what the first step takes on each device; nothing is trained

The text is the standard library of the running Python, so nothing is downloaded. Each dispatch runs
several batches (``steps_per_execution``), since dispatching the step of a small model takes about as long
as the step. The program prints the perplexity on validation text: the number of equally likely characters
among which the model would have to guess.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec

import distribute_jax as dj

VOCABULARY = 128
"""A character is its ASCII code."""
TEMPERATURE = 0.7
"""Below 1, likely characters are drawn more often than the model predicts."""


RULES = {
    r"(query|key|value)\.kernel": PartitionSpec(
        None, "model", None
    ),  # (width, heads, width of a head)
    r"(query|key|value)\.bias": PartitionSpec("model", None),
    r"out\.kernel": PartitionSpec("model", None, None),
    r"wide\.kernel": PartitionSpec(None, "model"),
    r"wide\.bias": PartitionSpec("model"),
    r"narrow\.kernel": PartitionSpec("model", None),
}
"""With ``model_parallel`` a device has half of the heads, and half of each wide layer."""
STRATEGIES = {
    "mirrored": dj.MirroredStrategy,
    "fully_sharded": dj.FullyShardedStrategy,
    "model_parallel": partial(dj.ModelParallelStrategy, model=2, rules=RULES),
}


# The model: plain Flax.


class Block(nnx.Module):
    """Attention to earlier characters, then a layer applied to each character."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.wide = nnx.Linear(width, 4 * width, rngs=rngs)
        self.narrow = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, length, width) to the same shape."""
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.narrow(nnx.gelu(self.wide(self.norm2(x))))


class Transformer(nnx.Module):
    """Characters (batch, length) to logits of the next ones, (batch, length, vocabulary)."""

    def __init__(
        self, context: int, width: int, layers: int, *, heads: int = 4, rngs: nnx.Rngs
    ) -> None:
        self.characters = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.positions = nnx.Embed(context, width, rngs=rngs)
        stack = nnx.vmap(lambda rngs: Block(width, heads, rngs))
        self.blocks = nnx.split_rngs(splits=layers)(stack)(rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, VOCABULARY, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the logits of the character after each one, which depend on earlier characters only."""
        x = self.characters(x) + self.positions(jnp.arange(x.shape[1]))
        # One block after the other, and in the backward pass each is computed again from its input: the
        # activations, and the gathered parameters, of one block at a time are in memory.
        block = nnx.remat(lambda x, block: block(x))
        x = nnx.scan(block, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        return self.head(self.norm(x))


# The data: windows of text.


class Windows(NamedTuple):
    """Pieces of text, each of shape (windows, context), and the same pieces one character later."""

    x: np.ndarray
    y: np.ndarray


def read_text(characters: int) -> str:
    """Reads modules of the standard library in the order of their names, up to a number of characters."""
    parts: list[str] = []
    for path in sorted(Path(os.__file__).parent.glob("[a-z]*.py")):
        parts.append(path.read_bytes().decode("ascii", errors="ignore"))
        if sum(map(len, parts)) >= characters:
            break
    return "".join(parts)[:characters]


def windows(text: str, context: int) -> Windows:
    """Divides a text into consecutive windows, without a remainder."""
    codes = np.frombuffer(text.encode("ascii"), np.uint8).astype(np.int32)
    count = (len(codes) - 1) // context
    x, y = codes[: count * context], codes[1 : count * context + 1]
    return Windows(x.reshape(count, context), y.reshape(count, context))


def load_data(characters: int, context: int) -> tuple[Windows, Windows]:
    """Returns nine tenths of the text to train on, and the rest to validate on."""
    text = read_text(characters)
    split = len(text) * 9 // 10
    return windows(text[:split], context), windows(text[split:], context)


# Training, and writing.


def make_model(strategy: dj.Strategy, module: dict[str, int], steps_per_execution: int) -> dj.Model:
    """Builds and compiles the transformer under the strategy."""
    transformer = strategy.create(lambda: Transformer(**module, rngs=nnx.Rngs(0)))
    with strategy.scope():
        model = dj.Model(transformer)
    model.compile(
        optimizer=optax.adamw(3e-3),
        loss=dj.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=steps_per_execution,
        clip_global_norm=1.0,
    )
    return model


@nnx.jit
def next_character(module: Transformer, window: jax.Array, key: jax.Array) -> jax.Array:
    """Draws the character after a window of shape (1, context)."""
    return jax.random.categorical(key, module(window)[0, -1] / TEMPERATURE)


def write(module: Transformer, beginning: np.ndarray, length: int) -> str:
    """Returns the next characters after a window of text of shape (context,)."""
    codes = beginning.tolist()
    for key in jax.random.split(jax.random.key(0), length):
        window = jnp.asarray([codes[-len(beginning) :]])
        codes.append(int(next_character(module, window, key)))
    return "".join(map(chr, codes[len(beginning) :]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, and prints perplexities and a generated text."""
    options = parser().parse_args(arguments)
    if options.plan:  # the same program, up to its first step
        program = [a for a in arguments or sys.argv[1:] if a != "--plan"]
        plan = [sys.executable, "-m", "distribute_jax", "plan", __file__]
        os.execv(sys.executable, [*plan, *program])
    if options.devices == "simulated":
        dj.simulate(8)
    strategy = STRATEGIES[options.strategy](list(range(options.use or jax.device_count())))
    train, validation = load_data(options.characters, options.context)
    sizes = {"context": options.context, "width": options.width, "layers": options.layers}
    model = make_model(strategy, sizes, options.steps_per_execution)

    print(
        f"Training on {train.x.size:,} characters, over {strategy.num_replicas_in_sync} replicas "
        f"({jax.devices()[0].device_kind})."
    )
    history = model.fit(
        *train,
        batch_size=options.batch_size,
        epochs=options.epochs,
        validation_data=validation,
    )
    perplexities = ", ".join(f"{math.exp(loss):.3f}" for loss in history.history["val_loss"])
    print(f"Validation perplexity after each epoch: {perplexities}")
    beginning = validation.x[0]
    print(f"Validation text:\n{''.join(map(chr, beginning))}")
    print(f"Generated continuation:\n{write(model.module, beginning, options.sample)}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    cli = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    numbers = {
        "--epochs": (3, "passes over the text"),
        "--batch-size": (64, "windows in a global batch"),
        "--steps-per-execution": (8, "batches in one dispatch"),
        "--characters": (500_000, "length of the text"),
        "--context": (64, "characters in a window"),
        "--width": (64, "width of the model"),
        "--layers": (2, "blocks of the model"),
        "--sample": (400, "characters to generate"),
    }
    for name, (default, meaning) in numbers.items():
        cli.add_argument(name, type=int, default=default, help=f"{meaning} (%(default)s)")
    cli.add_argument("--use", type=int, help="the number of devices (all)")
    cli.add_argument("--strategy", choices=STRATEGIES, default="mirrored", help="(%(default)s)")
    cli.add_argument("--plan", action="store_true", help="print what the first step takes, and end")
    cli.add_argument(
        "--devices",
        choices=("simulated", "real"),
        default="simulated",
        help="8 simulated CPU devices (default), or those that JAX finds",
    )
    return cli


if __name__ == "__main__":
    main()
