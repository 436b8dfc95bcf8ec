"""The proof of sync, rule by rule: values that it marks differ between replicas, and the others are equal.

Every program of the table is proved and then run on four replicas: outputs that are proved mirrored must be
bitwise equal, and those that the table calls per-replica must differ.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.experimental import checkify, io_callback, pallas as pl
from jax.extend.core import ClosedJaxpr, Primitive, primitives
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh, PartitionSpec as P

import distribute_jax.program._replication as sync
from distribute_jax._errors import DeadlockError, OutOfSyncError
from distribute_jax.collectives._markers import assume_mirrored, unreduced
from distribute_jax.program._replication import prove

N = 4
Outputs = tuple[Any, ...]
Program = Callable[[Any, Any], Outputs]


def make_mesh(shape: Sequence[int] = (N,), names: Sequence[str] = ("data",)) -> Mesh:
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return Mesh(devices, tuple(names), axis_types=(AxisType.Auto,) * len(names))


def trace(program: Callable[..., Any], *args: Any, mesh: Mesh | None = None) -> ClosedJaxpr:
    """Traces as the library does: in the context that shard_map over "data" would give."""
    mesh = mesh or make_mesh()
    types = [AxisType.Manual if n == "data" else AxisType.Auto for n in mesh.axis_names]
    manual = mesh.abstract_mesh.update(axis_types=tuple(types))
    with jax.sharding.use_abstract_mesh(manual):
        return jax.make_jaxpr(program, axis_env=[("data", mesh.shape["data"])])(*args)


def alter(jaxpr: ClosedJaxpr, name: str, params: dict[str, Any]) -> None:
    """Changes parameters of a primitive's equations, in copies, since jaxprs may share equations."""
    jaxpr.eqns[:] = [
        eqn.replace(params={**eqn.params, **params}) if eqn.primitive.name == name else eqn
        for eqn in jaxpr.eqns
    ]


def w_value() -> jax.Array:
    return jnp.array([0.5, -1.25, 2.0, 3.5])


def x_values() -> jax.Array:
    """The values of x on the four replicas, all different and with both signs."""
    return jnp.array([[1.0, 2, 3, 4], [-2, 5, 1, 7], [3, -1, 2, 9], [-4, 2, 8, 1]]) / 3


def marks_of(program: Program, mesh: Mesh | None = None) -> list[frozenset[str]]:
    jaxpr = trace(program, w_value(), x_values()[0], mesh=mesh)
    return prove(jaxpr, [frozenset(), frozenset({"x"})], axis_size=N).marks


def run(program: Program) -> list[np.ndarray]:
    """Runs the program on the replicas; each result has them along its first dim."""

    def stacked(w: Any, x: Any) -> Any:
        return [jnp.asarray(out)[None] for out in program(w, x[0])]

    specs: Any = (P(), P("data"))
    mapped = jax.shard_map(
        stacked, mesh=make_mesh(), in_specs=specs, out_specs=P("data"), check_vma=False
    )
    return [np.asarray(out) for out in jax.jit(mapped)(w_value(), x_values())]


def is_equal(out: np.ndarray) -> bool:
    return len({replica.tobytes() for replica in out}) == 1


class Case(NamedTuple):
    """A program and what is expected of each of its outputs.

    M: proved mirrored, and equal. P: per-replica, and different. F: an accepted false alarm, equal but
    not proved. S: a source, whether or not a run differs. ``runs`` is False if CPU devices cannot run it.
    """

    shows: str
    program: Program
    expected: str
    runs: bool = True


def psum(x: Any) -> Any:
    return lax.psum(x, "data")


def replica() -> Any:
    return lax.axis_index("data").astype(jnp.float32)


SHIFT = [(i, (i + 1) % N) for i in range(N)]
HALVES = [[0, 1], [2, 3]]
WHOLE = [[2, 3, 0, 1]]

