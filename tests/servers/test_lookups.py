"""Tables of which a worker reads the rows that its batch looks up."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import long
from flax import nnx
from leaves import assert_same_bits

import distribute_jax as dj
from distribute_jax import _errors
from distribute_jax.servers import Store

P = dj.experimental.partitioners
SECONDS = 60
ROWS, FEATURES = 2000, 16


class Net(nnx.Module):
    """An embedding of four ids, and a layer."""

    def __init__(self) -> None:
        self.embed = nnx.Embed(ROWS, FEATURES, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(4 * FEATURES, 1, rngs=nnx.Rngs(1))

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.head(self.embed(ids).reshape(ids.shape[0], -1))[:, 0]


def train(strategy: dj.Strategy, tx: Any, batches: Any) -> tuple[Net, Any, list[np.ndarray]]:
    """Trains; returns the model, the step, and losses and state."""
    with strategy.scope():
        model = Net()
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def step(ids: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(
            lambda model: dj.compute_average_loss((model(ids) - ids.sum(1) % 2) ** 2)
        )(model)
        optimizer.update(model, dj.get_replica_context().all_reduce("sum", grads))
        return loss

    if isinstance(strategy, dj.ParameterServerStrategy):
        coordinator = dj.coordinator.ClusterCoordinator(strategy)
        losses = [coordinator.schedule(step, args=(ids,)) for ids in batches]
        coordinator.join(SECONDS)
        losses = coordinator.fetch(losses)
    else:
        losses = [strategy.run(step, args=(ids,)) for ids in batches]
    state = jax.tree.leaves(nnx.to_pure_dict(nnx.state((model, optimizer))))
    return model, step, [*map(np.asarray, losses), *map(np.asarray, state)]


def of_servers(**options: Any) -> dj.ParameterServerStrategy:
    """A strategy of one worker and two servers, each with a half of the table."""
    options = {"workers": 1, "max_staleness": 0} | options
    return dj.ParameterServerStrategy(None, P.FixedShardsPartitioner(2), servers=2, **options)


def batches(steps: int = 3) -> list[np.ndarray]:
    """Ids of which some repeat."""
    ids = np.random.default_rng(0).zipf(1.2, (steps, 32, 4)) * 7919 % ROWS
    return list(ids.astype(np.int32))


OPTIMIZERS = {
    "adagrad": optax.adagrad(0.1),
    "adam": optax.adam(0.1),
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "rmsprop": optax.rmsprop(0.1),  # changes some rows of the table, and all of its state
    "clip+adamw": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1)),
}


@pytest.fixture(autouse=True)
def _nothing_was_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_errors, "_logged", set())


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of what workers ask for, get and stage."""
    sizes: list[int] = []
    answer = Store.answer

    def counted(store: Any, message: Any) -> Any:
        got = answer(store, message)
        sizes.extend(x.nbytes for x in (*message.arrays, *got.arrays))
        return got

    monkeypatch.setattr(Store, "answer", counted)
    return sizes


@pytest.mark.parametrize("name", [name if name == "rmsprop" else long(name) for name in OPTIMIZERS])
def test_rows_are_read_and_updated_with_the_bits_of_one_device(
    name: str, sent: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """With a small part of the bytes; the log says which updates compute all rows all the same."""
    *_, wanted = train(dj.OneDeviceStrategy("cpu:0"), OPTIMIZERS[name], batches())
    *_, got = train(of_servers(), OPTIMIZERS[name], batches())
    assert_same_bits(wanted, got)
    assert 0 < sum(sent) < 3 * ROWS * FEATURES * 4 * 2 / 8
    all_rows = "update of model.embed.embedding computes all of its rows" in caplog.text
    assert all_rows is (name not in ("adagrad", "rmsprop", "sgd"))


@pytest.mark.exhaustive
def test_lazy_updates_change_only_rows_that_were_looked_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By Adam with its moments; what the variables held at an earlier join stays as it was."""
    strategy = dj.ParameterServerStrategy(workers=1, max_staleness=0, sparse="lazy")
    ids = batches(1)[0]
    others = np.setdiff1d(np.arange(ROWS), ids)
    started = Net().embed.embedding[...]
    model, step, wanted = train(strategy, OPTIMIZERS["adam"], [ids] * 3)
    embedding = model.embed.embedding[...]
    *_, exact = train(dj.OneDeviceStrategy("cpu:0"), OPTIMIZERS["adam"], [ids] * 3)
    assert_same_bits(exact, wanted)  # the others' moments are zero
    held = np.array(embedding)
    coordinator = dj.coordinator.ClusterCoordinator(strategy)
    for _ in range(2):  # the first makes a copy, in which the second is
        coordinator.schedule(step, args=(ids,))
    coordinator.join(SECONDS)
    assert np.any(np.asarray(model.embed.embedding[...]) != held)
    assert not embedding.is_deleted()
    np.testing.assert_array_equal(held[others], np.asarray(started)[others])
    assert "computes all of its rows" not in caplog.text
    with pytest.raises(ValueError, match="sparse must be one of 'exact', 'lazy'; got 'rows'"):
        dj.ParameterServerStrategy(sparse="rows")


@pytest.mark.exhaustive
def test_rows_out_of_range_read_as_of_the_whole_table(sent: list[int]) -> None:
    """From the end, repeated, past the end, which is NaN or clipped, or none; never the whole table."""
    strategy = of_servers()
    coordinator = dj.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = nnx.Embed(ROWS, FEATURES, rngs=nnx.Rngs(0))

    def read(ids: jax.Array) -> Any:
        return model(ids), jnp.take(model.embedding[...], ids, axis=0, mode="clip")

    table = model.embedding[...]
    for ids in ([-1, 3, 3, ROWS, -ROWS - 1, 1999, 0], [5], []):
        of = np.asarray(ids, np.int32)
        got = coordinator.fetch(coordinator.schedule(read, args=(of,)))
        wanted = model(jnp.asarray(of)), jnp.take(table, of, axis=0, mode="clip")
        assert_same_bits(wanted, got)
        assert sum(sent) < 10_000


def test_a_table_that_is_also_used_whole_is_sent_whole(caplog: pytest.LogCaptureFixture) -> None:
    """As one whose rows are also the weights of the last layer; the log has the line."""
    strategy = of_servers()
    with strategy.scope():
        model = nnx.Embed(ROWS, FEATURES, rngs=nnx.Rngs(0))

    def score(ids: jax.Array) -> jax.Array:
        return model.attend(model(ids))

    coordinator = dj.coordinator.ClusterCoordinator(strategy)
    got = coordinator.fetch(coordinator.schedule(score, args=(np.arange(5, dtype=np.int32),)))
    np.testing.assert_allclose(got, model.attend(model(jnp.arange(5))), rtol=1e-5, atol=1e-6)
    assert "send model.embedding whole at each step, though" in caplog.text
    assert "all rows are used at test_lookups.py:" in caplog.text


@pytest.mark.exhaustive
def test_rows_travel_to_other_processes() -> None:
    """With the bits of one device, where the table is updated in place and where all of it is."""
    for name in ("adagrad", "adam"):
        *_, wanted = train(dj.OneDeviceStrategy("cpu:0"), OPTIMIZERS[name], batches())
        *_, got = train(of_servers(engine="processes"), OPTIMIZERS[name], batches())
        assert_same_bits(wanted, got)
