"""Decides from the proof how state is combined and which results are mirrored, and refuses unsafe steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from distribute_jax._errors import ArgumentError, OutOfSyncError
from distribute_jax._mesh import num_replicas
from distribute_jax._messages import is_array, is_number, listed
from distribute_jax._values import PerReplica, Share
from distribute_jax.program._aggregation import (
    Combine,
    Combined,
    Relation,
    dtype_error,
    is_unchanged,
    keeps_own_values,
    merge_rule_of,
    relation,
    rule_for,
)
from distribute_jax.program._notices import Notice, notices_of
from distribute_jax.program._options import RunOptions
from distribute_jax.program._replication import MIRRORED, Mark, prove
from distribute_jax.program._trace import Call, Traced, state_outputs
from distribute_jax.variables import Variable, VariableAggregation


@dataclass(frozen=True)
class Merge:
    """A metric that a step updates."""

    outputs: tuple[int, ...]
    """Indices of its parts among the state outputs."""
    combined: Combined


@dataclass(frozen=True)
class Plan:
    """How the lowered program combines each output."""

    combine: tuple[Combine, ...]
    """For each output that is state."""
    mirrored: tuple[bool, ...]
    """For each array of the result: whether it is equal on all replicas."""
    merges: tuple[Merge, ...] = ()
    """State outputs that are combined jointly."""
    notices: tuple[Notice, ...] = ()
    """Notices about the step, each logged once."""
    shares: tuple[Share, ...] = ()
    """For each array of the result: what each replica's part of it is."""
    diverging: tuple[str, ...] = ()
    """Predicates and trip counts that may differ between replicas."""


_UNKNOWN: tuple[Share, ...] = ("",)


def plan(call: Call, traced: Traced, options: RunOptions, before: list[Mark] | None = None) -> Plan:
    """Proves what is mirrored, and raises if state or a model-shaped result would diverge.

    ``before`` replaces the usual marks of the inputs, as for workers of parameter servers: each runs a step
    of one replica, and the state that they share must be combined too.
    """
    state = len(traced.old_inputs)
    results = len(traced.jaxpr.jaxpr.outvars) - state
    replicas = num_replicas(call.mesh)
    if replicas == 1 and before is None:
        rules = tuple(
            Combine.OWN if keeps_own_values(variable) else Combine.MIRRORED
            for variable, *_ in state_outputs(call, traced)
        )
        return Plan(rules, (True,) * results, shares=_UNKNOWN * results)
    before = input_marks(call, traced) if before is None else before
    marks, diverging = prove(traced.jaxpr, before, axis_size=replicas)
    special, merges = _of_metrics(call, traced)
    combine = _combine(call, traced, marks, options, special)
    mirrored = tuple(not mark for mark in marks[state:])
    if options.check_sync:
        _check_model_shaped(call, traced, marks[state:])
    if replicas == 1:
        return Plan(combine, mirrored, shares=_UNKNOWN * results)
    new_state = frozenset(k for part in model_shaped(call, traced) for k in part.results)
    notices = notices_of(call, traced, before, combine, options, new_state)
    return Plan(combine, mirrored, merges, *notices, diverging=diverging)


def input_marks(call: Call, traced: Traced, differing: int = 0) -> list[Mark]:
    """Returns the mark of each flat input.

    Per-replica arguments, ON_READ variables and the last ``differing`` arguments differ between replicas.
    """
    variables, arrays, _, counts = traced.sizes
    names, first = traced.input_names[variables + arrays :], len(call.arguments.data) - differing
    data = [
        frozenset({name}) if i >= first or isinstance(value, PerReplica) else MIRRORED
        for i, (name, value) in enumerate(zip(names, call.arguments.data, strict=False))
    ]
    state = [
        frozenset({f"{name}, of which each replica has its own"})
        if keeps_own_values(variable)
        else MIRRORED
        for variable, name in zip(call.binding.variables, call.binding.names, strict=True)
        for _ in jax.tree.leaves(variable.get_raw_value())
    ]
    return state + [MIRRORED] * arrays + data + [MIRRORED] * counts


