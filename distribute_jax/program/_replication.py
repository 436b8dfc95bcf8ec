"""The proof of sync: which values of a traced step are equal on all replicas.

An abstract interpreter of the jaxpr gives each value a mark: empty if the value is proved mirrored,
else the sources that may make it differ, in words. What it does not know counts as a source, so a
missing rule gives a false alarm and never a false proof.

Mirrored means bitwise equal, provided that a device computes the same result from the same operands
every time. XLA on GPUs does not for scatter-add, unless ``--xla_gpu_deterministic_ops`` is set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr, Literal, Primitive, primitives

from distribute_jax._errors import DeadlockError, OutOfSyncError, log_once
from distribute_jax._mesh import DATA
from distribute_jax.collectives._markers import mirrored_p, part_of_mean_p, unreduced_p
from distribute_jax.program._jaxprs import ClosedJaxpr, collectives, is_ref, line, name, open_jaxpr
from distribute_jax.program._replication_rules import (
    MIRRORED,
    RULES,
    Control,
    Mark as Mark,
    Marks,
    Ref,
    call,
    cond,
    mixed,
    scan,
    union,
    while_loop,
)

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

REDUCED = """\
dj.Optimizer.update at {where} got gradients that are already equal on every replica; their sum would \
be {replicas} times too large.
If they were combined before, pass update(model, grads, skip_gradients_aggregation=True). Otherwise \
they do not depend on the batch: pass the batch in args, from strategy.distribute_dataset."""

_ZEROS = (
    "dj.Optimizer.update at %s gets gradients that are all zero: the loss does not depend on the variables "
    "that it is differentiated by. In the loss function use its argument, not the model of the outer scope."
)


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
    walk = Walk(axis_size)
    outs = walk.run(jaxpr, in_marks, Control())
    walk.check_unreduced(jaxpr)
    return Proof(outs, tuple(walk.diverging))


Marked = tuple[Any, list[Mark], list[Mark]]
"""An equation, with the marks of its operands and of its results."""


class Walk:
    """The abstract interpreter."""

    def __init__(self, axis_size: int) -> None:
        self.axis_size = axis_size
        # Values hold the bodies, so that no id is reused.
        self._cache: dict[Any, tuple[Any, list[Mark]]] = {}
        # Checked at the end: marks grow while a loop is walked again.
        self._unreduced: dict[int, tuple[Any, Mark]] = {}
        self.diverging: dict[str, None] = {}

    def run(self, body: Any, marks: Marks, control: Control) -> list[Mark]:
        """Returns the marks of the outputs of ``body``."""
        if control.mark:
            self.diverging[control.what] = None
        if any(isinstance(mark, Ref) for mark in marks):  # to which it may write
            return self._run(body, marks, control)
        key = id(body), tuple(marks), control
        if key not in self._cache:
            self._cache[key] = body, self._run(body, marks, control)
        return self._cache[key][1]

    def _run(self, body: Any, marks: Marks, control: Control) -> list[Mark]:
        jaxpr = open_jaxpr(body)
        if jaxpr.constvars and not isinstance(body, ClosedJaxpr):
            raise ValueError("an open jaxpr has constants without values")
        env = {
            var: Ref(mark) if is_ref(var) and not isinstance(mark, Ref) else mark
            for var, mark in zip(jaxpr.invars, marks, strict=True)
        }
        for var, value in zip(jaxpr.constvars, getattr(body, "consts", ()), strict=True):
            # Several bodies may hold the same captured ref, and write to it.
            captured = Ref(frozenset({"a captured ref"})) if is_ref(var) else None
            env[var] = captured or self.constant(value)

        for _ in self.equations(jaxpr, env, control):
            pass
        return [self._read(v, env) for v in jaxpr.outvars]

    def equations(self, jaxpr: Any, env: dict[Any, Any], control: Control) -> Iterator[Marked]:
        """Yields each equation with the marks of its operands and results, which are added to ``env``."""
        for eqn in jaxpr.eqns:
            operands = [self._read(v, env) for v in eqn.invars]
            outs = self.apply(eqn, operands, control)
            env.update(zip(eqn.outvars, outs, strict=True))
            yield eqn, operands, outs

    def _read(self, atom: Any, env: dict[Any, Any]) -> Any:
        return self.constant(atom.val) if isinstance(atom, Literal) else env[atom]

    def constant(self, value: Any) -> Mark:
        return MIRRORED

    def apply(self, eqn: Any, marks: list[Any], control: Control) -> list[Mark]:
        """Returns the marks after one equation."""
        if eqn.primitive is mirrored_p:
            return [MIRRORED]
        if eqn.primitive is part_of_mean_p:
            return marks
        if eqn.primitive is unreduced_p:
            _, before = self._unreduced.get(id(eqn), (eqn, MIRRORED))
            self._unreduced[id(eqn)] = eqn, union([before, *marks])
            return marks
        rule = RULES.get(eqn.primitive.name)
        if rule is None:
            outs = mixed(eqn, marks) if _is_plain(eqn) else None
        else:
            try:
                outs = rule(self, eqn, marks, control)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError):
                outs = None  # a form of another JAX version
        if outs is None or len(outs) != len(eqn.outvars):
            return self._opaque(eqn, marks, control)
        return outs

    def _opaque(self, eqn: Any, marks: list[Any], control: Control) -> list[Mark]:
        """Returns the marks after an unknown equation, which may write anything to its refs."""
        if control.mark:
            for collective in collectives(eqn, DATA):
                self.meet(collective, control)
        kind = name(eqn) if eqn.primitive.name in _SOURCES else f"{name(eqn)} (opaque)"
        mark = union([*marks, control.mark]) | {f"{kind} at {line(eqn)}"}
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
            if not _ZeroWalk(self.axis_size, eqn).finds_zeros(jaxpr):
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
"""Operations that return zeros for zeros."""

_NOT_ZERO: Mark = frozenset({"not zero"})


class _ZeroWalk(Walk):
    """Interprets with marks of values that may not be zero."""

    def __init__(self, axis_size: int, target: Any) -> None:
        super().__init__(axis_size)
        self._target = target
        self._operands: list[Mark] = []

    def finds_zeros(self, jaxpr: Any) -> bool:
        """True if all operands of the target equation are zeros wherever it runs."""
        self.run(jaxpr, [_NOT_ZERO] * len(jaxpr.jaxpr.invars), Control())
        return bool(self._operands) and not any(self._operands)

    def constant(self, value: Any) -> Mark:
        return _NOT_ZERO if isinstance(value, jax.Array) or np.any(value) else MIRRORED

    def apply(self, eqn: Any, marks: list[Any], control: Control) -> list[Mark]:
        kind = eqn.primitive.name
        if eqn is self._target:
            self._operands.append(union(marks))
        if RULES.get(kind) in (call, cond, scan, while_loop):
            return super().apply(eqn, marks, control)
        mark = union(marks) if kind in _KEEPS_ZEROS else _NOT_ZERO
        if kind in ("mul", "div"):
            mark = marks[0] if kind == "div" else marks[0] and marks[1]
        return [mark] * len(eqn.outvars)


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
