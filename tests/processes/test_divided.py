"""Arrays that are sharded over the processes: each writes its shards, and reads what it needs."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
import warnings
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saving_functions
from flax import nnx
from saving_functions import message, strategy_of

import distribute_jax as dj
from distribute_jax.checkpoint import _agreement, _read, _write
from distribute_jax.testing import LocalCluster

pytestmark = pytest.mark.exhaustive

ROWS, WIDE = 8, 300
LIMIT = 1000
"""Bytes of the largest file where a disk is full; a part of the table has 2400."""


def placed(strategy, value, *spec):
    """An array sharded as a spec says."""
    sharding = jax.NamedSharding(strategy.mesh, jax.P(*spec))
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def values(seed):
    """The numbers of a tree, on the host."""
    table = np.arange(ROWS * WIDE, dtype=np.float32).reshape(ROWS, WIDE) + seed
    return {
        "table": table,
        "columns": table[:2, :8].astype(jnp.bfloat16),
        "same": table[0] * 2,
        "tiny": table[1, :3].astype(np.int8),
        "keys": np.asarray(jax.random.key_data(jax.random.split(jax.random.key(seed), 4))),
    }


def tree_of(strategy, seed, *, divided=True):
    """Sharded arrays of several kinds and mirrored ones; or the same, all mirrored."""
    host, data = values(seed), ("data",) if divided else ()
    own = jax.NamedSharding(strategy.mesh, jax.P(*data))
    key_data = placed(strategy, host["keys"], *data)
    keys = jax.jit(jax.random.wrap_key_data, out_shardings=own)(key_data)
    return {
        "table": nnx.Variable(placed(strategy, host["table"], *data)),
        "columns": placed(strategy, host["columns"], None, *data),
        "same": placed(strategy, host["same"]),
        "tiny": placed(strategy, host["tiny"]),
        "keys": keys,
        "step": seed,
    }


def numbers(tree):
    """All of them, as every process reads them."""
    arrays = {name: tree[name] for name in ("columns", "same", "tiny")}
    arrays["table"] = tree["table"][...]
    arrays["keys"] = jax.jit(jax.random.key_data)(tree["keys"])
    return {name: saving_functions.whole(array) for name, array in arrays.items()}


def is_as(tree, seed):
    """Returns whether a tree has the values of a seed, and every array its former sharding."""
    found, wanted = numbers(tree), values(seed)
    return tree["step"] == seed and all(np.array_equal(found[k], wanted[k]) for k in wanted)


@contextmanager
def seen_reads():
    """Collects which parts this process reads."""
    read, names = _read.read_bytes, []

    def noted(folder, wanted):
        names.extend(f"{folder.name}/{name}" for name in wanted)
        return read(folder, wanted)

    with mock.patch.object(_read, "read_bytes", noted):
        yield names


@contextmanager
def only_on(process, context):
    """Opens a context in one process alone."""
    if jax.process_index() != process:
        yield
        return
    with context:
        yield


@contextmanager
def full_disk():
    """Limits the size of files, which a program sees as a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def no_rights():
    """What a process may write that is not root, nor the owner."""
    os.seteuid(65534)
    yield
    os.seteuid(0)