def _of_metrics(call: Call, traced: Traced) -> tuple[dict[int, Combine], tuple[Merge, ...]]:
    """Returns the rules of outputs of metrics that have a rule, and the merges of those that were updated.

    A metric may also be assigned, as by ``reset``.
    """
    places = {id(variable): i for i, variable in enumerate(call.binding.variables)}
    sizes = (len(traced.inputs_of(index)) for index in traced.written)
    starts = itertools.accumulate(sizes, initial=0)
    outputs = dict(zip(traced.written, starts, strict=False))
    inputs = {output: traced.input_starts[index] for index, output in outputs.items()}
    joint = Combine.JOINT if num_replicas(call.mesh) > 1 else Combine.FIRST
    special, merges = dict[int, Combine](), list[Merge]()
    for ref in call.binding.nodes:
        rule = merge_rule_of(node := ref())
        parts = [places.get(id(getattr(node, part, None))) for part in rule.parts] if rule else []
        written = tuple(outputs[part] for part in parts if part in outputs)
        special |= {k: special.get(k, Combine.MIRRORED) for k in written}
        related = (relation(traced.jaxpr.jaxpr, k, inputs[k]) is not Relation.NONE for k in written)
        if rule and len(written) == len(rule.parts) and all(related):
            merges.append(Merge(written, rule.combined))
            special |= dict.fromkeys(written, joint)
    return special, tuple(merges)


def _combine(
    call: Call,
    traced: Traced,
    marks: Sequence[Mark],
    options: RunOptions,
    special: Mapping[int, Combine],
) -> tuple[Combine, ...]:
    """Returns the rule of each state output, and raises for those that would diverge.

    ``special`` are the rules of outputs that belong to a metric with a rule.
    """
    drifting, reset, streams, refused = (list[str]() for _ in range(4))
    jaxpr, rules = traced.jaxpr.jaxpr, list[Combine]()
    for output, (variable, name, old, beside) in enumerate(state_outputs(call, traced)):
        mark, dtype = marks[output], jaxpr.outvars[output].aval.dtype
        rule, to_old = special.get(output, rule_for(variable)), Relation.PLUS
        if rule is Combine.INCREMENTS or isinstance(variable, nnx.metrics.MetricState):
            to_old = relation(jaxpr, output, old, beside)
        rule = _simplified(rule, to_old, mark, dtype, options)
        if rule is Combine.MIRRORED and mark:
            if isinstance(variable, nnx.RngKey) and is_unchanged(jaxpr, output, old):
                rule = Combine.UNCHANGED
            else:
                lines = reset if to_old is Relation.NONE else drifting
                lines = streams if isinstance(variable, nnx.RngState) else lines
                lines.append(_drift(name, variable, mark, to_old))
        if why := dtype_error(rule, dtype):
            if mark:
                refused.append(f"{name} ({type(variable).__name__}, {dtype}): {why}.")
            rule = Combine.MIRRORED
        rules.append(rule)
    for text, lines in ((_DRIFT, drifting), (_STREAMS, streams), (_RESET, reset)):
        if lines and options.check_sync:
            raise OutOfSyncError(text.format(replicas=_number(call), lines=listed(lines)))
    if refused:
        raise ArgumentError(_DTYPE.format(lines=listed(refused)))
    return tuple(rules)


def _simplified(
    rule: Combine, to_old: Relation, mark: Mark, dtype: Any, options: RunOptions
) -> Combine:
    """Returns the rule for a new value that has a relation to the old one, and may be mirrored."""
    if rule is Combine.INCREMENTS and not to_old.is_plus:
        # A dtype that cannot be summed is refused later, with a better message.
        return rule if dtype_error(rule, dtype) else Combine.MIRRORED
    if rule in (Combine.MEAN, Combine.FIRST) and not mark:
        return Combine.MIRRORED
    equal = rule is Combine.INCREMENTS and not mark and options.check_sync
    return Combine.EQUAL_INCREMENTS if equal else rule


