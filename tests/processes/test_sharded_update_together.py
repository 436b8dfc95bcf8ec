"""A sharded update over the devices of two processes."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distribute_jax as dj
from distribute_jax.testing import LocalCluster

pytestmark = pytest.mark.exhaustive

X = np.random.default_rng(0).normal(size=(8, 16, 64)).astype(np.float32)


def tree_of(strategy):
    """Returns a model, and an optimizer whose state is sharded, except for the bias."""
    with strategy.scope():
        model = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
        tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01))
        return {"model": model, "optimizer": nnx.Optimizer(model, tx, wrt=nnx.Param)}


def train(strategy, tree, rows, options=None):
    """Returns losses and weights of a step on each of some batches, the last of them partial."""
    model, optimizer = tree["model"], tree["optimizer"]

    def step(x):
        loss, grads = nnx.value_and_grad(
            lambda m: dj.compute_average_loss(jnp.mean((m(x) - x[:, :32]) ** 2, -1))
        )(model)
        loss, grads = dj.get_replica_context().all_reduce("sum", (loss, grads))
        optimizer.update(model, grads)
        return loss

    losses = [
        float(strategy.run(step, args=(x,), options=options))
        for x in strategy.distribute_dataset([*rows, rows[-1][:11]])
    ]
    return losses, np.asarray(model.kernel[...])


def share_in_job(folder):
    """Trains, saves, goes on in another tree, and loads what one process has saved."""
    timeouts = dj.ClusterOptions(start_seconds=90, step_seconds=60)
    strategy = dj.MultiWorkerMirroredStrategy(cluster_options=timeouts, shard_optimizer_state=True)
    tree = tree_of(strategy)
    outcome = {"trained": train(strategy, tree, X[:4])}
    moments = tree["optimizer"].opt_state[1][0].mu
    outcome["shares"] = [shard.data.shape for shard in moments.kernel[...].addressable_shards]
    outcome["whole"] = [shard.data.shape for shard in moments.bias[...].addressable_shards]
    dj.check_in_sync(tree)
    dj.checkpoint.save(Path(folder) / "job", tree)
    # Another step binds the divided state again: processes that hold different shares have not diverged.
    outcome["verified"] = train(strategy, tree, X[4:6], dj.RunOptions(verify="first"))
    dj.checkpoint.load(Path(folder) / "alone", tree)
    outcome["loaded"] = train(strategy, tree, X[4:6])
    outcome["repr"] = repr(strategy)
    outcome["processes"] = jax.process_count()
    return outcome


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Returns results, checkpoint and resumed training of one process with four devices."""
    folder = tmp_path_factory.mktemp("shared")
    strategy = dj.MirroredStrategy([0, 1, 2, 3])
    tree = tree_of(strategy)
    trained = train(strategy, tree, X[:4])
    dj.checkpoint.save(folder / "alone", tree)
    return folder, trained, train(strategy, tree, X[4:6])


@pytest.fixture(scope="module")
def outcome(alone):
    """Returns the results of two processes with two devices each."""
    cluster = LocalCluster(2, 2, timeout=100)
    return [r.value for r in cluster.run(share_in_job, str(alone[0]))]


def assert_alike(got, wanted):
    """Asserts that losses and weights are equal."""
    for mine, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def test_two_processes_train_as_one_and_each_stores_its_shards(alone, outcome):
    """Losses and weights are those of mirrored state, also for another step, and when verified."""
    _, trained, later = alone
    for process in outcome:
        assert process["processes"] == 2
        assert_alike(process["trained"], trained)
        assert_alike(process["verified"], later)
        assert process["shares"] == [(64, 8)] * 2
        assert process["whole"] == [(32,)] * 2
        assert "shard_optimizer_state=True" in process["repr"]


def test_checkpoints_go_from_a_job_to_one_process_and_back(alone, outcome):
    """Saved by one process with mirrored state and loaded in the job, and the other way round."""
    folder, _, later = alone
    for process in outcome:
        assert_alike(process["loaded"], later)
    for strategy in (
        dj.MirroredStrategy([0, 1, 2, 3]),
        dj.MirroredStrategy([0, 1], shard_optimizer_state=True),
    ):
        tree = tree_of(strategy)
        dj.checkpoint.load(folder / "job", tree)
        assert_alike(train(strategy, tree, X[4:6]), later)
