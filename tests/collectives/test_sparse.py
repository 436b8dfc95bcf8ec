"""Sparse values: the entries of all replicas are concatenated, so that equal indices add up."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithms import ALGORITHMS, context, on_replicas, strategy_with
from jax.experimental.sparse import BCOO

import distribute_jax as dj

# Two rows on each replica; the first replica has one, and an index beyond the last row for padding.
ROWS = [np.array([[1], [4]], np.int32), np.array([[1], [3]], np.int32)]
VALUES = [np.array([[1, 2], [0, 0]], np.float32), np.array([[3, 4], [5, 6]], np.float32)]


def reduced(name: str, op: str, dtype: Any = np.float32) -> Any:
    strategy = strategy_with(ALGORITHMS[name](), 2)

    def step(data: jax.Array, rows: jax.Array):
        nest = {"sparse": BCOO((data, rows), shape=(4, 2)), "dense": jnp.ones(3)}
        total = context().all_reduce(op, nest)
        assert isinstance(total["sparse"], BCOO)
        return total["sparse"].todense(), total["dense"]

    args = (on_replicas(strategy, [v.astype(dtype) for v in VALUES]), on_replicas(strategy, ROWS))
    return strategy.run(step, args=args)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("op", "expected"),
    [("sum", [[0, 0], [4, 6], [0, 0], [5, 6]]), ("mean", [[0, 0], [2, 3], [0, 0], [2.5, 3]])],
)
@pytest.mark.parametrize("name", ["default", "hierarchical, 1 packs", "ring, 1 packs", "to one"])
def test_rows_with_equal_indices_add_up(name: str, op: str, expected: list[Any]):
    """Row 1 of both replicas and row 3 of one, together with a dense leaf in the same call."""
    sparse, dense = reduced(name, op)
    assert isinstance(sparse, jax.Array)
    assert sparse.tolist() == expected
    assert dense.tolist() == [2.0 if op == "sum" else 1.0] * 3


def test_integers_keep_the_rules_of_dense_values():
    dtypes = [str(reduced("default", op, np.int8)[0].dtype) for op in ("sum", "mean")]
    assert dtypes == ["int32", "float32"]


def test_the_gradient_of_an_entry_is_the_sum_of_the_upstream_gradients():
    """Upstream gradients 1 and 2 on two replicas: 3 for entries in bounds, 0 for padding."""
    strategy = strategy_with(None, 2)

    def step(data: jax.Array, rows: jax.Array):
        scale = context().replica_id_in_sync_group + 1.0

        def loss(data: jax.Array):
            total = context().all_reduce("sum", BCOO((data, rows), shape=(4, 2)))
            return scale * total.todense().sum()

        return jax.grad(loss)(data)

    args = (on_replicas(strategy, VALUES), on_replicas(strategy, ROWS))
    grads = strategy.experimental_local_results(strategy.run(step, args=args))
    assert [np.asarray(g).tolist() for g in grads] == [[[3, 3], [0, 0]], [[3, 3], [3, 3]]]


def test_other_sparse_arrays_and_gathering_are_refused(s2: dj.MirroredStrategy):
    """Concatenating their indices would give wrong numbers."""
    batched = BCOO((jnp.ones((2, 1)), jnp.zeros((2, 1, 1), int)), shape=(2, 3))
    with pytest.raises(ValueError, match=r"\['a'\] is a sparse BCOO.*n_batch=0.*todense"):
        s2.run(lambda: context().all_reduce("sum", {"a": batched}))
    plain = BCOO((jnp.ones(1), jnp.zeros((1, 1), int)), shape=(3,))
    with pytest.raises(ValueError, match=r"cannot be concatenated.*\n(.*\n)*.*todense"):
        s2.run(lambda: context().all_gather(plain, 0))


@pytest.mark.exhaustive
def test_importing_the_library_does_not_import_sparse_arrays():
    """Importing it takes a third of a second."""
    program = (
        "import sys, distribute_jax as dj; dj.simulate(2); s = dj.MirroredStrategy();"
        "s.run(lambda: dj.get_replica_context().all_reduce('sum', 1.0));"
        "assert 'jax.experimental.sparse' not in sys.modules"
    )
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
