"""The models in Keras 3, for the peers that stand on it; `KERAS_BACKEND` is set before."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

from benchmarks.peers._protocol import EPSILON, LEARNING_RATE, Start


class Places(layers.Layer):
    """Adds to each token what belongs to its place."""

    def build(self, shape: Any) -> None:
        """Makes the table."""
        self.table = self.add_weight(shape=tuple(shape[1:]), name="table")

    def call(self, h: Any) -> Any:
        """Maps (batch, length, width) to the same shape."""
        return h + self.table


def model_of(start: Start) -> Any:
    """Builds the model with its initial weights; layers are named after the weights."""
    inputs = keras.Input(start.x.shape[2:], dtype=str(start.x.dtype))
    build = {"mlp": _perceptron, "cnn": _cnn, "transformer": _transformer}[start.model]
    model = keras.Model(inputs, build(start, inputs))
    for layer in model.layers:
        if layer.weights:
            values = _values(start, layer.name)
            layer.set_weights(
                [v.reshape(w.shape) for v, w in zip(values, layer.weights, strict=True)]
            )
    return model


def _values(start: Start, layer: str) -> list[Any]:
    """Returns a layer's weights in the order in which Keras makes them."""
    if layer.endswith("attention"):
        parts = [f"{layer}.{part}" for part in ("query", "key", "value", "out")]
        return [value for part in parts for value in _values(start, part)]
    kinds = ("embedding", "kernel", "scale", "bias")
    names = [f"{layer}.{kind}" for kind in kinds]
    return [start.weights[name] for name in names if name in start.weights]


def _perceptron(start: Start, h: Any) -> Any:
    kernels = [name for name in start.weights if name.endswith("kernel")]
    for name in kernels:
        last = name == kernels[-1]
        units = start.weights[name].shape[1]
        activation = None if last else "relu"
        h = layers.Dense(units, activation=activation, name=name.removesuffix(".kernel"))(h)
    return h


def _cnn(start: Start, h: Any) -> Any:
    for name, channels in (("conv1", 32), ("conv2", 64)):
        h = layers.Conv2D(channels, 3, padding="same", activation="relu", name=name)(h)
        h = layers.MaxPooling2D(2)(h)
    h = layers.Dense(128, activation="relu", name="dense")(layers.Flatten()(h))
    return layers.Dense(10, name="head")(h)


def _transformer(start: Start, h: Any) -> Any:
    vocabulary, width = start.weights["tokens.embedding"].shape
    h = Places(name="places")(layers.Embedding(vocabulary, width, name="tokens")(h))
    for i in range(len({name for name in start.weights if name.endswith("up.kernel")})):
        name = f"blocks.{i}"
        normed = layers.LayerNormalization(epsilon=1e-6, name=f"{name}.norm1")(h)
        attention = layers.MultiHeadAttention(4, width // 4, name=f"{name}.attention")
        h = h + attention(normed, normed, use_causal_mask=True)
        normed = layers.LayerNormalization(epsilon=1e-6, name=f"{name}.norm2")(h)
        up = layers.Dense(4 * width, activation="relu", name=f"{name}.up")(normed)
        h = h + layers.Dense(width, name=f"{name}.down")(up)
    h = layers.LayerNormalization(epsilon=1e-6, name="norm")(h)
    return layers.Dense(vocabulary, name="head")(h)


def optimizer() -> Any:
    """Returns the optimizer."""
    return keras.optimizers.Adam(LEARNING_RATE, epsilon=EPSILON)