PLAIN = [
    Case("arithmetic of mirrored values is mirrored", lambda w, x: (w * 2 + jnp.sin(w),), "M"),
    Case("one per-replica operand is enough", lambda w, x: (w + x, w, x), "PMP"),
    Case("constants and literals are mirrored", lambda w, x: (jnp.arange(3.0), 3.0), "MM"),
    Case("zero times a per-replica value has its sign", lambda w, x: (x * 0,), "P"),
    Case("that equal things cancel is not seen", lambda w, x: (x - x,), "F"),
    Case(
        "random numbers are functions of their key",
        lambda w, x: (
            jax.random.normal(jax.random.key(0), (3,)),
            jax.random.bits(jax.random.fold_in(jax.random.key(0), lax.axis_index("data"))),
            lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (3,))[1],
        ),
        "MPM",
    ),
    Case("rng_uniform is a source", lambda w, x: (lax.rng_uniform(0.0, 1.0, (2,)),), "S", False),
    Case(
        "sorting, scattering and gathering pass marks on",
        lambda w, x: (jnp.sort(w), w.at[0].add(1.0), w.at[0].set(x[0]), w[jnp.argmax(x)]),
        "MMPP",
    ),
    Case(
        "reductions with a function of the user's pass marks on",
        lambda w, x: (
            lax.reduce(w, 0.0, lambda a, b: a + b * 2, (0,)),
            lax.reduce(x, 0.0, lambda a, b: a + b * 2, (0,)),
            lax.reduce_window(w, 0.0, lax.add, (2,), (1,), "SAME"),
        ),
        "MPM",
    ),
    Case(
        "a library function with loops and solves is looked through",
        lambda w, x: (
            jnp.linalg.solve(jnp.outer(w, w) + 9 * jnp.eye(4), w),
            jnp.linalg.solve(jnp.outer(x, x) + 9 * jnp.eye(4), w),
            jax.random.gamma(jax.random.key(0), jnp.abs(w)),
        ),
        "MPM",
    ),
    Case(
        "searchsorted and nonzero, which are higher-order primitives on JAX 0.12",
        lambda w, x: (
            jnp.searchsorted(jnp.sort(w), w),
            jnp.searchsorted(jnp.sort(x), w),
            jnp.nonzero(w, size=2)[0],
        ),
        "MPM",
    ),
    Case("a barrier does not mix its values", lambda w, x: lax.optimization_barrier((w, x)), "MP"),
    Case(
        "memory that nobody wrote is a source",
        lambda w, x: (
            lax.empty((2,), w.dtype),
            primitives.empty2_p.bind(dtype=w.dtype, memory_space=jax.memory.Space.Device),
        ),
        "SS",
    ),
]

COLLECTIVES = [
    Case(
        "psum, pmean, pmax, pmin and all_gather clear",
        lambda w, x: (
            psum(x),
            lax.pmean(x, "data"),
            lax.pmax(x, "data"),
            lax.pmin(x, "data"),
            lax.all_gather(x, "data"),
            lax.all_gather(x, "data", tiled=True),
        ),
        "MMMMMM",
    ),
    Case("what follows a reduction is mirrored", lambda w, x: (w - 0.1 * psum(x),), "M"),
    Case("what is added after a reduction counts", lambda w, x: (psum(x) + x,), "P"),
    Case("axis_index is a source", lambda w, x: (lax.axis_index("data"), w + replica()), "PP"),
    Case("the size of the axis is a constant", lambda w, x: (lax.psum(1, "data"),), "M"),
    Case(
        "a reduction in groups is a source",
        lambda w, x: (
            lax.psum(x, "data", axis_index_groups=HALVES),
            lax.pmax(x, "data", axis_index_groups=HALVES),
            lax.pmin(x, "data", axis_index_groups=HALVES),
            lax.all_gather(x, "data", axis_index_groups=HALVES),
        ),
        "PPPP",
    ),
    Case(
        "even of mirrored values: groups of other sizes would differ",
        lambda w, x: (lax.psum(w, "data", axis_index_groups=HALVES),),
        "F",
    ),
    Case(
        "one group of all replicas, in any order, is not a smaller group",
        lambda w, x: (
            lax.psum(x, "data", axis_index_groups=WHOLE),
            lax.all_gather(x, "data", axis_index_groups=WHOLE),
        ),
        "MM",
    ),
    Case(
        "ppermute of a mirrored value may leave zeros on some replicas",
        lambda w, x: (lax.ppermute(w, "data", [(0, 1)]), lax.ppermute(w, "data", SHIFT)),
        "PF",
    ),
    Case(
        "psum_scatter and all_to_all give each replica its part of a mirrored value",
        lambda w, x: (
            lax.psum_scatter(w, "data"),
            lax.psum_scatter(w, "data", tiled=True),
            lax.all_to_all(w, "data", 0, 0),
        ),
        "PPP",
    ),
    Case(
        "pbroadcast, which only GPUs have, copies one replica's value to all",
        lambda w, x: (lax.pbroadcast(x, ("data",), 0),),
        "M",
        False,
    ),
    Case(
        "inside vmap with the same axis name the reduction is over the vmapped dim",
        lambda w, x: (
            jax.vmap(psum, axis_name="data")(x),
            jax.vmap(lambda y: lax.pmax(y, "data") + y, axis_name="data")(x),
            jax.vmap(lambda y: lax.all_gather(y, "data"), axis_name="data")(x),
            jax.vmap(lambda y: y * lax.axis_index("data"), axis_name="data")(w),
        ),
        "PPPM",
    ),
    Case(
        "a reduction over the replicas and a vmapped dim clears",
        lambda w, x: (jax.vmap(lambda y: lax.psum(y, ("data", "v")), axis_name="v")(x),),
        "M",
    ),
    Case(
        "assume_mirrored is trusted, and only about its own operand",
        lambda w, x: (assume_mirrored(x - x), x - x + assume_mirrored(w)),
        "MF",
    ),
    Case(
        "assume_mirrored says nothing of tangents and cotangents",
        lambda w, x: (
            jax.jvp(assume_mirrored, (w,), (x,))[1],
            jax.grad(lambda v: (assume_mirrored(v) * x).sum())(w),
        ),
        "PP",
    ),
]


