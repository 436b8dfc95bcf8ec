"""Several processes compute as one: the same values, examples and weights as on one device."""

from __future__ import annotations

import hashlib
import warnings

import digits
import jax
import numpy as np
import pytest
from flax import nnx

import distribute_jax as dj
from distribute_jax.testing import LocalCluster

STEPS = 10
BATCH = 96


def strategy() -> dj.MultiWorkerMirroredStrategy:
    return dj.MultiWorkerMirroredStrategy(
        cluster_options=dj.ClusterOptions(start_seconds=90, step_seconds=60)
    )


def parts(value):
    """This process's values, as lists."""
    return [np.asarray(part).tolist() for part in value.values]


def ten_steps(strategy) -> dict:
    """Ten steps of the CNN on handwritten digits, with a partial batch in the middle."""
    train, _ = digits.load_data()
    steps = digits.make_steps(strategy)
    few = digits.Digits(train.images[: BATCH * 4 + 50], train.labels[: BATCH * 4 + 50])
    losses = [
        result.loss
        for epoch in range(2)
        for result in digits.train_epoch(strategy, steps, few, BATCH, epoch)
    ]
    assert len(losses) == STEPS
    model = steps.train.__closure__[0].cell_contents
    optimizer = steps.train.__closure__[1].cell_contents
    state = jax.tree.leaves((nnx.state(model), nnx.state(optimizer)))
    total = hashlib.sha256()
    for leaf in state:
        for shard in leaf.addressable_shards:
            total.update(np.asarray(shard.data).tobytes())
    own = [
        hashlib.sha256(np.asarray(leaf.addressable_data(0)).tobytes()).digest() for leaf in state
    ]
    return {"losses": losses, "state": hashlib.sha256(b"".join(own)).hexdigest()}


def train():
    return ten_steps(strategy())


def compute():
    """Values, reductions, gathers, barriers."""
    s = strategy()
    me = jax.process_index()
    resolver = s.cluster_resolver
    workers = resolver.cluster_spec().as_dict()["worker"]
    outcome = {
        "task": (resolver.task_type, resolver.task_id, len(workers)),
        "chief": dj.is_chief(),
        "replicas": s.num_replicas_in_sync,
    }
    made = s.experimental_distribute_values_from_function(
        lambda context: 10.0 * me + context.replica_id_in_sync_group
    )
    outcome["made"] = parts(made)
    doubled = s.run(lambda x: 2 * x, args=(made,))
    outcome["doubled"] = [float(v) for v in s.experimental_local_results(doubled)]
    outcome["sum"], outcome["mean"] = float(s.reduce("sum", made)), float(s.reduce("mean", made))
    rows = s.run(lambda x: jax.numpy.stack([x, -x]), args=(made,))
    outcome["gathered"] = np.asarray(s.gather(rows, axis=0)).tolist()
    outcome["gathered inside"] = np.asarray(
        s.run(lambda x: dj.get_replica_context().all_gather(x[None], axis=0), args=(made,))
    ).tolist()
    with s.scope():
        variable = dj.Variable(1.0)
    outcome["updated"] = s.extended.update(variable, lambda v: "done", group=False)
    s.barrier("half way", timeout=30)
    return outcome


def seed_differently():
    """First values that are others on each process."""
    s, outcome, me = strategy(), {}, jax.process_index()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with s.scope():
            late = dj.Variable(5.0 + me, name="late")
            model = nnx.Dict(kernel=nnx.Param(np.full(2, 7.0 + me, np.float32)))
        outcome["late"] = float(np.asarray(s.run(lambda: late + 0.0)))
        outcome["seeded"] = np.asarray(s.run(lambda: model.kernel + 0.0)).tolist()
    outcome["warnings"] = [str(one.message) for one in caught if "same values" in str(one.message)]
    return outcome


def dataset(s, source, **options):
    """Each element as this process's parts."""
    given = s.distribute_dataset(source, dj.InputOptions(**options) if options else None)
    return [parts(x) for x in given]


def batches(n, size):
    return lambda: iter([np.arange(n)[i : i + size] for i in range(0, n, size)])


