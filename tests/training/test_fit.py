"""``fit``, ``evaluate`` and ``predict``: what they accept, return and refuse."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from leaves import assert_close
from model_factory import compile_model

import distribute_jax as dj

RNG = np.random.default_rng(0)
X = RNG.normal(size=(22, 3)).astype(np.float32)
Y = (X @ np.array([1.0, -2.0, 0.5], np.float32) > 0).astype(np.int32)
ADAM = optax.adam(0.05)
SGD = optax.sgd(0.5)
"""Adam makes a whole step of the rounding that is the gradient of a bias before a batch norm."""


class Net(nnx.Module):
    """Two layers, with optional dropout and batch norm."""

    def __init__(self, *, dropout: float = 0.0, norm: bool = False) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        if self.norm is not None:
            x = self.norm(x)
        return self.last(self.dropout(nnx.relu(x)))


def make_model(strategy: dj.Strategy, module: Any = Net, **options: Any) -> dj.Model:
    defaults = {
        "optimizer": SGD,
        "loss": optax.softmax_cross_entropy_with_integer_labels,
        "metrics": ["accuracy"],
    }
    return compile_model(strategy, module, **defaults | options)


@functools.cache
def shared_model() -> dj.Model:
    """On four replicas; the programs of its steps are compiled once for several tests."""
    return make_model(dj.MirroredStrategy([0, 1, 2, 3]))


def batches(rows: int = 22) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for i in range(0, rows, 8):
        yield X[i : min(i + 8, rows)], Y[i : min(i + 8, rows)]


def close(a: Any, b: Any, rel: float = 1e-5) -> None:
    assert_close(a, b, rtol=rel, atol=1e-6)


@functools.cache
def train_with_plain_flax(
    rows: int = 22, tx: Any = ADAM, **net: Any
) -> tuple[list[float], list[np.ndarray]]:
    """Returns the losses and weights of three epochs on the first ``rows`` examples."""
    alone = Net(**net)
    optimizer = nnx.Optimizer(alone, tx, wrt=nnx.Param)

    @nnx.jit
    def step(net: Net, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(
            lambda net: optax.softmax_cross_entropy_with_integer_labels(net(x), y).mean()
        )(net)
        optimizer.update(net, grads)
        return loss

    losses = [
        sum(float(step(alone, optimizer, x, y)) * len(y) for x, y in batches(rows)) / rows
        for _ in range(3)
    ]
    return losses, dj.Model(alone).get_weights()


def test_fit_equals_plain_flax_on_one_device(strategy: dj.Strategy):
    """Three epochs of Adam, each with a partial batch, and one program for these and for full ones."""
    model = make_model(strategy, optimizer=ADAM)
    options = {"batch_size": 8, "shuffle": False, "validation_data": (X, Y), "verbose": 0}
    history = model.fit(X, Y, epochs=3, **options)
    losses, weights = train_with_plain_flax()
    close(history.history["loss"], losses)
    assert history.epoch == [0, 1, 2]
    close(model.get_weights(), weights, 1e-4)
    assert strategy._runner.programs() == 4
    model.fit(X, Y, epochs=2, **options)
    model.evaluate(X, Y, batch_size=8)
    assert strategy._runner.programs() == 4


def test_validation_split_and_frequency():
    model = shared_model()
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharded = jax.device_put(X[:16], jax.NamedSharding(mesh, jax.P("x")))
    history = model.fit(
        sharded, Y[:16], 8, 4, validation_split=0.5, validation_freq=np.int64(2), verbose=0
    )
    assert {k: len(v) for k, v in history.history.items()} == {
        "loss": 4, "accuracy": 4, "val_loss": 2, "val_accuracy": 2,
    }  # fmt: skip
    held_out = model.evaluate(X[8:16], Y[8:16], batch_size=8, return_dict=True)
    assert history.history["val_loss"][-1] == pytest.approx(held_out["loss"])
    assert history.history["val_accuracy"][-1] == pytest.approx(held_out["accuracy"])
    correct = (model.predict(X[:16], batch_size=8).argmax(-1) == Y[:16]).mean()
    assert model.evaluate(X[:16], Y[:16], batch_size=8)[1] == pytest.approx(correct)


@pytest.mark.exhaustive
def test_steps_per_epoch_continue_in_the_data(s4: dj.MirroredStrategy):
    seen: list[float] = []

    def endless() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for i in range(1000):
            seen.append(i)
            yield X[:8] + i, Y[:8]

    model = make_model(s4)
    model.fit(endless, steps_per_epoch=3, epochs=2, verbose=0)
    assert int(model.optimizer.step[...]) == 6
    assert len(seen) <= 6 + 4  # the prefetched ones
    with pytest.raises(ValueError, match="steps_per_epoch"):
        model.fit(dj.data.from_arrays((X, Y)).batch(8).repeat(), verbose=0)


@pytest.mark.exhaustive
def test_data_that_ends_early_ends_the_training_with_a_warning(s4: dj.MirroredStrategy):
    model = make_model(s4)
    with pytest.warns(UserWarning, match="ran out of data after 3 of 4"):
        history = model.fit(list(batches()), steps_per_epoch=2, epochs=2, verbose=0)
    assert len(history.history["loss"]) == 2
    assert int(model.optimizer.step[...]) == 3


@pytest.mark.exhaustive
def test_data_that_ends_between_epochs_begins_again(s4: dj.MirroredStrategy, tmp_path: Path):
    """Six epochs of one step are two passes of three batches, also when resumed in the second one."""
    passes, steps, resumed = (make_model(s4) for _ in range(3))
    options: Any = {"batch_size": 8, "verbose": 0}
    passes.fit(X, Y, epochs=2, **options)
    history = steps.fit(X, Y, steps_per_epoch=1, epochs=6, **options).history
    assert len(history["loss"]) == 6
    assert np.isfinite(list(history.values())).all()
    for epochs in (4, 6):
        backup = dj.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
        resumed.fit(X, Y, steps_per_epoch=1, epochs=epochs, callbacks=[backup], **options)
    for model in (steps, resumed):
        assert all(map(np.array_equal, model.get_weights(), passes.get_weights()))
    with pytest.warns(UserWarning, match="ran out of data after 5 of 6"):
        steps.fit(X, Y, steps_per_epoch=2, epochs=3, **options | {"batch_size": 5})


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["one-hot", "column"])
def test_class_weights_scale_the_loss_of_their_class(s4: dj.MirroredStrategy, kind: str):
    """They act like sample weights of the class's examples, and combine with those."""
    sparse = dj.losses.SparseCategoricalCrossentropy(from_logits=True)
    dense = dj.losses.CategoricalCrossentropy(from_logits=True)
    y = np.eye(2, dtype=np.float32)[Y] if kind == "one-hot" else Y[:, None]
    one = make_model(s4, loss=dense if kind == "one-hot" else sparse, metrics=[])
    other = make_model(s4, loss=sparse, metrics=[])
    others = RNG.uniform(0.5, 2, len(X)).astype(np.float32)
    weight = np.where(Y == 1, 5.0, 1.0).astype(np.float32)
    options: Any = {"batch_size": 8, "shuffle": False, "verbose": 0}
    a = one.fit(X, y, class_weight={1: 5.0}, sample_weight=others, **options)
    b = other.fit(X, Y, sample_weight=weight * others, **options)
    close(a.history["loss"], b.history["loss"])
    close(one.get_weights(), other.get_weights())
    first = one.train_on_batch(X[:8], y[:8], class_weight={1: 5.0})
    assert first == pytest.approx(other.train_on_batch(X[:8], Y[:8], sample_weight=weight[:8]))


