"""``check_equals_one_device`` finds common mistakes and names their cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import long
from flax import nnx

import distribute_jax as dj

BATCH = (
    np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32),
    np.ones((8, 1), np.float32),
)
context = dj.get_replica_context


def step_with(
    strategy: dj.Strategy, tx: optax.GradientTransformation, loss: str, op: str
) -> Callable[..., Any]:
    """Returns a training step with a loss and a reduction of the gradients."""
    with strategy.scope():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def step(x: jax.Array, y: jax.Array):
        def loss_fn(model: nnx.Linear):
            each = jnp.mean((model(x) - y) ** 2, axis=-1)
            return {"exact": dj.compute_average_loss(each), "mean": each.mean(), "sum": each.sum()}[
                loss
            ]

        grads = nnx.grad(loss_fn)(model)
        optimizer.update(model, dj.get_replica_context().all_reduce(op, grads))

    step.model = model
    return step


@pytest.mark.parametrize(("loss", "op"), [("exact", "sum"), long("mean", "mean")])
def test_correct_steps_pass_and_update_the_state_once(strategy: dj.Strategy, loss: str, op: str):
    step = step_with(strategy, optax.sgd(0.1), loss, op)
    twin = step_with(strategy, optax.sgd(0.1), loss, op)
    dj.testing.check_equals_one_device(strategy, step, BATCH)
    strategy.run(twin, args=next(iter(strategy.distribute_dataset([BATCH]))))
    np.testing.assert_array_equal(step.model.kernel[...], twin.model.kernel[...])


@pytest.mark.parametrize(
    "tx", [pytest.param(optax.sgd(1e-4), id="sgd"), long(optax.adam(1e-3), id="adam")]
)
@pytest.mark.parametrize(
    ("loss", "op", "text"),
    [
        long("mean", "sum", "4.000 = number of replicas: gradients of a mean were summed"),
        ("sum", "mean", "0.250 = 1 / number of replicas: the gradient of a sum was averaged"),
        long("exact", "mean", "0.250 = 1 / number of replicas"),
    ],
)
def test_wrong_scales_are_named_with_ratio_and_cause(
    s4: dj.MirroredStrategy, tx: optax.GradientTransformation, loss: str, op: str, text: str
):
    step = step_with(s4, tx, loss, op)
    before = np.asarray(step.model.kernel[...])
    with pytest.raises(ValueError, match="is not the step on one device") as caught:
        dj.testing.check_equals_one_device(s4, step, BATCH)
    assert isinstance(caught.value, dj.NotEqualError)
    assert text in str(caught.value)
    assert "model.kernel" in str(caught.value) or "optimizer.opt_state" in str(caught.value)
    np.testing.assert_array_equal(step.model.kernel[...], before)


@pytest.mark.exhaustive
def test_verify_first_checks_once_and_always_each_time(s4: dj.MirroredStrategy):
    right = jnp.ones(())  # captured: read at each call, so a wrong value needs no new program

    def step(x: jax.Array):
        scale = jnp.where(right > 0, 1.0, dj.get_replica_context().num_replicas_in_sync)
        return dj.get_replica_context().all_reduce("sum", jnp.sum(x) * scale)

    (element,) = s4.distribute_dataset([np.ones(8, np.float32)])
    first, always = dj.RunOptions(verify="first"), dj.RunOptions(verify="always")
    s4.run(step, args=(element,), options=first)
    right = -jnp.ones(())
    s4.run(step, args=(element,), options=first)
    with pytest.raises(ValueError, match=r"4\.000 times that on one device"):
        s4.run(step, args=(element,), options=always)
    assert s4._runner.programs() == 1


@pytest.mark.exhaustive
def test_a_step_that_draws_random_numbers_is_refused(s4: dj.MirroredStrategy):
    """Masks of dropout are made equal for the comparison; other numbers cannot be."""
    with s4.scope():
        rngs, total = nnx.Rngs(0), nnx.Variable(jnp.zeros(()))

    def step(x: jax.Array):
        noisy = x + rngs.normal(x.shape)
        total[...] += dj.get_replica_context().all_reduce("sum", noisy.sum())

    with pytest.raises(ValueError, match=r"draws random numbers.*model\.eval\(\)"):
        dj.testing.check_equals_one_device(s4, step, np.ones((8, 50), np.float32))


def test_per_replica_arguments_are_refused(s4: dj.MirroredStrategy):
    ids = s4.experimental_distribute_values_from_function(lambda c: c.replica_id_in_sync_group)
    with pytest.raises(ValueError, match="which has no equivalent there"):
        s4.run(lambda x: x, args=(ids,), options=dj.RunOptions(verify="first"))


@pytest.mark.filterwarnings("ignore:The global batch has 5 examples for 8")
@pytest.mark.parametrize("rows", [5, long(8)])
def test_rows_and_parts_of_sums_pass(strategy: dj.Strategy, rows: int):
    def step(x: jax.Array) -> dict[str, jax.Array]:
        return {
            "rows": 2 * x,
            "labels": x.argmax(1),
            "signs": x > 0,
            "parts of a loss": dj.compute_average_loss(jnp.sum(x**2, axis=1)),
            "counts": jnp.sum(jnp.where(context().batch_mask[:, None], x, 0) > 0),
        }

    dj.testing.check_equals_one_device(strategy, step, BATCH[0][:rows])


def test_means_over_equal_shares_pass(strategy: dj.Strategy):
    dj.testing.check_equals_one_device(strategy, lambda x: jnp.mean(x**2), BATCH[0])


@pytest.mark.parametrize("rows", [5, long(8)])
def test_rows_that_depend_on_the_share_are_refused(s4: dj.MirroredStrategy, rows: int):
    with pytest.raises(dj.NotEqualError, match="result: its rows differ by up to"):
        dj.testing.check_equals_one_device(s4, lambda x: x - x.mean(0), BATCH[0][:rows])


def test_declared_rows_are_compared_where_no_other_size_can_be_traced(s4: dj.MirroredStrategy):
    def step(x: jax.Array, shift: bool):
        if x.shape[0] not in (2, 8):
            raise ValueError("only shares of two, or the whole batch")
        return dj.per_example(x - x.mean(0) if shift else x)

    (x,) = s4.distribute_dataset([BATCH[0]])
    dj.testing.check_equals_one_device(s4, step, (x, False))
    with pytest.raises(dj.NotEqualError, match="rows differ"):
        dj.testing.check_equals_one_device(s4, step, (x, True))


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (lambda x: x.max(), "neither their sum .* nor their mean"),
        long(lambda x: x.std(0), "neither their sum .* nor their mean", id="spread"),
        (lambda x: (x > 1).any(), "neither their sum .* nor their mean"),
        (lambda _: context().replica_id_in_sync_group, "neither their sum .* nor their mean"),
        (lambda x: x.T, r"a replica has shape \(3, 2\), one device \(3, 8\)"),
    ],
    ids=["maximum", None, "any", "replica id", "transposed"],
)
def test_other_per_replica_results_are_refused_by_name(
    s4: dj.MirroredStrategy, step: Callable[..., Any], text: str
):
    with pytest.raises(dj.NotEqualError, match=rf"result: cannot be compared: .*{text}") as caught:
        dj.testing.check_equals_one_device(s4, step, BATCH[0])
    assert "Reduce it in the step" in str(caught.value)


@pytest.mark.exhaustive
@pytest.mark.parametrize("values", [[1e4, 1e4, 1e4], [1e4, 1.0, 1.0]], ids=["all", "one"])
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_updates_near_rounding_are_compared_in_float64(
    s4: dj.MirroredStrategy, op: str, values: list[float]
):
    """In float32 neither the mean of the gradients nor their sum, four times too large, would show."""
    with s4.scope():
        weight = nnx.Param(jnp.array(values, jnp.float32))

    def step(x: jax.Array):
        weight[...] -= 1e-3 * dj.get_replica_context().all_reduce(op, x.mean(0) + 1)

    if op == "mean":
        dj.testing.check_equals_one_device(s4, step, BATCH[0])
    else:
        with pytest.raises(dj.NotEqualError, match=r"weight: .*4\.000 = number of replicas"):
            dj.testing.check_equals_one_device(s4, step, BATCH[0])


def test_without_float64_updates_near_rounding_are_logged(
    s4: dj.MirroredStrategy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def refused(*_: Any):
        raise NotImplementedError("this device has no float64")

    monkeypatch.setattr("distribute_jax.program._verify.in_float64", refused)
    with s4.scope():
        weight = nnx.Param(jnp.full(3, 1e4, jnp.float32))

    def step(x: jax.Array):
        weight[...] -= 3e-4 * dj.get_replica_context().all_reduce("sum", x.mean(0) + 1)

    dj.testing.check_equals_one_device(s4, step, BATCH[0])
    assert "cannot tell" in caplog.text
    assert "weight: changed by up to" in caplog.text
    assert "float64" in caplog.text


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_half_precision_is_compared_with_its_rounding(s4: dj.MirroredStrategy, dtype: Any, op: str):
    with s4.scope():
        model = nnx.Linear(3, 3, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(x: jax.Array):
        grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, dj.get_replica_context().all_reduce(op, grads))

    if op == "mean":
        dj.testing.check_equals_one_device(s4, step, BATCH[0])
    else:
        with pytest.raises(dj.NotEqualError, match=r"4\.000 = number of replicas"):
            dj.testing.check_equals_one_device(s4, step, BATCH[0])


def test_a_mirrored_result_that_depends_on_the_number_of_replicas_is_named(s4: dj.MirroredStrategy):
    def step(x: jax.Array):
        return {"mean of means": dj.get_replica_context().all_reduce("sum", x.mean())}

    with pytest.raises(ValueError, match=r"result\['mean of means'\].*4\.000 = number of replicas"):
        dj.testing.check_equals_one_device(s4, step, np.ones(8, np.float32))
