"""The Linen example: what it promises, and what its state is after a step."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import pytest
from example_program import output

import distribute_jax as dj
from examples import linen_digits as linen


@pytest.mark.exhaustive
def test_a_short_training_learns_in_sync_and_in_place(capsys: pytest.CaptureFixture[str]) -> None:
    """Ten steps on two replicas, with batch norm and dropout and the state donated."""
    strategy = dj.MirroredStrategy([0, 1])
    (images, labels), test = linen.load_data()
    first = linen.make_state(strategy, linen.CNN())
    state = linen.train(strategy, first, (images[:350], labels[:350]), epochs=2)
    assert linen.accuracy_on(strategy, state, (test[0][:101], test[1][:101])) > 0.4
    assert int(state.step) == 10
    dj.check_in_sync((state.params, state.batch_stats, state.opt_state))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((first.params, first.opt_state)))
    assert capsys.readouterr().out.count("loss of the last step") == 2


@pytest.mark.exhaustive
def test_the_command_prints_the_accuracy(tmp_path: Path) -> None:
    """As the README says: one command, on a machine with no accelerator."""
    printed = output("linen_digits", folder=tmp_path)
    accuracy = re.search(r"Test accuracy: (\S+)", printed)
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.97
