"""What ``TensorBoard`` writes, read back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import distribute_jax as dj

sys.path.append(str(Path(__file__).parents[2] / "summary"))
from event_reader import read, scalars

TensorBoard = dj.callbacks.TensorBoard


def numbers(found: Any, tag: str) -> list[float]:
    return [number for _, number in found[tag]]


def test_epochs_are_written_under_keras_tags(example: Any, tmp_path: Path):
    """Training and validation have a folder each, and the rate is there."""
    example.fit(TensorBoard(tmp_path), epochs=2, validation_data=(example.x, example.y))
    train, held_out = scalars(tmp_path / "train"), scalars(tmp_path / "validation")
    assert set(train) == {"epoch_loss", "epoch_learning_rate"}
    assert train["epoch_loss"] == [(0, pytest.approx(25.5)), (1, pytest.approx(6.12255))]
    assert numbers(train, "epoch_learning_rate") == pytest.approx([0.01, 0.01])
    assert numbers(held_out, "epoch_loss") == pytest.approx([25.5 * 0.49**2, 25.5 * 0.49**4])
    assert [step for step, _ in held_out["evaluation_loss_vs_iterations"]] == [1, 2]


def test_batches_are_written_at_their_training_step(example: Any, tmp_path: Path):
    """Each number is that of its batch, although it is copied to the host later."""
    seen = []
    note = dj.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: seen.append(logs["loss"]))
    example.fit(note, TensorBoard(tmp_path, update_freq="batch"), batch_size=2, epochs=2)
    found = scalars(tmp_path / "train")
    assert [step for step, _ in found["batch_loss"]] == list(range(1, 9))
    assert numbers(found, "batch_loss") == pytest.approx(seen)


def test_every_so_many_batches_and_how_fast(example: Any, tmp_path: Path):
    """Batches are counted through the epochs; a second fit goes on from the optimizer's step."""
    board = TensorBoard(tmp_path, update_freq=3, write_steps_per_second=True)
    example.fit(board, batch_size=2, epochs=2)
    found = scalars(tmp_path / "train")
    assert [step for step, _ in found["batch_loss"]] == [3, 6]
    assert [step for step, _ in found["batch_steps_per_second"]] == [3, 6]
    assert all(number > 0 for number in numbers(found, "epoch_steps_per_second"))
    again = TensorBoard(tmp_path / "again", update_freq="batch")
    example.fit(again)
    assert [step for step, _ in scalars(tmp_path / "again" / "train")["batch_loss"]] == [9]


def test_weights_are_written_as_histograms(example: Any, tmp_path: Path):
    """Every second epoch: the one weight is in the last bucket."""
    example.fit(TensorBoard(tmp_path, histogram_freq=2), epochs=3)
    found = [entry for entry in read(tmp_path / "train") if entry.plugin == "histograms"]
    assert [(entry.tag, entry.step) for entry in found] == [("w/histogram", 0), ("w/histogram", 2)]
    assert [entry.data[-1].tolist() for entry in found] == [
        [pytest.approx(0.49**n), pytest.approx(0.49**n), 1.0] for n in (1, 3)
    ]


def test_another_frequency_is_refused():
    """The message lists what there is."""
    with pytest.raises(ValueError, match="'epoch', 'batch'; got 'step'"):
        TensorBoard(update_freq="step")
