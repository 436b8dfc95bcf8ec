"""Processes that part after their steps were compared end with the place where they did."""

from __future__ import annotations

import course_functions
import pytest

from distribute_jax.processes._divergence import Course
from distribute_jax.testing import LocalCluster


def ended(function):
    """Runs two processes that are to fail, and gives what they wrote."""
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
        """Gives what is stored below a folder."""
        return {key[len(folder) :]: text for key, text in self.items() if key.startswith(folder)}


def two_courses():
    """Gives the courses of two processes that have done the same so far."""
    board = Board()
    courses = [Course(index, 2, board) for index in range(2)]
    for course in courses:
        course.note("runs step", b"program")
    return courses


def look(courses):
    """Lets both watchdogs look twice; gives what they found."""
    return [course.look() for course in (*courses, *courses)]


def test_processes_that_do_the_same_are_not_disturbed():
    """Also where one is ahead of the other while they are compared."""
    first, second = two_courses()
    first.note("runs step with x = 1.0")
    assert look((first, second)) == [None] * 4
    second.note("runs step with x = 1.0")
    assert look((first, second)) == [None] * 4
    first.publish()
    second.settle_own()
    assert (first.settle(), second.settle()) == (None, None)


def test_the_first_difference_is_named_on_both():
    """The error names what each did, at the next thing that either does."""
    courses = two_courses()
    for number, course in enumerate(courses):
        course.note(f"runs step with x = {number}.5")
        course.note("runs step with x = 3.0")
    look(courses)
    for course in courses:
        with pytest.raises(RuntimeError, match=r"process 0: .*x = 0.5\n  process 1: .*x = 1.5"):
            course.note("runs step with x = 4.0")


def test_a_difference_that_is_shown_in_no_number_is_found_too():
    """Another program of the same name."""
    courses = two_courses()
    for number, course in enumerate(courses):
        course.note("runs step", b"program %d" % number)
    look(courses)
    with pytest.raises(RuntimeError, match="parted"):
        courses[1].note("runs step")


def test_one_step_more_is_found_at_the_end():
    """Process 1 ends with a step that process 0 never ran."""
    first, second = two_courses()
    second.note("runs step with x = 9.0")
    first.publish()
    second.settle_own()
    assert "nothing more" in first.settle()


@pytest.mark.slow
def test_a_number_that_differs_is_found_while_the_job_runs():
    """A host number is the same on all replicas by its nature; each process passes another one."""
    text = ended(course_functions.passes_another_number)
    assert "add with args[0] = 0.125" in text
    assert "= 0.25" in text


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (course_functions.writes_another_value, ["= 6.0, written between steps", "= 7.0"]),
        (
            course_functions.runs_another_step,
            ["process 0: runs prepared.<locals>.add", "process 1: runs prepared.<locals>.take"],
        ),
        (course_functions.parts_at_the_end, ["= 0.125", "= 0.25"]),
    ],
)
def test_processes_that_part_are_told_where(function, words):
    """Values written between steps, other steps, and programs that end before anybody looked."""
    text = ended(function)
    assert [word for word in words if word not in text] == []


@pytest.mark.slow
def test_processes_that_do_the_same_end_well():
    """No false alarm for values, snapshots, steps and reductions that change alike; other batches warn."""
    results = LocalCluster(2, 1, timeout=90).run(course_functions.stays_together)
    assert results[0].value == results[1].value


@pytest.mark.exhaustive
def test_batches_that_differ_give_a_warning():
    """Under the default policy every process reads the same batches, or is told that it does not."""
    told = [r.value for r in LocalCluster(2, 1).run(course_functions.shuffles_otherwise)]
    assert [len(of_process) for of_process in told] == [1, 0]
