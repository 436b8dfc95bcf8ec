"""TensorFlow: ``MirroredStrategy.run`` over logical CPU devices, in a loop of one's own."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from itertools import cycle
from typing import Any

import tensorflow as tf

from benchmarks.peers._keras_models import model_of, optimizer
from benchmarks.peers._protocol import Start, serve


class TensorFlowTrainer:
    """Calls a ``tf.function`` for each batch; the batches are on the devices."""

    def __init__(self, start: Start) -> None:
        strategy = _strategy(start.replicas)
        with strategy.scope():
            model, adam = model_of(start), optimizer()
            adam.build(model.trainable_variables)  # a `tf.function` makes no variables
        examples = start.x.shape[1]

        def replica_step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                each = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
                loss = tf.reduce_sum(tf.reduce_mean(tf.reshape(each, (len(x), -1)), 1)) / examples
            gradients = tape.gradient(loss, model.trainable_variables)
            # Rows of an embedding come apart, and Adam with parts of a row is another optimizer.
            gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
            gradients = tf.distribute.get_replica_context().all_reduce("sum", gradients)
            adam.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        @tf.function
        def step(x: Any, y: Any) -> Any:
            return strategy.reduce("sum", strategy.run(replica_step, args=(x, y)), axis=None)

        self.step = step
        data = tf.data.Dataset.from_tensor_slices((start.x, start.y))
        self.batches = cycle(
            list(strategy.experimental_distribute_dataset(data.unbatch().batch(examples)))
        )

    def losses(self, steps: int) -> list[float]:
        """Trains, and gives each step's loss."""
        return [float(self.step(*next(self.batches))) for _ in range(steps)]

    def run(self, steps: int) -> None:
        """Trains, and returns when the last step has finished."""
        for _ in range(steps):
            loss = self.step(*next(self.batches))
        loss.numpy()


def _strategy(replicas: int) -> Any:
    (cpu, *_) = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration()] * replicas
    tf.config.set_logical_device_configuration(cpu, logical)
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


if __name__ == "__main__":
    serve(TensorFlowTrainer, tf)
