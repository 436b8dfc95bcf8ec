"""The proof of sync: which values of a traced step are equal on all replicas.

An abstract interpreter of the jaxpr gives each value a mark: empty if the value is proved mirrored,
else the sources that may make it differ, in words. A rule for each primitive returns the marks of the
results. What it does not know counts as a source, so a missing rule gives a false alarm and never a false
proof.

Mirrored means bitwise equal, provided that a device computes the same result from the same operands
every time. XLA on GPUs does not for scatter-add, unless ``--xla_gpu_deterministic_ops`` is set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr, Primitive, primitives

from distribute_jax._errors import DeadlockError, LoweringError, OutOfSyncError, log_once
from distribute_jax._mesh import DATA
from distribute_jax.collectives._markers import (
    mirrored_p,
    part_gradient_p,
    part_of_mean_p,
    unreduced_p,
)
from distribute_jax.program import _walk
from distribute_jax.program._jaxprs import (
    CALLS,
    ClosedJaxpr,
    collectives,
    is_ref,
    line,
    name,
    open_jaxpr,
)
from distribute_jax.program._walk import LINEAR, STRUCTURE, Marks, Rule, Walk

DEADLOCK = """\
{collective} over "{axis}" may hang: not every replica is sure to reach it.
  the collective: {collective} at {where}
  decided by: {what}
  which may differ between replicas, because it depends on: {sources}
Every replica must run the same collectives, equally often and in the same order; if one skips a \
collective, the others wait forever.
Reduce the predicate first, so that all replicas decide the same:
    dj.get_replica_context().all_reduce('sum', jnp.int32(pred)) > 0
or move the collective out of the branch or loop."""

_LINE_SEARCH = """
A line search differentiates its value_fn. For a loss by dj.compute_average_loss pass
    value_fn=lambda p: replica.all_reduce("sum", loss(replica.all_reduce("mean", p)))
where replica = dj.get_replica_context(): the mean of the parameters, which are equal, makes the gradient \
that of all replicas."""

REDUCED = """\
dj.Optimizer.update at {where} got gradients that are already equal on every replica; their sum would \
be {replicas} times too large.
If they were combined before, pass update(model, grads, skip_gradients_aggregation=True). Otherwise \
they do not depend on the batch: pass the batch in args, from strategy.distribute_dataset."""

_TWO_BITS = """\
{collective} at {where} combines {dtype} values, for which XLA's collectives give wrong numbers on CPU. \
Convert them before: x.astype(jnp.int8). dj.get_replica_context().all_gather does so by itself."""

_ZEROS = (
    "dj.Optimizer.update at %s gets gradients that are all zero: the loss does not depend on the variables "
    "that it is differentiated by, or only by a comparison, argmax, rounding or stop_gradient. Compute a "
    "loss with a gradient, and in the loss function use its argument, not the model of the outer scope."
)


Mark = frozenset[str]
"""Why a value may differ between replicas, in words. Empty: it is proved mirrored."""

MIRRORED: Mark = frozenset()


class Ref:
    """The mark of a mutable reference: that of its content, which only grows."""

    def __init__(self, content: Mark) -> None:
        self.content = content


def union(marks: Iterable[Any]) -> Mark:
    """Returns the mark of a value that depends on all the marked values."""
    result = MIRRORED
    for mark in contents(marks):
        if mark:
            result = result | mark if result else mark
    return result


def contents(marks: Iterable[Any]) -> list[Mark]:
    """Returns the marks of values, and of what refs contain now."""
    return [mark.content if isinstance(mark, Ref) else mark for mark in marks]


class Control(NamedTuple):
    """The predicates and trip counts that decide whether, and how often, code runs."""

    mark: Mark = MIRRORED
    """Why replicas may decide differently. Empty: they all run it."""
    what: str = ""
    """The innermost one that may differ, such as ``the predicate of cond at train.py:12``."""


def mixed(eqn: Any, marks: Marks) -> Marks:
    """Returns the marks if every output depends on all operands."""
    return [union(marks)] * len(eqn.outvars)


# Collectives

_REDUCTION_PARAMS = {
    *("axes", "axis_name", "axis_index_groups", "axis_size"),
    *("all_gather_dimension", "tiled", "source"),
}


def axis_names(eqn: Any) -> tuple[str | int, ...]:
    """Returns the axes of a collective; integers are dims of its operand."""
    axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
    names = axes if isinstance(axes, tuple) else (axes,)
    if not all(isinstance(axis, str | int) for axis in names):
        raise TypeError(f"unknown form of axis names: {axes!r}")
    return names


