"""Variables, snapshots and checks over processes: the numbers of one process, the same errors on all."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import saving_functions
from flax import nnx
from leaves import sum_on_read
from saving_functions import message, strategy_of

import distribute_jax as dj
from distribute_jax.testing import LocalCluster

pytestmark = pytest.mark.exhaustive

ON_READ = dj.VariableSynchronization.ON_READ
X = np.arange(15, dtype=np.float32).reshape(5, 3) / 10


def values_in_job():
    strategy, me = strategy_of(2), jax.process_index()
    outcome = {"variables": variables(strategy), "checks": checks(strategy)}
    outcome["default"] = compared_by_default(strategy)

    def longer(context):
        return np.ones(context.replica_id_in_sync_group + 1)

    outcome["uneven"] = message(
        lambda: strategy.experimental_distribute_values_from_function(longer)
    )
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
    outcome["out of sync"] = message(lambda: dj.check_in_sync({"kernel": odd}))
    kept = dj.snapshot({"kernel": kernel})
    kernel[...] += 1
    outcome["snapshot"] = [np.asarray(kept["kernel"][...]), np.asarray(kernel[...])]
    return outcome


def unread_in_job():
    """Sums of what each of many steps returned, and reads of many variables, before any of them is needed."""
    strategy = strategy_of(2)
    aggregation = dj.VariableAggregation.SUM
    with strategy.scope():
        seen = [
            dj.Variable(jnp.zeros(64), synchronization=ON_READ, aggregation=aggregation)
            for _ in range(24)
        ]

    def step():
        number = dj.get_replica_context().replica_id_in_sync_group
        for variable in seen:
            variable.assign_add(jnp.full(64, number))
        return [jnp.full((8, 64), number + i) for i in range(24)]

    for _ in range(20):
        values = strategy.run(step)
        sums = [strategy.reduce("sum", value) for value in values]
        joined = [strategy.gather(value, axis=0) for value in values]
        reads = [variable.read_value() for variable in seen]
    return [float(sum(jnp.sum(x) for x in part)) / 64 for part in (sums, joined, reads)]


def variables(strategy):
    """ON_READ variables: each replica adds its number; how they read, and after they were assigned."""
    kinds = ("SUM", "MEAN", "ONLY_FIRST_REPLICA", "NONE")
    with strategy.scope():
        made = functools.partial(dj.Variable, jnp.array([1.0, 2.0]), synchronization=ON_READ)
        own = {k: made(aggregation=dj.VariableAggregation[k], name=k) for k in kinds}

    def step():
        for variable in own.values():
            variable.assign_add(jnp.full(2, dj.get_replica_context().replica_id_in_sync_group))

    strategy.run(step)
    outcome = {"values": {k: [np.asarray(v) for v in own[k].values] for k in kinds}}
    outcome["none"] = message(own.pop("NONE").numpy)
    outcome["read"] = {kind: variable.numpy() for kind, variable in own.items()}
    for variable in own.values():
        variable.assign([5.0, 6.0])
        variable[0] = 9.0
    outcome["assigned"] = {kind: variable.numpy() for kind, variable in own.items()}
    own["MEAN"].assign_add([1.0, 1.0])
    outcome["added"] = own["MEAN"].numpy()
    return outcome


def checks(strategy):
    """Steps on a partial batch: equal to one device, four times too large, and one that sees padding."""
    with strategy.scope():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        seen = sum_on_read()

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
    outcome = {"rows": np.asarray(rows), "seen": float(seen.numpy())}
    before = np.asarray(model.kernel[...])
    outcome["wrong"] = message(lambda: run(wrong, 4, verify="always"))
    outcome["leaks"] = message(lambda: run(leaks, 5))
    outcome["kept"] = np.array_equal(before, np.asarray(model.kernel[...]))
    outcome["still seen"] = float(seen.numpy())
    return outcome


def compared_by_default(strategy):
    """Returns what ``verify="auto"`` says of right and wrong steps, and what they left in the bias."""

    def run(loss_of, bad=False, normalize=lambda model, h: h, reduction="sum"):
        with strategy.scope():
            model = nnx.Dict(
                first=nnx.Linear(3, 4, rngs=nnx.Rngs(0)), norm=nnx.BatchNorm(4, rngs=nnx.Rngs(0)),
                last=nnx.Linear(4, 1, rngs=nnx.Rngs(1)),
            )  # fmt: skip
            optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

        def step(x):
            if bad and x.shape[0] == 4 and jax.process_index() == 1:
                raise ValueError("the whole batch does not fit here")

            def loss(model):
                h = jax.nn.relu(normalize(model, model.first(x)))
                return loss_of(model, jnp.square(model.last(h)[:, 0] - 1))

            gradients = nnx.grad(loss)(model)
            optimizer.update(model, dj.get_replica_context().all_reduce(reduction, gradients))

        (batch,) = strategy.distribute_dataset([X[:4]])
        options = dj.RunOptions(verify="auto")
        error = message(lambda: strategy.run(step, args=(batch,), options=options))
        return error, float(model.last.bias[0])

    def part(model, losses):
        return dj.compute_average_loss(losses)

    def penalty(model, losses):
        return part(model, losses) + jnp.sum(model.first.kernel[...] ** 2)

    return {
        "right": run(part),
        "mean": run(lambda model, losses: losses.mean()),
        "penalty": run(penalty),
        "batch norm": run(part, normalize=lambda model, h: model.norm(h)),
        "of parts": run(part, normalize=lambda model, h: model.norm(h), reduction="mean"),
        "one cannot": run(part, bad=True),
    }


@pytest.fixture(scope="module")
def two_by_two():
    """The results of two processes with two devices each."""
    return [r.value for r in LocalCluster(2, 2).run(values_in_job)]


def test_sums_gathers_and_reads_in_flight_finish():
    """Their collectives do not depend on each other, and there are more than threads, as many as devices."""
    cluster = LocalCluster(2, 2, timeout=60, environment={"NPROC": "2"})
    of_parts = sum(4 * i + 6 for i in range(24))
    for result in cluster.run(unread_in_job):
        assert result.value == [8 * of_parts, 8 * of_parts, 24 * 20 * 6]


def test_each_process_has_its_replicas_components_and_all_read_the_same(two_by_two):
    """1 and 2, to which replica i adds i: sums 7 and 8, means 2.5 and 3.5, the first's 1 and 2."""
    for process, outcome in enumerate(two_by_two):
        found = outcome["variables"]
        first = [[1.0, 2.0], [2.0, 2.0]][process]
        np.testing.assert_equal(found["values"]["SUM"], np.array([first, [2 * process + 1] * 2]))
        for kind in ("MEAN", "ONLY_FIRST_REPLICA", "NONE"):
            wanted = [[1.0 + i, 2.0 + i] for i in (2 * process, 2 * process + 1)]
            np.testing.assert_equal(found["values"][kind], np.array(wanted))
        np.testing.assert_equal(found["read"]["SUM"], [7.0, 8.0])
        np.testing.assert_equal(found["read"]["MEAN"], [2.5, 3.5])
        np.testing.assert_equal(found["read"]["ONLY_FIRST_REPLICA"], [1.0, 2.0])
        for read in found["assigned"].values():
            np.testing.assert_equal(read, [9.0, 6.0])
        np.testing.assert_equal(found["added"], [10.0, 7.0])
        assert found["none"][0] == "ArgumentError"
        assert "aggregation=NONE" in found["none"][1]


