"""Decides from the proof how state is combined and which results are mirrored, and refuses unsafe steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from distribute_jax._errors import ArgumentError, OutOfSyncError
from distribute_jax._mesh import num_replicas
from distribute_jax._messages import is_array, is_number, listed
from distribute_jax._values import PerReplica
from distribute_jax.program._aggregation import (
    Combine,
    Combined,
    MergeRule,
    Relation,
    dtype_error,
    is_unchanged,
    keeps_own_values,
    merge_rule_of,
    relation,
    rule_for,
)
from distribute_jax.program._options import RunOptions
from distribute_jax.program._remarks import Notice, remarks
from distribute_jax.program._replication import Mark, prove
from distribute_jax.program._trace import Call, Traced, state_outputs
from distribute_jax.variables import Variable, VariableAggregation

_MIRRORED: Mark = frozenset()


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
    """Remarks about the step, each logged once."""
    parts: tuple[bool, ...] = ()
    """For each array of the result: whether it is a partial mean that has yet to be summed."""
    diverging: tuple[str, ...] = ()
    """Predicates and trip counts that may differ between replicas."""


def plan(
    call: Call, traced: Traced, options: RunOptions, before: Sequence[Mark] | None = None
) -> Plan:
    """Proves what is mirrored, and raises if state or a model-shaped result would diverge.

    ``before`` replaces the usual marks of the inputs, as for workers of parameter servers: each runs a step
    of one replica, and the state that they share must be combined too.
    """
    state = sum(traced.written_sizes)
    results = len(traced.jaxpr.jaxpr.outvars) - state
    replicas = num_replicas(call.mesh)
    if replicas == 1 and before is None:
        rules = tuple(
            Combine.OWN if keeps_own_values(variable) else Combine.MIRRORED
            for variable, *_ in state_outputs(call, traced)
        )
        return Plan(rules, (True,) * results, parts=(False,) * results)
    before = input_marks(call, traced) if before is None else before
    marks, diverging = prove(traced.jaxpr, before, axis_size=replicas)
    metrics = list(_written_metrics(call, traced))
    merges = tuple(m for rule, outs in metrics if (m := _as_merge(traced, rule, outs)) is not None)
    special = {k: Combine.MIRRORED for _, outputs in metrics for k in outputs}
    joint = Combine.JOINT if replicas > 1 else Combine.FIRST
    special |= {k: joint for merge in merges for k in merge.outputs}
    planned = list(_combine(call, traced, marks, options, special))
    combine = tuple(_with_dtypes(call, traced, marks, planned))
    mirrored = tuple(not mark for mark in marks[state:])
    if options.check_sync:
        _check_model_shaped(call, traced, marks[state:])
    if replicas == 1:
        return Plan(combine, mirrored, parts=(False,) * results)
    notices = remarks(call, traced, before, combine, options)
    return Plan(combine, mirrored, merges, *notices, diverging=diverging)


def input_marks(call: Call, traced: Traced, differing: int = 0) -> list[Mark]:
    """Returns the mark of each flat input.

    Per-replica arguments, ON_READ variables and the last ``differing`` arguments differ between replicas.
    """
    variables, arrays, _, counts = traced.sizes
    names, first = traced.input_names[variables + arrays :], len(call.arguments.data) - differing
    data = [
        frozenset({name}) if i >= first or isinstance(value, PerReplica) else _MIRRORED
        for i, (name, value) in enumerate(zip(names, call.arguments.data, strict=False))
    ]
    state = [
        frozenset({f"{name}, of which each replica has its own"})
        if keeps_own_values(variable)
        else _MIRRORED
        for variable, name in zip(call.binding.variables, call.binding.names, strict=True)
        for _ in jax.tree.leaves(variable.get_raw_value())
    ]
    return state + [_MIRRORED] * arrays + data + [_MIRRORED] * counts


def _written_metrics(call: Call, traced: Traced) -> Iterator[tuple[MergeRule, tuple[int, ...]]]:
    """Yields each metric that has a rule and was written, with the outputs of its parts."""
    places = {id(variable): i for i, variable in enumerate(call.binding.variables)}
    outputs = {index: output for output, index in _first_outputs(traced)}
    for ref in call.binding.nodes:
        rule = merge_rule_of(node := ref())
        parts = [places.get(id(getattr(node, part, None))) for part in rule.parts] if rule else []
        written = tuple(outputs[part] for part in parts if part in outputs)
        if rule and written:
            yield rule, written


def _as_merge(traced: Traced, rule: MergeRule, outputs: tuple[int, ...]) -> Merge | None:
    """Returns the merge of a metric that was updated; None if it was assigned, as by ``reset``."""
    inputs = {output: traced.input_starts[index] for output, index in _first_outputs(traced)}
    jaxpr = traced.jaxpr.jaxpr
    updated = all(
        relation(jaxpr, output, inputs[output]) is not Relation.NONE for output in outputs
    )
    return Merge(outputs, rule.combined) if updated and len(outputs) == len(rule.parts) else None


def _first_outputs(traced: Traced) -> Iterator[tuple[int, int]]:
    """Yields the first output of each written variable, and the variable's index."""
    output = 0
    for index, size in zip(traced.written, traced.written_sizes, strict=True):
        yield output, index
        output += size


