"""Likely mistakes in a traced step: logged once, or an error where a metric would certainly be wrong."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import DATA, num_replicas
from distribute_jax._messages import is_key
from distribute_jax._values import Layout, PerReplica, Share
from distribute_jax.program._aggregation import Combine, is_sum_of_old, merge_rule_of
from distribute_jax.program._jaxprs import (
    RANDOM,
    equations,
    is_literal,
    line,
    names_axis,
    variables,
)
from distribute_jax.program._mean_walk import (
    Combined,
    MixedRows,
    NonlinearShare,
    RescaledSum,
    ShareMean,
    SumOfMeans,
    means_of_shares,
)
from distribute_jax.program._notice_marks import (
    DRAWING,
    STREAM,
    EqualWalk,
    MeanOfGradients,
    MeanOfParts,
    Part,
    Parts,
    ScaledPart,
    is_sum,
    parts_of_means,
    words_of,
)
from distribute_jax.program._options import RunOptions
from distribute_jax.program._replication import MIRRORED, Mark, union
from distribute_jax.program._trace import (
    PRINTS,
    SIDE_EFFECTS,
    Call,
    Traced,
    is_comparable_size,
    state_outputs,
)
from distribute_jax.program._trace_errors import step_name
from distribute_jax.variables import Variable, VariableAggregation

results_are_parts: ContextVar[bool] = ContextVar("distribute_jax_results_are_parts", default=False)
"""Whether the results of the replicas are summed, as by ``fit``."""

_SUM = VariableAggregation.SUM
_FOLD = (
    "fold the replica id into the key: jax.random.fold_in(key, "
    "dj.get_replica_context().replica_id_in_sync_group)."
)
_SEEDED = (
    "The step seeds random numbers at %s and draws the same ones on every replica, as is right for weights. "
    "If each replica should draw others, as for dropout, make the stream before run, under "
    f"strategy.scope(), or {_FOLD}"
)
_EQUAL_ROWS = (
    "The step draws a random number for each row of the batch at %s, with a key that is equal on every "
    "replica, so example i of each replica's share gets the same numbers, such as the same dropout mask. "
    f"To draw other numbers for each example, {_FOLD}"
)
_REPEATED = (
    "No argument of the step is distributed, so all %s replicas compute the same from %s, and what they "
    "combine%s is equal on all of them. Pass a batch of strategy.distribute_dataset, of which each replica "
    "computes its share."
)
_WHOLE = (
    "No argument of the step is distributed, so each call copies %s to all %s replicas, which compute the "
    "same from it. Pass a batch of strategy.distribute_dataset, of which each replica computes its share, or "
    "an array that is made under strategy.scope()."
)
_PART_IN_CALLBACK = (
    "The callback at %s gets what compute_average_loss returned at %s, which is this replica's part of the "
    "mean: the loss of the batch is the sum over the replicas, "
    "dj.get_replica_context().all_reduce('sum', loss)."
)
_PART_IN_STATE = (
    "%s adds up what compute_average_loss returned at %s, and has other state. That loss is this replica's "
    "part of the mean: divided by a count that each replica adds to, it is %s times too small. Add the "
    "losses of the examples, or the sum over the replicas, dj.get_replica_context().all_reduce('sum', loss)."
)
_PART_IN_METRIC = """\
{metric} ({kind}) averages what compute_average_loss returned at {line}. That is this replica's part of the \
mean over the global batch, so the metric would be {replicas} times too small. Update it with one loss for \
each example, as metrics.update(loss=losses), or with the sum over the replicas, \
dj.get_replica_context().all_reduce("sum", loss)."""
_LARGE = 1 << 20
"""The bytes of a host array in ``args`` that is taken for data rather than for a small table."""
_OF_SHARES = frozenset({Combine.INCREMENTS, Combine.EQUAL_INCREMENTS, Combine.JOINT})
_VALUE_OF_METRIC = (
    "{step} returned {result}, the value of {metric} after its update in the step, which is the old value "
    "with one replica's share added, and its sum over the replicas is not a value of the metric. Return this "
    "replica's part of a mean, dj.compute_average_loss(values) of one value for each example; or read the "
    "metric outside of the step, as in on_epoch_end of a callback; in test_step, super().test_step(batch) "
    "also reports the loss and the metrics of compile."
)
_OLD_VALUES = (
    "%s is written as its old value plus something, which its aggregation sums over the replicas: the old "
    "value counts %s times, as with TensorFlow's assign. To add what each replica has, write "
    "v.assign_add(value)."
)
_LOST = (
    "The step computes a new value of %s at %s, and does not use it. A new state, as of "
    "state.apply_gradients(grads=grads), is lost unless the step returns it: "
    "state = strategy.run(step, args=(state, batch))."
)
_SUM_OF_MEANS = (
    "%(step)s returned %(name)s, the sum over the replicas of the mean that each took over its examples at "
    "%(at)s: %(replicas)s times the mean over the batch. Write all_reduce('mean', ...), or "
    "all_reduce('sum', ...) of dj.compute_average_loss(values) with one value for each example."
)
_MEAN_OF_PARTS = (
    "%(step)s returned %(name)s, the mean over the replicas of what compute_average_loss returned at %(at)s, "
    "which is a part of the mean over the batch: %(replicas)s times too small. Write "
    "all_reduce('sum', loss)."
)
_NONLINEAR = (
    "%(step)s returned %(name)s, which combines what each of the %(replicas)s replicas computed at %(at)s "
    "from its examples by more than a sum, as a root, a ratio or a maximum, and so is not the value for the "
    "batch. Reduce first and compute then, such as jnp.sqrt(all_reduce('mean', mean)), "
    "all_reduce('sum', total) / all_reduce('sum', count), or all_gather(values).max()."
)
_MIXED_ROWS = (
    "%(step)s returned %(name)s, whose rows depend at %(at)s on the other examples of a replica's share, as "
    "by their mean, norm or rank, and so are not those of the whole batch. Combine first, as "
    "x - all_reduce('mean', x.mean(0)), or compare with the rows of all replicas, all_gather(x)."
)
_OF_RESULTS: dict[type[str], str] = {
    SumOfMeans: _SUM_OF_MEANS,
    RescaledSum: _SUM_OF_MEANS,
    MeanOfParts: _MEAN_OF_PARTS,
    Combined: _NONLINEAR,
    MixedRows: _MIXED_ROWS,
}
"""The warning for each mark of a result."""

