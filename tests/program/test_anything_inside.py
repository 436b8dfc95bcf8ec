"""Every construct of JAX and Flax inside a step trains as undistributed code does, or is refused by name.

Each way to compute a layer is part of a training step: a loss over the batch, gradients, an ``all_reduce``,
an optimizer with momentum and a counter. The reference is the step itself under ``nnx.jit``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.experimental import checkify, pallas as pl

import distribute_jax as dj

WIDTH = 4
DEPTH = 3
context = dj.get_replica_context
Forward = Callable[["Net", jax.Array], jax.Array]


class Net(nnx.Module):
    """Weights of a few equal layers, stacked and as layers, and the number of steps so far."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.stack = nnx.Param(rngs.params.normal((DEPTH, WIDTH, WIDTH)) / 4)
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.step = nnx.Variable(jnp.zeros((), jnp.int32))


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w) + x


def plain(net: Net, x: jax.Array) -> jax.Array:
    for i in range(DEPTH):
        x = layer(x, net.stack[i])
    return x


# Ways to compute it, or something like it


def by_scan(net: Net, x: jax.Array) -> jax.Array:
    return lax.scan(lambda x, w: (layer(x, w), None), x, net.stack[...])[0]


def by_nested_scan(net: Net, x: jax.Array) -> jax.Array:
    def twice(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.scan(lambda x, _: (layer(x, w), x.sum()), x, None, length=2)

    x, sums = lax.scan(jax.checkpoint(twice), x, net.stack[...])
    return x + jnp.tanh(sums.sum()) * 0 + sums.shape[0]


def by_fori(net: Net, x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, DEPTH, lambda i, x: layer(x, net.stack[i]), x)


def by_while_of_each_replica(net: Net, x: jax.Array) -> jax.Array:
    """Each row is halved until it is short: replicas run different numbers of iterations."""
    shrink = lambda x: jnp.where(jnp.abs(x) > 0.1, x / 2, x)  # noqa: E731
    shrunk = lax.while_loop(lambda x: jnp.any(jnp.abs(x) > 0.1), shrink, lax.stop_gradient(x))
    return layer(x + shrunk, net.stack[0])


def by_cond_of_state(net: Net, x: jax.Array) -> jax.Array:
    return lax.cond(net.step[...] % 2 == 0, layer, lambda x, w: x @ w, x, net.stack[0])


def by_cond_of_each_row(net: Net, x: jax.Array) -> jax.Array:
    row = lambda r: lax.cond(r[0] > 0, jnp.sin, lambda r: layer(r, net.stack[1]), r)  # noqa: E731
    return lax.map(row, x)


def by_switch(net: Net, x: jax.Array) -> jax.Array:
    branches = [lambda x: x, lambda x: layer(x, net.stack[0]), jnp.sin]
    return lax.switch(net.step[...] % 3, branches, x)


def by_remat(net: Net, x: jax.Array) -> jax.Array:
    for i in range(DEPTH):
        x = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)(x, net.stack[i])
    return x


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    """The identity with a clipped gradient."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


def by_custom_vjp(net: Net, x: jax.Array) -> jax.Array:
    return clipped(layer(x, net.stack[0]))


@jax.custom_jvp
def softsign(x: jax.Array) -> jax.Array:
    return x / (1 + jnp.abs(x))


softsign.defjvp(lambda xs, ts: (softsign(xs[0]), ts[0] / (1 + jnp.abs(xs[0])) ** 2))


def by_jit(net: Net, x: jax.Array) -> jax.Array:
    inner = jax.jit(layer)
    return jax.jit(lambda x, w: inner(inner(x, w[0]), w[1]))(x, net.stack[...])


def by_vmap_of_a_scan(net: Net, x: jax.Array) -> jax.Array:
    def one(row: jax.Array) -> jax.Array:
        return lax.scan(lambda r, w: (layer(r, w), None), row, net.stack[...])[0]

    return jax.vmap(one)(x)


def by_jacobian(net: Net, x: jax.Array) -> jax.Array:
    """Uses second derivatives, as a gradient penalty does."""
    energy = lambda r: jnp.sum(layer(r, net.stack[0]) ** 2)  # noqa: E731
    return x - jax.vmap(jax.grad(energy))(x) + jax.vmap(jax.hessian(energy))(x).sum(-1)


def by_custom_root(net: Net, x: jax.Array) -> jax.Array:
    """A fixed point with implicit derivatives, through a linear solve."""
    w = net.stack[0] / 4

    def solve(f: Any, start: Any) -> Any:
        return lax.fori_loop(0, 30, lambda _, z: z - f(z), start)

    def tangent(f: Any, y: Any) -> Any:
        return lax.custom_linear_solve(f, y, solve=solve, transpose_solve=solve)

    return lax.custom_root(lambda z: z - jnp.tanh(z @ w) - x, x, solve, tangent)


def by_associative_scan(net: Net, x: jax.Array) -> jax.Array:
    total = lax.associative_scan(lambda a, b: a * b, jax.nn.sigmoid(x @ net.stack[0]), axis=1)
    return layer(total, net.stack[1])


def by_ref(net: Net, x: jax.Array) -> jax.Array:
    ref = jax.new_ref(x)
    for i in range(DEPTH):
        ref[...] = layer(ref[...], net.stack[i])
    return ref[...]


def printing(net: Net, x: jax.Array) -> jax.Array:
    jax.debug.print("first {}", x[0, 0])
    jax.debug.callback(lambda value: None, x)

    def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        lax.cond(x[0, 0] > 9.0, lambda: jax.debug.print("large {}", x), lambda: None)
        return layer(x, w), None

    return lax.scan(body, x, net.stack[...])[0]


def by_callback(net: Net, x: jax.Array) -> jax.Array:
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    rounded = jax.pure_callback(lambda a: np.round(a, 1), like, lax.stop_gradient(x))
    return layer(rounded, net.stack[0])


def kernel(x_ref: Any, w_ref: Any, out_ref: Any) -> None:
    out_ref[...] = jnp.tanh(jnp.dot(x_ref[...], w_ref[...])) + x_ref[...]


@jax.custom_vjp
def pallas_layer(x: jax.Array, w: jax.Array) -> jax.Array:
    """A layer computed by a kernel, with the gradient of the plain one."""
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=like, interpret=True)(x, w)


pallas_layer.defvjp(
    lambda x, w: (pallas_layer(x, w), (x, w)), lambda xw, g: jax.vjp(layer, *xw)[1](g)
)


def by_pallas(net: Net, x: jax.Array) -> jax.Array:
    return pallas_layer(pallas_layer(x, net.stack[0]), net.stack[1])


@jax.custom_vjp
def ffi_softmax(x: jax.Array) -> jax.Array:
    """A foreign function that every CPU build of JAX registers: LAPACK's Cholesky factorisation."""
    gram = x.T @ x + jnp.eye(WIDTH)
    outs = (jax.ShapeDtypeStruct(gram.shape, gram.dtype), jax.ShapeDtypeStruct((), jnp.int32))
    factor, _ = jax.ffi.ffi_call("lapack_spotrf_ffi", outs)(gram, uplo=np.uint8(ord("U")))
    return jnp.tanh(x) + factor.sum() * 0


