"""Common mistakes of users of Keras, Flax or Lightning that raise nothing: one logged line."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from model_factory import compile_model, linear

import distribute_jax as dj
from distribute_jax import _errors

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)
SUM = dj.VariableAggregation.SUM


def model(strategy: dj.Strategy, kind: type[dj.Model] = dj.Model, **compiled: Any) -> dj.Model:
    return compile_model(strategy, linear(3), kind, **compiled)


@functools.cache
def shared() -> dj.Model:
    """A model whose step is compiled once."""
    return model(dj.MirroredStrategy([0, 1]))


def fit(callback: dj.callbacks.Callback) -> Any:
    return shared().fit(X, Y, 8, 1, 0, [callback])


class Silent(dj.Model):
    def train_step(self, batch: Any) -> Any:
        return {"loss": dj.compute_average_loss((self.module(batch[0]) - batch[1])[:, 0] ** 2)}


class Reporting(dj.Model):
    """Reports a mean over its share, beside a correct loss."""

    def train_step(self, batch: Any) -> Any:
        x, y = batch

        def loss(module: Any) -> Any:
            return dj.compute_average_loss((module(x) - y)[:, 0] ** 2)

        value, gradients = nnx.value_and_grad(loss)(self.module)
        self.optimizer.update(self.module, gradients)
        return {"loss": value, "size": abs(y).mean()}


class Typo(dj.callbacks.Callback):
    def on_epoch_finish(self, epoch: int, logs: Any = None) -> None:
        raise AssertionError


def foreign() -> None:
    class Foreign(dj.Model):
        def training_step(self, batch: Any, index: int) -> Any:
            raise AssertionError


def in_step(strategy: dj.Strategy, step: Callable[..., Any], *parts: np.ndarray) -> None:
    (batch,) = strategy.distribute_dataset([parts])
    strategy.run(step, args=batch, options=dj.RunOptions(verify="off"))


def adds(strategy: dj.Strategy) -> None:
    with strategy.scope():
        variable = dj.Variable(jnp.zeros(()), aggregation=SUM)

    def step(x: Any) -> None:
        variable[...] += x.sum()

    in_step(strategy, step, X)


def freezes(strategy: dj.Strategy) -> None:
    with strategy.scope():
        layers: Any = [nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 1, rngs=nnx.Rngs(1))]
        layers[0].trainable = False
        dj.Model(nnx.Sequential(*layers)).compile("sgd", "mse")


def forgets(strategy: dj.Strategy) -> None:
    """Changes a dict that was passed, and returns nothing."""
    (batch,) = strategy.distribute_dataset([X])

    def step(params: Any, x: Any) -> None:
        params["w"] = params["w"] - dj.get_replica_context().all_reduce("mean", x.mean())

    strategy.run(step, args=({"w": jnp.ones(3)}, batch))


def trains(strategy: dj.Strategy, loss: Callable[[Any, Any, Any], Any]) -> None:
    """Takes a step by the gradients of a loss of what it is differentiated by, the module and the batch."""
    with strategy.scope():
        module = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        optimizer = dj.Optimizer(module, optax.sgd(0.1))

    def step(x: Any) -> None:
        optimizer.update(module, nnx.grad(lambda m: loss(m, module, x))(module))

    in_step(strategy, step, X)


def of_another(strategy: dj.Strategy) -> None:
    """Differentiates with respect to an argument that the loss does not use."""
    trains(strategy, lambda _, module, x: dj.compute_average_loss(module(x)[:, 0] ** 2))


def of_share(strategy: dj.Strategy, size: Any) -> None:
    """Divides by the batch of one replica, although ``dj.Optimizer`` sums."""
    trains(strategy, lambda m, _, x: dj.compute_average_loss(m(x)[:, 0] ** 2, None, size))


def drops(strategy: dj.Strategy, returned: bool = False) -> None:
    """Computes new weights, and returns them only if ``returned``."""
    (batch,) = strategy.distribute_dataset([X])

    def step(w: Any, x: Any) -> Any:
        grad = jax.grad(lambda w: dj.compute_average_loss((x @ w) ** 2))(w)
        new = w - dj.get_replica_context().all_reduce("sum", grad)
        return new if returned else None

    strategy.run(step, args=(jnp.ones(3), batch))


def right(strategy: dj.Strategy) -> None:
    with strategy.scope():
        variable = dj.Variable(jnp.zeros(()), aggregation=SUM)

    def step(x: Any) -> Any:
        variable.assign_add(x.sum())
        variable.assign(x.sum())
        return dj.compute_average_loss(x[:, 0], global_batch_size=16)

    in_step(strategy, step, X)
    of_share(strategy, 16)
    drops(strategy, returned=True)
    fit(dj.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None))


LOGGED: dict[str, tuple[Callable[[dj.Strategy], Any], str]] = {
    "no update": (lambda s: model(s, Silent).fit(X, Y, 8, verbose=0), "has changed no variable"),
    "a mean of a share": (
        lambda s: model(s, Reporting, verify="first").fit(X, Y, 8, verbose=0),
        "train_step returned result['size'], a mean over",
    ),
    "a loss that no callback sees": (
        lambda s: model(s, Reporting).fit(X, Y, verbose=0, callbacks=[dj.callbacks.LossSpike()]),
        "LossSpike has seen no loss",
    ),
    "a hook's name": (lambda s: fit(Typo()), "Did you mean 'on_epoch_"),
    "Lightning's step": (lambda s: foreign(), "is never called: write train_step(self, batch)"),
    "an addition to what is summed": (adds, "variable is written as its old value plus something"),
    "a matrix of losses": (
        lambda s: in_step(s, lambda x, y: dj.compute_average_loss(y - x[:, 0]), X, Y),
        "got losses of shape (8, 8)",
    ),
    "a layer of Keras": (freezes, "module.layers.0.trainable = False freezes no weights"),
    "a new entry of a dict": (forgets, "step changes args[0]['w'], which it got as an argument"),
    "the model outside of the loss": (of_another, "gets gradients that are all zero"),
    "the batch of one replica": (
        lambda s: of_share(s, np.int64(8)), "the gradients are 2 times too large"
    ),
    "a state that is not returned": (drops, "is lost unless the step returns it"),
    "an initial epoch behind the last": (
        lambda s: model(s).fit(X, Y, epochs=2, initial_epoch=2, verbose=0), "trains nothing"
    ),
    "nothing wrong": (right, ""),
}  # fmt: skip


@pytest.mark.parametrize("mistake", LOGGED)
def test_silent_mistakes_are_logged_once(
    mistake: str,
    s2: dj.MirroredStrategy,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(_errors, "_logged", set())
    make, words = LOGGED[mistake]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(s2)
    texts = [*caplog.messages, *(str(warning.message) for warning in caught)]
    assert (words in "\n".join(texts)) if words else not texts, texts


def test_an_object_with_a_length_and_items_ends(s2: dj.MirroredStrategy):
    """Like a PyTorch Dataset that slices arrays, which raises no IndexError."""

    class Slices:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, i: int) -> Any:
            return X[8 * i : 8 * i + 8]

    assert [batch.part_shape for batch in s2.distribute_dataset(Slices())] == [(4, 3), (4, 3)]


@pytest.mark.exhaustive
def test_replay_steps_leaves_the_refusal_of_a_partial_batch_to_the_step(s2: dj.MirroredStrategy):
    norm = lambda: nnx.BatchNorm(3, axis_name="data", rngs=nnx.Rngs(0))  # noqa: E731
    make_model = compile_model(s2, norm)
    with pytest.raises(dj.PaddingLeakError, match="updates the statistics of a batch norm"):
        make_model.fit(X[:7], X[:7], 8, verbose=0, callbacks=[dj.callbacks.ReplaySteps(1)])