def reduction(walk: Any, eqn: Any, marks: Marks) -> Marks | None:
    """All replicas get the same result, unless they are divided into groups."""
    names = axis_names(eqn)
    if not set(eqn.params) <= _REDUCTION_PARAMS:
        return None
    if DATA not in names:
        return mixed(eqn, marks)
    groups, all_replicas = eqn.params.get("axis_index_groups"), list(range(walk.axis_size))
    if groups is not None and (len(names) > 1 or list(map(sorted, groups)) != [all_replicas]):
        return exchange(walk, eqn, marks)
    walk.meet(eqn)
    return [MIRRORED] * len(eqn.outvars)


def exchange(walk: Any, eqn: Any, marks: Marks) -> Marks | None:
    """Each replica gets another part, even of a mirrored value."""
    if DATA not in axis_names(eqn):
        return mixed(eqn, marks)
    walk.meet(eqn)
    return [union(marks) | {f"{name(eqn)} at {line(eqn)}"}] * len(eqn.outvars)


def axis_index(walk: Any, eqn: Any, marks: Marks) -> Marks | None:
    """The replica id: a source, but not a collective."""
    if DATA in axis_names(eqn):
        return [frozenset({f"axis_index at {line(eqn)}"})]
    return [MIRRORED]


# Refs


def new_ref(walk: Any, eqn: Any, marks: Marks) -> Marks | None:
    """Its content is a value."""
    return [Ref(union(marks))]


def read(walk: Any, eqn: Any, marks: Marks) -> Marks | None:
    """The content of a ref depends on what it was made from; what is read, also on the index."""
    return mixed(eqn, marks)


def write(walk: Any, eqn: Any, marks: Marks) -> Marks | None:
    """The content depends on the value, the index, and on whether the write happens."""
    ref, _, *index = marks
    outs = mixed(eqn, [ref, *index])
    ref.content |= union([*marks, walk.control.mark])
    return outs


def run_state(walk: Any, eqn: Any, marks: Marks) -> Marks | None:
    """The operands become refs, the body runs on them, and their content is returned."""
    if not all(eqn.params["is_initialized"]):
        return None
    refs = list(map(Ref, contents(marks)))
    walk.run(eqn.params["jaxpr"], refs)
    return contents(refs)


# Calls


def call(walk: Any, eqn: Any, marks: Marks) -> Marks | None:
    """The body runs once, on the operands."""
    return None if "axis_name" in eqn.params else _walk.call(walk, eqn, marks)


def cross_device_sum(walk: Any, eqn: Any, marks: Marks) -> Marks | None:
    """A ``CrossDeviceOps`` of this library, proved by its trace."""
    # Reported as a whole: the equations of the trace do not have the user's line.
    walk.meet(eqn)
    return call(walk, eqn, marks)


def shard_map(walk: Any, eqn: Any, marks: Marks) -> Marks | None:
    """A call, unless it binds the axis of the replicas again: then its collectives are over another."""
    bound = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes"))
    return None if bound is None or DATA in bound else call(walk, eqn, marks)


def linear_solve(walk: Any, eqn: Any, marks: Marks) -> Marks | None:
    """Only ``solve`` runs; the other functions are for derivatives."""
    lengths = eqn.params["const_lengths"]
    start = lengths.matvec + lengths.vecmat
    consts = marks[start : start + lengths.solve]
    rhs = marks[start + lengths.solve + lengths.transpose_solve :]
    return walk.run(eqn.params["jaxprs"].solve, consts + rhs)


def combine(walk: Any, eqn: Any, marks: Marks) -> Marks | None:
    """A reduction or scatter with a scalar function, which must have no source in it."""
    bodies = (p for p in eqn.params.values() if isinstance(p, Jaxpr | ClosedJaxpr))
    outs = [walk.run(body, [MIRRORED] * len(body.invars)) for body in bodies]
    return None if any(map(union, outs)) else mixed(eqn, marks)


def barrier(walk: Any, eqn: Any, marks: Marks) -> Marks | None:
    """Each output is one operand."""
    return list(marks) if len(marks) == len(eqn.outvars) else None


def hi_primitive(walk: Any, eqn: Any, marks: Marks) -> Marks | None:
    """JAX 0.12 traces some functions of ``jax.numpy`` (searchsorted, nonzero) to such equations."""
    if eqn.effects or not type(eqn.params["_prim"]).__module__.startswith("jax._src.numpy."):
        return None
    return mixed(eqn, marks)


_REDUCTIONS = ("psum", "psum_invariant", "pmax", "pmin", "pbroadcast")
_GATHERS = ("all_gather", "all_gather_invariant")
_EXCHANGES = ("ppermute", "all_to_all", "ragged_all_to_all", "reduce_scatter", "psend", "precv")
_COMBINES = ("reduce", "reduce_window", "select_and_scatter")
_SCATTERS = tuple("scatter" + kind for kind in ("", "-add", "-sub", "-mul", "-min", "-max"))