ffi_softmax.defvjp(lambda x: (ffi_softmax(x), x), lambda x, g: (g / jnp.cosh(x) ** 2,))


def by_ffi(net: Net, x: jax.Array) -> jax.Array:
    jax.jit(jnp.linalg.cholesky).lower(jnp.eye(2))  # JAX loads LAPACK when it lowers the first use
    return ffi_softmax(x @ net.stack[0])


def checked(net: Net, x: jax.Array) -> jax.Array:
    def checked_layer(x: jax.Array, w: jax.Array) -> jax.Array:
        checkify.check(jnp.all(jnp.isfinite(x)), "not finite")
        return layer(x, w)

    error, out = checkify.checkify(checked_layer)(x, net.stack[0])
    # A user would return the error; here it is only passed on.
    return out + jnp.zeros_like(out) * len(jax.tree.leaves(error))


def by_nnx_jit_and_remat(net: Net, x: jax.Array) -> jax.Array:
    return nnx.jit(nnx.remat(lambda head, x: head(x)))(net.head, plain(net, x))


def by_nnx_scan(net: Net, x: jax.Array) -> jax.Array:
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def through(w: nnx.Param[jax.Array], x: jax.Array) -> jax.Array:
        return layer(x, w[...])

    return through(net.stack, x)


def by_nnx_vmap(net: Net, x: jax.Array) -> jax.Array:
    every = nnx.vmap(lambda w, x: layer(x, w[...]), in_axes=(0, None), out_axes=0)
    return every(net.stack, x).mean(0)


