"""The lowerings: one traced step, the same numbers by shard_map, pmap and on one replica of cores.

It is one equation for what compiles it, unless it does more than compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import io_callback
from jax.sharding import NamedSharding, PartitionSpec
from leaves import sum_on_read

import distribute_jax as dj
from distribute_jax.program._lowerings import (
    FlatStep,
    StepShardings,
    compile_shard_map,
    in_one_equation,
)

ROWS = 8  # a multiple of every number of replicas that the tests use

Step = Callable[[jax.Array], Any]


def replica_id() -> jax.Array:
    return dj.get_replica_context().replica_id_in_sync_group


def replicas() -> int:
    return dj.get_replica_context().num_replicas_in_sync


def shifted(x: jax.Array) -> jax.Array:
    n = replicas()
    return jax.lax.ppermute(x, "data", [(i, (i + 1) % n) for i in range(n)])


def cotangent(collective: Step) -> Step:
    """Returns a step that returns the gradient of a replica's weighted sum over a collective."""
    return lambda x: jax.grad(lambda y: jnp.sum(collective(y) * (1.0 + replica_id())))(x)


def ring_sum(x: jax.Array) -> jax.Array:
    total = part = x
    for _ in range(replicas() - 1):
        part = shifted(part)
        total = total + part
    return dj.assume_mirrored(total.sum())


def changed_in_a_ref(x: jax.Array) -> jax.Array:
    ref = jax.new_ref(x)
    ref[...] = ref[...] * (1.0 + replica_id())
    return ref[...]


def looked_up(x: jax.Array) -> jax.Array:
    return jnp.searchsorted(jnp.sort(x[0]), x[-1])


def rbg_key() -> jax.Array:
    return jax.random.fold_in(jax.random.key(0, impl="rbg"), replica_id())


SAME: dict[str, Step] = {
    "no collective": jnp.sin,
    "constant": lambda x: jnp.zeros(3),
    "psum": lambda x: jax.lax.psum(x, "data"),
    "psum of a nest": lambda x: jax.lax.psum({"a": x, "b": (x.sum(), jnp.int32(1))}, "data"),
    "psum of a constant": lambda x: jax.lax.psum(2, "data") * x,
    "pmean": lambda x: jax.lax.pmean(x, "data"),
    "pmax": lambda x: jax.lax.pmax(x, "data"),
    "pmin": lambda x: jax.lax.pmin(x, "data"),
    "axis_index": lambda x: x + jax.lax.axis_index("data"),
    "axis_size": lambda x: x * jax.lax.axis_size("data"),
    "all_gather": lambda x: jax.lax.all_gather(x, "data"),
    "all_gather tiled": lambda x: jax.lax.all_gather(x, "data", axis=1, tiled=True),
    "psum_scatter": lambda x: jax.lax.psum_scatter(jnp.outer(jnp.arange(replicas()), x[0]), "data"),
    "psum_scatter tiled": lambda x: jax.lax.psum_scatter(
        x, "data", scatter_dimension=1, tiled=True
    ),
    "ppermute": shifted,
    "pshuffle": lambda x: jax.lax.pshuffle(x, "data", list(range(replicas()))[::-1]),
    "all_to_all": lambda x: jax.lax.all_to_all(x.T[: replicas()], "data", 0, 1),
    "all_to_all tiled": lambda x: jax.lax.all_to_all(x.T, "data", 0, 1, tiled=True),
    "pswapaxes": lambda x: jax.lax.pswapaxes(x.T[: replicas()], "data", 0),
    "all_reduce": lambda x: dj.get_replica_context().all_reduce("mean", {"a": x, "b": x.sum()}),
    "context all_gather": lambda x: dj.get_replica_context().all_gather(x, 0),
    "merge_call": lambda x: dj.get_replica_context().merge_call(
        lambda strategy, v: strategy.reduce("sum", v, axis=None), args=(x,)
    ),
    "gradient of psum": cotangent(lambda x: jax.lax.psum(x**2, "data")),
    "gradient of pmean": cotangent(lambda x: jax.lax.pmean(x**2, "data")),
    "gradient of all_gather": cotangent(lambda x: jax.lax.all_gather(x**2, "data")[0]),
    "gradient of psum_scatter": cotangent(
        lambda x: jax.lax.psum_scatter(x**2, "data", scatter_dimension=1, tiled=True)
    ),
    "gradient of ppermute": cotangent(lambda x: shifted(x**2)),
    "ppermute to the next": lambda x: jax.lax.ppermute(
        x, "data", [(i, i + 1) for i in range(replicas() - 1)]
    ),
    "gradient of all_to_all": cotangent(
        lambda x: jax.lax.all_to_all((x**2).T, "data", 0, 1, tiled=True)
    ),
    "cond on the replica": lambda x: jax.lax.cond(replica_id() > 0, jnp.sin, jnp.cos, x),
    "psum under a mirrored cond": lambda x: jax.lax.cond(
        jax.lax.psum(x.sum(), "data") > 0, lambda y: jax.lax.psum(y, "data"), jnp.cos, x
    ),
    "while on the replica": lambda x: jax.lax.while_loop(
        lambda c: c[0] < replica_id(), lambda c: (c[0] + 1, c[1] * 2), (0, x)
    )[1],
    "psum in a scan": lambda x: jax.lax.scan(
        lambda c, _: (jax.lax.pmean(c, "data") + x, c.sum()), x, length=3
    ),
    "psum in jit and remat": lambda x: jax.jit(
        jax.grad(jax.checkpoint(lambda y: jnp.sum(jnp.sin(jax.lax.psum(y, "data")))))
    )(x),
    "psum in the user's own vmap": lambda x: jax.vmap(lambda y: jax.lax.psum(y, "data"))(x),
    "psum over both axes": lambda x: jax.vmap(
        lambda y: jax.lax.psum(y, ("data", "own")), axis_name="own"
    )(x),
    "random numbers": lambda x: jax.random.normal(
        jax.random.fold_in(jax.random.key(0), replica_id()), x.shape
    ),
    "declared mirrored": ring_sum,
    "ref": changed_in_a_ref,
    "searchsorted": looked_up,
    "linear algebra": lambda x: jnp.linalg.solve(x.T @ x + jnp.eye(ROWS), x[0]),
    "declared per example": lambda x: dj.per_example(x.sum(1)),
}


