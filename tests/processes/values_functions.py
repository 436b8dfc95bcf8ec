"""What the processes of a job do in the tests of values, variables and checks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from saving_functions import message, strategy_of

import distribute_jax as dj

ON_READ = dj.VariableSynchronization.ON_READ
X = np.arange(15, dtype=np.float32).reshape(5, 3) / 10


def values_in_job():
    strategy, me = strategy_of(2), jax.process_index()
    told = {"variables": variables(strategy), "checks": checks(strategy)}

    def longer(context):
        return np.ones(context.replica_id_in_sync_group + 1)

    told["uneven"] = message(lambda: strategy.experimental_distribute_values_from_function(longer))
    kernel = nnx.Param(jnp.ones((2, 2)))
    with strategy.scope():
        kernel = nnx.Param(jnp.ones((2, 2)))
    dj.check_in_sync(kernel)
    shards = [
        jax.device_put(np.asarray(shard.data) + (me == 1 and i == 1), shard.device)
        for i, shard in enumerate(kernel.get_raw_value().addressable_shards)
    ]
    sharding = kernel.get_raw_value().sharding
    odd = jax.make_array_from_single_device_arrays((2, 2), sharding, shards)
    told["out of sync"] = message(lambda: dj.check_in_sync({"kernel": odd}))
    kept = dj.snapshot({"kernel": kernel})
    kernel[...] += 1
    told["snapshot"] = [np.asarray(kept["kernel"][...]), np.asarray(kernel[...])]
    return told


def variables(strategy):
    """ON_READ variables: each replica adds its number; how they read, and after they were assigned."""
    kinds = ("SUM", "MEAN", "ONLY_FIRST_REPLICA", "NONE")
    with strategy.scope():
        own = {
            kind: dj.Variable(
                jnp.array([1.0, 2.0]),
                synchronization=ON_READ,
                aggregation=dj.VariableAggregation[kind],
                name=kind,
            )
            for kind in kinds
        }

    def step():
        for variable in own.values():
            variable.assign_add(jnp.full(2, dj.get_replica_context().replica_id_in_sync_group))

    strategy.run(step)
    told = {"values": {k: [np.asarray(v) for v in own[k].values] for k in kinds}}
    told["none"] = message(own.pop("NONE").numpy)
    told["read"] = {kind: variable.numpy() for kind, variable in own.items()}
    for variable in own.values():
        variable.assign([5.0, 6.0])
        variable[0] = 9.0
    told["assigned"] = {kind: variable.numpy() for kind, variable in own.items()}
    own["MEAN"].assign_add([1.0, 1.0])
    told["added"] = own["MEAN"].numpy()
    return told


def checks(strategy):
    """Steps on a partial batch: equal to one device, four times too large, and one that sees padding."""
    with strategy.scope():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        seen = dj.Variable(0.0, synchronization=ON_READ, aggregation=dj.VariableAggregation.SUM)

    def train(mean, x):
        gradients = nnx.grad(lambda m: mean(jnp.sum((m(x) - 1) ** 2, -1)))(model)
        optimizer.update(model, dj.get_replica_context().all_reduce("sum", gradients))
        return jnp.sum(x, -1)

    def right(x):
        seen.assign_add(jnp.sum(dj.get_replica_context().batch_mask))
        return train(dj.compute_average_loss, x)

    def wrong(x):
        return train(jnp.mean, x)

    def leaks(x):
        seen.assign_add(jnp.sum(jnp.ones_like(x)))

    def run(step, rows, **options):
        (batch,) = strategy.distribute_dataset([X[:rows]])
        return strategy.run(step, args=(batch,), options=dj.RunOptions(**options))

    rows = strategy.gather(run(right, 5, verify="first"), axis=0)
    told = {"rows": np.asarray(rows), "seen": float(seen.numpy())}
    before = np.asarray(model.kernel[...])
    told["wrong"] = message(lambda: run(wrong, 4, verify="always"))
    told["leaks"] = message(lambda: run(leaks, 5))
    told["kept"] = np.array_equal(before, np.asarray(model.kernel[...]))
    told["still seen"] = float(seen.numpy())
    return told