@pytest.mark.exhaustive
def test_the_mean_of_examples_without_weight_is_nan_without_a_warning(s4: dj.MirroredStrategy):
    model = make_model(s4, weighted_metrics=[dj.metrics.SparseCategoricalAccuracy()])
    logs = model.evaluate(X, Y, sample_weight=0 * X[:, 0], batch_size=8, return_dict=True)
    assert np.isnan(logs["sparse_categorical_accuracy"])
    assert logs["accuracy"] >= 0


class TwoHeads(nnx.Module):
    """A dict of outputs, and two added losses."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.a, self.b = nnx.Linear(3, 1, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> dict[str, jax.Array]:
        self.sow(dj.AddedLoss, "decay", 0.5 * jnp.sum(self.a.kernel[...] ** 2))
        self.sow(dj.AddedLoss, "activity", jnp.abs(self.b(x)[:, 0]))
        return {"a": self.a(x), "b": self.b(x)}


def test_several_outputs_and_added_losses(strategy: dj.Strategy):
    target = X.sum(axis=1, keepdims=True)
    model = make_model(
        strategy, TwoHeads, optimizer=optax.sgd(0.01), loss={"a": "mse", "b": "mae"},
        loss_weights={"a": 1.0, "b": 3.0}, metrics={"a": ["mae"]},
    )  # fmt: skip
    kernel_a, kernel_b = (np.asarray(head.kernel[...]) for head in (model.module.a, model.module.b))
    logs = model.evaluate(X, {"a": target, "b": target}, batch_size=22, return_dict=True)
    a, b = X @ kernel_a - target, X @ kernel_b - target
    expected = {"a_loss": np.mean(a**2), "b_loss": np.mean(np.abs(b)), "a_mae": np.mean(np.abs(a))}
    added = 0.5 * np.sum(kernel_a**2) + np.mean(np.abs(X @ kernel_b))
    total = expected["a_loss"] + 3 * expected["b_loss"] + added
    assert logs == pytest.approx({"loss": total, **expected}, rel=1e-5)
    history = model.fit(X, {"a": target, "b": target}, batch_size=22, verbose=0)
    assert history.history["loss"][0] == pytest.approx(total, rel=1e-5)
    assert model.evaluate(X, {"a": target, "b": target}, batch_size=22)[0] < total


class Pair(TwoHeads):
    def __call__(self, x: jax.Array) -> Any:
        return list(super().__call__(x).values())


@pytest.mark.exhaustive
def test_a_list_of_outputs_has_a_list_of_metrics_for_each(strategy: dj.Strategy):
    """As in Keras: each entry belongs to its output, as do losses and targets; None is without metrics."""
    model = make_model(strategy, Pair, loss=["mse", "mae"], metrics=[None, ["mse"]])
    target = X.sum(axis=1, keepdims=True)
    logs = model.evaluate(X, [target, 2 * target], batch_size=8, return_dict=True)
    a, b = model.predict(X, batch_size=8)
    a, b, added = a - target, b - 2 * target, 0.5 * np.sum(model.get_weights()[1] ** 2)
    expected = {"output_0_loss": np.mean(a**2), "output_1_loss": np.mean(np.abs(b))}
    total = sum(expected.values()) + added + np.mean(np.abs(b + 2 * target))
    expected |= {"loss": total, "output_1_mse": np.mean(b**2)}
    assert logs == pytest.approx(expected, rel=1e-5)


class HalvedLoss(dj.Model):
    def train_step(self, batch: Any) -> dict[str, jax.Array]:
        x, y, _ = dj.unpack_x_y_sample_weight(batch)

        def loss_fn(module: nnx.Module) -> jax.Array:
            losses = optax.softmax_cross_entropy_with_integer_labels(module(x), y)
            return 0.5 * dj.compute_average_loss(losses)

        loss, grads = nnx.value_and_grad(loss_fn)(self.module)
        self.optimizer.update(self.module, grads)
        return {"half": loss}


def test_an_overridden_train_step(strategy: dj.Strategy):
    with strategy.scope():
        model = HalvedLoss(Net())
        model.compile(optax.sgd(0.5))
    first_bias, first, last_bias, last = model.get_weights()
    logits = np.maximum(X @ first + first_bias, 0) @ last + last_bias
    before = np.mean(np.log(np.exp(logits).sum(-1)) - logits[np.arange(22), Y])
    history = model.fit(X, Y, batch_size=22, epochs=3, verbose=0)
    assert history.history["half"][0] == pytest.approx(before / 2, rel=1e-5)
    assert history.history["half"][-1] < history.history["half"][0]


def test_dropout_and_batch_norm_get_the_mode(strategy: dj.Strategy):
    model = make_model(strategy, lambda: Net(dropout=0.5, norm=True))
    model.module.eval()
    stats = [np.asarray(model.module.norm.mean[...])]
    first, second = (model.predict(X[:16], batch_size=16) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    stats.append(np.asarray(model.module.norm.mean[...]))
    model.fit(X[:16], Y[:16], batch_size=16, verbose=0)
    stats.append(np.asarray(model.module.norm.mean[...]))
    np.testing.assert_array_equal(stats[0], stats[1])
    assert not np.array_equal(stats[1], stats[2])
    assert model.module.dropout.deterministic
    assert model.module.norm.use_running_average


@pytest.mark.exhaustive
def test_a_first_fit_with_dropout_logs_no_warning(
    s4: dj.MirroredStrategy, caplog: pytest.LogCaptureFixture
):
    with s4.scope():
        rngs = nnx.Rngs(0)
        layers = [nnx.Linear(2, 5, rngs=rngs), nnx.relu, nnx.Dropout(0.5, rngs=rngs)]
        model = dj.Model(nnx.Sequential(*layers, nnx.Linear(5, 3, rngs=rngs)))
    x = np.ones((22, 2), np.float32)
    model.compile("adam", dj.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, np.zeros(22, int), batch_size=8, verbose=0)
    assert model.predict(x[:3], verbose=0).shape == (3, 3)
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []


def test_one_batch_at_a_time():
    model = shared_model()
    tested = model.test_on_batch(X[:8], Y[:8], return_dict=True)
    trained = model.train_on_batch(X[:8], Y[:8])
    assert trained == pytest.approx(list(tested.values()))
    assert model.test_on_batch(X[:8], Y[:8])[0] < trained[0]
    np.testing.assert_array_equal(model.predict_on_batch(X[:8]), model.predict(X[:8], batch_size=8))


@pytest.mark.exhaustive
def test_get_weights_and_set_weights(s4: dj.MirroredStrategy):
    model, other = make_model(s4), make_model(s4)
    model.fit(X, Y, batch_size=8, verbose=0)
    other.set_weights(model.get_weights())
    np.testing.assert_array_equal(model.predict(X), other.predict(X))
    wrong = [w[:1] for w in model.get_weights()]
    with pytest.raises(ValueError, match=r"first\.kernel: .*instead of"):
        other.set_weights(wrong)
    with pytest.raises(ValueError, match="takes 4 arrays, one for each weight, and got 2"):
        other.set_weights(wrong[:2])
    np.testing.assert_array_equal(model.predict(X), other.predict(X))


def test_weights_that_were_set_do_not_follow_the_arrays_that_they_came_from(
    s4: dj.MirroredStrategy,
):
    """JAX on CPU takes an array that is aligned to 64 bytes as it is, without a copy."""
    with s4.scope():
        model = dj.Model(nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0)))
    raw = np.zeros(128, np.uint8)
    weights = raw[-raw.ctypes.data % 64 :][:64].view(np.float32).reshape(4, 4)
    model.set_weights([weights])
    weights[:] = 7.0
    np.testing.assert_array_equal(model.get_weights()[0], np.zeros((4, 4)))


def test_inside_and_outside_the_scope(s2: dj.MirroredStrategy):
    model = shared_model()
    with model.strategy.scope():
        inside = model.evaluate(X[:8], Y[:8])
    assert model.evaluate(X[:8], Y[:8]) == inside
    with s2.scope(), pytest.raises(dj.MixedStrategiesError):
        model.evaluate(X, Y)


def test_a_module_built_outside_the_scope_is_refused(s4: dj.MirroredStrategy):
    net = Net()
    with (
        s4.scope(),
        pytest.raises(ValueError, match=r"(?s)first\.kernel: on .*with strategy\.scope"),
    ):
        dj.Model(net)


class Synchronised(Net):
    def __init__(self) -> None:
        super().__init__(norm=True)
        self.norm.axis_name = "data"


class Softmax(Net):
    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.softmax(super().__call__(x))


class NormedSoftmax(Softmax, Synchronised): ...


@pytest.mark.exhaustive
def test_logits_are_refused_where_probabilities_are_expected(s4: dj.MirroredStrategy):
    model = make_model(s4, loss="sparse_categorical_crossentropy")
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"SparseCategoricalCrossentropy\(from_logits=True\)"):
        model.fit(X, Y, batch_size=8, verbose=0)
    close(model.get_weights(), before, 0)
    fine = make_model(s4, Softmax, loss="sparse_categorical_crossentropy")
    expected = make_model(s4).evaluate(X, Y, batch_size=8)
    assert fine.evaluate(X, Y, batch_size=8) == pytest.approx(expected, rel=1e-5)


@pytest.mark.exhaustive
def test_probabilities_are_checked_in_evaluation_mode(s4: dj.MirroredStrategy):
    """In which the padding of a first batch that is partial does not reach a batch norm."""
    losses = []
    for strategy in (s4, dj.OneDeviceStrategy("cpu:0")):
        model = make_model(strategy, NormedSoftmax, loss="sparse_categorical_crossentropy")
        losses += model.fit(X[:5], Y[:5], verbose=0).history["loss"]
    assert losses[0] == pytest.approx(losses[1])


def loss(labels: jax.Array, y_pred: jax.Array) -> jax.Array:
    return abs(labels - y_pred[:, 0])


class Mean(Net):
    """A module with one output for all examples."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x).mean()


