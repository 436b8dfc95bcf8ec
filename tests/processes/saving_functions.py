"""Programs of the processes for the tests of saving and loading."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from leaves import sum_on_read

import distribute_jax as dj
from distribute_jax.checkpoint import _agreement, _save_load


def strategy_of(processes):
    """The strategy of a job, or of one process with the same devices."""
    if processes == 1:
        return dj.MirroredStrategy([0, 1, 2, 3])
    timeouts = dj.ClusterOptions(start_seconds=90, step_seconds=60)
    return dj.MultiWorkerMirroredStrategy(cluster_options=timeouts)


def tree_of(strategy, seed=0):
    """Returns a tree with each kind of leaf, as a job stores it."""
    with strategy.scope():
        model = nnx.Linear(3, 2, rngs=nnx.Rngs(seed))
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
        count = sum_on_read()
        keys = nnx.Rngs(seed, noise=seed + 1)
    rows = jax.NamedSharding(strategy.mesh, jax.P("data"))
    table = np.arange(8, dtype=np.float32).reshape(4, 2) + seed
    x = np.arange(36, dtype=np.float32).reshape(12, 3)
    batches = dj.data.from_arrays((x, x[:, :2])).shuffle(seed=7).batch(4)
    return {
        "model": model,
        "optimizer": optimizer,
        "count": count,
        "keys": keys,
        "iterator": iter(strategy.distribute_dataset(batches)),
        "best": 0.1 + seed,
        "host": np.arange(2) + seed,
        "divided": jax.make_array_from_callback((4, 2), rows, lambda index: table[index]),
    }


def train(strategy, tree, steps):
    """Takes some steps."""
    model, optimizer, count = tree["model"], tree["optimizer"], tree["count"]

    def step(x, y):
        gradients = nnx.grad(lambda m: dj.compute_average_loss(jnp.sum((m(x) - y) ** 2, -1)))(model)
        optimizer.update(model, dj.get_replica_context().all_reduce("sum", gradients))
        count.assign_add(jnp.sum(x))

    for _ in range(steps):
        strategy.run(step, args=next(tree["iterator"]))


def numbers(tree):
    """Returns all values of a tree, as this process reads them."""
    flat = {}
    for name in ("model", "optimizer"):
        for path, v in nnx.to_flat_state(nnx.state(tree[name])):
            flat[f"{name}.{'.'.join(map(str, path))}"] = np.asarray(v.get_raw_value())
    return {
        **flat,
        "count": tree["count"].numpy(),
        "key": np.asarray(jax.random.key_data(tree["keys"].noise.key[...])),
        "best": tree["best"],
        "host": np.asarray(tree["host"]),
        "position": tree["iterator"].state()["position"],
        "divided": whole(tree["divided"]),
    }


def whole(array):
    """Returns the complete value of an array that is sharded over the processes."""
    to = jax.NamedSharding(array.sharding.mesh, jax.P())
    return np.asarray(jax.jit(lambda x: x, out_shardings=to)(array).addressable_data(0))


def message(call):
    """Returns the class and the text of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def loaded(folder, strategy):
    """Returns the values of a tree after loading."""
    tree = tree_of(strategy, seed=3)
    dj.checkpoint.load(folder, tree)
    return numbers(tree)


def pass_on(folder, name, saved):
    """Loads what others saved, and saves it under another name."""
    tree = tree_of(strategy_of(4), seed=3)
    dj.checkpoint.load(Path(folder) / saved, tree)
    dj.checkpoint.save(Path(folder) / name, tree)
    return numbers(tree)


def keep_steps(folder, saved):
    """All calls of managers, and their errors, in one job."""
    strategy, folder, me = strategy_of(2), Path(folder), jax.process_index()
    tree = tree_of(strategy, seed=3)
    dj.checkpoint.load(folder / saved, tree)
    outcome = {"loaded": numbers(tree)}
    dj.checkpoint.save(folder / "two by two", tree)
    train(strategy, tree, 1)
    outcome["trained"] = numbers(tree)
    tree = tree_of(strategy)
    manager = dj.CheckpointManager(folder / "steps", max_to_keep=2)
    outcome["first"] = manager.restore_latest(tree)
    wanted = []
    for step in (1, 2, 3):
        train(strategy, tree, 1)
        wanted.append(numbers(tree))
        outcome[f"saved {step}"] = manager.save(step, tree)
    outcome["steps"] = manager.all_steps()
    outcome["again"] = message(lambda: manager.save(3, tree))
    other = tree_of(strategy, 5)
    with (
        mock.patch.object(_save_load, "read_leaves", _damaged_on_1(3)),
        warnings.catch_warnings(record=True) as w,
    ):
        warnings.simplefilter("always")
        outcome["restored"] = manager.restore_latest(other)
    outcome["warnings"] = [str(one.message) for one in w if "damaged" in str(one.message)]
    outcome["as saved"] = _equal(numbers(other), wanted[1])
    outcome["left"] = manager.all_steps()

    timed = dj.CheckpointManager(folder / "timed", every_minutes=1000.0)
    timed._schedule._time -= 100_000 * me  # on process 1 it would be time
    outcome["by the clock"] = [timed.save(step, tree) for step in (1, 2)]

    outcome["differ"] = message(
        lambda: dj.checkpoint.save(folder / "no", {"a": 1, "b": {"me": me}})
    )
    outcome["more"] = message(
        lambda: dj.checkpoint.save(folder / "no", dict.fromkeys("ab"[: 1 + me], 1))
    )
    outcome["other step"] = message(lambda: manager.save(8 + me, tree))
    outcome["forced"] = message(lambda: manager.save(8, tree, force=me == 1))
    outcome["unlike"] = message(lambda: [manager.all_steps, manager.wait][me]())
    with mock.patch.object(_agreement, "VISIBILITY_SECONDS", 0.2):
        apart = dj.CheckpointManager(folder / f"of process {me}")
        outcome["apart"] = message(lambda: apart.save(1, tree))
        outcome["apart, at first"] = message(lambda: apart.restore_latest(tree))
    (folder / "full").mkdir(exist_ok=True)
    (folder / "full" / "notes.txt").write_text("mine")
    outcome["chief"] = message(lambda: dj.checkpoint.save(folder / "full", tree))
    broken = dj.CheckpointManager(folder / "broken")
    broken.save(1, tree)
    broken.wait()
    if me == 0:
        shutil.rmtree(folder / "broken")
        (folder / "broken").write_text("a file")
    outcome["returns"] = broken.save(2, tree, force=True)
    outcome["later"] = message(broken.wait)
    outcome["missing"] = message(lambda: dj.checkpoint.load(folder / "nowhere", tree))
    misfit = {**tree, "best": "none"} if me else tree
    outcome["misfit on 1"] = message(lambda: manager.restore_latest(misfit))
    outcome["no step"] = message(lambda: manager.restore(9, tree))
    outcome["still"] = _equal(numbers(tree), wanted[-1])
    return outcome


def _damaged_on_1(step):
    """Makes a step look damaged to process 1."""
    real = _save_load.read_leaves

    def read(directory, name, manifest, slots):
        if jax.process_index() == 1 and manifest.step == step:
            raise dj.CheckpointDamagedError("a disk of process 1 is bad")
        return real(directory, name, manifest, slots)

    return read


def _equal(left, right):
    return sorted(left) == sorted(right) and all(np.array_equal(left[k], right[k]) for k in left)
