"""The lowerings: one traced step, the same numbers through shard_map, vmap and pmap."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import io_callback
from jax.sharding import NamedSharding, PartitionSpec

import distribute_jax as dj

VMAP = dj.RunOptions(lowering="vmap")
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
    """Returns a step that returns the gradient of a replica's own weighted sum over a collective."""
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


def ran(strategy: dj.Strategy, step: Step, lowering: Any) -> Any:
    batch = np.random.default_rng(0).normal(size=(2 * ROWS, ROWS)).astype(np.float32)
    (x,) = strategy.distribute_dataset([batch])
    return strategy.run(step, args=(x,), options=dj.RunOptions(lowering=lowering))


def outcome(strategy: dj.Strategy, step: Step, lowering: Any) -> list[Any]:
    return on_host(strategy, ran(strategy, step, lowering))


@pytest.mark.parametrize("group", range(3))
def test_vmap_gives_the_numbers_of_shard_map(strategy: dj.Strategy, group: int):
    """Collectives, their gradients, branches, loops and draws are those of the usual lowering."""
    cases = dict(list(SAME.items())[group::3])  # many in one program, which compiles once
    step = lambda x: {name: case(x) for name, case in cases.items()}  # noqa: E731
    usual, other = (ran(strategy, step, lowering) for lowering in ("shard_map", "vmap"))
    for name in cases:
        wanted, found = on_host(strategy, usual[name]), on_host(strategy, other[name])
        for (kind, values), (own, mine) in zip(wanted, found, strict=True):
            assert kind is own, name
            for a, b in zip(values, mine, strict=True):
                np.testing.assert_allclose(b, a, rtol=2e-5, atol=1e-6, err_msg=name)
                assert (a.shape, a.dtype) == (b.shape, b.dtype), name


def called_back(x: jax.Array) -> jax.Array:
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def rbg_key() -> jax.Array:
    return jax.random.fold_in(jax.random.key(0, impl="rbg"), replica_id())