_SUM_OF_GRADIENTS = (
    "%(step)s updates %(name)s by the sum over the replicas of gradients of the mean that each took over its "
    "examples at %(at)s: %(replicas)s times those of one device. Take dj.compute_average_loss(losses) as the "
    "loss, or combine gradients of a mean by all_reduce('mean', gradients); dj.Optimizer sums them."
)
_MEAN_OF_GRADIENTS = (
    "%(step)s updates %(name)s by the mean over the replicas of gradients of what compute_average_loss "
    "returned at %(at)s, which is a part of the mean over the batch: they are %(replicas)s times smaller "
    "than those of one device. Combine gradients of a part by all_reduce('sum', gradients)."
)
_OF_STATE: dict[type[str], str] = {
    SumOfMeans: _SUM_OF_GRADIENTS,
    RescaledSum: _SUM_OF_GRADIENTS,
    MeanOfGradients: _MEAN_OF_GRADIENTS,
}
"""The warning for each mark of new state."""


_LOCAL_STATISTICS = (
    "%s returned %s, the mean of the statistics of each replica's share of the batch, so this step is not "
    'exactly that of one device. For those of the whole batch make nn.BatchNorm with axis_name="%s".'
)


class Notice(NamedTuple):
    """A warning that is logged once for each object or line."""

    text: str
    named: tuple[Any, ...]
    """The arguments of the text, or one mapping of them."""
    about: Any
    """The object or line."""

    @property
    def key(self) -> tuple[str, Any]:
        """Only the first of several notices with equal keys is logged."""
        about = self.about
        return self.text, about if isinstance(about, str) else id(about)


