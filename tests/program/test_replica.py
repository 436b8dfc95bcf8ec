"""The replica context: collectives on whole trees, their gradients, and merge_call."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from leaves import replica_number

import distribute_jax as dj

context = dj.get_replica_context


@pytest.mark.parametrize(("op", "wanted"), [("sum", 3.0), ("MEAN", 1.5), (dj.ReduceOp.SUM, 3.0)])
def test_all_reduce_of_one_and_two(s2: dj.MirroredStrategy, op: object, wanted: float):
    result = s2.run(lambda: context().all_reduce(op, replica_number() + 1))
    assert [float(v) for v in s2.experimental_local_results(result)] == [wanted] * 2


def test_all_reduce_of_a_nest_in_one_call(s2: dj.MirroredStrategy):
    def step(op: str):
        first = jnp.where(replica_number() == 0, 1, 3)
        inner = jnp.where(replica_number() == 0, jnp.array([39, 2]), jnp.array([3, 41]))
        return context().all_reduce(op, (first, {"inner": [inner]}))

    total = s2.run(step, args=("sum",))
    assert (int(total[0]), total[1]["inner"][0].tolist()) == (4, [42, 43])
    mean = s2.run(step, args=("mean",))
    assert (float(mean[0]), mean[1]["inner"][0].tolist()) == (2.0, [21.0, 21.5])


def test_mixed_dtypes_in_one_call_keep_their_dtypes(s2: dj.MirroredStrategy):
    def step():
        leaves = {
            "f": replica_number(),
            "b": replica_number().astype(jnp.bfloat16),
            "i": jnp.int32(2),
            "n": 1.5,
        }
        return context().all_reduce("sum", leaves), context().all_reduce("mean", leaves)

    total, mean = s2.run(step)
    assert {k: (float(v), str(v.dtype)) for k, v in total.items()} == {
        "f": (1.0, "float32"), "b": (1.0, "bfloat16"), "i": (4.0, "int32"), "n": (3.0, "float32"),
    }  # fmt: skip
    assert {k: (float(v), str(v.dtype)) for k, v in mean.items()} == {
        "f": (0.5, "float32"), "b": (0.5, "bfloat16"), "i": (2.0, "float32"), "n": (1.5, "float32"),
    }  # fmt: skip


@pytest.mark.parametrize("leaf", [True, "text", jnp.array(True), np.bool_(True)])
def test_leaves_that_cannot_be_added_are_named(s2: dj.MirroredStrategy, leaf: object):
    with pytest.raises(ValueError, match=r"cannot be combined.*\n.*\['flag'\]"):
        s2.run(lambda: context().all_reduce("sum", {"ok": 1.0, "flag": leaf}))


def test_all_gather_joins_in_replica_order_for_everyone(s4: dj.MirroredStrategy):
    rows = s4.run(lambda: context().all_gather(replica_number() * jnp.ones((1, 2)), axis=0))
    assert isinstance(rows, jax.Array)
    assert rows.tolist() == [[i, i] for i in range(4)]
    columns = s4.run(
        lambda: context().all_gather({"a": replica_number() * jnp.ones((2, 1))}, axis=-1)
    )
    assert columns["a"].tolist() == [[0, 1, 2, 3]] * 2
    with pytest.raises(ValueError, match="has no dims"):
        s4.run(lambda: context().all_gather(replica_number(), axis=0))
    with pytest.raises(ValueError, match="only 1 dims"):
        s4.run(lambda: context().all_gather(jnp.ones(2), axis=1))


@pytest.mark.parametrize(
    ("loss", "wanted"),
    [
        # The upstream gradients are 1 and 2: their sum, their mean, the slice of their sum.
        (lambda x: (replica_number() + 1) * context().all_reduce("sum", x), [3.0, 3.0]),
        (lambda x: (replica_number() + 1) * context().all_reduce("mean", x), [1.5, 1.5]),
        (
            lambda x: (
                (replica_number() + 1)
                * jnp.dot(context().all_gather(x[None], 0), jnp.array([10.0, 1.0]))
            ),
            [30.0, 3.0],
        ),
        (lambda x: (replica_number() + 1) * x**2, [2.0, 8.0]),
    ],
    ids=["sum", "mean", "gather", "local"],
)
def test_gradients_are_those_of_tensorflow(
    s2: dj.MirroredStrategy, loss: Callable[[jax.Array], jax.Array], wanted: list[float]
):
    result = s2.run(lambda: jax.grad(loss)(replica_number() + 1))
    assert [float(v) for v in s2.experimental_local_results(result)] == wanted


def test_wrong_arguments_are_named(s2: dj.MirroredStrategy):
    """A wrong axis and a merge_fn that is not a function raise our error, not JAX's."""
    for axis in ("a", None, 1.5):
        with pytest.raises(ValueError, match=r"all_gather.* axis must be an int"):
            s2.run(lambda axis=axis: context().all_gather(jnp.ones(2), axis))
    with pytest.raises(ValueError, match="merge_call: merge_fn must be a function; got 3"):
        s2.run(lambda: context().merge_call(3))


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, nnx.jit, lambda f: lambda: f()])
def test_merge_call_works_inside_nested_functions(s2: dj.MirroredStrategy, wrap: Any):
    def inner():
        return context().merge_call(
            lambda strategy, v: strategy.reduce("sum", v), args=(replica_number() + 3,)
        )

    assert float(s2.run(lambda: wrap(inner)())) == 7.0


