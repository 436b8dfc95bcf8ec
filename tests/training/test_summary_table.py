"""``Model.summary``, and the plot of a history."""

from __future__ import annotations

import functools
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

import distribute_jax as dj


class Net(nnx.Module):
    """Two layers with batch norm and dropout, one of them used twice."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.blocks = nnx.List([nnx.BatchNorm(4, rngs=rngs)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.again = self.first
        self.scale = nnx.Param(jnp.ones(()))
        self.note = nnx.Variable(2)  # no array

    def __call__(self, x: Any) -> Any:
        return self.dropout(self.blocks[0](self.first(x))) * self.scale


def table(strategy: dj.Strategy, net: Any = Net, **options: Any) -> list[str]:
    with strategy.scope():
        model = dj.Model(net(rngs=nnx.Rngs(0)))
    texts: list[str] = []
    model.summary(print_fn=texts.append, **options)
    (text,) = texts
    return text.splitlines()


def test_every_layer_has_a_line_with_its_parameters_and_their_placement(s4: dj.Strategy):
    lines = table(s4)
    assert lines[0].split() == ["layer", "type", "parameters", "size", "dtype", "placement"]
    rows = {line.split()[0]: re.split("  +", line)[1:] for line in lines[2:] if line}
    everywhere = ["float32", "on each of 4 cpu"]
    assert rows["again"] == ["Linear", "16", "64 B", *everywhere]
    assert rows["blocks.0"] == ["BatchNorm", "16", "64 B", *everywhere]
    assert "first" not in rows
    assert rows["(model)"][:3] == ["Net", "2", "12 B"]
    assert rows["(model)"][-1] == "host, on each of 4 cpu"
    assert any(path.startswith("dropout") for path in rows)


def test_totals_count_what_is_trained(s4: dj.Strategy):
    """16 of the linear layer, 8 of the norm's 16, and the scale are trained; a key is 8 bytes, a count 4."""
    total, three_epochs, other = table(s4)[-3:]
    assert three_epochs == "Trainable: 25 parameters, 100 B"
    assert other == "Other: 11 parameters, 52 B"
    assert total == "Total: 36 parameters, 152 B"


def test_an_input_shows_output_shapes(s4: dj.Strategy):
    call = nnx.Linear.__call__
    lines = filter(None, table(s4, x=jnp.ones((5, 3)))[:-3])
    rows = {line.split()[0]: re.split("  +", line) for line in lines}
    assert rows["layer"][2] == "output"
    assert [rows[name][2] for name in ("again", "blocks.0", "(model)")] == ["(5, 4)"] * 3
    assert nnx.Linear.__call__ is call


class Pooled(nnx.Linear):
    def __call__(self, x: Any) -> Any:
        return super().__call__(x).mean(axis=-1)


def test_the_output_of_a_subclass_is_not_that_of_its_base(s4: dj.Strategy):
    lines = table(s4, functools.partial(Pooled, 3, 4), x=jnp.ones((5, 3)))
    assert re.split("  +", lines[2])[2] == "(5,)"


def test_other_processes_do_not_print(s4: dj.Strategy, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("distribute_jax.processes._job._current", SimpleNamespace(index=1))
    with s4.scope():
        model = dj.Model(Net(nnx.Rngs(0)))
    printed: list[str] = []
    model.summary(print_fn=printed.append)
    assert printed == []


def test_repr_of_a_model_and_a_history(s4: dj.Strategy):
    with s4.scope():
        model = dj.Model(Net(nnx.Rngs(0)))
    assert repr(model) == f"<Model of Net: 25 trained parameters under {s4!r}, not compiled>"
    assert (
        repr(three_epochs()) == "<History of 3 epochs; last loss: 1, accuracy: 0.2, val_loss: 2.5>"
    )


def test_one_device_is_named():
    assert re.search("float32 +cpu:0", "\n".join(table(dj.OneDeviceStrategy("cpu:0"))))


def test_it_prints_by_default(s4: dj.Strategy, capsys: pytest.CaptureFixture[str]):
    with s4.scope():
        model = dj.Model(Net(nnx.Rngs(0)))
    assert model.summary() is None
    assert capsys.readouterr().out.splitlines() == table(s4)


def three_epochs() -> dj.callbacks.History:
    """Returns a history of three epochs, one of them with validation."""
    history = dj.callbacks.History()
    for epoch, logs in enumerate([{"loss": 3.0}, {"loss": 2.0, "val_loss": 2.5}, {"loss": 1.0}]):
        history.on_epoch_end(epoch, {**logs, "accuracy": 0.1 * epoch})
    return history


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is an extra: [plot]")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_training_and_validation_share_a_panel_of_a_png_file(tmp_path: Path):
    loss, accuracy = three_epochs().plot(tmp_path / "h.png").axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in loss.get_lines()}
    assert lines == {"training": [[1, 3], [2, 2], [3, 1]], "validation": [[2, 2.5]]}
    assert (loss.get_ylabel(), loss.get_xlabel()) == ("loss", "epoch")
    assert (accuracy.get_ylabel(), len(accuracy.get_lines())) == ("accuracy", 1)
    assert (tmp_path / "h.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_without_matplotlib_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'distribute-jax\[plot\]'"):
        three_epochs().plot(tmp_path / "h.png")