def notices_of(
    call: Call,
    traced: Traced,
    in_marks: Sequence[Mark],
    combine: Sequence[Combine],
    options: RunOptions,
    new_state: Collection[int],
) -> tuple[tuple[Notice, ...], tuple[Share, ...]]:
    """Returns warnings about a step, and what each replica's part of each array of its result is.

    ``new_state`` are the arrays of the result that are new values of arguments.

    Raises:
        ArgumentError: a metric averages parts of a mean, or ``fit`` would sum the values of one.
    """
    if results_are_parts.get():
        _refuse_values_of_metrics(call, traced, combine)
    parts = parts_of_means(traced.jaxpr, num_replicas(call.mesh))
    notices = list(_equal_notices(call, traced, in_marks, combine))
    notices += _summed_old_values(call, traced)
    notices += _lost_updates(traced, in_marks)
    notices += [Notice(_PART_IN_CALLBACK, where, where[0]) for where in parts.callbacks]
    if options.check_sync:
        notices += _parts_in_state(call, traced, parts)
    # Batch norm divides by the statistics of a share by design, and averages them.
    has_averages = not {Combine.MEAN, Combine.FIRST}.isdisjoint(combine)
    means = _means_of_shares(call, traced, bool(new_state) or has_averages)
    marks = [mean | part for mean, part in zip(means, parts.outputs, strict=True)]
    results = list(zip(traced.results.names, marks[len(combine) :], strict=True))
    step, axis = step_name(call.fn), getattr(call.strategy, "axis_name", DATA)
    statistics = (results[k] for k in sorted(new_state) if "batch_stats" in results[k][0])
    local = [name for name, mark in statistics if words_of(mark, Combined)]
    notices += [Notice(_LOCAL_STATISTICS, (step, name, axis), step) for name in local[:1]]
    if not results_are_parts.get():  # ``fit`` compares results itself
        others = [result for k, result in enumerate(results) if k not in new_state]
        notices += _about_means(_OF_RESULTS, call, others)
    state = [name for _, name, *_ in state_outputs(call, traced)]
    updated = [*zip(state, marks, strict=False), *(results[k] for k in sorted(new_state))]
    if has_averages or not may_be_compared(call, traced, traced.jaxpr):
        notices += _about_means(_OF_STATE, call, updated)
    elif not any(type(word) is SumOfMeans for _, mark in updated for word in mark):
        # The comparison with one device does not see gradients that are too large if they are clipped.
        notices += _about_means({RescaledSum: _SUM_OF_GRADIENTS}, call, updated)
    return tuple(notices), tuple(_share(mark) for _, mark in results)


def _means_of_shares(call: Call, traced: Traced, normalizes: bool) -> list[Mark]:
    data, outs = call.arguments.data, traced.jaxpr.jaxpr.outvars
    is_batch = [isinstance(x, PerReplica) and x.layout is Layout.JOINED for x in data]
    rows = {x.part_shape[0] for x, joined in zip(data, is_batch, strict=True) if joined}
    if len(rows) != 1:
        return [MIRRORED] * len(outs)
    before, after = sum(traced.sizes[:2]), traced.sizes[3]
    inputs = [*[False] * before, *is_batch, *[False] * after]
    replicas = num_replicas(call.mesh)
    return means_of_shares(traced.jaxpr, inputs, replicas, rows.pop(), normalizes=normalizes)


def _about_means(
    texts: Mapping[type[str], str], call: Call, named: Iterable[tuple[str, Mark]]
) -> Iterator[Notice]:
    """Warns of outputs, with their names and marks, that have one of the marks with a text."""
    facts = {"step": step_name(call.fn), "replicas": num_replicas(call.mesh)}
    for name, mark in named:
        for word in sorted(word for word in mark if type(word) in texts):
            yield Notice(texts[type(word)], ({**facts, "name": name, "at": word},), str(word))


