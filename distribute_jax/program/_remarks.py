"""What the marks of a step show besides: it is logged once, or, where a number would be wrong, an error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import num_replicas
from distribute_jax._messages import is_key
from distribute_jax._values import Layout, PerReplica
from distribute_jax.program._aggregation import Combine
from distribute_jax.program._likely_mistakes import (
    STREAM,
    Part,
    Parts,
    ScaledPart,
    equal_draws,
    equal_reductions,
    parts_of_means,
)
from distribute_jax.program._metric_merge import MERGE_BY_TYPE
from distribute_jax.program._options import RunOptions
from distribute_jax.program._replication_rules import Mark
from distribute_jax.program._trace import Call, Traced, state_outputs

_FOLD = (
    "fold the replica id into the key: jax.random.fold_in(key, "
    "dj.get_replica_context().replica_id_in_sync_group)."
)
_SEEDED = (
    "The step seeds random numbers at %s and draws the same ones on every replica, as is right for weights. "
    "Where replicas should draw other ones, as for dropout, make the stream before run, under "
    f"strategy.scope(), or {_FOLD}"
)
_EQUAL_ROWS = (
    "The step draws a random number for each row of the batch at %s, with a key that is equal on every "
    "replica, so example i of each replica's share gets the same numbers, such as the same dropout mask. "
    f"To draw other numbers for each example, {_FOLD}"
)
_REPEATED = (
    "No argument of the step is distributed, so all %s replicas compute the same from %s, and what they "
    "combine%s is equal on all of them. Pass a batch of strategy.distribute_dataset: each replica computes "
    "its share of it."
)
_PART_IN_CALLBACK = (
    "The callback at %s gets what compute_average_loss returned at %s, which is this replica's part of the "
    "mean: the loss of the batch is the sum over the replicas, "
    "dj.get_replica_context().all_reduce('sum', loss)."
)
_PART_IN_STATE = (
    "%s adds up what compute_average_loss returned at %s beside other state. That is this replica's part of "
    "the mean: divided by a count that each replica adds to, it is %s times too small. Add the losses of the "
    "examples instead, or the sum over the replicas, dj.get_replica_context().all_reduce('sum', loss)."
)
_PART_IN_METRIC = """\
{metric} ({kind}) averages what compute_average_loss returned at {line}. That is this replica's part of the \
mean over the global batch, so the metric would be {replicas} times too small. Update it with one loss for \
each example, as metrics.update(loss=losses), or with the sum over the replicas, \
dj.get_replica_context().all_reduce("sum", loss)."""


class Notice(NamedTuple):
    """Something that is logged once."""

    text: str
    named: tuple[str, ...]
    """What the text speaks of."""
    about: Any
    """The object, or line, that is spoken of once."""

    @property
    def key(self) -> tuple[str, Any]:
        """Equal for notices of which one is logged."""
        about = self.about
        return self.text, about if isinstance(about, str) else id(about)


class Remarks(NamedTuple):
    """What there is to say about a step."""

    notices: tuple[Notice, ...]
    parts: tuple[bool, ...]
    """For each array of the result: whether it is a part of a mean."""


def remarks(
    call: Call,
    traced: Traced,
    in_marks: Sequence[Mark],
    combine: Sequence[Combine],
    options: RunOptions,
) -> Remarks:
    """Looks for numbers that are N times too small, drawn or computed equally on every replica.

    Raises:
        ArgumentError: a metric would average parts of a mean.
    """
    replicas = num_replicas(call.mesh)
    parts = parts_of_means(traced.jaxpr, axis_size=replicas)
    notices = [*_draws(call, traced, in_marks), *_repeated(call, traced, in_marks, combine)]
    results = len(traced.jaxpr.jaxpr.outvars) - len(combine)
    if parts is None:
        return Remarks(tuple(notices), (False,) * results)
    notices += [Notice(_PART_IN_CALLBACK, where, where[0]) for where in parts.callbacks]
    if options.check_sync:
        notices += _parts_in_state(call, traced, parts, combine)
    whole = [any(not isinstance(p, ScaledPart) for p in found) for found in parts.outputs]
    return Remarks(tuple(notices), tuple(whole[len(combine) :]))


def _draws(call: Call, traced: Traced, in_marks: Sequence[Mark]) -> Iterator[Notice]:
    batches = [x for x in call.arguments.data if isinstance(x, PerReplica)]
    rows = [x.part_shape[0] for x in batches if x.layout is Layout.JOINED]
    marks = _with_streams(call, traced, in_marks)
    found = equal_draws(
        traced.jaxpr, marks, rows=max(rows, default=0), axis_size=num_replicas(call.mesh)
    )
    yield from (Notice(_SEEDED, (line,), line) for line in found.seeds)
    yield from (Notice(_EQUAL_ROWS, (line,), line) for line in found.rows)


def _with_streams(call: Call, traced: Traced, in_marks: Sequence[Mark]) -> list[Mark]:
    marks = list(in_marks)
    for variable, start, end in zip(
        call.binding.variables, traced.input_starts, traced.input_starts[1:], strict=False
    ):
        if isinstance(variable, nnx.RngState):
            marks[start:end] = [STREAM] * (end - start)
    return marks


def _repeated(
    call: Call, traced: Traced, in_marks: Sequence[Mark], combine: Sequence[Combine]
) -> Iterator[Notice]:
    """Looks for a forgotten ``distribute_dataset``."""
    replicas = num_replicas(call.mesh)
    if any(isinstance(x, PerReplica) for x in call.arguments.data):
        return
    names = list(_batches(call, traced))
    if not names:
        return
    lines = equal_reductions(
        traced.jaxpr, _with_streams(call, traced, in_marks), axis_size=replicas
    )
    added = Combine.EQUAL_INCREMENTS in combine
    if lines or (added and lines is not None):
        where = f" at {lines[0]}" if lines else ", or add to a metric,"
        yield Notice(_REPEATED, (str(replicas), " and ".join(names[:4]), where), where)


def _batches(call: Call, traced: Traced) -> Iterator[str]:
    """Names the arrays of several rows among the arguments that the step does not return new values of."""
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


def _parts_in_state(
    call: Call, traced: Traced, parts: Parts, combine: Sequence[Combine]
) -> Iterator[Notice]:
    """Raises where a metric averages parts of means; notices other state that may."""
    binding, replicas = call.binding, num_replicas(call.mesh)
    nodes = dict(zip(binding.node_names, binding.nodes, strict=True))
    written: dict[str, list[tuple[str, frozenset[Part]]]] = {}
    for output, (variable, name, *_) in enumerate(state_outputs(call, traced)):
        if isinstance(variable, nnx.metrics.MetricState):
            owner, _, attribute = name.rpartition(".")
            written.setdefault(owner, []).append((attribute, parts.outputs[output]))
    for owner, states in written.items():
        node = ref() if (ref := nodes.get(owner)) else None
        merged = any(cls in MERGE_BY_TYPE for cls in type(node).__mro__)
        found = {
            attribute: [p for p in here if merged or not isinstance(p, ScaledPart)]
            for attribute, here in states
        }
        lines = sorted({str(part) for here in found.values() for part in here})
        if not lines:
            continue
        if merged or ("count" in found and found.get("total")):
            raise ArgumentError(
                _PART_IN_METRIC.format(
                    metric=owner, kind=type(node).__name__, line=lines[0], replicas=replicas
                )
            )
        if not all(found.values()):
            yield Notice(_PART_IN_STATE, (owner or "The step", lines[0], str(replicas)), lines[0])