def by_nnx_cond(net: Net, x: jax.Array) -> jax.Array:
    return nnx.cond(net.step[...] > 0, lambda n, x: n.head(x), lambda n, x: x, net, x)


def by_nnx_fori(net: Net, x: jax.Array) -> jax.Array:
    body = lambda i, carry: (carry[0], carry[0].head(carry[1]))  # noqa: E731
    return nnx.fori_loop(0, 2, body, (net, x))[1]


def by_merge(net: Net, x: jax.Array) -> jax.Array:
    graph, state = nnx.split(net.head)
    return jax.checkpoint(lambda s, x: nnx.merge(graph, s, copy=True)(x))(state, plain(net, x))


WAYS: list[Forward] = [
    plain, by_scan, by_nested_scan, by_fori, by_while_of_each_replica, by_cond_of_state,
    by_cond_of_each_row, by_switch, by_remat, by_custom_vjp, by_jit, by_vmap_of_a_scan, by_jacobian,
    by_custom_root, by_associative_scan, by_ref, printing, by_callback, by_pallas, by_ffi, checked,
    by_nnx_jit_and_remat, by_nnx_scan, by_nnx_vmap, by_nnx_cond, by_nnx_fori, by_merge,
    lambda net, x: softsign(layer(x, net.stack[0])),
]  # fmt: skip


