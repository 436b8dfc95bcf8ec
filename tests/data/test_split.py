"""How many examples each replica gets: TensorFlow's rule A."""

import pytest

from distribute_jax.data._split import divide, shares


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


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_shares_lose_no_example_and_never_grow(replicas: int):
    """Shares add up to the batch and never grow along the replicas, for every batch size."""
    for n in range(40):
        found = shares(n, replicas)
        assert len(found) == replicas
        assert sum(found) == n
        assert list(found) == sorted(found, reverse=True)


def test_only_short_shares_are_counted():
    """A batch that fills every share has no counts, so it runs the program without a mask."""
    assert divide(8, 4, 2).counts is None
    assert divide(6, 4, 2).counts == (2, 2, 2, 0)
    assert divide(8, 4, 3).counts == (2, 2, 2, 2)
