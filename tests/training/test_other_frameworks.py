"""Objects and functions of TensorFlow, Keras and PyTorch: recognised, and answered with what to type.

The objects here only have the names of real ones, which is what is recognised; real ones are tested where
the packages are installed, in ``tests/data/sources/test_real_frameworks.py``.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import distribute_jax as dj

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


def instance(module: str, *names: str, **members: Any) -> Any:
    """Returns an object of a class with this module, and these names of the class and its bases."""
    cls: type = object
    for name in reversed(names):
        cls = type(name, (cls,), {"__module__": module, "__call__": lambda *_: 0, **members})
    return cls()


def function(module: str, body: str) -> Callable[[Any], Any]:
    scope: dict[str, Any] = {"__name__": module, "np": np}
    exec(f"def relu(x): {body}", scope)
    return scope["relu"]  # type: ignore[no-any-return]


def fit(strategy: dj.Strategy, *callbacks: Any, module: Any = None, **compiled: Any) -> Any:
    with strategy.scope():
        model = dj.Model(nnx.Linear(3, 1, rngs=nnx.Rngs(0)) if module is None else module)
    model.compile(**{"optimizer": "sgd", "loss": "mse"} | compiled)
    return model.fit(X, Y, 8, 1, 0, callbacks, shuffle=False).history


def run(strategy: dj.Strategy, step: Callable[..., Any]) -> Any:
    (batch,) = strategy.distribute_dataset([X])
    return strategy.run(step, args=(batch,))


def compiled(x: Any) -> Any:
    raise TypeError(type(x))


compiled._torchdynamo_orig_callable = compiled  # type: ignore[attr-defined]


class Net(nnx.Module):
    def __init__(self, part: Any) -> None:
        self.part = part

    def __call__(self, x: Any) -> Any:
        return x


class Outer(nnx.Module):
    """Calls a layer of Flax as other frameworks are called."""

    def __init__(self, method: str, *keywords: str) -> None:
        self.inner = Net(0)
        self.method, self.keywords = method, keywords

    def __call__(self, x: Any) -> Any:
        return getattr(self.inner, self.method)(x, **dict.fromkeys(self.keywords, True))


KERAS, TORCH = "keras.src.any", "torch.any"
RELU = instance(TORCH, "ReLU", "Module")
TENSOR = instance(TORCH, "Tensor", __array__=lambda self: X)
CALLBACK = instance(KERAS, "EarlyStopping", "Callback")
IN_C = "raise TypeError(\"relu(): argument 'input' must be Tensor, not DynamicJaxprTracer\")"
WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "loss": (
        lambda s: fit(s, loss=instance(TORCH, "CrossEntropyLoss", "_Loss", "Module")),
        r"^CrossEntropyLoss of PyTorch \(instead: dj.losses.SparseCategoricalCrossentropy\(from_l.* not a",
    ),
    "loss of the same name": (
        lambda s: fit(s, loss=instance(KERAS, "Huber", "Loss")), r"Keras \(instead: dj.losses.Huber\)"
    ),
    "metric": (
        lambda s: fit(s, metrics=[instance("torchmetrics", "AUC", "Metric", "Module")]),
        r"got AUC of TorchMetrics \(instead: dj.metrics.AUC\)",
    ),
    "class of a metric": (
        lambda s: fit(s, metrics=[type(instance(KERAS, "AUC", "Metric"))]), r"\(instead: dj.metrics.AUC\)"
    ),
    "optimizer": (
        lambda s: fit(s, optimizer=instance(KERAS, "Adam", "Optimizer")), "got Adam of Keras .*optax.adam"
    ),
    "callback": (lambda s: fit(s, CALLBACK), r"EarlyStopping of Keras \(instead: dj.callbacks.EarlySto"),
    "callback of the user": (
        lambda s: fit(s, type("Mine", (type(CALLBACK),), {})()), "Mine of Keras .instead: dj.callbacks.Ea"
    ),
    "model": (lambda s: fit(s, module=RELU), r"got ReLU of PyTorch \(instead: layers and models are Flax's"),
    "layer": (lambda s: fit(s, module=Net(RELU)), "^part of the module for dj.Model is ReLU of PyTorch"),
    "data": (lambda s: s.distribute_dataset(TENSOR), r"got Tensor of PyTorch \(instead: np.asarray"),
    "captured layer": (lambda s: run(s, lambda x: RELU(x)), r"step gets RELU: ReLU of PyTorch \(ins.*Flax"),
    "result": (
        lambda s: run(s, lambda x: instance(TORCH, "Tensor", __array__=id)), "returned Tensor of PyT.* once"
    ),
    "function": (
        lambda s: run(s, function("tensorflow.nn", "return np.maximum(x, 0)")),
        r"relu calls TensorFlow, .*use jax.numpy(.|\n)*TensorFlow says: The numpy.ndarray conv",
    ),
    "function in C": (lambda s: run(s, function("mine", IN_C)), r"calls PyTorch, (.|\n)*must be Tensor"),
    "compiled step": (lambda s: run(s, compiled), "Leave torch.compile out: strategy.run compiles"),
    "method": (lambda s: run(s, lambda x: x.unsqueeze(0)), r"Instead of unsqueeze: jnp.expand_dims"),
    "method of a batch": (lambda s: run(s, lambda x: x).cuda(), "Instead: nothing: JAX places the step"),
    "dim for axis": (lambda s: run(s, lambda x: x.sum(dim=1)), "arrays take axis and keepdims"),
    "list of callbacks": (
        lambda s: fit(s, instance(KERAS, "CallbackList", "Callback")), r"instead: dj.callbacks.Callback\)"
    ),
    "attribute of a model": (
        lambda s: fit(s, module=Outer("parameters")), r"Instead of parameters: nnx.state\(model"
    ),
    "mode": (
        lambda s: fit(s, module=Outer("__call__", "training")), r"model.train\(\) and model.eval\(\)"
    ),
    "size": (lambda s: run(s, lambda x: x.size(0)), r"x.shape\[0\] for x.size\(0\)"),
    "gradient": (lambda s: s.run(nnx.grad(float), args=(dj.Model(Net(0)),)), r"nnx.grad.loss..model\.module"),
    "name of a loss": (lambda s: dj.losses.MSELoss(), r"Instead: MeanSquaredError\(\)"),  # type: ignore[attr-defined]
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_the_error_names_the_replacement(mistake: str, s2: dj.MirroredStrategy):
    """In the text, or in a note below it."""
    make, words = WRONG[mistake]
    with pytest.raises((ValueError, TypeError, AttributeError)) as caught:
        make(s2)
    caught.match(words)


def test_a_mistake_of_the_user_is_not_blamed_on_a_framework(s2: dj.MirroredStrategy):
    """If a framework's function only called the user's, as a decorator does."""

    def step(x: Any) -> Any:
        raise TypeError("of the step")

    scope: dict[str, Any] = {"__name__": "torch.any", "step": step}
    exec("def wrapped(x): return step(x)", scope)
    with pytest.raises(TypeError, match=r"^of the step"):
        run(s2, scope["wrapped"])


@pytest.mark.exhaustive
def test_a_keras_loss_with_the_jax_backend_is_accepted(s2: dj.MirroredStrategy, monkeypatch: Any):
    loss = instance(KERAS, "Mine", "Loss", __call__=lambda _, y, p: jnp.square(y - p).mean(-1))
    with pytest.raises(ValueError, match=r"Mine of Keras \(instead: dj.losses.Loss\)"):
        fit(s2, loss=loss)
    monkeypatch.setitem(sys.modules, "keras.src.backend.jax", SimpleNamespace())
    assert fit(s2, loss=loss)["loss"] == pytest.approx(fit(s2)["loss"])


def test_a_step_inside_a_tf_function_is_refused(s2: dj.MirroredStrategy, monkeypatch: Any):
    graph = SimpleNamespace(executing_eagerly=lambda: False)
    dataset = s2.distribute_dataset([X])
    monkeypatch.setitem(sys.modules, "tensorflow", graph)
    for call in (lambda: s2.run(lambda: 0), lambda: iter(dataset)):
        with pytest.raises(dj.ContextError, match=r"inside a tf.function. Leave @tf.function out"):
            call()


def test_tensorflows_reduce_op_is_accepted(s2: dj.MirroredStrategy):
    values = run(s2, lambda x: x.sum())
    total: Any = enum.Enum("ReduceOpV2", ["SUM"])["SUM"]
    assert float(s2.reduce(total, values, axis=None)) == pytest.approx(X.sum(), rel=1e-5)
    with pytest.raises(ValueError, match="one of 'sum'"):
        s2.reduce(enum.Enum("Other", ["SUM"])["SUM"], values, axis=None)  # type: ignore[arg-type]


class Batches:
    """A Keras ``PyDataset``, which reverses its order after each epoch."""

    order = range(2)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return X[8 * self.order[i] :][:8], Y[8 * self.order[i] :][:8]

    def on_epoch_end(self) -> None:
        self.order = self.order[::-1]


def test_on_epoch_end_of_a_dataset_is_called(s2: dj.MirroredStrategy):
    dataset = s2.distribute_dataset(Batches())
    first, second = ([np.asarray(s2.gather(x, 0)) for x, _ in dataset] for _ in range(2))
    assert np.array_equal(np.concatenate(first), X)
    assert np.array_equal(np.concatenate(second[::-1]), X)


def test_tables_and_tensors_are_arrays():
    table = SimpleNamespace(shape=(16, 3))
    column: Any = type(
        "Column", (), {"shape": (16,), "__array__": lambda self, *_, **__: Y[:, 0]}
    )()
    (batch,) = dj.data.from_arrays({"x": X, "y": column}).batch(16)
    assert np.array_equal(batch["y"], Y[:, 0])
    with pytest.raises(ValueError, match="no arrays with a dim 0"):
        dj.data.from_arrays(table)


@pytest.mark.exhaustive
def test_class_weights_may_be_a_series(s2: dj.MirroredStrategy):
    loss = dj.losses.SparseCategoricalCrossentropy(from_logits=True)

    def losses(weights: Any) -> Any:
        with s2.scope():
            model = dj.Model(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
        model.compile("sgd", loss)
        return model.fit(X, Y[:, 0] > 0, 8, 1, 0, class_weight=weights).history["loss"]

    weights = {0: 1.0, 1: 3.0}
    assert losses(SimpleNamespace(items=weights.items)) == losses(weights) != losses(None)
    with pytest.raises(ValueError, match=r"or dict\(enumerate\(weights\)\); got \[1, 3\]"):
        losses([1, 3])