RULES: dict[str, Rule] = {
    **dict.fromkeys(_REDUCTIONS + _GATHERS, reduction),
    **dict.fromkeys(_EXCHANGES, exchange),
    "axis_index": axis_index,
    "new_ref": new_ref,
    **dict.fromkeys(("get", "freeze", "free_ref"), read),
    **dict.fromkeys(("swap", "addupdate"), write),
    "run_state": run_state,
    **STRUCTURE,
    **dict.fromkeys(CALLS, call),
    "cross_device_sum": cross_device_sum,
    "shard_map": shard_map,
    "custom_linear_solve": linear_solve,
    **dict.fromkeys(_COMBINES + _SCATTERS, combine),
    "optimization_barrier": barrier,
    "call_hi_primitive": hi_primitive,
}
"""The rules by the primitive's name."""


_SOURCES = frozenset({
    "pure_callback", "io_callback", "buffer_callback", "ffi_call", "rng_uniform",
    "empty", "empty2", "empty_ref", "custom_partitioning", "pallas_call",
})  # fmt: skip
"""Known to differ, or beyond proof: the message does not call them opaque."""

_PLAIN: frozenset[Primitive] = frozenset(
    p
    for p in vars(primitives).values()
    if isinstance(p, Primitive) and p.name not in _SOURCES | {"custom_lin"}
)
_PLAIN_NAMES = frozenset({
    "bcoo_extract", "bcoo_todense", "broadcast_to", "cholesky_update", "dim_as_value",
    "dimension_size", "from_edtype", "geqp3", "geqrf", "iota_2x32_shape", "layout_constraint",
    "lu_pivots_to_permutation", "mulhi", "ormqr", "philox2x32", "philox4x32", "platform_index",
    "pvary", "ragged_dot_general", "random_clone", "random_unwrap", "random_wrap", "real_rows",
    "relayout", "reshard", "scaled_dot", "split", "stack", "stage", "symmetric_product",
    "threefry4x32", "tie", "tile", "to_edtype", "unstack", "xla_metadata_value", "zeros_like",
})  # fmt: skip
"""Pure functions of their operands that ``jax.extend.core.primitives`` does not list."""


def _is_plain(eqn: Any) -> bool:
    """True if an equation without a rule is known to be a pure function of its operands."""
    known = eqn.primitive in _PLAIN or eqn.primitive.name in _PLAIN_NAMES
    if not known or eqn.effects or "axis_name" in eqn.params:
        return False
    return not any(isinstance(p, (Jaxpr, ClosedJaxpr)) for p in eqn.params.values())


class Proof(NamedTuple):
    """What is known of a per-replica program."""

    marks: list[Mark]
    """For each output why it may differ, as ``axis_index at train.py:12``; empty if it is proved mirrored."""
    diverging: tuple[str, ...]
    """Branches and loops that replicas may run differently, as ``the trip count of while at train.py:15``."""


def prove(jaxpr: Any, in_marks: Sequence[Mark], *, axis_size: int) -> Proof:
    """Proves which outputs of a per-replica program are mirrored, given the marks of its inputs.

    Raises:
        DeadlockError: some replicas may skip a collective.
        OutOfSyncError: gradients that are about to be summed are mirrored already.
    """
    walk = ReplicationWalk(axis_size)
    outs = walk.run(jaxpr, list(in_marks))
    walk.check_unreduced(jaxpr)
    return Proof(outs, tuple(walk.diverging))


