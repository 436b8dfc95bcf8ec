"""How a process ends: its exit code, and which process left, gave up or failed first."""

from __future__ import annotations

import re

import exit_functions
import pytest
from test_faults import ended_within, run

from distribute_jax.testing import LocalCluster


@pytest.mark.exhaustive
@pytest.mark.parametrize(("status", "code"), [(5, 5), ("no data", 1)])
def test_sys_exit_with_an_error_fails_the_job_at_once(status, code):
    """The code is the process's own, and the other one ends with 44 and names it; nobody waits."""
    results = run(exit_functions.left_by_sys_exit, status)
    ended_within(results, 2.0)
    assert [r.exit_code for r in results] == [44, code]
    assert re.search(rf"process 1 .* failed: sys.exit\({status!r}\)", results[0].stderr)


@pytest.mark.exhaustive
def test_who_leaves_without_an_error_is_named_as_gone():
    """``sys.exit(0)`` of one process does not make the other hang, and the hint names the limit."""
    results = run(exit_functions.left_by_sys_exit, 0)
    ended_within(results, 3.0)
    first = results[0].stderr
    assert re.search(r"process 1 .*left at step 1, while the others go on +<- the others", first)
    assert not re.search(r"process 0 \(.*<- the others", first)
    assert "ClusterOptions(shutdown_seconds=6)" in first


@pytest.mark.exhaustive
def test_an_exit_that_is_caught_is_none():
    """A program that catches its ``SystemExit`` ends with 0."""
    results = run(exit_functions.caught_exits_are_none)
    assert [(r.exit_code, r.value) for r in results] == [(0, "through")] * 2


@pytest.mark.exhaustive
def test_who_comes_after_the_others_gave_up_hears_so():
    """A round that failed has failed for all; the next one, and a step, work."""
    early, late = reversed(run(exit_functions.later_than_the_others_waited))
    assert "Missing:\n  process 0" in early.value[0]
    assert "Process 0 of 2 came too late to 'barrier here'" in late.value[0]
    assert early.value[1] == late.value[1] == 2.0


@pytest.mark.exhaustive
def test_of_two_that_fail_together_one_is_the_cause():
    """The other one refers to it, with 44: they do not accuse each other."""
    results = run(exit_functions.both_fail_while_they_wait)
    assert sorted(r.exit_code for r in results) == [1, 44]
    (other,) = [r for r in results if r.exit_code == 44]
    assert re.search(rf"process {1 - other.process} .* failed: DeadlineExceeded", other.stderr)


@pytest.mark.exhaustive
def test_a_reduction_that_the_others_never_join_says_who_is_missing():
    """``reduce`` on one process only is a DeadlineExceededError with what each process is doing."""
    text = run(exit_functions.reduce_by_one)[0].value
    assert text.startswith("strategy.reduce failed, which all processes have to call together")
    assert re.search(r"process 1 .*in your code +<- the others wait", text)


@pytest.mark.exhaustive
def test_who_is_stopped_is_named_before_jax_ends_the_others():
    """JAX's SIGABRT cannot be held up; what it is about stands before it."""
    cluster = LocalCluster(2, 1, timeout=20, grace=1.0)
    first = cluster.run(exit_functions.one_is_stopped, check=False)[0]
    assert re.search(
        r"process 1 .* has sent no heartbeat for \d s; last seen at step 0", first.stderr
    )
