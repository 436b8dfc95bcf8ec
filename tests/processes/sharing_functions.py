"""What the processes of a job do in the tests of a sharded update."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import distribute_jax as dj

X = np.random.default_rng(0).normal(size=(8, 16, 64)).astype(np.float32)


def tree_of(strategy):
    """A model, and an optimizer whose state is divided, but for the bias."""
    with strategy.scope():
        model = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
        tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01))
        return {"model": model, "optimizer": nnx.Optimizer(model, tx, wrt=nnx.Param)}


def train(strategy, tree, rows, options=None):
    """A step on each of some batches, the last of them partial; gives the losses and the weights."""
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
    told = {"trained": train(strategy, tree, X[:4])}
    moments = tree["optimizer"].opt_state[1][0].mu
    told["shares"] = [shard.data.shape for shard in moments.kernel[...].addressable_shards]
    told["whole"] = [shard.data.shape for shard in moments.bias[...].addressable_shards]
    dj.check_in_sync(tree)
    dj.checkpoint.save(Path(folder) / "job", tree)
    # Another step binds the divided state again: processes that hold different shares have not diverged.
    told["verified"] = train(strategy, tree, X[4:6], dj.RunOptions(verify="first"))
    dj.checkpoint.load(Path(folder) / "alone", tree)
    told["loaded"] = train(strategy, tree, X[4:6])
    told["repr"] = repr(strategy)
    told["processes"] = jax.process_count()
    return told
