"""The proof: which values of a traced step are the same on every replica.

A pass over the equations of the jaxpr, in order, gives each value a mark: empty if the value is
proved mirrored, else the sources that may make it differ, in words. Whatever the pass does not
know counts as a source, so a missing rule gives a false alarm and never a false proof.

Mirrored means bitwise equal, provided that a device gives the same result for the same operands
each time. XLA on GPUs breaks that for scatter-add unless ``--xla_gpu_deterministic_ops`` is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr, Literal, Primitive, primitives

from distribute_jax._errors import DeadlockError, OutOfSyncError
from distribute_jax._mesh import DATA
from distribute_jax._user_frames import log_once
from distribute_jax.collectives._markers import mirrored_p, part_of_mean_p, unreduced_p
from distribute_jax.program._jaxprs import ClosedJaxpr, collectives, is_ref, line, name, open_jaxpr
from distribute_jax.program._replication_rules import (
    MIRRORED,
    RULES,
    Control,
    Mark as Mark,
    Outcome,
    call,
    cond,
    scan,
    union,
    while_loop,
)

DEADLOCK = """\
{collective} over "{axis}" may hang: not every replica is sure to reach it.
  the collective: {collective} at {where}
  decided by: {what}
  which may differ between replicas, because it depends on: {sources}
Every replica must run the same collectives equally often and in the same order; one that leaves \
one out keeps the others waiting for ever.
Reduce the predicate first, so that all replicas decide the same:
    dj.get_replica_context().all_reduce('sum', jnp.int32(pred)) > 0
