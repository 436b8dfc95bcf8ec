"""``shard_optimizer_state=True``: the numbers of mirrored state, with 1/N of it on each device."""

from __future__ import annotations

import copy
import functools
import gc
import re
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import long
from flax import nnx
from leaves import assert_close_to_largest

import distribute_jax as dj
from distribute_jax.program import _placement

REPLICAS = [4, *(long(n) for n in (1, 2, 8))]


def sharded_strategy(replicas: int) -> dj.MirroredStrategy:
    return dj.MirroredStrategy(list(range(replicas)), shard_optimizer_state=True)


@pytest.fixture
def z4() -> dj.MirroredStrategy:
    return sharded_strategy(4)


class Net(nnx.Module):
    """A layer of 33 × 35, which is not divisible, and one of 35 × 64."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(33, 35, rngs=rngs)
        self.second = nnx.Linear(35, 64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(nnx.tanh(self.first(x)))


DIVIDED = 35 * 64
WHOLE = 33 * 35 + 35 + 64


def is_kernel(params: Any) -> Any:
    """The mask of the weights that decay."""
    return jax.tree.map(lambda x: x.ndim > 1, params)


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "adam": lambda: optax.adam(0.01),
    "clipped": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(0.01, weight_decay=0.1, mask=is_kernel)
    ),
    "lamb": lambda: optax.lamb(0.01),
    "averaged": lambda: optax.chain(optax.sgd(0.05), optax.ema(0.9)),
    "several": lambda: optax.MultiSteps(optax.adam(0.01), 2),
}


def batches(sizes: list[int]) -> list[Any]:
    rng = np.random.default_rng(3)
    return [(rng.normal(size=(n, 33)).astype("f"), rng.integers(0, 64, n)) for n in sizes]


def made(strategy: dj.Strategy, tx: Any, **kwargs: Any) -> tuple[Net, Any]:
    """Returns a model and its optimizer: with options ``dj.Optimizer``, otherwise Flax's."""
    with strategy.scope():
        model = Net()
        kind = dj.Optimizer if kwargs else functools.partial(nnx.Optimizer, wrt=nnx.Param)
        return model, kind(model, tx, **kwargs)


