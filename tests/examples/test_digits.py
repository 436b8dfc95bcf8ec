"""The main example, made small: the same functions on fewer epochs and replicas."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from example_program import output

import distribute_jax as dj
from examples import digits

BATCH_SIZE = 64


@pytest.mark.exhaustive
def test_training_reaches_the_promised_accuracy_on_images_it_has_not_seen() -> None:
    strategy = dj.MirroredStrategy([0, 1, 2, 3])
    train_data, test_data = digits.load_data()
    steps = digits.make_steps(strategy)
    digits.train(strategy, steps, train_data, BATCH_SIZE, epochs=12)
    assert digits.accuracy_on(strategy, steps, test_data, BATCH_SIZE) >= 0.97


@pytest.mark.exhaustive
def test_accuracy_counts_exactly_the_images_of_the_data() -> None:
    _, test_data = digits.load_data()
    few = digits.Digits(test_data.images[:90], test_data.labels[:90])
    four, one = dj.MirroredStrategy([0, 1, 2, 3]), dj.OneDeviceStrategy("cpu:0")
    partial = digits.accuracy_on(four, digits.make_steps(four), few, 40)
    whole = digits.accuracy_on(one, digits.make_steps(one), few, 90)
    assert partial == whole


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_four_replicas_train_as_one_device_does_partial_batch_included(
    dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    images, labels = digits.load_data()[0]
    few = digits.Digits(images[:200], labels[:200])  # the command compares all of them
    assert len(few.labels) % BATCH_SIZE
    largest = digits.compare((1, 4), dtype, few, BATCH_SIZE, epochs=1)
    assert largest < digits.BOUNDS[dtype]
    assert f"{largest:.1e}" in capsys.readouterr().out


def test_a_run_that_differs_is_reported_and_fails_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def losses(replicas: int, *_: object) -> np.ndarray:
        return np.full((1, 23), 1.0 if replicas == 1 else 1.001)

    monkeypatch.setattr(digits, "losses_on", losses)
    unused = digits.Digits(np.zeros((1437, 8, 8, 1)), np.zeros(1437))
    assert not digits.print_comparison((1, 4), unused, BATCH_SIZE, epochs=1)
    assert "1.0e-03, NOT below 1e-05" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_the_command_prints_accuracy_and_differences(tmp_path: Path) -> None:
    printed = output("digits", folder=tmp_path)
    accuracy = re.search(r"Test accuracy: (\S+),", printed)
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.97
    found = re.findall(r"largest difference from one device (\S+), below", printed)
    assert len(found) == 2
    assert float(found[0]) < 1e-5
    assert float(found[1]) < 1e-10