def may_be_compared(call: Call, traced: Traced, jaxpr: Any) -> bool:
    """False for a step that ``verify="auto"`` leaves out.

    It is large, gets a value for each replica, or its ``jaxpr`` draws random numbers or has side effects.
    """
    names = {eqn.primitive.name for eqn in equations(jaxpr)} - PRINTS
    has_others = any(part in name for name in names for part in (*RANDOM, *SIDE_EFFECTS))
    batches = [v for v in call.arguments.data if isinstance(v, PerReplica)]
    is_stacked = any(v.layout is Layout.STACKED for v in batches)
    return not has_others and not is_stacked and is_comparable_size(call, traced)


def _share(mark: Mark) -> Share:
    """Returns what each replica's part of a result is."""
    if words_of(mark, Part) - words_of(mark, ScaledPart):
        return "part"
    if words_of(mark, NonlinearShare):
        return "nonlinear"
    return "mean" if words_of(mark, ShareMean) else ""


def _refuse_values_of_metrics(call: Call, traced: Traced, combine: Sequence[Combine]) -> None:
    """Raises if a result is computed from the new state of a metric, which has one replica's share."""
    jaxpr = traced.jaxpr.jaxpr
    states = zip(jaxpr.outvars, combine, state_outputs(call, traced), strict=False)
    metrics = {
        var: name.rpartition(".")[0]
        for var, rule, (variable, name, *_) in states
        if isinstance(variable, nnx.metrics.MetricState) and rule in _OF_SHARES
    }
    for eqn in jaxpr.eqns:
        metric = next((metrics[var] for var in variables(eqn.invars) if var in metrics), None)
        if metric is not None and not (is_sum(eqn) or names_axis(eqn, DATA)):
            metrics |= dict.fromkeys(eqn.outvars, metric)
    for result, atom in zip(traced.results.names, jaxpr.outvars[len(combine) :], strict=True):
        if not is_literal(atom) and atom in metrics:
            facts = {"step": step_name(call.fn), "result": result, "metric": metrics[atom]}
            raise ArgumentError(_VALUE_OF_METRIC.format(**facts))


def _lost_updates(traced: Traced, marks: Sequence[Mark]) -> Iterator[Notice]:
    """Warns of an argument plus a reduced value, as of a new state, that no output depends on."""
    jaxpr, first = traced.jaxpr.jaxpr, traced.sizes[0]
    inputs = list(zip(jaxpr.invars, traced.input_names, marks, strict=False))
    names = {var: name for var, name, mark in inputs[first:] if not mark}
    if not names:
        return
    combined: set[Any] = set()
    for eqn in jaxpr.eqns:
        if names_axis(eqn, DATA) or not combined.isdisjoint(variables(eqn.invars)):
            combined.update(eqn.outvars)
    live = set(variables(jaxpr.outvars))
    for eqn in reversed(jaxpr.eqns):
        acts = any(getattr(effect, "name", None) != DATA for effect in eqn.effects)
        operands = set(variables(eqn.invars))
        if acts or not live.isdisjoint(eqn.outvars):
            live |= operands
        elif eqn.primitive.name in ("add", "sub") and operands & combined:
            where = line(eqn)
            yield from (Notice(_LOST, (names[var], where), where) for var in operands & {*names})


def _summed_old_values(call: Call, traced: Traced) -> Iterator[Notice]:
    """Warns of ``v[...] += x`` for a variable whose aggregation is SUM."""
    for output, (variable, name, old, _) in enumerate(state_outputs(call, traced)):
        is_summed = isinstance(variable, Variable) and variable.aggregation is _SUM
        if is_summed and is_sum_of_old(traced.jaxpr.jaxpr, output, old):
            yield Notice(_OLD_VALUES, (name, str(num_replicas(call.mesh))), variable)


