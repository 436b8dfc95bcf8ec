"""assume_mirrored affects only the proof, under every transformation of JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec as P

from distribute_jax.collectives._markers import assume_mirrored, mirrored_p

X = jnp.array([1.0, -2.0, 3.0, 4.0])


def shard_mapped(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",), axis_types=(AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: f,
        jax.jit,
        jax.vmap,
        jax.checkpoint,
        shard_mapped,
        lambda f: jax.jit(shard_mapped(f)),
        lambda f: jax.pmap(f, devices=jax.devices()[:4]),
        lambda f: lambda x: jax.lax.scan(lambda c, v: (c, f(v)), 0, x)[1],
        lambda f: lambda x: jax.linearize(f, x)[0],
        lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
        lambda f: lambda x: jax.jvp(jax.vmap(f), (x,), (x,))[1],
        lambda f: lambda x: jax.vjp(f, x)[1](x)[0],
        lambda f: lambda x: jax.linear_transpose(f, x)(x)[0],
        lambda f: lambda x: jax.grad(lambda v: (f(v) * x).sum())(x),
        lambda f: lambda x: jax.jit(jax.grad(lambda v: (jax.vmap(f)(v) * x).sum()))(x),
    ],
)
def test_it_is_the_identity_under_every_transformation(
    transform: Callable[[Any], Callable[[Any], Any]],
) -> None:
    np.testing.assert_array_equal(transform(assume_mirrored)(X), X)


def test_it_keeps_trees_and_python_numbers() -> None:
    tree = {"a": [X, 2.0], "b": None, "c": (3,)}
    same = assume_mirrored(tree)
    assert jax.tree.structure(same) == jax.tree.structure(tree)
    assert same["c"] == (3,)
    assert same["a"][1] == 2.0


def test_it_is_one_equation_in_the_jaxpr_and_nothing_in_the_compiled_program() -> None:
    jaxpr = jax.make_jaxpr(assume_mirrored)(X)
    assert [eqn.primitive for eqn in jaxpr.eqns] == [mirrored_p]
    assert "mirrored" not in jax.jit(assume_mirrored).lower(X).compile().as_text().split("main")[1]
