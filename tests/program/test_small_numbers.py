"""Dtypes of a byte and less, as batches, arguments, results and state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import distribute_jax as dj

SMALL = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SMALL)
def test_a_batch_of_a_small_dtype_runs_and_its_result_is_an_argument_again(
    strategy: dj.Strategy, name: str
):
    host = np.arange(8).astype(np.float32).astype(getattr(ml_dtypes, name))
    (batch,) = strategy.distribute_dataset([host])

    def double(x: jax.Array) -> jax.Array:
        return x + x

    doubled = strategy.run(double, args=(batch,))
    again = strategy.run(double, args=(doubled,))
    for result, expected in ((doubled, host + host), (again, host + host + host + host)):
        parts = strategy.experimental_local_results(result)
        np.testing.assert_array_equal(np.concatenate(list(map(np.asarray, parts))), expected)


def test_a_variable_of_four_bits_is_updated_in_place(strategy: dj.Strategy):
    with strategy.scope():
        weights = nnx.Variable(jnp.arange(4).astype(jnp.int4))

    def step() -> None:
        weights[...] = weights[...] + 1

    for _ in range(3):
        strategy.run(step)
    np.testing.assert_array_equal(weights[...], np.arange(4) + 3)
    assert weights[...].dtype == jnp.int4


def test_float6_is_refused(s2: dj.Strategy):
    with pytest.raises(dj.ArgumentError, match=r"float6_e2m3fn\[8\]"):
        s2.run(lambda x: x, args=(np.ones(8, ml_dtypes.float6_e2m3fn),))
