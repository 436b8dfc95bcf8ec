"""How the values of a variable are combined: by its type, and by how a step changed its old value."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from flax import nnx

from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import DATA
from distribute_jax.collectives._reduction import as_dtype, wide
from distribute_jax.program._jaxprs import ClosedJaxpr, consts_and_carries
from distribute_jax.program._walk import IDENTITIES, STRUCTURE, Marks, Rule, Walk, scan
from distribute_jax.variables import Variable, VariableAggregation, first_replica


class Combine(enum.Enum):
    """How a variable that a step wrote is combined when the step ends."""

    MIRRORED = "mirrored"
    """It must end equal on every replica; anything else is an error."""
    MEAN = "mean"
    """The replicas' values are averaged."""
    INCREMENTS = "increments"
    """What each replica added is summed: ``new = old + Σ(new_r - old)``."""
    EQUAL_INCREMENTS = "equal increments"
    """The same if every replica added the same, so that no all-reduce is needed."""
    UNCHANGED = "unchanged"
    """It keeps its old value: the step stored a value that only passed through, such as a random key."""
    FIRST = "first"
    """Every replica gets the value of replica 0."""
    OWN = "own"
    """Each replica keeps its own value; they are combined when read outside of ``run``."""
    JOINT = "joint"
    """It is combined together with the other variables of its metric, by the metric's rule."""


FROM_OLD = frozenset({Combine.INCREMENTS, Combine.EQUAL_INCREMENTS, Combine.UNCHANGED})
"""The rules that read the old value."""


BY_TYPE: dict[type[nnx.Variable], Combine] = {  # type: ignore[type-arg]
    nnx.Variable: Combine.MIRRORED,
    nnx.BatchStat: Combine.MEAN,
    nnx.metrics.MetricState: Combine.INCREMENTS,
}
"""The rule of each variable type; the nearest base class in this table decides."""


_BY_NAME = {
    VariableAggregation.NONE: Combine.MIRRORED,
    VariableAggregation.SUM: Combine.INCREMENTS,
    VariableAggregation.MEAN: Combine.MEAN,
    VariableAggregation.ONLY_FIRST_REPLICA: Combine.FIRST,
}


def register_aggregation(
    variable_type: type[nnx.Variable[Any]], aggregation: VariableAggregation
) -> None:
    """Registers how the replicas' values of a type of variable are combined at the end of a step.

    The rule applies to the type and to its subclasses that are not registered themselves. Initially the
    rule of ``nnx.Variable`` (parameters, optimizer state, random state) is NONE, that of ``nnx.BatchStat``
    MEAN, and that of ``nnx.metrics.MetricState`` SUM. Register before the first ``run`` that uses the type.

    Args:
        variable_type: a subclass of ``nnx.Variable``.
        aggregation: NONE: the replicas must end with the same value, which is proved. SUM: what the
            replicas added is summed; the step must add to the old value. MEAN: the mean of the values.
            ONLY_FIRST_REPLICA: the value of replica 0.

    Raises:
        ValueError: ``variable_type`` is not a type of variable, or is a ``dj.Variable``; ``aggregation`` is
            not a ``dj.VariableAggregation``.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> from flax import nnx
        >>> class Statistic(nnx.Variable): pass
        >>> dj.register_aggregation(Statistic, dj.VariableAggregation.MEAN)
        >>> strategy = dj.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     seen = Statistic(jnp.zeros(()))
        >>> def step():
        ...     seen[...] = dj.get_replica_context().replica_id_in_sync_group.astype(float)
        >>> strategy.run(step)
        >>> float(seen[...])
        0.5
    """
    is_type = isinstance(variable_type, type) and issubclass(variable_type, nnx.Variable)
    if not is_type or not isinstance(aggregation, VariableAggregation):
        raise ArgumentError(
            f"register_aggregation got {variable_type!r} and {aggregation!r}. It takes a subclass of "
            "nnx.Variable and a dj.VariableAggregation."
        )
    if issubclass(variable_type, Variable):
        raise ArgumentError(
            f"register_aggregation got {variable_type.__name__}, a dj.Variable, whose writes are combined "
            "by its own aggregation already; a second rule would count them twice. Make the variable "
            f"with aggregation=dj.VariableAggregation.{aggregation.name} instead."
        )
    BY_TYPE[variable_type] = _BY_NAME[aggregation]


