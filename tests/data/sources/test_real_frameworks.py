"""Objects and functions of the real TensorFlow, Keras and PyTorch outside of the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import distribute_jax as dj
from tests.training.test_other_frameworks import X, fit, run

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow: dev.py test --sources has it")
torch = pytest.importorskip("torch", reason="needs PyTorch: dev.py test --sources has it")
keras = tf.keras


def taped(x: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = (x**2).sum()
    return tape.gradient(loss, x)


class Net(torch.nn.Module):
    """A model of PyTorch."""

    def forward(self, x: Any) -> Any:
        return torch.relu(x)


NET = Net()
DENSE = keras.Sequential([keras.layers.Dense(1)])
WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "Keras's loss": (lambda s: fit(s, loss=keras.losses.Huber()), "instead: dj.losses.Huber"),
    "Keras's metric": (lambda s: fit(s, metrics=[keras.metrics.AUC()]), "instead: dj.metrics.AUC"),
    "Keras's optimizer": (lambda s: fit(s, optimizer=keras.optimizers.Adam(1e-3)), "Adam of Keras"),
    "Keras's callback": (lambda s: fit(s, keras.callbacks.EarlyStopping()), "instead: dj.callbacks.EarlyS"),
    "Keras's schedule": (
        lambda s: fit(s, optimizer=keras.optimizers.schedules.CosineDecay(0.1, 9)), "optax's schedules"
    ),
    "Keras's model": (lambda s: fit(s, module=DENSE), "models are Flax's"),
    "Keras's layer": (lambda s: fit(s, module=nnx.Sequential(keras.layers.ReLU())), "ReLU of Keras"),
    "Keras's model in a step": (lambda s: run(s, lambda x: DENSE(x)), "gets DENSE: Sequential of Keras"),
    "TensorFlow's strategy": (
        lambda s: dj.experimental_set_strategy(tf.distribute.get_strategy()), "TensorFlow .instead: dj"
    ),
    "TensorFlow's function": (lambda s: run(s, lambda x: tf.reduce_mean(x)), "calls TensorFlow, which"),
    "tf.function of a step": (lambda s: run(s, tf.function(lambda x: x)), "calls TensorFlow, which"),
    "tape": (lambda s: run(s, taped), "calls TensorFlow, which"),
    "windows": (
        lambda s: s.distribute_dataset(tf.data.Dataset.range(9).window(3)), r"\.flat_map\(lambda window"
    ),
    "ragged": (lambda s: s.distribute_dataset(tf.ragged.constant([[1], []])), r"value.to_tensor\(\)"),
    "tf.function of a batch": (
        lambda s: tf.function(lambda x: 0)(run(s, lambda x: x)), r"Leave @tf.function out"
    ),
    "PyTorch's loss": (
        lambda s: fit(s, loss=torch.nn.BCEWithLogitsLoss()), r"BinaryCrossentropy\(from_logits=True\)"
    ),
    "function of a loss": (
        lambda s: fit(s, loss=torch.nn.functional.mse_loss), r"calls PyTorch(.|\n)*The loss mse_loss was"
    ),
    "PyTorch's metric": (lambda s: fit(s, metrics=[torch.nn.L1Loss()]), "MeanAbsoluteError"),
    "PyTorch's optimizer": (
        lambda s: fit(s, optimizer=torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])), "SGD of PyTorch"
    ),
    "PyTorch's model": (lambda s: fit(s, module=NET), r"got Net of PyTorch \(instead: layers"),
    "PyTorch's model in a step": (lambda s: run(s, lambda x: NET(x)), "The step gets NET: Net of PyTorch"),
    "PyTorch's function in C": (lambda s: run(s, lambda x: torch.relu(x)), "calls PyTorch, which"),
    "torch.compile": (
        lambda s: run(s, torch.compile(lambda x: x * 2, backend="eager")), "Leave torch.compile out"
    ),
    "concatenated": (lambda s: run(s, lambda x: torch.cat([x, x])), "calls PyTorch, which"),
    "from NumPy": (lambda s: run(s, lambda x: torch.from_numpy(x)), "calls PyTorch, which"),
    "mean with invalid arguments": (lambda s: run(s, lambda x: torch.mean(x, -1)), "calls PyTorch, which"),
    "dtype": (lambda s: run(s, lambda x: x.astype(torch.float16)), "JAX's dtypes are jnp"),
    "result": (lambda s: run(s, lambda x: torch.rand(3)), "returned Tensor of PyTorch"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_the_error_says_what_to_use(mistake: str, s2: dj.MirroredStrategy):
    """In its text or a note."""
    make, words = WRONG[mistake]
    with pytest.raises((ValueError, TypeError, AttributeError)) as caught:
        make(s2)
    caught.match(words)


def test_a_loop_in_a_tf_function_is_refused(s2: dj.MirroredStrategy):
    """TensorFlow wraps the error in its own, with its text."""
    step = tf.function(lambda: s2.run(lambda: 0.0))
    with pytest.raises(Exception, match=r"Leave @tf.function out"):
        step()


def test_a_schedule_of_keras_sets_the_rate(s2: dj.MirroredStrategy):
    """Its tensor without dims is a number."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    assert fit(s2, dj.callbacks.LearningRateScheduler(schedule))["learning_rate"] == [0.5]


def test_tensors_and_reductions_are_accepted(s2: dj.MirroredStrategy):
    """Arrays of both frameworks, in one dataset; TensorFlow's reduction of the sums of the replicas."""
    (batch,) = s2.distribute_dataset(
        dj.data.from_arrays((torch.tensor(X), tf.constant(X))).batch(16)
    )
    sums = s2.run(lambda x, y: (x + y).sum(), args=batch)
    with s2.scope():
        counter = dj.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
    assert counter.aggregation is dj.VariableAggregation.SUM
    total = s2.reduce(tf.distribute.ReduceOp.SUM, sums, axis=None)
    assert float(total) == pytest.approx(2 * X.sum(), rel=1e-5)


def test_a_decorator_of_pytorch_is_harmless(s2: dj.MirroredStrategy):
    """``torch.no_grad`` around a step, or in it, changes nothing."""
    doubled = run(s2, torch.no_grad()(lambda x: 2 * x))
    assert np.array_equal(np.asarray(s2.gather(doubled, axis=0)), 2 * X)
    assert isinstance(s2.gather(doubled, axis=0), jax.Array)
