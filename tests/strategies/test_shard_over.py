"""``FullyShardedStrategy(shard_over=k)``: groups of k devices shard the state, and each group has all of it.

Sums are taken in another order than with ``MirroredStrategy``, first in a group and then over the groups. So
numbers agree to rounding, or bitwise if the sums are exact.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import long
from flax import nnx
from jax.experimental import io_callback
from jax.sharding import PartitionSpec
from leaves import assert_same_bits
from test_fully_sharded import MODELS, assert_close, collectives, made, program, trained, values

import distribute_jax as dj


def grouped(devices: int, shard_over: int | None, each: int = 1) -> dj.Strategy:
    numbers = list(range(devices))
    return dj.FullyShardedStrategy(numbers, shard_over=shard_over, replicas_per_device=each)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "devices", "shard_over", "each"),
    [
        ("loop", 4, 2, 1), ("remat", 4, 2, 1), ("remat", 8, 4, 1), ("remat", 8, 2, 1), ("remat", 4, 2, 2),
        ("loop", 8, 4, 1), ("scan", 8, 2, 1), ("dropout", 8, 4, 1), ("convolution", 8, 4, 1),
    ],
)  # fmt: skip
def test_training_equals_mirrored(name: str, devices: int, shard_over: int, each: int) -> None:
    """Each device has the bytes of one of k devices."""
    strategy = grouped(devices, shard_over, each)
    model, optimizer = made(strategy, MODELS[name])
    got = trained(strategy, model, optimizer)
    mirrored = dj.MirroredStrategy(list(range(devices)), replicas_per_device=each)
    assert strategy.num_replicas_in_sync == devices * each
    assert_close(got, trained(mirrored, *made(mirrored, MODELS[name])))
    for leaf in jax.tree.leaves(nnx.state((model, optimizer))):
        shards = leaf.addressable_shards
        divided = not leaf.is_fully_replicated
        assert {s.data.size for s in shards} == {leaf.size // (shard_over if divided else 1)}
        assert len(shards) == devices
    dj.check_in_sync((model, optimizer))


@pytest.mark.parametrize("shard_over", [4, long(2)])
def test_a_step_sees_all_replicas_and_exact_sums_are_bitwise_equal(shard_over: int) -> None:
    rng = np.random.default_rng(0)
    start = rng.integers(-2, 3, (64, 32)).astype(np.float32)
    rows = rng.integers(-1, 2, (16, 64)).astype(np.float32)
    runs = []
    for strategy in (dj.MirroredStrategy(list(range(8))), grouped(8, shard_over)):
        with strategy.scope():
            weights, speed = nnx.Param(jnp.asarray(start)), nnx.Variable(jnp.zeros((64, 32)))

        def step(x: jax.Array, w: Any = weights, v: Any = speed) -> Any:
            gradient = jax.grad(lambda w: ((x @ w) ** 2).sum())(w[...])
            v[...] = 0.5 * v[...] + jax.lax.psum(gradient, "data")
            w[...] = w[...] - 0.25 * v[...]
            replica = jax.lax.axis_index("data")
            return replica, jax.lax.psum(replica, "data"), x.sum()

        (batch,) = strategy.distribute_dataset([rows])
        outs = strategy.run(step, args=(batch,))
        rows_and_sums = jax.tree.map(np.asarray, strategy.experimental_local_results(outs))
        runs.append((rows_and_sums, values((weights, speed))))
    assert_same_bits(*runs)


@pytest.mark.exhaustive
def test_collectives_stay_in_groups() -> None:
    """Gathers and reduce-scatters are in a group; a sum over the groups follows each reduce-scatter."""
    found, groups = [], []
    for strategy in (grouped(4, None), grouped(4, 2)):
        trained(strategy, *made(strategy, MODELS["remat"]), (16,))
        found.append(collectives(strategy))
        flat = program(strategy).step
        groups.append(str(jax.make_jaxpr(flat.function)(*flat.avals)))
    more = found[1] - found[0]
    assert (more, found[0] - found[1]) == ({"all_reduce": found[0]["reduce_scatter"]}, {})
    assert set(re.findall(r"axis_index_groups=(\(.*?\)\))", groups[1])) == {
        "((0, 1), (2, 3))", "((0, 2), (1, 3))",
    }  # fmt: skip


@pytest.mark.exhaustive
def test_one_group_compiles_the_program_without_groups() -> None:
    programs = []
    for strategy in (grouped(4, None), grouped(4, 4)):
        trained(strategy, *made(strategy, MODELS["scan"]), (16,))
        step = program(strategy).step
        programs.append(jax.jit(step.function).lower(*step.avals).as_text())
    assert programs[0] == programs[1]


def test_create_placement_and_plan() -> None:
    """A plan is for groups of k, as many as there are."""
    strategy = grouped(8, 4)
    assert repr(strategy).endswith(", shard_over=4)")
    layer = strategy.create(lambda: nnx.Linear(64, 36, use_bias=False, rngs=nnx.Rngs(0)))
    (row,) = strategy.placement(layer)
    assert (tuple(row.spec), row.why) == ((None, "shard"), "dim 1 is divided among 4 of 8 replicas")
    kernel = layer.kernel[...]
    assert kernel.sharding.spec == row.spec
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(64, 9)}

    def step(x: jax.Array) -> None:
        gradient = jax.grad(lambda w: (x @ w).sum())(layer.kernel[...])
        layer.kernel[...] += jax.lax.psum(gradient, "data")

    (batch,) = strategy.distribute_dataset([np.ones((16, 64), np.float32)])
    plans = [strategy.plan(step, (batch,), replicas=number) for number in (None, 4, 64)]
    assert [plan.replicas for plan in plans] == [8, 4, 64]
    assert {plan.state_bytes["parameters"] for plan in plans} == {64 * 9 * 4}
    assert str(plans[0]).startswith("test_create_placement")
    assert "FullyShardedStrategy(shard_over=4), 8 replicas" in str(plans[0])
    with pytest.raises(dj.ArgumentError, match="shard_over=4 does not divide the 6 devices"):
        strategy.plan(step, (batch,), replicas=6)


@pytest.mark.parametrize("value", [0, True, 2.0, 3, 16, 1])
def test_other_values_of_shard_over_are_refused(value: Any) -> None:
    with pytest.raises(dj.ArgumentError, match=r"^[^\n]*shard_over[^\n]*$"):
        grouped(8, value)


@pytest.mark.exhaustive
def test_inside_the_scope() -> None:
    """The mesh of the scope differs from that of a step."""
    x = np.random.default_rng(0).normal(size=(20, 64)).astype(np.float32)
    runs = []
    for strategy in (grouped(4, 2), dj.MirroredStrategy([0, 1, 2, 3])):
        with strategy.scope():
            model = dj.Model(nnx.Linear(64, 32, rngs=nnx.Rngs(0)))
            model.compile(optax.sgd(0.1), "mse")
            history = model.fit(x, x[:, :32], batch_size=8, shuffle=False, verbose=0).history
            (batch,) = strategy.distribute_dataset([x[:8]])
            rows = strategy.gather(strategy.run(model.module, args=(batch,)), axis=0)
            plain = jax.nn.relu(model.module(x[:8]))
            runs.append((history, model.evaluate(x, x[:, :32], verbose=0), rows, plain))
    assert_close(*runs)


@pytest.mark.parametrize("call", [jax.pure_callback, io_callback])
@pytest.mark.parametrize(
    ("strategy", "where"),
    [
        (lambda: grouped(4, 2), "with shard_over"),
        (
            lambda: dj.ModelParallelStrategy(
                range(4), model=2, rules={"kernel": PartitionSpec(None, "model")}
            ),
            "on replicas of several devices",
        ),
    ],
)
def test_callbacks_that_return_arrays_are_refused(call: Any, strategy: Any, where: str) -> None:
    """JAX cannot compile them with automatic axes, or over two meshes."""
    strategy = strategy()
    with strategy.scope():
        layer = nnx.Linear(64, 32, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))

    def step(x: jax.Array) -> jax.Array:
        return call(lambda y: y, jax.ShapeDtypeStruct((), x.dtype), layer(x).sum())

    (batch,) = strategy.distribute_dataset([np.ones((8, 64), np.float32)])
    with pytest.raises(dj.LoweringError, match=rf"callback at test_shard_\S+ cannot run {where}"):
        strategy.run(step, args=(batch,))