def test_values_of_different_shapes_are_refused(two_by_two):
    """Each process sees only its own two, and would combine these."""
    for outcome in two_by_two:
        assert outcome["uneven"][0] == "UnsupportedError"
        assert "float64[1], float64[2], float64[3], float64[4]" in outcome["uneven"][1]


def test_the_device_that_is_out_of_sync_is_named_on_all(two_by_two):
    """Process 1 has another number on its second device; what is in sync passes."""
    for outcome in two_by_two:
        kind, text = outcome["out of sync"]
        assert kind == "OutOfSyncError"
        assert "of process 1 unequal to cpu:0 of process 0" in text


def test_a_snapshot_does_not_change(two_by_two):
    """While the variable goes on."""
    for outcome in two_by_two:
        np.testing.assert_equal(
            outcome["snapshot"], np.array([np.ones((2, 2)), np.full((2, 2), 2.0)])
        )


def test_steps_are_checked_against_one_device_and_against_padding(two_by_two):
    """As in one process: rows in order, the ratio 4 and the leak are found by all, and state stays."""
    alone = checks(saving_functions.strategy_of(1))
    for outcome in [*(one["checks"] for one in two_by_two), alone]:
        np.testing.assert_allclose(outcome["rows"], X.sum(-1), rtol=1e-6)
        assert outcome["wrong"][0] == "NotEqualError"
        assert "4.000 = number of replicas" in outcome["wrong"][1]
        assert outcome["leaks"][0] == "PaddingLeakError"
        assert outcome["kept"]
        assert (outcome["seen"], outcome["still seen"]) == (5.0, 5.0)


def test_steps_are_compared_with_one_device_by_default(two_by_two):
    """Right ones train as in one process; if one process cannot compare a step, none does."""
    alone = compared_by_default(saving_functions.strategy_of(1))
    for outcome in [*(one["default"] for one in two_by_two), alone]:
        for name in ("right", "batch norm", "one cannot"):
            assert outcome[name][0] == ["nothing", ""]
            assert outcome[name][1] == pytest.approx(alone[name][1], rel=1e-5) != 0
        assert outcome["one cannot"] == outcome["right"]
        for name, ratio in (("mean", "4.000"), ("penalty", ""), ("of parts", "0.250")):
            (kind, text), bias = outcome[name]
            assert kind == "NotEqualError"
            assert ratio in text
            assert bias == 0
