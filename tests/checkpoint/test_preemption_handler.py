"""TensorFlow's handler: it saves at a common step, goes on in the grace period, and exits."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distribute_jax as dj
from distribute_jax.checkpoint import _preemption_handler
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

    def __init__(self, directory: Path, *, has_watcher: bool = True, **config: Any) -> None:
        self.strategy = dj.MirroredStrategy([0, 1, 2, 3])
        with self.strategy.scope():
            self.total = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)
        self.notice = threading.Event()
        self.manager = dj.CheckpointManager(directory, max_to_keep=None)
        self.handler = PreemptionCheckpointHandler(
            None,
            {"total": self.total},
            self.manager,
            TerminationConfig(self.notice.is_set if has_watcher else None, **config),
        )

    def step(self) -> None:
        self.strategy.run(lambda: self.total.assign_add(1.0))

    def run(self) -> None:
        """Trains to the end; from the middle on steps take longer."""
        while self.handler.total_run_calls < STEPS:
            self.handler.run(self.step)
            if self.handler.total_run_calls == NOTICE_AT:
                self.notice.set()
            time.sleep(0.02 * self.notice.is_set())


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
    save_fn = lambda *args, **names: called.append((args, names))  # noqa: E731
    counting = Counting(tmp_path, save_fn=save_fn, exit_fn=lambda: called.append("exit"))
    counting.notice.set()
    while len(called) < 2:
        counting.handler.save_checkpoint_if_preempted("a", b=1)
        time.sleep(0.005)
    done = counting.handler.total_run_calls
    counting.handler.save_checkpoint_if_preempted()
    assert called == [(("a",), {"b": 1}), "exit"]
    assert counting.handler.total_run_calls == done + 1
    assert counting.manager.all_steps() == []


def test_sigterm_in_a_block_of_steps_saves_at_its_end(tmp_path: Path):
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


@pytest.mark.parametrize("way", ["inside", "before", "after"])
def test_each_batch_counts_once_wherever_the_loop_takes_it(way: str, tmp_path: Path):
    """Inside of ``run``, before it, or in a loop that asks after its step; at any place of the tree."""
    strategy = dj.MirroredStrategy([0, 1])
    source = dj.data.from_arrays(np.arange(28.0, dtype=np.float32)).batch(4)
    notice = threading.Event()

    def train() -> float:
        with strategy.scope():
            total = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)
        batches = iter(strategy.distribute_dataset(source))
        tree, config = {"total": total, "data": [batches]}, TerminationConfig(notice.is_set)
        handler = PreemptionCheckpointHandler(None, tree, tmp_path, config)
        last = handler.total_run_calls + 4
        step = lambda x: strategy.run(lambda x: total.assign_add(x.sum()), args=(x,))  # noqa: E731
        while handler.total_run_calls < 7:
            if handler.total_run_calls == last:
                notice.set()
                time.sleep(0.1)
            if way == "inside":
                handler.run(lambda: step(next(batches)))
            elif way == "before":
                handler.run(step, next(batches))
            else:
                step(next(batches))
                handler.save_checkpoint_if_preempted()
        return float(total.numpy())

    with pytest.raises(SystemExit):
        train()
    notice.clear()
    assert train() == sum(range(28))


def test_missing_arguments_are_named(tmp_path: Path):
    """A manager does not know what to save; a grace period is not negative."""
    for arguments in ((dj.CheckpointManager(tmp_path),), ({"a": 1},)):
        with pytest.raises(ValueError, match="needs what to save and where"):
            PreemptionCheckpointHandler(None, *arguments)
    with pytest.raises(ValueError, match="grace_period must be a number >= 0; got -1"):
        TerminationConfig(grace_period=-1)


def test_what_cannot_be_saved_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Not when the process has no time left: a dataset, a source that cannot seek, a full disk."""
    dataset = dj.OneDeviceStrategy("cpu:0").distribute_dataset([np.ones(2)])
    with pytest.raises(dj.CheckpointError, match="DistributedDataset"):
        PreemptionCheckpointHandler(None, {"data": dataset}, tmp_path)
    with pytest.raises(dj.ArgumentError, match="source that can start at any batch"):
        PreemptionCheckpointHandler(None, {"data": iter(dataset)}, tmp_path)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("distribute_jax.checkpoint._storage.DiskDirectory.write", full)
    with pytest.raises(dj.CheckpointFileError, match=r"Nothing can be written.*No space left"):
        PreemptionCheckpointHandler(None, {"step": 1}, tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_a_watcher_that_fails_is_called_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """With one warning, and no traceback of a thread."""
    answers = iter([OSError("no answer"), OSError("no answer"), True])

    def watcher() -> bool:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    def train() -> None:
        config = TerminationConfig(watcher)
        handler = PreemptionCheckpointHandler(None, {"step": 1}, tmp_path, config)
        while True:
            handler.run(time.sleep, 0.005)

    with pytest.raises(SystemExit):
        train()
    assert caplog.text.count("is not noticed at present: OSError: no answer") == 1


class MetadataServer(ThreadingHTTPServer):
    """The metadata server of a Compute Engine VM, on loopback."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _MetadataHandler)
        self.event: str | int = "NONE"
        """What it answers: a text or an HTTP status."""
        self.requests: list[tuple[str, str | None]] = []


class _MetadataHandler(BaseHTTPRequestHandler):
    server: MetadataServer

    def do_GET(self) -> None:
        event = self.server.event
        self.server.requests.append((self.path, self.headers["Metadata-Flavor"]))
        self.send_response(event if isinstance(event, int) else 200)
        self.end_headers()
        self.wfile.write(str(event).encode())

    def log_message(self, *_: object) -> None:
        """Keeps quiet."""


@pytest.fixture
def compute_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataServer]:
    """A Compute Engine VM with GPUs, whose hosts are stopped half a second after the notice."""
    server = MetadataServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    product = tmp_path / "product_name"
    product.write_text("Google Compute Engine\n")
    monkeypatch.setattr(_preemption_handler, "_PRODUCT_NAME", product)
    monkeypatch.setattr(_preemption_handler, "_has_gpu", lambda: True)
    monkeypatch.setattr(_preemption_handler, "_COMPUTE_ENGINE_GRACE_SECONDS", 0.5)
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_address[1]}")
    yield server
    gc.collect()  # handlers, whose threads ask the server
    server.shutdown()
    thread.join()
    server.server_close()


def train_until_exit(counting: Counting) -> tuple[Any, int]:
    """Returns the exit code, and the number of checkpoints."""

    def train() -> None:
        while True:
            counting.handler.run(counting.step)
            time.sleep(0.02)

    with pytest.raises(SystemExit) as exit_info:
        train()
    return exit_info.value.code, len(counting.manager.all_steps())


@pytest.mark.exhaustive
def test_maintenance_of_a_compute_engine_host_is_noticed(
    compute_engine: MetadataServer, tmp_path: Path
):
    """It saves, goes on, saves again near the end of the grace period, and exits with 143."""
    counting = Counting(tmp_path / "run", has_watcher=False)
    while len(compute_engine.requests) < 3:
        counting.handler.run(counting.step)
    compute_engine.event = "MIGRATE_ON_HOST_MAINTENANCE"  # which VMs with GPUs do not get
    asked = len(compute_engine.requests)
    while len(compute_engine.requests) < asked + 3:
        counting.handler.run(counting.step)
    assert counting.manager.all_steps() == []
    compute_engine.event = "TERMINATE_ON_HOST_MAINTENANCE"
    assert train_until_exit(counting) == (143, 2)
    path = "/computeMetadata/v1/instance/maintenance-event"
    assert set(compute_engine.requests) == {(path, "Google")}


def _exit_with_7() -> None:
    raise SystemExit(7)


@pytest.mark.parametrize(
    ("config", "ends"),
    [
        ({"grace_period": 0}, (143, 1)),
        ({"grace_period": 0.25}, (143, 2)),
        ({"exit_fn": _exit_with_7}, (7, 2)),
    ],
)
def test_a_given_argument_replaces_the_default_of_compute_engine(
    config: dict[str, Any], ends: tuple[int, int], compute_engine: MetadataServer, tmp_path: Path
):
    """The others keep it."""
    compute_engine.event = "TERMINATE_ON_HOST_MAINTENANCE"
    assert train_until_exit(Counting(tmp_path / "run", has_watcher=False, **config)) == ends


def test_with_a_watcher_the_metadata_server_is_not_asked(
    compute_engine: MetadataServer, tmp_path: Path
):
    """Grace period and exit code are those of Compute Engine."""
    counting = Counting(tmp_path / "run")
    counting.notice.set()
    assert train_until_exit(counting) == (143, 2)
    assert compute_engine.requests == []


@pytest.mark.parametrize("event", ["NONE", "TERMINATE_ON_HOST_MAINTENANCE"])
def test_sigterm_on_compute_engine_leaves_no_hour(
    event: str, compute_engine: MetadataServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also after a notice of maintenance: it saves at once, and exits with 42."""
    monkeypatch.setattr(_preemption_handler, "_COMPUTE_ENGINE_GRACE_SECONDS", 3600.0)
    compute_engine.event = event
    counting = Counting(tmp_path / "run", has_watcher=False)
    first_saves = event != "NONE"
    while len(counting.manager.all_steps()) < first_saves:
        counting.handler.run(counting.step)
    os.kill(os.getpid(), signal.SIGTERM)
    assert train_until_exit(counting) == (42, 1 + first_saves)


@pytest.mark.parametrize(
    ("product", "has_gpu"),
    [("Google Compute Engine\n", False), ("Standard PC\n", True), (None, True)],
)
def test_no_other_machine_asks_a_metadata_server(
    product: str | None,
    has_gpu: bool,
    compute_engine: MetadataServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """It makes no request that could wait; SIGTERM and its exit code are as everywhere."""
    monkeypatch.setattr(_preemption_handler, "_has_gpu", lambda: has_gpu)
    file = tmp_path / "product_name"
    file.unlink() if product is None else file.write_text(product)
    compute_engine.event = "TERMINATE_ON_HOST_MAINTENANCE"
    counting = Counting(tmp_path / "run", has_watcher=False)
    time.sleep(0.1)
    counting.handler.run(counting.step)
    os.kill(os.getpid(), signal.SIGTERM)
    assert train_until_exit(counting) == (42, 1)
    assert compute_engine.requests == []


def test_a_metadata_server_that_fails_is_asked_again(
    compute_engine: MetadataServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """With one warning, however often it fails."""
    compute_engine.event = 404
    counting = Counting(tmp_path / "run", has_watcher=False, grace_period=0)
    while len(compute_engine.requests) < 3:
        counting.handler.run(counting.step)
    compute_engine.event = "TERMINATE_ON_HOST_MAINTENANCE"
    assert train_until_exit(counting) == (143, 1)
    assert caplog.text.count("is not noticed at present: ServiceError") == 1


def test_without_requests_a_warning_says_what_to_install(
    compute_engine: MetadataServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """The handler is made, and SIGTERM is noticed."""
    monkeypatch.setitem(sys.modules, "requests", None)
    counting = Counting(tmp_path / "run", has_watcher=False)
    assert "pip install 'distribute-jax[gcp]'" in caplog.text
    os.kill(os.getpid(), signal.SIGTERM)
    assert train_until_exit(counting) == (42, 1)
    assert compute_engine.requests == []