def test_merge_call_in_cross_replica_context_is_explained(s2: dj.MirroredStrategy):
    def outer(strategy: dj.Strategy, value: object):
        replica.merge_call(lambda s: None)

    replica = None

    def step():
        nonlocal replica
        replica = context()
        replica.merge_call(outer, args=(1.0,))

    with pytest.raises(RuntimeError, match="merge_call was called in cross-replica context"):
        s2.run(step)


def test_a_context_of_another_place_is_refused(s2: dj.MirroredStrategy):
    """One made outside has one replica, so its sum is not one; a finished step's has no axis."""
    outside, kept = context(), []
    uses = (
        lambda replica: replica.all_reduce("sum", 1.0),
        lambda replica: replica.all_gather(jnp.ones(2), axis=0),
        lambda replica: replica.merge_call(lambda strategy: 1.0),
        lambda replica: replica.replica_id_in_sync_group,
        lambda replica: replica.batch_mask,
        lambda replica: replica.real_examples,
    )
    s2.run(lambda: kept.append(context()))
    for use in (*uses, lambda replica: replica.num_replicas_in_sync):
        with pytest.raises(
            RuntimeError, match=r"outside the step .* dj.get_replica_context\(\) in"
        ):
            s2.run(lambda use=use: use(outside))
        use(outside)
    for use in uses:
        with pytest.raises(RuntimeError, match="outside the step that the context belongs to"):
            use(kept[0])


def test_an_error_in_merge_call_leaves_the_contexts_clean(s2: dj.MirroredStrategy):
    def failing(strategy: dj.Strategy):
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        s2.run(lambda: context().merge_call(failing))
    assert not dj.has_strategy()


@pytest.mark.exhaustive
def test_a_model_captured_out_of_sight_is_refused_when_read_or_changed(s2: dj.MirroredStrategy):
    with s2.scope():
        hidden = itertools.cycle([nnx.Linear(1, 1, rngs=nnx.Rngs(0))])  # it cannot be walked

    def change():
        next(hidden).bias[...] = jnp.ones(1)

    def differentiate():
        return nnx.grad(lambda m: m(jnp.ones((1, 1))).sum())(next(hidden))

    for step in (change, differentiate, lambda: next(hidden)(jnp.ones((1, 1)))):
        with pytest.raises(ValueError, match=r"args=\(model, x\)") as caught:
            s2.run(step)
        assert isinstance(caught.value, dj.StaleCaptureError)


def test_a_captured_variable_written_in_a_transformation_is_explained(s2: dj.MirroredStrategy):
    """The error is about the transformation, and its advice works."""
    with s2.scope():
        total = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)

    def add(carry: jax.Array, variable: dj.Variable = total) -> tuple[jax.Array, None]:
        variable.assign_add(1.0)
        return carry, None

    def scan():
        jax.lax.scan(lambda carry, _: add(carry), 0.0, None, length=3)

    def differentiate():
        nnx.grad(lambda x: add(x)[0])(1.0)

    for step in (scan, differentiate):
        with pytest.raises(dj.StaleCaptureError, match=r"cannot write .*nnx\.scan.*nnx\.grad"):
            s2.run(step)

    def advised():
        def body(variable: dj.Variable, x: jax.Array) -> dj.Variable:
            add(x, variable)
            return variable

        nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(total, jnp.zeros(3))

    s2.run(advised)
    assert float(total.numpy()) == 6.0


def test_losses_and_regularisation_outside_a_replica_are_refused(s2: dj.MirroredStrategy):
    with s2.scope():
        for function in (dj.compute_average_loss, dj.scale_regularization_loss):
            with pytest.raises(RuntimeError, match="in cross replica context"):
                function(jnp.ones(2))
    with pytest.raises(ValueError, match="leave the mean out"):
        s2.run(lambda: dj.compute_average_loss(jnp.ones(())))


def test_average_loss_weights_sizes_and_regularisation(s2: dj.MirroredStrategy):
    (batch,) = s2.distribute_dataset([np.arange(8.0)])
    weights = jnp.array([1.0, 1.0, 0.0, 0.0])

    def step(x: jax.Array):
        return (
            dj.compute_average_loss(x),
            dj.compute_average_loss(x, sample_weight=weights),
            dj.compute_average_loss(x, global_batch_size=2),
            dj.compute_average_loss(jnp.stack([x, x], 1)),
            dj.scale_regularization_loss(jnp.array([1.0, 2.0])),
        )

    sums = [float(s2.reduce("sum", v)) for v in s2.run(step, args=(batch,))]
    assert sums == [3.5, (0 + 1 + 4 + 5) / 8, 14.0, 7.0, 3.0]