def read():
    """The cases of two workers with one replica each, as the reference has them."""
    s = strategy()
    me = jax.process_index()
    files = {"a": np.arange(4), "b": np.arange(10, 14), "c": np.arange(20, 24)}

    def shard(context):
        per = context.get_per_replica_batch_size(8)
        numbers = np.arange(14).reshape(-1, 2)
        mine = np.concatenate([np.arange(i, min(i + per, 14)) for i in range(0, 14, 2 * per)])
        if context.input_pipeline_id:
            mine = np.setdiff1d(numbers.ravel(), mine)
        return [mine[i : i + per] for i in range(0, len(mine), per)]

    three = dj.data.from_files(["a", "b", "c"], read=files.__getitem__).batch(4)
    outcome = {
        "93 data": dataset(s, batches(16, 4)),
        "93 off": dataset(s, batches(16, 4), auto_shard_policy="off"),
        "95": dataset(s, batches(5, 2)),
        "96 data": dataset(s, batches(6, 3)),
        "96 off": dataset(s, batches(6, 3), auto_shard_policy="off"),
        "99 file": dataset(s, three),
        "99 data": dataset(s, three, auto_shard_policy="data"),
        "107": [parts(x) for x in s.distribute_datasets_from_function(shard)],
        "contexts": [],
    }
    made = s.experimental_distribute_values_from_function(
        lambda c: 10 * c.replica_id_in_sync_group + c.num_replicas_in_sync
    )
    packed = dj.experimental.CommunicationOptions(bytes_per_pack=4)
    outcome["22"] = [int(v) for v in s.experimental_local_results(made)]
    outcome["32"] = [s.reduce("sum", 1.0), s.reduce("sum", 1 + me), s.reduce("mean", 1 + me)]
    outcome["52"] = s.run(
        lambda: dj.get_replica_context().all_reduce(
            "sum", jax.numpy.array([1.0, 2.0]), options=packed
        )
    )
    # Of different lengths: worker 1 goes on with padding alone, and nothing counts it.
    own = s.distribute_datasets_from_function(lambda c: [np.ones(2)] * (2 + me))
    outcome["uneven"] = [float(s.reduce("sum", x, axis=0)) for x in own]
    outcome["uneven counts"] = [x.counts for x in own]
    # A pass that is left early does not disturb the next one.
    again = s.distribute_dataset(batches(8, 4), dj.InputOptions(auto_shard_policy="off"))
    for _ in again:
        break
    outcome["after a break"] = [parts(x) for x in again]
    arrays = dj.data.from_arrays(np.arange(12.0)).shuffle(seed=3).batch(4)
    iterator = iter(s.distribute_dataset(arrays))
    first = parts(next(iterator))
    resumed = iter(s.distribute_dataset(arrays))
    resumed.restore(iterator.state())
    outcome["resumed"] = [parts(x) for x in iterator] == [parts(x) for x in resumed]
    outcome["first"] = first
    for name, source, options in (
        ("one file", dj.data.from_files(["a"], read=files.__getitem__).batch(2), "file"),
        ("nothing", batches(4 * me, 2), "off"),
        ("dtypes", lambda: iter([np.ones(2, [np.float32, np.int32][me])]), "off"),
        ("fails", lambda: iter(fail(me)), "off"),
    ):
        try:
            outcome[name] = dataset(s, source, auto_shard_policy=options)
        except (ValueError, OSError) as error:
            outcome[name] = str(error)
    return outcome


def fail(me):
    yield np.ones(2)
    if me == 1:
        raise OSError("the disk is gone")
    yield np.ones(2)


@pytest.fixture(scope="module")
def two_by_two():
    """The results of two processes with two devices each."""
    return [result.value for result in LocalCluster(2, 2).run(compute)]


@pytest.fixture(scope="module")
def steps():
    """The results of ten training steps in two processes with two devices each."""
    return [result.value for result in LocalCluster(2, 2).run(train)]


