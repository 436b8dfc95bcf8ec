"""Increments of a metric are summed over the replicas; other updates are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import distribute_jax as dj

Change = Callable[[Any, Any], Any]

pytestmark = pytest.mark.filterwarnings("ignore:.*outside of strategy")
REFUSED = r"state \(MetricState\).*not its old value plus"


def numbered(strategy: dj.Strategy) -> dj.PerReplica:
    """The number r + 1 on replica r."""
    return strategy.experimental_distribute_values_from_function(
        lambda c: jnp.float32(c.replica_id_in_sync_group + 1)
    )


ADDS: dict[str, Change] = {
    "adds": lambda old, x: old + x,
    "adds from the left": lambda old, x: x + old,
    "takes away a negative": lambda old, x: old - (-x),
    "adds twice": lambda old, x: old + x / 4 + 3 * x / 4,
    "adds under a condition": lambda old, x: jnp.where(x > 0, old + x, old),
    "adds in a branch": lambda old, x: jax.lax.cond(x > 0, lambda o: o + x, lambda o: o, old),
    "adds under jit": lambda old, x: jax.jit(lambda o: o + x)(old),
    "adds in a loop": lambda old, x: jax.lax.fori_loop(0, 4, lambda _, o: o + x / 4, old),
    "adds to an item": lambda old, x: old.at[...].add(x),
    "adds under remat": lambda old, x: jax.checkpoint(lambda o: o + x)(old),
}
OTHERS: dict[str, Change] = {
    "halves": lambda old, x: 0.5 * old + 0 * x,
    "takes the larger": jnp.maximum,
    "multiplies": lambda old, x: old * (1 + x),
    "doubles and adds": lambda old, x: old + old + x,
    "may reset": lambda old, x: jnp.where(x > 2, 0.0, old + x),
    "resets in a branch": lambda old, x: jax.lax.cond(
        x > 2, lambda o: 0.0 * x, lambda o: o + x, old
    ),
    "decays in a loop": lambda old, x: jax.lax.fori_loop(0, 2, lambda _, o: 0.9 * o + x, old),
    "decides by the old value": lambda old, x: jnp.where(old > 3, old + x, old),
}


def _step(change: Change) -> tuple[nnx.metrics.MetricState, Callable[[Any], None]]:
    state = nnx.metrics.MetricState(jnp.float32(8.0))

    def step(x: Any) -> None:
        state[...] = change(state[...], x)

    return state, step


def test_additions_are_summed_over_the_replicas(strategy: dj.Strategy):
    """From 8, replica r adds r + 1: 8 plus the sum, however the addition is written."""
    n = strategy.num_replicas_in_sync
    made = {name: _step(change) for name, change in ADDS.items()}

    def step(x: Any) -> None:
        for _, add in made.values():
            add(x)

    strategy.run(step, args=(numbered(strategy),))
    sums = {name: float(state[...]) for name, (state, _) in made.items()}
    assert sums == dict.fromkeys(ADDS, 8 + n * (n + 1) / 2)


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_is_refused_unless_it_is_mirrored(s4: dj.MirroredStrategy, name: str):
    """The sum over the replicas would be wrong; for equal values it is clear what is meant."""
    state, step = _step(OTHERS[name])
    with pytest.raises(dj.OutOfSyncError, match=REFUSED):
        s4.run(step, args=(numbered(s4),))
    assert float(state[...]) == 8.0
    wanted = float(OTHERS[name](jnp.float32(8.0), jnp.float32(3.0)))
    s4.run(step, args=(jnp.float32(3.0),))
    assert float(state[...]) == pytest.approx(wanted, rel=1e-6)


CASTS: dict[str, tuple[Any, Change, float | None]] = {
    "bfloat16 kept in bfloat16 and added in float32": (
        jnp.bfloat16(8), lambda old, x: (old.astype(jnp.float32) + x).astype(old.dtype), 18.0),
    "int16 added in float32 that is kept": (
        jnp.int16(8), lambda old, x: old.astype(jnp.float32) + x / 2, 13.0),
    "int32 that becomes the float32 it is added in": (
        jnp.int32(8), lambda old, x: old.astype(jnp.float32) + x, 18.0),
    "float32 that becomes the bfloat16 it is added in": (
        jnp.float32(1 / 3), lambda old, x: old.astype(jnp.bfloat16) + x.astype(jnp.bfloat16),
        float(jnp.bfloat16(1 / 3) + jnp.bfloat16(10))),
    "uint8 added in int32, modulo 256": (
        jnp.uint8(250), lambda old, x: (old.astype(jnp.int32) + x.astype(jnp.int32)).astype(
            jnp.uint8), 4.0),
    "float32 through bool": (
        jnp.float32(5), lambda old, x: old.astype(bool).astype(jnp.float32) + x, None),
    "float32 through uint8": (
        jnp.float32(300),
        lambda old, x: old.astype(jnp.int32).astype(jnp.uint8).astype(jnp.float32) + x, None),
    "float32 through bfloat16": (
        jnp.float32(1 / 3), lambda old, x: (old.astype(jnp.bfloat16) + x).astype(old.dtype), None),
    "int32 as the integer part of a float32": (
        jnp.int32(0), lambda old, x: (old.astype(jnp.float32) + 0.4 * x).astype(jnp.int32), None),
    "int8 as the integer part of a float32": (
        jnp.int8(0), lambda old, x: (old.astype(jnp.float32) + 0.4 * x).astype(jnp.int8), None),
}  # fmt: skip
"""The old value, what one replica does, and the sum of 1 to 4 added to it; None: refused."""


@pytest.mark.parametrize("name", CASTS)
def test_only_casts_that_keep_the_old_value_are_part_of_an_addition(
    s4: dj.MirroredStrategy, name: str
):
    """A cast that rounds the old value would do so once for each replica."""
    old, change, wanted = CASTS[name]
    state = nnx.metrics.MetricState(old)

    def step(x: Any) -> None:
        state.set_value(change(state.get_value(), x))

    if wanted is None:
        with pytest.raises(dj.OutOfSyncError, match=REFUSED):
            s4.run(step, args=(numbered(s4),))
        assert float(state[...]) == float(old)
    else:
        s4.run(step, args=(numbered(s4),))
        assert float(state[...]) == wanted


MOVES: dict[str, Change] = {
    "transposes": lambda old, x: old.T + x,
    "reshapes": lambda old, x: old.reshape(4).reshape(2, 2) + x,
    "reshapes from columns": lambda old, x: jax.lax.reshape(old, (2, 2), (1, 0)) + x,
    "turns around": lambda old, x: old[::-1] + x,
    "sorts": lambda old, x: jnp.sort(old) + x,
    "takes items": lambda old, x: old[jnp.array([1, 0])] + x,
    "rolls": lambda old, x: jnp.roll(old, 1) + x,
    "moves in a branch": lambda old, x: jax.lax.cond(x > 0, lambda o: o.T + x, lambda o: o, old),
}


@pytest.mark.parametrize("name", MOVES)
def test_an_old_value_that_moves_is_refused(s4: dj.MirroredStrategy, name: str):
    """The increment cannot be found by subtracting the old value."""
    state = nnx.metrics.MetricState(jnp.arange(4.0).reshape(2, 2))

    def step(x: Any) -> None:
        state[...] = MOVES[name](state[...], x)

    with pytest.raises(dj.OutOfSyncError, match=REFUSED):
        s4.run(step, args=(numbered(s4),))
    assert state[...].tolist() == [[0.0, 1.0], [2.0, 3.0]]


def test_swapped_parts_of_a_variable_are_refused(s4: dj.MirroredStrategy):
    """The old value of one part plus something is not an addition to another part."""
    with s4.scope():
        state = nnx.metrics.MetricState({"a": jnp.float32(1), "b": jnp.float32(2)})

    def step() -> None:
        r = dj.get_replica_context().replica_id_in_sync_group
        old = state.get_value()
        state.set_value({"a": old["b"] + r, "b": old["a"] + r})

    with pytest.raises(dj.OutOfSyncError, match="not its old value plus"):
        s4.run(step)


def test_a_metric_is_updated_in_a_scan_with_dims_of_size_one(s4: dj.MirroredStrategy):
    """They are still additions."""
    with s4.scope():
        average = dj.metrics.Average("v")
        kept = nnx.metrics.MetricState(jnp.zeros(2))

    def step(x: Any) -> None:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def chunk(metric: Any, v: Any) -> Any:
            metric.update(v=v)
            return metric

        chunk(average, x.reshape(2, 1))
        kept[...] = (kept[...][None] + x[None])[0]

    (batch,) = s4.distribute_dataset([jnp.arange(8.0)])
    s4.run(step, args=(batch,))
    assert float(average.compute()) == 3.5
    assert kept[...].tolist() == [0 + 2 + 4 + 6, 1 + 3 + 5 + 7]


def test_equal_increments_are_summed_without_a_collective(strategy: dj.Strategy):
    """A count of 3 on each of N replicas is 3 N, as on a whole batch, and costs no all-reduce."""
    state, step = _step(lambda old, x: old + 3 + 0 * x)
    count = nnx.metrics.MetricState(jnp.int32(2))

    def counts(x: Any) -> None:
        step(x)
        count[...] += 5

    n = strategy.num_replicas_in_sync
    for _ in range(2):
        strategy.run(counts, args=(jnp.float32(1.0),))
    assert float(state[...]) == 8 + 2 * 3 * n
    assert int(count[...]) == 2 + 2 * 5 * n
    (program,) = strategy._runner.cache.programs.values()
    assert "all-reduce" not in program.compiled.as_text()


def test_a_bool_that_every_replica_sets_stays_a_bool(s2: dj.MirroredStrategy):
    """A bool cannot be summed, and need not be where all replicas have the same."""
    seen = nnx.metrics.MetricState(jnp.asarray(False))

    def step() -> None:
        seen[...] = seen[...] | True

    s2.run(step)
    assert seen[...].dtype == bool
    assert bool(seen[...])


def test_without_the_proof_increments_are_summed_as_they_are(s4: dj.MirroredStrategy):
    """check_sync=False lets replicas drift apart; 0 + 1 + 2 + 3 is then still 6 on each of them."""
    drifted = nnx.Variable(jnp.float32(0.0))
    total = nnx.metrics.MetricState(jnp.float32(0.0))
    unchecked = dj.RunOptions(check_sync=False)

    def drift() -> None:
        drifted[...] = dj.get_replica_context().replica_id_in_sync_group.astype(float)

    def adds() -> None:
        total[...] += drifted[...]

    s4.run(drift, options=unchecked)
    s4.run(adds, options=unchecked)
    assert [float(shard.data) for shard in total[...].addressable_shards] == [6.0] * 4


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.float16, jnp.bfloat16, jnp.complex64])
def test_equal_increments_keep_their_dtype(s4: dj.MirroredStrategy, dtype: Any):
    """From 3, every one of four replicas adds 5: 23 in each dtype."""
    count = nnx.metrics.MetricState(jnp.asarray(3, dtype))

    def step() -> None:
        count[...] += jnp.asarray(5, dtype)

    s4.run(step)
    assert count[...].dtype == dtype
    assert complex(count[...]) == 23
