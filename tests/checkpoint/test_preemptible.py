"""A loop that is preempted saves between two steps, exits, and goes on at the very next example."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distribute_jax as dj

pytestmark = pytest.mark.usefixtures("default_sigterm")


class Loop:
    """Adds up batches, and records each one that it sees."""

    def __init__(self, strategy: dj.Strategy) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.total = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)
        source = dj.data.from_arrays(np.arange(96.0)).shuffle(seed=1).batch(8)
        self.iterator = iter(strategy.distribute_dataset(source))
        self.seen: list[list[float]] = []
        total = self.total

        def step(x: Any) -> None:
            total.assign_add(x.sum())

        self.step = step

    def one(self, x: Any) -> None:
        self.strategy.run(self.step, args=(x,))
        parts = self.strategy.experimental_local_results(x)
        self.seen.append([float(v) for part in parts for v in part])

    def __call__(
        self, directory: Path, at: int | None = None, on_error: Any = "raise", **options: Any
    ) -> Any:
        """Runs the loop; at a step the process is preempted."""
        with (
            dj.CheckpointManager(directory, on_error=on_error) as manager,
            manager.preemptible({"total": self.total}, self.iterator, **options) as block,
        ):
            for x in self.iterator:
                self.one(x)
                if block.step == at:
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(0.2)
        return block


def test_a_loop_that_was_preempted_twice_sees_every_example_once(
    strategy: dj.Strategy, tmp_path: Path
):
    """It exits with code 42 after the current step; started again, it continues at the next example."""
    whole = Loop(strategy)
    whole(tmp_path / "undisturbed")
    seen = []
    for at, replicas in ((3, 2), (7, 1)):  # on any number of replicas
        part = Loop(dj.MirroredStrategy(range(replicas)))
        with pytest.raises(SystemExit) as left:
            part(tmp_path / "loop", at)
        assert left.value.code == 42
        seen += part.seen
    last = Loop(strategy)
    assert last(tmp_path / "loop").step == 12
    assert seen + last.seen == whole.seen
    assert float(last.total.numpy()) == float(whole.total.numpy()) == sum(range(96))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "the block has left its handler"


def test_a_save_that_fails_before_the_exit_is_an_error_whatever_the_policy(
    strategy: dj.Strategy, tmp_path: Path
):
    """Code 42 would mean that all is saved, so that ``on_error="warn"`` does not apply."""
    (tmp_path / "4").write_text("in the way")
    with pytest.raises(dj.CheckpointFileError, match="could not be written"):
        Loop(strategy)(tmp_path, 4, on_error="warn")


def test_a_loop_that_ended_is_saved_and_not_run_again(tmp_path: Path):
    """Started once more, it ends at once."""
    strategy = dj.OneDeviceStrategy("cpu:0")
    assert Loop(strategy)(tmp_path).step == 12
    again = Loop(strategy)
    assert again(tmp_path).step == 12
    assert again.seen == []
    assert float(again.total.numpy()) == sum(range(96))


def test_a_save_at_the_last_interval_has_ended_with_the_block(tmp_path: Path):
    """It runs in the background; an error would be lost where the manager is not left too."""
    (tmp_path / "12").write_text("in the way")
    loop = Loop(dj.OneDeviceStrategy("cpu:0"))

    def train() -> None:
        manager = dj.CheckpointManager(tmp_path, every_steps=6)
        with manager.preemptible({"total": loop.total}, loop.iterator):
            for x in loop.iterator:
                loop.one(x)

    with pytest.raises(dj.CheckpointFileError, match="could not be written"):
        train()


def test_several_steps_in_one_dispatch_are_never_divided(tmp_path: Path):
    """``run_steps`` takes its batches at once: those that were taken and not run would be lost."""
    strategy = dj.MirroredStrategy([0, 1])
    totals = []
    for is_preempted in (True, False):
        loop = Loop(strategy)
        manager = dj.CheckpointManager(tmp_path)
        try:
            with manager.preemptible({"total": loop.total}, loop.iterator) as block:
                while True:
                    if is_preempted and block.step == 4:
                        os.kill(os.getpid(), signal.SIGTERM)
                        time.sleep(0.2)
                    strategy.run_steps(loop.step, loop.iterator, steps=4)
        except SystemExit:
            assert manager.latest_step() == 4
        except StopIteration:
            totals.append(float(loop.total.numpy()))
    assert totals == [sum(range(96))]


@pytest.mark.exhaustive
def test_a_termination_watcher_preempts_the_loop(tmp_path: Path):
    """A function that returns True has the effect of the signal."""
    loop = Loop(dj.OneDeviceStrategy("cpu:0"))
    run = loop.one

    def slow(x: Any) -> None:
        run(x)
        time.sleep(0.4)

    loop.one = slow  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        loop(tmp_path, termination_watcher_fn=lambda: True)
    assert 0 < len(loop.seen) < 12


def test_an_interrupted_last_save_restores_the_sigterm_handler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the program would ignore SIGTERM from then on."""
    loop, before = Loop(dj.OneDeviceStrategy("cpu:0")), signal.getsignal(signal.SIGTERM)

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dj.CheckpointManager, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        loop(tmp_path)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("late", ["the request", "its message"])
def test_a_notice_at_the_end_of_the_loop_leaves_no_timer(
    late: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The end of the grace period does not end what the program does after the loop."""
    monkeypatch.setattr("distribute_jax.processes._preemption._WATCHER_SECONDS", 0.01)
    has_come, has_ended = threading.Event(), threading.Event()

    def wait(*_: Any) -> bool:
        has_come.set()
        return has_ended.wait(20)

    watcher = wait if late == "the request" else lambda: True
    if late == "its message":
        monkeypatch.setattr(caplog.handler, "emit", wait)
    iterator = Loop(dj.OneDeviceStrategy("cpu:0")).iterator
    manager = dj.CheckpointManager(tmp_path)
    block = manager.preemptible({"x": 1}, iterator, termination_watcher_fn=watcher)
    before = set(threading.enumerate())
    with contextlib.suppress(KeyError), block:
        assert has_come.wait(20)
        raise KeyError  # the iterator has not come to its end
    has_ended.set()
    while left := set(threading.enumerate()) - before:
        thread = left.pop()
        thread.join(5)
        assert not thread.is_alive(), thread


_NEVER_SAVES = """
import os, signal, sys, time
import numpy as np
import distribute_jax as dj
from distribute_jax.checkpoint import _write

iterator = iter(dj.get_strategy().distribute_dataset(dj.data.from_arrays(np.arange(8.0)).batch(2)))
manager = dj.CheckpointManager(sys.argv[1], every_steps=1)
with manager.preemptible({"x": np.zeros(1)}, iterator, grace_seconds=2.0) as loop:
    next(iterator), next(iterator)
    manager.wait()
    _write.write_arrays = lambda *_, **__: time.sleep(60)
    print(time.time(), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60 if sys.argv[2] == "step" else 0)
    next(iterator), time.sleep(1), next(iterator)
"""


_ENDS_FIRST = """
import os, signal, sys
import numpy as np
import distribute_jax as dj

iterator = iter(dj.get_strategy().distribute_dataset(dj.data.from_arrays(np.arange(8.0)).batch(2)))
with dj.CheckpointManager(sys.argv[1]) as manager, manager.preemptible({}, iterator) as loop:
    for x in iterator:
        pass
    os.kill(os.getpid(), signal.SIGTERM)
print("went on", flush=True)
"""


@pytest.mark.exhaustive
def test_a_signal_that_comes_with_the_last_step_is_not_lost(tmp_path: Path):
    """The loop ends and is saved, and then the process ends as the signal says."""
    done = _program(_ENDS_FIRST, tmp_path)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert "went on" not in done.stdout
    assert dj.CheckpointManager(tmp_path).all_steps() == [4]


def _program(text: str, directory: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", text, str(directory), *more],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("slow", ["step", "save"])
def test_a_step_or_a_save_that_takes_too_long_ends_after_the_grace_period(
    slow: str, tmp_path: Path
):
    """At its end, with the code for not saved; the last complete checkpoint is intact."""
    done = _program(_NEVER_SAVES, tmp_path, slow)
    assert 2 <= time.time() - float(done.stdout) < 20
    assert done.returncode == 143, done.stderr
    assert "nothing was saved" in done.stderr
    assert dj.CheckpointManager(tmp_path).all_steps() == [1]
    assert dj.checkpoint.load(tmp_path / "1", {"x": np.ones(1)}, partial=True)["x"] == 0


@pytest.mark.parametrize(
    ("tree", "iterator", "options", "text"),
    [
        ({}, [1, 2], {}, "iterator must be dj.DistributedIterator"),
        ([], None, {}, "tree must be a dict"),
        ({"iterator": 3}, None, {}, "must be the iterator of the loop"),
        ({}, None, {"grace_seconds": 0}, "grace_seconds must be a number above 0; got 0"),
        ({}, "generator", {}, "cannot"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_the_first_step(
    tree: Any, iterator: Any, options: Any, text: str, tmp_path: Path
):
    """A list of batches, a tree that is not a dict, a source that cannot seek: each is named."""
    strategy = dj.OneDeviceStrategy("cpu:0")
    source: Any = dj.data.from_arrays(np.arange(4.0)).batch(2)
    if iterator == "generator":
        source, iterator = (lambda: iter([np.ones(2)])), None
    iterator = iter(strategy.distribute_dataset(source)) if iterator is None else iterator
    with pytest.raises(ValueError, match=text):
        dj.CheckpointManager(tmp_path).preemptible(tree, iterator, **options)


def test_a_sigterm_handler_of_the_program_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Its handler stays, so the loop does not notice SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    Loop(dj.OneDeviceStrategy("cpu:0"))(tmp_path)
    assert "SIGTERM will not be noticed by this loop" in caplog.text