def _combine(
    call: Call,
    traced: Traced,
    marks: Sequence[Mark],
    options: RunOptions,
    special: Mapping[int, Combine],
) -> Iterator[Combine]:
    """Yields the rule of each state output, and raises for those that would diverge.

    ``special`` are the rules of outputs that belong to a metric with a rule.
    """
    drifting: list[str] = []
    reset: list[str] = []
    streams: list[str] = []
    for output, (variable, name, old, beside) in enumerate(state_outputs(call, traced)):
        rule = special.get(output, rule_for(variable))
        to_old = Relation.PLUS
        if rule is Combine.INCREMENTS or isinstance(variable, nnx.metrics.MetricState):
            to_old = relation(traced.jaxpr.jaxpr, output, old, beside)
        # A dtype that cannot be summed is refused by ``_with_dtypes``, with a better message.
        unsummed = dtype_error(rule, traced.jaxpr.jaxpr.outvars[output].aval.dtype)
        if rule is Combine.INCREMENTS and to_old is not Relation.PLUS and not unsummed:
            rule = Combine.MIRRORED
        if rule is Combine.MIRRORED and marks[output]:
            if isinstance(variable, nnx.RngKey) and is_unchanged(traced.jaxpr.jaxpr, output, old):
                yield Combine.UNCHANGED
                continue
            lines = reset if to_old is Relation.NONE else drifting
            lines = streams if isinstance(variable, nnx.RngState) else lines
            lines.append(_drift(name, variable, marks[output], to_old))
        if rule in (Combine.MEAN, Combine.FIRST) and not marks[output]:
            rule = Combine.MIRRORED
        if rule is Combine.INCREMENTS and not marks[output] and options.check_sync:
            rule = Combine.EQUAL_INCREMENTS
        yield rule
    for text, lines in ((_DRIFT, drifting), (_STREAMS, streams), (_RESET, reset)):
        if lines and options.check_sync:
            raise OutOfSyncError(text.format(replicas=_number(call), lines=listed(lines)))


def _number(call: Call) -> int | str:
    """Returns the number of replicas for a message; that of workers may change."""
    replicas = num_replicas(call.mesh)
    return replicas if replicas > 1 else "N"


def _with_dtypes(
    call: Call, traced: Traced, marks: Sequence[Mark], rules: Sequence[Combine]
) -> Iterator[Combine]:
    """Refuses dtypes that a rule cannot combine, of values that differ between replicas."""
    refused: list[str] = []
    avals: list[Any] = [var.aval for var in traced.jaxpr.jaxpr.outvars]
    for output, (variable, name, *_) in enumerate(state_outputs(call, traced)):
        why = dtype_error(rules[output], avals[output].dtype)
        if why and marks[output]:
            kind = type(variable).__name__
            refused.append(f"{name} ({kind}, {avals[output].dtype}): {why}.")
        yield Combine.MIRRORED if why else rules[output]
    if refused:
        raise ArgumentError(_DTYPE.format(lines=listed(refused)))


