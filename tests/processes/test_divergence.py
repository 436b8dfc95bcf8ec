"""Processes that diverge after their steps were compared end with the first difference."""

from __future__ import annotations

import divergence_functions
import pytest

from distribute_jax.processes._divergence import ActionLog
from distribute_jax.testing import LocalCluster


def ended(function):
    """Runs two processes that are to fail, and returns what process 0 wrote."""
    results = LocalCluster(2, 1, timeout=90, grace=None).run(function, check=False)
    for result in results:
        assert result.exit_code not in (0, None), result.stderr
        assert "The processes diverged" in result.stderr
    return results[0].stderr


class Board(dict):
    """A key-value store in memory."""

    def put(self, key, text):
        """Stores a text."""
        self[key] = text

    def under(self, folder):
        """Returns what is stored below a folder."""
        return {key[len(folder) :]: text for key, text in self.items() if key.startswith(folder)}


def two_logs():
    """Returns the logs of two processes that have done the same so far."""
    board = Board()
    logs = [ActionLog(index, 2, board) for index in range(2)]
    for log in logs:
        log.record("runs step", b"program")
    return logs


def compare(logs):
    """Lets both watchdogs compare twice; returns the results."""
    return [log.compare() for log in (*logs, *logs)]


def test_processes_that_do_the_same_are_not_disturbed():
    """Also where one is ahead of the other while they are compared."""
    first, second = two_logs()
    first.record("runs step with x = 1.0")
    assert compare((first, second)) == [None] * 4
    second.record("runs step with x = 1.0")
    assert compare((first, second)) == [None] * 4
    first.publish()
    second.compare_last()
    assert (first.finish(), second.finish()) == (None, None)


def test_the_first_difference_is_named_on_both():
    """The error names what each did, at the next thing that either does."""
    logs = two_logs()
    for number, log in enumerate(logs):
        log.record(f"runs step with x = {number}.5")
        log.record("runs step with x = 3.0")
    compare(logs)
    for log in logs:
        with pytest.raises(RuntimeError, match=r"process 0: .*x = 0.5\n  process 1: .*x = 1.5"):
            log.record("runs step with x = 4.0")


def test_a_difference_that_is_shown_in_no_number_is_found_too():
    """Another program of the same name."""
    logs = two_logs()
    for number, log in enumerate(logs):
        log.record("runs step", b"program %d" % number)
    compare(logs)
    with pytest.raises(RuntimeError, match="diverged"):
        logs[1].record("runs step")


def test_one_step_more_is_found_at_the_end():
    """Process 1 ends with a step that process 0 never ran."""
    first, second = two_logs()
    second.record("runs step with x = 9.0")
    first.publish()
    second.compare_last()
    assert "nothing more" in first.finish()


@pytest.mark.exhaustive
def test_a_number_that_differs_is_found_while_the_job_runs():
    """A host number is the same on all replicas by its nature; each process passes another one."""
    text = ended(divergence_functions.passes_another_number)
    assert "add with args[0] = 0.125" in text
    assert "= 0.25" in text


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (divergence_functions.writes_another_value, ["= 6.0, written between steps", "= 7.0"]),
        (
            divergence_functions.runs_another_step,
            ["process 0: runs prepared.<locals>.add", "process 1: runs prepared.<locals>.take"],
        ),
        (divergence_functions.differs_at_the_end, ["= 0.125", "= 0.25"]),
    ],
)
def test_processes_that_diverge_name_the_first_difference(function, words):
    """Values written between steps, other steps, and programs that end before anybody looked."""
    text = ended(function)
    assert [word for word in words if word not in text] == []


@pytest.mark.exhaustive
def test_processes_that_do_the_same_end_well():
    """No false alarm for values, snapshots, steps and reductions that change in the same way."""
    results = LocalCluster(2, 1, timeout=90).run(divergence_functions.stays_together)
    assert results[0].value == results[1].value


@pytest.mark.exhaustive
def test_batches_that_differ_give_a_warning():
    """Under the default policy every process reads the same batches, or is told that it does not."""
    told = [r.value for r in LocalCluster(2, 1).run(divergence_functions.shuffles_otherwise)]
    assert [len(of_process) for of_process in told] == [1, 0]