def test_invalid_arguments_are_refused(s4: dj.MirroredStrategy):
    model = make_model(s4)
    unweighted: Any = {"weighted_metrics": [nnx.metrics.Average("y_pred")]}
    y, metric, unknown = {"a": Y, "b": Y}, dj.metrics.Accuracy(), {"zz": "binary_crossentropy"}
    twice: Any = {"metrics": [metric], "weighted_metrics": [metric]}
    both: Any = {"loss": {"a": "mse", "b": "mse"}, "metrics": None}
    other: Any = both | {"metrics": {"zz": ["mae"]}}
    unreduced = dj.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    endless = dj.data.from_arrays((X, Y)).batch(8).repeat()
    with s4.scope():
        fresh = dj.Model(Net())
    before = model.get_weights()
    cases: list[tuple[Any, str]] = [
        (lambda: fresh.fit(X, Y), "compile"),
        (lambda: model.fit(X, Y[:5]), "x.* has 22.*y.* has 5"),
        (lambda: model.fit(list(X), list(Y)), r"dim 0: x\[0\] has 3, y has 22. A list of arrays"),
        (lambda: model.fit(list(batches()), Y), "or a dataset, alone, whose batches contain y; got a"),
        (lambda: model.fit(list(batches()), batch_size=8), "batch_size"),
        (lambda: model.fit(s4.distribute_dataset(batches), Y), "batches hold all"),
        (lambda: model.fit(X, Y, validation_split=1.5), "validation_split"),
        (lambda: model.fit(X, Y, epochs=-1), "epochs"),
        (lambda: model.fit(X, Y, steps_per_epoch=0), "steps_per_epoch"),
        (lambda: model.fit(X, Y, class_weight={"a": 1.0}), "class_weight"),
        (lambda: model.fit([(X, Y, Y, Y)]), "tuple of 4"),
        (lambda: model.fit(list(batches()), validation_split=0.5), "split is for arrays"),
        (lambda: model.fit({"a": X, "b": Y}, Y, x_key="a", y_key="b"), "leave out y, or them"),
        (lambda: model.set_weights([*before, X]), "takes 4 arrays.*got 5"),
        (lambda: model.set_weights([np.ma.array(w) for w in before]), "weights got a .* have no mask"),
        (lambda: model.fit(X), "needs targets"),
        (lambda: model.fit(X, Y, batch_size=0), "batch"),
        (lambda: model.fit(X, Y, validation_freq=[0], validation_data=(X, Y)), "integer >= 1; got 0"),
        (lambda: model.fit(X, Y, validation_batch_size=0), r"fit\(validation_batch_size\).*got 0"),
        (lambda: model.fit(X, Y, validation_data=endless), "Pass validation_steps="),
        (lambda: model.evaluate(X, Y, steps=-1), r"evaluate\(steps\).*got -1"),
        (lambda: model.fit(X, [Y]), "single loss"),
        (lambda: make_model(s4, loss=unreduced).fit(X, Y), r'reduction=None(.|\n)*pass "sum"'),
        (lambda: make_model(s4, loss=lambda y, p: jnp.mean(p[:, 0] - y)).fit(X, Y), r"returned float32\[\]"),
        (lambda: make_model(s4, **twice), "one Accuracy object twice"),
        (lambda: make_model(s4, TwoHeads, loss=unknown).fit(X, y), "'zz'.*a dict of"),
        (lambda: make_model(s4, loss=unknown).fit(X, y), "'zz'.*one array"),
        (lambda: make_model(s4, TwoHeads, **other).fit(X, y), "metric for 'zz'"),
        (lambda: make_model(s4, TwoHeads, **both).fit(X, y, class_weight={0: 2.0}), "class_weight"),
        (lambda: make_model(s4, metrics=[nnx.metrics.Average()]).fit(X, Y), "values="),
        (lambda: make_model(s4, metrics=[loss]), "'loss', which is the name of the loss"),
        (lambda: make_model(s4, metrics=[nnx.metrics.Average("z")]).fit(X, Y), "reads z=, and fit passes"),
        (lambda: make_model(s4, **unweighted).fit(X, Y, sample_weight=X[:, 0]), "has no sample_weight"),
        (lambda: make_model(s4, Mean).predict(X[:16], batch_size=8), "one row for each example"),
        (lambda: model.train_on_batch(list(batches())), "one batch"),
        (lambda: model.compile("adam", "mse", steps_per_execution=0), "steps_per_execution"),
        (lambda: model.compile("adam", "mse", metrics=[3]), "metric"),
        (lambda: model.compile("adam", {"a": "mse"}, loss_weights={"a": "x"}), r"loss_weights\).*'x'"),
        (lambda: dj.Model(linen.Dense(2)), "sample_input"),
        (lambda: dj.Model([Net()]), r"got a list.*nnx\.Sequential"),
        (lambda: dj.Model(print), "nnx.Module"),
    ]  # fmt: skip
    for call, text in cases:
        with pytest.raises((ValueError, RuntimeError), match=text):
            call()
    assert all(map(np.array_equal, model.get_weights(), before))


