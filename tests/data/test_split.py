"""How many examples each replica gets: TensorFlow's rules A and B, for one worker and several."""

import pytest

from distribute_jax.data._split import Division, schedule, scheduled_rows, shares


@pytest.mark.parametrize(
    ("n", "replicas", "expected"),
    [
        (8, 4, (2, 2, 2, 2)),
        (6, 4, (2, 2, 2, 0)),  # a run of ceil(6 / 4) each, so the last replica has nothing left
        (2, 4, (1, 1, 0, 0)),
        (5, 2, (3, 2)),
        (1, 2, (1, 0)),
        (9, 8, (2, 2, 2, 2, 1, 0, 0, 0)),
        (7, 1, (7,)),
        (0, 3, (0, 0, 0)),
    ],
)
def test_shares_are_consecutive_runs_of_the_ceiling(
    n: int, replicas: int, expected: tuple[int, ...]
):
    """The reference's table: full runs first, then a shorter one, then empty ones."""
    assert shares(n, replicas) == expected


def test_only_short_shares_are_counted():
    """A batch that fills every share has no counts, so it runs the program without a mask."""
    assert Division.of((2, 2, 2, 2), 2) == Division(2, None)
    assert Division.of((2, 2, 2, 0), 2) == Division(2, (2, 2, 2, 0))
    assert Division.of((2, 2, 2, 2), 3) == Division(3, (2, 2, 2, 2))


@pytest.mark.parametrize(
    ("full", "workers", "replicas", "expected"),
    [
        (7, 2, 2, [(2, 2, 2, 1), (2, 1, 2, 2)]),
        (8, 2, 2, [(2, 2, 2, 2), (2, 2, 2, 2)]),
        (6, 4, 1, [(2, 2, 1, 1), (2, 1, 1, 2), (1, 1, 2, 2), (1, 2, 2, 1)]),
        (5, 2, 1, [(3, 2), (2, 3)]),
        (3, 2, 2, [(1, 1, 1, 0), (1, 0, 1, 1)]),
        (10, 2, 3, [(2, 2, 2, 2, 1, 1), (2, 1, 1, 2, 2, 2)]),
    ],
)
def test_schedules_of_rule_b(full: int, workers: int, replicas: int, expected: list):
    """Acceptance 98: TensorFlow's schedules for global batch, workers and local replicas."""
    assert [schedule(full, workers, w, replicas) for w in range(workers)] == expected


@pytest.mark.parametrize(
    ("n", "full", "replicas", "expected"),
    [
        (2, 8, 4, (2, 0, 0, 0)),  # rule A gives (1, 1, 0, 0)
        (6, 6, 4, (2, 2, 1, 1)),  # rule A gives (2, 2, 2, 0)
        (5, 8, 4, (2, 2, 1, 0)),
        (3, 6, 4, (2, 1, 0, 0)),
    ],
)
def test_a_partial_batch_fills_the_schedule_in_order(
    n: int, full: int, replicas: int, expected: tuple[int, ...]
):
    """Acceptance 87: where rule B differs from rule A."""
    [step] = scheduled_rows(n, full, 1, 0, replicas)
    assert tuple(map(len, step)) == expected


def test_a_full_batch_takes_as_many_steps_on_every_worker():
    """Workers that find nothing in a step of rule B take it nevertheless, so all stay in step."""
    steps = [scheduled_rows(2, 2, 2, worker, 2) for worker in range(2)]
    assert [[[len(r) for r in step] for step in worker] for worker in steps] == [
        [[1, 1], [0, 0]],
        [[0, 0], [1, 1]],
    ]
