"""The job that the guides start: killed or asked to stop, it ends with the weights of one left alone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from example_program import ROOT, job_environment

pytestmark = pytest.mark.exhaustive

STEPS = 60


def command(folder: Path) -> list[str]:
    """Returns the command that launches the job in two processes."""
    return [
        *(sys.executable, "-m", "distribute_jax", "launch"),
        *("--processes=2", "--devices-per-process=1", "--grace=60"),
        *(str(ROOT / "examples" / "digits_job.py"), f"--directory={folder / 'checkpoints'}"),
        *(f"--steps={STEPS}", "--every=5"),
    ]


@contextmanager
def launched(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Launches the job; what it and its supervisor print comes together."""
    with subprocess.Popen(
        command(folder), env=job_environment(folder.parent), cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as job:  # fmt: skip
        try:
            yield job
        finally:
            job.kill()


def read_until(job: subprocess.Popen[str], step: int) -> list[str]:
    """Reads what the job prints until it has come to a step."""
    lines = []
    assert job.stdout is not None
    for line in job.stdout:
        lines.append(line.rstrip())
        found = re.match(r"\[0\] step (\d+)/", line)
        if found and int(found[1]) >= step:
            return lines
    raise AssertionError("\n".join(lines))


def process_id(job: subprocess.Popen[str], index: int) -> int:
    """Finds a process of the job among the children of its supervisor."""
    for task in Path(f"/proc/{job.pid}/task").iterdir():
        for pid in map(int, (task / "children").read_text().split()):
            if f"DISTRIBUTE_JAX_PROCESS_ID={index}" in Path(f"/proc/{pid}/environ").read_text():
                return pid
    raise AssertionError(f"the supervisor has no process {index}")


def finished(job: subprocess.Popen[str]) -> list[str]:
    """Reads the rest of what the job prints."""
    assert job.stdout is not None
    lines = job.stdout.read().splitlines()
    job.wait(timeout=60)
    return lines


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The last line of a job that nobody disturbs."""
    with launched(tmp_path_factory.mktemp("alone")) as job:
        lines = finished(job)
    assert job.returncode == 0, "\n".join(lines)
    assert "[0] Resuming after step 0, on 2 replicas." in lines
    assert re.fullmatch(rf"\[0\] Weights after step {STEPS}: [0-9a-f]{{16}}", lines[-1])
    assert not any(line.startswith("[1] step") for line in lines), "every process prints"
    return lines[-1]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds children in /proc")
def test_three_kills_leave_no_trace_in_the_weights(tmp_path: Path, undisturbed: str):
    """Processes 1, 0 and 1 are killed, each time further on; all bits of all weights are the same."""
    lines = []
    with launched(tmp_path) as job:
        for step, process in ((10, 1), (20, 0), (40, 1)):
            lines += read_until(job, step)
            os.kill(process_id(job, process), signal.SIGKILL)
        lines += finished(job)
    assert job.returncode == 0, "\n".join(lines)
    killed = re.findall(r"process (\d) .* was ended by SIGKILL at step \d+", "\n".join(lines))
    assert killed == ["1", "0", "1"]
    done = [int(n) for n in re.findall(r"\] Resuming after step (\d+)", "\n".join(lines))]
    assert len(done) == 4
    assert done == sorted(done)
    assert done[-1] >= 35, "it started over"
    assert lines[-1] == undisturbed


def test_a_job_that_was_told_to_end_goes_on_at_the_step_it_had_come_to(
    tmp_path: Path, undisturbed: str
):
    """SIGTERM to the supervisor: all save at one step, exit code 42; started again it is the same job."""
    with launched(tmp_path) as job:
        read_until(job, 10)
        job.send_signal(signal.SIGTERM)
        lines = finished(job)
    assert job.returncode == 42, "\n".join(lines)
    assert lines[-1].endswith("stopped by SIGTERM: all processes have saved and ended")
    with launched(tmp_path) as job:
        lines = finished(job)
    (done,) = re.findall(r"\] Resuming after step (\d+)", "\n".join(lines))
    assert 10 <= int(done) < STEPS
    assert lines[-1] == undisturbed
