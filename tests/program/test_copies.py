"""``verify`` compares the replicas' copies of values that are assumed to be mirrored."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import distribute_jax as dj


def of_replica(wrong: jax.Array) -> Any:
    """Assumes that 1 is mirrored, while the last replica adds a little if ``wrong`` is 1."""
    replica = dj.get_replica_context()
    last = replica.replica_id_in_sync_group == replica.num_replicas_in_sync - 1
    return dj.assume_mirrored(1.0 + 1e-6 * wrong * last)


@pytest.mark.parametrize("lowering", ["shard_map", "pmap"])
def test_a_value_that_is_wrongly_assumed_mirrored_is_found(s4: dj.MirroredStrategy, lowering: Any):
    """One bit on one of four replicas: state, result, device and line are named; state is unchanged."""
    with s4.scope():
        state, untouched = nnx.Param(jnp.float32(2.0)), nnx.Param(jnp.float32(2.0))

    def step(wrong: jax.Array) -> Any:
        value = of_replica(wrong)
        state[...] = state[...] * value
        untouched[...] = untouched[...] + 1.0
        return value, wrong

    options = dj.RunOptions(verify="always", lowering=lowering)
    s4.run(step, args=(0.0,), options=options)  # the replicas agree
    with pytest.raises(
        dj.OutOfSyncError, match=r"dj.assume_mirrored at test_copies.py:\d+"
    ) as found:
        s4.run(step, args=(1.0,), options=options)
    named = [line.strip() for line in str(found.value).splitlines() if "unequal to" in line]
    assert [line.split(",")[0] for line in named] == ["state", "result[0]"]
    assert all("cpu:3 unequal to cpu:0, cpu:1, cpu:2" in line for line in named)
    assert (float(state[...]), float(untouched[...])) == (2.0, 3.0)
    dj.check_in_sync((state, untouched))
    s4.run(step, args=(1.0,), options=dj.RunOptions(lowering=lowering, verify="off"))  # it drifts
    with pytest.raises(dj.OutOfSyncError, match=r"\[0\], float32"):
        dj.check_in_sync((state, untouched))


def test_without_the_proof_the_copies_are_compared_as_well(s2: dj.MirroredStrategy):
    """Nothing was assumed, so the error is about check_sync=False."""
    with s2.scope():
        state = nnx.Param(jnp.float32(2.0))

    def step() -> None:
        state[...] += dj.get_replica_context().replica_id_in_sync_group

    options = dj.RunOptions(verify="first", check_sync=False)
    with pytest.raises(dj.OutOfSyncError, match=r"(?s)state, float32.*check_sync=False.*as before"):
        s2.run(step, options=options)
    assert float(state[...]) == 2.0