def _number(call: Call) -> int | str:
    """Returns the number of replicas for a message; that of workers may change."""
    replicas = num_replicas(call.mesh)
    return replicas if replicas > 1 else "N"


def _drift(name: str, variable: nnx.Variable[Any], mark: Mark, to_old: Relation) -> str:
    line = f"{name} ({type(variable).__name__}) depends on {_sources(mark)}"
    if isinstance(variable, Variable) and variable.aggregation is VariableAggregation.NONE:
        return f"{line}, {_NO_AGGREGATION}"
    if isinstance(variable, nnx.Cache):
        return f"{line}, {_CACHE}"
    return f"{line}, {_NOT_ADDED}" if to_old is Relation.OTHER else line


_NO_AGGREGATION = (
    "and has no aggregation: make it with dj.Variable(…, aggregation=…), as SUM or MEAN"
)
_CACHE = (
    "and has rows of this replica's examples: decode with a copy, nnx.clone(module), and return its cache, "
    "nnx.to_pure_dict(nnx.state(copy, nnx.Cache)), to pass it to the next step"
)
_NOT_ADDED = (
    "and is not its old value plus something, so the replicas' changes cannot be added up: "
    "combine the numbers before, as with all_reduce, or keep them in a dj.Variable"
)


_PAIRS = """\
  grads = dj.get_replica_context().all_reduce("sum", grads)   # the loss is dj.compute_average_loss(losses)
  grads = dj.get_replica_context().all_reduce("mean", grads)  # the loss is a mean over this replica's \
examples
The wrong one of the two trains with gradients {replicas} times too large or too small."""

_DRIFT = f"""\
The step would leave these variables different on each of the {{replicas}} replicas:
{{lines}}
They must be equal on all replicas, or each one trains a different model. Usually the gradients were not \
combined. Before the update write one of
{_PAIRS} dj.Optimizer does the first by itself: update(model, grads) sums them. A value that you know to \
be equal goes through dj.assume_mirrored(value); RunOptions(check_sync=False) turns the proof off."""

_STREAMS = """\
The step would leave these random streams different on each of the {replicas} replicas:
{lines}
Inside run the replica id is folded into the key of a stream, so that each replica draws its own numbers, \
while the stored key stays the same on all; what is made of that key cannot be stored. Draw with \
key = rngs.dropout(), which advances the stream equally everywhere; reseed it outside of run, \
nnx.reseed(model, dropout=seed); or let it draw the same on all with dj.same_on_all_replicas(rngs.dropout)."""

_DTYPE = """\
The replicas' values of these variables cannot be combined in their dtype:
{lines}"""

_RESET = """\
The step gives these parts of a metric a new value that does not depend on the old one, as reset() does \
before update(), so the replicas' updates cannot be added to it:
{lines}
A metric's state is what all replicas added to it, so reset a metric outside of run, metric.reset(), or in \
a separate step, strategy.run(metric.reset), and only call metric.update(...) in this one."""

_MODEL_SHAPED = f"""\
The step returns {{what}}, which has the structure and shapes of {{argument}}, an argument that came in \
equal on every replica, but it would come back as {{replicas}} different ones:
{{lines}}
If these are weights, combine the gradients before the update, with one of
{_PAIRS} Statistics, such as Linen's batch_stats, take all_reduce("mean", batch_stats). Rows of this \
replica's examples, as in a cache for decoding, start as an array of each replica: \
strategy.experimental_distribute_values_from_function(lambda context: cache). If different values are what \
you want, use RunOptions(check_sync=False)."""


def _sources(mark: Mark) -> str:
    names = sorted(mark)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


