"""run_steps: several steps in one dispatch are equal to single steps."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import long
from flax import nnx

import distribute_jax as dj


def trained(strategy: dj.Strategy, sizes: list[int], steps: int | None) -> dict[str, object]:
    """Trains on batches of these sizes, one by one or ``steps`` at a time."""
    rng = np.random.default_rng(0)
    batches = [(rng.normal(size=(n, 3)), rng.normal(size=(n, 1))) for n in sizes]
    with strategy.scope():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    def step(x: jax.Array, y: jax.Array):
        loss, grads = nnx.value_and_grad(
            lambda model: dj.compute_average_loss(jnp.mean((model(x) - y) ** 2, axis=-1))
        )(model)
        optimizer.update(model, dj.get_replica_context().all_reduce("sum", grads))
        return loss, dj.get_replica_context().all_reduce("sum", loss)

    iterator = iter(strategy.distribute_dataset(batches))
    losses: list[float] = []
    while True:
        try:
            if steps is None:
                _, loss = strategy.run(step, args=next(iterator))
                losses.append(float(loss))
            else:
                local, loss = strategy.run_steps(step, iterator, steps=steps)
                parts = strategy.experimental_local_results(local)
                np.testing.assert_allclose(sum(np.asarray(p) for p in parts), loss, rtol=1e-5)
                losses += loss.tolist()
        except StopIteration:
            return {"losses": losses, "kernel": np.asarray(model.kernel[...])}


@functools.cache
def by_single_steps(replicas: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    return trained(dj.MirroredStrategy(list(range(replicas))), list(sizes), None)


@pytest.mark.parametrize(
    ("sizes", "steps"),
    [
        ([8] * 4 + [5], 2),
        long([8] * 7, 3),
        long([8] * 3 + [1], 4),
    ],
)
def test_scanned_steps_equal_single_steps_remainders_included(
    strategy: dj.Strategy, sizes: list[int], steps: int
):
    single = by_single_steps(strategy.num_replicas_in_sync, tuple(sizes))
    scanned = trained(strategy, sizes, steps)
    np.testing.assert_allclose(scanned["losses"], single["losses"], rtol=1e-5)
    np.testing.assert_allclose(scanned["kernel"], single["kernel"], rtol=1e-5)


def test_scanned_steps_trace_the_step_once(s2: dj.MirroredStrategy):
    traces, iterator = [], iter(s2.distribute_dataset([np.ones(4, np.float32)] * 9))
    with s2.scope():
        count = nnx.Variable(jnp.zeros(()))

    def step(x: jax.Array):
        traces.append(1)
        count[...] += dj.get_replica_context().all_reduce("sum", x.sum())

    for _ in range(3):
        s2.run_steps(step, iterator, steps=3)
    assert float(count[...]) == 4 * 9
    assert len(traces) == 1


def test_wrong_arguments_are_explained(s2: dj.MirroredStrategy):
    dataset = s2.distribute_dataset([np.ones(4)])
    with pytest.raises(ValueError, match=r"iter\(dataset\)"):
        s2.run_steps(lambda x: x, dataset, steps=2)
    for steps in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="must be an integer >= 1"):
            s2.run_steps(lambda x: x, iter(dataset), steps=steps)


def test_stacked_results_of_a_partial_batch_cannot_be_gathered(s2: dj.MirroredStrategy):
    iterator = iter(s2.distribute_dataset([np.ones(4, np.float32), np.ones(3, np.float32)]))
    rows = s2.run_steps(lambda x: x, iterator, steps=2)
    with pytest.raises(ValueError, match=r"use strategy\.run"):
        s2.gather(rows, axis=0)


def test_rows_of_a_partial_batch_on_one_replica_are_not_stacked():
    """The error says what to write; it was an error of jnp.stack."""
    one = dj.OneDeviceStrategy("cpu:0")
    iterator = iter(one.distribute_dataset([np.ones(4, np.float32), np.ones(3, np.float32)]))
    with pytest.raises(ValueError, match="run_steps cannot stack results whose shapes differ"):
        one.run_steps(lambda x: x, iterator, steps=2)


def test_a_thread_that_makes_the_batches_may_take_a_snapshot(s2: dj.MirroredStrategy):
    """As actors do, whose episodes a learner waits for: both waited for each other."""
    with s2.scope():
        weight = nnx.Variable(jnp.zeros(()))

    def step(x: jax.Array):
        weight[...] += x

    def batches(actor: ThreadPoolExecutor):
        while True:
            yield actor.submit(lambda: dj.snapshot(weight)[...] + 1).result(timeout=60)

    with ThreadPoolExecutor(1) as actor:
        for _ in range(2):
            s2.run_steps(step, batches(actor), steps=2)
    assert float(weight[...]) == 2 + 2 * 3


@pytest.mark.parametrize("sizes", [(4, 4, 3), (3, 4, 4)])
def test_numbers_that_differ_between_full_and_partial_batches_are_stacked(
    s2: dj.MirroredStrategy, sizes: tuple[int, ...]
):
    """The number of examples is an int of Python for a full batch. Parts of some steps are refused."""
    batches = [np.ones(size, np.float32) for size in sizes]
    count = lambda x: dj.get_replica_context().real_examples  # noqa: E731
    counts = s2.run_steps(count, iter(s2.distribute_dataset(batches)), steps=3)
    assert counts.tolist() == [*sizes]
    if sizes[-1] == 3:
        mask = lambda x: jnp.sum(dj.get_replica_context().batch_mask)  # noqa: E731
        with pytest.raises(ValueError, match="only some of the steps have for each replica"):
            s2.run_steps(
                lambda x: mask(x) if dj.get_replica_context().is_padded else 2,
                iter(s2.distribute_dataset(batches)),
                steps=3,
            )


@pytest.mark.parametrize("came", [0, 1, 2])
def test_batches_before_an_error_of_the_source_are_run(s2: dj.MirroredStrategy, came: int):
    """As with single steps, the state includes them: no batch that was taken is lost."""
    with s2.scope():
        count = nnx.Variable(jnp.zeros(()))

    def step(x: jax.Array):
        count[...] += dj.get_replica_context().all_reduce("sum", x.sum())

    def batches():
        for _ in range(came):
            yield np.ones(4, np.float32)
        raise OSError("disk")

    iterator = iter(s2.distribute_dataset(batches))
    with pytest.raises(OSError, match="disk") as caught:
        s2.run_steps(step, iterator, steps=3)
    assert float(count[...]) == 4 * came
    notes = getattr(caught.value, "__notes__", [])
    assert bool(came) == any(f"on the {came} batches that came before" in note for note in notes)
    with pytest.raises(StopIteration):
        s2.run_steps(step, iterator, steps=3)