def checked_loop(w: Any, x: Any) -> Outputs:
    def positive(v: Any) -> Any:
        def body(carry: Any, item: Any) -> Any:
            checkify.check(item > -9.0, "too small")
            return carry + item, carry

        return lax.scan(body, 0.0, v)

    return checkify.checkify(positive)(w)[1][0], checkify.checkify(positive)(x)[1][0]


def printing(w: Any, x: Any) -> Outputs:
    lax.cond(x[0] > 99, lambda: jax.debug.print("big {}", x), lambda: None)
    return (w,)


def double_kernel(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] * 2


def pallas_double(w: Any, x: Any) -> Outputs:
    return (pl.pallas_call(double_kernel, out_shape=w, interpret=True)(w),)


unknown_p = Primitive("someone_elses")
unknown_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(unknown_p, lambda ctx, x, **_: [x])

FLOATS = jax.ShapeDtypeStruct((4,), jnp.float32)

OUTSIDE = [
    Case(
        "callbacks are sources, whatever they are given",
        lambda w, x: (
            jax.pure_callback(lambda a: a, FLOATS, w),
            io_callback(lambda a: a, FLOATS, w),
            io_callback(lambda a: a, FLOATS, w, ordered=True),
        ),
        "SSS",
        False,
    ),
    Case("printing is harmless", printing, "M"),
    Case("FFI calls are sources", lambda w, x: (jax.ffi.ffi_call("none", FLOATS)(w),), "S", False),
    Case("an unknown primitive is opaque", lambda w, x: (unknown_p.bind(w),), "F"),
    Case("a kernel is opaque", pallas_double, "F"),
]


def ref_of(initial: Any, *steps: Callable[[Any], Any]) -> Any:
    """Returns what a new ref holds after the steps."""
    ref = jax.new_ref(initial)
    for step in steps:
        step(ref)
    return ref[...]


def put(value: Any, place: Any = 0) -> Callable[[Any], None]:
    return lambda ref: ref.__setitem__(place, value)


def put_if(pred: Any, value: Any) -> Callable[[Any], None]:
    return lambda ref: lax.cond(pred, lambda: put(value)(ref), lambda: None)


def put_in_jit(value: Any) -> Callable[[Any], None]:
    return lambda ref: jax.jit(lambda r, v: r.__setitem__(0, v))(ref, value)


def put_in_scan(values: Any) -> Callable[[Any], None]:
    return lambda ref: lax.scan(lambda _, v: (None, put(v)(ref)), None, values)[0]


def count_up(ref: Any, trips: Any) -> None:
    def body(i: Any) -> Any:
        ref[1] = ref[1] + 1.0
        return i + 1

    lax.while_loop(lambda i: i < trips, body, 0)


def read_then_write(w: Any, x: Any) -> Outputs:
    ref = jax.new_ref(jnp.zeros(4))

    def body(carry: Any, _: Any) -> Any:
        seen = ref[0]
        ref[0] = ref[1]
        ref[1] = ref[2]
        ref[2] = x[0]
        return carry, seen

    return (lax.scan(body, 0.0, None, length=4)[1],)


def two_refs(w: Any, x: Any) -> Outputs:
    first, second = jax.new_ref(w), jax.new_ref(w)

    def body(_: Any, v: Any) -> Any:
        second[0] = first[0]
        first[0] = v
        return None, None

    lax.scan(body, None, x)
    return first[...], second[...]


def trips_of(x: Any) -> Any:
    return jnp.abs(x[0] * 3).astype(jnp.int32)


