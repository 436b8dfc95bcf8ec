"""``compile(use_ema=True)`` and ``SwapEMAWeights``: Keras's moving average of the weights."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from model_factory import compile_model, linear

import distribute_jax as dj
from distribute_jax.training import _keras_optimizers

X = np.arange(1.0, 9.0, dtype=np.float32).reshape(8, 1) / 8
Y = 3 * X


def make_model(strategy: dj.Strategy, **options: Any) -> dj.Model:
    options |= {"optimizer": optax.sgd(0.5), "use_ema": True, "ema_momentum": 0.5}
    return compile_model(strategy, linear(1, use_bias=False), **options)


def by_hand(w: float, updates: int, overwrite: int | None = None) -> list[tuple[float, float]]:
    """Returns weight and average after each update, as Keras computes them."""
    pairs, average = [], w
    for update in range(1, updates + 1):
        w -= 0.5 * float(np.mean(2 * (w * X - Y) * X))
        average = w if update == 1 else 0.5 * average + 0.5 * w
        if overwrite is not None and update % overwrite == 0:
            w = average
        pairs.append((w, average))
    return pairs


def weight(model: dj.Model) -> float:
    return float(model.module.kernel[0, 0])


def fitted(model: dj.Model, swap: Any, epochs: int = 3, **options: Any) -> tuple[Any, list[float]]:
    """Returns the history, and the weight that a callback sees at the end of each epoch."""
    seen: list[float] = []
    later = dj.callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append(weight(model)))
    options.setdefault("callbacks", [swap, later])
    history = model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0, **options)
    return history.history, seen


def test_validation_and_the_end_of_fit_use_the_average(s2: dj.Strategy):
    model, swap = make_model(s2), dj.callbacks.SwapEMAWeights()
    pairs = by_hand(weight(model), 3)
    history, seen = fitted(model, swap, validation_data=(X, Y))
    assert seen == pytest.approx([w for w, _ in pairs], rel=1e-5)
    losses = [float(np.mean((average * X - Y) ** 2)) for _, average in pairs]
    assert history["val_loss"] == pytest.approx(losses, rel=1e-4)
    assert weight(model) == pytest.approx(pairs[-1][1], rel=1e-5)
    model.module.kernel[...] = jnp.zeros((1, 1))
    fails = dj.callbacks.LambdaCallback(on_test_batch_end=lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        model.evaluate(X, Y, callbacks=[swap, fails], verbose=0)
    assert weight(model) == 0


def test_an_interrupt_swaps_all_weights_or_none(
    s2: dj.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(s2)
    model.fit(X, Y, batch_size=4, verbose=0)
    before, swap, put = weight(model), dj.callbacks.SwapEMAWeights(), _keras_optimizers.put
    model.module.kernel[...] += 1

    def interrupted_put(*args: Any) -> Any:
        monkeypatch.setattr(_keras_optimizers, "put", put)
        signal.raise_signal(signal.SIGALRM)  # a background job ignores SIGINT
        return put(*args)

    swap.set_model(model)
    monkeypatch.setattr(_keras_optimizers, "put", interrupted_put)
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        swap.on_test_begin()
    signal.signal(signal.SIGALRM, handler)
    assert weight(model) == before
    swap._release()
    assert weight(model) == before + 1


class OfThatName(nnx.Module):
    def __init__(self) -> None:
        self.moving_average = linear(1)()
        self.kernel = nnx.Param(jnp.ones((1, 1)))

    def __call__(self, x: Any) -> Any:
        return self.moving_average(x) @ self.kernel[...]


def test_a_layer_may_be_named_as_the_averages(s2: dj.Strategy) -> None:
    adam = {
        "optimizer": "adam",
        "use_ema": True,
        "ema_momentum": 0.0,
    }  # the averages are the weights
    model = compile_model(s2, OfThatName, **adam)
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[dj.callbacks.SwapEMAWeights()])
    assert model.get_weights()[0] == pytest.approx(np.ones((1, 1)), abs=0.0011)


def test_wrong_arguments_of_averages_are_refused(s2: dj.Strategy):
    model = make_model(s2)
    optimizer = dj.Optimizer(model.module, optax.sgd(0.1))
    for wrong, name in (
        ({"ema_momentum": 1.5}, "ema_momentum"),
        ({"ema_overwrite_frequency": 0}, "ema_overwrite_frequency"),
        ({"optimizer": optimizer}, "use_ema"),
    ):
        with pytest.raises(dj.ArgumentError, match=name):
            model.compile(**({"optimizer": "sgd", "use_ema": True} | wrong))
    model.compile("sgd", "mse")
    with pytest.raises(dj.ArgumentError, match="use_ema=True"):
        model.fit(X, Y, callbacks=[dj.callbacks.SwapEMAWeights()], verbose=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("overwrite", [None, 2])
def test_averages_overwrite_weights_and_are_saved(
    s4: dj.Strategy, overwrite: int | None, tmp_path: Path
):
    model = make_model(s4, ema_overwrite_frequency=overwrite)
    pairs = by_hand(weight(model), 3, overwrite)
    _, seen = fitted(model, dj.callbacks.SwapEMAWeights(swap_on_epoch=True))
    assert seen == pytest.approx([average for _, average in pairs], rel=1e-5)
    model.save(tmp_path / "model")
    again = make_model(dj.OneDeviceStrategy("cpu:0"), ema_overwrite_frequency=overwrite)
    again.load(tmp_path / "model")
    histories = [fitted(m, [])[0]["loss"] for m in (model, again)]
    assert histories[0] == pytest.approx(histories[1], rel=1e-5)
    assert weight(again) == pytest.approx(weight(model), rel=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("on_epoch", [False, True])
def test_a_training_with_averages_resumes_to_the_same_bits(
    s2: dj.Strategy, on_epoch: bool, tmp_path: Path
):
    def interrupt(epoch: int, logs: Any) -> None:
        raise InterruptedError

    def callbacks(stop: bool) -> list[Any]:
        swap = dj.callbacks.SwapEMAWeights(on_epoch)
        backup = dj.callbacks.BackupAndRestore(tmp_path / f"{stop}")
        return [swap, backup, *[dj.callbacks.LambdaCallback(on_epoch_end=interrupt)][:stop]]

    whole = make_model(s2)
    fitted(whole, None, callbacks=callbacks(False), validation_data=(X, Y))
    for _ in range(3):
        model = make_model(s2)
        with pytest.raises(InterruptedError):
            fitted(model, None, callbacks=callbacks(True), validation_data=(X, Y))
    model = make_model(s2)
    fitted(model, None, callbacks=callbacks(True))
    assert weight(model) == weight(whole)


@pytest.mark.exhaustive
def test_averages_of_bfloat16_weights(s2: dj.Strategy):
    with s2.scope():
        half = dj.Model(nnx.Linear(1, 1, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    half.compile("adam", "mse", use_ema=True, ema_overwrite_frequency=2)
    half.fit(X, Y, batch_size=4, epochs=2, verbose=0)
    assert {str(w.dtype) for w in half.get_weights()} == {"bfloat16"}
