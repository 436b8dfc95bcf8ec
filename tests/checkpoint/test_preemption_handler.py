"""TensorFlow's handler: it saves at a common step, goes on in the grace period, and exits."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import distribute_jax as dj
from distribute_jax.experimental import PreemptionCheckpointHandler, TerminationConfig

STEPS, NOTICE_AT = 120, 50
"""8 epochs of 15 steps, and the middle of the fourth one."""


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("distribute_jax.processes._preemption._WATCHER_SECONDS", 0.01)
    monkeypatch.setattr("distribute_jax.checkpoint._preemption_handler._POLL_SECONDS", 0.01)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    gc.collect()  # a handler that a strategy's program refers to
    signal.signal(signal.SIGTERM, before)


class Counting:
    """A training in which each replica adds 1 to a variable at each step."""

    def __init__(self, directory: Path, **config: Any) -> None:
        self.strategy = dj.MirroredStrategy([0, 1, 2, 3])
        with self.strategy.scope():
            self.total = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)
        self.notice = threading.Event()
        self.manager = dj.CheckpointManager(directory, max_to_keep=None)
        self.handler = PreemptionCheckpointHandler(
            None,
            {"total": self.total},
            self.manager,
            TerminationConfig(self.notice.is_set, **config),
        )

    def step(self) -> None:
        self.strategy.run(lambda: self.total.assign_add(1.0))

    def run(self) -> None:
        """Trains to the end; from the middle on steps take longer."""
        while self.handler.total_run_calls < STEPS:
            self.handler.run(self.step)
            if self.handler.total_run_calls == NOTICE_AT:
                self.notice.set()
            time.sleep(0.005 * self.notice.is_set())


@pytest.mark.parametrize(("grace", "checkpoints"), [(None, 1), (0.25, 2)])
def test_the_counter_ends_at_replicas_times_steps(
    grace: float | None, checkpoints: int, tmp_path: Path
):
    """It exits with 42 after one checkpoint, or two with a grace period; started again, nothing is lost."""
    first = Counting(tmp_path, grace_period=grace)
    with pytest.raises(SystemExit) as left:
        first.run()
    assert left.value.code == 42
    steps = first.manager.all_steps()
    assert len(steps) == checkpoints
    assert steps[0] >= NOTICE_AT
    assert steps[-1] == first.handler.total_run_calls
    again = Counting(tmp_path)
    assert again.handler.total_run_calls == steps[-1]
    again.notice.clear()
    while again.handler.total_run_calls < STEPS:
        again.handler.run(again.step)
    assert float(again.total.numpy()) == 4 * STEPS


def test_saving_and_exiting_can_be_replaced(tmp_path: Path):
    """save_fn gets the arguments of the call; after an exit_fn that returns, training goes on."""
    called: list[Any] = []
    counting = Counting(
        tmp_path,
        save_fn=lambda *args, **names: called.append((args, names)),
        exit_fn=lambda: called.append("exit"),
    )
    counting.notice.set()
    while len(called) < 2:
        counting.handler.save_checkpoint_if_preempted("a", b=1)
        time.sleep(0.005)
    done = counting.handler.total_run_calls
    counting.handler.save_checkpoint_if_preempted()
    assert called == [(("a",), {"b": 1}), "exit"]
    assert counting.handler.total_run_calls == done + 1
    assert counting.manager.all_steps() == []


def test_a_block_of_steps_ends_with_the_save_that_sigterm_asks_for(tmp_path: Path):
    """Not in the middle; when the handler is dropped, SIGTERM has its usual effect again."""
    counting = Counting(tmp_path)

    def block(counting: Counting) -> None:
        with counting.handler.watch_preemption_scope():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            counting.step()
            counting.step()

    with pytest.raises(SystemExit):
        block(counting)
    assert float(Counting(tmp_path).total.numpy()) == 8
    del counting
    gc.collect()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_is_missing_is_named(tmp_path: Path):
    """A manager does not know what to save; a grace period is not negative."""
    for arguments in ((dj.CheckpointManager(tmp_path),), ({"a": 1},)):
        with pytest.raises(ValueError, match="needs what to save and where"):
            PreemptionCheckpointHandler(None, *arguments)
    with pytest.raises(ValueError, match="grace_period must be a number >= 0; got -1"):
        TerminationConfig(grace_period=-1)
