"""Sharding: the choice of the policy, and the schedules of rule B."""

import re

import numpy as np
import pytest

import distribute_jax as dj
from distribute_jax._errors import ArgumentError
from distribute_jax.data import AutoShardPolicy
from distribute_jax.data._split import choose_policy, schedule
from distribute_jax.data.sources import Source, find_source

OFF, AUTO, FILE, DATA = (AutoShardPolicy[name] for name in ("OFF", "AUTO", "FILE", "DATA"))


def files(count: int, auto_shard_policy: str | None = None) -> Source:
    """A source of some files, with a policy set on it as on a tf.data.Dataset."""
    paths = [str(i) for i in range(count)]
    source = find_source(dj.data.from_files(paths, lambda path: [int(path)]).batch(1))
    source.auto_shard_policy = auto_shard_policy
    return source


THREE, MEMORY = files(3), find_source([np.arange(2)])


@pytest.mark.parametrize(
    ("asked", "source", "workers", "expected"),
    [
        (None, THREE, 2, FILE),
        (AUTO, THREE, 2, FILE),
        (AUTO, THREE, 3, FILE),
        (AUTO, THREE, 1, DATA),  # nothing to shard: TensorFlow's rule A
        (FILE, THREE, 3, FILE),
        (FILE, MEMORY, 1, FILE),  # nothing to shard, so no file is missed
        (DATA, THREE, 2, DATA),
        (OFF, THREE, 2, OFF),
        (OFF, MEMORY, 1, OFF),
        (AUTO, MEMORY, 2, DATA),
        (None, files(3, "OFF"), 2, OFF),
        (None, files(3, "DATA"), 2, DATA),
        (FILE, files(3, "OFF"), 2, FILE),  # the user's option comes first
    ],
)
def test_which_policy_applies(
    asked: AutoShardPolicy | None, source: Source, workers: int, expected: AutoShardPolicy
):
    """The user's option, then that of the source, then AUTO, which is FILE if there are enough files."""
    assert choose_policy(asked, source, workers) is expected


def test_auto_with_too_few_files_falls_back_to_data_with_a_warning():
    """Acceptance 100: TensorFlow raises here; the warning has both figures and the remedy."""
    with pytest.warns(UserWarning, match=r"reads 1 files for 2 processes.*auto_shard_policy"):
        assert choose_policy(AUTO, files(1), 2) is DATA


@pytest.mark.parametrize("source", [files(1), MEMORY], ids=["one file", "no file"])
def test_file_without_a_file_for_each_worker_is_an_error(source: Source):
    """Acceptance 100: FILE is obeyed or refused, and the message names the source and DATA."""
    with pytest.raises(
        ArgumentError, match=rf"{re.escape(source.text)}.*auto_shard_policy=\"data\""
    ):
        choose_policy(FILE, source, 2)


def test_a_hint_of_a_source_is_refused_by_name():
    """The option HINT of a tf.data source cannot be fulfilled."""
    with pytest.raises(ArgumentError, match=r"from_files.* has the option .*HINT"):
        choose_policy(None, files(1, "HINT"), 1)
    assert choose_policy(OFF, files(1, "HINT"), 1) is OFF


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
