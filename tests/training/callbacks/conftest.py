"""One tiny model, compiled once: y = w * x, w = 1, x = 1..8, y = 0, mean squared error, SGD(0.01).

A step on all eight examples has the loss 25.5 w² and takes w to 0.49 w.
"""

from __future__ import annotations

import warnings
from io import StringIO
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import distribute_jax as dj
from tests.training.model_factory import Scale, compile_model


class Example:
    """The model with its data; counts how often its steps are traced."""

    x = np.arange(1.0, 9.0, dtype=np.float32).reshape(8, 1)
    y = np.zeros((8, 1), np.float32)

    def __init__(self, **compiled: Any) -> None:
        traced = self._traced = StringIO()  # a list would be state that the step captures

        def loss(y_true: Any, y_pred: Any) -> Any:
            traced.write(".")
            return jnp.mean((y_true - y_pred) ** 2, axis=-1)

        self.model = compile_model(dj.MirroredStrategy([0, 1]), Scale, loss=loss, **compiled)

    @property
    def traces(self) -> int:
        """How often the loss was traced."""
        return len(self._traced.getvalue())

    def fit(self, *callbacks: dj.callbacks.Callback, batch_size: int = 8, **options: Any) -> Any:
        """Trains on all examples in their order."""
        options = {"verbose": 0, "shuffle": False, **options}
        x, y = options.pop("x", self.x), options.pop("y", self.y)
        with warnings.catch_warnings():
            # For the sizes of all tests.
            warnings.filterwarnings("ignore", ".*was compiled 5 times")
            return self.model.fit(x, y, batch_size=batch_size, callbacks=list(callbacks), **options)

    @property
    def w(self) -> float:
        return float(self.model.get_weights()[0][0])

    def reset(self) -> None:
        """Sets w = 1 and the rate 0.01."""
        self.model.set_weights([np.ones(1)])
        self.model.learning_rate = 0.01
        self.model.optimizer.step[...] = self.model.optimizer.step[...] * 0


@pytest.fixture(scope="package")
def _compiled() -> Example:
    return Example()


@pytest.fixture
def example(_compiled: Example) -> Example:
    """The model on two replicas, in its initial state."""
    _compiled.reset()
    return _compiled


class Feed(dj.callbacks.Callback):
    """Puts given numbers into the logs of each epoch, for the callbacks after it."""

    def __init__(self, **numbers: list[float]) -> None:
        super().__init__()
        self.numbers = numbers

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs |= {
            name: values[epoch] for name, values in self.numbers.items() if epoch < len(values)
        }


@pytest.fixture
def feed() -> type[Feed]:
    return Feed
