"""Metrics whose state is not a sum: a rule combines their variables together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from distribute_jax._mesh import DATA
from distribute_jax.program._dataflow import Relation, relation
from distribute_jax.program._trace import Call, Traced

Combined = Callable[[Sequence[jax.Array], Sequence[jax.Array]], list[jax.Array]]
"""Takes a replica's new values and the old ones; runs inside ``shard_map``."""


@dataclass(frozen=True)
class MergeRule:
    """How the replicas' states of one type of metric become one."""

    parts: tuple[str, ...]
    """The attributes that hold the state, in the order in which ``combined`` takes them."""
    combined: Combined


@dataclass(frozen=True)
class Merge:
    """One metric that a step updates: a rule and the outputs that it is for."""

    outputs: tuple[int, ...]
    """Indices among the state outputs, one for each part."""
    combined: Combined


def moments_combined(new: Sequence[jax.Array], old: Sequence[jax.Array]) -> list[jax.Array]:
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
    nnx.metrics.Welford: MergeRule(("count", "mean", "m2"), moments_combined),
}
"""The rule of each type of metric; the nearest base class in this table decides."""


def register_merge(metric: type, rule: MergeRule) -> None:
    """Registers how the replicas' states of a type of metric, and of its subclasses, become one."""
    MERGE_BY_TYPE[metric] = rule


def written_metrics(call: Call, traced: Traced) -> Iterator[tuple[MergeRule, tuple[int, ...]]]:
    """Returns for each metric with a rule, the outputs of those of its parts that the step wrote."""
    places = {id(variable): i for i, variable in enumerate(call.binding.variables)}
    outputs = {index: output for output, index in _first_outputs(traced)}
    for ref in call.binding.nodes:
        rule = _rule_for(node := ref())
        parts = [places.get(id(getattr(node, part, None))) for part in rule.parts] if rule else []
        written = tuple(outputs[part] for part in parts if part in outputs)
        if rule and written:
            yield rule, written


def as_merge(traced: Traced, rule: MergeRule, outputs: tuple[int, ...]) -> Merge | None:
    """Returns the merge of a metric that was updated; None for one that was assigned, as by reset."""
    inputs = {output: traced.input_starts[index] for output, index in _first_outputs(traced)}
    jaxpr = traced.jaxpr.jaxpr
    updated = all(
        relation(jaxpr, output, inputs[output]) is not Relation.NONE for output in outputs
    )
    return Merge(outputs, rule.combined) if updated and len(outputs) == len(rule.parts) else None


def _first_outputs(traced: Traced) -> Iterator[tuple[int, int]]:
    """Returns the first output of each written variable, and the variable's index."""
    output = 0
    for index, size in zip(traced.written, traced.written_sizes, strict=True):
        yield output, index
        output += size


def _rule_for(node: object) -> MergeRule | None:
    return next((MERGE_BY_TYPE[c] for c in type(node).__mro__ if c in MERGE_BY_TYPE), None)
