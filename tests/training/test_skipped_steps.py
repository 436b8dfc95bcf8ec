"""``skip_nonfinite``: a step whose gradients are not finite changes nothing, and the replica is named."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest
from cases import long
from flax import nnx
from leaves import on_host
from model_factory import compile_model, linear

import distribute_jax as dj

ROWS = 16


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0, dropout=1)
        self.layer = nnx.Linear(3, 1, rngs=rngs)
        self.norm = nnx.BatchNorm(1, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.norm(self.layer(x)))[:, 0]


def batches(
    steps: int, bad: Any = (), value: float = np.nan, row: int = ROWS - 1
) -> list[np.ndarray]:
    """Returns batches; those in ``bad`` have a bad number in a row, by default on the last replica."""
    rng = np.random.default_rng(0)
    made = [rng.normal(size=(ROWS, 3)).astype("f4") for _ in range(steps)]
    for step in bad:
        made[step][row, 0] = value
    return made


class Training:
    """A model, its optimizer and a metric, trained in a user's loop."""

    def __init__(self, strategy: dj.Strategy, **options: Any) -> None:
        self.strategy = strategy
        with strategy.scope():
            net = self.net = Net()
            optimizer = self.optimizer = dj.Optimizer(
                net, optax.sgd(0.1, momentum=0.9), skip_nonfinite=True, **options
            )
            metric = self.metric = nnx.metrics.Average()

        def step(x: jax.Array) -> None:
            def loss_fn(net: Net) -> tuple[jax.Array, jax.Array]:
                losses = (net(x) - x[:, 1]) ** 2
                return optimizer.scale_loss(dj.compute_average_loss(losses)), losses

            grads, losses = nnx.grad(loss_fn, has_aux=True)(net)
            optimizer.update(net, grads)
            metric.update(values=losses)

        self.step = step

    def run(self, data: list[np.ndarray]) -> None:
        for x in self.strategy.distribute_dataset(data):
            self.strategy.run(self.step, args=(x,))
        self.strategy._sync_state()

    def state(self) -> list[bytes]:
        """Returns all state that the step writes, except the counts."""
        parts = nnx.state(self.net), nnx.state(self.optimizer), nnx.state(self.metric)
        named = jax.tree_util.tree_leaves_with_path(parts)
        return [on_host(x).tobytes() for p, x in named if "guard" not in jax.tree_util.keystr(p)]


@pytest.fixture
def warnings_logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, "distribute_jax"):
        yield caplog


@pytest.mark.parametrize("value", [np.nan, *(long(v) for v in (np.inf, 1e30))])
def test_a_bad_row_on_one_replica_changes_nothing_on_all(
    strategy: dj.Strategy, value: float, warnings_logged: pytest.LogCaptureFixture
) -> None:
    """Weights, statistics, random streams and metrics are bitwise those without that batch."""
    training, without = Training(strategy), Training(strategy)
    data = batches(5, bad=[3], value=value)
    training.run(data)
    without.run([*data[:3], data[4]])
    assert training.state() == without.state()
    assert (training.optimizer.skipped_steps, without.optimizer.skipped_steps) == (1, 0)
    replica = strategy.num_replicas_in_sync - 1
    assert (
        f"Step 3 was skipped: the gradients of replica {replica} are not finite"
        in warnings_logged.text
    )
    dj.check_in_sync((training.net, training.optimizer))


def test_a_gradient_that_cannot_be_squared_is_skipped(strategy: dj.Strategy) -> None:
    """Adam's second moment would be infinite, and its weight never change again."""
    with strategy.scope():
        layer = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        optimizer = dj.Optimizer(layer, optax.adam(0.1), skip_nonfinite=True)

    def step(x: jax.Array) -> None:
        optimizer.update(
            layer, nnx.grad(lambda of: dj.compute_average_loss(of(x)[:, 0] * x[:, 1]))(layer)
        )

    moved = []
    for x in strategy.distribute_dataset(batches(3, bad=[1], value=1e30)):
        before = np.asarray(layer.kernel[...])
        strategy.run(step, args=(x,))
        moved.append(bool((np.asarray(layer.kernel[...]) != before).all()))
    assert moved == [True, False, True]
    assert optimizer.skipped_steps == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("together", [1, 4])
def test_after_max_consecutive_it_raises_and_none_was_applied(
    s4: dj.Strategy, together: int
) -> None:
    training, without = Training(s4, max_consecutive=3), Training(s4)
    data = batches(7 * together + 6, bad=[2, 3, 4, 5], row=4)
    without.run(data[:2])
    iterator = iter(s4.distribute_dataset(data))
    runs = (s4.run_steps(training.step, iterator, together) for _ in itertools.count())
    with pytest.raises(dj.StepsSkippedError, match=r"4 steps in a row .*step 5 .*\n?.*replica 1 "):
        list(runs)
    assert training.state() == without.state()
    training.run(data[6:7])  # who catches the error may go on
    assert training.state() != without.state()


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 2}, {"loss_scale": 128.0}])
def test_with_accumulation_a_batch_is_left_out_and_with_a_scale_a_step(
    s2: dj.Strategy, options: dict[str, Any]
) -> None:
    training, without = Training(s2, **options), Training(s2, **options)
    data = batches(6, bad=[1])
    training.run(data)
    without.run([data[0], *data[2:]])
    assert training.state() == without.state()
    assert training.optimizer.skipped_steps == 1


