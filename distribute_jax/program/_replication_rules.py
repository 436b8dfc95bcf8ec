"""Transfer rules of the proof of sync: the marks after an equation, by primitive.

A rule gets the marks of the operands, and returns those of the outputs. For a form of the equation that it
does not know, since JAX renames parameters between versions, it returns None or fails: the equation is then
opaque, which is never a false proof.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jax.extend.core import Jaxpr

from distribute_jax._mesh import DATA
from distribute_jax.program._jaxprs import (
    CALLS,
    ClosedJaxpr,
    called_body,
    consts_and_carries,
    line,
    name,
)

Mark = frozenset[str]
"""Why a value may differ between replicas, in words. Empty: it is proved mirrored."""

MIRRORED: Mark = frozenset()


class Ref:
    """The mark of a mutable reference: that of its content, which only grows."""

    def __init__(self, content: Mark) -> None:
        self.content = content

    def __bool__(self) -> bool:
        return bool(self.content)


Marks = Sequence[Any]
"""A ``Mark``, or a ``Ref``, of each of several values."""


def union(marks: Marks) -> Mark:
    """Returns the mark of a value that depends on all the marked values."""
    result = MIRRORED
    for mark in contents(marks):
        if mark:
            result = result | mark if result else mark
    return result


def contents(marks: Marks) -> list[Mark]:
    """Returns the marks of values, and of what refs contain now."""
    return [mark.content if isinstance(mark, Ref) else mark for mark in marks]


@dataclass(frozen=True)
class Control:
    """The predicates and trip counts that decide whether, and how often, code runs."""

    mark: Mark = MIRRORED
    """Why replicas may decide differently. Empty: they all run it."""
    what: str = ""
    """The innermost one that may differ, such as ``the predicate of cond at train.py:12``."""

    def inside(self, mark: Mark, role: str, eqn: Any) -> Control:
        """Returns the control of a body that a value with this mark decides about."""
        if not mark:
            return self
        return Control(self.mark | mark, f"{role} of {name(eqn)} at {line(eqn)}")


def mixed(eqn: Any, marks: Marks) -> list[Mark]:
    """Returns the marks if every output depends on all operands."""
    return [union(marks)] * len(eqn.outvars)


class Walk(Protocol):
    """The part of the interpreter that rules use."""

    axis_size: int

    def run(self, body: Any, marks: Marks, control: Control) -> list[Mark]:
        """Returns the marks of the outputs of ``body``."""

    def meet(self, eqn: Any, control: Control) -> None:
        """Raises DeadlockError unless every replica is sure to reach the collective ``eqn``."""


Rule = Callable[[Walk, Any, list[Any], Control], list[Mark] | None]


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


def _is_one_group(groups: Any, axis_size: int) -> bool:
    """True if one group has all replicas."""
    return groups is None or [sorted(g) for g in groups] == [list(range(axis_size))]


def reduction(walk: Walk, eqn: Any, marks: list[Any], control: Control) -> list[Mark] | None:
    """All replicas get the same result, unless they are divided into groups."""
    names = axis_names(eqn)
    if not set(eqn.params) <= _REDUCTION_PARAMS:
        return None
    if DATA not in names:
        return mixed(eqn, marks)
    groups = eqn.params.get("axis_index_groups")
    if groups is not None and (len(names) > 1 or not _is_one_group(groups, walk.axis_size)):
        return exchange(walk, eqn, marks, control)
    walk.meet(eqn, control)
    return [MIRRORED] * len(eqn.outvars)


def exchange(walk: Walk, eqn: Any, marks: list[Any], control: Control) -> list[Mark] | None:
    """Each replica gets another part, even of a mirrored value."""
    if DATA not in axis_names(eqn):
        return mixed(eqn, marks)
    walk.meet(eqn, control)
    return [union(marks) | {f"{name(eqn)} at {line(eqn)}"}] * len(eqn.outvars)


def axis_index(walk: Walk, eqn: Any, marks: list[Any], control: Control) -> list[Mark] | None:
    """The replica id: a source, but not a collective."""
    if DATA in axis_names(eqn):
        return [frozenset({f"axis_index at {line(eqn)}"})]
    return [MIRRORED]


# Refs


def new_ref(walk: Walk, eqn: Any, marks: list[Any], control: Control) -> list[Any] | None:
    """Its content is a value."""
    return [Ref(union(marks))]


def read(walk: Walk, eqn: Any, marks: list[Any], control: Control) -> list[Mark] | None:
    """The content of a ref depends on what it was made from; what is read, also on the index."""
    return mixed(eqn, marks)


def write(walk: Walk, eqn: Any, marks: list[Any], control: Control) -> list[Mark] | None:
    """The content depends on the value, the index, and on whether the write happens."""
    ref, _, *index = marks
    outs = mixed(eqn, [ref, *index])
    ref.content |= union([*marks, control.mark])
    return outs


def run_state(walk: Walk, eqn: Any, marks: list[Any], control: Control) -> list[Mark] | None:
    """The operands become refs, the body runs on them, and their content is returned."""
    if not all(eqn.params["is_initialized"]):
        return None
    refs = list(map(Ref, contents(marks)))
    walk.run(eqn.params["jaxpr"], refs, control)
    return contents(refs)


# Calls


def call(walk: Walk, eqn: Any, marks: list[Any], control: Control) -> list[Mark] | None:
    """The body runs once, on the operands."""
    body = called_body(eqn)
    if body is None or "axis_name" in eqn.params:
        return None
    return walk.run(body, marks, control)


def cross_device_sum(walk: Walk, eqn: Any, marks: list[Any], control: Control) -> list[Mark] | None:
    """A ``CrossDeviceOps`` of this library, proved by its trace."""
    # Reported as a whole: the equations of the trace do not have the user's line.
    walk.meet(eqn, control)
    return call(walk, eqn, marks, control)


def shard_map(walk: Walk, eqn: Any, marks: list[Any], control: Control) -> list[Mark] | None:
    """A call, unless it binds the axis of the replicas again: then its collectives are over another."""
    bound = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes"))
    return None if bound is None or DATA in bound else call(walk, eqn, marks, control)


def linear_solve(walk: Walk, eqn: Any, marks: list[Any], control: Control) -> list[Mark] | None:
    """Only ``solve`` runs; the other functions are for derivatives."""
    lengths = eqn.params["const_lengths"]
    start = lengths.matvec + lengths.vecmat
    consts = marks[start : start + lengths.solve]
    rhs = marks[start + lengths.solve + lengths.transpose_solve :]
    return walk.run(eqn.params["jaxprs"].solve, consts + rhs, control)


def combine(walk: Walk, eqn: Any, marks: list[Any], control: Control) -> list[Mark] | None:
    """A reduction or scatter with a scalar function, which must have no source in it."""
    bodies = (p for p in eqn.params.values() if isinstance(p, Jaxpr | ClosedJaxpr))
    outs = [walk.run(body, [MIRRORED] * len(body.invars), control) for body in bodies]
    return None if any(map(union, outs)) else mixed(eqn, marks)


def barrier(walk: Walk, eqn: Any, marks: list[Any], control: Control) -> list[Mark] | None:
    """Each output is one operand."""
    return list(marks) if len(marks) == len(eqn.outvars) else None


def hi_primitive(walk: Walk, eqn: Any, marks: list[Any], control: Control) -> list[Mark] | None:
    """JAX 0.12 traces some functions of ``jax.numpy`` (searchsorted, nonzero) to such equations."""
    if eqn.effects or not type(eqn.params["_prim"]).__module__.startswith("jax._src.numpy."):
        return None
    return mixed(eqn, marks)


# Branches and loops


def cond(walk: Walk, eqn: Any, marks: list[Any], control: Control) -> list[Mark] | None:
    """Every output depends on the predicate, even if each branch returns a constant."""
    index, *operands = marks
    inside = control.inside(index, "the predicate", eqn)
    outs = [walk.run(branch, operands, inside) for branch in eqn.params["branches"]]
    return [union([index, *each]) for each in zip(*outs, strict=True)]


def scan(walk: Walk, eqn: Any, marks: list[Any], control: Control) -> list[Mark] | None:
    """The body is interpreted until the marks of carries and refs stop growing."""
    body = eqn.params["jaxpr"]
    start, num_carry = consts_and_carries(eqn)
    if start < 0:
        return None
    end, state = start + num_carry, list(marks)
    while True:
        before = contents(state)
        outs = walk.run(body, state, control)
        state[start:end] = map(union, zip(state[start:end], outs[:num_carry], strict=True))
        if contents(state) == before:
            return state[start:end] + outs[num_carry:]


def while_loop(walk: Walk, eqn: Any, marks: list[Any], control: Control) -> list[Mark] | None:
    """Every carry depends on the trip count; JAX carries only what the body changes."""
    body, test = eqn.params["body_jaxpr"], eqn.params["cond_jaxpr"]
    num_test = eqn.params["cond_nconsts"]
    start = num_test + eqn.params["body_nconsts"]
    state, count = list(marks), MIRRORED
    while True:
        before = count, contents(state)
        inside = control.inside(count, "the trip count", eqn)
        [count] = walk.run(test, [*state[:num_test], *state[start:]], inside)
        inside = control.inside(count, "the trip count", eqn)
        outs = walk.run(body, state[num_test:], inside)
        state[start:] = [
            union([old, new, count]) for old, new in zip(state[start:], outs, strict=True)
        ]
        if (count, contents(state)) == before:
            return state[start:]


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
    **dict.fromkeys(CALLS, call),
    "cross_device_sum": cross_device_sum,
    "shard_map": shard_map,
    "custom_linear_solve": linear_solve,
    **dict.fromkeys(_COMBINES + _SCATTERS, combine),
    "optimization_barrier": barrier,
    "call_hi_primitive": hi_primitive,
    "cond": cond,
    "scan": scan,
    "while": while_loop,
}
"""The rules by the primitive's name."""
