"""Callbacks that monitor a number: early stopping, learning rate schedules and search, NaN."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import distribute_jax as dj
from distribute_jax.training.callbacks._monitor import Monitor
from tests.training.model_factory import compile_model, linear

EarlyStopping = dj.callbacks.EarlyStopping
ReduceLROnPlateau = dj.callbacks.ReduceLROnPlateau


@pytest.mark.parametrize(
    ("numbers", "options", "epochs"),
    [
        ([3, 2, 2, 1], {}, 3),
        ([3, 2, 2, 1, 1, 1, 0], {"patience": 2}, 6),
        ([3, 2, 1.95, 1.9, 1.7], {"min_delta": 0.2}, 3),
        ([1, 2, 3, 3], {"mode": "max"}, 4),
        ([1, 1.1, 2, 3], {"mode": "max", "min_delta": 0.2}, 2),
        ([3, 2, 1, 0], {"baseline": 0.5, "patience": 2}, 4),
        ([3, 4, 5, 5, 4], {"start_from_epoch": 2}, 4),
        ([float("nan"), 2, 1, 1], {}, 4),
    ],
)  # fmt: skip
def test_training_ends_when_the_number_stops_improving(
    example: Any, feed: Any, numbers: list[float], options: Any, epochs: int
):
    """The number of epochs is Keras's; NaN is neither an improvement nor the best value."""
    stop = EarlyStopping("number_error", **options)
    history = example.fit(feed(number_error=[*numbers, *[9.0] * 9]), stop, epochs=len(numbers))
    assert len(history.epoch) == epochs


def test_the_best_weights_are_restored(example: Any):
    """The rate 0.05 overshoots: losses 25.5, 61.3; the weight after the first epoch is -1.55."""
    example.model.learning_rate = 0.05
    stop = EarlyStopping("loss", restore_best_weights=True)
    history = example.fit(stop, epochs=9)
    assert history.history["loss"] == pytest.approx([25.5, 25.5 * 1.55**2])
    assert example.w == pytest.approx(-1.55)
    assert (stop.stopped_epoch, stop.best_epoch) == (1, 0)
    assert stop.best == pytest.approx(25.5)


def test_without_restoring_the_last_weights_stay(example: Any, capsys: pytest.CaptureFixture[str]):
    example.model.learning_rate = 0.05
    example.fit(EarlyStopping("loss", verbose=1), epochs=9)
    assert example.w == pytest.approx(1.55**2)
    assert "Epoch 2: early stopping" in capsys.readouterr().out


def test_the_rate_falls_on_a_plateau_and_nothing_is_compiled_again(example: Any, feed: Any):
    """Two epochs without improvement halve it, two epochs of cooldown follow, never below min_lr."""
    example.fit()
    example.reset()
    before = example.traces
    reduce = ReduceLROnPlateau("number_error", 0.5, patience=2, cooldown=2, min_lr=0.004)
    rates = example.fit(feed(number_error=[1.0] * 9), reduce, epochs=9).history["learning_rate"]
    # Each entry is the rate of that epoch's step; the change comes after it.
    assert rates == pytest.approx([0.01] * 3 + [0.005] * 3 + [0.004] * 3)
    assert example.traces == before
    assert example.w == pytest.approx(np.prod([1 - 51 * rate for rate in rates]), rel=1e-5)


def test_a_rate_that_is_min_lr_is_not_lowered(
    example: Any, feed: Any, capsys: pytest.CaptureFixture[str]
):
    """0.01 in float32 is below the number in Python, and 0.1 above it."""
    example.model.learning_rate = 0.2
    reduce = ReduceLROnPlateau("number_error", 0.5, patience=1, min_lr=0.1, verbose=1)
    example.fit(feed(number_error=[1.0] * 6), reduce, epochs=6)
    assert capsys.readouterr().out.count("ReduceLROnPlateau sets the rate to 0.1.") == 1


def test_several_numbers_cannot_be_monitored(example: Any, feed: Any):
    pair = feed(pair_error=[np.zeros(2)])
    with pytest.raises(dj.ArgumentError, match="'pair_error' of the logs must be one number"):
        example.fit(pair, EarlyStopping("pair_error"))


def test_a_scheduler_sets_the_rate_of_every_epoch_and_nothing_is_compiled_again(
    example: Any, capsys: pytest.CaptureFixture[str]
):
    example.fit()
    example.reset()
    before = example.traces
    halve = dj.callbacks.LearningRateScheduler(
        lambda epoch, lr: lr if epoch < 1 else lr / 2, verbose=1
    )
    history = example.fit(halve, epochs=3)
    assert history.history["learning_rate"] == pytest.approx([0.01, 0.005, 0.0025])
    assert example.w == pytest.approx(0.49 * 0.745 * 0.8725, rel=1e-5)
    assert example.traces == before
    assert "Epoch 3: LearningRateScheduler sets the rate to 0.0025" in capsys.readouterr().out


