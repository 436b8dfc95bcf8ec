"""Steps that would leave replicas out of sync are refused, with the variable, the cause and the remedy."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.experimental import checkify
from jax.sharding import NamedSharding, PartitionSpec

import distribute_jax as dj


@pytest.fixture
def batch(s4: dj.MirroredStrategy):
    """One distributed batch of eight examples."""
    (batch,) = s4.distribute_dataset([(np.arange(16.0).reshape(8, 2), np.ones((8, 1)))])
    return batch


def model_and_optimizer(strategy: dj.Strategy) -> tuple[nnx.Linear, nnx.Optimizer]:
    """A linear model with momentum."""
    with strategy.scope():
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.01, momentum=0.9), wrt=nnx.Param)


def grads_of(model: nnx.Linear, x: jax.Array, y: jax.Array) -> tuple[jax.Array, nnx.State]:
    """Loss and local gradients of this replica."""
    return nnx.value_and_grad(
        lambda model: dj.compute_average_loss(jnp.mean((model(x) - y) ** 2, axis=-1))
    )(model)


def test_state_that_a_part_of_a_mean_decides_names_the_reduction(
    s4: dj.MirroredStrategy, batch: tuple[dj.PerReplica, ...]
):
    """As in a line search, whose function must return the loss of all replicas."""
    model, _ = model_and_optimizer(s4)

    def step(x: jax.Array, y: jax.Array) -> None:
        loss = dj.compute_average_loss(model(x)[:, 0])
        model.bias[...] = jnp.where(loss > 0, model.bias[...], 0)

    with pytest.raises(dj.OutOfSyncError, match=r"all_reduce\('sum', part\) is the mean"):
        s4.run(step, args=batch)


def test_weights_updated_from_unreduced_gradients_are_refused_by_name(
    s4: dj.MirroredStrategy, batch: tuple[dj.PerReplica, ...]
):
    model, optimizer = model_and_optimizer(s4)

    def step(x: jax.Array, y: jax.Array):
        loss, grads = grads_of(model, x, y)
        optimizer.update(model, grads)
        return loss

    before = np.asarray(model.kernel[...])
    with pytest.raises(ValueError, match="different on each of the 4 replicas") as caught:
        s4.run(step, args=batch)
    message = str(caught.value)
    assert isinstance(caught.value, dj.OutOfSyncError)
    assert "model.kernel (Param) depends on args[0], args[1]\n" in message
    assert "model.bias (Param)" in message
    assert "optimizer.opt_state" in message
    for pairing in (
        'all_reduce("sum", grads)   # the loss is dj.compute_average_loss(losses)',
        'all_reduce("mean", grads)  # the loss is a mean over this replica',
        "dj.Optimizer does the first by itself",
    ):
        assert pairing in message
    np.testing.assert_array_equal(model.kernel[...], before)
    with pytest.raises(ValueError, match="kernel"):
        s4.run(step, kwargs={"x": batch[0], "y": batch[1]})
    s4.run(step, args=batch, options=dj.RunOptions(check_sync=False))


def test_a_weight_written_with_the_replica_id_is_refused(s4: dj.MirroredStrategy):
    model, _ = model_and_optimizer(s4)

    def step():
        model.bias[...] += dj.get_replica_context().replica_id_in_sync_group

    with pytest.raises(ValueError, match=r"model\.bias \(Param\) depends on axis_index"):
        s4.run(step)


def test_one_replica_has_nothing_to_reduce():
    one = dj.OneDeviceStrategy(0)
    model, optimizer = model_and_optimizer(one)

    def step(x: jax.Array, y: jax.Array):
        loss, grads = grads_of(model, x, y)
        optimizer.update(model, grads)
        return loss

    (element,) = one.distribute_dataset([(np.ones((8, 2)), np.ones((8, 1)))])
    assert isinstance(one.run(step, args=element), jax.Array)


def test_a_params_shaped_result_that_would_differ_is_refused(
    s4: dj.MirroredStrategy, batch: tuple[dj.PerReplica, ...]
):
    params = {"w": jnp.ones((2, 1)), "b": jnp.zeros(1)}

    def step(params, x, y, reduce):
        loss, grads = jax.value_and_grad(
            lambda p: dj.compute_average_loss(jnp.mean((x @ p["w"] + p["b"] - y) ** 2, axis=-1))
        )(params)
        if reduce:
            grads = dj.get_replica_context().all_reduce("sum", grads)
        return loss, {"params": jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)}

    with pytest.raises(ValueError, match="came in equal on every replica") as caught:
        s4.run(step, args=(params, *batch, False))
    message = str(caught.value)
    assert "args[0]" in message
    assert "result[1]['params']['w'] depends on args[1], args[2]" in message
    loss, new = s4.run(step, args=(params, *batch, True))
    assert isinstance(loss, dj.PerReplica)
    assert isinstance(new["params"]["w"], jax.Array)


def test_a_train_state_of_linen_trains_and_is_proved(
    s4: dj.MirroredStrategy, batch: tuple[dj.PerReplica, ...]
):
    module = nn.Dense(1)

    def fresh():
        params = module.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
        return TrainState.create(apply_fn=module.apply, params=params, tx=optax.adam(0.01))

    def step(state, x, y, reduce=True):
        def loss_fn(params):
            out = state.apply_fn({"params": params}, x)
            return dj.compute_average_loss(jnp.mean((out - y) ** 2, axis=-1))

        grads = jax.grad(loss_fn)(state.params)
        if reduce:
            grads = dj.get_replica_context().all_reduce("sum", grads)
        return state.apply_gradients(grads=grads)

    with pytest.raises(ValueError, match="came in equal"):
        s4.run(functools.partial(step, reduce=False), args=(fresh(), *batch))
    state, wanted = fresh(), fresh()
    x, y = (np.asarray(s4.gather(leaf, axis=0)) for leaf in batch)
    one, donated = dj.OneDeviceStrategy(0), dj.RunOptions(donate_args=True)
    for _ in range(3):
        old = state.params["kernel"]
        state = s4.run(step, args=(state, *batch), options=donated)
        wanted = one.run(step, args=(wanted, x, y))
    assert isinstance(state, TrainState)
    assert int(state.step) == 3
    assert old.is_deleted()
    np.testing.assert_allclose(state.params["kernel"], wanted.params["kernel"], rtol=1e-5)


def test_a_condition_inside_a_library_is_reported_with_its_line(s4: dj.MirroredStrategy):
    """A line search reads the loss under its condition, and the local gradient decides that."""
    tx = optax.scale_by_zoom_linesearch(2)

    def step(x: jax.Array):
        value_fn = lambda w: jax.lax.pmean((x * w).sum(), "data")  # noqa: E731
        w = jnp.ones(())
        value, grad = jax.value_and_grad(value_fn)(w)
        return tx.update(-grad, tx.init(w), w, value=value, grad=grad, value_fn=value_fn)[0]

    (x,) = s4.distribute_dataset([np.arange(4.0)])
    with pytest.raises(dj.DeadlockError, match=r"cond at optax/_src/linesearch\.py:\d+") as caught:
        s4.run(step, args=(x,))
    assert 'value_fn=lambda p: replica.all_reduce("sum", loss(replica.all' in str(caught.value)


@pytest.mark.exhaustive
def test_a_line_search_that_is_written_as_its_error_says_is_that_of_one_device(
    s4: dj.MirroredStrategy,
):
    """Three steps of L-BFGS, whose search takes the value and the gradient of all replicas."""
    tx, x = optax.lbfgs(), np.random.default_rng(0).normal(size=(16, 3))

    def step(w: jax.Array, state: Any, x: jax.Array) -> Any:
        replica = dj.get_replica_context()

        def loss(w: jax.Array) -> jax.Array:
            return dj.compute_average_loss((x @ w - x.sum(1)) ** 2)

        value_fn = lambda p: replica.all_reduce("sum", loss(replica.all_reduce("mean", p)))  # noqa: E731
        value, grad = jax.value_and_grad(value_fn)(w)
        updates, state = tx.update(grad, state, w, value=value, grad=grad, value_fn=value_fn)
        return optax.apply_updates(w, updates), state

    results = []
    for strategy in (s4, dj.OneDeviceStrategy(0)):
        (batch,) = strategy.distribute_dataset([x])
        w, state = jnp.zeros(3), tx.init(jnp.zeros(3))
        for _ in range(3):
            w, state = strategy.run(step, args=(w, state, batch))
        results.append(w)
    np.testing.assert_allclose(*results, rtol=1e-4)


def constrained(x: jax.Array) -> jax.Array:
    """A constraint over the axis of the replicas, which is manual already."""
    return jax.lax.with_sharding_constraint(x, PartitionSpec("data"))


def constrained_to_a_mesh(x: jax.Array) -> jax.Array:
    """The same with a mesh, which JAX refuses only when it compiles."""
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("data",))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec("data")))


def mapped(x: jax.Array) -> jax.Array:
    """A ``shard_map`` over other axes."""
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("x",))
    spec = PartitionSpec("x")
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)(x)


def checked(x: jax.Array) -> jax.Array:
    """A check without ``checkify``."""
    checkify.check(x[0] > 0, "negative")
    return x


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (constrained, "shards an array over devices.*ModelParallelStrategy"),
        (constrained_to_a_mesh, "shards an array over devices.*ModelParallelStrategy"),
        (mapped, "shards an array over devices.*ModelParallelStrategy"),
        (checked, "calls checkify.check.*error, result = checkify"),
    ],
)
def test_what_jax_cannot_run_on_one_replica_is_explained(
    s4: dj.MirroredStrategy, step: Any, text: str
):
    (x,) = s4.distribute_dataset([np.arange(16.0)])
    with pytest.raises(dj.ArgumentError, match=f"(?s){step.__name__} {text}"):
        s4.run(step, args=(x,))


def test_a_cache_of_each_replica_is_kept_out_of_the_module(s4: dj.MirroredStrategy):
    """The refusal of a cache for decoding says how, and so does that of its variables in args."""
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)

    def decoded(strategy: dj.Strategy) -> Any:
        with strategy.scope():
            model = nnx.MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(0))
            model.init_cache((2, 4, 8))

        def token(x: jax.Array, cache: Any = None, to_result: Any = nnx.to_pure_dict) -> Any:
            copy = nnx.clone(model)
            copy.init_cache((len(x), 4, 8))
            nnx.update(copy, cache or {})
            return copy(x[:, None])[:, 0], to_result(nnx.state(copy, nnx.Cache))

        (batch,) = strategy.distribute_dataset([x])
        if strategy is s4:
            with pytest.raises(
                dj.OutOfSyncError, match=r"cached_key \(Cache\) .*nnx\.clone\(module"
            ):
                strategy.run(lambda x: model(x[:, None]), args=(batch,))
            state = strategy.run(lambda x: token(x, None, lambda state: state)[1], args=(batch,))
            with pytest.raises(dj.ArgumentError, match=r"(?s)PerReplica.*nnx\.to_pure_dict"):
                strategy.run(token, args=(batch, state))
        out, cache = strategy.run(token, args=(batch,))
        for _ in range(2):
            out, cache = strategy.run(token, args=(out, cache))
        return strategy.gather(out, axis=0)

    np.testing.assert_allclose(decoded(s4), decoded(dj.OneDeviceStrategy(0)), rtol=1e-5)


def test_steps_that_cannot_equal_one_device_log_it_once(
    s4: dj.MirroredStrategy, caplog: pytest.LogCaptureFixture
):
    class Net(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
            self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array):
            return self.drop(self.norm(x))

    def texts(strategy: dj.Strategy) -> list[str]:
        with strategy.scope():
            model = Net()
        caplog.clear()
        (batch,) = strategy.distribute_dataset([np.ones((8, 2))])
        for _ in range(2):
            strategy.run(model, args=(batch,))
            strategy.run(lambda x: model(x), args=(batch,))
        return [record.getMessage() for record in caplog.records]

    logged = texts(s4)
    assert len(logged) == 2
    assert any("norm (BatchNorm)" in text and 'axis_name="data"' in text for text in logged)
    assert any("drop.rngs (RngStream)" in text and "model.eval()" in text for text in logged)
    assert texts(dj.OneDeviceStrategy(0)) == []


def test_a_cache_that_starts_equal_is_told_how_to_start(s4: dj.MirroredStrategy):
    """A cache of zeros in args is not taken for weights: each replica gets its array from the start."""
    (batch,) = s4.distribute_dataset([np.arange(8.0)])
    cache = {"values": jnp.zeros((2, 3)), "index": jnp.zeros((), jnp.int32)}

    def step(cache: Any, x: jax.Array) -> Any:
        values = cache["values"].at[:, cache["index"]].set(x)
        return values.sum(1), {"values": values, "index": cache["index"] + 1}

    with pytest.raises(dj.OutOfSyncError, match=r"(?s)values.*a cache for decoding") as error:
        s4.run(step, args=(cache, batch))
    assert "experimental_distribute_values_from_function" in str(error.value)
    cache = s4.experimental_distribute_values_from_function(lambda context, cache=cache: cache)
    for _ in range(2):
        sums, cache = s4.run(step, args=(cache, batch))
    np.testing.assert_array_equal(s4.gather(sums, axis=0), 2 * np.arange(8.0))


# Copies of what is assumed to be mirrored, which ``verify`` compares


def of_replica(wrong: jax.Array) -> Any:
    """Assumes that 1 is mirrored, while the last replica adds a little if ``wrong`` is 1."""
    replica = dj.get_replica_context()
    last = replica.replica_id_in_sync_group == replica.num_replicas_in_sync - 1
    return dj.assume_mirrored(1.0 + 1e-6 * wrong * last)


@pytest.mark.parametrize("lowering", ["shard_map", "pmap"])
def test_a_value_that_is_wrongly_assumed_mirrored_is_found(s4: dj.MirroredStrategy, lowering: Any):
    """One bit on one of four replicas: state, result, device and line are named; state is unchanged."""
    with s4.scope():
        state, untouched = nnx.Param(jnp.float32(2.0)), nnx.Param(jnp.float32(2.0))

    def step(wrong: jax.Array) -> Any:
        value = of_replica(wrong)
        state[...] = state[...] * value
        untouched[...] = untouched[...] + 1.0
        return value, wrong

    options = dj.RunOptions(verify="always", lowering=lowering)
    s4.run(step, args=(0.0,), options=options)  # the replicas agree
    with pytest.raises(
        dj.OutOfSyncError, match=r"dj.assume_mirrored at test_sync_errors.py:\d+"
    ) as found:
        s4.run(step, args=(1.0,), options=options)
    named = [line.strip() for line in str(found.value).splitlines() if "unequal to" in line]
    assert [line.split(",")[0] for line in named] == ["state", "result[0]"]
    assert all("cpu:3 unequal to cpu:0, cpu:1, cpu:2" in line for line in named)
    assert (float(state[...]), float(untouched[...])) == (2.0, 3.0)
    dj.check_in_sync((state, untouched))
    s4.run(step, args=(1.0,), options=dj.RunOptions(lowering=lowering, verify="off"))  # it drifts
    with pytest.raises(dj.OutOfSyncError, match=r"\[0\], float32"):
        dj.check_in_sync((state, untouched))


def test_without_the_proof_the_copies_are_compared_as_well(s2: dj.MirroredStrategy):
    """Nothing was assumed, so the error is about check_sync=False."""
    with s2.scope():
        state = nnx.Param(jnp.float32(2.0))

    def step() -> None:
        state[...] += dj.get_replica_context().replica_id_in_sync_group

    options = dj.RunOptions(verify="first", check_sync=False)
    with pytest.raises(dj.OutOfSyncError, match=r"(?s)state, float32.*check_sync=False.*as before"):
        s2.run(step, options=options)
    assert float(state[...]) == 2.0
