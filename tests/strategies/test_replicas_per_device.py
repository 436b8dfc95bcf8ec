"""``replicas_per_device=k`` computes the numbers of k times as many devices with one replica each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import leaves
import numpy as np
import optax
import pytest
from cases import long
from flax import nnx
from leaves import numbers, sum_on_read

import distribute_jax as dj
from distribute_jax.testing import LocalCluster


def several(devices: int, each: int, **kwargs: Any) -> dj.MirroredStrategy:
    """A strategy with this many devices, and replicas on each."""
    return dj.MirroredStrategy(list(range(devices)), replicas_per_device=each, **kwargs)


WIDTH = 128
"""So that the first kernel is large enough to be divided."""


def dense(*between: Callable[[nnx.Rngs], Any]) -> nnx.Sequential:
    """Two layers, and those between them."""
    rngs = nnx.Rngs(0)
    first, last = nnx.Linear(8, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 4, rngs=rngs)
    return nnx.Sequential(first, *(make(rngs) for make in between), nnx.relu, last)


def convolution() -> nnx.Sequential:
    """A convolution with batch norm."""
    rngs = nnx.Rngs(0)
    first, last = nnx.Conv(1, 4, (3, 3), rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
    images, means = lambda x: x[:, :4, None, None], lambda x: x.mean((1, 2))
    return nnx.Sequential(images, first, nnx.BatchNorm(4, rngs=rngs), nnx.relu, means, last)


class Scanned(nnx.Module):
    """A scan of rematerialised layers with synchronised batch norm."""

    def __init__(self) -> None:
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def layers(rngs: nnx.Rngs) -> Any:
            return nnx.List(
                [nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, axis_name="data", rngs=rngs)]
            )

        rngs = nnx.Rngs(0)
        self.layers, self.last = layers(rngs), nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def through(x: jax.Array, layer: Any) -> jax.Array:
            return nnx.relu(layer[1](layer[0](x)))

        return self.last(through(x, self.layers))


MODELS: dict[str, Callable[[], nnx.Module]] = {
    "dense": dense,
    "dropout": lambda: dense(lambda rngs: nnx.Dropout(0.3, rngs=rngs)),
    "synchronised batch norm": lambda: dense(
        lambda rngs: nnx.BatchNorm(WIDTH, axis_name="data", rngs=rngs)
    ),
    "batch norm in a scan": Scanned,
    "convolution": convolution,
}


def batches(sizes: tuple[int, ...]) -> list[Any]:
    """Batches of these sizes."""
    rng = np.random.default_rng(3)
    return [(rng.normal(size=(n, 8)).astype("f"), rng.integers(0, 4, n)) for n in sizes]


def trained(
    strategy: dj.Strategy,
    model: Callable[[], nnx.Module],
    tx: Any,
    sizes: tuple[int, ...] = (16, 16, 16),
    at_once: int = 0,
) -> list[np.ndarray]:
    """Trains, and returns the losses, each replica's logits, and all state, on the host."""
    with strategy.scope():
        net = model()
        optimizer = dj.Optimizer(net, tx, wrt=nnx.Param)
        seen = dj.metrics.Average()

    def step(x: jax.Array, y: jax.Array) -> Any:
        def loss_of(net: Any) -> Any:
            logits = net(x)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            return dj.compute_average_loss(losses), (logits, losses)

        (loss, (logits, losses)), grads = nnx.value_and_grad(loss_of, has_aux=True)(net)
        optimizer.update(net, grads)
        seen.update(values=losses)
        return dj.get_replica_context().all_reduce("sum", loss), logits

    data = iter(strategy.distribute_dataset(batches(sizes)))
    if at_once:
        outs = [strategy.run_steps(step, data, at_once)]
    else:
        outs = [strategy.run(step, args=batch) for batch in data]
    results = [part for loss, own in outs for part in (loss, *parts(strategy, own))]
    return numbers((results, nnx.state((net, optimizer)), seen.compute()))