def restored(manager, tree):
    """Returns the step that was restored, the warnings, and the values of the tree."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = manager.restore_latest(tree)
    return step, [str(one.message) for one in caught if "damaged" in str(one.message)]


def save_divided(folder):
    """Everything in one job of two processes with two devices each."""
    strategy, folder, me = strategy_of(2), Path(folder), jax.process_index()
    outcome = {}
    # So that process 1 takes some of the mirrored ones.
    with mock.patch.object(_write, "_MIN_BYTES_PER_WRITER", 600):
        dj.checkpoint.save(folder / "parts", tree_of(strategy, 1))
    manifest = json.loads((folder / "parts" / "manifest.json").read_text())["content"]
    outcome["files"] = sorted(file for file in manifest["files"] if "parts-" in file)

    tree = tree_of(strategy, 5)
    before = tree["table"][...].sharding
    with seen_reads() as names:
        dj.checkpoint.load(folder / "parts", tree)
    outcome["read"] = sorted(names)
    outcome["same layout"] = is_as(tree, 1) and tree["table"][...].sharding == before
    mirrored = tree_of(strategy, 5, divided=False)
    dj.checkpoint.load(folder / "parts", mirrored)
    outcome["mirrored"] = is_as(mirrored, 1)
    dj.checkpoint.save(folder / "mirrored", mirrored)
    dj.checkpoint.load(folder / "mirrored", tree_of(strategy, 7) | tree)
    outcome["divided again"] = is_as(tree, 1)

    url = f"file://{folder}/bucket"
    with dj.CheckpointManager(url) as bucket:
        outcome["bucket"] = bucket.restore_latest(dict(tree)), bucket.save(4, tree)
    other = tree_of(strategy, 5)
    outcome["from the bucket"] = bucket.restore_latest(other), is_as(other, 1)
    outcome |= _failures(strategy, folder, tree, me)
    return outcome


def _failures(strategy, folder, tree, me):
    outcome = {}
    manager = dj.CheckpointManager(folder / "steps", max_to_keep=2)
    for step in (1, 2):
        manager.save(step, tree_of(strategy, step))
    manager.wait()
    if me == 0:
        part = next((folder / "steps" / "2").glob("arrays-*/parts-1/*"))
        part.write_bytes(b"x" * part.stat().st_size)
    strategy.barrier("damaged")
    other = tree_of(strategy, 9)
    outcome["damaged"] = restored(manager, other)
    outcome["the one before"] = is_as(other, 1)

    def fails(number, context):
        with context:
            manager.save(number, other)
            return message(manager.wait)

    outcome["full"] = fails(3, only_on(1, full_disk()))
    outcome["full, chief"] = fails(3, only_on(0, full_disk()))
    if os.getuid() == 0:
        outcome["no rights"] = fails(3, only_on(1, no_rights()))

    def slow(folder, named):
        time.sleep(4)
        folder.mkdir()

    late = mock.patch.object(_write, "write_bytes", slow)
    two_seconds = property(lambda _: 2.0, lambda *_: None)
    with mock.patch.object(_agreement.WriteCoordinator, "_seconds", two_seconds, create=True):
        outcome["late"] = fails(3, only_on(1, late))
    apart = mock.patch("distribute_jax.checkpoint._storage.DiskDirectory.write")
    with mock.patch.object(_agreement, "VISIBILITY_SECONDS", 0.2):
        outcome["apart"] = fails(3, only_on(1, apart))
    outcome["left"] = sorted(path.name for path in (folder / "steps").iterdir())
    outcome["at last"] = manager.save(3, other), message(manager.wait)
    outcome["steps"] = manager.all_steps()
    return outcome


def killed_as_it_writes(directory):
    """Process 1 is killed within its second save."""
    strategy = dj.MultiWorkerMirroredStrategy(
        cluster_options=dj.ClusterOptions(step_seconds=5, heartbeat_seconds=5, shutdown_seconds=3)
    )

    def kill(folder, named):
        os.kill(os.getpid(), signal.SIGKILL)

    manager = dj.CheckpointManager(directory)
    manager.save(1, tree_of(strategy, 1))
    manager.wait()
    with only_on(1, mock.patch.object(_write, "write_bytes", kill)):
        manager.save(2, tree_of(strategy, 2))
        manager.wait()


def load_in_four(folder, name):
    """Loads in four processes what two saved, and returns what this one read."""
    strategy = strategy_of(4)
    tree = tree_of(strategy, 5)
    with seen_reads() as names:
        dj.checkpoint.load(Path(folder) / name, tree)
    return is_as(tree, 1), sorted(names)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("divided")


@pytest.fixture(scope="module")
def two_by_two(folder):
    """The results of two processes with two devices each."""
    cluster = LocalCluster(2, 2, timeout=120)
    return [r.value for r in cluster.run(save_divided, str(folder))]


def test_each_process_writes_its_parts_and_reads_them_alone(two_by_two):
    """By the names of the files: the leaf, and the start of the part."""
    names = {"columns": 0, "keys": 1, "same": 2, "step": 3, "table": 4, "tiny": 5}
    for me, outcome in enumerate(two_by_two):
        for leaf, rows in (("table", (0, 2, 4, 6)), ("keys", (0, 1, 2, 3))):
            first, second = (
                f"parts-{i}/{names[leaf]}_{row}_0"
                for i in (0, 1)
                for row in rows[2 * i : 2 * i + 1]
            )
            assert {first, second} <= set(outcome["files"])
        divided = [name for name in outcome["read"] if name.count("_") > 0]
        assert divided
        assert {name.partition("/")[0] for name in divided} == {f"parts-{me}"}
        assert f"parts-1/{names['same']}" in outcome["files"], "process 1 took its share"
        assert f"parts-1/{names['same']}" in outcome["read"], "and all read it"
        assert outcome["same layout"]


def test_sharded_state_becomes_mirrored_and_sharded_again(two_by_two):
    """Every bit, on both processes; also through a bucket, here of local files."""
    for outcome in two_by_two:
        assert outcome["mirrored"]
        assert outcome["divided again"]
        assert outcome["bucket"] == (None, True)
        assert outcome["from the bucket"] == (4, True)


def test_other_numbers_of_processes_restore_it(folder, two_by_two):
    """One process with 4 devices, and one device: every bit."""
    del two_by_two
    for strategy in (strategy_of(1), dj.OneDeviceStrategy("cpu:0")):
        data = strategy.num_replicas_in_sync > 1
        tree = tree_of(strategy, 5, divided=data)
        dj.checkpoint.load(folder / "parts", tree)
        wanted = values(1)
        np.testing.assert_array_equal(tree["table"][...], wanted["table"])
        np.testing.assert_array_equal(tree["columns"], wanted["columns"])
        np.testing.assert_array_equal(tree["same"], wanted["same"])
        np.testing.assert_array_equal(jax.random.key_data(tree["keys"]), wanted["keys"])


def test_four_processes_read_a_quarter_each(folder, two_by_two):
    """Two processes have saved; each of four loads only the file with its rows."""
    del two_by_two
    cluster = LocalCluster(4, 1, timeout=120)
    outcome = [r.value for r in cluster.run(load_in_four, str(folder), "parts")]
    for me, (is_right, names) in enumerate(outcome):
        assert is_right
        assert [name for name in names if "/4_" in name] == [f"parts-{me // 2}/4_{2 * me}_0"]


def test_damage_in_the_part_of_one_process_sets_the_step_aside_for_all(two_by_two):
    """Process 1 detects it; both restore the step before, with one warning."""
    first, second = two_by_two
    for outcome in two_by_two:
        assert outcome["damaged"][0] == 1
        assert outcome["the one before"]
    (warning,) = first["damaged"][1]
    assert "step 2 is damaged" in warning
    assert "parts-1" in warning
    assert second["damaged"][1] == []


def test_nobody_waits_for_a_process_that_is_killed_while_it_writes(tmp_path):
    """The other exits; the step before is complete, and the next save removes what is left over."""
    cluster = LocalCluster(2, 1, timeout=60, grace=None)
    results = cluster.run(killed_as_it_writes, str(tmp_path / "steps"), check=False)
    assert results[1].signal == "SIGKILL"
    assert not results[0].ended_by_cluster
    assert results[0].exit_code != 0
    manager = dj.CheckpointManager(tmp_path / "steps")
    assert manager.all_steps() == [1]
    manager.save(2, {"x": 1})
    manager.wait()
    assert sorted(path.name for path in (tmp_path / "steps").iterdir()) == ["1", "2"]


FAILURES = {
    "full": ["process 1 (", "failed: The checkpoint", "File too large", "bytes, and", "free there"],
    "full, chief": ["steps/3 could not be written", "File too large"],
    "no rights": ["process 1 (", "Permission denied"],
    "late": ["not every process has written its part. Missing: process 1 ("],
    "apart": ["process 1 (", "has written its part, which process 0 (", "all of them see"],
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_write_error_of_one_process_is_raised_on_all(two_by_two, case: str):
    """With the same class, the process and the reason; nothing is left over, and the next save works."""
    for outcome in two_by_two:
        if case == "no rights" and os.getuid() != 0:
            assert case not in outcome  # nobody but root can drop rights and take them back
            return
        assert outcome[case][0] == "CheckpointFileError", outcome[case][1]
        for text in FAILURES[case]:
            assert text in outcome[case][1], outcome[case][1]
        assert outcome["left"] == ["1", "2.damaged"]
        assert outcome["at last"] == (True, ["nothing", ""])
        assert outcome["steps"] == [1, 3]