def grads_of(net: Net, forward: Forward, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
    return nnx.value_and_grad(
        lambda net: dj.compute_average_loss(jnp.mean((net.head(forward(net, x)) - y) ** 2, axis=-1))
    )(net)


def usual_step(forward: Forward, net: Net, optimizer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """A training step around a way to compute the layers."""
    loss, grads = grads_of(net, forward, x, y)
    loss, grads = context().all_reduce("sum", (loss, grads))
    optimizer.update(net, grads)
    net.step[...] += 1
    return loss


Step = Callable[[Net, Any, jax.Array, jax.Array], jax.Array]
ROWS = np.random.default_rng(0).normal(size=(3, 2, 8, WIDTH)).astype(np.float32)


def trained(step: Step, strategy: dj.Strategy | None) -> dict[str, Any]:
    """Trains three steps; returns the losses and all state."""
    with (strategy or dj.get_strategy()).scope():
        net = Net()
        optimizer = nnx.Optimizer(net, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    if strategy is None:
        plain = nnx.jit(step)
        losses = [plain(net, optimizer, *map(jnp.asarray, rows)) for rows in ROWS]
    else:
        batches = strategy.distribute_dataset([tuple(rows) for rows in ROWS])
        losses = [strategy.run(step, args=(net, optimizer, *batch)) for batch in batches]
        dj.check_in_sync((net, optimizer))
    state = {"net": nnx.state(net), "optimizer": nnx.state(optimizer)}
    return {"losses": [float(loss) for loss in losses], **nnx.to_pure_dict(nnx.State(state))}


def assert_equal_state(many: dict[str, Any], one: dict[str, Any]) -> None:
    """Compares the losses and all state."""
    assert many["losses"][0] != many["losses"][-1]
    for (path, a), (_, b) in zip(
        jax.tree_util.tree_leaves_with_path(many),
        jax.tree_util.tree_leaves_with_path(one),
        strict=True,
    ):
        a, b = np.asarray(a), np.asarray(b)
        scale = max(1e-3, np.abs(b).max(initial=0.0))
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * scale, err_msg=str(path))


GROUPS = [WAYS[i::7] for i in range(7)]


def chained(forwards: list[Forward], net: Net, x: jax.Array) -> jax.Array:
    """Several ways in one forward pass, and so in one program."""
    for forward in forwards:
        x = jnp.tanh(forward(net, x))
    return x


@pytest.mark.exhaustive
@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_a_training_step_with_several_of_them_trains_as_plain_code(
    strategy: dj.Strategy, group: int
):
    """Losses, weights, momentum and the counter after three steps; four ways in one program."""
    step = functools.partial(usual_step, functools.partial(chained, GROUPS[group]))
    assert_equal_state(trained(step, strategy), trained_plainly(group))


@functools.cache
def trained_plainly(group: int) -> dict[str, Any]:
    """The same in plain Flax."""
    return trained(functools.partial(usual_step, functools.partial(chained, GROUPS[group])), None)


def test_the_error_of_checkify_comes_out_for_each_replica(s4: dj.MirroredStrategy):
    """Only the replica with the large row has one; to throw all of them at once is refused with advice."""

    def step(x: jax.Array) -> tuple[checkify.Error, jax.Array]:
        def total(x: jax.Array) -> jax.Array:
            checkify.check(jnp.all(x < 7), "too large: {m}", m=x.max())
            return x.sum()

        return checkify.checkify(total)(x)

    (batch,) = s4.distribute_dataset([np.arange(8.0)])
    error, _ = s4.run(step, args=(batch,))
    errors = s4.experimental_local_results(error)
    assert [e.get() is None for e in errors] == [True, True, True, False]
    with pytest.raises(checkify.JaxRuntimeError, match=r"too large: 7\.0"):
        errors[3].throw()
    with pytest.raises(dj.PerReplicaError, match="experimental_local_results"):
        error.throw()


# Collectives at any depth: each forward pass mixes the rows of the global batch.


Mean = Callable[[jax.Array], jax.Array]
"""The mean over the replicas, in one of its spellings."""


def in_scan(net: Net, x: jax.Array, mean: Mean) -> jax.Array:
    def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        center = mean(x.mean(0))
        return layer(x - center, w), center.sum()

    x, centers = lax.scan(body, x, net.stack[...])
    return x + centers.sum()


def in_both_branches(net: Net, x: jax.Array, mean: Mean) -> jax.Array:
    """A mirrored predicate, so that all replicas take the same branch."""
    add = lambda x: x + mean(jnp.sin(x).mean(0))  # noqa: E731
    scale = lambda x: x * mean((x**2).mean())  # noqa: E731
    return lax.cond(net.step[...] % 2 == 0, add, scale, x @ net.stack[0])


def in_one_branch(net: Net, x: jax.Array, mean: Mean) -> jax.Array:
    """The predicate is itself a mean over the replicas."""
    high = mean(x.mean()) > 0
    return lax.cond(high, lambda x: x - mean(x.mean(0)), jnp.sin, layer(x, net.stack[1]))


def in_a_while(net: Net, x: jax.Array, mean: Mean) -> jax.Array:
    """In condition and body; all replicas run the same number of iterations."""
    halved = lax.while_loop(
        lambda v: mean((v**2).mean()) > 0.01,
        lambda v: v / 2 + mean(v.mean(0)) / 8,
        lax.stop_gradient(x),
    )
    return layer(x + halved, net.stack[0])


def in_remat(net: Net, x: jax.Array, mean: Mean) -> jax.Array:
    return jax.checkpoint(lambda x, w: layer(x, w) * mean((x @ w).mean()))(x, net.stack[0])


def in_a_backward_pass(net: Net, x: jax.Array, mean: Mean) -> jax.Array:
    """The gradient of each row becomes the mean over the rows of the global batch."""

    @jax.custom_vjp
    def same_gradient(x: jax.Array) -> jax.Array:
        return x

    same_gradient.defvjp(
        lambda x: (x, None), lambda _, g: (jnp.broadcast_to(mean(g.mean(0)), g.shape),)
    )
    return same_gradient(layer(x, net.stack[0]))


def in_jit(net: Net, x: jax.Array, mean: Mean) -> jax.Array:
    centered = jax.jit(lambda x: x - mean(x.mean(0)))
    return jax.jit(lambda x, w: centered(layer(centered(x), w)))(x, net.stack[0])


def under_vmap(net: Net, x: jax.Array, mean: Mean) -> jax.Array:
    column = lambda column: column - mean(column.mean())  # noqa: E731
    return layer(jax.vmap(column, in_axes=1, out_axes=1)(x), net.stack[0])


def in_nnx_scan_of_remat(net: Net, x: jax.Array, mean: Mean) -> jax.Array:
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    @nnx.remat
    def through(w: nnx.Param[jax.Array], x: jax.Array) -> jax.Array:
        return layer(x - mean(x.mean(0)), w[...])

    return through(net.stack, x)


DEEP = [
    in_scan, in_both_branches, in_one_branch, in_a_while, in_remat, in_a_backward_pass, in_jit,
    under_vmap, in_nnx_scan_of_remat,
]  # fmt: skip

SPELLINGS: dict[str, Mean] = {
    "all_reduce": lambda v: context().all_reduce("mean", v),
    "psum": lambda v: lax.psum(v, "data") / lax.axis_size("data"),
    "merge_call": lambda v: context().merge_call(lambda s, v: s.reduce("mean", v), args=(v,)),
}


def one_after_the_other(mean: Mean, net: Net, x: jax.Array) -> jax.Array:
    """All the places in one forward pass, and so in one program."""
    for place in DEEP:
        x = jnp.tanh(place(net, x, mean))
    return x


@pytest.mark.exhaustive
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_collectives_in_every_place_train_as_plain_code(strategy: dj.Strategy, spelling: str):
    """Scan, branches, loops, remat, a backward pass, jit, vmap and those of NNX, in one forward pass."""
    deep = functools.partial(one_after_the_other, SPELLINGS[spelling])
    many = trained(functools.partial(usual_step, deep), strategy)
    assert_equal_state(many, mixed_plainly())


@functools.cache
def mixed_plainly() -> dict[str, Any]:
    """The same in plain Flax, where the mean over the replicas is the value."""
    deep = functools.partial(one_after_the_other, lambda v: v)
    return trained(functools.partial(usual_step, deep), None)


def looping(mean: Mean, x: jax.Array) -> jax.Array:
    """The rows of this replica decide on the number of iterations."""
    return lax.while_loop(lambda v: v.sum() > 1, lambda v: v / 2 + mean(v) / 9, x)


def branching(mean: Mean, x: jax.Array) -> jax.Array:
    """The rows of this replica decide on a rematerialised branch in a scan."""
    branch = lambda v: lax.cond(v.sum() > 0, mean, jnp.sin, v)  # noqa: E731
    return lax.scan(lambda v, _: (jax.checkpoint(branch)(v), None), x, None, length=2)[0]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(
    ("hangs", "decided_by"), [(looping, "trip count of while"), (branching, "predicate of cond")]
)
def test_where_replicas_decide_for_themselves_every_spelling_is_refused_at_the_users_line(
    s4: dj.MirroredStrategy, hangs: Any, decided_by: str, spelling: str
):
    """The error comes before anything runs, and both lines are in this file, not in the library."""
    (batch,) = s4.distribute_dataset([ROWS[0, 0]])
    with pytest.raises(dj.DeadlockError) as caught:
        s4.run(functools.partial(hangs, SPELLINGS[spelling]), args=(batch,))
    message = str(caught.value)
    lines, first = SPELLINGS[spelling].__code__.co_firstlineno, hangs.__code__.co_firstlineno
    assert f"test_anything_inside.py:{lines}" in message.split("decided by")[0]
    decided = re.search(rf"{decided_by} at test_anything_inside.py:(\d+)", message)
    assert decided is not None
    assert first < int(decided[1]) <= first + 3
    assert "args[0]" in message