@pytest.mark.exhaustive
def test_values_reductions_and_gathers_are_those_of_all_processes(two_by_two):
    """Each process makes and sees its own replicas' values; what is combined is the same on all."""
    first, second = two_by_two
    assert (first["task"], second["task"]) == (("worker", 0, 2), ("worker", 1, 2))
    assert (first["chief"], second["chief"]) == (True, False)
    assert (first["made"], second["made"]) == ([0.0, 1.0], [12.0, 13.0])
    assert (first["doubled"], second["doubled"]) == ([0.0, 2.0], [24.0, 26.0])
    for outcome in two_by_two:
        assert outcome["replicas"] == 4
        assert (outcome["sum"], outcome["mean"]) == (26.0, 6.5)
        assert outcome["gathered"] == [0.0, -0.0, 1.0, -1.0, 12.0, -12.0, 13.0, -13.0]
        assert outcome["gathered inside"] == [0.0, 1.0, 12.0, 13.0]
        assert list(outcome["updated"]) == ["done", "done"]


def test_first_values_that_differ_become_those_of_process_0():
    """5 and 6 become 5 on both, and so do the weights of a module; one warning for each, on one
    process, names the first leaf."""
    first, second = (result.value for result in LocalCluster(2, 1).run(seed_differently))
    assert first["late"] == second["late"] == 5.0
    assert first["seeded"] == second["seeded"] == [7.0, 7.0]
    assert second["warnings"] == []
    assert ["late" in first["warnings"][0], "kernel" in first["warnings"][1]] == [True, True]


@pytest.mark.exhaustive
def test_ten_steps_of_four_processes_are_those_of_two(steps):
    """The digits CNN with a partial batch: 2 × 2 and 4 × 1 to the last bit of losses, weights and Adam."""
    four_by_one = [result.value for result in LocalCluster(4, 1).run(train)]
    runs = steps + four_by_one
    assert all(run == runs[0] for run in runs[1:])


@pytest.mark.exhaustive
def test_ten_steps_are_those_of_one_process_and_of_one_device(steps):
    """The digits CNN with a partial batch: the same on both processes; 1 × 4 and one device to 1e-5."""
    assert steps[0] == steps[1]
    for alone in (dj.MirroredStrategy([0, 1, 2, 3]), dj.OneDeviceStrategy("cpu:0")):
        losses = ten_steps(alone)["losses"]
        np.testing.assert_allclose(steps[0]["losses"], losses, rtol=1e-5)


@pytest.mark.exhaustive
def test_two_workers_read_the_values_of_the_reference():
    """The cases of two workers, the limits of FILE, and sources that end, differ or fail on one process."""
    first, second = (result.value for result in LocalCluster(2, 1).run(read))
    rows = {
        "93 data": ([[0, 1], [4, 5], [8, 9], [12, 13]], [[2, 3], [6, 7], [10, 11], [14, 15]]),
        "93 off": ([[i, i + 1] for i in range(0, 16, 2)],) * 2,
        "95": ([[0], [2], [4]], [[1], [3], []]),
        "96 data": ([[0, 1], [3, 4]], [[2], [5]]),
        "96 off": ([[0, 1], [2], [3, 4], [5]], [[0], [1, 2], [3], [4, 5]]),
        "99 file": ([[0, 1], [2, 3], [20, 21], [22, 23]], [[10, 11], [12, 13], [], []]),
        "99 data": ([[0, 1], [10, 11], [20, 21]], [[2, 3], [12, 13], [22, 23]]),
        "107": ([[0, 1, 2, 3], [8, 9, 10, 11]], [[4, 5, 6, 7], [12, 13]]),
    }
    for name, wanted in rows.items():
        for outcome, mine in zip((first, second), wanted, strict=True):
            assert [only for (only,) in outcome[name]] == mine, name
    assert (first["22"], second["22"]) == ([2], [12])
    for outcome in (first, second):
        assert [float(v) for v in (*outcome["32"], *outcome["52"])] == [2.0, 3.0, 1.5, 2.0, 4.0]
        assert outcome["uneven"] == [4.0, 4.0, 2.0]
        assert outcome["uneven counts"] == [None, None, (0, 2)]
        assert outcome["after a break"] == [[[0.0, 1.0]], [[2.0, 3.0]], [[4.0, 5.0]], [[6.0, 7.0]]]
        assert outcome["resumed"]
        assert "at least 2 files" in outcome["one file"]
        assert "Process 0 has no batches" in outcome["nothing"]
        assert "process 1" in outcome["dtypes"]
        assert "int32" in outcome["dtypes"]
    assert "The input of process 1 failed" in first["fails"]
