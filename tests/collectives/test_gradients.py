"""Derivatives of all_reduce: the same reduction of the upstream gradients, for every operation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithms import ALGORITHMS, context, locals_of, on_replicas, strategy_with
from cases import long

import distribute_jax as dj

Reduce = Callable[[Any], Any]
N = 4


def weight() -> jax.Array:
    """A number that differs on each replica, so that a gradient that was not reduced shows."""
    return context().replica_id_in_sync_group + 1.0


def gradient(reduce: Reduce, x: jax.Array) -> jax.Array:
    """The upstream gradients are 1, 2, 3, 4."""
    return jax.grad(lambda v: (weight() * reduce(v)).sum())(x)


def gradient_in_jit(reduce: Reduce, x: jax.Array) -> jax.Array:
    return jax.jit(jax.grad(lambda v: (weight() * reduce(v) ** 2).sum()))(x)


def gradient_through_scan(reduce: Reduce, x: jax.Array) -> jax.Array:
    def loss(v: jax.Array):
        # Divided, so that rounding is not magnified from step to step.
        step = lambda c, _: (reduce(jnp.sin(c)) / N, reduce(c))  # noqa: E731
        last, sums = jax.lax.scan(step, v, None, length=3)
        return (weight() * last).sum() + (sums**2).sum()

    return jax.grad(loss)(x)


def gradient_of_gradient(reduce: Reduce, x: jax.Array) -> jax.Array:
    inner = jax.grad(lambda v: (weight() * reduce(v**3)).sum())
    return jax.grad(lambda v: (weight() * inner(v) ** 2).sum())(x)


def forward_over_reverse(reduce: Reduce, x: jax.Array) -> jax.Array:
    inner = jax.grad(lambda v: (weight() * reduce(v**3)).sum())
    return jax.jvp(inner, (x,), (jnp.ones_like(x),))[1]


def checkpointed(reduce: Reduce, x: jax.Array) -> jax.Array:
    return jax.grad(lambda v: (weight() * jax.checkpoint(lambda u: reduce(u) ** 2)(v)).sum())(x)


def of_a_nest(reduce: Reduce, x: jax.Array) -> jax.Array:
    """One leaf has no gradient, one is used twice, one is an integer."""

    def loss(v: jax.Array):
        nest = reduce({"a": v, "b": v * 2, "i": jnp.arange(3), "unused": v})
        return (weight() * (nest["a"] * nest["b"])).sum() + (nest["a"] * nest["i"].sum()).sum()

    return jax.grad(loss)(x)


def vmapped(reduce: Reduce, x: jax.Array) -> jax.Array:
    rows = jnp.stack([x, 2 * x, 3 * x], axis=1)
    per_row = jax.vmap(jax.grad(lambda v: (weight() * reduce(v) ** 2).sum()), in_axes=1, out_axes=1)
    return per_row(rows)


def linear_transpose(reduce: Reduce, x: jax.Array) -> jax.Array:
    return jax.linear_transpose(reduce, x)(x)[0]


def in_bfloat16(reduce: Reduce, x: jax.Array) -> jax.Array:
    return jax.grad(lambda v: (weight() * reduce(v.astype(jnp.bfloat16))).sum())(x)


DERIVATIVES = (
    gradient,
    gradient_in_jit,
    gradient_through_scan,
    gradient_of_gradient,
    forward_over_reverse,
    checkpointed,
    of_a_nest,
    vmapped,
    linear_transpose,
    in_bfloat16,
)


Asked = tuple[tuple[Any, str], ...]
"""Derivatives, and of which reduction."""


def results(ops: dj.CrossDeviceOps | None, asked: Asked) -> list[Any]:
    """The derivatives on each replica, at a point that differs on each; one program has them all."""
    strategy = strategy_with(ops, N)
    points = [np.linspace(-1, 1, 5, dtype=np.float32) + r for r in range(N)]

    def step(x: jax.Array) -> list[jax.Array]:
        return [d(lambda v, op=op: context().all_reduce(op, v), x) for d, op in asked]

    return locals_of(strategy, strategy.run(step, args=(on_replicas(strategy, points),)))


ALL = (*((d, "sum") for d in DERIVATIVES), (gradient_of_gradient, "mean"))


@functools.cache
def of_the_default() -> list[Any]:
    """The derivatives of the default, computed once."""
    return results(None, ALL)


@pytest.mark.parametrize(
    "name", ["hierarchical, 1 packs", *(long(n) for n in ("ring, 1 packs", "to one"))]
)
def test_every_derivative_is_that_of_the_default(name: str):
    for one, other in zip(results(ALGORITHMS[name](), ALL), of_the_default(), strict=True):
        for (derivative, op), a, b in zip(ALL, one, other, strict=True):
            np.testing.assert_allclose(
                a, b, rtol=1e-6, atol=1e-5, err_msg=f"{derivative.__name__} {op}"
            )


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_gradient_that_passed_an_all_reduce_is_proved_mirrored(name: str):
    """So it may be written to state without another reduction."""
    strategy = strategy_with(ALGORITHMS[name](), N)
    out = strategy.run(lambda: gradient(lambda v: context().all_reduce("sum", v), jnp.ones(3)))
    assert isinstance(out, jax.Array)