HALVES = [[0, 1], [2, 3]]
REFUSED: dict[str, tuple[str, Step]] = {
    "psum in groups": ("psum", lambda x: jax.lax.psum(x, "data", axis_index_groups=HALVES)),
    "all_gather in groups": (
        "all_gather",
        lambda x: jax.jit(lambda y: jax.lax.all_gather(y, "data", axis_index_groups=HALVES))(x),
    ),
    "a permutation that leaves some out": (
        "ppermute",
        lambda x: jax.lax.ppermute(x, "data", [(0, 1), (1, 2)]),
    ),
    "a callback that takes no batches": ("pure_callback", called_back),
    "a callback with effects": (
        "io_callback",
        lambda x: x + io_callback(lambda: np.float32(1), jax.ShapeDtypeStruct((), np.float32)),
    ),
    "keys whose numbers depend on the batch": (
        "random_bits",
        lambda x: x + jax.random.uniform(rbg_key(), x.shape),
    ),
    "the hardware's random numbers": (
        "rng_bit_generator",
        lambda x: (
            x
            + jax.lax.rng_bit_generator(jnp.uint32(replica_id()) + jnp.zeros(4, "uint32"), (3,))[1][
                0
            ]
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_vmap_cannot_run_is_refused_by_name_with_the_cure(s4: dj.MirroredStrategy, name: str):
    """JAX lacks some rules, and gives other numbers for others: no traceback of JAX, no other number."""
    primitive, step = REFUSED[name]
    message = rf'cannot run {primitive} at test_lowerings\.py:\d+: .*\n.*lowering="shard_map"'
    with pytest.raises(NotImplementedError, match=message) as raised:
        outcome(s4, step, "vmap")
    assert isinstance(raised.value, dj.LoweringError)
    assert outcome(s4, step, "shard_map")


@pytest.mark.exhaustive
@pytest.mark.parametrize("ops", [None, dj.RingAllReduce(), dj.NcclAllReduce()])
def test_vmap_sums_by_the_operation_of_the_strategy(ops: Any):
    """Also what is equal on all replicas, what the user maps, and the derivative."""
    strategy = dj.MirroredStrategy([0, 1, 2, 3], cross_device_ops=ops)

    def step(x: jax.Array):
        total = lambda v: dj.get_replica_context().all_reduce("sum", v)  # noqa: E731
        weighed = jax.grad(lambda v: jnp.sum(total(v**2) * (1.0 + replica_id())))(x)
        return total(x), total(jnp.arange(3.0)), jax.vmap(total)(x), weighed

    wanted, got = (outcome(strategy, step, lowering) for lowering in ("shard_map", "vmap"))
    for (_, values), (_, mine) in zip(wanted, got, strict=True):
        np.testing.assert_allclose(mine, values, rtol=2e-5)


@pytest.mark.parametrize("ops", [dj.HierarchicalCopyAllReduce(), dj.ReductionToOneDevice()])
def test_operations_that_vmap_cannot_run_are_refused(ops: Any):
    """They send to some replicas only, which JAX cannot batch."""
    strategy = dj.MirroredStrategy([0, 1, 2, 3], cross_device_ops=ops)
    with pytest.raises(dj.LoweringError, match=r"at test_lowerings\.py:\d+"):
        outcome(strategy, lambda x: dj.get_replica_context().all_reduce("sum", x), "vmap")


@pytest.mark.parametrize("lowering", ["shard_map", "vmap", "pmap"])
@pytest.mark.parametrize("kind", [dj.MirroredStrategy, dj.CentralStorageStrategy])
def test_variables_with_components_keep_one_on_each_replica(kind: Any, lowering: Any):
    """ON_READ components differ between replicas, so they are neither shared nor central."""
    strategy = kind([0, 1, 2, 3])
    with strategy.scope():
        own = dj.Variable(
            jnp.float32(10),
            synchronization=dj.VariableSynchronization.ON_READ,
            aggregation=dj.VariableAggregation.SUM,
        )
        shared = dj.Variable(jnp.float32(10), aggregation=dj.VariableAggregation.MEAN)

    def step() -> None:
        own.assign_add(replica_id() + 1.0)
        shared.assign_add(replica_id() + 1.0)

    for _ in range(2):
        strategy.run(step, options=dj.RunOptions(lowering=lowering))
    assert [float(v) for v in own.values] == [12.0, 4.0, 6.0, 8.0]
    assert float(own.read_value()) == 30.0
    assert float(shared.read_value()) == 15.0


def test_vmap_traces_the_users_python_once(s4: dj.MirroredStrategy):
    """The lowering compiles what was traced; it does not call the step again."""
    traces = []

    def step() -> jax.Array:
        traces.append(1)
        return jnp.ones(3) * replica_id()

    for _ in range(2):
        s4.run(step, options=VMAP)
    assert len(traces) == 1


def test_vmap_takes_a_value_of_each_replica(strategy: dj.Strategy):
    """Per-replica arguments that are no batch are taken apart, too."""
    own = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group)
    )
    got = strategy.run(lambda v: v * 2 + 1, args=(own,), options=VMAP)
    values = [float(v) for v in strategy.experimental_local_results(got)]
    assert values == [2.0 * i + 1 for i in range(strategy.num_replicas_in_sync)]


@pytest.mark.parametrize("lowering", ["vmap", "pmap"])
def test_padding_that_leaks_is_found_in_every_lowering(s4: dj.MirroredStrategy, lowering: Any):
    """The check of a partial batch runs the program, whatever compiled it."""
    options = dj.RunOptions(lowering=lowering)
    (x,) = s4.distribute_dataset([np.arange(5, dtype=np.float32)])
    with pytest.raises(dj.PaddingLeakError, match="result"):
        s4.run(lambda x: jax.lax.psum(x.sum(), "data"), args=(x,), options=options)
    mask = lambda: dj.get_replica_context().batch_mask  # noqa: E731
    step = lambda x: jax.lax.psum(jnp.where(mask(), x, 0).sum(), "data")  # noqa: E731
    assert float(s4.run(step, args=(x,), options=options)) == 10.0


@pytest.mark.parametrize("lowering", ["vmap", "pmap"])
def test_a_step_to_which_nothing_is_split_runs_in_every_lowering(
    strategy: dj.Strategy, lowering: Any
):
    """Nothing in its arguments says how many replicas there are."""
    step = lambda: (replica_id() + 1, dj.get_replica_context().all_reduce("sum", 2.0))  # noqa: E731
    own, total = strategy.run(step, options=dj.RunOptions(lowering=lowering))
    numbers = [int(i) for i in strategy.experimental_local_results(own)]
    assert numbers == list(range(1, strategy.num_replicas_in_sync + 1))
    assert float(total) == 2.0 * strategy.num_replicas_in_sync


class Net(nnx.Module):
    """Two layers, each dim a multiple of 8."""

    def __init__(self) -> None:
        self.first = nnx.Linear(64, 128, rngs=nnx.Rngs(0))
        self.second = nnx.Linear(128, 32, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(nnx.relu(self.first(x)))


def sharded_over_data(tree: object, strategy: dj.Strategy) -> None:
    """Divides every array of a module or optimizer over the replicas, along dim 0."""
    sharding = NamedSharding(strategy.mesh, PartitionSpec("data"))
    nnx.update(
        tree,
        jax.tree.map(lambda x: jax.device_put(x, sharding) if x.ndim else x, nnx.state(tree)),
    )


def bytes_per_device(*trees: object) -> int:
    """Returns the bytes of state on the fullest device."""
    used: dict[jax.Device, int] = {}
    for array in jax.tree.leaves([nnx.state(tree) for tree in trees]):
        for shard in array.addressable_shards:
            used[shard.device] = used.get(shard.device, 0) + shard.data.nbytes
    return max(used.values())


def trained(strategy: dj.Strategy, options: dj.RunOptions | None, *, sharded: bool, steps: int = 1):
    """Trains for six batches; gives the losses, the parameters, and the objects."""
    with strategy.scope():
        model = Net()
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    if sharded:
        sharded_over_data(model, strategy)
        sharded_over_data(optimizer, strategy)

    def step(x: jax.Array, y: jax.Array):
        def loss_fn(model: Net):
            return dj.compute_average_loss(jnp.mean((model(x) - y) ** 2, axis=-1))

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, dj.get_replica_context().all_reduce("sum", grads))
        return dj.get_replica_context().all_reduce("sum", loss)

    rng = np.random.default_rng(0)
    data = [
        (rng.normal(size=(16, 64)).astype("f"), rng.normal(size=(16, 32)).astype("f"))
        for _ in range(6)
    ]
    iterator = iter(strategy.distribute_dataset(data))
    losses: list[float] = []
    for _ in range(6 // steps):
        if steps == 1:
            losses.append(float(strategy.run(step, args=next(iterator), options=options)))
        else:
            losses += strategy.run_steps(step, iterator, steps=steps, options=options).tolist()
    params = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    return losses, params, model, optimizer


@functools.cache
def _mirrored(replicas: int) -> Any:
    return trained(dj.MirroredStrategy(list(range(replicas))), None, sharded=False)


def mirrored(strategy: dj.Strategy) -> Any:
    """What mirrored state gives, once for each number of replicas."""
    return _mirrored(strategy.num_replicas_in_sync)


@pytest.mark.parametrize("steps", [3, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_sharded_parameters_and_optimizer_state_stay_sharded_and_train_alike(
    strategy: dj.Strategy, steps: int
):
    """A 2-layer Adam step: each of N devices holds an Nth of the state, and the numbers are the same."""
    losses, params, *whole = mirrored(strategy)
    found, mine, *divided = trained(strategy, VMAP, sharded=True, steps=steps)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(mine), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-6)
    scalars = 8  # bytes of Adam's two counts, whole on each device
    share = (bytes_per_device(*whole) - scalars) / strategy.num_replicas_in_sync
    assert bytes_per_device(*divided) == share + scalars


def test_the_program_of_sharded_state_takes_a_quarter_of_the_arguments(s4: dj.MirroredStrategy):
    """Not only between steps: what XLA allocates for the arguments of a device is a quarter, too."""
    kept = trained(s4, VMAP, sharded=True)
    divided = _argument_bytes(s4)
    other = dj.MirroredStrategy([0, 1, 2, 3])
    also_kept = trained(other, VMAP, sharded=False)
    assert divided < 0.27 * _argument_bytes(other)
    del kept, also_kept


def _argument_bytes(strategy: dj.Strategy) -> int:
    (program,) = strategy._runner.cache.programs.values()
    return program.compiled.memory_analysis().argument_size_in_bytes


def test_models_that_lie_otherwise_have_programs_of_their_own(s4: dj.MirroredStrategy):
    """Running a mirrored model neither divides it nor gathers a sharded one."""

    def step(model: Net):
        model.second.bias[...] += 1.0

    with s4.scope():
        whole, divided = Net(), Net()
    sharded_over_data(divided, s4)
    for _ in range(2):
        for model in (whole, divided):
            s4.run(step, args=(model,), options=VMAP)
    assert s4._runner.programs() == 2
    assert whole.second.bias.get_raw_value().sharding.is_fully_replicated
    assert divided.second.bias.get_raw_value().addressable_shards[0].data.shape == (8,)
    np.testing.assert_allclose(whole.second.bias[...], divided.second.bias[...])


def test_sharded_state_that_shard_map_must_gather_is_told(s4: dj.MirroredStrategy):
    """The usual lowering needs state whole, and says which lowering does not."""
    with s4.scope():
        model = Net()
    sharded_over_data(model, s4)
    with pytest.warns(UserWarning, match=r'sharded over the replicas(.|\n)*lowering="vmap"'):
        s4.run(lambda m: m(jnp.ones((1, 64))).sum(), args=(model,))
    assert model.first.kernel.get_raw_value().sharding.is_fully_replicated


@pytest.mark.exhaustive
def test_verify_works_on_sharded_state(s4: dj.MirroredStrategy):
    """The step on one device starts from the same, gathered state."""
    options = dj.RunOptions(lowering="vmap", verify="always")
    losses, *_ = trained(s4, options, sharded=True)
    np.testing.assert_allclose(losses, trained(s4, None, sharded=False)[0], rtol=1e-5)