def rule_for(variable: nnx.Variable[Any]) -> Combine:
    """Returns the rule for a variable: that of its nearest base class in the table."""
    if keeps_own_values(variable):
        return Combine.OWN
    if isinstance(variable, Variable):
        return Combine.MIRRORED  # its writes were combined when they happened
    return next(BY_TYPE[cls] for cls in type(variable).__mro__ if cls in BY_TYPE)


def keeps_own_values(variable: nnx.Variable[Any]) -> bool:
    """True if the raw value of a variable is a stack of one component for each replica."""
    return isinstance(variable, Variable) and variable.is_on_read


def dtype_error(rule: Combine, dtype: Any) -> str:
    """Returns why a rule cannot combine replicas' values of a dtype; empty if it can."""
    if rule is Combine.MEAN and not jnp.issubdtype(dtype, jnp.inexact):
        return (
            f"the replicas' values are averaged, and the mean of {dtype} is not {dtype}. Keep it in a "
            "floating dtype, combine it in the step as with all_reduce, or register the type with "
            "dj.VariableAggregation.SUM or ONLY_FIRST_REPLICA"
        )
    sums = rule in (Combine.INCREMENTS, Combine.EQUAL_INCREMENTS)
    if sums and not jnp.issubdtype(dtype, jnp.number):
        return (
            f"such state is the sum of what all replicas added, and {dtype} cannot be summed. Keep it in an "
            "integer or floating dtype, as a count, or in a dj.Variable with "
            "aggregation=dj.VariableAggregation.ONLY_FIRST_REPLICA"
        )
    return ""


def combined(rule: Combine, new: jax.Array, old: jax.Array) -> jax.Array:
    """Combines the replicas' values of one leaf; runs inside ``shard_map``."""
    if rule is Combine.MEAN:
        # A sum of float16 values overflows long before their mean does.
        return jnp.asarray(jax.lax.pmean(as_dtype(new, wide(new.dtype)), DATA), new.dtype)
    if rule is Combine.INCREMENTS:
        old = jnp.asarray(old, new.dtype)
        return jnp.add(old, jax.lax.psum(new - old, DATA))
    if rule is Combine.EQUAL_INCREMENTS:
        old = jnp.asarray(old, new.dtype)
        added = new - old
        # psum of a constant needs no all-reduce. The cast wraps around as the sum would.
        return old + added * jnp.asarray(jax.lax.psum(1, DATA)).astype(added.real.dtype)
    if rule is Combine.UNCHANGED:
        return old
    if rule is Combine.FIRST:
        return first_replica(new)
    # A constant that a step writes arrives as a plain number.
    return jnp.asarray(new)[None] if rule is Combine.OWN else new


# Metrics whose state is not a sum: a rule combines all their variables together.

Combined = Callable[[Sequence[jax.Array], Sequence[jax.Array]], list[jax.Array]]
"""Takes a replica's new values and the old ones; runs inside ``shard_map``."""


@dataclass(frozen=True)
class MergeRule:
    """How the replicas' states of one type of metric are merged."""

    parts: tuple[str, ...]
    """The attributes that hold the state, in the order in which ``combined`` takes them."""
    combined: Combined


