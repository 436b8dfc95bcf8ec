"""The language model, made small: it learns, sees no later character, and writes text."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from example_program import output
from flax import nnx

from examples import char_lm

SIZES = {"context": 16, "width": 16, "layers": 2}
SMALL = [
    *("--characters=20000", "--context=16", "--width=16", "--layers=1", "--epochs=1", "--sample=8")
]


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
    logits, changed = nnx.jit(lambda module, x: module(x))(module, np.concatenate([x, y]))
    np.testing.assert_array_equal(logits[:-1], changed[:-1])
    assert np.any(np.asarray(logits[-1] != changed[-1]))


def test_each_strategy_divides_the_model_as_its_name_says() -> None:
    """Of the wide layers and of the heads a device has all, a share, or those of its model axis."""
    module = nnx.eval_shape(lambda: char_lm.Transformer(**SIZES, rngs=nnx.Rngs(0)))
    specs = {}
    for name, strategy in char_lm.STRATEGIES.items():
        rows = {row.path: row for row in strategy(list(range(8))).placement(module)}
        specs[name] = tuple(rows["blocks.wide.kernel"].spec)
        heads = tuple(rows["blocks.attention.query.kernel"].spec)
    assert specs["mirrored"] == ()
    assert "data" in specs["fully_sharded"]
    assert specs["model_parallel"][2] == "model"
    assert heads[2] == "model"


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", char_lm.STRATEGIES)
def test_a_short_training_lowers_the_perplexity_and_writes_text(strategy: str) -> None:
    """Two epochs on four devices, the last dispatch and the last batch being partial."""
    made = char_lm.STRATEGIES[strategy]([0, 1, 2, 3])
    model = char_lm.make_model(made, SIZES, steps_per_execution=4)
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
    printed = output("char_lm", *SMALL, "--use", 2, folder=tmp_path)
    assert "over 2 replicas" in printed
    found = re.search(r"Validation perplexity after each epoch: (\S+)$", printed, re.MULTILINE)
    loss = re.search(r"val_loss: (\S+)", printed)
    assert found is not None
    assert loss is not None
    assert float(found[1]) == pytest.approx(math.exp(float(loss[1])), rel=1e-3)
    assert "Generated continuation:" in printed


@pytest.mark.exhaustive
def test_the_command_prints_a_plan_and_trains_nothing(tmp_path: Path) -> None:
    """On eight devices, of which each has a share of the parameters."""
    printed = output("char_lm", *SMALL, "--strategy=fully_sharded", "--plan", folder=tmp_path)
    assert "FullyShardedStrategy, 8 replicas" in printed
    assert "reduce-scatter" in printed
    assert "perplexity" not in printed
