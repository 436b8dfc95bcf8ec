"""The digits example with compile and fit, made small, and as the command that the demo ends with."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from example_program import output

import distribute_jax as dj
from examples import digits, digits_fit

pytestmark = pytest.mark.exhaustive


def test_fit_learns_and_reports_exactly_the_images_of_the_data() -> None:
    """Three epochs on four replicas; the reported accuracy is that counted from the predictions."""
    model = digits_fit.make_model(dj.MirroredStrategy([0, 1, 2, 3]))
    train, test = digits.load_data()
    history = model.fit(*train, batch_size=128, epochs=3, verbose=0)
    assert history.history["loss"][2] < history.history["loss"][0] / 2
    few = (test.images[:101], test.labels[:101])
    _, accuracy = model.evaluate(*few, batch_size=64, verbose=0)
    predicted = model.predict(few[0], batch_size=64, verbose=0).argmax(axis=1)
    assert accuracy == pytest.approx(np.mean(predicted == few[1]), abs=1e-6)
    assert accuracy > 0.8


def test_the_command_prints_the_promised_accuracy(tmp_path: Path) -> None:
    """At most the default epochs bring it to 97 %."""
    printed = output("digits_fit", folder=tmp_path)
    accuracy = re.search(r"Test accuracy: (\S+), on 360", printed)
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.97
    assert "over 8 replicas" in printed
