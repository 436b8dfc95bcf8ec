"""The prefetch thread is bounded, passes on errors, and always ends."""

from __future__ import annotations

import gc
import logging
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from distribute_jax import ContextError
from distribute_jax.data import _prefetch
from distribute_jax.data._prefetch import InputStallMonitor, Prefetcher

LONG = 30.0
"""Seconds after which something is considered to hang."""


def prefetched(elements: Generator[Any, None, None], depth: int = 2) -> Prefetcher:
    """Reads ahead."""
    return Prefetcher(elements, depth, InputStallMonitor())


def threads() -> list[threading.Thread]:
    """The running prefetch threads."""
    return [t for t in threading.enumerate() if t.name == "distribute_jax prefetch"]


def all_ended() -> bool:
    """Waits until no prefetch thread is left."""
    end = time.monotonic() + LONG
    while threads() and time.monotonic() < end:
        time.sleep(0.005)
    return not threads()


class Counted:
    """Endless elements, with counts, and whether the generator was closed."""

    def __init__(self) -> None:
        self.made, self.taken, self.most_ahead, self.closed = 0, 0, 0, False

    def __call__(self) -> Generator[int, None, None]:
        """Makes 0, 1, 2, …"""
        try:
            while True:
                self.made += 1
                self.most_ahead = max(self.most_ahead, self.made - self.taken)
                yield self.made - 1
        finally:
            self.closed = True


def test_elements_come_in_order_and_end() -> None:
    prefetcher = prefetched(i for i in range(50))
    assert list(prefetcher) == list(range(50))
    assert next(prefetcher, "ended") == "ended"
    assert all_ended()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_no_more_than_depth_elements_are_read_ahead(depth: int) -> None:
    source = Counted()
    prefetcher = prefetched(source(), depth)
    assert source.made == 0  # nothing is read before the first element is asked for
    for i in range(20):
        assert next(prefetcher) == i
        source.taken += 1
        end = time.monotonic() + LONG
        while source.made - source.taken < depth and time.monotonic() < end:
            time.sleep(0.001)  # until the thread is as far ahead as it may be
    time.sleep(0.05)
    # The one just taken makes room before this test counts it.
    assert depth <= source.most_ahead <= depth + 1
    assert source.made <= 20 + depth


def test_an_exception_is_raised_at_its_position_with_its_traceback() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise ZeroDivisionError("in the source")

    prefetcher = prefetched(broken())
    assert next(prefetcher) == 1
    with pytest.raises(ZeroDivisionError, match="in the source") as caught:
        next(prefetcher)
    assert "broken" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "experimental_per_replica_buffer_size=0" in caught.value.__notes__[0]
    assert next(prefetcher, "ended") == "ended"
    assert all_ended()


def test_a_prefetcher_in_a_cycle_is_collected_with_its_thread() -> None:
    source = Counted()
    cycle: list[Any] = [prefetched(source())]
    cycle.append(cycle)
    next(cycle[0])
    del cycle
    gc.collect()
    assert all_ended()
    assert source.closed


@pytest.mark.parametrize("late", [0.0, 3600.0])
def test_quick_elements_stay_in_the_thread_of_the_loop(
    late: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generator that may change its thread does so after the element that exceeds the delay.

    The first one does not count: its time includes starting the source and compiling the transfer.
    """
    monkeypatch.setattr(_prefetch, "_HANDOVER_SECONDS", 0.0)
    monkeypatch.setattr(_prefetch, "_MAX_DELAY", late)
    source = (threading.current_thread().name for _ in range(20))
    names = list(Prefetcher(source, 2, InputStallMonitor(), can_change_thread=True))
    mine, other = threading.current_thread().name, "distribute_jax prefetch"
    assert names == ([mine] * 20 if late else [mine] * 2 + [other] * 18)
    assert all_ended()


def test_one_pause_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause of the process looks like a slow element; a slow source has a second one."""
    monkeypatch.setattr(_prefetch, "_MAX_DELAY", 0.2)
    monkeypatch.setattr(_prefetch, "_MAX_DELAY_OF_ONE", 0.12)

    def threads(*slow: int) -> set[str]:
        def source() -> Iterator[str]:
            for i in range(8):
                time.sleep(0.3 * (i in slow))
                yield threading.current_thread().name

        return set(Prefetcher(source(), 2, InputStallMonitor(), can_change_thread=True))

    mine, other = threading.current_thread().name, "distribute_jax prefetch"
    assert threads(3) == {mine}
    assert threads(3, 4) == {mine, other}
    assert all_ended()


PROGRAM = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for jobs in the background
from distribute_jax.data._prefetch import InputStallMonitor, Prefetcher

def source():
    yield 1
    {rest}

prefetcher = Prefetcher(source(), 2, InputStallMonitor())
print(next(prefetcher), flush=True)
{end}
"""


@contextmanager
def started(rest: str, end: str) -> Iterator[subprocess.Popen[str]]:
    """Starts a Python process that reads ahead, and yields it once it has its first element."""
    code = textwrap.dedent(PROGRAM).format(rest=rest, end=end)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.exhaustive
@pytest.mark.parametrize("rest", ["while True: yield 2", "time.sleep(3600)"])
def test_python_exits_while_a_thread_reads_or_waits_for_room(rest: str) -> None:
    with started(rest, "") as process:
        _, errors = process.communicate(timeout=LONG)
        assert (process.returncode, errors) == (0, "")


@pytest.mark.exhaustive
def test_ctrl_c_reaches_a_loop_that_waits_for_its_source() -> None:
    with started("time.sleep(3600)", "next(prefetcher)") as process:
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LONG)
        assert process.returncode != 0
        assert "KeyboardInterrupt" in errors


def test_a_loop_continues_after_an_interrupt_before_the_thread_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After Ctrl-C the next call starts the thread, and does not wait for one that was never started."""

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    prefetcher = prefetched(i for i in range(3))
    with monkeypatch.context() as patch:
        patch.setattr(_prefetch, "_settings", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(prefetcher)
    assert prefetcher._elements is not None
    assert list(prefetcher) == [0, 1, 2]


def test_an_interrupt_neither_ends_a_pass_in_silence_nor_loses_a_batch() -> None:
    """Ctrl-C ends a generator in the loop's thread: that is an error. What the thread has read is kept."""

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    elements = (interrupted() if i else i for i in range(3))
    prefetcher = Prefetcher(elements, 2, InputStallMonitor(), can_change_thread=True)
    assert next(prefetcher) == 0
    for error in KeyboardInterrupt, ContextError, StopIteration:
        with pytest.raises(error):
            next(prefetcher)
    prefetcher = prefetched(i for i in range(3))
    buffer = prefetcher._buffer
    slots, buffer._free_slots = buffer._free_slots, type("Slots", (), {"put": interrupted})
    with pytest.raises(KeyboardInterrupt):
        buffer.put(0) or buffer.take()
    buffer._free_slots = slots
    assert list(prefetcher) == [0, 0, 1, 2]


def test_a_loop_that_waits_for_its_data_is_reported_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(_prefetch.time, "perf_counter", lambda: now[0])

    def loop(waiting: float, step: float) -> None:
        for _ in range(200):
            now[0] += waiting + step
            pace.waited(waiting)

    with caplog.at_level(logging.WARNING):
        pace = InputStallMonitor()
        loop(0.01, 0.19)  # 5 %
        assert caplog.messages == []
        pace.restart()
        loop(0.3, 0.1)  # 75 %
        loop(0.3, 0.1)
    assert len(caplog.messages) == 1
    assert "waited for data 75 % of the time, 300 of 400 ms for each batch" in caplog.messages[0]
