"""What happens after an attempt, and how the end of a process is put into words: by table."""

from __future__ import annotations

import pytest

from distribute_jax.launch._process import last_words
from distribute_jax.launch._verdict import Death, Outcome, Progress, decide, pause_after


def death(code, process=1, error="", step=None, phase=""):
    return Death(process=process, pid=4, host="a", code=code, error=error, step=step, phase=phase)


FAILED = Outcome(death=death(3), best=5)
CASES = {
    # outcomes, progress before, exit code or None for a restart, fruitless restarts after
    "all well": ([Outcome()], Progress(), 0, 0),
    "all well after restarts": ([Outcome(best=1)], Progress(2, 9, 1), 0, 2),
    "a first failure": ([FAILED], Progress(), None, 0),
    "a first failure without a step": ([Outcome(death=death(3))], Progress(), None, 0),
    "progress": ([FAILED], Progress(4, 4, 2), None, 0),
    "no progress": ([FAILED], Progress(1, 5, 0), None, 1),
    "none of three": ([FAILED], Progress(3, 5, 2), 3, 3),
    "progress on another machine": ([FAILED, Outcome(best=7)], Progress(3, 6, 2), None, 0),
    "saved": ([Outcome(all_saved=True, any_saved=True, best=6)], Progress(1, 5), None, 0),
    "saved without end": ([Outcome(all_saved=True, any_saved=True)], Progress(3, 5, 2), 42, 3),
    "told": ([Outcome(told=15)], Progress(), 143, 0),
    "told and saved": (
        [Outcome(told=15, all_saved=True), Outcome(all_saved=True)],
        Progress(),
        42,
        0,
    ),
    "told on another machine": ([FAILED, Outcome(told=2)], Progress(), 130, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_follows_from_outcomes_and_progress(case):
    """Three restarts in a row may bring nothing."""
    outcomes, before, code, fruitless = CASES[case]
    verdict = decide(outcomes, before, 3)
    assert (verdict.exit_code, verdict.progress.fruitless) == (code, fruitless)
    assert bool(verdict.text) == (not case.startswith("all well"))
    assert verdict.progress.attempt == before.attempt + (code is None)


def test_pauses_grow_until_there_is_progress():
    """None after progress; then twice as long each time, up to a bound, and said in the line."""
    assert [pause_after(i, 5.0) for i in range(6)] == [0, 1, 2, 4, 5, 5]
    assert pause_after(10_000, 30.0) == 30
    assert pause_after(3, 0.0) == 0
    verdict = decide([FAILED], Progress(2, 5, 1), 3, 30.0)
    assert verdict.pause == 2
    assert "all start again in 2 s (restart 3, 2 of 3 without progress)" in verdict.text
    assert decide([FAILED], Progress(2, 4, 1), 3, 30.0).pause == 0


def test_the_cause_is_who_did_not_end_because_of_another():
    """On whichever machine it was."""
    outcomes = [Outcome(death=death(44, 0)), Outcome(death=death(-6, 2))]
    assert "process 2 " in decide(outcomes, Progress(), 0).text
    assert "process 0 " in decide(outcomes[:1], Progress(), 0).text


def test_who_had_to_be_killed_after_the_grace_is_named():
    """Whoever did not end when it was told to may have lost something."""
    text = decide([Outcome(told=15), Outcome(told=15, killed=[2, 3])], Progress(), 3).text
    assert "killed, since they had not ended after the grace: process 2, 3" in text


WORDS = {
    "signal": (death(-11), "was ended by SIGSEGV before it reported a step"),
    "unknown signal": (death(-63, step=2), "was ended by signal 63 at step 2"),
    "watchdog": (death(43, step=2, phase="compiling"), "(exit code 43) at step 2, compiling"),
    "exception": (
        death(1, error="ValueError: x", step=0),
        "failed with ValueError: x (exit code 1)",
    ),
    "a long exception": (death(1, error="ValueError: " + "x" * 900 + " do y"), " … xxx"),
    "its advice": (death(1, error="ValueError: " + "x" * 900 + " do y"), "xxx do y (exit code 1)"),
    "no cause of its own": (death(44, error="process 0 failed"), "failed: process 0 failed (exit"),
    "JAX ended it": (
        death(-6, error="process 2 is silent"),
        "SIGABRT (process 2 is silent) before",
    ),
    "nothing known": (death(3), "failed (exit code 3) before it reported a step"),
}


@pytest.mark.parametrize("case", WORDS)
def test_the_end_of_a_process_is_one_line(case):
    """Which, where, how, and how far it was."""
    ended, text = WORDS[case]
    assert str(ended).startswith("process 1 (pid 4 on a) ")
    assert text in str(ended)


OUTPUTS = {
    "KeyError: 'b'": "noise\nTraceback (most recent call last):\n  x\nKeyError: 'a'\n\nDuring …:\n\n"
    "Traceback (most recent call last):\n  File\n    line\nKeyError: 'b'\n--------\nFor simplicity",
    "SyntaxError: invalid syntax": '  File "x.py", line 1\n    )\nSyntaxError: invalid syntax\n',
    "python: can't open file 'x'": "python: can't open file 'x'\n\n",
    "": "",
}


@pytest.mark.parametrize("wanted", OUTPUTS)
def test_the_last_words_are_the_exception(wanted):
    """Of the last traceback, or the last line."""
    assert last_words(OUTPUTS[wanted].splitlines()) == wanted
