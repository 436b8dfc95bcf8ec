"""Keras 3 on JAX: ``fit`` under ``DataParallel``. Its batches come from the host, as ``fit`` takes them."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"

from itertools import cycle
from typing import Any

import jax
import keras
import numpy as np

from benchmarks.peers._keras_models import model_of, optimizer
from benchmarks.peers._protocol import Array, Start, most_on_a_device, serve

REPEATS = 5
"""How often the batches stand in memory: a turn has at most so many times their number of steps."""


class KerasTrainer:
    """Trains with ``fit``."""

    def __init__(
        self, start: Start, distribution_of: Any = keras.distribution.DataParallel
    ) -> None:
        devices = keras.distribution.list_devices()[: start.replicas]  # many
        keras.distribution.set_distribution(distribution_of(devices=devices))  # many
        self.start = start
        # One after the other in memory, so that a turn is a view.
        self.x, self.y = (
            np.concatenate(np.tile(a, (REPEATS,) + (1,) * (a.ndim - 1))) for a in (start.x, start.y)
        )
        self.model = model_of(start)
        self.model.compile(
            optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )

    def losses(self, steps: int) -> list[float]:
        """Trains, and gives each step's loss: one ``fit`` for each."""
        batches = cycle(zip(self.start.x, self.start.y, strict=True))
        return [self._fit(*next(batches)) for _ in range(steps)]

    def run(self, steps: int) -> None:
        """Trains for one epoch of so many steps."""
        examples = steps * self.start.x.shape[1]
        self._fit(self.x[:examples], self.y[:examples])

    def state_bytes(self) -> int:
        """Counts what the state takes on the device that has most of it."""
        variables = [*self.model.variables, *self.model.optimizer.variables]
        return most_on_a_device(variable.value for variable in variables)

    def _fit(self, x: Array, y: Array) -> float:
        size = self.start.x.shape[1]
        history = self.model.fit(x, y, batch_size=size, shuffle=False, verbose=0)
        return float(history.history["loss"][0])


if __name__ == "__main__":
    serve(KerasTrainer, keras, jax)