def test_a_schedule_that_does_not_return_a_number_is_refused(example: Any):
    with pytest.raises(ValueError, match=r"learning_rate must be a number >= 0; got None"):
        example.fit(dj.callbacks.LearningRateScheduler(lambda epoch, lr: None))


def test_a_schedule_may_take_the_epoch_alone(example: Any):
    history = example.fit(
        dj.callbacks.LearningRateScheduler(lambda epoch: 0.1 / 2**epoch), epochs=2
    )
    assert history.history["learning_rate"] == pytest.approx([0.1, 0.05])
    for wrong in (lambda: 0.1, lambda a, b, c: 0.1, 0.1):
        with pytest.raises(
            ValueError, match=r"schedule must be a function(; got| of \(epoch\) or of)"
        ):
            dj.callbacks.LearningRateScheduler(wrong)  # type: ignore[arg-type]


def fitted_model(strategy: Any, tx: Any, *callbacks: Any) -> dj.Model:
    model = compile_model(strategy, linear(1), optimizer=tx)
    x = np.linspace(-1, 1, 8, dtype=np.float32)[:, None]
    model.fit(x, 3 * x, epochs=3, verbose=0, callbacks=callbacks)
    return model


@pytest.mark.exhaustive
def test_the_rate_of_an_optax_optimizer_can_be_read_and_set(s4: Any):
    halve = dj.callbacks.LearningRateScheduler(lambda epoch, lr: lr / 2)
    models = [fitted_model(s4, tx, halve) for tx in (optax.sgd(0.01), "sgd")]
    assert models[0].history.history == models[1].history.history
    assert models[0].learning_rate == pytest.approx(0.00125)
    models[0].optimizer.learning_rate = 0.5
    assert models[0].learning_rate == 0.5


@pytest.mark.exhaustive
def test_the_rate_of_a_schedule_can_be_read_and_not_set(s2: Any):
    model = fitted_model(s2, optax.adam(optax.linear_schedule(0.1, 0.0, 10)))
    assert model.learning_rate == pytest.approx(0.08)
    with pytest.raises(ValueError, match="follows a schedule, which sets it at each update"):
        model.learning_rate = 0.1


def test_a_rate_that_is_not_state_is_refused_before_the_first_step(s2: Any):
    several = optax.partition(
        {"all": optax.sgd(0.1)}, lambda tree: jax.tree.map(lambda _: "all", tree)
    )
    with pytest.raises(ValueError, match="inject_hyperparams"):
        fitted_model(s2, several, ReduceLROnPlateau("loss"))


@pytest.mark.parametrize("callback", [EarlyStopping, ReduceLROnPlateau])
def test_a_missing_number_warns_with_the_available_ones(example: Any, callback: Any):
    with pytest.warns(
        UserWarning, match=r"monitors 'val_loss'.*The logs have: loss.*validation_data"
    ) as caught:
        assert len(example.fit(callback("val_loss"), epochs=2).epoch) == 2
    assert not caught[0].filename.startswith(dj.__path__[0])


def test_epochs_without_validation_do_not_warn(example: Any, feed: Any):
    options = {"validation_data": (example.x, example.y), "validation_freq": 2}
    with pytest.warns(UserWarning, match="monitors 'val_loss'") as found:
        example.fit(EarlyStopping(patience=2), epochs=4, **options)
    assert len(found) == 1


@pytest.mark.parametrize(
    ("name", "value", "than"),
    [
        ("loss", 1, 2), ("val_loss", 1, 2), ("mean_absolute_error", 1, 2), ("accuracy", 2, 1),
        ("val_acc", 2, 1), ("auc", 2, 1), ("val_f1_score", 2, 1), ("accumulated_loss", 1, 2),
    ],
)  # fmt: skip
def test_mode_auto_is_inferred_from_the_name(name: str, value: float, than: float):
    watch = Monitor(name, "auto")
    assert watch.is_better(value, than)
    assert not watch.is_better(than, value)
    assert not watch.is_better(value, value)


def test_an_ambiguous_name_needs_a_mode(example: Any, feed: Any):
    with pytest.raises(ValueError, match=r'Pass mode="max" or mode="min"'):
        example.fit(feed(reward=[1, 2]), EarlyStopping("reward"), epochs=2)
    with pytest.raises(ValueError, match="'auto', 'min', 'max'; got 'lower'"):
        EarlyStopping(mode="lower")
    with pytest.raises(ValueError, match="between 0 and 1"):
        ReduceLROnPlateau(factor=1.0)


