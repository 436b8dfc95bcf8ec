"""A traced step is one equation for what compiles it, unless it does more than compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribute_jax as dj
from distribute_jax.program._lowerings import in_one_equation


def equations(step, *inputs, consts=None):
    jaxpr = jax.make_jaxpr(step)(*inputs)
    if consts is not None:
        jaxpr = type(jaxpr)(jaxpr.jaxpr, consts)
    return [eqn.primitive.name for eqn in jax.make_jaxpr(in_one_equation(jaxpr))(*inputs).eqns]


def test_a_step_that_computes_is_one_equation_whatever_it_is_made_of():
    table = np.arange(3.0, dtype=np.float32)
    assert equations(lambda x: jnp.sin(x) * jnp.asarray(table) + 1, jnp.ones(3)) == ["replica_step"]


def _prints(x):
    jax.debug.print("{}", x)
    return x + 1


def _writes(x):
    ref = jax.new_ref(x)
    ref[...] += 1
    return ref[...]


@pytest.mark.parametrize("step", [_prints, _writes])
def test_a_step_with_an_effect_is_traced_equation_by_equation(step):
    names = equations(step, jnp.ones(3))
    assert "replica_step" not in names
    assert len(names) > 1


@pytest.mark.parametrize("replicas", [1, 4])
def test_one_equation_gives_the_numbers_and_the_prints_of_several(replicas, capsys):
    strategy = dj.MirroredStrategy(list(range(replicas)))

    def step(x):
        return dj.get_replica_context().all_reduce("sum", jnp.cos(x).sum())

    def loud(x):
        jax.debug.print("replica {}", dj.get_replica_context().replica_id_in_sync_group)
        return step(x)

    x = jnp.arange(3.0)
    got, got_loud = strategy.run(step, args=(x,)), strategy.run(loud, args=(x,))
    jax.effects_barrier()
    np.testing.assert_array_equal(got, got_loud)
    np.testing.assert_allclose(got, replicas * np.cos(np.arange(3.0)).sum(), rtol=1e-6)
    assert sorted(capsys.readouterr().out.split("\n")[:-1]) == [
        f"replica {i}" for i in range(replicas)
    ]
