"""Calls as in other libraries: one line says what to type, instead of Python's error or silence."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from model_factory import compile_model, linear

import distribute_jax as dj

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


class Forward(nnx.Module):
    def forward(self, x: Any) -> Any:
        raise AssertionError


class Two(nnx.Linear):
    def __call__(self, x: Any) -> Any:
        out = super().__call__(x)
        return {"a": out, "b": out}


class Stops(dj.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.stop_training = True


def model(strategy: dj.Strategy, module: Any = None, **compiled: Any) -> Any:
    make_module = linear(3) if module is None else lambda: module
    return compile_model(strategy, make_module, **compiled)


@functools.cache
def shared() -> Any:
    """A model whose step is compiled once."""
    return model(dj.MirroredStrategy([0, 1]))


def fit(strategy: dj.Strategy, *args: Any, y: np.ndarray = Y, **compiled: Any) -> Any:
    fitted = model(strategy, **compiled) if compiled else shared()
    return fitted.fit(X, y, 8, 1, 0, *args)


def fit_two(strategy: dj.Strategy, sample_weight: Any = None, **compiled: Any) -> Any:
    two = compile_model(
        strategy, lambda: Two(3, 1, rngs=nnx.Rngs(0)), loss={"a": "mse", "b": "mse"}, **compiled
    )
    return two.fit(X, {"a": Y, "b": Y}, sample_weight=sample_weight, verbose=0)


def dataset(strategy: dj.Strategy, *parts: Any) -> Any:
    return strategy.distribute_dataset([parts if len(parts) > 1 else parts[0]])


def run(strategy: dj.Strategy, step: Callable[..., Any], *more: Any) -> Any:
    (batch,) = dataset(strategy, X)
    return strategy.run(step, args=(batch, *more))


def replica_id() -> Any:
    return dj.get_replica_context().replica_id_in_sync_group


def generator(x: Any) -> Any:
    yield x


def as_weights(strategy: dj.Strategy, folder: Path) -> None:
    make_model = model(strategy)
    with dj.CheckpointManager(folder) as manager:
        manager.save(1, {"model": make_model.module})
    make_model.load_weights(folder)


def file(folder: Path) -> Path:
    path = folder / "weights.pt"
    path.write_bytes(b"x")
    return path


def twice(folder: Path) -> None:
    with dj.CheckpointManager(folder) as manager:
        for _ in range(2):
            manager.save(1, {"x": X})


def reached(path: Path, strategy: dj.Strategy) -> str:
    model(strategy).save(path / "model")
    return str(path / "model")


def not_compiled(strategy: dj.Strategy) -> dj.Model:
    with strategy.scope():
        return dj.Model(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))


def keras_file(path: Path) -> Path:
    (path / "model.keras").write_bytes(b"")
    return path / "model.keras"


def swapped(strategy: dj.Strategy) -> None:
    optimizer = model(strategy).optimizer
    module = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer.update(nnx.state(module), module)


def entered(strategy: dj.Strategy) -> None:
    with strategy:
        pass


class OfEpoch(dj.callbacks.Callback):
    def on_epoch_end(self, epoch: int) -> None:  # type: ignore[override]
        raise AssertionError


def two_arguments() -> type:
    class Two(dj.Model):
        def train_step(self, x: Any, y: Any) -> Any:  # type: ignore[override]
            raise AssertionError

    return Two


def saved(path: Path, tree: Any) -> None:
    with dj.CheckpointManager(path) as manager:
        manager.save(1, tree)


def noted(strategy: dj.Strategy, value: Any) -> None:
    with strategy.scope():
        variable = dj.Variable(jnp.zeros(()))
    (batch,) = strategy.distribute_dataset([X])
    strategy.run(lambda x: variable.assign(x.mean()), args=(batch,))


ANY: Any = dj
"""The package, of which a type checker knows nothing."""
NEED = "missing a required argument"
PLATEAU = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
WRONG: dict[str, tuple[Callable[[Any, Path], Any], str]] = {
    "keyword of a strategy": (lambda s, _: ANY.MirroredStrategy(device=[]), "Did you mean 'devices'"),
    "keyword of a callback": (
        lambda s, _: ANY.callbacks.EarlyStopping(patient=3), "EarlyStopping has no .*'patience'"
    ),
    "keyword of the optimizer": (
        lambda s, _: ANY.Optimizer(None, None, accumulation_steps=2), "'gradient_accumulation_steps'"
    ),
    "keyword of options": (lambda s, _: ANY.RunOptions(verifyy="off"), "mean 'verify'"),
    "keyword of run": (lambda s, _: s.run(abs, x=X), "takes fn, args, kwargs, options"),
    "keyword of compile": (lambda s, _: model(s, metric=["mae"]), "Did you mean 'metrics'"),
    "keyword of Lightning": (
        lambda s, _: ANY.callbacks.ModelCheckpoint(dirpath="x"), "'dirpath'. Instead: filepath"
    ),
    "no module": (lambda s, _: model(s).optimizer.update({}), rf"update\(model, grads, …\): {NEED}"),
    "no step": (lambda s, p: ANY.CheckpointManager(p).save({"x": X}), rf"save\(step, tree, …\): {NEED}"),
    "a name for a method": (lambda s, _: ANY.Model.load("x"), "^load is a method: call it on an obj"),
    "no rules": (lambda s, _: ANY.ModelParallelStrategy(2), r"\(model=…, rules=…, …\)"),
    "optimizer.step()": (lambda s, _: model(s).optimizer.step(), r"optimizer.update\(model, grads\)"),
    "assign of a rate": (lambda s, _: model(s).learning_rate.assign(1), "Instead: model.learning_rate = "),
    "an item of a dataset": (lambda s, _: dataset(s, X)[0], "write `for batch in dataset:`"),
    "a dict for a layer": (
        lambda s, _: model(s).fit({"a": X}, Y, 8, 1, 0), r"Linear, called with \['a'\] float32\[4,3\]"
    ),
    "a copy of a model": (lambda s, _: copy.deepcopy(model(s)), r"model.get_weights\(\), for model.set_w"),
    "a pickle of a model": (lambda s, _: pickle.dumps(model(s)), r"or model.save\(folder\)"),
    "a pickle of a strategy": (lambda s, _: pickle.dumps(s), "Make one in each process"),
    "a pickle of a dataset": (
        lambda s, _: pickle.dumps(s.distribute_dataset([X])), r"Send its source, and call strategy.dist"
    ),
    "a pickle of a batch": (lambda s, _: pickle.dumps(*dataset(s, X)), r"Keep strategy.gather\(value, ax"),
    "a format in a step": (lambda s, _: run(s, lambda x: f"{x.sum():.3f}"), "To print it write jax.debug"),
    "a replica id as a key": (
        lambda s, _: run(s, lambda x: {0: 1}[replica_id()]), "use jnp.where.*also with the replica id"
    ),
    "an int of args in a slice": (lambda s, _: run(s, lambda x, n: x[:, :n], 2), r"functools.partial\(step"),
    "an int of args as an axis": (
        lambda s, _: run(s, lambda x, n: jnp.cumsum(x, n), 1), r"functools.partial\(step"
    ),
    "an int of args as a length": (
        lambda s, _: run(s, lambda x, n: [x] * n, 2), r"functools.partial\(step"
    ),
    "rows by a condition": (lambda s, _: run(s, lambda x: x[x > 0]), r"arrays use jnp.where\(condition"),
    "an item of the history": (lambda s, _: fit(s)["loss"], r"write history.history\['loss'\]"),
    "stop_training of a callback": (lambda s, _: fit(s, [Stops()]), "set self.model.stop_training"),
    "labels with a half": (
        lambda s, _: fit(s, y=Y[:, 0], loss="sparse_categorical_crossentropy"), "not integers, such as"
    ),
    "compile swapped": (lambda s, _: model(s, optimizer="mse", loss="sgd"), "'sgd' is an optimizer. Swap"),
    "two weights of a loss": (lambda s, _: model(s, loss_weights=[1, 2]), r"of the 1 losses.*\[1, 2\]"),
    "weights of one output in a list": (
        lambda s, _: model(s).fit(X, Y, sample_weight=[Y[:, 0]], verbose=0),
        "is a list of 1, and the targets are one array",
    ),
    "weights of an output that is misspelt": (
        lambda s, _: fit_two(s, sample_weight={"aa": Y[:, 0]}), r"is a dict of \['aa'\], and the targets"
    ),
    "weights of named outputs in a list": (
        lambda s, _: fit_two(s, sample_weight=[Y[:, 0]] * 2), "is a list of 2, and the targets"
    ),
    "metrics of several outputs in a list": (
        lambda s, _: fit_two(s, metrics=["mae"]), r"\['mae'\] for the outputs a, b.*metrics=\{'a': \[…\], "
    ),
    "the rate in an own loop": (
        lambda s, _: setattr(dj.Optimizer(linear(3)(), optax.adam(0.1)), "learning_rate", 0.01),
        r"own loop write dj.Optimizer\(model, optax.inject_hyperparams\(optax.adam\)\(learning_rate=",
    ),
    "an output named val": (
        lambda s, _: model(s, loss={"val": "mse"}), "named 'val_loss', which is the validation's 'loss'"
    ),
    "forward": (lambda s, _: model(s, Forward()).fit(X, Y, verbose=0), "Forward has no __call__"),
    "a shape for a sample": (
        lambda s, _: dj.Model(linen.Dense(1), (1, 3)), "sample_input must be an array or a pytree"
    ),
    "NumPy in a loss": (
        lambda s, _: fit(s, loss=lambda y, p: np.linalg.norm(y - p, axis=-1)), "^NumPy cannot .*jnp.mean"
    ),
    "a batch taken apart": (
        lambda s, _: [s.run(lambda b: b, args=b) for b in dataset(s, X, Y)], r"args=\(batch,\)"
    ),
    "a value for each replica": (
        lambda s, _: run(s, lambda x, key: jax.random.normal(key), jax.random.split(jax.random.key(0))),
        r"args\[1\] has one row for each replica, as for pmap",
    ),
    "a state for each example": (
        lambda s, _: run(s, lambda x, h: x + h, jnp.zeros_like(X)),
        r"args\[1\] has a row for each example of the global batch",
    ),
    "a generator": (lambda s, _: run(s, generator), "a generator or async function"),
    "a function without the context": (
        lambda s, _: s.distribute_datasets_from_function(lambda: [X]), "takes 0 positional arguments but 1"
    ),
    "distributed twice": (lambda s, _: dataset(s, X) and s.distribute_dataset(dataset(s, X)), "already"),
    "targets beside a dataset": (
        lambda s, _: model(s).fit(dj.data.from_arrays((X, Y)).batch(8), Y), "A dataset contains its targets"
    ),
    "a rate that is a text": (
        lambda s, _: setattr(model(s), "learning_rate", "0.1"), "learning_rate must be a number >= 0"
    ),
    "a folder to export into": (lambda s, p: model(s).export(p, X[:1]), "the path of a file"),
    "a file of weights": (lambda s, p: model(s).load_weights(file(p)), r"model.set_weights\(\[np.asarray"),
    "one step twice": (lambda s, p: twice(p), "holds step 1 already"),
    "weights of a manager": (as_weights, "Steps of a CheckpointManager are read by its restore_latest"),
    "an optimizer that needs the loss": (
        lambda s, _: fit(s, optimizer=PLATEAU), "reduce_on_plateau of optax needs 'value' at each update"
    ),
    "Keras's rate": (lambda s, _: setattr(model(s).optimizer, "lr", 1), "'lr'. Instead: learning_rate"),
    "swapped update": (lambda s, _: swapped(s), "the module comes first. Swap them"),
    "no data": (lambda s, _: model(s).fit(), "got NoneType None, which is not an iterable"),
    "the class of a metric": (
        lambda s, _: fit(s, metrics=[dj.metrics.Accuracy]), "with their parentheses.*Accuracy"
    ),
    "two losses for one output": (
        lambda s, _: fit(s, loss=["mse", "mse"]), "a loss for 'output_0', .* they are one array"
    ),
    "a hook without logs": (
        lambda s, _: fit(s, [OfEpoch()]), r"is called with epoch and logs, .*def on_epoch_end\(self, epoch, "
    ),
    "a step of x and y": (lambda s, _: two_arguments(), r"one argument, the batch. Write def train_step\("),
    "a file in place of a folder": (lambda s, p: model(s).load(keras_file(p)), "those are folders"),
    "load before compile": (
        lambda s, p: not_compiled(s).load(reached(p, s)), "with the optimizer of compile"
    ),
    "a checkpoint of a model": (
        lambda s, p: saved(p, {"m": model(s)}), r'Of a dj.Model these are {"module": model.module, '
    ),
    "a strategy as a context": (lambda s, _: entered(s), "write `with strategy.scope"),
    "a function of a context": (
        lambda s, _: s.distribute_dataset(lambda context: [X]), "to strategy.distribute_datasets_from"
    ),
    "map of two arguments": (
        lambda s, _: dj.data.from_arrays((X, Y)).map(lambda x, y: x), "with one argument, the example"
    ),
    "a batch that is distributed": (
        lambda s, _: model(s).predict(next(iter(s.distribute_dataset([X])))), "is distributed already"
    ),
    "a variable without aggregation": (noted, r"has no aggregation: make it with dj.Variable\("),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_the_error_says_what_to_type(mistake: str, s2: dj.MirroredStrategy, tmp_path: Path):
    make, words = WRONG[mistake]
    with pytest.raises((ValueError, TypeError, AttributeError, RuntimeError)) as caught:
        make(s2, tmp_path)
    caught.match(words)


def test_a_batch_of_one_row_per_replica_is_not_mistaken_for_pmaps_layout(s2: dj.MirroredStrategy):
    (batch,) = dataset(s2, X[:2])
    with pytest.raises(AttributeError) as caught:
        s2.run(lambda x: x.absent, args=(batch,))
    assert "as for pmap" not in "".join(getattr(caught.value, "__notes__", ()))


def test_a_schedule_of_optax_sets_the_rate(s2: dj.MirroredStrategy):
    history = fit(s2, [dj.callbacks.LearningRateScheduler(optax.cosine_decay_schedule(0.5, 10))])
    assert history.history["learning_rate"] == [0.5]


def test_a_rate_is_a_float(s2: dj.MirroredStrategy):
    rate = model(s2).learning_rate
    assert isinstance(rate, float)
    assert jnp.asarray(rate).dtype == jnp.float32


def test_similar_correct_calls_pass(s2: dj.MirroredStrategy):
    def step(x: Any) -> Any:
        raise TypeError("of the step")

    with pytest.raises(TypeError, match=r"^of the step"):
        run(s2, step)
    labels = (Y[:, 0] > 0).astype(np.float32)
    loss = dj.losses.SparseCategoricalCrossentropy(from_logits=True)
    with s2.scope():
        two = model(s2, nnx.Linear(3, 2, rngs=nnx.Rngs(0)), loss=loss)
    assert np.isfinite(two.fit(X, labels, 8, 1, 0).history["loss"][0])


@pytest.mark.exhaustive
def test_a_linen_module_may_require_its_mode(s2: dj.MirroredStrategy):
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: Any, train: bool) -> Any:
            x = linen.BatchNorm(use_running_average=not train)(x)
            return linen.Dense(1)(linen.Dropout(0.5, deterministic=not train)(x))

    with s2.scope():
        make_model = dj.Model(Net(), sample_input=X[:1])
    make_model.compile(optax.adam(0.05), "mse")
    losses = make_model.fit(X, Y, 8, 20, 0).history["loss"]
    assert losses[-1] < 0.7 * losses[0]
    np.testing.assert_array_equal(
        make_model.predict(X, verbose=0), make_model.predict(X, verbose=0)
    )


@pytest.mark.parametrize(
    "kind", [dj.Model, dj.losses.Loss, dj.metrics.Mean, dj.callbacks.EarlyStopping]
)
def test_a_subclass_that_forgets_super_is_told_to_call_it(kind: type):
    instance = type("Mine", (kind,), {"__init__": lambda self: None})()
    attributes = {dj.Model: "module", dj.losses.Loss: "name", dj.metrics.Mean: "argname"}
    attribute = attributes.get(kind, "monitor")
    with pytest.raises(
        AttributeError, match=r"Call super\(\)\.__init__\(\) first in Mine\.__init__"
    ):
        getattr(instance, attribute)
    with pytest.raises(AttributeError, match=r"no attribute 'absent'$"):
        instance.absent  # noqa: B018


def test_an_error_of_super_names_it():
    def init(self: Any) -> None:
        super(mine, self).__init__()

    mine = type("Mine", (dj.Model,), {"__init__": init})
    with pytest.raises(TypeError, match=r"^super\(\)\.__init__\(module, …\): missing"):
        mine()


def test_arrays_of_dtype_object_are_refused(s2: dj.MirroredStrategy):
    with pytest.raises(ValueError, match=r"encode texts.*to_numpy\(.float32.\)"):
        fit(s2, y=Y.astype(object))