def update(model: Net, optimizer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The step of one replica; ``dj.Optimizer`` sums the gradients itself."""

    def loss_fn(model: Net) -> jax.Array:
        return dj.compute_average_loss(optax.softmax_cross_entropy_with_integer_labels(model(x), y))

    replica = dj.get_replica_context()
    loss, grads = nnx.value_and_grad(loss_fn)(model)
    if not isinstance(optimizer, dj.Optimizer):
        loss, grads = replica.all_reduce("sum", (loss, grads))
        optimizer.update(model, grads)
        return loss
    optimizer.update(model, grads)
    return replica.all_reduce("sum", loss)


def values(tree: Any) -> Any:
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(tree)))


assert_close = functools.partial(assert_close_to_largest, least=1e-6)


def trained(strategy: dj.Strategy, names: tuple[str, ...]) -> Any:
    """Ten steps with each optimizer, in one program; partial batches among them."""
    pairs = {name: made(strategy, OPTIMIZERS[name]()) for name in names}

    def step(x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
        return {name: update(*pair, x, y) for name, pair in pairs.items()}

    data = batches([16, 16, 16, 13, 16, 16, 16, 16, 1, 16])
    losses = [
        jax.tree.map(float, strategy.run(step, args=batch))
        for batch in strategy.distribute_dataset(data)
    ]
    return (
        losses,
        {name: [values(x) for x in pair] for name, pair in pairs.items()},
        strategy._runner.programs(),
    )


@functools.cache
def on_one_device(names: tuple[str, ...]) -> Any:
    """The reference."""
    return trained(dj.OneDeviceStrategy(0), names)


SOME = ("clipped",)
OTHERS = tuple(name for name in OPTIMIZERS if name not in SOME)


@pytest.mark.exhaustive
@pytest.mark.parametrize("names", [SOME, OTHERS])
@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_every_optimizer_trains_as_on_one_device(names: tuple[str, ...], replicas: int) -> None:
    losses, state, programs = trained(sharded_strategy(replicas), names)
    wanted_losses, wanted, wanted_programs = on_one_device(names)
    # One for full batches and one for padded ones; a single replica pads nothing.
    assert programs == (2 if replicas > 1 else wanted_programs)
    assert_close(wanted_losses, losses)
    for name, trees in wanted.items():
        assert_close(trees, state[name], 2e-4)


def bytes_of_state(optimizer: Any) -> dict[jax.Device, int]:
    """Returns the bytes of an optimizer's state on each device."""
    held: dict[jax.Device, int] = {}
    for array in jax.tree.leaves(nnx.state(optimizer, nnx.OptState)):
        for shard in array.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return held


def program_of(strategy: dj.Strategy) -> Any:
    """Returns the only program of a strategy."""
    (program,) = strategy._runner.cache.programs.values()
    return program


def collectives_of(program: Any) -> Counter[str]:
    """Returns the number of collectives of each kind in a compiled program."""
    kinds = "all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute"
    return Counter(re.findall(rf" ({kinds})(?:-start)?\(", program.compiled.as_text()))


@pytest.mark.parametrize("replicas", REPLICAS)
def test_each_device_keeps_its_shard_from_the_first_step_on(replicas: int) -> None:
    """The full arrays are freed, and state is updated in place."""
    strategy = sharded_strategy(replicas)
    model, optimizer = made(strategy, optax.adam(0.01))
    (batch,) = strategy.distribute_dataset(batches([16]))
    traces = []

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        traces.append(1)
        return update(model, optimizer, x, y)

    small = 2 * 4 * WHOLE + 8
    share = 2 * 4 * DIVIDED // replicas + small
    whole = [weakref.ref(array) for array in jax.tree.leaves(nnx.state(optimizer))]
    strategy.run(step, args=batch)
    gc.collect()
    assert not any(ref() for ref in whole)
    for _ in range(2):
        before = [weakref.ref(x) for x in jax.tree.leaves(nnx.state((model, optimizer)))]
        strategy.run(step, args=batch)
        assert set(bytes_of_state(optimizer).values()) == {share}
        gc.collect()
        assert not any(ref() for ref in before)
    assert len(traces) == strategy._runner.programs() == 1
    program = program_of(strategy)
    memory = program.compiled.memory_analysis()
    params = 4 * (DIVIDED + WHOLE)
    assert memory.alias_size_in_bytes == params + share
    if replicas > 1:
        found = collectives_of(program)
        assert (found["reduce-scatter"], found["all-gather"]) == (1, 1)
        assert found["all-to-all"] == found["collective-permute"] == 0


@pytest.mark.exhaustive
def test_the_state_is_not_gathered_in_the_step(z4: dj.MirroredStrategy) -> None:
    """Only weights are: an Adam step needs less memory than with mirrored state."""
    used = {}
    for strategy in (z4, dj.MirroredStrategy([0, 1, 2, 3])):
        model, optimizer = made(strategy, OPTIMIZERS["clipped"]())
        (batch,) = strategy.distribute_dataset(batches([16]))
        strategy.run(functools.partial(update, model, optimizer), args=batch)
        memory = program_of(strategy).compiled.memory_analysis()
        used[strategy is z4] = (
            memory.argument_size_in_bytes,
            memory.temp_size_in_bytes + memory.argument_size_in_bytes,
        )
    saved = 2 * 4 * DIVIDED * 3 // 4
    assert used[False][0] - used[True][0] == saved
    assert used[False][1] - used[True][1] > 0.9 * saved


@pytest.mark.exhaustive
@pytest.mark.parametrize("replicas", REPLICAS)
def test_accumulated_gradients_and_run_steps(replicas: int) -> None:
    """``dj.Optimizer`` reduces under a condition, so its collectives are there too."""
    results = []
    for strategy in (sharded_strategy(replicas), dj.OneDeviceStrategy(0)):
        model, optimizer = made(
            strategy,
            optax.adam(0.01),
            gradient_accumulation_steps=2,
            clip_global_norm=0.5,
            loss_scale="dynamic",
        )

        def step(x: jax.Array, y: jax.Array, model=model, optimizer=optimizer) -> jax.Array:
            return update(model, optimizer, x, y)

        iterator = iter(strategy.distribute_dataset(batches([16] * 10)))
        losses = [float(strategy.run(step, args=next(iterator))) for _ in range(2)]
        losses += strategy.run_steps(step, iterator, steps=4).tolist()
        losses += strategy.run_steps(step, iterator, steps=4).tolist()
        results.append((losses, values(model), values(optimizer.opt_state)))
        if strategy.num_replicas_in_sync > 1:
            assert strategy._runner.programs() == 1
            found = collectives_of(program_of(strategy))
            assert (found["reduce-scatter"], found["all-gather"]) == (1, 1)
            _outside_conditions_is_no(program_of(strategy), "all-gather")
    assert_close(results[1], results[0], 2e-4)


def _outside_conditions_is_no(program: Any, collective: str) -> None:
    assert f" {collective}(" not in program.compiled.as_text().partition("\nENTRY ")[2]


def test_gradients_are_scattered_inside_a_jit(z4: dj.MirroredStrategy) -> None:
    model, optimizer = made(z4, optax.sgd(0.01, momentum=0.9))
    whole_step = nnx.jit(update)
    (batch,) = z4.distribute_dataset(batches([16]))
    z4.run(lambda x, y: (whole_step(model, optimizer, x, y), x.sum()), args=batch)
    assert collectives_of(program_of(z4))["reduce-scatter"] == 1


def in_a_scan(model: Net, optimizer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Two updates in a loop with collectives, so each replica runs it on the full state."""

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def one(pair: Any, part: Any) -> Any:
        return pair, update(*pair, *part)

    parts = (x.reshape(2, -1, 33), y.reshape(2, -1))
    return one((model, optimizer), parts)[1]


def weights_used_again(model: Net, optimizer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The new weights are used on each replica, so each computes them."""
    update(model, optimizer, x, y)
    return dj.get_replica_context().all_reduce("mean", model(x)).sum()


def gradients_returned(model: Net, optimizer: Any, x: jax.Array, y: jax.Array) -> Any:
    """The summed gradients are a result too."""
    grads = nnx.grad(lambda m: dj.compute_average_loss(jnp.sum(m(x) ** 2, -1)))(model)
    grads = dj.get_replica_context().all_reduce("sum", grads)
    optimizer.update(model, grads)
    return jax.tree.leaves(nnx.to_pure_dict(grads))


def other_results(model: Net, optimizer: Any, x: jax.Array, y: jax.Array) -> Any:
    """Rows, a constant, an unchanged argument, and state that is set to a number."""
    loss = update(model, optimizer, x, y)
    optimizer.step[...] = jnp.uint32(7)
    return loss, x, y + 1, 3.0, model.first.kernel


def on_a_condition(model: Net, optimizer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Updates on a condition that all replicas compute from the same loss."""
    loss = dj.get_replica_context().all_reduce("mean", jnp.mean(model(x) ** 2))
    for limit in (0.0, 1e9):
        nnx.cond(
            loss > limit,
            lambda m, o, x, y: update(m, o, x, y),
            lambda m, o, x, y: jnp.zeros(()),
            model, optimizer, x, y,
        )  # fmt: skip
    return loss


PROGRAMS = (in_a_scan, weights_used_again, gradients_returned, other_results, on_a_condition)


@pytest.mark.exhaustive
@pytest.mark.parametrize("body", PROGRAMS, ids=lambda body: body.__name__)
def test_steps_that_are_only_partly_sharded_equal_mirrored(
    body: Callable[..., Any], z4: dj.MirroredStrategy
) -> None:
    results = []
    for strategy in (z4, dj.MirroredStrategy([0, 1, 2, 3])):
        model, optimizer = made(strategy, optax.adam(0.01))
        for batch in strategy.distribute_dataset(batches([16, 16])):
            out = strategy.run(functools.partial(body, model, optimizer), args=batch)
        local = strategy.experimental_local_results(out)
        numbers = [np.asarray(x) for x in jax.tree.leaves(local) if hasattr(x, "shape")]
        results.append((numbers, values(model), values(optimizer)))
        if strategy is z4:
            assert set(bytes_of_state(optimizer).values()) == {2 * DIVIDED + 8 * WHOLE + 8}
    assert_close(results[1], results[0], 1e-4)


@pytest.mark.exhaustive
def test_callbacks_and_rbg_keys_run_on_each_replica(z4: dj.MirroredStrategy) -> None:
    """rbg keys would draw other numbers if they were sharded."""
    results = []
    for strategy in (z4, dj.MirroredStrategy([0, 1, 2, 3])):
        with strategy.scope():
            noise = optax.add_noise(0.1, 0.5, jax.random.key(0, impl="rbg"))
        model, optimizer = made(strategy, optax.chain(noise, optax.sgd(0.1, momentum=0.9)))
        seen: list[float] = []
        told = functools.partial(_append, seen)

        def step(x: jax.Array, y: jax.Array, model=model, optimizer=optimizer, told=told) -> None:
            update(model, optimizer, x, y)
            jax.debug.callback(told, model.second.bias.sum())

        for batch in strategy.distribute_dataset(batches([16])):
            strategy.run(step, args=batch)
        jax.effects_barrier()
        results.append((seen, values(model)))
    assert len(results[0][0]) == len(results[1][0]) == 4
    assert_close(results[1], results[0])


def _append(seen: list[float], value: Any) -> None:
    seen.append(float(value))


@pytest.mark.exhaustive
def test_optax_state_among_the_arguments_stays_replicated(z4: dj.MirroredStrategy) -> None:
    tx = optax.adam(0.01)
    weights = {"w": jnp.ones((33, 64))}

    def step(weights: Any, state: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: dj.compute_average_loss(jnp.sum((x @ p["w"]) ** 2, -1)))(weights)
        grads = dj.get_replica_context().all_reduce("sum", grads)
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    ((x, _),) = z4.distribute_dataset(batches([16]))
    found = z4.run(step, args=(weights, tx.init(weights), x))
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(found))
    mirrored = dj.MirroredStrategy([0, 1, 2, 3])
    assert_close(mirrored.run(step, args=(weights, tx.init(weights), x)), found, 0)


class Noisy(nnx.Module):
    """A batch norm and a dropout before a layer."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0, dropout=1)
        self.norm = nnx.BatchNorm(33, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(33, 64, rngs=rngs)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "ops", [None, dj.HierarchicalCopyAllReduce(), dj.ReductionToOneDevice(), dj.RingAllReduce()]
)
def test_batch_norm_dropout_and_cross_device_ops_equal_mirrored(ops: Any) -> None:
    results = []
    for sharded in (True, False):
        strategy = dj.MirroredStrategy(
            [0, 1, 2, 3], cross_device_ops=ops, shard_optimizer_state=sharded
        )
        with strategy.scope():
            model = Noisy()
            optimizer = dj.Optimizer(model, optax.adam(0.01))

        def step(x: jax.Array, model=model, optimizer=optimizer) -> jax.Array:
            def loss(m: Any) -> jax.Array:
                return dj.compute_average_loss(jnp.sum(m.out(m.dropout(m.norm(x))) ** 2, -1))

            optimizer.update(model, nnx.grad(loss)(model))
            return model.dropout(x)

        for x, _ in strategy.distribute_dataset(batches([16, 16])):
            masked = strategy.gather(strategy.run(step, args=(x,)), axis=0)
        results.append((np.asarray(masked), values(nnx.state(model, nnx.Not(nnx.RngState)))))
        divided = optimizer.opt_state[0].mu.out.kernel.get_raw_value()
        assert divided.addressable_shards[0].data.shape == (33, 16 if sharded else 64)
    assert_close(results[1], results[0])


@pytest.mark.exhaustive
def test_state_can_be_checked_snapshotted_and_restored(z4: dj.MirroredStrategy) -> None:
    model, optimizer = made(z4, optax.adam(0.01))
    step = functools.partial(update, model, optimizer)
    first, second = z4.distribute_dataset(batches([16, 16]))
    z4.run(step, args=first)
    kept = dj.snapshot({"model": nnx.state(model), "optimizer": nnx.state(optimizer)})
    z4.run(step, args=second)
    dj.check_in_sync([model, optimizer])
    after = values(optimizer)
    nnx.update(model, kept["model"])
    # Whole arrays, as from elsewhere: they are divided again.
    nnx.update(optimizer, jax.tree.map(np.asarray, kept["optimizer"]))
    z4.run(step, args=second)
    assert_close(after, values(optimizer))
    assert set(bytes_of_state(optimizer).values()) == {2 * DIVIDED + 8 * WHOLE + 8}
    assert z4._runner.programs() == 1


def test_pmap_refuses_sharded_state(z4: dj.MirroredStrategy) -> None:
    model, optimizer = made(z4, optax.adam(0.01))
    (batch,) = z4.distribute_dataset(batches([16]))
    step = functools.partial(update, model, optimizer)
    with pytest.raises(dj.LoweringError, match=r"pmap(.|\n)*without shard_optimizer_state=True"):
        z4.run(step, args=batch, options=dj.RunOptions(lowering="pmap"))


def test_the_option_is_shown_and_checked() -> None:
    strategy = sharded_strategy(2)
    assert repr(strategy) == "MirroredStrategy([cpu:0, cpu:1], shard_optimizer_state=True)"
    assert "shard" not in repr(dj.MirroredStrategy([0, 1]))
    assert repr(copy.deepcopy(strategy)) == repr(strategy)
    for make in (dj.MirroredStrategy, dj.MultiWorkerMirroredStrategy):
        with pytest.raises(ValueError, match="shard_optimizer_state must be a bool; got 'yes'"):
            make(shard_optimizer_state="yes")


@pytest.mark.parametrize(
    ("shape", "replicas", "dim"),
    [
        ((), 4, None),
        ((1024,), 1, None),  # nobody to share with
        ((1024,), 4, 0),
        ((1020,), 4, None),  # too small
        ((1025,), 4, None),  # indivisible
        ((32, 64), 4, 1),
        ((64, 32), 4, 1),  # the first is that of stacked layers
        ((8, 128, 64), 4, 1),
        ((128, 256), 4, 0),  # shares of rows are contiguous
        ((256, 4, 64), 4, 0),
        ((8, 3, 64, 256), 4, 2),
        ((8, 32, 31), 4, None),  # too small for one layer
        ((4, 333), 4, 0),  # the larger dim does not divide
        ((0, 4096), 4, None),
    ],
)
def test_which_dim_is_divided(shape: tuple[int, ...], replicas: int, dim: int | None) -> None:
    assert _placement.share_dim(shape, replicas) == dim


@pytest.mark.exhaustive
def test_the_conformance_suite_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharding every array that can be, since those of the suite are small."""
    monkeypatch.setattr(_placement, "LEAST_ELEMENTS", 1)
    report = dj.testing.check_strategy(
        lambda devices: dj.MirroredStrategy(devices, shard_optimizer_state=True), [4]
    )
    assert report.refused == ()
