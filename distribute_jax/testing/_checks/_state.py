"""Metrics, batch norm and random streams: state that each replica adds to in its own way."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from distribute_jax import metrics
from distribute_jax.collectives import check_in_sync
from distribute_jax.testing._checks._facts import Fact, on_all, same, succeeds
from distribute_jax.testing._checks._subject import Subject, number


def metrics_over_replicas(s: Subject) -> Iterator[Fact]:
    """``dj.metrics`` count every example once, over full and partial batches."""

    def make() -> Any:
        return metrics.MultiMetric(
            accuracy=metrics.Accuracy(threshold=0.5),
            loss=metrics.Average("loss"),
            spread=metrics.Welford("loss"),
        )

    def step(x: jax.Array, labels: jax.Array) -> None:
        metric.update(logits=x, labels=labels, loss=x)

    metric = s.made(make)
    x = (np.arange(14, dtype=np.float32) * 5 % 14) / 8
    labels = np.arange(14, dtype=np.int32) % 2
    data = [(x[a:b], labels[a:b]) for a, b in ((0, 8), (8, 13), (13, 14))]
    for batch in s.batches(data):
        s.run(step, *batch)
    found = metric.compute()
    yield Fact("Average", float(found["loss"]), float(x.mean()))
    yield Fact("its count", int(metric.loss.count[...]), 14)
    yield Fact("Accuracy", float(found["accuracy"]), float(((x >= 0.5) == labels).mean()))
    yield Fact("the mean of Welford", float(found["spread"].mean), float(x.mean()))
    deviation = float(found["spread"].standard_deviation)
    yield Fact("the deviation of Welford", deviation, float(x.std()))
    yield succeeds("all copies of the metrics are equal", lambda: check_in_sync(metric))


def _normalisation(axis: str | None) -> nnx.BatchNorm:
    return nnx.BatchNorm(1, momentum=0.5, axis_name=axis, rngs=nnx.Rngs(0))


def batch_norm(s: Subject) -> Iterator[Fact]:
    """Running statistics are those of the global batch, or the replicas' own ones averaged."""
    x = np.arange(1.0, 9.0, dtype=np.float32)[:, None]
    (batch,) = s.batches([x])
    own_variance = float(np.mean([part.var() for part in np.split(x, s.n)]))
    for kind, axis, variance in (("synchronised", "data", 5.25), ("local", None, own_variance)):
        norm = s.made(partial(_normalisation, axis))
        out = s.run(norm, batch)
        yield from same(f"the {kind} running mean", norm.mean[...], np.asarray([2.25], np.float32))
        wanted = np.asarray([0.5 + 0.5 * variance], np.float32)
        yield from same(f"the {kind} running variance", norm.var[...], wanted)
        if kind == "synchronised":
            wanted = (x - 4.5) / np.sqrt(np.float32(5.25 + 1e-5))
            joined = s.strategy.gather(out, axis=0)
            yield from same("the normalised batch", joined, wanted, rtol=1e-4)
        yield succeeds(f"the {kind} statistics are equal", partial(check_in_sync, norm))


def random_streams(s: Subject) -> Iterator[Fact]:
    """Replicas draw different numbers, replica 0 those of one device, and the stream stays one."""
    dropout = s.made(lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(3)))
    alone = nnx.Dropout(0.5, rngs=nnx.Rngs(3))
    drawn = []
    for call in ("first", "second"):
        parts = s.seen(lambda: dropout(jnp.ones(64)))
        yield from same(f"replica 0's {call} draw", parts[0], np.asarray(alone(jnp.ones(64))))
        drawn += [part.tobytes() for part in parts]
    yield Fact("how many of the replicas' draws differ", len(set(drawn)), 2 * s.n)
    yield Fact("how often the stream was used", int(dropout.rngs.count[...]), 2)
    yield succeeds("all copies of the stream are equal", lambda: check_in_sync(dropout))


def random_parameters(s: Subject) -> Iterator[Fact]:
    """The stream of parameters gives all replicas the same numbers, and keys in arguments too."""
    rngs = s.made(lambda: nnx.Rngs(params=7))
    wanted = np.asarray(jax.random.normal(nnx.Rngs(params=7).params(), (5,)))
    parts = s.seen(lambda: jax.random.normal(rngs.params(), (5,)))
    yield from on_all("the draw of the stream 'params'", parts, wanted)
    key = jax.random.key(5)
    parts = s.seen(lambda key: jax.random.normal(key, (5,)) + 0 * number(), key)
    wanted = np.asarray(jax.random.normal(key, (5,)))
    yield from on_all("the draw of a key that was passed", parts, wanted)


CHECKS = (metrics_over_replicas, batch_norm, random_streams, random_parameters)
