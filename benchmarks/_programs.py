"""Random programs for the proof of sync: small trees of statements over one replica's view.

Arithmetic, collectives with and without groups, refs, callbacks, random bits, linear solves and custom
derivatives with sources inside, branches, loops, jit, recomputation, vmap and gradients, with predicates
and trip counts of any kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

N = 4
"""Replicas."""

SIZE = 4
"""The size of every vector."""

Values = list[Any]
Statement = Callable[[Values, Any], Any]
"""Computes a vector from the values so far and from a ref, which it may also write to."""

HALVES = [[0, 1], [2, 3]]
RING = [(i, (i + 1) % N) for i in range(N)]


def replica() -> Any:
    """The number of this replica."""
    return lax.axis_index("data").astype(jnp.float32)


FLOATS = jax.ShapeDtypeStruct((SIZE,), jnp.float32)
noise = np.random.default_rng(0)


def called_back(v: Any) -> Any:
    """Calls Python for numbers that are others at each call, so on each replica."""
    fresh = lambda a: a + noise.normal(size=a.shape).astype(np.float32)  # noqa: E731
    # What goes in has no tangent, since JAX cannot differentiate a callback.
    return jax.pure_callback(fresh, FLOATS, lax.stop_gradient(v), vmap_method="expand_dims")


def solved(solve: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Solves 2 x = v with a solver that may hold anything."""
    return lambda v: lax.custom_linear_solve(
        lambda x: x * 2, v, lambda _, b: solve(b), lambda _, b: b / 2
    )


def bits(v: Any) -> Any:
    """Bits from a key that v decides."""
    key = jnp.zeros(4, jnp.uint32) + v[0].astype(jnp.int32).astype(jnp.uint32)
    return (lax.rng_bit_generator(key, (SIZE,))[1] >> 20).astype(jnp.float32)


@jax.custom_jvp
def odd_tangent(v: Any) -> Any:
    """Has a custom tangent that holds a source."""
    return v * 3


odd_tangent.defjvp(lambda vs, ts: (vs[0] * 3, ts[0] * (1 + replica())))


@jax.custom_vjp
def odd_gradient(v: Any) -> Any:
    """Has a custom gradient that holds a source."""
    return v * 3


odd_gradient.defvjp(lambda v: (v * 3, v), lambda v, g: (g * v + replica(),))


@jax.custom_vjp
def summed_gradient(v: Any) -> Any:
    """Has a custom gradient that is summed over the replicas."""
    return v


summed_gradient.defvjp(lambda v: (v, None), lambda _, g: (lax.psum(g, "data"),))


UNARY: dict[str, Callable[[Any], Any]] = {
    "sin": jnp.sin,
    "reverse": lambda v: v[::-1],
    "sort": jnp.sort,
    "constant": lambda v: jnp.arange(4.0),
    "psum": lambda v: lax.psum(v, "data") / N,
    "pmax": lambda v: lax.pmax(v, "data"),
    "pmin": lambda v: lax.pmin(v, "data"),
    "all_gather": lambda v: lax.all_gather(v, "data").sum(0),
    "all_gather tiled": lambda v: lax.all_gather(v, "data", tiled=True)[2:6],
    "psum in groups": lambda v: lax.psum(v, "data", axis_index_groups=HALVES),
    "psum in one group": lambda v: lax.psum(v, "data", axis_index_groups=[[3, 1, 0, 2]]),
    "all_gather in groups": lambda v: lax.all_gather(v, "data", axis_index_groups=HALVES)[0],
    "psum_scatter": lambda v: lax.psum_scatter(v, "data") + jnp.zeros(SIZE),
    "all_to_all": lambda v: lax.all_to_all(v, "data", 0, 0),
    "ring": lambda v: lax.ppermute(v, "data", RING),
    "one way": lambda v: lax.ppermute(v, "data", [(0, 1)]),
    "replica": lambda v: v + replica(),
    "vmap same name": lambda v: jax.vmap(lambda e: lax.psum(e, "data"), axis_name="data")(v),
    "vmap": jax.vmap(lambda e: lax.psum(e, "data") * e),
    "gradient": jax.grad(lambda v: (lax.psum(v, "data") * v).sum()),
    "random": lambda v: jax.random.normal(jax.random.key(v[0].astype(jnp.int32)), (SIZE,)),
    "random bits": bits,
    "cumsum": jnp.cumsum,
    "callback": called_back,
    "pmax in groups": lambda v: lax.pmax(v, "data", axis_index_groups=HALVES),
    "linear solve": solved(lambda b: b / 2),
    "linear solve with a source": solved(lambda b: b / 2 + replica()),
    "linear solve with a sum": solved(lambda b: lax.psum(b, "data") / (2 * N)),
    "custom tangent": odd_tangent,
    "custom gradient with a source": jax.grad(lambda v: odd_gradient(v).sum()),
    "custom gradient with a sum": jax.grad(lambda v: (summed_gradient(v) * v).sum()),
    "dot": lambda v: jnp.outer(v, v) @ v / 8,
}


@st.composite
def unary(draw: st.DrawFn) -> Statement:
    """Draws a function of one value."""
    name, i = draw(st.sampled_from(sorted(UNARY))), draw(st.integers(0, 9))
    return lambda values, ref: UNARY[name](values[i % len(values)])


