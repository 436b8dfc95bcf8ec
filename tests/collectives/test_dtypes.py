"""all_reduce in a step and strategy.reduce outside of it follow the same rule for dtypes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithms import context, locals_of, on_replicas, strategy_with
from cases import long

import distribute_jax as dj


def both(strategy: dj.Strategy, op: str, values: list[Any]) -> list[Any]:
    """Reduces in a step, and outside a value of the host and a result of a step, and in merge_call."""
    value = on_replicas(strategy, values)
    inside = strategy.run(lambda x: context().all_reduce(op, x), args=(value,))
    outside = strategy.reduce(op, value)
    returned = strategy.reduce(op, strategy.run(lambda x: x, args=(value,)))
    merged = strategy.run(
        lambda x: context().merge_call(lambda s, v: s.reduce(op, v), args=(x,)), args=(value,)
    )
    return [inside, outside, returned, merged]


# Each replica holds the value; dtype of the sum, dtype of the mean.
CASES: dict[str, tuple[Any, str, str]] = {
    "int4": (7, "int32", "float32"),
    "uint4": (15, "uint32", "float32"),
    "int8": (100, "int32", "float32"),
    "uint8": (200, "uint32", "float32"),
    "int16": (30000, "int32", "float32"),
    "uint16": (60000, "uint32", "float32"),
    "int32": (2**24 + 1, "int32", "float32"),
    "uint32": (3, "uint32", "float32"),
    "float32": (0.1, "float32", "float32"),
    "bfloat16": (0.1, "bfloat16", "bfloat16"),
    "float16": (0.1, "float16", "float16"),
    "complex64": (1 + 2j, "complex64", "complex64"),
}


@pytest.mark.parametrize("replicas", [4, *(long(n) for n in (1, 2))])
def test_sums_and_means_agree_in_value_and_dtype(replicas: int):
    """Narrow integers do not wrap: they are summed as by jnp.sum; a mean of integers is floating."""
    strategy = strategy_with(None, replicas)
    nest = {dtype: np.asarray(case[0], jnp.dtype(dtype)) for dtype, case in CASES.items()}
    totals, means = (both(strategy, op, [nest] * replicas) for op in ("sum", "mean"))
    for dtype, (_, sum_dtype, mean_dtype) in CASES.items():
        held = nest[dtype]
        for total in (nest[dtype] for nest in totals):
            assert str(total.dtype) == sum_dtype
            expected = held.astype(np.complex128) * replicas
            np.testing.assert_allclose(np.complex128(total), expected, rtol=2**-8)
            if np.issubdtype(held.dtype, np.integer):
                assert int(total) == int(held) * replicas
        for mean in (nest[dtype] for nest in means):
            assert str(mean.dtype) == mean_dtype
            np.testing.assert_allclose(np.complex128(mean), np.complex128(held), rtol=1e-7)


def test_a_mean_of_float16_does_not_overflow_before_it_is_divided(s4: dj.MirroredStrategy):
    """Four times 60000 exceeds float16, but their mean does not; the smallest numbers stay exact."""
    held = np.array([60000, 2.0**-24, -65504, 0.1], np.float16)
    for mean in both(s4, "mean", [held] * 4):
        assert mean.dtype == jnp.float16
        np.testing.assert_array_equal(mean, held)


def test_a_mean_of_float16_over_a_dim_does_not_overflow(s2: dj.MirroredStrategy):
    """The same if a dim is reduced too, for parts of different lengths and a mirrored value."""
    (batch,) = s2.distribute_dataset([np.full((6, 2), 60000, np.float16)])
    uneven = on_replicas(s2, [np.full(n, 60000, np.float16) for n in (3, 1)])
    mirrored = s2.run(lambda: jnp.full(4, 60000, jnp.float16))
    for value, axis in ((batch, (0, 1)), (uneven, 0), (mirrored, 0)):
        mean = s2.reduce("mean", value, axis=axis)
        assert (str(mean.dtype), float(mean)) == ("float16", 60000.0)


def test_parts_of_different_lengths_and_mirrored_values_do_not_wrap(s2: dj.MirroredStrategy):
    uneven = on_replicas(s2, [np.full((n, 1), 100, np.int8) for n in (3, 1)])
    assert s2.reduce("sum", uneven, axis=0).tolist() == [400]
    uneven = on_replicas(s2, [jnp.full(n, 7, jnp.int4) for n in (3, 1)])
    assert int(s2.reduce("sum", uneven, axis=0)) == 28
    assert int(s2.reduce("sum", s2.run(lambda: jnp.int8(100)))) == 200
    other = dj.OneDeviceStrategy("cpu:0")
    assert str(other.reduce("sum", other.run(lambda: jnp.int8(100))).dtype) == "int32"
    assert str(other.reduce("mean", other.run(lambda: jnp.int8(100))).dtype) == "float32"


def test_the_gradient_of_a_float16_mean_is_the_mean_of_the_upstream_gradients():
    strategy = strategy_with(None, 4)

    def step(x: jax.Array):
        scale = (context().replica_id_in_sync_group + 1).astype(jnp.float16)
        return jax.grad(lambda v: (scale * context().all_reduce("mean", v)).sum())(x)

    grad = strategy.run(step, args=(on_replicas(strategy, [np.ones(2, np.float16)] * 4),))
    assert (str(grad.dtype), np.asarray(grad).tolist()) == ("float16", [2.5] * 2)


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("replicas", [1, 4])
def test_bools_are_refused_everywhere_with_one_message(replicas: int, op: str):
    """As in TensorFlow: the user decides how to count bools."""
    strategy = strategy_with(None, replicas)
    value = on_replicas(strategy, [np.array([True, False])] * replicas)
    message = r"\n  the value: bool\[2\]\nIt takes floating.*value\.astype\(jnp\.int32\)"
    calls = (
        lambda: strategy.run(lambda x: context().all_reduce(op, x), args=(value,)),
        lambda: strategy.reduce(op, value),
        lambda: strategy.reduce(op, strategy.run(lambda: jnp.array([True, False]))),
        lambda: strategy.run(
            lambda x: context().merge_call(lambda s, v: s.reduce(op, v), args=(x,)), args=(value,)
        ),
    )
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()
    for host in (True, np.bool_(False), "text"):
        with pytest.raises(ValueError, match="cannot be combined over the replicas"):
            strategy.reduce(op, host)


@pytest.mark.parametrize("replicas", [1, 4])
def test_bools_are_gathered_everywhere(replicas: int):
    strategy = strategy_with(None, replicas)
    value = on_replicas(strategy, [np.array([r == 0, True]) for r in range(replicas)])
    expected = [x for r in range(replicas) for x in (r == 0, True)]
    inside = strategy.run(lambda x: context().all_gather({"m": x}, 0)["m"], args=(value,))
    for joined in (inside, strategy.gather(value, axis=0)):
        assert joined.dtype == bool
        assert joined.tolist() == expected
    assert all(part.tolist() == expected for part in locals_of(strategy, inside))


@pytest.mark.parametrize("dtype", ["int2", "uint2"])
def test_two_bit_integers_are_gathered_everywhere(dtype: str):
    """On CPU XLA's own collectives give other values."""
    strategy = strategy_with(None, 4)
    values = [np.array([r, 1]).astype(jnp.dtype(dtype)) for r in range(4)]
    value = on_replicas(strategy, values)
    inside = strategy.run(lambda x: context().all_gather(x, 0), args=(value,))
    for joined in (inside, strategy.gather(value, axis=0)):
        assert joined.dtype == dtype
        assert joined.tolist() == np.concatenate(values).tolist()


def test_collectives_of_jax_on_two_bit_integers_are_refused(s2: dj.MirroredStrategy):
    """They would return other values on CPU, and write beyond their memory."""
    value = on_replicas(s2, [np.array([r, 1]).astype(jnp.int2) for r in range(2)])
    with pytest.raises(dj.LoweringError, match=r"test_dtypes.py:\d+ combines int2 values"):
        s2.run(lambda x: jax.lax.all_gather(x, "data"), args=(value,))


def test_random_keys_are_gathered_in_a_step(s2: dj.MirroredStrategy):
    """Their bits are gathered; the result is mirrored."""
    keys = [jax.random.split(jax.random.key(r), 2) for r in range(2)]
    value = on_replicas(s2, keys)
    joined = s2.run(lambda x: context().all_gather(x, -1), args=(value,))
    assert isinstance(joined, dj.Mirrored)
    assert (joined == jnp.concatenate(keys)).all()


def test_leaves_that_cannot_be_concatenated_are_named(s2: dj.MirroredStrategy):
    with pytest.raises(ValueError, match=r"cannot be concatenated.*\n  \['t'\]: str 'text'"):
        s2.run(lambda: context().all_gather({"ok": jnp.ones(1), "t": "text"}, 0))
