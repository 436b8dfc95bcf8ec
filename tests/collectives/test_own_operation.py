"""A CrossDeviceOps of the user: it is used in the step, proved like any code, and differentiated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithms import context, locals_of, on_replicas, strategy_with
from flax import nnx

import distribute_jax as dj
from tests.testing.broken import UnprovedRing


class GatherAndAdd(dj.CrossDeviceOps):
    """Proved mirrored, since all_gather gives every replica the same."""

    def all_reduce_sum(self, value: jax.Array, axis_name: str) -> jax.Array:
        return jax.lax.all_gather(value, axis_name).sum(0)


class Declared(UnprovedRing):
    """The same, declared as mirrored."""

    def all_reduce_sum(self, value: jax.Array, axis_name: str) -> jax.Array:
        return dj.assume_mirrored(super().all_reduce_sum(value, axis_name))


@dataclass
class Recorder(dj.CrossDeviceOps):
    """Records its arguments; a dataclass, which has no hash."""

    num_packs: int = 0
    seen: list[Any] = field(default_factory=list)

    def all_reduce_sum(self, value: jax.Array, axis_name: str) -> jax.Array:
        self.seen.append((value.shape, str(value.dtype), axis_name))
        return jax.lax.psum(value, axis_name)


def train(strategy: dj.Strategy) -> Any:
    """Updates state from what the replicas' numbers 0 to N-1 add up to."""
    with strategy.scope():
        weight = nnx.Param(jnp.zeros(2))

    def step():
        weight[...] += context().all_reduce(
            "mean", context().replica_id_in_sync_group * jnp.ones(2)
        )

    strategy.run(step)
    return weight[...].tolist()


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("make", [GatherAndAdd, Declared])
def test_it_updates_state_in_the_step(make: Any, replicas: int):
    assert train(strategy_with(make(), replicas)) == [(replicas - 1) / 2] * 2


def test_a_result_that_is_not_provably_mirrored_may_not_become_state():
    with pytest.raises(dj.OutOfSyncError, match="ppermute"):
        train(strategy_with(UnprovedRing(), 4))


def test_such_a_result_is_returned_per_replica():
    strategy = strategy_with(UnprovedRing(), 4)
    result = strategy.run(lambda: context().all_reduce("sum", 2.0))
    assert isinstance(result, dj.PerReplica)
    assert locals_of(strategy, result) == [8.0] * 4


def test_its_gradient_is_the_same_operation_on_the_upstream_gradients():
    """Upstream gradients 1 and 2: their sum on both replicas, not JAX's transpose."""
    calls = []

    class Counting(GatherAndAdd):
        def all_reduce_sum(self, value: jax.Array, axis_name: str) -> jax.Array:
            calls.append(value.shape)
            return jax.lax.stop_gradient(super().all_reduce_sum(value, axis_name))

    strategy = strategy_with(Counting(), 2)

    def step(x: jax.Array):
        scale = context().replica_id_in_sync_group + 1.0
        return jax.grad(lambda v: scale * context().all_reduce("sum", v).sum())(x)

    result = strategy.run(step, args=(on_replicas(strategy, [np.ones(3, np.float32)] * 2),))
    assert np.asarray(result).tolist() == [3.0] * 3
    assert calls


@pytest.mark.parametrize(
    ("packs", "expected"),
    [
        (0, [((2, 3), "float32"), ((2,), "float32"), ((), "int32")]),
        (1, [((8,), "float32"), ((1,), "int32")]),
        (3, [((2,), "float32"), ((2,), "float32"), ((4,), "float32"), ((1,), "int32")]),
    ],
)
def test_it_gets_packs_of_one_dtype(packs: int, expected: list[Any]):
    """Eight floats in three packs are 2, 2 and the remainder 4."""
    seen: list[Any] = []
    strategy = strategy_with(Recorder(packs, seen), 2)
    nest = [jnp.ones((2, 3)), jnp.int32(7), jnp.full(2, 5.0), jnp.zeros((0, 4))]
    total = strategy.run(lambda: context().all_reduce("sum", nest))
    assert [(shape, dtype) for shape, dtype, _ in seen] == expected
    assert {axis for *_, axis in seen} == {"data"}
    assert [np.asarray(x).tolist() for x in total] == [[[2.0] * 3] * 2, 14, [10.0] * 2, []]


@pytest.mark.parametrize(
    "wrong", [lambda v: v[0], lambda v: (v, v), lambda v: v.astype(jnp.float16), lambda v: None]
)
def test_a_result_of_another_shape_or_dtype_is_refused(wrong: Any):
    class Wrong(dj.CrossDeviceOps):
        def all_reduce_sum(self, value: jax.Array, axis_name: str) -> jax.Array:
            return wrong(value)

    strategy = strategy_with(Wrong(), 2)
    with pytest.raises(ValueError, match=r"Wrong\.all_reduce_sum returned .* for float32\[2\]"):
        strategy.run(lambda: context().all_reduce("sum", jnp.ones(2)))


def test_a_traced_value_from_outside_is_refused():
    class Outside(dj.CrossDeviceOps):
        scale: Any = None

        def all_reduce_sum(self, value: jax.Array, axis_name: str) -> jax.Array:
            return jax.lax.psum(value, axis_name) * self.scale

    ops = Outside()

    def step(x: jax.Array):
        ops.scale = x
        return context().all_reduce("sum", x)

    with pytest.raises(ValueError, match="uses a traced value from outside"):
        strategy_with(ops, 2).run(step, args=(2.0,))