def _drift(name: str, variable: nnx.Variable[Any], mark: Mark, to_old: Relation) -> str:
    line = f"{name} ({type(variable).__name__}) depends on {_sources(mark)}"
    if isinstance(variable, Variable) and variable.aggregation is VariableAggregation.NONE:
        line += (
            ", and has no aggregation: make it with dj.Variable(…, aggregation=…), as SUM or MEAN"
        )
    elif to_old is Relation.OTHER:
        line += (
            ", and is not its old value plus something, so the replicas' changes cannot be added up: "
            "combine the numbers before, as with all_reduce, or keep them in a dj.Variable"
        )
    return line


_PAIRS = """\
  grads = dj.get_replica_context().all_reduce("sum", grads)   # the loss is dj.compute_average_loss(losses)
  grads = dj.get_replica_context().all_reduce("mean", grads)  # the loss is a mean over this replica's \
examples
The wrong one of the two trains with gradients {replicas} times too large or too small."""

_DRIFT = f"""\
The step would leave these variables different on each of the {{replicas}} replicas:
{{lines}}
A variable must end mirrored, or the replicas train different models. Usually the gradients were not \
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
Combine the gradients first, with one of
{_PAIRS} Statistics, such as Linen's batch_stats, take all_reduce("mean", batch_stats). If different \
values are what you want, use RunOptions(check_sync=False)."""


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
    avals = [var.aval for var in traced.jaxpr.jaxpr.outvars[sum(traced.written_sizes) :]]
    template = traced.results
    tree = jax.tree.unflatten(
        template.treedef, [_ResultLeaf(kind, content) for kind, content in template.leaves]
    )
    for argument, structure, wanted in _mirrored_arguments(call):
        for what, subtree in _subtrees(tree, structure):
            leaves = [leaf.content for leaf in subtree if leaf.kind == "array"]
            if len(leaves) == len(wanted) and all(map(_fits, wanted, (avals[k] for k in leaves))):
                yield ModelShaped(argument, what, leaves, wanted)


def _check_model_shaped(call: Call, traced: Traced, marks: Sequence[Mark]) -> None:
    """Raises OutOfSyncError for a per-replica result that is the new value of a mirrored argument."""
    for argument, what, results, leaves in model_shaped(call, traced):
        bad = [
            f"{traced.results.names[k]} depends on {_sources(marks[k])}"
            for k, leaf in zip(results, leaves, strict=True)
            if marks[k] and not leaf.per_replica
        ]
        if bad:
            raise OutOfSyncError(
                _MODEL_SHAPED.format(
                    what=what, argument=argument, replicas=_number(call), lines=listed(bad)
                )
            )


@dataclass(frozen=True)
class _ResultLeaf:
    kind: str
    content: Any


class Leaf(NamedTuple):
    """A leaf of an argument, on one replica."""

    shape: tuple[int, ...]
    dtype: Any
    """None for a Python number."""
    per_replica: bool
    position: int
    """Its index among the leaves of the call."""


def _leaf(leaf: Any, position: int) -> Leaf:
    per_replica = isinstance(leaf, PerReplica)
    shape = leaf.part_shape if per_replica else jnp.shape(leaf)
    return Leaf(shape, getattr(leaf, "dtype", None), per_replica, position)


def _fits(wanted: Leaf, aval: Any) -> bool:
    """True if an output has the shape and dtype of a leaf."""
    return bool(wanted.shape == aval.shape and wanted.dtype in (None, aval.dtype))


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
        if leaves and arrays and not jax.tree_util.treedef_is_leaf(structure):
            wanted = list(map(_leaf, leaves, jax.tree.leaves(at)))
            if len(wanted) == len(leaves) and any(
                leaf.shape and not leaf.per_replica for leaf in wanted
            ):
                yield name, structure, wanted


def _subtrees(tree: Any, structure: Any) -> Iterator[tuple[str, list[_ResultLeaf]]]:
    """Yields the parts of a result with a given structure."""

    def matches(part: Any) -> bool:
        return bool(jax.tree.structure(part) == structure)

    for path, part in jax.tree_util.tree_leaves_with_path(tree, is_leaf=matches):
        if matches(part):
            yield "result" + jax.tree_util.keystr(path), jax.tree.leaves(part)
