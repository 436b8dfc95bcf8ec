"""The second call of a step traces, compiles and moves nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distribute_jax as dj
from distribute_jax.program import _call

compilations: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: compilations.append(event) if "backend_compile" in event else None
)


def test_the_second_call_traces_and_compiles_nothing_and_keeps_everything_in_place(
    strategy: dj.Strategy,
):
    with strategy.scope():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    traces = []

    def step(x: jax.Array, y: jax.Array):
        traces.append(1)
        loss, grads = nnx.value_and_grad(
            lambda model: dj.compute_average_loss(jnp.mean((model(x) - y) ** 2, axis=-1))
        )(model)
        optimizer.update(model, dj.get_replica_context().all_reduce("sum", grads))
        return loss

    batches = [(np.ones((8, 3), np.float32), np.ones((8, 1), np.float32))] * 4
    iterator = iter(strategy.distribute_dataset(batches))
    for _ in range(2):  # the first reduce and the first batch compile their own small programs
        strategy.reduce("sum", strategy.run(step, args=next(iterator)))
    compilations.clear()
    for batch in iterator:
        loss = strategy.reduce("sum", strategy.run(step, args=batch))
    assert np.isfinite(float(loss))
    assert compilations == []
    assert len(traces) == 1
    for variable in jax.tree.leaves(nnx.state((model, optimizer))):
        assert variable.sharding.is_equivalent_to(
            jax.sharding.NamedSharding(strategy.mesh, jax.P()), variable.ndim
        )


def test_a_trace_leaves_what_flax_stores_on_modules_the_identical_objects(s2: dj.MirroredStrategy):
    """nnx.capture, as in fit, makes them again: every program of the model would be bound again."""
    with s2.scope():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    before = dict(vars(model))
    s2.run(lambda: nnx.capture(lambda model: model(jnp.ones(3)), nnx.Intermediate)(model)[0])
    assert all(vars(model)[key] is value for key, value in before.items())


def test_a_compilation_would_be_seen():
    compilations.clear()
    jax.jit(lambda x: x * 3.25)(jnp.ones(17)).block_until_ready()
    assert compilations


ALIASES = {
    "reduce": lambda s, w: s.reduce("mean", w),
    "local results": lambda s, w: s.experimental_local_results(w)[-1],
    "a shard": lambda s, w: w[...].addressable_shards[-1].data,
    "the array": lambda s, w: w[...],
    "device_put": lambda s, w: jax.device_put(w[...], jax.devices()[0]),
}


@pytest.mark.parametrize("how", ALIASES)
@pytest.mark.parametrize("placed", ["argument", "captured"])
def test_an_argument_may_share_memory_with_the_state(strategy: dj.Strategy, how: str, placed: str):
    """JAX 0.10 crashes the process if a donated buffer is also read: it is copied first."""
    with strategy.scope():
        w = nnx.Param(jnp.arange(3.0))
    held = {"x": jnp.ones(3)}

    def step(*x: jax.Array):
        w[...] = w[...] + (x[0] if x else held["x"])

    def run(x: jax.Array):
        held["x"] = x
        strategy.run(step, args=(x,) if placed == "argument" else ())

    run(jnp.ones(3))
    for _ in range(2):
        run(ALIASES[how](strategy, w))
    np.testing.assert_array_equal(w[...], 4 * (np.arange(3.0) + 1))


def test_an_argument_of_the_type_of_the_state_does_not_wait_for_the_step_before(
    strategy: dj.Strategy, monkeypatch: pytest.MonkeyPatch
):
    """Of the state only what is computed already can share memory with a computed argument."""
    with strategy.scope():
        total = nnx.Variable(jnp.zeros(()))
    waited: list[jax.Array] = []

    def wait(array: jax.Array) -> jax.Array:
        waited.append(array)
        return array.block_until_ready()

    def step(x: jax.Array) -> None:
        total[...] += x

    number = jnp.float32(2)
    strategy.run(step, args=(number,))
    monkeypatch.setattr(_call, "_computed", wait)
    strategy.run(step, args=(number,))
    assert [array is number for array in waited] == [True]
    assert float(total[...]) == 4