@pytest.mark.exhaustive
def test_added_losses_alone_can_be_minimised(s4: dj.MirroredStrategy):
    class Penalty(Net):
        def __call__(self, x: jax.Array) -> jax.Array:
            self.sow(dj.AddedLoss, "decay", jnp.sum(self.last.kernel[...] ** 2))
            return super().__call__(x)

    model = make_model(s4, Penalty, loss=None, metrics=None, optimizer=optax.sgd(0.25))
    before = np.asarray(model.module.last.kernel[...])
    history = model.fit(X, batch_size=22, verbose=0)
    np.testing.assert_allclose(model.module.last.kernel[...], before / 2, rtol=1e-5)
    assert history.history["loss"] == pytest.approx([np.sum(before**2)], rel=1e-5)
    assert model.evaluate(X) == pytest.approx(np.sum((before / 2) ** 2), rel=1e-5)
    with pytest.raises(ValueError, match="nothing to minimise"):
        make_model(s4, loss=None, metrics=None).fit(X, verbose=0)


def test_a_model_predicts_before_it_is_compiled(s4: dj.MirroredStrategy):
    with s4.scope():
        model = dj.Model(Net())
    first = model.predict(X, verbose=0)
    model.compile("sgd", "mse")
    np.testing.assert_array_equal(first, model.predict(X, verbose=0))


