"""The language model, made small: it learns, sees no later character, and writes text."""

from __future__ import annotations

import math
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from example_program import output
from flax import nnx

import distribute_jax as dj
from examples import char_lm

SIZES = {"context": 16, "width": 16, "layers": 1}


def test_windows_are_the_text_and_the_same_one_character_later() -> None:
    """Consecutive, and a rest that fills no window is left out."""
    found = char_lm.windows("abcdefgh", 3)
    shown = [["".join(map(chr, row)) for row in part] for part in found]
    assert shown == [["abc", "def"], ["bcd", "efg"]]


def test_the_text_is_of_the_asked_length_and_the_same_each_time() -> None:
    """Real text, and ASCII."""
    text = char_lm.read_text(20_000)
    assert text == char_lm.read_text(30_000)[:20_000]
    assert len(text) == 20_000
    assert text.isascii()
    assert "import" in text


@pytest.mark.exhaustive
def test_a_character_does_not_see_later_ones() -> None:
    """Another last character changes the logits of the last place only."""
    module = char_lm.Transformer(**SIZES, rngs=nnx.Rngs(0))
    x = np.arange(32, 48)[None]
    y = x.copy()
    y[0, -1] += 1
    logits, changed = jax.jit(lambda x: module(x))(np.concatenate([x, y]))
    np.testing.assert_array_equal(logits[:-1], changed[:-1])
    assert np.any(np.asarray(logits[-1] != changed[-1]))


@pytest.mark.exhaustive
def test_a_short_training_lowers_the_perplexity_and_writes_text() -> None:
    """Two epochs on four replicas, the last dispatch and the last batch being partial."""
    model = char_lm.make_model(dj.MirroredStrategy([0, 1, 2, 3]), SIZES, steps_per_execution=4)
    train, validation = char_lm.load_data(12_000, SIZES["context"])
    assert len(train.x) % 32
    history = model.fit(*train, batch_size=32, epochs=2, validation_data=validation, verbose=0)
    first, second = (math.exp(loss) for loss in history.history["val_loss"])
    assert second < first < char_lm.VOCABULARY
    written = char_lm.write(model.module, validation.x[0], 12)
    assert len(written) == 12
    assert written == char_lm.write(model.module, validation.x[0], 12)


@pytest.mark.exhaustive
def test_the_command_prints_perplexity_and_text(tmp_path: Path) -> None:
    """With arguments that make it small."""
    small = {
        "characters": 20_000,
        "context": 16,
        "width": 16,
        "layers": 1,
        "epochs": 1,
        "sample": 8,
    }
    given = [f"--{name}={value}" for name, value in small.items()]
    printed = output("char_lm", *given, "--replicas", 2, folder=tmp_path)
    assert "over 2 replicas" in printed
    found = re.search(r"Validation perplexity after each epoch: (\S+)$", printed, re.MULTILINE)
    loss = re.search(r"val_loss: (\S+)", printed)
    assert found is not None
    assert loss is not None
    assert float(found[1]) == pytest.approx(math.exp(float(loss[1])), rel=1e-3)
    assert "Generated continuation:" in printed
