"""What the processes of a job do in the tests of computing and reading together."""

from __future__ import annotations

import hashlib
import warnings

import digits
import jax
import numpy as np
from flax import nnx

import distribute_jax as dj

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
    """Values, reductions, gathers, seeds that differ, barriers."""
    s = strategy()
    me = jax.process_index()
    resolver = s.cluster_resolver
    told = {
        "task": (
            resolver.task_type,
            resolver.task_id,
            len(resolver.cluster_spec().as_dict()["worker"]),
        ),
        "chief": dj.is_chief(),
        "replicas": s.num_replicas_in_sync,
    }
    made = s.experimental_distribute_values_from_function(
        lambda context: 10.0 * me + context.replica_id_in_sync_group
    )
    told["made"] = parts(made)
    doubled = s.run(lambda x: 2 * x, args=(made,))
    told["doubled"] = [float(v) for v in s.experimental_local_results(doubled)]
    told["sum"], told["mean"] = float(s.reduce("sum", made)), float(s.reduce("mean", made))
    rows = s.run(lambda x: jax.numpy.stack([x, -x]), args=(made,))
    told["gathered"] = np.asarray(s.gather(rows, axis=0)).tolist()
    told["gathered inside"] = np.asarray(
        s.run(lambda x: dj.get_replica_context().all_gather(x[None], axis=0), args=(made,))
    ).tolist()
    s.barrier("half way", timeout=30)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with s.scope():
            late = dj.Variable(5.0 + me, name="late")
            model = nnx.Linear(3, 2, rngs=nnx.Rngs(me))
        x = np.ones((1, 3), np.float32)
        told["late"] = float(np.asarray(s.run(lambda: late + 0.0)))
        told["seeded"] = np.asarray(s.run(lambda: model(x))).tolist()
    told["warnings"] = [str(one.message) for one in caught if "same values" in str(one.message)]
    return told


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

    told = {
        "93 data": dataset(s, batches(16, 4)),
        "93 off": dataset(s, batches(16, 4), auto_shard_policy="off"),
        "95": dataset(s, batches(5, 2)),
        "96 data": dataset(s, batches(6, 3)),
        "96 off": dataset(s, batches(6, 3), auto_shard_policy="off"),
        "99 file": dataset(s, dj.data.from_files(["a", "b", "c"], read=files.__getitem__).batch(4)),
        "99 data": dataset(
            s,
            dj.data.from_files(["a", "b", "c"], read=files.__getitem__).batch(4),
            auto_shard_policy="data",
        ),
        "107": [parts(x) for x in s.distribute_datasets_from_function(shard)],
        "contexts": [],
    }
    # Of different lengths: worker 1 goes on with padding alone, and nothing counts it.
    own = s.distribute_datasets_from_function(lambda c: [np.ones(2)] * (2 + me))
    told["uneven"] = [float(s.reduce("sum", x, axis=0)) for x in own]
    told["uneven counts"] = [x.counts for x in own]
    # A pass that is left early does not disturb the next one.
    again = s.distribute_dataset(batches(8, 4), dj.InputOptions(auto_shard_policy="off"))
    for _ in again:
        break
    told["after a break"] = [parts(x) for x in again]
    arrays = dj.data.from_arrays(np.arange(12.0)).shuffle(seed=3).batch(4)
    iterator = iter(s.distribute_dataset(arrays))
    first = parts(next(iterator))
    resumed = iter(s.distribute_dataset(arrays))
    resumed.restore(iterator.state())
    told["resumed"] = [parts(x) for x in iterator] == [parts(x) for x in resumed]
    told["first"] = first
    for name, source, options in (
        ("one file", dj.data.from_files(["a"], read=files.__getitem__).batch(2), "file"),
        ("nothing", batches(4 * me, 2), "off"),
        ("dtypes", lambda: iter([np.ones(2, [np.float32, np.int32][me])]), "off"),
        ("fails", lambda: iter(fail(me)), "off"),
    ):
        try:
            told[name] = dataset(s, source, auto_shard_policy=options)
        except (ValueError, OSError) as error:
            told[name] = str(error)
    return told


def fail(me):
    yield np.ones(2)
    if me == 1:
        raise OSError("the disk is gone")
    yield np.ones(2)
