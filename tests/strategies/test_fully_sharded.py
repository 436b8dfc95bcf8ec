"""``FullyShardedStrategy``: the bits of mirrored state, with an Nth of the model on each device."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import leaves
import numpy as np
import optax
import pytest
from cases import long
from flax import nnx
from leaves import assert_same_bits, on_host

import distribute_jax as dj
from distribute_jax.program import _state_placement

WIDTH, VOCABULARY, LAYERS = 64, 96, 2


class Block(nnx.Module):
    """A residual block of two layers, with dropout."""

    def __init__(self, rate: float, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs) if rate else None

    def __call__(self, x: jax.Array) -> jax.Array:
        new = self.down(nnx.gelu(self.up(self.norm(x))))
        return x + (new if self.dropout is None else self.dropout(new))


class Language(nnx.Module):
    """Blocks in a loop or in a scan, rematerialised or not; the embedding is tied."""

    def __init__(self, mode: str, rate: float = 0.0) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.mode = mode
        if "loop" in mode:
            self.blocks: Any = nnx.List([Block(rate, rngs) for _ in range(LAYERS)])
        else:
            make = nnx.vmap(lambda rngs: Block(rate, rngs))
            self.blocks = nnx.split_rngs(splits=LAYERS)(make)(rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        one: Any = lambda x, block: block(x)  # noqa: E731
        one = nnx.remat(one) if "remat" in self.mode else one
        if "loop" in self.mode:
            for block in self.blocks:
                x = one(x, block)
        else:
            x = nnx.scan(one, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        return self.embed.attend(x)


class Net(nnx.Module):
    """A convolution, a batch norm and a head."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(4, WIDTH, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        image = jax.nn.one_hot(tokens % 4, 4)[:, :, None, :] * jnp.ones((1, 1, 4, 1))
        x = nnx.relu(self.norm(self.conv(image)))
        return jnp.broadcast_to(self.head(x.mean((1, 2)))[:, None], (*tokens.shape, VOCABULARY))


MODELS: dict[str, Callable[[], nnx.Module]] = {
    "loop": lambda: Language("loop"),
    "scan": lambda: Language("scan"),
    "remat": lambda: Language("remat"),
    "remat loop": lambda: Language("remat loop"),
    "dropout": lambda: Language("remat", 0.1),
    "convolution": Net,
}


def momentum() -> optax.GradientTransformation:
    """The optimizer whose bits are promised."""
    return optax.sgd(0.1, momentum=0.9)


def made(
    strategy: dj.Strategy, make: Callable[[], Any], tx: Callable[[], Any] = momentum
) -> tuple[Any, nnx.Optimizer[Any]]:
    """A model and its optimizer."""
    with strategy.scope():
        model = make()
        return model, nnx.Optimizer(model, tx(), wrt=nnx.Param)


def update(model: Any, optimizer: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """The step of one replica, as for any strategy."""

    def loss_fn(model: Any) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens), targets)
        return dj.compute_average_loss(losses.mean(1))

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    loss, grads = dj.get_replica_context().all_reduce("sum", (loss, grads))
    optimizer.update(model, grads)
    return loss


def batches(sizes: tuple[int, ...] = (16, 16, 16)) -> list[Any]:
    """Batches of tokens and next tokens; with fewer, XLA would compile small matrix products differently."""
    rng = np.random.default_rng(3)
    tokens = [rng.integers(0, VOCABULARY, (size, 32)).astype(np.int32) for size in sizes]
    return [(t, np.roll(t, -1, 1)) for t in tokens]


def trained(strategy: dj.Strategy, model: Any, optimizer: Any, sizes: Any = (16, 16, 16)) -> Any:
    """Trains, and returns losses and the numbers of the model and the optimizer."""

    def step(tokens: jax.Array, targets: jax.Array) -> jax.Array:
        return update(model, optimizer, tokens, targets)

    losses = [
        float(strategy.run(step, args=batch))
        for batch in strategy.distribute_dataset(batches(sizes))
    ]
    return losses, values((model, optimizer))


