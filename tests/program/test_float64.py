"""A traced step is evaluated in float64, whatever dtypes the code asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from distribute_jax.program._verify_float64 import evaluated

X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
ROWS = np.array([0, 2, 2, 1, 2, 0], np.int32)


def _loop(x: jax.Array) -> Any:
    return lax.while_loop(
        lambda c: c[0].sum() < 100, lambda c: (c[0] * 1.5, c[1] + 1), (jnp.abs(x), jnp.int32(0))
    )


def _scan(x: jax.Array) -> Any:
    return lax.scan(lambda c, row: (c * 0.5 + row, c.sum()), jnp.zeros(4, x.dtype), x, reverse=True)


def _table(x: jax.Array) -> Any:
    return jax.grad(lambda table: jnp.sum(jnp.sin(table[ROWS]) * x))(jnp.ones((3, 4), x.dtype))


def _ref(x: jax.Array) -> Any:
    total = jax.new_ref(jnp.zeros(4, x.dtype))
    for row in range(6):
        total[...] += x[row]
    return total[...]


PROGRAMS: dict[str, Callable[[jax.Array], Any]] = {
    "rows that are read several times": _table,
    "the largest of rows": lambda x: jax.ops.segment_max(x, ROWS, num_segments=3),
    "a product of rows": lambda x: jnp.ones((3, 4), x.dtype).at[ROWS].multiply(x),
    "rows set": lambda x: jnp.zeros((8, 4), x.dtype).at[jnp.arange(6) + 1].set(x),
    "a loop": _loop,
    "a scan": _scan,
    "a branch": lambda x: lax.cond(x.sum() > 0, lambda x: jnp.tanh(x), lambda x: x * 2, x),
    "a custom derivative": jax.grad(lambda x: jax.nn.relu(x).sum() + jax.nn.logsumexp(x)),
    "recomputation": jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)).sum())(x)),
    "a function under jit": lambda x: jax.jit(lambda x: jnp.linalg.norm(x, axis=1))(x),
    "a convolution": lambda x: jnp.convolve(x[:, 0], x[:3, 1], mode="same"),
    "sorted, and which are the largest": lambda x: (jnp.sort(x, 0), lax.top_k(x, 2)),
    "sums along the way": lambda x: (jnp.cumsum(x, 0), jnp.argmax(x, 1), jnp.std(x)),
    "a matrix and its factors": lambda x: jnp.linalg.cholesky(x[:4] @ x[:4].T + 9 * jnp.eye(4)),
    "a mapped function": jax.vmap(lambda r: lax.fori_loop(0, 3, lambda i, r: r * r - i, r * 0.5)),
    "a loop of each row": jax.vmap(
        lambda r: lax.while_loop(lambda r: r[0] < 9, lambda r: 1.5 * r + 1, jnp.abs(r))
    ),
    "a reference": _ref,
    "a Fourier transform": lambda x: jnp.abs(jnp.fft.fft(x[:, 0])),
}


BY_DEFAULT = ("rows that are read several times", "a loop", "a scan", "a branch", "a reference")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in BY_DEFAULT else pytest.mark.exhaustive) for n in PROGRAMS],
)
def test_a_jaxpr_evaluates_as_its_function_does_in_float64(name: str):
    """The trace of float32 has the result of the function for float64 arguments."""
    program = PROGRAMS[name]
    jaxpr = jax.make_jaxpr(program)(X)
    with jax.enable_x64(True):
        outs = jax.jit(lambda x: evaluated(jaxpr, [x]))(X.astype(np.float64))
        same = jax.tree.leaves(jax.jit(program)(jnp.asarray(X, jnp.float64)))
    narrow = jax.tree.leaves(jax.eval_shape(program, X))
    for out, wide, short in zip(outs, same, narrow, strict=True):
        floating = np.issubdtype(short.dtype, np.floating)
        assert out.dtype == (np.float64 if floating else short.dtype)
        np.testing.assert_allclose(out, wide, rtol=1e-12, atol=1e-12)


def test_bfloat16_in_the_code_is_computed_in_float64():
    def program(x: jax.Array) -> jax.Array:
        half = x.astype(jnp.bfloat16)
        return (half @ half.T).astype(jnp.float32).sum()

    jaxpr = jax.make_jaxpr(program)(X)
    with jax.enable_x64(True):
        (out,) = evaluated(jaxpr, [jnp.asarray(X, jnp.float64)])
    wide = X.astype(np.float64)
    np.testing.assert_allclose(out, (wide @ wide.T).sum(), rtol=1e-12)


@pytest.mark.exhaustive
def test_bitwise_operations_and_callbacks_keep_their_dtype():
    """So random numbers are the same, and a callback gets its declared dtype."""

    def program(x: jax.Array) -> Any:
        bits = lax.bitcast_convert_type(x, jnp.int32)
        drawn = jax.random.uniform(jax.random.key(0), (3,))
        called = jax.pure_callback(lambda x: x + 1, jax.ShapeDtypeStruct((6, 4), jnp.float32), x)
        return bits, drawn, called

    jaxpr = jax.make_jaxpr(program)(X)
    with jax.enable_x64(True):
        outs = evaluated(jaxpr, [jnp.asarray(X, jnp.float64)])
    for out, narrow in zip(outs, program(jnp.asarray(X)), strict=True):
        np.testing.assert_array_equal(out, narrow)
