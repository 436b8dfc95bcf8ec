"""Code inside merge_call may do all of cross-replica context except to start other programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import distribute_jax as dj
from distribute_jax import _frames

SUM = dj.VariableAggregation.SUM
ON_READ = dj.VariableSynchronization.ON_READ


def merge(strategy: dj.Strategy, merge_fn: Callable[..., Any], *args: Any) -> Any:
    return strategy.run(lambda: dj.get_replica_context().merge_call(merge_fn, args=args))


@pytest.fixture
def mirrored(strategy: dj.Strategy) -> dj.Variable:
    with strategy.scope():
        return dj.Variable(jnp.array([1.0, 2.0]), name="m")


@pytest.fixture
def on_read(strategy: dj.Strategy) -> dj.Variable:
    """A variable with the value [r, r] on replica r."""
    with strategy.scope():
        v = dj.Variable(jnp.zeros(2), synchronization=ON_READ, aggregation=SUM, name="o")
    ids = strategy.experimental_distribute_values_from_function(
        lambda context: np.full(2, context.replica_id_in_sync_group, np.float32)
    )
    strategy.run(v.assign, args=(ids,))
    return v


def test_variables_show_all_their_components(
    strategy: dj.Strategy, mirrored: dj.Variable, on_read: dj.Variable
):
    """values, names, local results, reduce and gather return the same in merge_call as outside."""
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        weight = nnx.Param(jnp.array([3.0, 4.0]))

    def facts(current: dj.Strategy) -> list[Any]:
        assert mirrored.component_names == ("m", *(f"m/replica_{i}" for i in range(1, n)))
        assert len(on_read.component_names) == n
        values: list[Any] = [mirrored.values, on_read.values]
        for v in (mirrored, on_read, weight):
            values.append(current.experimental_local_results(v))
            values += [current.reduce(op, v, axis=None) for op in ("sum", "mean")]
            values.append(current.gather(v, axis=0))
        return values

    inside, outside = merge(strategy, facts), facts(strategy)
    for got, expected in zip(jax.tree.leaves(inside), jax.tree.leaves(outside), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert [len(part) for part in inside[:3]] == [n, n, n]
    assert float(inside[3][0]) == n * 1.0


def test_a_batch_statistic_that_differs_shows_that_of_each_replica(s4: dj.MirroredStrategy):
    """A plain variable may differ within a step; the values of all replicas are gathered."""
    with s4.scope():
        stat = nnx.BatchStat(jnp.zeros(()))

    def step() -> Any:
        stat[...] = dj.get_replica_context().replica_id_in_sync_group * 1.0
        return dj.get_replica_context().merge_call(
            lambda current: (current.experimental_local_results(stat), current.reduce("sum", stat))
        )

    locals_, total = s4.run(step)
    assert [float(x) for x in locals_] == [0.0, 1.0, 2.0, 3.0]
    assert float(total) == 6.0


def test_the_scope_of_the_same_strategy_may_be_entered_and_the_mesh_is_as_before(
    strategy: dj.Strategy, mirrored: dj.Variable, on_read: dj.Variable
):
    """scope() and colocate_vars_with have no effect in merge_call."""

    def scoped(current: dj.Strategy) -> Any:
        with current.scope() as again:
            assert again is current
            assert dj.in_cross_replica_context()
            first = current.reduce("sum", on_read)
        with current.extended.colocate_vars_with(mirrored):
            second = mirrored[...] + 1
        assert current.extended.variable_created_in_scope(mirrored)
        assert dj.in_cross_replica_context()
        return first, second

    n = strategy.num_replicas_in_sync
    first, second = merge(strategy, scoped)
    assert first.tolist() == [n * (n - 1) / 2] * 2
    assert second.tolist() == [2.0, 3.0]


def test_a_scope_left_open_inside_ends_with_the_call(s2: dj.MirroredStrategy):
    """The mistake is named, and the code after the step is outside of the scope."""
    with pytest.raises(RuntimeError, match="left in the wrong order"):
        merge(s2, lambda current: current.scope().__enter__() and None)
    assert _frames.entered() is None


def test_random_keys_are_regrouped(s4: dj.MirroredStrategy):
    """Keys can be arguments of merge_call, and keys of a stream have local results."""
    with s4.scope():
        rngs = nnx.Rngs(dropout=1)

    def keys(current: dj.Strategy, key: Any) -> Any:
        assert len(current.experimental_local_results(rngs.dropout.key)) == 4
        return jax.random.uniform(key.values[0])

    assert merge(s4, keys, jax.random.key(7)) == jax.random.uniform(jax.random.key(7))


REFUSED: dict[str, Callable[[dj.Strategy], Any]] = {
    "strategy.run": lambda s: s.run(lambda: 1.0),
    "strategy.run_steps": lambda s: s.run_steps(lambda x: x, iter([]), steps=1),
    "strategy.distribute_dataset": lambda s: s.distribute_dataset([np.ones(4)]),
    "strategy.distribute_datasets_from_function": lambda s: s.distribute_datasets_from_function(
        lambda context: [np.ones(4)]
    ),
    "strategy.experimental_distribute_values_from_function": lambda s: (
        s.experimental_distribute_values_from_function(lambda context: 1.0)
    ),
    "check_in_sync": lambda s: dj.check_in_sync(jnp.ones(2)),
    "dj.same_on_all_replicas": lambda s: dj.same_on_all_replicas(nnx.Rngs(0)),
}


@pytest.mark.parametrize("method", REFUSED)
def test_what_would_start_a_program_is_refused(s2: dj.MirroredStrategy, method: str):
    """The error names the method and the alternative, and no context stays open."""
    with pytest.raises(
        RuntimeError, match=rf"^{method} was called inside merge_call.*extended\.update"
    ):
        merge(s2, REFUSED[method])
    assert _frames.entered() is None


def test_on_one_replica_components_of_all_are_refused(s2: dj.MirroredStrategy):
    """Inside run but outside of merge_call a replica sees only its component."""
    with s2.scope():
        v = dj.Variable(1.0, name="v")
    for read in (lambda: v.values, lambda: v.component_names):
        with pytest.raises(RuntimeError, match=r"of variable 'v' was read inside run.*v\[\.\.\.\]"):
            s2.run(read)


def test_a_scope_under_the_users_jit_is_refused(s2: dj.MirroredStrategy):
    """JAX cannot change the mesh there; the error says so in our words."""

    @jax.jit
    def scoped() -> Any:
        with s2.scope():
            return jnp.ones(2)

    with pytest.raises(
        RuntimeError, match=r"strategy\.scope\(\) was called inside a function that JAX"
    ):
        scoped()
    assert _frames.entered() is None