REFS = [
    Case("a ref of mirrored values is mirrored", lambda w, x: (ref_of(w, put(w[1])),), "M"),
    Case("a ref made from a per-replica value is not", lambda w, x: (ref_of(x),), "P"),
    Case("a per-replica write marks the ref", lambda w, x: (ref_of(w, put(x[0])),), "P"),
    Case(
        "so does a mirrored write at a per-replica place",
        lambda w, x: (ref_of(w, put(7.0, jnp.argmax(x))),),
        "P",
    ),
    Case(
        "so does adding to it",
        lambda w, x: (
            ref_of(w, lambda ref: jax.ref.addupdate(ref, 0, x[0])),
            ref_of(w, lambda ref: jax.ref.addupdate(ref, 0, w[0])),
        ),
        "PM",
    ),
    Case(
        "so does a constant write under a per-replica predicate",
        lambda w, x: (ref_of(w, put_if(x[0] > 0, 7.0)), ref_of(w, put_if(w[0] > 0, 7.0))),
        "PM",
    ),
    Case(
        "also below a jit below the predicate",
        lambda w, x: (
            ref_of(w, lambda r: lax.cond(x[0] > 0, lambda: put_in_jit(7.0)(r), lambda: None)),
        ),
        "P",
    ),
    Case(
        "writes inside jit and scan count",
        lambda w, x: (
            ref_of(w, put_in_jit(x[0])),
            ref_of(w, put_in_jit(w[0])),
            ref_of(w, put_in_scan(x)),
            ref_of(w, put_in_scan(w)),
        ),
        "PMPM",
    ),
    Case(
        "a per-replica trip count marks what the loop writes",
        lambda w, x: (
            ref_of(w, lambda ref: count_up(ref, trips_of(x))),
            ref_of(w, lambda ref: count_up(ref, 3)),
        ),
        "PM",
    ),
    Case("what one turn of a loop writes, a later one reads", read_then_write, "P"),
    Case("marks move from ref to ref through a loop", two_refs, "PP"),
    Case(
        "reading before the write is mirrored, the old value too",
        lambda w, x: (lambda r: (r[0], jax.ref.swap(r, 0, x[0]), r[0]))(jax.new_ref(w)),
        "MMP",
    ),
    Case(
        "a function of a ref, applied to values",
        lambda w, x: (
            pl.run_state(put(x[0]))(w),
            pl.run_state(put(w[0]))(w),
            pl.run_state(put_if(x[0] > 0, 7.0))(w),
        ),
        "PMP",
    ),
    Case("a mark never leaves a ref", lambda w, x: (ref_of(x, put(w, ...)),), "F"),
]


def rotate(w: Any, x: Any) -> Outputs:
    def body(carry: Any, _: Any) -> Any:
        _, b, c, d = carry
        return (b, c, x[0], d + 1), None

    return lax.scan(body, (0.0, 0.0, 0.0, 0.0), None, length=4)[0]


def scan_from(init: Any, length: int) -> Any:
    return lax.scan(lambda c, _: (psum(c), None), init, None, length=length)[0]


def while_by_carry(w: Any, x: Any) -> Outputs:
    """The test reads a carry that is per-replica only after the body ran."""

    def body(state: Any) -> Any:
        i, limit, count, kept = state
        return i + 1, limit + x[0], count + 1, kept

    init = (0, 2.0, 0, w)
    return lax.while_loop(lambda s: (s[0] < s[1]) & (s[0] < 9), body, init)[1:]


@jax.custom_vjp
def bad_gradient(w: Any) -> Any:
    return w * 2


bad_gradient.defvjp(lambda w: (w * 2, None), lambda _, g: (g * replica(),))


@jax.custom_vjp
def summed_gradient(w: Any) -> Any:
    return w


summed_gradient.defvjp(lambda w: (w, None), lambda _, g: (psum(g),))


@jax.custom_jvp
def odd_tangent(w: Any) -> Any:
    return w * 3


odd_tangent.defjvp(lambda ws, ts: (ws[0] * 3, ts[0] * replica()))


@jax.custom_batching.custom_vmap
def batched(w: Any) -> Any:
    return w * 2


@batched.def_vmap
def _(size: int, dims: Any, w: Any) -> Any:
    return w * 2, dims[0]


def solve_with(solve: Callable[[Any], Any], b: Any) -> Any:
    return lax.custom_linear_solve(lambda v: v * 2, b, lambda _, b: solve(b), lambda _, b: b / 2)


@jax.checkpoint
def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(w * x)


