"""Mixed precision and gradient accumulation."""

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
from leaves import assert_close, assert_same_bits
from model_factory import Scale, compile_model

import distribute_jax as dj

pytestmark = pytest.mark.filterwarnings("ignore:The global batch has")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 3)).astype(np.float32)
Y = (X @ np.array([[1.0], [-2.0], [0.5]], np.float32)).astype(np.float32)


def make_net() -> nnx.Sequential:
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(3, 8, rngs=rngs), nnx.tanh, nnx.Linear(8, 1, rngs=rngs))


def make_model(strategy: dj.Strategy, **options: Any) -> dj.Model:
    return compile_model(strategy, make_net, **{"optimizer": optax.sgd(0.1)} | options)


def fit(model: dj.Model, **options: Any) -> list[float]:
    history = model.fit(X, Y, batch_size=4, shuffle=False, verbose=0, **options)
    return list(history.history["loss"])


@pytest.mark.exhaustive
def test_accumulated_gradients_are_those_of_the_larger_batch(strategy: dj.Strategy):
    options = {"optimizer": optax.adam(0.1), "clip_global_norm": 0.5}
    small = make_model(strategy, gradient_accumulation_steps=3, **options)
    large = make_model(strategy, **options)
    fit(small)
    large.fit(X, Y, batch_size=12, shuffle=False, verbose=0)
    assert int(small.optimizer.step[...]) == int(large.optimizer.step[...]) == 2
    assert_close(small.get_weights(), large.get_weights(), rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
def test_gradients_are_reduced_only_in_the_branch_of_the_update(s4: dj.MirroredStrategy):
    model = make_model(s4, gradient_accumulation_steps=3)
    fit(model)
    (program,) = s4._runner.cache.programs.values()
    top = [equation.primitive.name for equation in program.traced.jaxpr.jaxpr.eqns]
    assert "psum" not in top
    assert "cond" in top
    assert "psum" in str(program.traced.jaxpr)


@pytest.mark.exhaustive
def test_accumulated_gradients_are_part_of_a_checkpoint(
    s2: dj.MirroredStrategy, s4: dj.MirroredStrategy, tmp_path: Any
):
    """Saved between two updates on four replicas, it continues on two to the same weights."""
    options: dict[str, Any] = {"gradient_accumulation_steps": 2}
    whole, half, other = (make_model(strategy, **options) for strategy in (s4, s4, s2))
    for model, first, last in ((whole, 0, 16), (half, 0, 12)):
        model.fit(X[first:last], Y[first:last], batch_size=4, shuffle=False, verbose=0)
    half.save(tmp_path / "half")
    other.load(tmp_path / "half")
    other.fit(X[12:16], Y[12:16], batch_size=4, shuffle=False, verbose=0)
    assert_close(whole.get_weights(), other.get_weights(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", ["mixed_float16", long("mixed_bfloat16")])
def test_mixed_precision_computes_in_half_precision_with_float32_weights(
    s4: dj.MirroredStrategy, policy: str
):
    model, exact = make_model(s4, dtype_policy=policy), make_model(s4)
    losses, expected = fit(model, epochs=2), fit(exact, epochs=2)
    np.testing.assert_allclose(losses, expected, rtol=2e-2)
    assert losses != expected
    assert {w.dtype for w in model.get_weights()} == {np.dtype(np.float32)}
    dtype = "bf16" if "bfloat" in policy else "f16"
    program = next(iter(s4._runner.cache.programs.values()))
    # Of matrices: a vector of zeros looks for what is not finite in the gradients, which are float32.
    dots = re.findall(r":\w+\[\d+,\d+\] = dot_general", str(program.traced.jaxpr))
    assert dots
    assert all(dot.startswith(f":{dtype}[") for dot in dots)
    assert model.predict(X).dtype == np.float32


def test_an_overflow_is_skipped_and_halves_the_scale(strategy: dj.Strategy):
    model = make_model(strategy, dtype_policy="mixed_float16")
    before = model.get_weights()
    model.train_on_batch(X[:4] * 1e4, Y[:4] * 1e8)
    assert_same_bits(before, model.get_weights())
    assert int(model.optimizer.step[...]) == 0
    assert float(model.optimizer.loss_scale.scale[...]) == 2.0**14
    model.train_on_batch(X[:4], Y[:4])
    assert int(model.optimizer.step[...]) == 1
    assert not np.array_equal(before[0], model.get_weights()[0])


@pytest.mark.exhaustive
def test_the_scale_doubles_after_many_good_updates():
    optimizer = dj.Optimizer(make_net(), optax.sgd(0.1), loss_scale="dynamic")
    optimizer.loss_scale.good_steps[...] = jnp.asarray(1999, jnp.int32)
    optimizer.loss_scale.adjust(jnp.asarray(True))
    assert float(optimizer.loss_scale.scale[...]) == 2.0**16
    assert int(optimizer.loss_scale.good_steps[...]) == 0
    fixed = dj.Optimizer(make_net(), optax.sgd(0.1), loss_scale=8.0)
    fixed.loss_scale.adjust(jnp.asarray(False))
    assert float(fixed.loss_scale.scale[...]) == 8.0


def test_a_scale_above_the_range_of_float16_divides_gradients_of_float16(s2: dj.MirroredStrategy):
    """A dynamic scale doubles to 2**16, which is infinite in float16: all gradients were 0 from then on."""
    with s2.scope():
        net = nnx.Linear(1, 1, use_bias=False, param_dtype=jnp.float16, rngs=nnx.Rngs(0))
        optimizer = dj.Optimizer(net, optax.sgd(1.0), loss_scale=2.0**16)
    before = float(net.kernel[0, 0])

    def step(x: jax.Array) -> None:
        def loss(net: nnx.Linear) -> jax.Array:
            return optimizer.scale_loss(dj.compute_average_loss(net(x)[:, 0]))

        optimizer.update(net, nnx.grad(loss)(net))

    (batch,) = s2.distribute_dataset([np.full((4, 1), 0.5, np.float32)])
    s2.run(step, args=(batch,))
    assert before - float(net.kernel[0, 0]) == pytest.approx(0.5, abs=1e-3)


def test_a_fixed_scale_that_the_loss_cannot_hold_is_refused():
    """Every update was skipped, and nothing said so."""
    optimizer = dj.Optimizer(Scale(), optax.sgd(0.1), loss_scale=2.0**16)
    assert float(optimizer.scale_loss(jnp.float32(1))) == 2.0**16
    with pytest.raises(
        dj.ArgumentError, match="above 65504, the largest number of the loss's float16"
    ):
        optimizer.scale_loss(jnp.float16(1))


@pytest.mark.exhaustive
def test_policy_scaling_and_accumulation_in_a_users_loop(strategy: dj.Strategy):
    nets = []
    for policy, scale in ((dj.DTypePolicy("mixed_float16"), 128.0), (dj.DTypePolicy(), None)):
        with strategy.scope():
            net = make_net()
            optimizer = dj.Optimizer(
                net, optax.sgd(0.1), gradient_accumulation_steps=2, loss_scale=scale
            )

        def step(x: jax.Array, y: jax.Array) -> None:
            def loss_fn(net: nnx.Sequential) -> jax.Array:
                with policy.computing(net):  # noqa: B023 - run at once
                    out = policy.cast_output(net(policy.cast_input(x)))  # noqa: B023
                loss = dj.compute_average_loss(((out - y) ** 2)[:, 0])
                return optimizer.scale_loss(loss)  # noqa: B023

            optimizer.update(net, nnx.grad(loss_fn)(net))  # noqa: B023

        data = [(X[i : i + 4], Y[i : i + 4]) for i in range(0, 24, 4)]
        for batch in strategy.distribute_dataset(data):
            strategy.run(step, args=batch)
        assert int(optimizer.step[...]) == 3
        nets.append(net)
    assert_close(*(nnx.to_pure_dict(nnx.state(n)) for n in nets), rtol=2e-2, atol=2e-3)


def test_unknown_options_are_refused():
    cases: list[tuple[dict[str, Any], str]] = [
        ({"gradient_accumulation_steps": 1.5}, "gradient_accumulation_steps"),
        ({"clip_global_norm": 0}, "clip_global_norm"),
        ({"loss_scale": "huge"}, "loss_scale"),
        ({"loss_scale": -1}, "loss_scale"),
    ]
    for options, text in cases:
        with pytest.raises(ValueError, match=text):
            dj.Optimizer(Scale(), optax.sgd(0.1), **options)
    with pytest.raises(ValueError, match="dtype_policy"):
        dj.DTypePolicy("int8")
