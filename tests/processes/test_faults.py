"""A process of a job fails: every process exits soon, with the reason."""

from __future__ import annotations

import re
import socket
import threading
import time
from typing import Any

import fault_functions
import pytest

from distribute_jax.testing import Fault, LocalCluster
from distribute_jax.testing._local_cluster import ProcessResult

pytestmark = pytest.mark.exhaustive

HANGS = r"process 1 .*: (no heartbeat; last seen )?at step \d.* <- the others wait for it"
"""How a process that does not come is described."""

SLACK = 6.0
"""Seconds for a slow machine, beyond what the job is allowed to wait."""


def run(
    function: Any, *args: Any, environment: Any = None, faults: Any = (), devices: int = 1
) -> list[ProcessResult]:
    """Runs a job of two processes that has to end without being killed."""
    cluster = LocalCluster(2, devices, timeout=60, grace=None, environment=environment)
    return cluster.run(function, *args, faults=faults, check=False)


def last_moment(results: list[ProcessResult]) -> float:
    """Returns when the last step of any process began, by the machine's clock."""
    return max(float(at) for r in results for at in re.findall(r"at ([\d.]+)$", r.stdout, re.M))


def ended_within(results: list[ProcessResult], limit: float) -> None:
    """Asserts that all had exited so many seconds after the last step began."""
    gone = time.time()
    assert gone - last_moment(results) < limit + SLACK
    assert not any(result.ended_by_cluster for result in results), "a process did not end by itself"


@pytest.mark.parametrize("hook", ["sys.excepthook", "sys.__excepthook__"])
def test_an_exception_ends_all_processes_with_its_text(hook):
    """The error is the last output, and the other process names it, also if a package set another hook."""
    results = run(fault_functions.loop, 50, environment={"BAD_BATCH": hook})
    ended_within(results, 2.0)
    assert [r.exit_code for r in results] == [44, 1]
    assert results[1].stderr.strip().endswith("ValueError: bad batch")
    *_, cause, last = results[0].stderr.strip().split("\n")
    assert re.search(r"process 1 \(.*\) failed: ValueError: bad batch", cause)
    assert "This process exits because of it" in last


def test_a_process_that_hangs_is_named_and_shows_its_stack():
    """No progress for step_seconds; all exit, with what each is doing and the line that hangs."""
    results = run(fault_functions.loop, 50, faults=[Fault("stall", process=1, at_step=5)])
    ended_within(results, fault_functions.STEP_SECONDS)
    assert all(r.exit_code in (1, 43, 44) for r in results)
    assert re.search(HANGS, results[0].stderr)
    assert "_stall" in results[1].stderr
    assert all("(most recent call " in r.stderr for r in results), "stacks of both"


def test_a_collective_that_one_process_never_joins_ends_in_time():
    """With a timeout of 2 s the process raises after 2 to 3 s instead of hanging."""
    results = run(fault_functions.all_reduce_that_one_never_joins)
    total, seconds, text = results[0].value
    assert total == 2.0
    assert 1.9 < seconds < 2.0 + SLACK
    assert "Timed out waiting 2000ms" in text


def test_a_process_that_holds_the_gil_is_named_too():
    """Its own watchdog cannot run; the others end, and it ends with them."""
    results = run(fault_functions.loop, 50, faults=[Fault("hold_gil", process=1, at_step=5)])
    ended_within(results, 2 * fault_functions.STEP_SECONDS + 3)
    assert re.search(HANGS, results[0].stderr)
    assert all(r.exit_code != 0 for r in results)


def test_a_process_that_is_stopped_for_a_while_goes_on():
    """After 3 s of SIGSTOP the job ends with the weights of one that was not disturbed."""
    undisturbed = run(fault_functions.loop, 12)
    stopped = run(
        fault_functions.loop, 12, faults=[Fault("stop", process=1, at_step=5, seconds=3.0)]
    )
    assert [r.exit_code for r in undisturbed + stopped] == [0] * 4
    assert len({r.value for r in undisturbed + stopped}) == 1


def test_a_killed_process_ends_the_others():
    """The survivor exits without a supervisor, and reports where each process was."""
    results = run(fault_functions.loop, 50, faults=[Fault("kill", process=1, at_step=5)])
    ended_within(results, fault_functions.STEP_SECONDS + 3)
    assert results[1].signal == "SIGKILL"
    assert results[0].exit_code != 0


def test_a_process_that_finishes_early_is_named():
    """One process runs fewer steps: the other reports that after ``shutdown_seconds``."""
    results = run(fault_functions.loop, 50, environment={"EARLY": "1"})
    ended_within(results, fault_functions.STEP_SECONDS)
    assert re.search(
        r"process 1 .*exited at step 5, while .* continue +<- the others wait", results[0].stderr
    )


def test_steps_that_differ_between_processes_are_an_error_before_they_run():
    """Another rate, width, value, key, constant, shape, option: both are shown, on both processes."""
    results = run(fault_functions.differing)
    first, second = (r.value for r in results)
    assert first == second
    rate, width, value, key, captured, constant, shape, options, sharded, bits, after = first
    assert "-0.1" in rate.replace("-0.10000000149011612", "-0.1")
    assert "-0.2" in rate
    assert "model.bias float32[2] on process 0" in width
    assert "model.bias float32[3] on process 1" in width
    assert "args[1]: 1.0 on process 0, 2.0 on process 1" in value
    assert "args[1]: uint32[2]" in key
    assert "  key: uint32[2]" in captured
    assert "program:" in constant
    assert "float32[2, 4] on process 0" in shape.replace("float32[4], ", "")
    assert "float32[4, 4] on process 1" in shape.replace("float32[4], ", "")
    assert re.search(
        r"options: .*verify='off'.* on process 0, .*verify='first'.* on process 1", options
    )
    assert re.search(r"sharded state: none on process 0, P\(.* on process 1", sharded)
    assert "jax_threefry_partitionable: True on process 0, False on process 1" in bits
    assert after == 2.0


def test_a_process_that_is_late_at_a_barrier_is_named():
    """The barrier ends in time with who is missing and what that process does."""
    results = run(fault_functions.late_at_a_barrier)
    text = results[0].value
    assert text is not None, results[0].stderr
    assert "waited 1 s for 'barrier here'" in text
    assert "process 1" in text


def test_a_process_that_ends_before_it_connects_is_named_with_an_exception():
    """No abort from C++, and long before the timeout."""
    results = run(fault_functions.missing)
    assert results[0].exit_code == 1
    assert "did not connect and process 1 has ended: process 1. Here: 0 (" in results[0].stderr
    assert results[0].seconds < fault_functions.START_SECONDS
    assert results[1].value == "elsewhere"


def test_a_strategy_made_too_late_says_what_to_do():
    """Once JAX has started its devices alone, the error says to make the strategy first."""
    results = run(fault_functions.after_the_backend)
    for result in results:
        assert "Make the strategy before anything else that computes" in result.value


def test_a_second_job_on_the_same_port_leaves_the_first_alone():
    """Plain JAX would end the running job; here the new one is refused with the port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    running: list[ProcessResult] = []
    job = threading.Thread(
        target=lambda: running.extend(run(fault_functions.fixed_port, address, 150))
    )
    job.start()
    while not _listens(address):
        assert job.is_alive()
        time.sleep(0.05)
    time.sleep(3)
    intruder = run(fault_functions.fixed_port, address, 1)
    job.join()
    assert [r.exit_code for r in running] == [0, 0]
    assert [r.value for r in running] == [300.0, 300.0]
    for result in intruder:
        assert result.exit_code == 1
        assert address in result.stderr


def _listens(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0
