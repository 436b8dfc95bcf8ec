"""Several replicas on a device: a scan runs their first halves one after the other, and adds up their sums.

Activations of one replica are in memory at a time. At a collective in the first half, as in synchronised
batch norm, the scan is split in two, and values that the second one reads are stacked over the replicas. A
loop, branch or checkpoint with a collective inside runs for all replicas of the device at once, in ``vmap``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from distribute_jax._errors import LoweringError
from distribute_jax._mesh import DATA, num_replicas
from distribute_jax.program._gather import Share, ShareSpec
from distribute_jax.program._jaxprs import (
    CALLS,
    ClosedJaxpr,
    Override,
    Values,
    called_body,
    consts_and_carries,
    inputs_of,
    is_literal,
    is_ref,
    line,
    name,
    names_axis,
    outputs_of,
    run_bodies,
    run_with_body,
    value_of,
    variables,
    with_inner,
    with_overrides,
)
from distribute_jax.program._lowerings import FlatStep
from distribute_jax.program._sharded_update import (
    Boundary,
    BoundaryValue,
    SplitStep,
    draws_by_shape,
    traced,
)

_LOCAL = "replicas of a device"
"""The ``vmap`` axis of the replicas of a device."""

_REFUSED = """\
{what} at {where} cannot run with replicas_per_device={each}.
The replicas of a device run one after the other, and can exchange values only by psum, psum_scatter, pmax, \
pmin and all_gather over all replicas.
Run one replica on each device (replicas_per_device=1), or {instead}."""
_SUPPORTED = {"axis_index", "psum", "reduce_scatter", "pmax", "pmin", "all_gather"}
_OPENED = {"scan", "while", "cond", *CALLS}
_MOVE_OUT = "move {what} out of the {body} around it"
_DRAW_OUTSIDE = "draw the random numbers of the {body} around it outside, or with keys of threefry"
_NOT_BATCHABLE = "move out of the {body} around it what jax.vmap cannot batch: {error}"
_MAKE_REF_LATER = "make the ref after the collective that comes between it and its use"
_SUPPORTED_INSTEAD = "use one of these in its place, and the default cross_device_ops"


class Stacked(NamedTuple):
    """The values of the replicas of a device."""

    parts: jax.Array
    """Stacked on a leading dim."""


def scan_replicas(step: FlatStep) -> FlatStep:
    """Returns a step of one device that runs its replicas one after the other."""
    halves = ReplicaScan.of(step, traced(step), {}, {})

    def on_device(*inputs: Any) -> list[Any]:
        return halves.second(inputs, halves.first([inputs[i] for i in halves.reads]), {})

    return replace(step, function=on_device)


class ReplicaScan(SplitStep):
    """A split step whose first half runs for every replica of a device."""

    def __init__(self, body: Any, marks: Any, mirrored: Any, mesh: Mesh, *args: Any) -> None:
        """Splits a step, after lifting reads of the replica id out of loops and branches."""
        super().__init__(with_replica_id_input(body, mesh), marks, mirrored, mesh, *args)

    def first(self, inputs: Sequence[Any]) -> Boundary:
        """Runs the first half of each replica of this device."""
        values = self.first_values(list(map(self._as_stacked, self.reads, inputs)))
        stages = self._stages(values)
        early = [eqn for _, collectives in stages for eqn in collectives if _is_sum(eqn)]
        pairs = [pair for eqn in early for pair in zip(eqn.invars, eqn.outvars, strict=True)]
        sums = [*pairs, *self.sums()]
        addends = {x: out.aval.dtype for x, out in sums if not is_literal(x)}
        ends = [*self.passed, *(v for b in self._branches.values() for v in variables(b.reads))]
        totals: Values = {}
        for number, (local, collectives) in enumerate(stages):
            later = [eqn for stage in stages[number + 1 :] for eqns in stage for eqn in eqns]
            reads = [v for eqn in [*collectives, *later] if not _is_sum(eqn) for v in eqn.invars]
            known = values.keys() | outputs_of(local)
            new = {x: addends[x] for x in addends if x not in totals and x in known}
            totals.update(self._scan(local, values, [*ends, *variables(reads)], new))
            for eqn in collectives:
                outs = (
                    self._reduced(eqn, totals) if _is_sum(eqn) else self._run_vmapped(eqn, values)
                )
                values.update(zip(eqn.outvars, outs, strict=True))
        self.add_up(totals)
        values.update((out, totals[out]) for _, out in self.sums())
        passed, inner = self.ended(values, self.gathering())
        return list(map(self._unstacked, self.passed, passed)), inner

    def _as_stacked(self, i: int, value: Any) -> Any:
        """Returns an input, stacked by replica if the replicas divide it."""
        if isinstance(value, Stacked) or not self._marks[self.jaxpr.invars[i]]:
            return value
        return Stacked(value.reshape(self.each, value.shape[0] // self.each, *value.shape[1:]))

    def _unstacked(self, v: Any, value: Any) -> jax.Array:
        if v not in self.per_replica:
            return value.parts[0] if isinstance(value, Stacked) else value
        parts = value.parts if isinstance(value, Stacked) else jnp.stack([value] * self.each)
        return jnp.reshape(parts, (-1, *parts.shape[2:]))

    def _stages(self, values: Values) -> list[tuple[list[Any], list[Any]]]:
        """Splits the first half at collectives: pairs of local equations and the collectives after them."""
        stages: list[tuple[list[Any], list[Any]]] = [([], [])]
        waiting: set[Any] = set()
        for eqn in self._first:
            self._check(eqn)
            if _is_replica_id(eqn):
                ids = jax.lax.axis_index(DATA) * self.each + jnp.arange(self.each, dtype=jnp.int32)
                values[eqn.outvars[0]] = Stacked(ids)
                continue
            if waiting.intersection(variables(eqn.invars)):
                stages.append(([], []))
                waiting.clear()
            is_collective = _first_collective(eqn) is not None
            stages[-1][is_collective].append(eqn)
            waiting.update(eqn.outvars if is_collective else ())
        # The last stage reduces what a loop with a collective has computed.
        return [*stages, ([], [])]

    def _check(self, eqn: Any) -> None:
        """Refuses collectives that the replicas of a device cannot run."""
        if _first_collective(eqn) is None:
            return
        for inner in with_inner(eqn):
            groups = inner.params.get("axis_index_groups") is not None
            if names_axis(inner, DATA) and (inner.primitive.name not in _SUPPORTED or groups):
                raise self._refusal(inner, _SUPPORTED_INSTEAD)
            if draws_by_shape(inner):
                raise self._refusal(_first_collective(eqn), _DRAW_OUTSIDE.format(body=name(eqn)))
            what = None if name(inner) in _OPENED else _first_collective(inner)
            if what is not None and what is not inner:
                raise self._refusal(what, _MOVE_OUT.format(what=name(what), body=name(inner)))

    def _refusal(self, eqn: Any, instead: str) -> LoweringError:
        facts = {"what": name(eqn), "where": line(eqn), "each": self.each}
        return LoweringError(_REFUSED.format(instead=instead, **facts))

    def _scan(
        self, eqns: Sequence[Any], values: Values, wanted: Iterable[Any], addends: Mapping[Any, Any]
    ) -> Values:
        """Runs equations for each replica, adds the wanted results to the values, and returns the sums."""
        computed = outputs_of(eqns)
        if not (addends or eqns):
            return {}
        operands = variables([*inputs_of(eqns), *addends])
        reads = {v: values[v] for v in operands if v not in computed}
        stacked = [v for v, value in reads.items() if isinstance(value, Stacked)]
        kept = [v for v in variables(wanted) if v in computed]
        if any(map(is_ref, kept)):
            ref = next(eqn for eqn in eqns if any(map(is_ref, eqn.outvars)))
            raise self._refusal(ref, _MAKE_REF_LATER)
        differ = [v for v in kept if self._marks.get(v) or not isinstance(v.aval.dtype, np.dtype)]
        same = [v for v in kept if v not in differ]
        scattered = self._scattered_in_scans(eqns)

        def one(carry: Any, parts: Any) -> Any:
            inside = {**reads, **dict(zip(stacked, parts, strict=True))}
            gathering = self.gathering()
            gathering.run(self.jaxpr, eqns, inside, [*kept, *addends], scattered)
            new = [value_of(x, inside) for x in addends]
            new = [x.local if isinstance(x, Share) else x for x in new]
            sums = [total + x.astype(total.dtype) for x, total in zip(new, carry[0], strict=True)]
            last = gathering.whole([inside[v] for v in same])
            return (sums, last), gathering.whole([inside[v] for v in differ])

        # From -0.0, since -0.0 + x is x for every x; 0.0 + -0.0 would be 0.0.
        zeros = [
            -BoundaryValue(x.aval, scattered.get(x)).zeros().astype(dtype)
            for x, dtype in addends.items()
        ]
        empty = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in same]
        shares = [reads[v].parts for v in stacked]
        (sums, last), parts = jax.lax.scan(one, (zeros, empty), shares, length=self.each)
        values.update(zip(same, last, strict=True))
        values.update((v, Stacked(x)) for v, x in zip(differ, parts, strict=True))
        totals = dict(zip(addends, sums, strict=True))
        return totals | {x: Share(totals[x], scattered[x]) for x in totals if x in scattered}

    def _scattered_in_scans(self, eqns: Sequence[Any]) -> dict[Any, ShareSpec]:
        """Returns the gradients that a scan over layers can reduce-scatter itself."""
        scattered = self.scattered()
        scans = [eqn for eqn in eqns if name(eqn) == "scan"]
        stacked = [v for eqn in scans for v in eqn.outvars[consts_and_carries(eqn)[1] :]]
        return {v: scattered[v] for v in stacked if v in scattered and scattered[v].dim > 0}

    def _run_vmapped(self, eqn: Any, values: Values) -> list[Any]:
        """Runs an equation with a collective for all replicas of this device at once."""
        reads = variables(eqn.invars)
        alone = self.jaxpr.replace(constvars=[], invars=reads, outvars=eqn.outvars, eqns=[eqn])
        operands = self.gathering().whole([values[v] for v in reads])
        every = jax.vmap(
            _with_local_axis(ClosedJaxpr(alone, ())),
            in_axes=[0 if isinstance(x, Stacked) else None for x in operands],
            axis_name=_LOCAL,
            axis_size=self.each,
        )
        try:
            outs = every(*(x.parts if isinstance(x, Stacked) else x for x in operands))
        except NotImplementedError as error:
            several = _NOT_BATCHABLE.format(body=name(eqn), error=error)
            raise self._refusal(_first_collective(eqn), several) from error
        marks = map(self._marks.get, eqn.outvars)
        return [Stacked(x) if mark else x[0] for x, mark in zip(outs, marks, strict=True)]

    def _reduced(self, eqn: Any, totals: Values) -> list[Any]:
        """Returns the sums over all replicas; of ``psum_scatter``, the parts of this device's replicas."""
        outs = []
        for x, out in zip(eqn.invars, eqn.outvars, strict=True):
            value = value_of(x, totals) * self.each if is_literal(x) else totals[x]
            total = jax.lax.psum(value, DATA)
            if "scatter_dimension" in eqn.params:
                first = jax.lax.axis_index(DATA) * self.each
                parts = _scattered_parts(total, eqn.params, out.aval.shape)
                total = Stacked(jax.lax.dynamic_slice_in_dim(parts, first, self.each))
            outs.append(total)
        return outs


