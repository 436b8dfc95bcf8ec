"""Processes are started, watched and stopped together, and restarted as long as they make progress."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import distribute_jax as dj
from distribute_jax.launch import _supervisor
from distribute_jax.launch._process import ProcessGroup, ProcessSpec
from distribute_jax.launch._supervisor import Inbox, signals_into


def test_every_process_gets_its_variables_and_an_output_prefix(launch, tmp_path, monkeypatch):
    """The environment has the variables of this job and not of others; the exit code is 0."""
    monkeypatch.setenv("TF_CONFIG", "{}")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_other=1")
    launched = launch(
        "names = ['NUM_PROCESSES', 'PROCESS_ID', 'LOCAL_PROCESS_ID', 'ADDRESS']\n"
        "texts = [os.environ['DISTRIBUTE_JAX_' + name].partition(':')[0] for name in names]\n"
        "print(*texts, *sys.argv[1:])\n"
        "print(os.environ['XLA_FLAGS'], os.environ['JAX_PLATFORMS'], 'TF_CONFIG' in os.environ)\n"
        "print(os.environ['JAX_COMPILATION_CACHE_DIR'], oct(os.stat(os.environ["
        "'DISTRIBUTE_JAX_JOB_FOLDER']).st_mode)[-3:])\n"
        "print('no newline', end='', file=sys.stderr)",
        "--processes=2",
        "--devices-per-process=3",
    )
    assert (launched.code, launched.said) == (0, [])
    cache = tmp_path / "distribute_jax" / "compiled"
    for i in (0, 1):
        assert [line for line in launched.out if line.startswith(f"[{i}] ")] == [
            f"[{i}] 2 {i} {i} 127.0.0.1 --flag argument",
            f"[{i}] --xla_other=1 --xla_force_host_platform_device_count=3 cpu False",
            f"[{i}] {cache} 700",
        ]
        assert f"[{i}] no newline" in launched.err
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("other", ["ignores SIGTERM", "is stopped"])
def test_an_exception_of_one_process_ends_all_and_is_the_last_line(launch, other, monkeypatch):
    """The supervisor does not wait for another one that cannot be asked to end."""
    monkeypatch.setattr(_supervisor, "_FAILURE_GRACE_SECONDS", 0.1)
    launched = launch(
        "if process == 0:\n"
        "    print(os.getpid(), flush=True)\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "all_of(2)\n"
        f"if process == 0 and {other == 'is stopped'}:\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "if process == 1:\n"
        "    step(7)\n"
        "    print(time.monotonic(), flush=True)\n"
        "    raise ValueError('bad batch')\n"
        "time.sleep(60)",
        "--processes=2",
        "--max-restarts=0",
    )
    pid, raised = (line[4:] for line in sorted(launched.out))
    assert time.monotonic() - float(raised) < 20
    assert not Path(f"/proc/{pid}").exists()
    assert launched.code == 1
    (line,) = launched.said
    assert launched.err[-1] == line
    assert re.fullmatch(
        r"distribute-jax: not restarted \(--max-restarts 0\): process 1 \(pid \d+ on .+\) failed with "
        r"ValueError: bad batch \(exit code 1\) at step 7",
        line,
    )


def test_a_killed_process_is_named_at_once_and_all_are_restarted(launch):
    """One line says which process, how, where, and what happens now."""
    launched = launch(
        "print('[Gloo] Rank 0 is connected to 1 peer ranks.')\n"
        "print('attempt', attempt)\n"
        "all_of(2)\n"
        "if attempt == 0 and process == 1:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if attempt == 0:\n"
        "    time.sleep(60)",
        "--processes=2",
    )
    assert launched.code == 0
    assert launched.seconds < 30
    assert sorted(launched.out) == [f"[{i}] attempt {a}" for i in (0, 1) for a in (0, 1)]
    (line,) = launched.said
    assert re.search(
        r"process 1 \(pid \d+ on .+\) was ended by SIGKILL before it reported a step; ", line
    )
    assert line.endswith("restarting all (restart 1; 0 of 3 allowed without progress)")


def test_a_job_whose_folder_was_removed_can_be_restarted(launch):
    """As by what removes old temporary files during a long job."""
    launched = launch(
        "import shutil\n"
        "if attempt == 0:\n"
        "    shutil.rmtree(os.environ['DISTRIBUTE_JAX_JOB_FOLDER'])\n"
        "    sys.exit(3)\n"
        "all_of(1)"
    )
    assert (launched.code, len(launched.said)) == (0, 1)


def test_a_job_that_always_fails_at_one_step_is_given_up(launch):
    """After the restarts without progress; the last line has the reason, and the code is not 0."""
    launched = launch(
        "step(7)\nif process == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)",
        "--processes=2",
        "--max-restarts=2",
        "--max-pause=0.3",
    )
    assert launched.code == 128 + signal.SIGKILL
    assert len(launched.said) == 3
    assert "restarting all (restart 1; 0 of 2" in launched.said[0]
    assert "restarting all in 0.3 s (restart 2; 1 of 2" in launched.said[1]
    assert launched.seconds > 0.3
    assert (
        "gave up, since none of the last 2 restarts got beyond step 7: process 1 "
        in launched.err[-1]
    )
    assert "was ended by SIGKILL at step 7" in launched.err[-1]


@pytest.mark.parametrize("text", ["bad option {process}", "ConnectionError: {process}"])
def test_an_error_of_every_process_before_a_step_is_not_restarted(launch, text):
    """Unless the error may be transient; the second process fails half a second after the first."""
    launched = launch(
        f"time.sleep(process / 2)\nif attempt == 0: sys.exit(f{text!r})", "--processes=2"
    )
    if "Connection" in text:
        assert launched.code == 0
        return
    assert launched.code == 1
    (line,) = launched.said
    assert re.search(
        r": not restarted, since every process failed with the same error before the first step: process 0 "
        r"\(.+\) failed with bad option 0 \(exit code 1\) before it reported a step$",
        line,
    )


def test_exit_codes_are_known_although_a_parent_ignores_sigchld():
    """A supervisor would wait forever if the kernel kept no exit code for it."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with signals_into(Inbox()):
            ended = subprocess.run([sys.executable, "-S", "-c", "raise SystemExit(3)"], check=False)
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert ended.returncode == 3