def on_host(strategy: dj.Strategy, result: object) -> list[tuple[type, list[np.ndarray]]]:
    """Returns for each leaf its kind, and its values on the replicas."""
    leaves = jax.tree.leaves(result, is_leaf=lambda leaf: isinstance(leaf, dj.PerReplica))
    return [
        (type(leaf), [np.asarray(v) for v in strategy.experimental_local_results(leaf)])
        for leaf in leaves
    ]


def run(strategy: dj.Strategy, step: Step, lowering: Any = "shard_map") -> Any:
    batch = np.random.default_rng(0).normal(size=(2 * ROWS, ROWS)).astype(np.float32)
    (x,) = strategy.distribute_dataset([batch])
    return strategy.run(step, args=(x,), options=dj.RunOptions(lowering=lowering))


@pytest.mark.exhaustive
@pytest.mark.parametrize("group", range(3))
def test_pmap_computes_the_numbers_of_shard_map(s4: dj.MirroredStrategy, group: int):
    """Collectives, their gradients, branches, loops and draws are those of the usual lowering."""
    cases = dict(list(SAME.items())[group::3])  # many in one program, which compiles once
    step = lambda x: {name: case(x) for name, case in cases.items()}  # noqa: E731
    usual, other = (run(s4, step, lowering) for lowering in ("shard_map", "pmap"))
    for name in cases:
        wanted, found = on_host(s4, usual[name]), on_host(s4, other[name])
        for (kind, values), (own, mine) in zip(wanted, found, strict=True):
            assert kind is own, name
            for a, b in zip(values, mine, strict=True):
                np.testing.assert_allclose(b, a, rtol=2e-5, atol=1e-6, err_msg=name)
                assert (a.shape, a.dtype) == (b.shape, b.dtype), name


def one_replica_of_two_cores() -> dj.TPUStrategy:
    resolver = dj.cluster_resolver.TPUClusterResolver("local")
    topology = dj.initialize_tpu_system(resolver)
    cores = dj.tpu.experimental.DeviceAssignment.build(topology, [1, 1, 1, 2], None, 1)
    return dj.TPUStrategy(resolver, cores)