class ReplicationWalk(Walk):
    """The abstract interpreter."""

    def __init__(self, axis_size: int) -> None:
        super().__init__()
        self.axis_size = axis_size
        self.control = Control()
        # Checked at the end: marks grow while a loop is walked again.
        self._unreduced: dict[int, tuple[Any, Mark]] = {}
        self.diverging: dict[str, None] = {}

    def constant(self, value: Any) -> Mark:
        return MIRRORED

    def decided(self, eqn: Any, by: Mark, outs: Marks) -> Marks:
        return [union([by, out]) for out in outs]

    @contextmanager
    def inside(self, eqn: Any, by: Mark, role: str) -> Iterator[None]:
        before = self.control
        if by:
            self.control = Control(before.mark | by, f"{role} of {name(eqn)} at {line(eqn)}")
        try:
            yield
        finally:
            self.control = before

    def run(self, body: Any, marks: Marks) -> Marks:
        if self.control.mark:
            self.diverging[self.control.what] = None
        writes = any(isinstance(mark, Ref) for mark in marks)
        return self.outputs(body, marks) if writes else super().run(body, marks)

    def key(self, body: Any) -> Any:
        return id(body), self.control

    def state(self, marks: Marks) -> Any:
        return contents(marks)

    def start(self, body: Any, marks: Marks) -> dict[Any, Any]:
        env, jaxpr = super().start(body, marks), open_jaxpr(body)
        # Several bodies may hold the same captured ref, and write to it.
        captured = Ref(frozenset({"a captured ref"}))
        env |= dict.fromkeys(filter(is_ref, jaxpr.constvars), captured)
        passed = (var for var in filter(is_ref, jaxpr.invars) if not isinstance(env[var], Ref))
        return env | {var: Ref(env[var]) for var in passed}

    def apply(self, eqn: Any, marks: Marks) -> Marks:
        """Returns the marks after one equation."""
        if eqn.primitive is mirrored_p:
            return [MIRRORED]
        if eqn.primitive is part_of_mean_p:  # to be summed even if all parts are equal
            return [
                marks[0]
                | {f"a part of a mean at {line(eqn)}, of which all_reduce('sum', part) is the mean"}
            ]
        if eqn.primitive is part_gradient_p:
            return marks
        if eqn.primitive is unreduced_p:
            _, before = self._unreduced.get(id(eqn), (eqn, MIRRORED))
            self._unreduced[id(eqn)] = eqn, union([before, *marks])
            return marks
        if rule := RULES.get(eqn.primitive.name):
            outs = self.by_rule(rule, eqn, marks)
        else:
            outs = mixed(eqn, marks) if _is_plain(eqn) else None
        return self._opaque(eqn, marks) if outs is None else outs

    def _opaque(self, eqn: Any, marks: Marks) -> Marks:
        """Returns the marks after an unknown equation, which may write anything to its refs."""
        if self.control.mark:
            for collective in collectives(eqn, DATA):
                self.meet(collective)
        kind = name(eqn) if eqn.primitive.name in _SOURCES else f"{name(eqn)} (opaque)"
        mark = union([*marks, self.control.mark]) | {f"{kind} at {line(eqn)}"}
        for ref in marks:
            if isinstance(ref, Ref):
                ref.content |= mark
        return [mark] * len(eqn.outvars)

    def check_unreduced(self, jaxpr: Any) -> None:
        """Raises if values about to be summed are mirrored already; only logs if they are all zero."""
        if self.axis_size == 1:
            return
        for eqn, mark in self._unreduced.values():
            if mark:
                continue
            if not _ZeroWalk(eqn).finds_zeros(jaxpr):
                raise OutOfSyncError(REDUCED.format(where=line(eqn), replicas=self.axis_size))
            log_once(_ZEROS, line(eqn), about=line(eqn))

    def meet(self, eqn: Any) -> None:
        """Raises unless every replica is sure to reach the collective ``eqn``, and can compute it."""
        for dtype in {str(var.aval.dtype) for var in eqn.outvars} & {"int2", "uint2"}:
            raise LoweringError(
                _TWO_BITS.format(collective=name(eqn), where=line(eqn), dtype=dtype)
            )
        if self.control.mark:
            message = DEADLOCK.format(
                collective=name(eqn),
                axis=DATA,
                where=line(eqn, full_path=True),
                what=self.control.what,
                sources=", ".join(sorted(self.control.mark)),
            )
            is_search = "optax/_src/linesearch.py" in self.control.what
            raise DeadlockError(message + _LINE_SEARCH if is_search else message)


class _ZeroWalk(Walk):
    """Interprets with marks that are True for values that may not be zero."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        self._target = target
        self._operands: list[bool] = []

    def finds_zeros(self, jaxpr: Any) -> bool:
        """True if all operands of the target equation are zeros wherever it runs."""
        self.run(jaxpr, [True] * len(jaxpr.jaxpr.invars))
        return bool(self._operands) and not any(self._operands)

    def constant(self, value: Any) -> bool:
        return isinstance(value, jax.Array) or bool(np.any(value))

    def decided(self, eqn: Any, by: bool, outs: Marks) -> Marks:
        return outs

    def apply(self, eqn: Any, marks: Marks) -> Marks:
        kind, count = eqn.primitive.name, len(eqn.outvars)
        if eqn is self._target:
            self._operands += marks
        if kind in STRUCTURE:
            return self.by_rule(STRUCTURE[kind], eqn, marks) or [True] * count
        if kind in ("mul", "div"):
            return [marks[0] and (kind == "div" or marks[1])]
        return [any(marks) or kind not in LINEAR] * count