CONTROL = [
    Case(
        "which branch ran shows, though each returns a constant",
        lambda w, x: (
            lax.cond(x[0] > 0, lambda: 1.0, lambda: 2.0),
            lax.cond(w[0] > 0, lambda: 1.0, lambda: 2.0),
            lax.switch(lax.axis_index("data"), [lambda: 1.0, lambda: 2.0, lambda: 4.0]),
        ),
        "PMP",
    ),
    Case(
        "each output of a branch has its own mark",
        lambda w, x: lax.cond(w[0] > 0, lambda: (x, w), lambda: (w, w * 2)),
        "PM",
    ),
    Case("selecting by a per-replica value", lambda w, x: (jnp.where(x > 0, w, 0),), "P"),
    Case(
        "a per-replica trip count shows in mirrored carries",
        lambda w, x: (
            lax.fori_loop(0, trips_of(x), lambda _, c: c + 1, 0),
            lax.fori_loop(0, trips_of(w), lambda _, c: c + 1, 0),
            lax.fori_loop(0, 3, lambda _, c: c + x, w),
        ),
        "PMP",
    ),
    Case("a carry that the body leaves alone stays mirrored", while_by_carry, "PPM"),
    Case("marks travel from carry to carry", rotate, "PPPM"),
    Case(
        "a reduction in the body clears the carry, if the body runs at all",
        lambda w, x: (scan_from(x, 2), scan_from(x, 0), scan_from(w, 0)),
        "MPM",
    ),
    Case(
        "what is scanned and what is stacked",
        lambda w, x: (
            lax.scan(lambda c, v: (c, v), 0.0, x)[1],
            lax.scan(lambda c, v: (c + v, c), 0.0, w)[1],
            lax.scan(lambda c, v: (c + v, c), 0.0, x)[0],
            lax.map(lambda v: v + x[0], w),
        ),
        "PMPP",
    ),
    Case("jit is looked through", lambda w, x: jax.jit(lambda a, b: (a * 2, a + b))(w, x), "MP"),
    Case(
        "custom derivatives do not hide sources",
        lambda w, x: (
            bad_gradient(w),
            jax.grad(lambda v: bad_gradient(v).sum())(w),
            jax.grad(lambda v: (summed_gradient(v) * x).sum())(w),
            jax.grad(lambda v: (v * x).sum())(w),
        ),
        "MPMP",
    ),
    Case(
        "custom tangents do not hide sources",
        lambda w, x: (odd_tangent(w), jax.jvp(odd_tangent, (w,), (w,))[1], jax.nn.relu(w)),
        "MPM",
    ),
    Case(
        "recomputation under grad",
        lambda w, x: (
            jax.grad(lambda v: layer(layer(v, x), x).sum())(w),
            psum(jax.grad(lambda v: layer(layer(v, x), x).sum())(w)),
            jax.grad(lambda v: layer(layer(v, w), w).sum())(w),
        ),
        "PMM",
    ),
    Case(
        "the solver of a linear solve may hold a source",
        lambda w, x: (
            solve_with(lambda b: b / 2 + replica(), w),
            solve_with(lambda b: b / 2, w),
            solve_with(lambda b: b / 2, x),
            solve_with(lambda b: psum(b) / 2, x),
        ),
        "PMPM",
    ),
    Case("custom batching", lambda w, x: (batched(w), batched(x), jax.vmap(batched)(w)), "MPM"),
    Case("composites", lambda w, x: (lax.composite(lambda v: v + replica(), "my.op")(w),), "P"),
    Case("checked functions", checked_loop, "MP"),
    Case(
        "the gradient of a reduction is not the reduction of the gradient",
        lambda w, x: (
            jax.grad(lambda v: psum((v * x).sum()))(w),
            jax.grad(lambda v: psum((v * v).sum()))(w),
        ),
        "PM",
    ),
]

CASES = [*PLAIN, *COLLECTIVES, *OUTSIDE, *REFS, *CONTROL]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.shows)
def test_marks_of_each_output(case: Case) -> None:
    marks = marks_of(case.program)
    assert "".join("P" if mark else "M" for mark in marks) == case.expected.translate(
        str.maketrans("FS", "PP")
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [case for case in CASES if case.runs], ids=lambda case: case.shows)
def test_outputs_on_four_replicas_agree_with_the_marks(case: Case) -> None:
    equal = [is_equal(out) for out in run(case.program)]
    for letter, same in zip(case.expected, equal, strict=True):
        assert letter == "S" or same == (letter in "MF"), (case.expected, equal)


def over_model(body: Callable[..., Any], *args: Any) -> Any:
    """Maps over the other axis of a mesh whose axis "data" is already mapped."""
    spec: Any = (P("model"),) * len(args)
    return jax.shard_map(
        body, in_specs=spec, out_specs=P("model"), axis_names={"model"}, check_vma=False
    )(*args)


TWO_AXES = [
    Case(
        "collectives over another axis pass marks on",
        lambda w, x: (
            over_model(lambda v: lax.psum(v, "model"), w),
            over_model(lambda v: lax.psum(v, "model"), x),
            over_model(lambda v: lax.ppermute(v, "model", [(0, 1)]), w),
            over_model(lambda v: v + lax.axis_index("model"), w),
        ),
        "MPMM",
    ),
    Case(
        "collectives over both axes clear, and exchange",
        lambda w, x: (
            over_model(lambda v: lax.psum(v, ("data", "model")), x),
            over_model(lambda v: lax.psum(v, "data"), x),
            over_model(lambda v: v + lax.axis_index(("model", "data")), w),
            over_model(lambda v: lax.ppermute(v, ("data", "model"), [(0, 1)]), w),
        ),
        "MMPP",
    ),
    Case(
        "groups within a product of axes are a source",
        lambda w, x: (
            over_model(
                lambda v: lax.psum(v, ("data", "model"), axis_index_groups=[[*range(8)]]), x
            ),
        ),
        "P",
    ),
]


@pytest.mark.parametrize("case", TWO_AXES, ids=lambda case: case.shows)
def test_marks_with_another_mesh_axis(case: Case) -> None:
    marks = marks_of(case.program, make_mesh((4, 2), ("data", "model")))
    assert "".join("P" if mark else "M" for mark in marks) == case.expected


def test_collectives_of_check_vma_are_known() -> None:
    def program(x: Any) -> Any:
        return psum(x), lax.pmax(x, "data"), psum(x) + x

    specs: Any = (P(), P(), P("data"))
    mapped = jax.shard_map(program, mesh=make_mesh(), in_specs=P("data"), out_specs=specs)
    [eqn] = jax.make_jaxpr(mapped)(x_values()).eqns
    names = {inner.primitive.name for inner in eqn.params["jaxpr"].eqns}
    assert {"psum_invariant", "pvary"} <= names
    marks = prove(eqn.params["jaxpr"], [frozenset({"x"})], axis_size=N).marks
    assert [bool(mark) for mark in marks] == [False, False, True]


