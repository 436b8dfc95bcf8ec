"""The verdict after an attempt, and the line about a process that failed, by tables."""

from __future__ import annotations

import pytest

from distribute_jax.launch._process import last_error
from distribute_jax.launch._verdict import (
    AttemptOutcome,
    ProcessFailure,
    Progress,
    decide,
    pause_after,
)


def failure(code, process=1, error="", step=None, phase=""):
    return ProcessFailure(
        process=process, pid=4, host="a", code=code, error=error, step=step, phase=phase
    )


FAILED = AttemptOutcome(failure=failure(3), best_step=5)
CASES = {
    # outcome, progress before, exit code or None for a restart, fruitless restarts after
    "all well": (AttemptOutcome(), Progress(), 0, 0),
    "all well after restarts": (AttemptOutcome(best_step=1), Progress(2, 9, 1), 0, 2),
    "a first failure": (FAILED, Progress(), None, 0),
    "a first failure without a step": (AttemptOutcome(failure=failure(3)), Progress(), None, 0),
    "progress": (FAILED, Progress(4, 4, 2), None, 0),
    "no progress": (FAILED, Progress(1, 5, 0), None, 1),
    "none of three": (FAILED, Progress(3, 5, 2), 3, 3),
    "saved": (AttemptOutcome(all_saved=True, any_saved=True, best_step=6), Progress(1, 5), None, 0),
    "saved without end": (AttemptOutcome(all_saved=True, any_saved=True), Progress(3, 5, 2), 42, 3),
    "stopped": (AttemptOutcome(stop_signal=15), Progress(), 143, 0),
    "stopped and saved": (AttemptOutcome(stop_signal=15, all_saved=True), Progress(), 42, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_follows_from_outcome_and_progress(case):
    """Three restarts in a row may bring no progress."""
    outcome, before, code, fruitless = CASES[case]
    verdict = decide(outcome, before, 3)
    assert (verdict.exit_code, verdict.progress.fruitless) == (code, fruitless)
    assert bool(verdict.text) == (not case.startswith("all well"))
    assert verdict.progress.attempt == before.attempt + (code is None)


def test_pauses_grow_until_there_is_progress():
    """None after progress; otherwise doubled each time, up to a limit, and shown in the line."""
    assert [pause_after(i, 5.0) for i in range(6)] == [0, 1, 2, 4, 5, 5]
    assert pause_after(10_000, 30.0) == 30
    assert pause_after(3, 0.0) == 0
    verdict = decide(FAILED, Progress(2, 5, 1), 3, 30.0)
    assert verdict.pause == 2
    assert "restarting all in 2 s (restart 3; 2 of 3 allowed without progress)" in verdict.text
    assert decide(FAILED, Progress(2, 4, 1), 3, 30.0).pause == 0


def test_processes_killed_after_the_grace_period_are_named():
    """They may have lost something."""
    text = decide(AttemptOutcome(stop_signal=15, killed=(2, 3)), Progress(), 3).text
    assert "killed after the grace period, or at a second signal: process 2, 3" in text


LONG = failure(1, error="ValueError: " + "x" * 900 + " do y")
WORDS = {
    "signal": (failure(-11), "was ended by SIGSEGV before it reported a step"),
    "unknown signal": (failure(-63, step=2), "was ended by signal 63 at step 2"),
    "watchdog": (failure(43, step=2, phase="compiling"), "(exit code 43) at step 2, compiling"),
    "exception": (failure(1, error="ValueError: x", step=0), "with ValueError: x (exit code 1)"),
    "a long exception": (LONG, " … xxx"),
    "its advice": (LONG, "xxx do y (exit code 1)"),
    "another failed": (failure(44, error="process 0 failed"), "failed: process 0 failed (exit"),
    "hung": (
        failure(
            43,
            error="process 0 has been running step for 6 s without progress.\nAll processes of a job "
            "compute a step together. Where each is:\n"
            "  process 0 (a, pid 3): at step 5, running step for 6 s\n"
            "  process 7 (a, pid 4): at step 5, in your code   <- the others wait for it\n"
            "Every process has to run the same steps.",
        ),
        "process 7 (a, pid 4): at step 5, in your code   <- the others wait for it; process 1 (pid 4 on a) "
        "made no progress and was ended by its watchdog (exit code 43)",
    ),
    "waited at a barrier": (
        failure(
            1,
            error="DeadlineExceededError: Process 0 of 2 has waited 1 s for 'barrier here', which not every "
            "process has reached. Missing:\n  process 7 (b, pid 4): at step 0, in your code\nEvery process",
        ),
        "process has reached. Missing: process 7 (b, pid 4): at step 0, in your code (exit code 1)",
    ),
    "diverged": (
        failure(
            1,
            error="ProcessesDifferError: The processes diverged: they are no longer executing the same "
            "steps.\n  process 0: runs step with args[1] = 0.125\n  process 1: runs step with args[1] = "
            "0.25\nEvery process runs the same steps in the same order.",
        ),
        "same steps. process 0: runs step with args[1] = 0.125; process 1: runs step with args[1] = 0.25 (ex",
    ),
    "many details": (
        failure(1, error="CheckpointError: no\n" + "\n".join(f"  leaf {i}" for i in range(9))),
        "failed with CheckpointError: no leaf 0; leaf 1; leaf 2; leaf 3; and 5 more (exit code 1)",
    ),
    "JAX ended it": (
        failure(-6, error="process 2 is silent"),
        "SIGABRT (process 2 is silent) before",
    ),
    "nothing known": (failure(3), "failed (exit code 3) before it reported a step"),
}


@pytest.mark.parametrize("case", WORDS)
def test_the_end_of_a_process_is_one_line(case):
    """Which, where, how and at which step; the line begins with the awaited process."""
    ended, text = WORDS[case]
    assert str(ended).startswith(text if case == "hung" else "process 1 (pid 4 on a) ")
    assert text in str(ended)


OUTPUTS = {
    "E: these differ:\n  jax: 1, 2": "Traceback (most recent call last):\n  File\nE: these differ:\n"
    "  jax: 1, 2\nMake these equal.\n",
    "KeyError: 'b'": "noise\nTraceback (most recent call last):\n  x\nKeyError: 'a'\n\nDuring …:\n\n"
    "Traceback (most recent call last):\n  File\n    line\nKeyError: 'b'\n--------\nFor simplicity",
    "SyntaxError: invalid syntax": '  File "x.py", line 1\n    )\nSyntaxError: invalid syntax\n',
    "python: can't open file 'x'": "python: can't open file 'x'\n\n",
    "": "",
    # What C code wrote before it ended the process, and not the frames that follow.
    "Terminating process because the JAX distributed service detected fatal errors.": "E1122 12:00:00.1 9 "
    "a.cc:1] UNAVAILABLE\nF1122 12:00:00.1 9 client.h:80] Terminating process because the JAX distributed "
    "service detected fatal errors.\n*** Check failure stack trace: ***\n    @     0x7fa252ea71f5  (unknown)",
    "Fatal Python error: Aborted": "Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n"
    "  File x\n\nExtension modules: numpy (total: 1)",
}
STALE = ("WARNING:distribute_jax:model.d.rngs is not used", "x.py:3: UserWarning: old", "loss 0.5")


@pytest.mark.parametrize("wanted", OUTPUTS)
def test_the_last_error_is_the_exception(wanted):
    """That of the last traceback, or the last line."""
    assert last_error(OUTPUTS[wanted].splitlines()) == wanted


@pytest.mark.parametrize("line", STALE)
def test_ordinary_output_is_not_the_reason_of_a_failure(line):
    """A process that ends without a message, as by ``os._exit(7)``, has printed warnings and progress."""
    assert last_error([line], has_begun=True) == ""
    assert last_error([line]) == (line if line == "loss 0.5" else "")