def _equal_notices(
    call: Call, traced: Traced, in_marks: Sequence[Mark], combine: Sequence[Combine]
) -> Iterator[Notice]:
    """Warns of equal random numbers on all replicas, and of a forgotten ``distribute_dataset``."""
    distributed = [x for x in call.arguments.data if isinstance(x, PerReplica)]
    batches = [] if distributed else list(_batches(call, traced))
    rows = [x.part_shape[0] for x in distributed if x.layout is Layout.JOINED]
    names = {eqn.primitive.name for eqn in equations(traced.jaxpr.jaxpr)}
    if not batches and not names & {"random_seed", *DRAWING}:
        return
    marks, starts = list(in_marks), traced.input_starts
    for k, variable in enumerate(call.binding.variables):
        if isinstance(variable, nnx.RngState):
            marks[starts[k] : starts[k + 1]] = [STREAM] * (starts[k + 1] - starts[k])
    walk = EqualWalk(num_replicas(call.mesh), max(rows, default=0))
    walk.run(traced.jaxpr, marks)
    yield from (Notice(_SEEDED, (at,), at) for at in sorted(walk.seeds))
    yield from (Notice(_EQUAL_ROWS, (at,), at) for at in sorted(walk.draws))
    lines = walk.equal_reductions()
    if batches and (lines or (lines is not None and Combine.EQUAL_INCREMENTS in combine)):
        where = f" at {lines[0]}" if lines else ", or add to a metric,"
        replicas, of = str(num_replicas(call.mesh)), " and ".join(batches[:4])
        yield Notice(_REPEATED, (replicas, of, where), where)
    elif batches and lines is not None and num_replicas(call.mesh) > 1:
        on_host = [x.nbytes for x in call.arguments.data if isinstance(x, np.ndarray)]
        if max(on_host, default=0) >= _LARGE:
            step = step_name(call.fn)
            yield Notice(_WHOLE, (" and ".join(batches[:4]), str(num_replicas(call.mesh))), step)


def _batches(call: Call, traced: Traced) -> Iterator[str]:
    """Names the array arguments that look like batches: with rows, and not returned with new values."""
    template, outs = traced.results, traced.jaxpr.jaxpr.outvars
    first = len(outs) - len(template.names)
    returned = {(var.aval.shape, str(var.aval.dtype)) for var in outs[first:]}
    names = traced.input_names[sum(traced.sizes[:2]) :]
    for name, value in zip(names, call.arguments.data, strict=False):
        if not isinstance(value, (jax.Array, np.ndarray)) or is_key(value) or not value.ndim:
            continue
        dtype = jax.dtypes.canonicalize_dtype(value.dtype)
        is_raw_key = value.ndim == 1 and dtype == jnp.uint32
        is_batch = value.shape[0] >= num_replicas(call.mesh) and not is_raw_key
        if is_batch and (value.shape, str(dtype)) not in returned:
            yield f"{name} ({dtype}[{','.join(map(str, value.shape))}])"


def _parts_in_state(call: Call, traced: Traced, parts: Parts) -> Iterator[Notice]:
    """Raises if a metric averages parts of means; warns of other state that may."""
    binding, replicas = call.binding, num_replicas(call.mesh)
    nodes = dict(zip(binding.node_names, binding.nodes, strict=True))
    written: dict[str, dict[str, Mark]] = {}
    for output, (variable, name, *_) in enumerate(state_outputs(call, traced)):
        if isinstance(variable, nnx.metrics.MetricState):
            owner, _, attribute = name.rpartition(".")
            written.setdefault(owner, {})[attribute] = words_of(parts.outputs[output], Part)
    for owner, states in written.items():
        node = ref() if (ref := nodes.get(owner)) else None
        merged = merge_rule_of(node) is not None
        parts_in = {
            attribute: mark if merged else mark - words_of(mark, ScaledPart)
            for attribute, mark in states.items()
        }
        if not (lines := sorted(union(parts_in.values()))):
            continue
        if merged or ("count" in parts_in and parts_in.get("total")):
            raise ArgumentError(
                _PART_IN_METRIC.format(
                    metric=owner, kind=type(node).__name__, line=lines[0], replicas=replicas
                )
            )
        if not all(parts_in.values()):
            yield Notice(_PART_IN_STATE, (owner or "The step", lines[0], str(replicas)), lines[0])
