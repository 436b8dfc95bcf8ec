"""Keras 3 on JAX: ``fit`` under ``ModelParallel``, each replica on two devices by a layout map."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"

from functools import partial
from typing import Any

import jax
import keras

from benchmarks.peers._protocol import serve
from benchmarks.peers.keras_jax import KerasTrainer


def model_parallel(devices: list[str]) -> Any:
    """Returns the distribution; what one device does without is marked."""
    shape = (len(devices) // 2, 2)  # many
    mesh = keras.distribution.DeviceMesh(shape, ("data", "model"), devices)  # many
    layout = keras.distribution.LayoutMap(mesh)  # many
    layout[r".*(query|key|value)/kernel"] = (None, "model", None)  # many
    layout[r".*attention_output/kernel"] = ("model", None, None)  # many
    layout[r".*(up|head)/kernel"] = (None, "model")  # many
    layout[r".*(down/kernel|tokens/.*)"] = ("model", None)  # many
    return keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="data")


if __name__ == "__main__":
    serve(partial(KerasTrainer, distribution_of=model_parallel), keras, jax)
