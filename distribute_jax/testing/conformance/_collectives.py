"""The collectives inside ``run``: their sums, on every replica, and their derivatives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._values import DistributedValues
from distribute_jax.collectives import CommunicationOptions
from distribute_jax.testing.conformance._core import (
    Fact,
    Subject,
    number,
    on_all,
    on_each,
    power,
    replica,
    same,
    succeeds,
)


def _nest(factor: Any) -> dict[str, Any]:
    """Arrays of several dtypes and of lengths that no number of replicas divides."""
    return {
        "scalar": jnp.asarray(factor, jnp.float32),
        "vector": factor * jnp.arange(1.0, 38.0),
        "matrix": factor * jnp.arange(15.0).reshape(3, 5),
        "int32": jnp.asarray(factor * jnp.arange(4.0), jnp.int32),
        "bfloat16": jnp.asarray(factor, jnp.bfloat16),
        "float16": jnp.asarray(factor * jnp.ones(3), jnp.float16),
        "empty": jnp.zeros((0, 3)),
    }


def _on_host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def all_reduce_sum(s: Subject) -> Iterator[Fact]:
    """Powers of two are added, so that a replica left out or counted twice changes the sum."""

    def nest(factor: Any) -> dict[str, Any]:
        # Times 15, the sum of four replicas, it is not a number of float32.
        return {**_nest(factor), "large int32": jnp.int32(factor) * jnp.int32(2**22 + 1)}

    parts = s.seen(lambda: replica().all_reduce("sum", nest(power())))
    yield from on_all("the sum of 1, 2, 4, … over the replicas", parts, _on_host(nest(2**s.n - 1)))


def all_reduce_mean(s: Subject) -> Iterator[Fact]:
    """The sum is divided by the number of replicas, in every dtype; integers give floats."""
    parts = s.seen(lambda: replica().all_reduce("mean", _nest(power())))
    expected = _nest((2**s.n - 1) / s.n)
    expected["int32"] = (2**s.n - 1) / s.n * jnp.arange(4.0)
    yield from on_all("the mean of 1, 2, 4, … over the replicas", parts, _on_host(expected))


def all_reduce_copies(s: Subject) -> Iterator[Fact]:
    """Every replica has the same bits, also where the order of the sum matters."""

    def step() -> Any:
        own = jnp.sin(number() * jnp.arange(1.0, 38.0)) * 10.0 ** number()
        return replica().all_reduce("sum", {"vector": own, "scalar": own[3]})

    parts = s.seen(step)
    yield from on_all("the sum, compared with that of replica 0,", parts, parts[0], rtol=0)


def all_reduce_options(s: Subject) -> Iterator[Fact]:
    """Packing changes no sum, and ``options`` of one call are obeyed."""
    options = CommunicationOptions(bytes_per_pack=8)
    parts = s.seen(lambda: replica().all_reduce("sum", _nest(power()), options))
    yield from on_all("the sum in packs of 8 bytes", parts, _on_host(_nest(2**s.n - 1)))


def all_reduce_gradient(s: Subject) -> Iterator[Fact]:
    """The derivative is the same reduction: of upstream gradients, and of tangents."""

    def derivatives(op: str) -> tuple[jax.Array, jax.Array]:
        def reduced(x: jax.Array) -> jax.Array:
            return jnp.asarray(replica().all_reduce(op, x))

        upstream, x = power() * jnp.arange(1.0, 6.0), jnp.ones(5)
        gradient = jax.grad(lambda x: jnp.sum(reduced(x) * upstream))(x)
        return gradient, jax.jvp(reduced, (x,), (upstream,))[1]

    parts = s.seen(lambda: {"sum": derivatives("sum"), "mean": derivatives("mean")})
    total = np.float32(2**s.n - 1) * np.arange(1, 6, dtype=np.float32)
    expected = {"sum": (total, total), "mean": (total / np.float32(s.n), total / np.float32(s.n))}
    yield from on_all("gradient and tangent", parts, expected)


def all_reduce_transformed(s: Subject) -> Iterator[Fact]:
    """It works under jit, vmap, scan and checkpoint in the step."""

    def reduced(x: jax.Array) -> jax.Array:
        return jnp.asarray(replica().all_reduce("sum", x))

    def step() -> Any:
        own = power() * jnp.arange(6.0).reshape(2, 3)
        return {
            "jit": jax.jit(reduced)(own),
            "vmap": jax.vmap(reduced)(own),
            "vmap over dim 1": jax.vmap(reduced, in_axes=1, out_axes=1)(own),
            "scan": jax.lax.scan(lambda c, x: (c, reduced(x)), 0, own)[1],
            "checkpoint": jax.grad(lambda x: jnp.sum(jax.checkpoint(reduced)(x) * own))(own),
        }

    total = np.float32(2**s.n - 1) * np.arange(6, dtype=np.float32).reshape(2, 3)
    names = ("jit", "vmap", "vmap over dim 1", "scan", "checkpoint")
    yield from on_all("the sum under", s.seen(step), dict.fromkeys(names, total))


def all_reduce_is_proved(s: Subject) -> Iterator[Fact]:
    """The sum is known to be equal on all replicas, so a step may change state with it."""
    state = s.made(lambda: jax.numpy.zeros(3))
    found: list[Any] = []

    def call() -> None:
        found.append(s.run(lambda x: x + replica().all_reduce("sum", power()), state))

    yield succeeds("returning a mirrored argument plus a sum", call)
    for array in found:
        yield Fact("it comes back as one jax.Array", isinstance(array, jax.Array), True)
        for shard in array.addressable_shards if isinstance(array, jax.Array) else ():
            copy = np.asarray(shard.data)
            expected = np.full(3, 2**s.n - 1, np.float32)
            yield from same(f"its copy on {shard.device}", copy, expected)


def all_gather(s: Subject) -> Iterator[Fact]:
    """All replicas get all arrays in replica order; the gradient is the slice of the summed one."""

    def step() -> Any:
        own = number() * jnp.ones((2, 3))
        width, n = jnp.arange(2.0 * s_n), s_n

        def loss(x: jax.Array) -> jax.Array:
            return jnp.sum(replica().all_gather(x, axis=0)[:, 0] * width * power() * n)

        nest = {"0": own, "bool": own > 2}
        return {
            **replica().all_gather(nest, axis=0),
            "-1": replica().all_gather(own, axis=-1),
            "gradient": jax.grad(loss)(own)[:, 0],
        }

    s_n = s.n
    blocks = [np.full((2, 3), i, np.float32) for i in range(1, s.n + 1)]
    joined = np.concatenate(blocks)
    total = s.n * (2**s.n - 1) * np.arange(2 * s.n, dtype=np.float32).reshape(s.n, 2)
    expected = [
        {"0": joined, "bool": joined > 2, "-1": np.concatenate(blocks, 1), "gradient": row}
        for row in total
    ]
    yield from on_each("what all_gather gives", s.seen(step), expected)


def merge_call(s: Subject) -> Iterator[Fact]:
    """A function gets all replicas' values at once; each replica gets back its part, or all the same."""

    def merged(strategy: Any, value: Any, *, factor: float) -> Any:
        parts = strategy.experimental_local_results(value)
        kinds.append(isinstance(value, DistributedValues))
        return value, factor * strategy.reduce("sum", value, axis=None), sum(parts)

    kinds: list[bool] = []
    parts = s.seen(lambda: replica().merge_call(merged, args=(power(),), kwargs={"factor": 2.0}))
    total = np.float32(2**s.n - 1)
    expected = [(np.float32(2.0**i), 2 * total, total) for i in range(s.n)]
    yield from on_each("own part, twice the sum, and the sum by hand", parts, expected)
    yield Fact("each argument is a DistributedValues", kinds, [True])


CHECKS = (
    all_reduce_sum,
    all_reduce_mean,
    all_reduce_copies,
    all_reduce_options,
    all_reduce_gradient,
    all_reduce_transformed,
    all_reduce_is_proved,
    all_gather,
    merge_call,
)
