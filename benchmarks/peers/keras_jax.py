"""Keras 3 on JAX: ``fit`` under ``DataParallel``. Its batches come from the host, as ``fit`` takes them."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras

from benchmarks.peers._keras_models import model_of, optimizer
from benchmarks.peers._protocol import Start, serve


class KerasTrainer:
    """Trains with ``fit``."""

    def __init__(self, start: Start) -> None:
        devices = keras.distribution.list_devices()[: start.replicas]
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
        self.start, self.at = start, 0
        self.model = model_of(start)
        self.model.compile(
            optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )

    def losses(self, steps: int) -> list[float]:
        """Trains, and gives each step's loss: one ``fit`` for each."""
        return [self._fit(1) for _ in range(steps)]

    def run(self, steps: int) -> None:
        """Trains for one epoch of so many steps."""
        self._fit(steps)

    def _fit(self, steps: int) -> float:
        count, batch = self.start.x.shape[:2]
        taken = [(self.at + i) % count for i in range(steps)]
        self.at += steps
        x, y = (a[taken].reshape(-1, *a.shape[2:]) for a in (self.start.x, self.start.y))
        history = self.model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
        return float(history.history["loss"][0])


if __name__ == "__main__":
    serve(KerasTrainer, keras, jax)
