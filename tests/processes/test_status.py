"""The status of a process can be read at any time, even after it was killed."""

from __future__ import annotations

import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import distribute_jax as dj
from distribute_jax._supervision import STATUS, read_status
from distribute_jax.processes import _status
from distribute_jax.processes._status import StatusWriter, status_writer


def test_the_last_status_is_read(tmp_path):
    """Step, phase and error; empty if there is no file, or nothing was written."""
    path = tmp_path / "status"
    assert read_status(path).step is None
    writer = StatusWriter(path)
    assert read_status(path) == read_status(tmp_path / "absent")
    writer.step(0)
    assert read_status(path).step == 0
    writer.step(2**40)
    writer.phase("compiling ✓")
    writer.error("ValueError: \udcff")  # as in the name of a file
    assert read_status(path).error == "ValueError: ?"
    writer.error("ValueError: " + "é" * 5000)
    status = read_status(path)
    assert (status.step, status.phase) == (2**40, "compiling ✓")
    assert status.error.startswith("ValueError: éé")
    writer.phase("x")
    assert read_status(path).phase == "x"


def test_a_step_costs_about_a_microsecond(tmp_path):
    """A loop may report every step."""
    writer = StatusWriter(tmp_path / "status")
    best = min(_seconds(writer) for _ in range(5))
    assert best < 10e-6, best


def _seconds(writer, n=2000):
    began = time.perf_counter()
    for step in range(n):
        writer.step(step)
    return (time.perf_counter() - began) / n


def test_the_process_finds_its_file_in_the_environment(tmp_path, monkeypatch):
    """Without one, or with that of a job that has ended, reporting does nothing."""
    monkeypatch.delenv(STATUS, raising=False)
    dj.report_step(3)
    monkeypatch.setenv(STATUS, str(tmp_path / "gone" / "status"))
    dj.report_step(3)
    monkeypatch.setenv(STATUS, str(tmp_path / "status"))
    dj.report_step(4)
    assert status_writer() is status_writer()
    assert read_status(tmp_path / "status").step == 4
    assert os.stat(tmp_path / "status").st_mode & 0o777 == 0o600


def test_a_full_disk_is_an_error_when_the_file_is_created(tmp_path, monkeypatch):
    """Otherwise the process would get SIGBUS at its first step."""
    (tmp_path / "other").write_bytes(bytes(4096))
    if not (tmp_path / "other").stat().st_blocks:
        pytest.skip("this file system does not say what has room")
    blocks, mapped = [], _status.mmap.mmap

    def mmap(number: int, size: int) -> Any:
        blocks.append(os.fstat(number).st_blocks)
        return mapped(number, size)

    monkeypatch.setattr(_status.mmap, "mmap", mmap)
    StatusWriter(tmp_path / "status").step(3)
    assert blocks > [0]
    StatusWriter(tmp_path / "status")
    assert (tmp_path / "status").stat().st_size == 4096, "that of a process before"


def test_an_interrupt_leaves_no_phase_behind(monkeypatch):
    """The watchdog would see a phase that does not end."""

    def interrupt(*_: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(StatusWriter, "phase", interrupt)
    with pytest.raises(KeyboardInterrupt), _status._reported("compiling"):
        pass
    assert _status.activity().phase == _status.YOUR_CODE


def test_an_output_that_is_donated_while_the_watchdog_looks_is_not_waited_for():
    """The watchdog would take JAX's error for the end of process 0, and end this process."""

    class DonatedMeanwhile:
        array = jnp.ones(2)

        def is_deleted(self) -> bool:
            was_deleted = self.array.is_deleted()
            jax.jit(lambda x: x + 1, donate_argnums=0)(self.array)
            return was_deleted

        def is_ready(self) -> bool:
            return self.array.is_ready()

    assert _status.Activity(last=DonatedMeanwhile()).waiting() is None