def test_under_nohup_a_job_outlives_its_terminal():
    """nohup lets the signal be ignored."""
    before, inbox = signal.signal(signal.SIGHUP, signal.SIG_IGN), Inbox()
    try:
        with signals_into(inbox):
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not inbox.is_stopped()


def test_a_limit_that_the_processes_reach_is_reported(tmp_path, monkeypatch):
    """Without a free descriptor or process, the launcher says which limit to raise."""

    def refuse(*_, **__):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    spec = ProcessSpec(0, ["program"], {}, tmp_path / "status")
    with pytest.raises(dj.ClusterError, match=r"Process 0 of 1 .*Too many open files.* ulimit -n"):
        ProcessGroup([spec], lambda _: (print, print), print)


def test_a_stop_while_processes_start_starts_no_more_of_them(launch):
    """The first of a thousand asks the supervisor to stop; a start takes 5 ms and more."""
    program = "import signal\nos.kill(os.getppid(), signal.SIGTERM)\nprint('started', flush=True)"
    launched = launch(program, "-n=1000", "--grace=1")
    assert launched.code
    assert sum("started" in line for line in launched.out) < 500


def test_a_job_is_restarted_as_long_as_there_is_progress(launch):
    """Five times, although one restart without progress is the limit."""
    launched = launch("step(attempt)\nif attempt < 5: sys.exit(3)", "--max-restarts=1")
    assert launched.code == 0
    assert len(launched.said) == 5
    assert all("0 of 1 allowed without progress" in line for line in launched.said)