def test_an_inner_shard_map_over_the_same_axis_is_opaque() -> None:
    """JAX refuses to trace one, so the equation is made from one over another axis."""
    mesh = make_mesh((4, 2), ("data", "model"))
    jaxpr = trace(lambda x: over_model(psum, x), w_value(), mesh=mesh)
    alter(jaxpr, "shard_map", {"newly_manual_axes": frozenset({"data"})})
    [mark] = prove(jaxpr, [frozenset()], axis_size=N).marks
    assert any(source.startswith("shard_map (opaque) at test_sync.py:") for source in mark)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("psum", {"axes": None}),
        ("psum", {"axes": {"data": 4}}),
        ("psum", {"a_param_of_the_future": 1}),
        ("psum", {"axis_index_groups": "all"}),
        ("jit", {"jaxpr": None}),
        ("jit", {"call_jaxpr": trace}),
        ("jit", {"axis_name": "data"}),
        ("cond", {"branches": None}),
        ("scan", {"length": None, "jaxpr": None}),
        ("while", {"body_nconsts": 99}),
        ("while", {"cond_jaxpr": None}),
        ("custom_linear_solve", {"const_lengths": ()}),
        ("shard_map", {"newly_manual_axes": None}),
        ("run_state", {"is_initialized": (False,)}),
        ("mul", {"jaxpr": trace}),
        ("mul", {"axis_name": "data"}),
    ],
)
def test_an_unknown_form_of_an_equation_is_never_proved(name: str, change: dict[str, Any]) -> None:
    programs: dict[str, Callable[[Any], Any]] = {
        "psum": lambda w: psum(w),
        "jit": jax.jit(lambda w: w * 2),
        "cond": lambda w: lax.cond(w[0] > 0, lambda: w, lambda: w * 2),
        "scan": lambda w: lax.scan(lambda c, v: (c + v, None), 0.0, w)[0],
        "while": lambda w: lax.while_loop(lambda c: c[0] < 9, lambda c: c + 1, w),
        "custom_linear_solve": lambda w: solve_with(lambda b: b, w),
        "shard_map": lambda w: over_model(lambda v: v * 2, w),
        "run_state": lambda w: pl.run_state(put(7.0))(w),
        "mul": lambda w: w * 2,
    }
    jaxpr = trace(programs[name], w_value(), mesh=make_mesh((4, 2), ("data", "model")))
    assert prove(jaxpr, [frozenset()], axis_size=N).marks == [frozenset()]
    alter(jaxpr, name, {k: trace(lambda: 1) if v is trace else v for k, v in change.items()})
    [mark] = prove(jaxpr, [frozenset()], axis_size=N).marks
    assert mark


def test_an_unknown_effect_is_never_proved() -> None:
    jaxpr = trace(lambda w: w * 2, w_value())
    [effect] = trace(lambda w: jax.debug.print("{}", w), w_value()).effects
    jaxpr.eqns[:] = [eqn.replace(effects=frozenset({effect})) for eqn in jaxpr.eqns]
    [mark] = prove(jaxpr, [frozenset()], axis_size=N).marks
    assert any("mul (opaque)" in source for source in mark)


def test_an_opaque_equation_may_write_to_its_refs() -> None:
    def program(w: Any) -> Any:
        ref = jax.new_ref(w)
        jax.jit(lambda r: r[0])(ref)
        return ref[...]

    jaxpr = trace(program, w_value())
    alter(jaxpr, "jit", {"axis_name": "data"})
    [mark] = prove(jaxpr, [frozenset()], axis_size=N).marks
    assert any("jit (opaque)" in source for source in mark)


def test_a_captured_ref_is_never_proved() -> None:
    """Several bodies may hold it as a constant, and write to it."""
    ref = jax.new_ref(w_value())
    [mark] = prove(trace(lambda: ref[0] * 2), [], axis_size=N).marks
    assert mark == {"a captured ref"}


def test_marks_name_sources_with_the_users_line() -> None:
    def program(w: Any, x: Any) -> Any:
        return w + lax.axis_index("data") + lax.ppermute(x, "data", SHIFT)

    line = program.__code__.co_firstlineno + 1
    [mark] = marks_of(program)
    assert mark == {"x", f"axis_index at test_sync.py:{line}", f"ppermute at test_sync.py:{line}"}