def values(tree: Any) -> Any:
    """The numbers of modules and optimizers; keys as their data."""
    return jax.tree.map(on_host, nnx.to_pure_dict(nnx.state(tree)))


def test_every_device_keeps_its_share(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Large parameters and their momentum take a quarter of their bytes on each of 4 devices.

    If much state was created on every device before, a line is logged.
    """
    monkeypatch.setattr(_state_placement, "LARGE_STATE", 1000)
    strategy = dj.FullyShardedStrategy([0, 1, 2, 3])
    model, optimizer = made(strategy, MODELS["scan"])
    trained(strategy, model, optimizer)
    assert "strategy.create(lambda: Model(...))" in caplog.text
    rows = strategy.placement(model)
    divided = [row for row in rows if row.spec]
    assert {row.path for row in divided} == {
        "embed.embedding", "blocks.up.kernel", "blocks.down.kernel",
    }  # fmt: skip
    for part in (model, optimizer.opt_state):
        leaves = jax.tree.leaves(nnx.state(part))
        kept = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
        whole = sum(leaf.nbytes for leaf in leaves if leaf.is_fully_replicated)
        shares = sum(leaf.nbytes for leaf in leaves if not leaf.is_fully_replicated)
        assert kept == whole + shares / 4
        assert shares > whole


def program(strategy: dj.Strategy) -> Any:
    """Returns the last compiled program."""
    return list(strategy._runner.cache.programs.values())[-1]


def collectives(strategy: dj.Strategy) -> Counter[str]:
    """Counts the collectives of the last program's StableHLO, loop bodies once."""
    step = program(strategy).step
    text = jax.jit(step.function).lower(*step.avals).as_text()
    return Counter(
        re.findall(r"stablehlo\.(all_gather|reduce_scatter|all_reduce|all_to_all)\b", text)
    )


GATHERS = {
    "loop": {None: 5, True: 11, False: 5},
    "remat loop": {None: 9, True: 11, False: 5},
    "scan": {None: 5, True: 7, False: 3},
    "remat": {None: 5, True: 7, False: 3},
    "dropout": {None: 5, True: 7, False: 3},
    "convolution": {None: 1, True: 2, False: 1},
}
"""The all-gathers of a step by model and reshard_after_forward; bodies of scans count once.

The loops have four kernels, the scans two. With None a kernel in a scan or a rematerialised block is gathered
twice, and the tied embedding once.
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("name", GATHERS)
def test_how_often_parameters_are_gathered(name: str, devices: int) -> None:
    """reshard_after_forward decides it; the bits are those of MirroredStrategy in any case."""
    numbers = list(range(devices))
    mirrored = dj.MirroredStrategy(numbers)
    expected = trained(mirrored, *made(mirrored, MODELS[name]))
    assert expected[0][-1] != expected[0][0]
    arguments = set()
    for reshard, gathers in GATHERS[name].items():
        strategy = dj.FullyShardedStrategy(numbers, reshard_after_forward=reshard)
        assert_same_bits(trained(strategy, *made(strategy, MODELS[name])), expected)
        compiled = program(strategy).compiled
        compiled_gathers = len(re.findall(r" all-gather(?:-start)?\(", compiled.as_text()))
        if devices == 1:
            assert not compiled_gathers
        else:
            lowered = collectives(strategy)
            assert compiled_gathers <= lowered["all_gather"] == gathers
            # One reduce-scatter for each divided parameter, inside a scan for stacked ones.
            assert lowered["reduce_scatter"] == GATHERS[name][False]
            assert not lowered["all_to_all"]
        arguments.add(compiled.memory_analysis().argument_size_in_bytes)
        option = "" if reshard is None else f", reshard_after_forward={reshard}"
        assert repr(strategy).endswith(f"cpu:{devices - 1}]{option})")
    assert len(arguments) == 1


@pytest.mark.exhaustive
def test_gradients_that_our_optimizer_sums_are_scattered_in_the_scan() -> None:
    """The markers for the proof do not keep the reduce-scatter out of the scan."""
    strategy = dj.FullyShardedStrategy([0, 1])
    with strategy.scope():
        model = MODELS["remat"]()
        optimizer = dj.Optimizer(model, momentum(), wrt=nnx.Param)

    def step(tokens: jax.Array, targets: jax.Array) -> None:
        def loss_fn(model: Any) -> jax.Array:
            losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens), targets)
            return dj.compute_average_loss(losses.mean(1))

        optimizer.update(model, nnx.grad(loss_fn)(model))

    (batch,) = strategy.distribute_dataset(batches((16,)))
    strategy.run(step, args=batch)
    flat = program(strategy).step
    lines = str(jax.make_jaxpr(flat.function)(*flat.avals)).splitlines()
    scattered = [line for line in lines if "= reduce_scatter[" in line]
    outside = min(len(line) - len(line.lstrip()) for line in scattered)
    assert len(scattered) == 3
    assert sum(len(line) - len(line.lstrip()) > outside for line in scattered) == 2


def clipped() -> optax.GradientTransformation:
    """Clips by the norm of all gradients."""
    return optax.chain(optax.clip_by_global_norm(0.1), momentum())


def assert_close(got: Any, wanted: Any, atol: float = 1e-6) -> None:
    leaves.assert_close(got, wanted, rtol=1e-4, atol=atol)


def mirrored_and_divided(
    devices: int, shard_over: int | None
) -> tuple[tuple[dj.Strategy, dj.Strategy], Callable[[Any, Any], None]]:
    """Returns two strategies, and how their values are compared: sums of groups have another order."""
    numbers = list(range(devices))
    divided = dj.FullyShardedStrategy(numbers, shard_over=shard_over)
    assert_equal = assert_close if shard_over else assert_same_bits
    return (dj.MirroredStrategy(numbers), divided), assert_equal


@pytest.mark.parametrize("tx", [long(clipped), long(lambda: optax.MultiSteps(momentum(), 2))])
@pytest.mark.parametrize(("devices", "shard_over"), [(2, None), (4, 2)])
def test_optimizers_that_see_all_gradients(tx: Any, devices: int, shard_over: int | None) -> None:
    """Clipping by global norm, and gradients accumulated over steps, are those of mirrored state."""
    strategies, _ = mirrored_and_divided(devices, shard_over)
    runs = [trained(strategy, *made(strategy, MODELS["loop"], tx)) for strategy in strategies]
    assert_close(*runs, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("shard_over", [None, 2])
def test_partial_batches_and_several_steps(shard_over: int | None) -> None:
    """A partial batch, and several steps in one program, leave the bits of mirrored state."""
    runs = []
    strategies, assert_equal = mirrored_and_divided(4, shard_over)
    for strategy in strategies:
        model, optimizer = made(strategy, MODELS["scan"])
        step = lambda t, y, m=model, o=optimizer: update(m, o, t, y)  # noqa: E731
        iterator = iter(strategy.distribute_dataset(batches((16, 16, 13, 16))))
        first = strategy.run_steps(step, iterator, 2)
        rest = [strategy.run(step, args=batch) for batch in iterator]
        runs.append((np.asarray(first), list(map(float, rest)), values((model, optimizer))))
    assert_equal(*runs)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("devices", "shard_over"), [(2, None), (4, 2)])
def test_a_condition_an_average_and_frozen_parameters(devices: int, shard_over: int | None) -> None:
    """An update under lax.cond, an average of the parameters, and parameters that no update touches."""
    runs = []
    strategies, assert_equal = mirrored_and_divided(devices, shard_over)
    for strategy in strategies:
        with strategy.scope():
            model = Language("loop")
            trainable = nnx.All(nnx.Param, nnx.PathContains("blocks"))
            optimizer = nnx.Optimizer(model, momentum(), wrt=trainable)
            average = nnx.clone(model)

        def step(
            tokens: Any, targets: Any, m: Any = model, o: Any = optimizer, a: Any = average
        ) -> Any:
            def loss_fn(m: Any) -> jax.Array:
                losses = optax.softmax_cross_entropy_with_integer_labels(m(tokens), targets)
                return dj.compute_average_loss(losses.mean(1))

            loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, o.wrt))(m)
            loss, grads = dj.get_replica_context().all_reduce("sum", (loss, grads))
            nnx.cond(loss > 0, lambda m, o: [o.update(m, grads)][:0], lambda m, o: [], m, o)
            mixed = jax.tree.map(lambda x, y: 0.9 * x + 0.1 * y, nnx.state(a), nnx.state(m))
            nnx.update(a, mixed)
            return loss

        losses = [float(strategy.run(step, args=b)) for b in strategy.distribute_dataset(batches())]
        runs.append((losses, values((model, optimizer, average))))
    assert_equal(*runs)


LAYOUTS: dict[str, Callable[[], dj.Strategy]] = {
    "mirrored": lambda: dj.MirroredStrategy([0, 1, 2, 3]),
    "sharded update": lambda: dj.MirroredStrategy([0, 1, 2, 3], shard_optimizer_state=True),
    "one device": lambda: dj.OneDeviceStrategy(0),
    "divided": lambda: dj.FullyShardedStrategy([0, 1, 2, 3]),
    "fewer": lambda: dj.FullyShardedStrategy([0, 1]),
    "more": lambda: dj.FullyShardedStrategy(list(range(8))),
    "groups": lambda: dj.FullyShardedStrategy(list(range(8)), shard_over=4),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["fewer", "sharded update"])
def test_verify_compares_with_one_device_and_finds_a_mean(name: str) -> None:
    """It passes for a correct step; a sum of means is refused, and state is as before it."""
    strategy = LAYOUTS[name]()
    model, optimizer = made(strategy, MODELS["loop"])
    options = dj.RunOptions(verify="always")
    for batch in strategy.distribute_dataset(batches((16, 16))):
        strategy.run(lambda t, y: update(model, optimizer, t, y), args=batch, options=options)

    def wrong(tokens: jax.Array, targets: jax.Array) -> None:
        def loss_fn(model: Any) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(model(tokens), targets).mean()

        grads = nnx.grad(loss_fn)(model)
        optimizer.update(model, dj.get_replica_context().all_reduce("sum", grads))

    before = values(optimizer)
    with pytest.raises(dj.NotEqualError, match="is not the step on one device"):
        strategy.run(wrong, args=batch, options=options)
    assert_same_bits(before, values(optimizer))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("before", "after"),
    [
        *(("divided", name) for name in LAYOUTS if name != "divided"),
        *((name, "mirrored") for name in ("sharded update", "groups")),
        *(("mirrored", name) for name in ("sharded update", "groups")),
        ("groups", "divided"),
    ],
)
def test_checkpoints_are_restored_under_any_other_layout(
    before: str, after: str, tmp_path: Path
) -> None:
    """What is saved is restored on 1, 2, 4 and 8, mirrored or divided, bit by bit, and goes on the same."""
    manager, runs = dj.CheckpointManager(tmp_path), []
    for name in (before, after):
        strategy = LAYOUTS[name]()
        model, optimizer = made(strategy, MODELS["scan"])
        if name == before:
            _, expected = trained(strategy, model, optimizer, (16,))
            manager.save(1, {"model": model, "optimizer": optimizer})
            whole = sum(leaf.nbytes for leaf in jax.tree.leaves(expected))
        manager.restore(1, {"model": model, "optimizer": optimizer})
        assert_same_bits(values((model, optimizer)), expected)
        runs.append(trained(strategy, model, optimizer, (16,))[0])
    np.testing.assert_allclose(*runs, rtol=1e-5)
    files = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(files) < 1.5 * whole


@pytest.mark.exhaustive
def test_a_model_that_cannot_be_divided_is_refused() -> None:
    """If no parameter can be divided, the message names them; small models are replicated."""
    strategy = dj.FullyShardedStrategy([0, 1, 2, 3])
    with strategy.scope():
        layer = nnx.Linear(33, 35, rngs=nnx.Rngs(0))
        small = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    message = r"(?s)can divide none.*kernel: \[33, 35\].*multiples of 4"
    with pytest.raises(ValueError, match=message):
        strategy.run(lambda: layer(jnp.ones((1, 33))).sum())
    strategy.run(lambda: small(jnp.ones((1, 3))).sum())
    whys = {row.path: row.why for row in strategy.placement(layer)}
    assert whys["kernel"] == "no dim is a multiple of 4"
    assert whys["bias"] == "less than 1024 elements"
    with pytest.raises(ValueError, match="is not a pytree of variables and arrays"):
        strategy.placement([3])


def test_the_placement_of_shapes_is_that_of_their_arrays() -> None:
    """Of what jax.eval_shape returns for a tree of parameters and optimizer state, before it is made."""
    strategy = dj.FullyShardedStrategy([0, 1])

    def make() -> Any:
        params = {"dense": {"kernel": jnp.ones((64, 32)), "bias": jnp.ones(32)}}
        return params, optax.adam(0.1).init(params)

    rows = strategy.placement(jax.eval_shape(make))
    assert rows == strategy.placement(make())
    assert {row.path: tuple(row.spec) for row in rows}["[0].dense.kernel"] == (None, "data")


@pytest.mark.parametrize("shard_over", [2, long(None)])
def test_divided_values_are_read_whole(shard_over: int | None) -> None:
    """Whatever gathers, reduces or shows a divided variable returns the whole array."""
    strategy = dj.FullyShardedStrategy([0, 1, 2, 3], shard_over=shard_over)
    host = np.arange(4096.0, dtype=np.float32).reshape(64, 64)
    with strategy.scope():
        variable, param = dj.Variable(host), nnx.Param(jnp.asarray(host))
    strategy.run(lambda: (variable.assign(variable[...] + 0), param.set_value(param[...] + 0))[:0])
    for divided in (variable, param, param[...]):
        # A value of no replica, whoever has read it before.
        is_array = isinstance(divided, jax.Array)
        assert strategy.gather(divided, 0).shape == (64 if is_array else 256, 64)
        whole = [strategy.reduce("mean", divided, axis=None)]
        whole += [] if divided is variable else strategy.experimental_local_results(divided)
        for value in whole:
            np.testing.assert_array_equal(value, host)
    assert not param[...].is_fully_replicated
    assert len(variable.values) == 4
    for value in (variable.numpy(), *variable.values):
        np.testing.assert_array_equal(value, host)


def test_wrong_arguments() -> None:
    """Devices are those of the cluster, and timeouts are for a cluster."""
    resolver = dj.cluster_resolver.SimpleClusterResolver(dj.cluster_resolver.ClusterSpec({}))
    with pytest.raises(ValueError, match=r"leave out devices=\[0, 1\]"):
        dj.FullyShardedStrategy([0, 1], cluster_resolver=resolver)
    with pytest.raises(ValueError, match="cluster_options needs a cluster_resolver"):
        dj.FullyShardedStrategy(cluster_options=dj.ClusterOptions())
    assert dj.FullyShardedStrategy().cluster_resolver is None


def test_the_state_of_a_metric_is_whole() -> None:
    """However large it is: it is read on the host after each epoch."""
    rows = dj.FullyShardedStrategy([0, 1]).placement(dj.metrics.AUC(num_thresholds=2000))
    assert {row.why for row in rows} == {"read on the host after each epoch"}
