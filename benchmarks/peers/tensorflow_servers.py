"""TensorFlow: a step scheduled on the workers of ``ParameterServerStrategy``, with one server.

Workers and the server are of this process, as in TensorFlow's tutorial; they speak gRPC over loopback.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import cycle
from typing import Any

import tensorflow as tf

from benchmarks.peers._protocol import EPSILON, LEARNING_RATE, Start, serve

_BETAS = 0.9, 0.999


class TensorFlowServersTrainer:
    """Schedules a ``tf.function`` for each batch, of a network of dense layers."""

    def __init__(self, start: Start) -> None:
        strategy = _strategy(start.replicas)
        names = sorted(start.weights)  # a layer's bias comes before its kernel
        with strategy.scope():
            weights = [tf.Variable(start.weights[name]) for name in names]
            moments = [[tf.Variable(tf.zeros_like(w)) for w in weights] for _ in _BETAS]
            powers = [tf.Variable(beta) for beta in _BETAS]

        def update(gradients: Sequence[Any]) -> None:
            for w, m, v, gradient in zip(weights, *moments, gradients, strict=True):
                tf.raw_ops.ResourceApplyAdam(
                    var=w.handle, m=m.handle, v=v.handle, beta1_power=powers[0],
                    beta2_power=powers[1], lr=LEARNING_RATE, beta1=_BETAS[0], beta2=_BETAS[1],
                    epsilon=EPSILON, grad=gradient,
                )  # fmt: skip
            for power, beta in zip(powers, _BETAS, strict=True):
                power.assign(power * beta)

        @tf.function
        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                for i in range(0, len(weights), 2):
                    x = (tf.nn.relu(x) if i else x) @ weights[i + 1] + weights[i]
                each = tf.nn.sparse_softmax_cross_entropy_with_logits(y, x)
                loss = tf.reduce_mean(each)
            update(tape.gradient(loss, weights))
            return loss

        self.step = step
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        batches = zip(start.x, start.y, strict=True)
        self.batches = cycle([(tf.constant(x), tf.constant(y)) for x, y in batches])

    def losses(self, steps: int) -> list[float]:
        """Trains one step after the other, and returns each one's loss."""
        return [float(self._schedule(1)[0].fetch()) for _ in range(steps)]

    def run(self, steps: int) -> None:
        """Trains, and returns when the last step has been applied."""
        self._schedule(steps)
        self.coordinator.join()

    def _schedule(self, steps: int) -> Sequence[Any]:
        return [self.coordinator.schedule(self.step, args=next(self.batches)) for _ in range(steps)]


def _strategy(workers: int) -> Any:
    with ExitStack() as held:
        bound = [held.enter_context(socket.socket()) for _ in range(workers + 1)]
        for one in bound:
            one.bind(("127.0.0.1", 0))
        server, *others = [f"127.0.0.1:{one.getsockname()[1]}" for one in bound]
    cluster = tf.train.ClusterSpec({"worker": others, "ps": [server]})
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=workers + 1)
    for job, number in (("worker", workers), ("ps", 1)):
        for index in range(number):
            tf.distribute.Server(cluster, job, index, protocol="grpc", config=config)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
    return tf.distribute.ParameterServerStrategy(resolver)


if __name__ == "__main__":
    serve(TensorFlowServersTrainer, tf)
