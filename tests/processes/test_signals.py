"""SIGTERM has an effect whenever it comes, and its usual one when no block is left."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from typing import Any

import pytest

from distribute_jax.processes._job import current_job
from distribute_jax.processes._preemption import TERMINATED, exit_unsaved
from distribute_jax.processes._signals import record_exit_code, replace_sigterm


def test_blocks_that_end_in_any_order_leave_the_usual_handler() -> None:
    """The outer of two blocks may end first, as when a handler is replaced by another."""
    before = signal.getsignal(signal.SIGTERM)
    first, second = replace_sigterm(lambda: None), replace_sigterm(lambda: None)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGTERM) is not before
    second.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_at_the_end_of_listening_is_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The action is called for a signal that arrives just before the usual handler is restored."""
    seen, change = [], signal.signal

    def restored(number: int, handler: Any) -> Any:
        if handler is signal.SIG_DFL:
            signal.raise_signal(number)
        return change(number, handler)

    with replace_sigterm(lambda: seen.append(1)):
        monkeypatch.setattr(signal, "signal", restored)
    assert seen == [1]


def test_a_block_ends_after_its_action() -> None:
    """What follows a block knows of a signal for which its action is being called."""
    seen, is_called, may_end = [], threading.Event(), threading.Event()

    def action() -> None:
        is_called.set()
        assert may_end.wait(20)
        seen.append(1)

    with replace_sigterm(lambda: None):  # as that of a job, it listens on
        with replace_sigterm(action):
            os.kill(os.getpid(), signal.SIGTERM)
            assert is_called.wait(20)
            threading.Timer(0.05, may_end.set).start()
        assert seen == [1]


@pytest.mark.filterwarnings("ignore:.*fork", "ignore:.*multi-threaded")
def test_sigterm_of_a_forked_child_does_not_reach_its_parent() -> None:
    """Pools of workers are ended so: one that ignores it is waited for, and may end the job instead."""
    seen: list[int] = []
    with replace_sigterm(lambda: seen.append(1)):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.write(writer, b"runs")
            time.sleep(20)
            os._exit(0)
        os.read(reader, 4)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        os.close(reader)
        os.close(writer)
        time.sleep(0.1)  # the parent's thread would have heard of it
    assert not seen


def test_sys_exit_in_a_thread_ends_the_thread_silently(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Python prints the exception of a thread unless it is exactly a SystemExit."""
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # not that of pytest
    record_exit_code()
    thread = threading.Thread(target=sys.exit, args=(3,))
    thread.start()
    thread.join()
    assert capfd.readouterr().err == ""


class _Unread(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("stream", [_Unread(), None], ids=["unread", "closed by the shell"])
def test_a_process_exits_whatever_its_outputs_are(
    stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader has ended, or the disk of the log is full; Python has None for what the shell closed."""
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit, match=str(TERMINATED)):
        exit_unsaved(current_job(), "SIGTERM")