def test_a_signal_to_the_supervisor_ends_processes_that_ignore_it(launch, monkeypatch):
    """After the grace period, long before they would end by themselves; nothing is restarted."""
    monkeypatch.setattr(_supervisor, "_REPORT_SECONDS", 0.1)
    launched = launch(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "all_of(2)\n"
        "if process == 0: os.kill(os.getppid(), signal.SIGTERM)\n"
        "time.sleep(60)",
        "--processes=2",
        "--grace=0.3",
    )
    assert launched.code == 128 + signal.SIGTERM
    assert 0.3 < launched.seconds < 30
    state = "killed after the grace period, or at a second signal: process 0, 1"
    lost = "What they had not saved is lost; --grace gives them more time"
    assert launched.said == [f"distribute-jax: stopped by SIGTERM: {state}. {lost}"]


SAVES = """
def save(*_):
    print('saved')
    sys.exit(42)
signal.signal(signal.SIGTERM, save)
all_of(2)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_is_passed_on_and_a_save_is_reported(launch, name):
    """All exit with code 42, and so does the supervisor, also after Ctrl-C."""
    launched = launch(
        SAVES + f"if process == 0: os.kill(os.getppid(), signal.{name})\ntime.sleep(60)",
        "--processes=2",
    )
    assert launched.code == 42
    assert sorted(launched.out) == ["[0] saved", "[1] saved"]
    assert launched.said == [
        f"distribute-jax: stopped by {name}: all processes have saved and ended"
    ]


def test_a_job_may_run_for_more_than_a_day(launch, monkeypatch):
    """Processes that all run have none to wait for, so they are not asked to save; a day takes 0.2 s here."""
    monkeypatch.setattr(_supervisor, "_DAY_SECONDS", 0.2)
    launched = launch("for number in range(10):\n    step(number)\n    time.sleep(0.1)")
    assert (launched.code, launched.said) == (0, [])


def test_a_job_that_was_stopped_before_its_processes_started_has_not_saved(launch, monkeypatch):
    """The exit code is that of the signal, and not 42, although no process ended otherwise."""

    def stop() -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return "127.0.0.1:1"

    monkeypatch.setattr(_supervisor, "free_address", stop)
    launched = launch("step(3)")
    assert launched.code == 128 + signal.SIGTERM
    assert launched.said == ["distribute-jax: stopped by SIGTERM: all processes have ended"]


def test_processes_that_saved_by_themselves_are_restarted(launch):
    """As after a preemption of these processes alone; the others get the grace period to save too."""
    launched = launch(
        "if attempt: sys.exit(0)\nall_of(2)\nstep(3)\ntime.sleep(0.2 * process)\nsys.exit(42)",
        "--processes=2",
    )
    assert launched.code == 0
    (line,) = launched.said
    assert "all processes have saved after a preemption; " in line


def test_the_others_continue_without_a_failed_process_until_it_rejoins(launch):
    """Two of three, each with its own device; after a while and some progress they save, and all start."""
    launched = launch(
        "place = os.environ['DISTRIBUTE_JAX_LOCAL_PROCESS_ID']\n"
        "of = os.environ['DISTRIBUTE_JAX_NUM_PROCESSES']\n"
        "print(attempt, place, of)\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))\n"
        "all_of(int(of))\n"
        "step(3 + attempt)\n"
        "if attempt == 0 and process == 1:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if attempt < 2:\n"
        "    time.sleep(60)",
        *("--min-processes=2", "--max-processes=3", "--rejoin=0.2"),
    )
    assert launched.code == 0
    assert launched.seconds < 30
    starts = ["0 0 3", "0 1 3", "0 2 3", "1 0 2", "1 2 2", "2 0 3", "2 1 3", "2 2 3"]
    assert sorted(line[4:] for line in launched.out) == starts
    assert "was ended by SIGKILL at step 3; " in launched.said[0]
    assert launched.said[1] == "distribute-jax: continuing with 2 of 3 processes"
    assert "stopped, so that the processes that had failed can rejoin; " in launched.said[2]
    assert launched.said[3] == "distribute-jax: continuing with 3 of 3 processes"


def test_the_job_does_not_shrink_below_min_processes(launch):
    """With two of three at least, those that failed longest ago take part again."""
    launched = launch(
        "print(os.environ['DISTRIBUTE_JAX_LOCAL_PROCESS_ID'])\n"
        "all_of(int(os.environ['DISTRIBUTE_JAX_NUM_PROCESSES']))\n"
        "if process == 0: sys.exit(3)\n"
        "time.sleep(60)",
        *("--processes=3", "--min-processes=2", "--max-restarts=2", "--max-pause=0"),
    )
    assert launched.code == 3
    # Process 0 is on device 0, then on 1, then on 0 again; device 2 has not failed.
    assert [sum(line.endswith(f" {i}") for line in launched.out) for i in range(3)] == [2, 2, 3]


def test_the_process_that_failed_first_is_named(launch):
    """Even if another one was seen to end first."""
    launched = launch(
        "all_of(2)\nif process == 0: sys.exit(44)\ntime.sleep(0.3)\nraise KeyError('late')",
        "--processes=2",
        "--max-restarts=0",
    )
    assert "process 1 " in launched.err[-1]
    assert "failed with KeyError: 'late'" in launched.err[-1]


def test_nothing_that_a_process_started_outlives_it(launch, tmp_path):
    """Its children end with it, also if it ends normally."""
    launched = launch(
        "import subprocess\nprint(subprocess.Popen(['sleep', '60']).pid)", "--processes=1"
    )
    assert launched.code == 0
    pid = int(launched.out[0].split()[1])
    with pytest.raises(ProcessLookupError):
        _until_gone(pid)


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_job_runs_where_the_shell_closed_an_output(tmp_path, closed):
    """The launch ended with an AttributeError, since Python has None for a closed stream."""
    done, script = tmp_path / "done", tmp_path / "program.py"
    script.write_text(f"print('text')\nopen({str(done)!r}, 'w').close()")
    command = f"{shlex.quote(sys.executable)} -m distribute_jax launch {shlex.quote(str(script))} {closed}"
    assert subprocess.run(command, shell=True, timeout=60).returncode == 0
    assert done.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells whose a process is")
@pytest.mark.parametrize("end", ["of a process", "of the supervisor"])
def test_nothing_in_another_session_outlives_the_job(tmp_path, end):
    """Neither when a process ends nor when the supervisor is killed; its folder goes too."""
    script = tmp_path / "program.py"
    script.write_text(
        "import os, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "print(child.pid, os.environ['DISTRIBUTE_JAX_JOB_FOLDER'], flush=True)\n"
        f"time.sleep({0 if end == 'of a process' else 60})"
    )
    command = [sys.executable, "-m", "distribute_jax", "launch", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        _, pid, folder = supervisor.stdout.readline().split()
        if end == "of the supervisor":
            supervisor.kill()
        supervisor.wait(timeout=30)
    with pytest.raises(ProcessLookupError):
        _until_gone(int(pid))
    limit = time.monotonic() + 5
    while Path(folder).exists():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_the_supervisor_does_not_import_jax(tmp_path):
    """It would take 200 MB and a second, and start threads, without need."""
    script = tmp_path / "program.py"
    script.write_text("")
    look = (
        "import sys; from distribute_jax.cli import main; code = main(sys.argv[1:]);"
        "sys.exit(code or str({'jax', 'numpy', 'flax'} & {*sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", look, "launch", str(script)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == "set()\n"


def test_a_world_writable_cache_is_refused(launch, tmp_path, monkeypatch, capfd):
    """JAX runs what is in it."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o777)
    launched = launch("")
    assert launched.code == 1
    assert "Remove that permission (chmod o-w " in launched.said[0]
    tmp_path.chmod(0o700)
    assert launch("").code == 0


def _until_gone(pid):
    limit = time.monotonic() + 2
    while time.monotonic() < limit:
        os.kill(pid, 0)
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            raise ProcessLookupError  # dead, and whoever adopted it has not yet looked
        time.sleep(0.01)