def test_outside_of_run_the_update_is_skipped() -> None:
    net = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = dj.Optimizer(net, optax.sgd(1.0), skip_nonfinite=True)
    before = np.asarray(net.kernel[...])
    grads = jax.tree.map(lambda x: x * np.nan, nnx.state(net, nnx.Param))
    optimizer.update(net, grads)
    assert np.array_equal(net.kernel[...], before)
    assert (int(optimizer.step[...]), optimizer.skipped_steps) == (0, 1)


STRATEGIES = {
    "mirrored": lambda: dj.MirroredStrategy([0, 1]),
    "fully sharded": lambda: dj.FullyShardedStrategy([0, 1, 2, 3]),
    "two on each": lambda: dj.MirroredStrategy([0, 1], replicas_per_device=2),
    "central": lambda: dj.CentralStorageStrategy([0, 1], parameter_device="cpu:2"),
    "servers": lambda: dj.ParameterServerStrategy(workers=2, max_staleness=0),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", STRATEGIES)
def test_fit_leaves_a_bad_batch_out(kind: str, warnings_logged: pytest.LogCaptureFixture) -> None:
    """From loss, metrics and weights; evaluate does not log it again."""

    def fitted(data: list[np.ndarray]) -> tuple[Any, list[np.ndarray], int]:
        options = {"optimizer": optax.adam(0.1), "metrics": ["mae"], "skip_nonfinite": True}
        model = compile_model(STRATEGIES[kind](), linear(3), **options)
        rows = [(x, x[:, :1]) for x in data]
        model.evaluate(rows, verbose=0)
        history = model.fit(rows, verbose=0).history
        model.evaluate(rows, verbose=0)
        weights = [np.asarray(v[...]) for v in jax.tree.leaves(nnx.state(model.module))]
        return history, weights, model.optimizer.skipped_steps

    data = batches(5, bad=[2], value=np.inf)
    history, weights, skipped = fitted(data)
    other, others, none = fitted([*data[:2], *data[3:]])
    assert history == other
    assert all(map(np.array_equal, weights, others))
    assert (skipped, none) == (1, 0)
    assert re.findall(r"Step (.*) was skipped", warnings_logged.text) == ["2"]


@pytest.mark.exhaustive
def test_verify_ignores_which_replica_was_bad(s4: dj.Strategy) -> None:
    model = compile_model(s4, linear(3), skip_nonfinite=True, verify="first")
    model.fit([(x, x[:, :1]) for x in batches(2, bad=[0])], verbose=0)
    assert model.optimizer.skipped_steps == 1


def test_fit_raises_at_the_end_of_an_epoch_at_the_latest() -> None:
    model = dj.Model(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    optimizer = dj.Optimizer(model.module, optax.sgd(0.1), skip_nonfinite=True, max_consecutive=0)
    model.compile(optimizer, loss="mse")
    with pytest.raises(dj.StepsSkippedError, match="step 3"):
        model.fit([(x, x[:, :1]) for x in batches(4, bad=[3])], verbose=0)


@pytest.mark.exhaustive
def test_an_update_that_may_be_skipped_is_made_in_place(s2: dj.Strategy) -> None:
    """The program needs no copy of the state: parameters and moments are 2 MB."""
    batch = tuple(s2.distribute_dataset([np.ones((2, 64), "f4")]))
    needed = []
    for skip in (False, True):
        net = nnx.Linear(64, 3_000, rngs=nnx.Rngs(0))
        optimizer = dj.Optimizer(net, optax.adam(0.1), skip_nonfinite=skip)

        def step(x: jax.Array, net: Any = net, optimizer: Any = optimizer) -> None:
            loss_fn = lambda net: dj.compute_average_loss(net(x).mean(1))  # noqa: E731
            optimizer.update(net, nnx.grad(loss_fn)(net))

        needed.append(s2.plan(step, args=batch).temporary_bytes)
    assert needed[1] < 1.1 * needed[0]


@pytest.mark.exhaustive
def test_a_skipped_step_is_undone_if_weights_changed_before(s2: dj.Strategy) -> None:
    """By a first update with finite gradients, and by the step itself."""
    with s2.scope():
        net = Net()
        optimizer = dj.Optimizer(net, optax.adam(0.1), skip_nonfinite=True)

    def step(x: jax.Array) -> None:
        net.layer.bias[...] += 1
        for factor in (1, x[0, 0] / x[0, 0]):
            loss_fn = lambda net: dj.compute_average_loss(net.layer(x)[:, 0] ** 2) * factor  # noqa: B023, E731
            optimizer.update(net, nnx.grad(loss_fn)(net))

    before = [np.asarray(x) for x in jax.tree.leaves(nnx.state((net, optimizer), nnx.Param))]
    (batch,) = s2.distribute_dataset([np.ones((ROWS, 3), "f4") * (np.arange(ROWS) > 0)[:, None]])
    s2.run(step, args=(batch,))
    after = jax.tree.leaves(nnx.state((net, optimizer), nnx.Param))
    assert optimizer.skipped_steps == 1
    assert all(map(np.array_equal, before, after))