def combine_moments(new: Sequence[jax.Array], old: Sequence[jax.Array]) -> list[jax.Array]:
    """Merges what each replica added to a count, a mean and the squared deviations from it.

    Sums about one point add: those of a replica are ``n (mean - point)`` and
    ``m2 + n (mean - point)²``, and what it added is their change. The old mean is the point for the
    first sum and the new mean for the second, so neither subtracts large numbers that are nearly equal.

    Args:
        new: counts (one or several that add up), mean and m2 of this replica.
        old: the same before the step, mirrored.

    Source: T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances", 1979, http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf
    """
    *counts, mean, m2 = new
    *old_counts, old_mean, old_m2 = old
    added = [n - o.astype(n.dtype) for n, o in zip(counts, old_counts, strict=True)]
    size, old_size = _size(counts, mean), _size(old_counts, mean)
    added, shift = jax.lax.psum((added, size * (mean - old_mean)), DATA)
    totals = [o.astype(a.dtype) + a for o, a in zip(old_counts, added, strict=True)]
    total = _size(totals, mean)
    point = old_mean + jnp.where(total > 0, shift / jnp.where(total > 0, total, 1), 0)
    before = old_m2 + old_size * (old_mean - point) ** 2
    change = m2 + size * (mean - point) ** 2 - before
    return [*totals, point, before + jax.lax.psum(change, DATA)]


def _size(counts: Sequence[jax.Array], like: jax.Array) -> jax.Array:
    return sum((c.astype(like.dtype) for c in counts), jnp.zeros_like(like))


MERGE_BY_TYPE: dict[type, MergeRule] = {
    nnx.metrics.Welford: MergeRule(("count", "mean", "m2"), combine_moments)
}
"""The rule of each type of metric; the nearest base class in this table decides."""


def register_merge(metric: type, rule: MergeRule) -> None:
    """Registers how the replicas' states of a type of metric, and of its subclasses, are merged."""
    MERGE_BY_TYPE[metric] = rule


def merge_rule_of(node: object) -> MergeRule | None:
    """Returns the merge rule of a metric, if it has one."""
    return next((MERGE_BY_TYPE[c] for c in type(node).__mro__ if c in MERGE_BY_TYPE), None)


class Relation(enum.Enum):
    """How a value depends on the old value of a variable."""

    NONE = "does not depend on it"
    SAME = "it itself, or the replica's key of it"
    PLUS = "it plus something that does not depend on it"
    OTHER = "depends on it in another way"

    @property
    def is_plus(self) -> bool:
        """True if the value is the old one plus something, or plus nothing."""
        return self in (Relation.SAME, Relation.PLUS)


_NONE, _SAME, _PLUS, _OTHER = Relation

FOLD = "fold_replica_id"
"""The name of the jitted function that makes each replica's key of a stored one."""

_RESHAPES = frozenset({"broadcast_in_dim", "reshape", "squeeze"})
"""They keep every number in its place if they only add or drop dims of size 1."""


def relation(jaxpr: jex_core.Jaxpr, output: int, old: int, beside: Sequence[int] = ()) -> Relation:
    """Returns how an output depends on the input ``old``, which holds its old value.

    ``beside`` are the inputs with other parts of the same variable, which must not contribute.
    """
    start = [_OTHER if i in beside else _NONE for i in range(len(jaxpr.invars))]
    start[old] = _SAME
    before: Any = jaxpr.invars[old].aval
    after: Any = jaxpr.outvars[output].aval
    closed = ClosedJaxpr(jaxpr, [None] * len(jaxpr.constvars))
    result: Relation = _RelationWalk(before.dtype, after.dtype).run(closed, start)[output]
    return _OTHER if result is _PLUS and before.shape != after.shape else result


def is_unchanged(jaxpr: jex_core.Jaxpr, output: int, old: int) -> bool:
    """True if an output is an input, or the replica's key of it, on every path; False if unsure."""
    return relation(jaxpr, output, old) is _SAME


def is_sum_of_old(jaxpr: jex_core.Jaxpr, output: int, old: int) -> bool:
    """True if an output is a sum over the replicas of its old value plus something."""
    var: Any = jaxpr.outvars[output]
    eqn = next((eqn for eqn in jaxpr.eqns if any(out is var for out in eqn.outvars)), None)
    if eqn is None or eqn.primitive.name != "psum":
        return False
    return relation(jaxpr.replace(outvars=[eqn.invars[eqn.outvars.index(var)]]), 0, old).is_plus