@st.composite
def binary(draw: st.DrawFn) -> Statement:
    """Draws arithmetic on two values."""
    op = draw(st.sampled_from([jnp.add, jnp.multiply, jnp.maximum]))
    i, j = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    return lambda values, ref: op(values[i % len(values)], values[j % len(values)]) / 2


@st.composite
def select(draw: st.DrawFn) -> Statement:
    """Draws a choice, element by element, between two values."""
    i, j, k = (draw(st.integers(0, 9)) for _ in range(3))
    return lambda v, ref: jnp.where(v[i % len(v)] > 0, v[j % len(v)], v[k % len(v)])


@st.composite
def ref_use(draw: st.DrawFn) -> Statement:
    """Draws a write to the ref and a read, or a read."""
    i, place = draw(st.integers(0, 9)), draw(st.sampled_from([0, 3, ..., "argmax"]))

    def write_and_read(values: Values, ref: Any) -> Any:
        value = values[i % len(values)]
        if place is ...:
            ref[...] = value
        else:
            ref[jnp.argmax(value) if place == "argmax" else place] = value[1]
        return ref[...]

    return draw(st.sampled_from([write_and_read, lambda values, ref: ref[...]]))


def block(draw: st.DrawFn, inner: st.SearchStrategy[Statement]) -> Statement:
    """Draws up to three statements that see each other."""
    statements = draw(st.lists(inner, min_size=1, max_size=3))

    def run(values: Values, ref: Any) -> Any:
        values = list(values)
        for statement in statements:
            values.append(statement(values, ref))
        return values[-1]

    return run


@st.composite
def branch(draw: st.DrawFn, inner: st.SearchStrategy[Statement]) -> Statement:
    """Draws a cond whose predicate is a value."""
    yes, no, i = block(draw, inner), block(draw, inner), draw(st.integers(0, 9))

    def run(values: Values, ref: Any) -> Any:
        pred = values[i % len(values)][0] > 0
        return lax.cond(pred, lambda: yes(values, ref), lambda: no(values, ref))

    return run


@st.composite
def scan(draw: st.DrawFn, inner: st.SearchStrategy[Statement]) -> Statement:
    """Draws a scan of up to three turns, and which of its results is used."""
    body, i, j = block(draw, inner), draw(st.integers(0, 9)), draw(st.integers(0, 9))
    length, result = draw(st.integers(0, 3)), draw(st.sampled_from([0, 1, 2]))

    def run(values: Values, ref: Any) -> Any:
        def step(carry: Any, item: Any) -> Any:
            older, newer = carry
            return (newer, body([*values, older, newer + item], ref)), older

        init = values[i % len(values)], jnp.ones(SIZE)
        carry, seen = lax.scan(step, init, values[j % len(values)][:length])
        return [*carry, seen.sum(0)][result]

    return run


@st.composite
def loop(draw: st.DrawFn, inner: st.SearchStrategy[Statement]) -> Statement:
    """Draws a while loop, whose test may hold a collective."""
    body, i = block(draw, inner), draw(st.integers(0, 9))
    result = draw(st.sampled_from([0, 1, 2]))
    test = draw(st.sampled_from([lambda v: v, lambda v: lax.pmax(v, "data")]))

    def run(values: Values, ref: Any) -> Any:
        def step(state: Any) -> Any:
            count, limit, value, kept = state
            return count + 1, limit + value[0], body([*values, value], ref), kept

        # At most three turns, whatever the limit becomes.
        init = 0.0, values[i % len(values)][0], jnp.ones(SIZE), values[0]
        more = lambda s: (s[0] < 3) & (s[0] < test(s[1]))  # noqa: E731
        state = lax.while_loop(more, step, init)
        return [state[2], state[3], state[0] + jnp.zeros(SIZE)][result]

    return run


@st.composite
def wrapped(draw: st.DrawFn, inner: st.SearchStrategy[Statement]) -> Statement:
    """Draws statements inside jit, recomputation, vmap or a derivative."""
    body = block(draw, inner)
    kind = draw(st.sampled_from(["jit", "checkpoint", "grad", "vmap"]))

    def pure(*values: Any) -> Any:
        return body(list(values), jax.new_ref(jnp.ones(SIZE)))

    def run(values: Values, ref: Any) -> Any:
        if kind == "jit":
            return jax.jit(lambda values, ref: body(values, ref))(values, ref)
        if kind == "checkpoint":
            return jax.checkpoint(pure)(*values)
        if kind == "vmap":
            return jax.vmap(lambda v: pure(*values, v))(jnp.stack([values[0], values[-1]])).sum(0)
        return jax.jvp(pure, tuple(values), tuple(values))[1]

    return run


simple = st.one_of(unary(), unary(), binary(), select(), ref_use())
nested = st.recursive(
    simple,
    lambda inner: st.one_of(branch(inner), scan(inner), loop(inner), wrapped(inner)),
    max_leaves=6,
)
programs = st.lists(nested, min_size=2, max_size=5)


def outputs_of(statements: list[Statement]) -> Callable[[Any, Any], Values]:
    """Makes a function of a mirrored and a per-replica vector: what each statement and the ref hold."""

    def program(w: Any, x: Any) -> Values:
        values, ref = [w, x], jax.new_ref(w)
        for statement in statements:
            values.append(statement(values, ref))
        return [*values[2:], ref[...]]

    return program