class ModelShaped(NamedTuple):
    """A part of the result that is the new value of a mirrored argument."""

    argument: str
    """The argument's name, as ``args[0]``."""
    what: str
    """The name of that part of the result."""
    results: list[int]
    """Indices of its arrays in the result."""
    leaves: list[Leaf]
    """The leaf of the argument for each of them."""


def model_shaped(call: Call, traced: Traced) -> Iterator[ModelShaped]:
    """Yields the parts of the result with the structure and shapes of a mirrored argument."""
    avals = [var.aval for var in traced.jaxpr.jaxpr.outvars[len(traced.old_inputs) :]]
    template, other = traced.results, object()
    leaves = [k if kind == "array" else other for kind, k in template.leaves]
    tree = jax.tree.unflatten(template.treedef, leaves)
    for argument, structure, wanted in _mirrored_arguments(call):

        def matches(part: Any, structure: Any = structure) -> bool:
            return bool(jax.tree.structure(part) == structure)

        for path, part in jax.tree.leaves_with_path(tree, is_leaf=matches):
            arrays = [k for k in jax.tree.leaves(part) if k is not other]
            is_new = matches(part) and len(arrays) == len(wanted)
            if is_new and all(leaf.fits(avals[k]) for leaf, k in zip(wanted, arrays, strict=True)):
                yield ModelShaped(argument, "result" + jax.tree_util.keystr(path), arrays, wanted)


def _check_model_shaped(call: Call, traced: Traced, marks: Sequence[Mark]) -> None:
    """Raises OutOfSyncError for a per-replica result that is the new value of a mirrored argument."""
    for argument, what, results, leaves in model_shaped(call, traced):
        lines = [
            f"{traced.results.names[k]} depends on {_sources(marks[k])}"
            for k, leaf in zip(results, leaves, strict=True)
            if marks[k] and not leaf.per_replica
        ]
        if lines:
            facts = {"what": what, "argument": argument, "replicas": _number(call)}
            raise OutOfSyncError(_MODEL_SHAPED.format(**facts, lines=listed(lines)))


class Leaf(NamedTuple):
    """A leaf of an argument, on one replica."""

    shape: tuple[int, ...]
    dtype: Any
    """None for a Python number."""
    per_replica: bool
    position: int
    """Its index among the leaves of the call."""

    def fits(self, aval: Any) -> bool:
        """True if an output has this shape and dtype."""
        return bool(self.shape == aval.shape and self.dtype in (None, aval.dtype))


def _leaf(leaf: Any, position: int) -> Leaf:
    per_replica = isinstance(leaf, PerReplica)
    shape = leaf.part_shape if per_replica else jnp.shape(leaf)
    return Leaf(shape, getattr(leaf, "dtype", None), per_replica, position)


def _mirrored_arguments(call: Call) -> Iterator[tuple[str, Any, list[Leaf]]]:
    """Yields name, structure and leaves of each argument that is a pytree with mirrored arrays.

    Some leaves may be per-replica, such as local batch statistics.
    """
    arguments = call.arguments
    args, kwargs = jax.tree.unflatten(arguments.treedef, arguments.leaves)
    positions = jax.tree.unflatten(arguments.treedef, list(range(len(arguments.leaves))))
    named = [(f"args[{i}]", value, positions[0][i]) for i, value in enumerate(args)]
    named += [(f"kwargs[{k!r}]", value, positions[1][k]) for k, value in kwargs.items()]
    for name, value, at in named:
        leaves, structure = jax.tree.flatten(value, is_leaf=lambda x: isinstance(x, PerReplica))
        arrays = all(is_array(x) or is_number(x) or isinstance(x, PerReplica) for x in leaves)
        if not arrays or jax.tree_util.treedef_is_leaf(structure):
            continue
        wanted = list(map(_leaf, leaves, jax.tree.leaves(at)))
        has_mirrored = any(leaf.shape and not leaf.per_replica for leaf in wanted)
        if len(wanted) == len(leaves) and has_mirrored:
            yield name, structure, wanted