ALONE: dict[str, Step] = {
    "groups": lambda x: jax.lax.psum(x, "data", axis_index_groups=[[0]]),
    "a callback": lambda x: jax.pure_callback(
        np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x + replica_id()
    ),
    "a callback with effects": lambda x: (
        x + io_callback(lambda: np.float32(1), jax.ShapeDtypeStruct((), np.float32))
    ),
    "rbg keys": lambda x: x + jax.random.uniform(rbg_key(), x.shape),
    "a sum in bfloat16": lambda x: jax.lax.psum(x.astype(jnp.bfloat16), "data"),
    "all_to_all of what is equal": lambda x: jax.lax.all_to_all(
        jnp.ones((4, 1)), "data", 0, 1, tiled=True
    ),
}
"""Steps that ``vmap`` cannot run, or runs differently from separate replicas."""


@pytest.mark.exhaustive
def test_one_replica_of_two_cores_has_the_bits_of_one_device():
    """Collectives, on which XLA would fail, are removed, and nothing is batched, also with several steps."""
    cases = SAME | ALONE
    step = lambda x: {name: case(x) for name, case in cases.items()}  # noqa: E731
    cores, device = one_replica_of_two_cores(), dj.OneDeviceStrategy(0)
    mine, wanted = (run(strategy, step) for strategy in (cores, device))
    for name in cases:
        for (_, (a,)), (_, (b,)) in zip(
            on_host(device, wanted[name]), on_host(cores, mine[name]), strict=True
        ):
            np.testing.assert_array_equal(b, a, err_msg=name)
            assert a.dtype == b.dtype, name
    steps = cores.run_steps(lambda x: jax.lax.psum(x, "data"), iter([(1.0,), (2.0,)]), 2)
    assert steps.tolist() == [1.0, 2.0]


def test_a_shift_to_the_next_replica_leaves_zeros_for_one_of_two_cores():
    """A replica to which no other sends gets zeros, even if it is the only one."""
    result = run(one_replica_of_two_cores(), SAME["ppermute to the next"])
    assert result.shape == (2 * ROWS, ROWS)
    assert not np.asarray(result).any()


def test_one_replica_of_two_cores_keeps_state_divided_over_them():
    """Weights that are divided over the cores stay divided, and no step gathers them."""
    mesh = one_replica_of_two_cores().mesh
    halves = NamedSharding(mesh, PartitionSpec(None, "model"))

    def step(w: jax.Array, x: jax.Array) -> list[jax.Array]:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return [w - jax.lax.pmean(grad, "data"), jax.lax.psum(loss, "data")]

    w, x = np.ones((8, 6), np.float32), np.arange(32, dtype=np.float32).reshape(4, 8) / 8
    shardings = StepShardings(
        (False, False),
        (False, True),
        (True, True),
        1,
        sharded_in={0: halves},
        sharded_out={0: halves},
    )
    compiled = compile_shard_map(FlatStep(step, mesh, shardings, [w, x]))
    assert "all-gather" not in compiled.as_text()
    new, loss = compiled(jax.device_put(w, halves), x)
    assert new.sharding == halves
    assert new.addressable_shards[0].data.shape == (8, 3)
    np.testing.assert_allclose(new, 1 - 2 * x.T @ (x @ w) / 24, rtol=1e-6)
    np.testing.assert_allclose(loss, np.mean((x @ w) ** 2), rtol=1e-6)


@pytest.mark.parametrize("lowering", ["shard_map", "pmap"])
@pytest.mark.parametrize("kind", [dj.MirroredStrategy, dj.CentralStorageStrategy])
def test_variables_with_components_keep_one_on_each_replica(kind: Any, lowering: Any):
    """ON_READ components differ between replicas, so they are neither divided nor on one device."""
    strategy = kind([0, 1, 2, 3])
    with strategy.scope():
        own = sum_on_read(jnp.float32(10))
        shared = dj.Variable(jnp.float32(10), aggregation=dj.VariableAggregation.MEAN)

    def step(x: jax.Array) -> None:
        own.assign_add(replica_id() + x)
        shared.assign_add(replica_id() + x)

    one, options = jnp.float32(1), dj.RunOptions(lowering=lowering)
    strategy.run(step, args=(one,), options=options)
    strategy.run_steps(step, iter([(one,)] * 3), 3, options=options)
    assert [float(v) for v in own.values] == [14.0, 8.0, 12.0, 16.0]
    assert float(own.read_value()) == 50.0
    assert float(shared.read_value()) == 20.0