class _RelationWalk(Walk):
    """Follows the old value of a variable, whose dtypes before and after the step are ``old`` and ``new``."""

    def __init__(self, old: Any, new: Any) -> None:
        super().__init__()
        self.old, self.new = old, new

    def constant(self, value: Any) -> Relation:
        return _NONE

    def joined(self, eqn: Any, one: Relation, other: Relation) -> Relation:
        if one is other:
            return one
        return _PLUS if {one, other} == {_SAME, _PLUS} else _OTHER

    def decided(self, eqn: Any, by: Relation, outs: Marks) -> Marks:
        return outs if by is _NONE else [_OTHER] * len(outs)

    def shifted(self, mark: Relation, by: int) -> Relation:
        return _moved(mark)

    def apply(self, eqn: Any, marks: Marks) -> Marks:
        name, count = eqn.primitive.name, len(eqn.outvars)
        if all(mark is _NONE for mark in marks):
            return [_NONE] * count
        if eqn.params.get("name") == FOLD:
            return [_SAME if _SAME in marks else _OTHER] * count
        if name in IDENTITIES:
            return marks
        if rule := _STRUCTURE.get(name):
            return self.by_rule(rule, eqn, marks) or [_OTHER] * count
        return [_PLUS if self._is_plus(eqn, marks) else _OTHER] * count

    def _is_plus(self, eqn: Any, operands: list[Relation]) -> bool:
        name = eqn.primitive.name
        plus = [r.is_plus for r in operands]
        none = [r is _NONE for r in operands]
        if name == "convert_element_type":
            return plus[0] and self._allows_cast(
                eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
            )
        if name in _RESHAPES:
            return plus == [True] and _keeps_places(eqn)
        if name in ("add", "add_any"):
            return any(plus) and any(none)
        if name in ("sub", "scatter-add"):
            return plus[0] and all(none[1:])
        return name == "select_n" and none[0] and all(plus[1:])

    def _allows_cast(self, before: Any, after: Any) -> bool:
        """True if "old plus something" is still that after a cast, except for the rounding of a sum.

        The increment is found by subtracting the old value, cast to the new dtype. So no cast on the
        way may lose more of the old value than that one does.
        """
        if jnp.issubdtype(before, jnp.inexact) and not jnp.issubdtype(after, jnp.inexact):
            return False  # Each replica's term would be rounded to an integer by itself.
        if jnp.issubdtype(after, jnp.bool_):
            return bool(before == after)
        return bool(after == self.new or np.can_cast(self.old, after))


def _keeps_places(eqn: Any) -> bool:
    """True if the dims above size 1 stay the same, in the same order."""
    if eqn.params.get("dimensions") is not None and eqn.primitive.name == "reshape":
        return False  # it transposes as well
    old, new = ([n for n in var.aval.shape if n != 1] for var in (eqn.invars[0], eqn.outvars[0]))
    return old == new


def _scan(walk: Walk, eqn: Any, marks: Marks) -> Marks | None:
    """A stacked output is related to the slices at its own index."""
    start, number = consts_and_carries(eqn)
    outs, end = scan(walk, eqn, marks), start + number
    if outs is None or all(mark is _NONE for mark in marks[end:]):
        return outs
    carries = [walk.joined(eqn, *pair) for pair in zip(marks[start:end], outs, strict=False)]
    inputs = [*map(_moved, marks[:start] + carries), *marks[end:]]
    return outs[:number] + walk.run(eqn.params["jaxpr"], inputs)[number:]


_STRUCTURE: dict[str, Rule] = {**STRUCTURE, "scan": _scan}


def _moved(relation: Relation) -> Relation:
    """Returns the relation of a value that is not in the old value's place."""
    return _NONE if relation is _NONE else _OTHER