def train(reduce: Callable[[Any], Any]) -> dict[str, set[str]]:
    """Traces a training step with Adam, and returns the sources of each part of its result."""
    rngs = nnx.Rngs(0)
    layers = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs), nnx.relu
    net = nnx.Sequential(*layers, nnx.Dropout(0.5, rngs=rngs), nnx.Linear(8, 1, rngs=rngs))
    graph, params, rest = nnx.split(net, nnx.Param, ...)
    adam = optax.adam(1e-3)
    structures: list[Any] = []

    def step(params: Any, opt_state: Any, rest: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            net = nnx.merge(graph, params, rest, copy=True)
            loss = ((net(batch[0])[:, 0] - batch[1]) ** 2).mean()
            return loss, nnx.state(net, nnx.BatchStat)

        (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = adam.update(reduce(grads), opt_state)
        params = optax.apply_updates(params, updates)
        result = {"params": params, "opt_state": opt_state, "stats": stats, "loss": loss}
        structures.append(jax.tree.structure(result))
        return result

    args = (params, adam.init(params), rest, (jnp.ones((2, 4)), jnp.ones(2)))
    marks = [frozenset({"batch"}) if i == 3 else frozenset() for i in range(4)]
    flat = [m for arg, m in zip(args, marks, strict=True) for _ in jax.tree.leaves(arg)]
    outs = prove(trace(step, *args), flat, axis_size=N).marks
    tree = jax.tree.unflatten(structures[0], outs)
    is_mark = lambda leaf: isinstance(leaf, frozenset)  # noqa: E731
    return {part: set().union(*jax.tree.leaves(sub, is_leaf=is_mark)) for part, sub in tree.items()}


@pytest.mark.exhaustive
def test_summed_gradients_keep_weights_and_adam_in_sync() -> None:
    parts = train(lambda grads: lax.pmean(grads, "data"))
    assert parts == {"params": set(), "opt_state": set(), "stats": {"batch"}, "loss": {"batch"}}


def test_unreduced_gradients_are_marked_with_the_batch() -> None:
    parts = train(lambda grads: grads)
    assert parts["params"] == parts["opt_state"] == {"batch"}


@pytest.mark.parametrize("later", [0.0, 1.0])
def test_a_carry_that_only_starts_as_zeros_is_not_zero(later: float) -> None:
    """A carry that is zero in the first iteration may be another number in the next."""

    def program(w: Any, x: Any) -> Any:
        return lax.scan(lambda c, _: (unreduced([c])[0] + later, c), jnp.zeros(4), None, length=2)

    if later:
        with pytest.raises(OutOfSyncError, match="already equal on every replica"):
            marks_of(program)
    else:
        assert not any(marks_of(program))


def many_times(w: Any, x: Any) -> Any:
    return lax.while_loop(lambda s: s[0] < trips_of(x), lambda s: (s[0] + 1, psum(s[1])), (0, w))


def in_the_test(w: Any, x: Any) -> Any:
    return lax.while_loop(lambda c: psum(c).sum() < x[0], lambda c: c + 1, w)


def by_later_carry(w: Any, x: Any) -> Any:
    """The predicate is mirrored in the first iteration only."""
    return lax.fori_loop(
        0, 3, lambda _, c: (c[0] + x[0], lax.cond(c[0] > 0, psum, jnp.sin, c[1])), (1.0, w)
    )


def by_ref(w: Any, x: Any) -> Any:
    ref = jax.new_ref(w)
    ref[0] = x[0]
    return lax.cond(ref[0] > 0, psum, jnp.sin, w)


def deep_below(w: Any, x: Any) -> Any:
    inner = jax.jit(lambda v: lax.scan(lambda c, _: (psum(c), None), v, None, length=2)[0])
    return lax.cond(x[0] > 0, jax.checkpoint(inner), jnp.sin, w)


def with_callback(w: Any, x: Any) -> Any:
    pred = jax.pure_callback(lambda: True, jax.ShapeDtypeStruct((), jnp.bool))
    return lax.cond(pred, psum, jnp.sin, w)


def mirrored_inside(w: Any, x: Any) -> Any:
    """The inner predicate is mirrored; the outer one decides whether a replica gets there."""
    return lax.cond(x[0] > 0, lambda: lax.cond(w[0] > 0, psum, jnp.sin, w), lambda: w)


def also_called_outside(w: Any, x: Any) -> Any:
    """Both calls share one body, with the same marks."""
    summed = jax.jit(lambda v: psum(v))
    return summed(w) + lax.cond(x[0] > 0, summed, jnp.sin, w)


HANGS: dict[str, Program] = {
    "while": many_times,
    "the test of a while": in_the_test,
    "cond": lambda w, x: lax.cond(x[0] > 0, psum, jnp.sin, w),
    "switch": lambda w, x: lax.switch(lax.axis_index("data"), [psum, jnp.sin], w),
    "a carry": by_later_carry,
    "a ref": by_ref,
    "deep below": deep_below,
    "a callback": with_callback,
    "a function also called outside": also_called_outside,
    "a mirrored predicate inside": mirrored_inside,
    "ppermute": lambda w, x: lax.cond(x[0] > 0, lambda: lax.ppermute(w, "data", SHIFT), lambda: w),
    "all_gather": lambda w, x: lax.cond(x[0] > 0, lambda: lax.all_gather(w, "data")[0], lambda: w),
    "groups": lambda w, x: lax.cond(
        x[0] > 0, lambda: lax.psum(w, "data", axis_index_groups=HALVES), lambda: w
    ),
}


def test_a_deadlock_names_the_sources_of_outer_predicates() -> None:
    def program(w: Any, x: Any) -> Any:
        inner = lambda: lax.cond(replica() > 1, psum, jnp.sin, w)  # noqa: E731
        return lax.cond(x[0] > 0, inner, lambda: w)

    with pytest.raises(DeadlockError, match=r"depends on: axis_index at test_sync.py:\d+, x\n"):
        marks_of(program)


@pytest.mark.parametrize("name", HANGS)
def test_a_collective_that_some_replicas_skip_is_a_deadlock(name: str) -> None:
    what = "the trip count of while" if "while" in name else "the predicate of cond"
    with pytest.raises(DeadlockError, match=f"decided by: {what} at test_sync.py:"):
        marks_of(HANGS[name])


@pytest.mark.parametrize(
    "program",
    [
        lambda w, x: lax.cond(psum(x)[0] > 0, psum, jnp.sin, x),
        lambda w, x: lax.cond(x[0] > 0, lambda: replica(), lambda: 0.0),
        lambda w, x: lax.while_loop(lambda c: psum(c)[0] < 9, lambda c: psum(c) + 1, x),
        lambda w, x: lax.scan(lambda c, v: (psum(c + v), None), 0.0, x)[0],
        lambda w, x: jnp.where(x > 0, psum(x), x),
        lambda w, x: jax.vmap(lambda p, v: lax.cond(p > 0, psum, jnp.sin, v))(x, x),
        lambda w, x: lax.cond(assume_mirrored(x[0]) > 0, psum, jnp.sin, x),
    ],
)
def test_a_collective_that_every_replica_reaches_is_accepted(
    program: Callable[[Any, Any], Any],
) -> None:
    assert len(marks_of(lambda w, x: (program(w, x),))) == 1


def test_a_collective_over_another_axis_may_depend_on_a_per_replica_predicate() -> None:
    def program(w: Any, x: Any) -> Any:
        other = functools.partial(over_model, lambda v: lax.psum(v, "model"))
        return (lax.cond(x[0] > 0, other, jnp.sin, w),)

    [mark] = marks_of(program, make_mesh((4, 2), ("data", "model")))
    assert mark == {"x"}


@pytest.mark.parametrize("hide", [lambda j: j, lambda j: (("a", (j,)),), lambda j: Holder(j)])
def test_a_collective_inside_an_unknown_equation_is_found(hide: Callable[[Any], Any]) -> None:
    holding_p = Primitive("holding")
    holding_p.def_abstract_eval(lambda v, **_: v)
    body = hide(trace(psum, w_value()))

    def program(w: Any, x: Any) -> Outputs:
        return (lax.cond(x[0] > 0, lambda: holding_p.bind(w, body=body), lambda: w),)

    with pytest.raises(DeadlockError, match="the collective: psum at"):
        marks_of(program)


@dataclasses.dataclass(frozen=True)
class Holder:
    jaxpr: Any


def test_the_message_of_a_deadlock() -> None:
    def program(w: Any, x: Any) -> Any:
        x = x + replica()
        return lax.cond(x[0] > 0, lambda: psum(w), lambda: w)

    first = program.__code__.co_firstlineno
    with pytest.raises(DeadlockError) as error:
        marks_of(program)
    assert str(error.value).replace(__file__, "FILE") == (
        'psum over "data" may hang: not every replica is sure to reach it.\n'
        f"  the collective: psum at FILE:{psum.__code__.co_firstlineno + 1}\n"
        f"  decided by: the predicate of cond at test_sync.py:{first + 2}\n"
        "  which may differ between replicas, because it depends on: "
        f"axis_index at test_sync.py:{replica.__code__.co_firstlineno + 1}, x\n"
        "Every replica must run the same collectives, equally often and in the same order; "
        "if one skips a collective, the others wait forever.\n"
        "Reduce the predicate first, so that all replicas decide the same:\n"
        "    dj.get_replica_context().all_reduce('sum', jnp.int32(pred)) > 0\n"
        "or move the collective out of the branch or loop.\n"
        "More on this error: distribute-jax explain DeadlockError"
    )


def test_bodies_are_cached_by_their_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each loop is interpreted twice, so without the cache the innermost of ten 2**10 times."""

    def nested(depth: int, w: Any, x: Any) -> Any:
        if depth == 0:
            return w
        body = lambda c, _: (nested(depth - 1, w, x) + c + x, None)  # noqa: E731
        return lax.scan(body, w, None, length=2)[0]

    visits = []
    apply = sync.Walk.apply
    monkeypatch.setattr(sync.Walk, "apply", lambda *args: visits.append(args[1]) or apply(*args))
    [mark] = marks_of(lambda w, x: (nested(10, w, x),))
    assert mark == {"x"}
    assert len(visits) < 100