def test_a_nonfinite_loss_ends_the_training_and_names_the_first_bad_leaf(example: Any):
    example.model.learning_rate = 1e30
    guard = dj.callbacks.TerminateOnNaN()
    with pytest.warns(
        RuntimeWarning, match=r"no longer finite.*first leaf that is not finite: w, in 1 of 1"
    ):
        history = example.fit(guard, epochs=20)
    assert len(history.epoch) <= 4
    assert "the training ends" in guard.message


def test_a_bad_batch_is_distinguished_from_bad_weights(example: Any):
    """One NaN among the targets, and a rate of 0: the weight stays finite only where it is not touched."""
    y = example.y.copy()
    y[0] = np.inf
    example.model.learning_rate = 0.0
    with pytest.warns(RuntimeWarning, match="no longer finite"):
        history = example.fit(dj.callbacks.TerminateOnNaN(), y=y, epochs=20)
    assert len(history.epoch) == 1


def test_the_loss_is_checked_without_waiting_for_it(example: Any):
    example.model.learning_rate = 1e30
    with pytest.warns(RuntimeWarning, match="seen in batch"):
        example.fit(dj.callbacks.TerminateOnNaN(), x=np.tile(example.x, (500, 1)),
                    y=np.tile(example.y, (500, 1)))  # fmt: skip
    assert int(example.model.optimizer.step[...]) < 500


X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


class Noisy(nnx.Module):
    def __init__(self) -> None:
        self.layer = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        self.rngs = dj.same_on_all_replicas(nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x) + 1e-3 * jax.random.normal(self.rngs(), ())


def search(strategy: dj.Strategy, **options: Any) -> dj.callbacks.LearningRateFinder:
    """Runs a search and returns the finder; checks that all state is as before."""
    tx = (optax.adam if options else optax.sgd)(0.123)
    model = compile_model(strategy, Noisy, optimizer=tx, **options)
    if options:
        model.fit(X, Y, batch_size=8, verbose=0)
    nodes = [model.module, model.optimizer]
    before = jax.tree.leaves([dj.snapshot(node) for node in nodes])
    finder = dj.callbacks.LearningRateFinder(1e-5, 100.0, 40)
    model.fit(X, Y, batch_size=8, epochs=20, callbacks=[finder], verbose=0)
    after = jax.tree.leaves([dj.snapshot(node) for node in nodes])
    for old, new in zip(before, after, strict=True):
        assert jax.dtypes.issubdtype(old.dtype, jax.dtypes.prng_key) or np.array_equal(old, new)
    return finder


@pytest.mark.exhaustive
def test_rates_grow_until_the_loss_does(s2: dj.Strategy):
    """The search ends where SGD diverges; the suggestion is a lower rate, at which the loss falls."""
    finder = search(s2)
    tried = len(finder.rates)
    assert tried < 40
    np.testing.assert_allclose(finder.rates, np.geomspace(1e-5, 100, 40)[:tried], rtol=1e-5)
    lowest = min(finder.losses[10:])
    assert finder.losses[-1] > 4 * lowest > max(finder.losses[10:-1])
    assert 10 <= finder.rates.index(finder.suggestion) < finder.losses.index(lowest)


@pytest.mark.exhaustive
def test_too_few_batches_and_wrong_rates():
    model = dj.Model(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    model.compile("sgd", "mse")
    finder = dj.callbacks.LearningRateFinder()
    with pytest.warns(UserWarning, match="tried 2 of 100 rates"):
        model.fit(X, Y, batch_size=8, callbacks=[finder], verbose=0)
    assert finder.suggestion is None
    assert model.learning_rate == pytest.approx(0.01)
    with pytest.raises(dj.ArgumentError, match="max_lr must be a number >= "):
        dj.callbacks.LearningRateFinder(min_lr=0.1, max_lr=0.01)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        {"use_ema": True, "skip_nonfinite": True},
        {"gradient_accumulation_steps": 2, "trainable": "layer"},
    ],
    ids=["averages", "accumulated"],
)
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("kind", [dj.MirroredStrategy, dj.FullyShardedStrategy])
def test_search_losses_are_those_of_one_device(kind: Any, devices: int, options: dict[str, Any]):
    finders = [search(s, **options) for s in (kind(range(devices)), dj.OneDeviceStrategy("cpu:0"))]
    assert finders[0].rates == finders[1].rates
    np.testing.assert_allclose(finders[0].losses, finders[1].losses, rtol=1e-3)
    assert finders[0].suggestion == finders[1].suggestion
