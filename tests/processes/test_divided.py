"""Arrays that are divided among the processes: each writes what it holds, and reads what it needs."""

from __future__ import annotations

import os

import divided_functions
import jax
import numpy as np
import pytest
from saving_functions import strategy_of

import distribute_jax as dj
from distribute_jax.testing import LocalCluster

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("divided")


@pytest.fixture(scope="module")
def two_by_two(folder):
    """What two processes with two devices each told."""
    cluster = LocalCluster(2, 2, timeout=120)
    return [r.value for r in cluster.run(divided_functions.save_divided, str(folder))]


def test_each_process_writes_its_parts_and_reads_them_alone(two_by_two):
    """By the names of the files: the leaf, and where its part begins."""
    names = {"columns": 0, "keys": 1, "same": 2, "step": 3, "table": 4, "tiny": 5}
    for me, told in enumerate(two_by_two):
        for leaf, rows in (("table", (0, 2, 4, 6)), ("keys", (0, 1, 2, 3))):
            first, second = (
                f"parts-{i}/{names[leaf]}_{row}_0"
                for i in (0, 1)
                for row in rows[2 * i : 2 * i + 1]
            )
            assert {first, second} <= set(told["files"])
        divided = [name for name in told["read"] if name.count("_") > 0]
        assert divided
        assert {name.partition("/")[0] for name in divided} == {f"parts-{me}"}
        assert f"parts-1/{names['same']}" in told["files"], "process 1 took its share"
        assert f"parts-1/{names['same']}" in told["read"], "and all read it"
        assert told["same layout"]


def test_divided_becomes_mirrored_and_divided_again(two_by_two):
    """Every bit, on both processes; also through a bucket, here of local files."""
    for told in two_by_two:
        assert told["mirrored"]
        assert told["divided again"]
        assert told["bucket"] == (None, True)
        assert told["from the bucket"] == (4, True)


def test_other_numbers_of_processes_read_them(folder, two_by_two):
    """One process with 4 devices, and one device: every bit."""
    del two_by_two
    for strategy in (strategy_of(1), dj.OneDeviceStrategy("cpu:0")):
        data = strategy.num_replicas_in_sync > 1
        tree = divided_functions.tree_of(strategy, 5, divided=data)
        dj.checkpoint.load(folder / "parts", tree)
        wanted = divided_functions.values(1)
        np.testing.assert_array_equal(tree["table"][...], wanted["table"])
        np.testing.assert_array_equal(tree["columns"], wanted["columns"])
        np.testing.assert_array_equal(tree["same"], wanted["same"])
        np.testing.assert_array_equal(jax.random.key_data(tree["keys"]), wanted["keys"])


def test_four_processes_read_a_quarter_each(folder, two_by_two):
    """Two processes have saved; each of four loads only the file with its rows."""
    del two_by_two
    cluster = LocalCluster(4, 1, timeout=120)
    told = [r.value for r in cluster.run(divided_functions.load_in_four, str(folder), "parts")]
    for me, (is_right, names) in enumerate(told):
        assert is_right
        assert [name for name in names if "/4_" in name] == [f"parts-{me // 2}/4_{2 * me}_0"]


def test_damage_in_the_part_of_one_process_sets_the_step_aside_for_all(two_by_two):
    """Process 1 finds it; both go to the step before, with one warning."""
    first, second = two_by_two
    for told in two_by_two:
        assert told["damaged"][0] == 1
        assert told["the one before"]
    (warning,) = first["damaged"][1]
    assert "step 2 is damaged" in warning
    assert "parts-1" in warning
    assert second["damaged"][1] == []


def test_a_process_that_is_killed_as_it_writes_lets_nobody_wait(tmp_path):
    """The other ends by itself; the step before is whole, and the next save removes what is left over."""
    cluster = LocalCluster(2, 1, timeout=60, grace=None)
    results = cluster.run(
        divided_functions.killed_as_it_writes, str(tmp_path / "steps"), check=False
    )
    assert results[1].signal == "SIGKILL"
    assert not results[0].ended_by_cluster
    assert results[0].exit_code != 0
    manager = dj.CheckpointManager(tmp_path / "steps")
    assert manager.all_steps() == [1]
    manager.save(2, {"x": 1})
    manager.wait()
    assert sorted(path.name for path in (tmp_path / "steps").iterdir()) == ["1", "2"]


FAILURES = {
    "full": [
        r"process 1 (",
        "failed: The checkpoint",
        "File too large",
        "bytes, and",
        "free there",
    ],
    "full, chief": ["steps/3 could not be written", "File too large"],
    "no rights": ["process 1 (", "Permission denied"],
    "late": ["not every process has written its part. Missing: process 1 ("],
    "apart": ["process 1 (", "has written its part, which process 0 (", "all of them see"],
}


@pytest.mark.parametrize("case", FAILURES)
def test_what_one_process_cannot_write_is_told_on_all(two_by_two, case: str):
    """One class, who it was and why; nothing is left over, older steps count, the next save works."""
    for told in two_by_two:
        if case == "no rights" and os.getuid() != 0:
            assert case not in told  # nobody but root can drop rights and take them back
            return
        assert told[case][0] == "CheckpointFileError", told[case][1]
        for text in FAILURES[case]:
            assert text in told[case][1], told[case][1]
        assert told["left"] == ["1", "2.damaged"]
        assert told["at last"] == (True, ["nothing", ""])
        assert told["steps"] == [1, 3]