def with_replica_id_input(body: Any, mesh: Mesh) -> Any:
    """Returns a program in which loops, branches and checkpoints take the replica id as an operand."""
    others = [eqn for eqn in body.jaxpr.eqns if not _is_replica_id(eqn)]
    if not any(_is_replica_id(inner) for eqn in others for inner in with_inner(eqn)):
        return body
    step = jex_core.jaxpr_as_fun(of_replica_id(body, mesh))
    return _retrace(body, lambda *x: step(jax.lax.axis_index(DATA), *x), mesh)


def of_replica_id(body: Any, mesh: Mesh) -> Any:
    """Returns a program that takes the replica id before its other inputs."""

    def step(replica: jax.Array, *inputs: Any) -> list[Any]:
        return _rewrite_nested(
            body, lambda eqn: (lambda: [replica]) if _is_replica_id(eqn) else None
        )(*inputs)

    return _retrace(body, step, mesh, jax.ShapeDtypeStruct((), jnp.int32))


def _retrace(body: Any, step: Callable[..., Any], mesh: Mesh, *more: Any) -> Any:
    avals = [v.aval for v in body.jaxpr.invars]
    like = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
    return jax.make_jaxpr(step, axis_env=[(DATA, num_replicas(mesh))])(*more, *like)


def _is_replica_id(eqn: Any) -> bool:
    return eqn.primitive.name == "axis_index" and names_axis(eqn, DATA)


