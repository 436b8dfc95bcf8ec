"""How a process exits: its code, and which process finished, gave up or failed first."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import fault_functions
import jax
import numpy as np
import pytest
from test_faults import ended_within, run
from test_watchdog_cost import Counted, job_of

import distribute_jax as dj
from distribute_jax.processes import _liveness
from distribute_jax.testing import LocalCluster


def left_by_sys_exit(status):
    """Process 1 catches one exit, and ends by another between two steps."""
    strategy = fault_functions.make_strategy()
    step, _ = fault_functions.make_step(strategy)
    x = fault_functions.batch(strategy)
    for number in range(3):
        print(f"step {number} at {time.time():.3f}", flush=True)
        if jax.process_index() == 1 and number == 1:
            try:
                sys.exit(7)
            except SystemExit:
                sys.exit(status)
        float(strategy.run(step, args=(x,)))


def left_from_partial_batches():
    """Process 1 ends between steps that nobody reads; the padding check of step 3 copies their state."""
    strategy = fault_functions.make_strategy()
    step, _ = fault_functions.make_step(strategy)
    (x,) = strategy.distribute_dataset([np.ones((3, 4), np.float32)])
    for number in range(6):
        print(f"step {number} at {time.time():.3f}", flush=True)
        if jax.process_index() == 1 and number == 2:
            sys.exit(0)
        strategy.run(step, args=(x,))


def forked_child_ends(error):
    """A child of process 1 prints and ends; returns its exit code and a sum of both processes."""
    strategy = fault_functions.make_strategy()
    strategy.barrier("start")
    code = None
    if jax.process_index() == 1:
        if (pid := os.fork()) == 0:
            print("of the child", end="")
            if isinstance(error, ValueError):
                raise error
            sys.exit(error)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(3)  # several heartbeats
    return code, float(strategy.reduce("sum", strategy.run(lambda: jax.numpy.ones(()))))


def caught_exits_are_none():
    """Catches an exit in the middle of the job, and ends normally."""
    strategy = fault_functions.make_strategy()
    with contextlib.suppress(SystemExit):
        sys.exit(5)
    strategy.barrier("end")
    return "through"


def shuts_down():
    """Ends the service of JAX by itself, and works on."""
    fault_functions.make_strategy().barrier("end")
    jax.distributed.shutdown()
    time.sleep(2)
    return "through"


def interrupted_at_its_end(process):
    """One process gets Ctrl-C when it has finished, while the other one still works."""
    strategy = fault_functions.make_strategy()
    strategy.barrier("start")
    print(f"end at {time.time():.3f}", flush=True)
    if jax.process_index() == process:
        interrupt = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
        interrupt.daemon = True
        interrupt.start()
    else:
        time.sleep(20)


def later_than_the_others_waited():
    """Process 0 reaches a barrier when process 1 has given up; both continue together."""
    strategy = fault_functions.make_strategy()
    time.sleep(4 * (jax.process_index() == 0))
    said = ""
    try:
        strategy.barrier("here", timeout=1)
    except dj.DeadlineExceededError as error:
        said = str(error)
    strategy.barrier("here", timeout=20)
    total = float(strategy.reduce("sum", strategy.run(lambda: jax.numpy.ones(()))))
    return said, total


def called_by_one(call):
    """Process 0 calls ``reduce`` or ``check_in_sync`` alone; the other one is in its own code."""
    strategy = fault_functions.make_strategy(step_seconds=2.0)
    value = fault_functions.batch(strategy)
    with strategy.scope():
        weight = dj.Variable(jax.numpy.ones(3))
    strategy.reduce("sum", value)
    dj.check_in_sync(weight)  # so that the devices are connected
    if jax.process_index():
        time.sleep(8)
        return ""
    try:
        if call == "dj.check_in_sync":
            dj.check_in_sync(weight)
        return str(strategy.reduce("mean", value, axis=0))
    except dj.DeadlineExceededError as error:
        return str(error)


def one_is_stopped(process):
    """A process is stopped forever; JAX counts it as dead before the step's timeout."""
    strategy = fault_functions.make_strategy(step_seconds=30.0, heartbeat_seconds=6)
    strategy.barrier("here")
    if jax.process_index() == process:
        os.kill(os.getpid(), signal.SIGSTOP)
    strategy.barrier("there")


def both_fail_while_they_wait():
    """Each process waits for the other at another barrier."""
    strategy = fault_functions.make_strategy()
    strategy.barrier("one" if jax.process_index() else "other", timeout=1)  # before it is seen


@pytest.mark.exhaustive
@pytest.mark.parametrize(("status", "code"), [(5, 5), ("no data", 1)])
def test_sys_exit_with_an_error_fails_the_job_at_once(status, code):
    """The code is the process's own, and the other one ends with 44 and names it; nobody waits."""
    results = run(left_by_sys_exit, status)
    ended_within(results, 2.0)
    assert [r.exit_code for r in results] == [44, code]
    assert re.search(rf"process 1 .* failed: sys.exit\({status!r}\)", results[0].stderr)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("program", "args", "devices"),
    [(left_by_sys_exit, (0,), 1), (left_from_partial_batches, (), 2)],
)
def test_a_process_that_exits_without_an_error_is_named(program, args, devices):
    """``sys.exit(0)`` of one process does not make the other hang, and the hint names the limit."""
    results = run(program, *args, devices=devices)
    ended_within(results, 3.0)
    first = results[0].stderr
    assert re.search(r"process 1 .*exited at step \d, while the others.* +<- the others", first)
    assert not re.search(r"process 0 \(.*<- the others", first)
    assert "ClusterOptions(shutdown_seconds=6)" in first