or move the collective out of the branch or loop."""

REDUCED = """\
dj.Optimizer.update at {where} got gradients that are equal on every replica already, and would sum \
them: {replicas} times too large.
If they were combined before, pass update(model, grads, skip_gradients_aggregation=True). Otherwise \
they do not depend on the batch: pass the batch in args, from strategy.distribute_dataset."""


_ZEROS = (
    "dj.Optimizer.update at %s gets gradients that are all zero: the loss does not depend on the variables "
    "by which it is differentiated. In the loss function call its argument, not the model that is defined "
    "outside."
)


class Proof(NamedTuple):
    """What is known of a per-replica program."""

    marks: list[Mark]
    """Of each output: empty if it is the same on every replica."""
    diverging: tuple[str, ...]
    """What may send replicas through different branches, or through a loop differently often."""


def prove(jaxpr: Any, in_marks: Sequence[Mark], *, axis_size: int) -> Proof:
    """Finds which outputs of a per-replica program are the same on every replica.

    ``in_marks`` says for each input why it may differ. Returns the mark of each output: empty if it is proved
    mirrored, otherwise all that may make it differ, as ``axis_index at train.py:12``; and what makes replicas
    diverge, as ``the trip count of while at train.py:15``.
    """
    walk = Walk(axis_size)
    outs, _ = walk.run(jaxpr, in_marks, Control())
    walk.check_unreduced(jaxpr)
    return Proof(outs, tuple(walk.diverging))


class Walk:
    """One run of the pass; see :class:`distribute_jax.program._replication_rules.Walk`."""

    def __init__(self, axis_size: int) -> None:
        self.axis_size = axis_size
        # Holds the bodies too, so that no id is used twice.
        self._done: dict[Any, tuple[Any, list[Mark], list[Mark]]] = {}
        # Marks grow while loops are walked again, so what was seen is judged at the end.
        self._unreduced: dict[int, tuple[Any, Mark]] = {}
        self.diverging: dict[str, None] = {}

    def run(
        self, body: Any, marks: Sequence[Mark], control: Control
    ) -> tuple[list[Mark], list[Mark]]:
        """Returns the marks of the outputs of ``body``, and of its inputs after it ran."""
        if control.mark:
            self.diverging[control.what] = None
        key = id(body), tuple(marks), control
        if key not in self._done:
            self._done[key] = body, *self._run(body, marks, control)
        return self._done[key][1:]

    def _run(
        self, body: Any, marks: Sequence[Mark], control: Control
    ) -> tuple[list[Mark], list[Mark]]:
        jaxpr = open_jaxpr(body)
        if jaxpr.constvars and not isinstance(body, ClosedJaxpr):
            raise ValueError("an open jaxpr has constants that are nobody's")
        env = dict(zip(jaxpr.invars, marks, strict=True))
        for var, value in zip(jaxpr.constvars, getattr(body, "consts", ()), strict=True):
            # Two bodies may hold the same captured ref, and a write in one shows in the other.
            env[var] = frozenset({"a captured ref"}) if is_ref(var) else self.constant(value)

        def read(atom: Any) -> Mark:
            return self.constant(atom.val) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            outcome = self.apply(eqn, list(map(read, eqn.invars)), control)
            env.update(zip(eqn.outvars, outcome.outs, strict=True))
            for i, mark in outcome.writes.items():
                env[eqn.invars[i]] = mark
        return list(map(read, jaxpr.outvars)), [env[v] for v in jaxpr.invars]

    def constant(self, value: Any) -> Mark:
        """Returns the mark of a number or array that the program holds."""
        return MIRRORED

    def apply(self, eqn: Any, marks: list[Mark], control: Control) -> Outcome:
        """Returns the marks after one equation."""
        if eqn.primitive is mirrored_p:
            return Outcome([MIRRORED])
        if eqn.primitive is part_of_mean_p:
            return Outcome(marks)
        if eqn.primitive is unreduced_p:
            _, before = self._unreduced.get(id(eqn), (eqn, MIRRORED))
            self._unreduced[id(eqn)] = eqn, union([before, *marks])
            return Outcome(marks)
        rule = RULES.get(eqn.primitive.name)
        if rule is None:
            outcome = Outcome([union(marks)] * len(eqn.outvars)) if _is_plain(eqn) else None
        else:
            try:
                outcome = rule(self, eqn, marks, control)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError):
                outcome = None  # a form that another JAX version uses
        if outcome is None or len(outcome.outs) != len(eqn.outvars):
            return self._opaque(eqn, marks, control)
        return outcome

    def _opaque(self, eqn: Any, marks: list[Mark], control: Control) -> Outcome:
        """Anything may come out, and anything may be written to the refs that go in."""
        if control.mark:
            for collective in collectives(eqn, DATA):
                self.meet(collective, control)
        kind = name(eqn) if eqn.primitive.name in _SOURCES else f"{name(eqn)} (opaque)"
        mark = union([*marks, control.mark]) | {f"{kind} at {line(eqn)}"}
        refs = {i: mark for i, var in enumerate(eqn.invars) if is_ref(var)}
        return Outcome([mark] * len(eqn.outvars), refs)

    def check_unreduced(self, jaxpr: Any) -> None:
        """Raises where values about to be summed are mirrored already; logs once where all are zeros."""
        if self.axis_size == 1:
            return  # The sum is right.
        for eqn, mark in self._unreduced.values():
            if mark:
                continue
            if not _ZeroWalk(self, eqn).meets_zeros_only(jaxpr):
                raise OutOfSyncError(REDUCED.format(where=line(eqn), replicas=self.axis_size))
            log_once(_ZEROS, line(eqn), about=line(eqn))

    def meet(self, eqn: Any, control: Control) -> None:
        """Raises DeadlockError unless every replica is sure to reach the collective ``eqn``."""
        if control.mark:
            message = DEADLOCK.format(
                collective=name(eqn),
                axis=DATA,
                where=line(eqn, full_path=True),
                what=control.what,
                sources=", ".join(sorted(control.mark)),
            )
            raise DeadlockError(message)


_KEEPS_ZEROS = frozenset({
    "add", "add_any", "broadcast_in_dim", "concatenate", "convert_element_type", "copy",
    "mirrored", "neg", "optimization_barrier", "part_of_mean", "reduce_sum", "reshape", "squeeze",
    "stop_gradient", "sub", "transpose", "unreduced",
})  # fmt: skip
"""Operations that make zeros of zeros."""

_NOT_ZERO: Mark = frozenset({"another number than zero"})


class _ZeroWalk(Walk):
    """The pass with marks of what may be other than zero, up to the operands of one equation."""

    def __init__(self, walk: Walk, target: Any) -> None:
        super().__init__(walk.axis_size)
        self._target = target
        self._met: list[Mark] = []

    def meets_zeros_only(self, jaxpr: Any) -> bool:
        """Returns whether all operands of the equation are zeros wherever it runs."""
        self.run(jaxpr, [_NOT_ZERO] * len(jaxpr.jaxpr.invars), Control())
        return bool(self._met) and not any(self._met)

    def constant(self, value: Any) -> Mark:
        return _NOT_ZERO if isinstance(value, jax.Array) or np.any(value) else MIRRORED

    def apply(self, eqn: Any, marks: list[Mark], control: Control) -> Outcome:
        kind = eqn.primitive.name
        if eqn is self._target:
            self._met.append(union(marks))
        if RULES.get(kind) in (call, cond, scan, while_loop):
            return super().apply(eqn, marks, control)
        mark = union(marks) if kind in _KEEPS_ZEROS else _NOT_ZERO
        if kind in ("mul", "div"):
            mark = marks[0] if kind == "div" else marks[0] and marks[1]
        return Outcome([mark] * len(eqn.outvars))


_SOURCES = frozenset(
    {
        *("pure_callback", "io_callback", "buffer_callback", "ffi_call", "rng_uniform"),
        *("empty", "empty2", "empty_ref", "custom_partitioning", "pallas_call"),
    }
)
"""Well known to differ, or to be beyond proof: the message need not say that they are opaque."""

_PLAIN: frozenset[Primitive] = frozenset(
    p
    for p in vars(primitives).values()
    if isinstance(p, Primitive) and p.name not in _SOURCES | {"custom_lin"}
)
_PLAIN_NAMES = frozenset(
    {
        *("bcoo_extract", "bcoo_todense"),
        *("broadcast_to", "cholesky_update", "dim_as_value", "dimension_size", "from_edtype"),
        *("geqp3", "geqrf", "iota_2x32_shape", "layout_constraint", "lu_pivots_to_permutation"),
        *("mulhi", "ormqr", "philox2x32", "philox4x32", "platform_index", "pvary"),
        *("ragged_dot_general", "random_clone", "random_unwrap", "random_wrap", "real_rows"),
        *("relayout",),
        *("reshard", "scaled_dot", "split", "stack", "stage", "symmetric_product"),
        *("threefry4x32", "tie", "tile", "to_edtype", "unstack", "xla_metadata_value"),
        "zeros_like",
    }
)
"""Functions of their operands that ``jax.extend.core.primitives`` does not list."""


def _is_plain(eqn: Any) -> bool:
    """Returns whether equal operands give equal results, for all that the pass knows."""
    known = eqn.primitive in _PLAIN or eqn.primitive.name in _PLAIN_NAMES
    if not known or eqn.effects or "axis_name" in eqn.params:
        return False
    return not any(isinstance(p, (Jaxpr, ClosedJaxpr)) for p in eqn.params.values())