def _with_local_axis(program: Any) -> Callable[..., list[Any]]:
    """Returns a program as a function under ``vmap`` whose collectives cover the device's replicas too."""
    return _rewrite_nested(
        program, lambda eqn: functools.partial(_collective, eqn) if names_axis(eqn, DATA) else None
    )


def _rewrite_nested(program: Any, way: Callable[[Any], Override]) -> Callable[..., list[Any]]:
    """Returns a program as a function that runs some equations, at any depth, in another way."""

    def run(inner: Any, inputs: Sequence[Any]) -> list[Any]:
        return _rewrite_nested(inner, way)(*inputs)

    def at(eqn: Any) -> Override:
        if (other := way(eqn)) or not any(map(way, with_inner(eqn))):
            return other
        if name(eqn) == "checkpoint":
            body = _rewrite_nested(called_body(eqn), way)
            return lambda *operands: run_with_body(eqn, body, operands)

        def around(*operands: Any) -> list[Any]:
            outs = run_bodies(eqn, run, operands)
            # An equation that is neither a loop, a condition nor a call is refused later.
            return list(eqn.primitive.bind(*operands, **eqn.params)) if outs is None else outs

        return around

    return with_overrides(program, at)


def _collective(eqn: Any, *operands: Any) -> list[Any]:
    """Runs a collective over the replicas of a device, whose ids are consecutive, and over the devices."""
    if "axes" in eqn.params:
        axes = (*(axis for axis in eqn.params["axes"] if axis != DATA), _LOCAL, DATA)
        outs = eqn.primitive.bind(*operands, **{**eqn.params, "axes": axes})
        return list(outs) if eqn.primitive.multiple_results else [outs]
    (x,), (out,) = operands, eqn.outvars
    if eqn.primitive.name == "all_gather":
        every = jax.lax.all_gather(jax.lax.all_gather(x, _LOCAL), DATA, tiled=True)
        return [jnp.moveaxis(every, 0, eqn.params["all_gather_dimension"]).reshape(out.aval.shape)]
    parts = _scattered_parts(jax.lax.psum(x, (_LOCAL, DATA)), eqn.params, out.aval.shape)
    number = jax.lax.axis_index(DATA) * jax.lax.axis_size(_LOCAL) + jax.lax.axis_index(_LOCAL)
    return [jax.lax.dynamic_index_in_dim(parts, number, keepdims=False)]


def _scattered_parts(total: jax.Array, params: Any, shape: Sequence[int]) -> jax.Array:
    """Returns the parts of a sum that ``psum_scatter`` returns to the replicas, on a leading dim."""
    dim = params["scatter_dimension"]
    size = [shape[dim]] if params["tiled"] else []
    split = total.reshape(*total.shape[:dim], -1, *size, *total.shape[dim + 1 :])
    return jnp.moveaxis(split, dim, 0)


def _first_collective(eqn: Any) -> Any:
    """Returns this equation if it is a collective, else the first collective inside it; None without one."""
    return next((inner for inner in with_inner(eqn) if names_axis(inner, DATA)), None)


def _is_sum(eqn: Any) -> bool:
    """True if an equation sums over the replicas, and over no axis of the user's ``vmap``."""
    is_sum = eqn.primitive.name in {"psum", "reduce_scatter"} and names_axis(eqn, DATA)
    return is_sum and eqn.params.get("axes", (DATA,)) == (DATA,)