@pytest.mark.exhaustive
@pytest.mark.parametrize(("error", "code"), [(0, 0), (3, 3), (ValueError("of the child"), 1)])
def test_the_end_of_a_forked_child_is_none_of_the_job(error, code):
    """The child keeps its exit code and its output, and the job continues."""
    results = run(forked_child_ends, error)
    assert [(r.exit_code, r.value) for r in results] == [(0, (None, 2.0)), (0, (code, 2.0))]
    assert "of the child" in results[1].stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize("program", [caught_exits_are_none, shuts_down])
def test_what_ends_no_program_is_ignored(program):
    """One that catches its ``SystemExit``, or calls ``jax.distributed.shutdown``, ends with 0."""
    results = run(program)
    assert [(r.exit_code, r.value) for r in results] == [(0, "through")] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("process", [0, 1])
def test_ctrl_c_at_a_finished_process_ends_the_job(process):
    """It is named; its coordination service would otherwise leave, and JAX abort the other one."""
    results = run(interrupted_at_its_end, process)
    ended_within(results, 5.0)
    assert [results[process].exit_code, results[1 - process].exit_code] == [1, 44]
    assert "Traceback" not in results[process].stderr
    assert f"process {process} (" in results[1 - process].stderr
    assert "failed: KeyboardInterrupt while it waited" in results[1 - process].stderr


@pytest.mark.exhaustive
def test_a_late_process_gets_an_error_that_says_so():
    """A round that failed has failed for all; the next one, and a step, work."""
    early, late = reversed(run(later_than_the_others_waited))
    assert "Missing:\n  process 0" in early.value[0]
    assert "Process 0 of 2 reached 'barrier here' too late" in late.value[0]
    assert early.value[1] == late.value[1] == 2.0


@pytest.mark.exhaustive
def test_of_two_failures_at_once_one_is_the_cause():
    """The other one exits with 44 and names it."""
    results = run(both_fail_while_they_wait)
    assert sorted(r.exit_code for r in results) == [1, 44]
    (other,) = [r for r in results if r.exit_code == 44]
    assert re.search(rf"process {1 - other.process} .* failed: DeadlineExceeded", other.stderr)


@pytest.mark.exhaustive
@pytest.mark.parametrize("call", ["strategy.reduce", "dj.check_in_sync"])
def test_a_call_that_the_others_never_join_names_who_is_missing(call):
    """On one process only it is a DeadlineExceededError with what each process is doing."""
    text = run(called_by_one, call)[0].value
    assert text.startswith(f"{call} failed, which all processes have to call together")
    assert re.search(r"process 1 .*in your code +<- the others wait", text)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("process", "what"),
    [(0, "has not answered for"), (1, r"has sent no heartbeat for \d s; last seen at step 0")],
)
def test_a_stopped_process_is_named_before_jax_aborts_the_others(process, what):
    """JAX's SIGABRT cannot be prevented; the reason is printed before it, also of process 0."""
    cluster = LocalCluster(2, 1, timeout=20, grace=1.0)
    other = cluster.run(one_is_stopped, process, check=False)[1 - process]
    assert re.search(rf"process {process} .* {what}", other.stderr)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], tuple[str, str]]:
    """Fails in a job of two, and returns what the status file and the job's store have of it."""
    job, errors = job_of(0, 2, Counted()), []
    job.store.update({"heartbeats/0": "[3, 8, null, 0]", "heartbeats/1": "[5, 7, null, 0]"})
    monkeypatch.setattr(_liveness, "current_job", lambda: job)
    monkeypatch.setattr(_liveness, "status_writer", lambda: SimpleNamespace(error=errors.append))
    for name in ("record_exit_code", "atexit.register", "sys.excepthook", "time.sleep"):
        monkeypatch.setattr(f"distribute_jax.processes._liveness.{name}", lambda *_: None)
    monkeypatch.setattr(_liveness, "_CAUSE_SECONDS", 0)

    monkeypatch.setattr(_liveness, "exit_process", lambda *_: None)

    def fail(error: BaseException) -> tuple[str, str]:
        handler = _liveness.ExitHandler(job, None)
        with contextlib.suppress(IndexError):
            handler._on_error(type(error), error, None)
        handler._on_exit()
        return "".join(errors[-1:]), job.store["news/failed"]

    return fail


def test_a_socket_error_names_the_awaited_process(failing: Any):
    """The program waits for a value that another process does not help to compute."""
    error = jax.errors.JaxRuntimeError("Gloo all-reduce failed: Timed out waiting 4000ms")
    text, told = failing(error)
    assert re.search("process 1.*at step 7, in your code +<- the others wait for it", text)
    assert text in json.loads(told)


def test_an_error_without_a_text_is_its_name_alone(failing: Any):
    """As of a bare ``assert``, and of Ctrl-C."""
    text, told = failing(KeyboardInterrupt())
    assert text == "KeyboardInterrupt"
    assert "KeyboardInterrupt" in told
    assert "KeyboardInterrupt:" not in told


class UnreadableError(Exception):
    """As a class of the user may be."""

    def __str__(self) -> str:
        return self.args[1]


def test_an_error_whose_text_cannot_be_read_is_announced(failing: Any):
    """JAX would abort the others some seconds later."""
    assert "an exception, which its output shows" in failing(UnreadableError())[1]