class Counting(Synchronised):
    def __init__(self) -> None:
        self.calls = nnx.Cache((jnp.zeros(()), jnp.zeros(())))  # one variable of two arrays
        super().__init__()

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls.set_value(tuple(number + 1 for number in self.calls.get_value()))
        return super().__call__(x)


@pytest.mark.exhaustive
@pytest.mark.parametrize("rows", [20, 21])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_batch_norm_is_exact_on_a_partial_batch(
    replicas: int, rows: int, caplog: pytest.LogCaptureFixture
):
    """The last batch of 4 of 8 has no padding; of 5 each replica computes on all.

    Its program is compiled in the first epoch alone.
    """
    strategy = dj.MirroredStrategy(list(range(replicas)))
    model = make_model(strategy, Counting)
    programs = []
    count = dj.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: programs.append(strategy._runner.programs())
    )
    options = {"batch_size": 8, "shuffle": False, "verbose": 0, "callbacks": [count]}
    history = model.fit(X[:rows], Y[:rows], epochs=3, **options)
    losses, weights = train_with_plain_flax(rows, SGD, norm=True)
    close(history.history["loss"], losses)
    close(model.get_weights(), weights, 1e-4)
    assert len(set(programs)) == 1
    assert "partial batch" not in caplog.text


class Masked(nnx.BatchNorm):
    """Uses the mask, with which no replica's statistics are those of all examples."""

    def __call__(self, x: jax.Array) -> jax.Array:
        replica = dj.get_replica_context()
        return super().__call__(x, mask=replica.batch_mask[:, None])


@pytest.mark.exhaustive
def test_batch_norm_with_a_mask_on_a_partial_batch_says_what_to_do_in_fit(s4: dj.MirroredStrategy):
    """Its shares differ in length, so the statistics are refused, even if another norm has no mask."""

    def two_norms() -> Net:
        net = Net(norm=True)
        net.last = nnx.Sequential(net.last, Masked(2, rngs=nnx.Rngs(0)))
        return net

    model = make_model(s4, two_norms)
    with pytest.raises(dj.PaddingLeakError) as caught:
        model.fit(X, Y, batch_size=8, verbose=0)
    (note,) = caught.value.__notes__
    assert 'dj.InputOptions(partial="drop")' in note
    assert "dj.data.from_arrays((x, y)).batch(n, drop_remainder=True)" in note
    dropped = s4.distribute_dataset(batches, dj.InputOptions(partial="drop"))
    for data in (dropped, dj.data.from_arrays((X, Y)).batch(8, drop_remainder=True)):
        assert len(model.fit(data, verbose=0).history["loss"]) == 1
    assert int(model.optimizer.step[...]) == 2 + 2 + 2, (
        "two batches of eight before the refusal too"
    )