def test_pmap_takes_per_replica_arguments(strategy: dj.Strategy):
    """Per-replica arguments that are not batches are divided too."""
    own = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group)
    )
    got = strategy.run(lambda v: v * 2 + 1, args=(own,), options=dj.RunOptions(lowering="pmap"))
    values = [float(v) for v in strategy.experimental_local_results(got)]
    assert values == [2.0 * i + 1 for i in range(strategy.num_replicas_in_sync)]


def test_padding_that_leaks_is_found_under_pmap(s4: dj.MirroredStrategy):
    """The check of a partial batch works under both lowerings."""
    options = dj.RunOptions(lowering="pmap")
    (x,) = s4.distribute_dataset([np.arange(5, dtype=np.float32)])
    with pytest.raises(dj.PaddingLeakError, match="result"):
        s4.run(lambda x: jax.lax.psum(x.sum(), "data"), args=(x,), options=options)
    mask = lambda: dj.get_replica_context().batch_mask  # noqa: E731
    step = lambda x: jax.lax.psum(jnp.where(mask(), x, 0).sum(), "data")  # noqa: E731
    assert float(s4.run(step, args=(x,), options=options)) == 10.0


def test_a_step_without_batched_arguments_runs_under_pmap(strategy: dj.Strategy):
    """pmap needs an argument that shows the number of replicas."""
    step = lambda: (replica_id() + 1, dj.get_replica_context().all_reduce("sum", 2.0))  # noqa: E731
    own, total = strategy.run(step, options=dj.RunOptions(lowering="pmap"))
    numbers = [int(i) for i in strategy.experimental_local_results(own)]
    assert numbers == list(range(1, strategy.num_replicas_in_sync + 1))
    assert float(total) == 2.0 * strategy.num_replicas_in_sync


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_state_that_was_sharded_over_the_devices_is_replicated_with_a_warning(
    s4: dj.MirroredStrategy, shape: tuple[int, ...]
):
    """A mirrored strategy replicates state that was sharded, also over another mesh, and warns."""
    mesh = jax.sharding.Mesh(s4.mesh.devices.reshape(shape), ("data", "model")[: len(shape)])
    divided = NamedSharding(mesh, PartitionSpec("data"))
    variable = nnx.Variable(jax.device_put(jnp.arange(8.0), divided))
    with pytest.warns(UserWarning, match=r"sharded over the devices, and are now replicated"):
        assert float(s4.run(lambda: variable.sum())) == 28.0
    assert variable.get_raw_value().sharding.is_fully_replicated


def equations(step, *inputs, consts=None):
    jaxpr = jax.make_jaxpr(step)(*inputs)
    if consts is not None:
        jaxpr = type(jaxpr)(jaxpr.jaxpr, consts)
    return [eqn.primitive.name for eqn in jax.make_jaxpr(in_one_equation(jaxpr))(*inputs).eqns]


def test_a_step_that_computes_is_one_equation_whatever_it_is_made_of():
    table = np.arange(3.0, dtype=np.float32)
    assert equations(lambda x: jnp.sin(x) * jnp.asarray(table) + 1, jnp.ones(3)) == ["replica_step"]


def _prints(x):
    jax.debug.print("{}", x)
    return x + 1


def _writes(x):
    ref = jax.new_ref(x)
    ref[...] += 1
    return ref[...]


@pytest.mark.parametrize("step", [_prints, _writes])
def test_a_step_with_an_effect_is_traced_equation_by_equation(step):
    names = equations(step, jnp.ones(3))
    assert "replica_step" not in names
    assert len(names) > 1


@pytest.mark.parametrize("replicas", [1, 4])
def test_one_equation_gives_the_numbers_and_the_prints_of_several(replicas, capsys):
    strategy = dj.MirroredStrategy(list(range(replicas)))

    def step(x):
        return dj.get_replica_context().all_reduce("sum", jnp.cos(x).sum())

    def loud(x):
        jax.debug.print("replica {}", dj.get_replica_context().replica_id_in_sync_group)
        return step(x)

    x = jnp.arange(3.0)
    got, got_loud = strategy.run(step, args=(x,)), strategy.run(loud, args=(x,))
    jax.effects_barrier()
    np.testing.assert_array_equal(got, got_loud)
    np.testing.assert_allclose(got, replicas * np.cos(np.arange(3.0)).sum(), rtol=1e-6)
    assert sorted(capsys.readouterr().out.split("\n")[:-1]) == [
        f"replica {i}" for i in range(replicas)
    ]