def parts(strategy: dj.Strategy, value: Any) -> tuple[Any, ...]:
    """The parts of all replicas."""
    return tuple(strategy.experimental_local_results(value))


def assert_close(left: list[np.ndarray], right: list[np.ndarray], most: float) -> None:
    """Compares all arrays; bitwise if the tolerance is 0."""
    leaves.assert_close(left, right, rtol=most, atol=most)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("dense", "sgd"),
        *(long(model, "sgd") for model in ("dropout", "synchronised batch norm")),
        *(long(model, "adam") for model in ("dense", "dropout", "synchronised batch norm")),
    ],
)
def test_replicas_of_one_device_compute_the_bits_of_several(model: str, name: str):
    """Losses, per-replica values and state are bitwise equal, since sums have the same order."""
    make = MODELS[model]
    tx = optax.sgd(0.1, momentum=0.9) if name == "sgd" else optax.adam(0.01)
    assert_close(trained(several(1, 4), make, tx), trained(several(4, 1), make, tx), 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", MODELS)
def test_replicas_of_two_devices_compute_the_numbers_of_several(model: str):
    """Each device adds up its replicas first, and convolutions are compiled differently."""
    make, tx = MODELS[model], optax.sgd(0.1, momentum=0.9)
    assert_close(trained(several(2, 2), make, tx), trained(several(4, 1), make, tx), 3e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [(16, 3), (16, 13)])
def test_partial_batches_are_divided_over_all_replicas(sizes: tuple[int, ...]):
    """13 examples are divided into 4, 4, 4 and 1; of 3 examples one replica has none."""
    make, tx = MODELS["dense"], optax.sgd(0.1)
    left, right = (trained(s, make, tx, sizes) for s in (several(1, 4), several(4, 1)))
    assert_close(left, right, 0)


@pytest.mark.exhaustive
def test_several_steps_in_one_program_equal_single_steps():
    """The scan over the steps is around that over the replicas."""
    make, tx = MODELS["dropout"], optax.sgd(0.1)
    left, right = (trained(s, make, tx, at_once=3) for s in (several(2, 2), several(4, 1)))
    assert_close(left, right, 3e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("parameters", [True, False])
def test_state_is_divided_over_the_devices(parameters: bool):
    """4 replicas on 2 devices divide state in two, with the numbers of 4 devices."""
    strategy: dj.Strategy = several(2, 2, shard_optimizer_state=True)
    if parameters:
        strategy = dj.FullyShardedStrategy([0, 1], replicas_per_device=2)
    make, tx = MODELS["dense"], optax.sgd(0.1, momentum=0.9)
    assert_close(trained(strategy, make, tx), trained(several(4, 1), make, tx), 3e-6)
    with strategy.scope():
        net = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
        optimizer = dj.Optimizer(net, tx, wrt=nnx.Param)

    def step(x: jax.Array) -> None:
        optimizer.update(net, nnx.grad(lambda net: dj.compute_average_loss(net(x).sum(1)))(net))

    (batch,) = strategy.distribute_dataset([np.ones((8, 64), "f")])
    strategy.run(step, args=(batch,))
    trace = optimizer.opt_state[0].trace["kernel"]
    for array, divided in ((trace, True), (net.kernel, parameters)):
        sizes = [shard.data.size for shard in array[...].addressable_shards]
        assert sizes == [2048 if divided else 4096] * 2


def test_each_replica_has_its_id_its_part_and_its_variables():
    """Replica ids, per-replica arguments and results are numbered device by device."""
    strategy = several(2, 2)
    with strategy.scope():
        seen = sum_on_read()
    given = strategy.experimental_distribute_values_from_function(
        lambda context: np.full(context.replica_id_in_sync_group + 1, 10.0, "f")
    )

    def step(x: jax.Array) -> Any:
        number = dj.get_replica_context().replica_id_in_sync_group
        seen.assign_add(2.0**number)
        return number, x

    numbers, back = strategy.run(step, args=(given,))
    assert strategy.num_replicas_in_sync == 4
    assert [int(n) for n in parts(strategy, numbers)] == [0, 1, 2, 3]
    assert [x.shape[0] for x in parts(strategy, back)] == [1, 2, 3, 4]
    assert [str(*x.devices()) for x in numbers.values] == ["cpu:0", "cpu:0", "cpu:1", "cpu:1"]
    assert [float(x) for x in parts(strategy, seen)] == [1, 2, 4, 8]
    assert float(seen[...]) == 15


def test_a_mirrored_variable_has_a_component_for_each_replica():
    """Outside of run as in merge_call."""
    strategy = several(2, 2)
    with strategy.scope():
        v = dj.Variable(7.0, name="v")
    names = ("v", "v/replica_1", "v/replica_2", "v/replica_3")
    assert ([float(x) for x in v.values], v.component_names) == ([7.0] * 4, names)
    seen = strategy.run(
        lambda: dj.get_replica_context().merge_call(lambda _: (len(v.values), v.component_names))
    )
    assert seen == (4, names)


def test_collectives_compute_the_numbers_of_several_devices():
    """Sums, extremes, gathered arrays and their gradients are those of as many devices."""

    def step() -> Any:
        replica = dj.get_replica_context()
        x = jnp.arange(8.0).reshape(4, 2) * (1 + replica.replica_id_in_sync_group)
        gathered = jax.grad(lambda x: (replica.all_gather(x, 1) ** 2).sum())(x)
        scattered = jax.lax.psum_scatter(x, "data", scatter_dimension=0, tiled=True)
        alone = jax.lax.psum_scatter(x, "data", scatter_dimension=0)
        most = jax.lax.pmax(x, "data") - jax.lax.pmin(x, "data")
        count = jax.lax.psum(x > 3, "data")
        return (
            gathered,
            scattered,
            alone,
            most,
            count,
            jax.jit(jax.lax.axis_index, static_argnums=0)("data"),
        )

    left, right = (
        [np.asarray(p) for out in s.run(step) for p in parts(s, out)]
        for s in (several(2, 2), several(4, 1))
    )
    assert_close(left, right, 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("devices", [1, 2])
def test_it_conforms(devices: int):
    """The library's suite for strategies."""
    assert dj.testing.check_strategy(lambda found: several(devices, len(found) // devices), [4])


@pytest.mark.exhaustive
def test_the_replica_id_is_known_at_any_depth():
    """In loops, branches, checkpoints and functions with a custom derivative."""

    @jax.custom_jvp
    def own(x: jax.Array) -> jax.Array:
        return x * dj.get_replica_context().replica_id_in_sync_group

    own.defjvp(lambda x, t: (own(*x), t[0]))

    def step(x: jax.Array) -> Any:
        def number() -> Any:
            return dj.get_replica_context().replica_id_in_sync_group

        kept = jax.checkpoint(lambda x: jnp.sin(x * number()).sum())
        return {
            "scan": jax.lax.scan(lambda c, x: (c + number(), x * number()), 0, x),
            "checkpoint": jax.value_and_grad(kept)(x),
            "while": jax.lax.while_loop(
                lambda c: c[0] < number() + 2, lambda c: (c[0] + 1, c[1] + number()), (0, 0)
            ),
            "while of each": jax.vmap(
                lambda x: jax.lax.while_loop(lambda c: c < 9, lambda c: c + number() + 1, x)
            )(x),
            "cond": jax.lax.cond(x[0] > 1, lambda x: x + number(), lambda x: x * 3, x),
            "nested": jax.jit(lambda x: jax.lax.map(lambda x: kept(x * number()), x))(x),
            "own": own(x),
        }

    rows = np.arange(8, dtype="f")
    assert_close(results(several(2, 2), step, rows), results(several(4, 1), step, rows), 1e-6)


def results(strategy: dj.Strategy, step: Any, rows: np.ndarray) -> list[np.ndarray]:
    """The parts of all that a step returns for a batch."""
    (batch,) = strategy.distribute_dataset([rows])
    out = strategy.run(step, args=(batch,))
    leaves = jax.tree.leaves(out, is_leaf=lambda leaf: isinstance(leaf, dj.PerReplica))
    return [np.asarray(part) for leaf in leaves for part in parts(strategy, leaf)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("devices", [1, 2])
def test_collectives_in_loops_branches_and_checkpoints(devices: int):
    """Each kind of collective at each depth, with its gradients, and over an axis of vmap too."""

    def step(x: jax.Array) -> Any:
        replica = dj.get_replica_context()

        def mixed(c: jax.Array, x: jax.Array) -> Any:
            return jnp.sin(c) + replica.all_reduce("sum", c * x), replica.all_gather(
                x, 0
            ).mean() * x

        def met(x: jax.Array) -> Any:
            tiled = jax.lax.psum_scatter(jnp.tile(x, 4), "data", scatter_dimension=1, tiled=True)
            spread = jax.lax.pmax(x, "data") - jax.lax.pmin(x, "data")
            return jax.lax.all_gather(x, "data", axis=1), tiled, jax.lax.psum(x, "data") + spread

        def loss(x: jax.Array) -> jax.Array:
            carry, ys = jax.lax.scan(jax.checkpoint(mixed), x[0], x)
            return (carry + ys).sum()

        total = jax.lax.psum(x.sum(), "data")
        return {
            "gradient": jax.value_and_grad(loss)(x),
            "summed": jax.lax.psum(jax.grad(loss)(x), "data"),
            "cond": jax.lax.cond(total > 0, lambda: met(x), lambda: jax.tree.map(jnp.zeros_like, met(x))),
            "while": jax.lax.while_loop(
                lambda c: c[0] < total, lambda c: (c[0] + jax.lax.psum(c[1].sum(), "data"), c[1] + 1),
                (total / 9, x),
            ),
            "in turn": jax.lax.fori_loop(
                0, 2, lambda i, x: x + jax.lax.cond(i > 0, lambda: met(x)[2], lambda: 0 * x), x
            ),
            "number": jax.lax.map(lambda x: jax.lax.psum(x * jax.lax.axis_index("data"), "data"), x),
            "vmap": jax.vmap(lambda x: jax.lax.psum(x, ("rows", "data")), axis_name="rows")(x),
        }  # fmt: skip

    rows = np.arange(1, 17, dtype="f").reshape(8, 2)
    left, right = (results(s, step, rows) for s in (several(devices, 4 // devices), several(4, 1)))
    assert_close(left, right, 1e-6)


def read_after(x: jax.Array) -> jax.Array:
    """Writes a ref before a sum, and reads it after the sum."""
    ref = jax.new_ref(x)
    ref[...] = x * dj.get_replica_context().replica_id_in_sync_group
    return ref[...] * jax.lax.psum(ref[...], "data") + ref[...]


def exchanged(x: jax.Array) -> jax.Array:
    """Sends each replica's value to the next one."""
    return jax.lax.ppermute(x, "data", [(0, 1), (1, 0)])


def solved(x: jax.Array) -> jax.Array:
    """Solves a linear system whose matrix is a sum over the replicas."""
    return jax.scipy.sparse.linalg.cg(lambda v: jax.lax.psum(v, "data"), x, maxiter=2)[0]


def called_back(x: jax.Array) -> jax.Array:
    """A loop with a collective, and a callback on one replica's value."""

    def body(i: jax.Array, x: jax.Array) -> jax.Array:
        x = x * (1 + dj.get_replica_context().replica_id_in_sync_group)
        return jax.lax.psum(jax.pure_callback(np.sin, x, x), "data")

    return jax.lax.fori_loop(0, 2, body, x)


def drawn(x: jax.Array) -> jax.Array:
    """Random numbers in a loop with a collective, of keys that draw different numbers under vmap."""
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 3)
    return jax.lax.map(lambda key: jax.lax.psum(jax.random.normal(key), "data"), keys)


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (solved, r"psum at test_repl\S+ cannot run with replicas_per_device=2.*move psum out of the cust"),
        (
            called_back,
            r"psum at test_repl\S+ cannot .*of the scan around it what jax.vmap cannot batch: .*vmap_method",
        ),
        (drawn, r"psum at test_repl\S+ cannot .*draw the random numbers of the scan around it .*threefry"),
        (read_after, r"new_ref at test_repl\S+ cannot run with .*make the ref after the collective"),
        (exchanged, r"ppermute at test_repl\S+ cannot run with .*use one of these in its place"),
    ],
)  # fmt: skip
def test_operations_that_cannot_run_one_after_the_other_are_refused(fn: Any, text: str):
    """The message names the operation and its line, the rule, and what to do."""
    with pytest.raises(dj.LoweringError, match=f"(?s){text}"):
        several(1, 2).run(lambda: fn(jnp.ones(3)))


def test_a_ring_of_the_replicas_of_a_device_is_refused_at_its_call():
    """In words of the option, from the line of the step that passes it."""
    ring = dj.experimental.CommunicationOptions(implementation="ring")
    with pytest.raises(dj.ArgumentError, match=r"='ring'\) with replicas_per_device=2: ") as caught:
        several(1, 2).run(lambda: dj.get_replica_context().all_reduce("sum", 1.0, ring))
    assert [str(entry.path) for entry in caught.traceback] == [__file__] * 2


def test_a_branch_with_a_mirrored_predicate_may_sum():
    """As in an update that is skipped for a step."""

    def step(x: jax.Array, on: jax.Array) -> jax.Array:
        return jax.lax.cond(
            on > 0, lambda x: jax.lax.psum(x, "data"), lambda x: jnp.zeros(()), x.sum()
        )

    strategy = several(1, 4)
    (batch,) = strategy.distribute_dataset([np.arange(8, dtype="f")])
    with strategy.scope():
        flag = jnp.ones(())
    assert [float(strategy.run(step, args=(batch, f))) for f in (flag, 0 * flag)] == [28, 0]


@pytest.mark.exhaustive
def test_activations_of_one_replica_are_in_memory_at_a_time():
    """The temporaries of 8 replicas on a device are those of one on each of 8."""

    def compiled(strategy: dj.Strategy) -> Any:
        with strategy.scope():
            net = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
            optimizer = dj.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param)

        def step(x: jax.Array) -> None:
            def loss(net: Any, x: jax.Array = x) -> jax.Array:
                for _ in range(8):
                    x = nnx.relu(net(x))
                return dj.compute_average_loss(x.sum(1))

            optimizer.update(net, nnx.grad(loss)(net))

        (batch,) = strategy.distribute_dataset([np.ones((2048, 64), "f")])
        strategy.run(step, args=(batch,), options=dj.RunOptions(verify="off"))
        (program,) = strategy._runner.cache.programs.values()
        function = program.compiled
        return getattr(function, "_compiled", function)

    one, each = compiled(several(1, 8)), compiled(several(8, 1))
    one, each = (program.memory_analysis().temp_size_in_bytes for program in (one, each))
    assert one <= 1.1 * each


SIZES = (16, 13)


def tpu() -> dj.TPUStrategy:
    """A TPU of which two cores are a block that runs two replicas."""
    topology = dj.initialize_tpu_system(dj.cluster_resolver.TPUClusterResolver("local"))
    assignment = dj.tpu.experimental.DeviceAssignment.build(topology, [1, 1, 1, 2], num_replicas=2)
    return dj.TPUStrategy(experimental_device_assignment=assignment, replicas_per_device=2)


@pytest.mark.parametrize(
    ("make", "most"),
    [
        long(lambda: dj.CentralStorageStrategy([0], "cpu:1", replicas_per_device=4), 0),
        long(lambda: dj.CentralStorageStrategy([0, 1], "cpu:1", replicas_per_device=2), 3e-6),
        long(tpu, 3e-6),
    ],
)
def test_other_strategies_have_several_replicas_on_a_device(
    make: Callable[[], dj.Strategy], most: float
):
    """Central storage and TPU strategies compute the numbers of as many devices."""
    strategy, model, tx = make(), MODELS["synchronised batch norm"], optax.sgd(0.1, momentum=0.9)
    assert strategy.num_replicas_in_sync == 4
    assert_close(trained(strategy, model, tx), trained(several(4, 1), model, tx), most)


@pytest.mark.exhaustive
def test_a_tpu_divides_each_of_its_replicas():
    """An array that is split over the cores of a block is split for every replica of the block."""
    strategy = tpu()

    def step() -> jax.Array:
        x = jnp.arange(8.0).reshape(2, 4) + dj.get_replica_context().replica_id_in_sync_group
        split = strategy.experimental_split_to_logical_devices(x, [1, 2])
        whole = strategy.experimental_replicate_to_logical_devices(split)
        return jax.lax.psum((split * whole).sum(), "data")

    x = np.arange(8.0)
    assert float(strategy.run(step)) == sum(((x + i) ** 2).sum() for i in range(4))


def in_job() -> list[np.ndarray]:
    """Trains in one of several processes."""
    timeouts = dj.ClusterOptions(start_seconds=90, step_seconds=60)
    strategy = dj.MultiWorkerMirroredStrategy(replicas_per_device=2, cluster_options=timeouts)
    assert strategy.num_replicas_in_sync == 4
    return trained(strategy, MODELS["dropout"], optax.sgd(0.1, momentum=0.9), SIZES)


@pytest.mark.exhaustive
def test_replicas_are_numbered_over_processes():
    """Two processes with one device and two replicas each: each process sees its two of the four."""
    tx, alone = optax.sgd(0.1, momentum=0.9), several(4, 1)
    wanted = trained(alone, MODELS["dropout"], tx, SIZES)
    steps = [wanted[5 * step : 5 * step + 5] for step in range(len(SIZES))]
    for process, result in enumerate(LocalCluster(2, 1, timeout=100).run(in_job)):
        mine = [x for loss, *own in steps for x in (loss, *own[2 * process : 2 * process + 2])]
        assert_close(result.value, [*mine, *wanted[5 * len(SIZES) :]], 3e-6)


def test_the_number_of_replicas_per_device_is_shown():
    """In the repr, in the mesh, and in the error for a wrong argument."""
    assert str(several(1, 3)) == "MirroredStrategy([cpu:0], replicas_per_device=3)"
    assert dj.OneDeviceStrategy(0, replicas_per_device=3).num_replicas_in_sync == 3
    assert dj.MultiWorkerMirroredStrategy(replicas_per_device=2).num_replicas_in_sync == 16
    assert several(1, 3).mesh != several(1, 2).mesh
    with pytest.raises(
        dj.ArgumentError, match="replicas must be a multiple of replicas_per_device=3"
    ):
        several(1, 3).plan(lambda: 1, replicas=8)
    with pytest.raises(
        dj.ArgumentError, match="replicas_per_device must be an integer >= 1 and < 65536; got 0"
    ):
        several(1, 0)
    with pytest.raises(dj.ArgumentError, match="< 65536; got 1000000"):
        several(1, 1_000_000)
    ring = dj.experimental.CommunicationOptions(implementation="ring")
    for make in (
        lambda: dj.MirroredStrategy([0], dj.RingAllReduce(), replicas_per_device=2),
        lambda: dj.MirroredStrategy([0], dj.ReductionToOneDevice("cpu:0"), replicas_per_device=2),
        lambda: dj.MultiWorkerMirroredStrategy(None, ring, replicas_per_device=2),
    ):
        with pytest.raises(dj.ArgumentError, match=r"replicas_per_device=2\): .* none can"):
            make()
    with pytest.raises(dj.LoweringError, match="with replicas_per_device=2: pmap knows one"):
        several(1, 2).run(lambda: 1, options=dj.RunOptions(lowering="pmap"))
