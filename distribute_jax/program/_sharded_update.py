"""Splits a step into a first half for each replica, and a second half that XLA partitions.

In a training step the gradients are reduce-scattered, each replica updates its share of the weights with its
share of the optimizer's state, and the new weights are gathered or stay divided.
The second half reads only values that are equal on all replicas, so it needs no replica axis: XLA partitions
it by the shardings of its inputs.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from distribute_jax._mesh import (
    DATA,
    GROUP,
    SHARD,
    in_device_memory,
    inside_replica,
    manual_axes,
    mirrored_sharding,
    num_replicas,
    replicas_per_device,
)
from distribute_jax.program._gather import Gathering, Share, ShareSpec, inline_forwarded
from distribute_jax.program._jaxprs import (
    Override,
    Values,
    collectives,
    has_effects,
    initial_values,
    inlined,
    inputs_of,
    is_literal,
    name,
    names_axis,
    outputs_of,
    run_with,
    value_of,
    variables,
    with_inner,
)
from distribute_jax.program._lowerings import FlatStep
from distribute_jax.program._placement import share_sharding, share_spec
from distribute_jax.program._replication import MIRRORED, Mark, ReplicationWalk
from distribute_jax.program._walk import Marked


def lower_split(step: FlatStep, split: type[SplitStep]) -> FlatStep:
    """Returns a step over global arrays in which each replica computes its share of the update."""
    mesh, shardings = step.mesh, step.shardings
    over: Any = next((to.mesh for to in shardings.sharded_in.values()), mesh)
    body = traced(step)
    outs = [v.aval for v in body.jaxpr.outvars]
    # State that is stored whole is computed in shares too, as the weights of a sharded update.
    stored = {
        i: to
        for i in (*range(shardings.state), *shardings.sharded_out)
        if shardings.mirrored[i]
        and (to := shardings.sharded_out.get(i) or share_sharding(outs[i], over)) is not None
    }
    shares = {i: ShareSpec.of(to, step.avals[i].ndim) for i, to in shardings.sharded_in.items()}
    results = {i: ShareSpec.of(to, outs[i].ndim) for i, to in stored.items()}
    halves = split.of(step, body, shares, results)
    dims = [0 if shardings.split[i] else _dim(shares.get(i)) for i in halves.reads]
    first: Callable[..., Any] = jax.shard_map(
        lambda *inputs: halves.first(inputs),
        mesh=mesh,
        in_specs=tuple(map(share_spec, dims)),
        out_specs=jax.tree.map(lambda value: share_spec(_dim(value.spec)), halves.boundary()),
        axis_names=manual_axes(mesh),
        check_vma=False,
    )

    def storing(to: NamedSharding, is_kept: bool) -> Store:
        """Has each replica compute its share of new state, which stays divided if it is kept so."""

        def store(new: jax.Array, is_computed: bool) -> jax.Array:
            if is_computed or is_kept:
                new = jax.lax.with_sharding_constraint(new, in_device_memory(to))
            if is_computed and not is_kept:
                new = jax.lax.with_sharding_constraint(new, mirrored_sharding(mesh))
            return new

        return store

    store = {i: storing(to, i in shardings.sharded_out) for i, to in stored.items()}

    def all_replicas(*inputs: Any) -> list[Any]:
        parts = first(*(_copies_of_groups(inputs[i], shares.get(i), over) for i in halves.reads))
        boundary = jax.tree.map(
            lambda value, x: _copies_of_groups(x, value.spec, over, back=True),
            halves.boundary(), parts,
        )  # fmt: skip
        return halves.second(inputs, boundary, store)

    return replace(step, function=all_replicas)


def _copies_of_groups(array: Any, spec: ShareSpec | None, mesh: Mesh, *, back: bool = False) -> Any:
    """Returns the copies of an array that the groups of a mesh have, concatenated; or ``back``, the array.

    Over all replicas the concatenated copies are divided as they are stored, so nothing is sent.
    """
    if spec is None or GROUP not in mesh.axis_names or spec.shares == mesh.size:
        return array
    specs = share_spec(spec.dim, SHARD), share_spec(spec.dim, (GROUP, SHARD))
    ins, outs = reversed(specs) if back else specs
    copy: Any = jax.shard_map(lambda x: x, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
    return copy(array)


def _dim(spec: ShareSpec | None) -> int | None:
    return None if spec is None else spec.dim


def _is_jit_of_collectives(eqn: Any) -> bool:
    """True if an equation calls a jitted function that has a collective over the replicas."""
    return name(eqn) == "jit" and any(names_axis(e, DATA) for e in with_inner(eqn))


def traced(step: FlatStep, opens: Callable[[Any], bool] = _is_jit_of_collectives) -> Any:
    """Traces the step of one replica, and inlines ``jit``s around collectives, or the calls it ``opens``."""
    replicas = num_replicas(step.mesh)
    shares = [
        jax.ShapeDtypeStruct((a.shape[0] // replicas, *a.shape[1:]), a.dtype) if split else a
        for a, split in zip(step.avals, step.shardings.split, strict=True)
    ]
    with jax.sharding.use_abstract_mesh(inside_replica(step.mesh)):
        body = jax.make_jaxpr(step.function, axis_env=[(DATA, replicas)])(*shares)
    return inline_forwarded(inlined(body, opens))


_SHARDING_PRIMITIVES = {"sharding_constraint", "layout_constraint", "shard_map", "reshard"}
"""Equations whose meshes and specs are those of one replica."""


Store = Callable[[jax.Array, bool], jax.Array]
"""Constrains an output to its sharding between steps; the flag says if the second half computed it."""


@dataclass(frozen=True, eq=False)
class BoundaryValue:
    """A value that the first half hands to the second."""

    aval: Any
    spec: ShareSpec | None = None
    """How it is divided; None if each replica has the whole."""

    def zeros(self) -> jax.Array:
        """Returns what one replica passes for a value that it does not compute."""
        shape = list(self.aval.shape)
        if self.spec is not None:
            shape[self.spec.dim] //= self.spec.shares
        return jnp.zeros(shape, self.aval.dtype)


Boundary = tuple[list[Any], list[list[Any]]]
"""The passed values; and for each condition, what each of its branches passes."""


class SplitStep:
    """The two halves of a jaxpr of one replica; outputs that are not mirrored are stacked along dim 0."""

    def __init__(
        self,
        body: Any,
        marks: Sequence[Mark],
        mirrored: Sequence[bool],
        mesh: Mesh,
        shares: Mapping[int, ShareSpec | None],
        results: Mapping[int, ShareSpec | None],
        reshard_after_forward: bool | None = None,
    ) -> None:
        """Takes the ``marks`` of inputs, and which outputs are ``mirrored``.

        ``shares`` says how inputs are divided, ``results`` how outputs should be.
        """
        self.body, self.jaxpr, self._reshard = body, body.jaxpr, reshard_after_forward
        self.mesh, self.each = mesh, replicas_per_device(mesh)
        self._shares = {i: spec for i, spec in shares.items() if spec is not None}
        self._wanted = _wanted(self.jaxpr, results)
        self._marks: dict[Any, Mark] = dict.fromkeys(self.jaxpr.constvars, MIRRORED)
        self._marks.update(zip(self.jaxpr.invars, marks, strict=True))
        self._first, self._sums, self._second = list[Any](), list[Any](), list[Any]()
        self._branches: dict[int, Branches] = {}
        outs = zip(self.jaxpr.outvars, mirrored, strict=True)
        self.per_replica = set(variables(v for v, same in outs if not same))
        self._needed = set(self.per_replica)
        self._sort(list(ReplicationWalk(num_replicas(mesh)).equations(self.jaxpr, self._marks)))
        self.passed = self._passed()
        """The values that pass from the first half to the second, by variable of the jaxpr."""
        first = [*self._first, *self._sums]
        read = {v for eqn in first for v in variables(eqn.invars)} | self._needed | set(self.passed)
        self.reads = [i for i, v in enumerate(self.jaxpr.invars) if v in read]
        """The inputs that the first half takes."""

    @classmethod
    def of(
        cls,
        step: FlatStep,
        body: Any,
        shares: Mapping[int, ShareSpec | None],
        results: Mapping[int, ShareSpec | None],
    ) -> Self:
        """Splits a step, of which ``body`` is the trace."""
        mirrored, differs = step.shardings.mirrored, frozenset({"a divided input"})
        marks = [differs if split else MIRRORED for split in step.shardings.split]
        return cls(body, marks, mirrored, step.mesh, shares, results, step.reshard_after_forward)

    def _sort(self, marked: Sequence[Marked]) -> None:
        """Assigns equations to the halves, last to first, so that the first has only what a replica needs.

        Each comes with the marks of its operands and results.
        """
        for eqn, operands, results in reversed(marked):
            needed = any(results) or any(v in self._needed for v in eqn.outvars)
            if not (needed or any(operands) or _is_for_each(eqn)):
                self._second.append(eqn)
                continue
            if not needed and _is_sum(eqn):
                self._sums.append(eqn)
            elif not needed and is_plain_cond(eqn) and not operands[0]:
                wanted = {i: self._wanted.get(v) for i, v in enumerate(eqn.outvars)}
                self._branches[id(eqn)] = branches = Branches(eqn, operands, self, wanted)
                self._second.append(eqn)
                self._needed.update(variables(branches.reads))
                continue
            else:
                self._first.append(eqn)
            self._needed.update(variables(eqn.invars))
        for eqns in (self._first, self._sums, self._second):
            eqns.reverse()

    def _passed(self) -> dict[Any, BoundaryValue]:
        outs = variables(self.jaxpr.outvars)
        after = dict.fromkeys(variables([*inputs_of(self._second), *outs]))
        first = outputs_of(self._first)
        passed: dict[Any, BoundaryValue] = {}
        for v in after:
            if v in self.per_replica:
                spec = ShareSpec(0, (None,) * v.aval.ndim, self.mesh.shape[DATA])
                passed[v] = BoundaryValue(v.aval, spec)
            elif v in first or self._marks.get(v):
                passed[v] = BoundaryValue(v.aval)
        for v in (v for eqn in self._sums for v in eqn.outvars if v in after):
            # Results are returned whole.
            passed[v] = BoundaryValue(v.aval, None if v in outs else self._wanted.get(v))
        return passed

    def boundary(self) -> Boundary:
        """Returns what the first half returns."""
        return [*self.passed.values()], [
            [halves.boundary() for halves in branches.halves]
            for branches in self._branches.values()
        ]

    def first(self, inputs: Sequence[Any]) -> Boundary:
        """Runs the first half of one replica."""
        values, gathering = self.first_values(inputs), self.gathering()
        wanted = [*self.passed, *self._needed]
        gathering.run(self.jaxpr, self._first, values, wanted, self.scattered())
        self.add_up(values)
        return self.ended(values, gathering)

    def ended(self, values: Values, gathering: Gathering) -> Boundary:
        """Runs the first halves of conditions, and returns what the first half returns."""
        inner = [
            branches.first(gathering.whole([value_of(v, values) for v in branches.reads]))
            for branches in self._branches.values()
        ]
        return gathering.whole([values[v] for v in self.passed]), inner

    def first_values(self, inputs: Sequence[Any]) -> Values:
        """Returns the inputs by variable, with divided ones as shares."""
        read: dict[int, Any] = dict(zip(self.reads, inputs, strict=True))
        read.update((i, Share(read[i], spec)) for i, spec in self._shares.items() if i in read)
        return initial_values(self.body, [read.get(i) for i in range(len(self.jaxpr.invars))])

    def gathering(self) -> Gathering:
        """Returns a new interpreter for equations that read shares."""
        total = sum(prod(self.jaxpr.invars[i].aval.shape) for i in self._shares)
        return Gathering(total, self._reshard)

    def sums(self) -> list[tuple[Any, Any]]:
        """Returns the addends and sums of the reductions between the halves."""
        pairs = [pair for eqn in self._sums for pair in zip(eqn.invars, eqn.outvars, strict=True)]
        return [(x, out) for x, out in pairs if out in self.passed]

    def scattered(self) -> dict[Any, ShareSpec]:
        """Returns the addends that only a divided sum reads, with the spec of the sum."""
        uses = Counter(v for eqn in (*self._first, *self._sums) for v in set(variables(eqn.invars)))
        return {
            x: spec
            for x, out in self.sums()
            if (spec := self.passed[out].spec) and uses[x] == 1 and x not in self.passed
        }

    def add_up(self, values: Values) -> None:
        """Reduces over the replicas: an all-reduce, or a reduce-scatter if the sum is divided."""
        sums = [(out, value_of(x, values), self.passed[out].spec) for x, out in self.sums()]
        if whole := {out: value for out, value, spec in sums if spec is None}:
            values.update(zip(whole, jax.lax.psum([*whole.values()], DATA), strict=True))
        for out, value, spec in sums:
            if spec is not None:
                share = value if isinstance(value, Share) else spec.scatter(value)
                values[out] = share.local

    def second(
        self, inputs: Sequence[Any], boundary: Boundary, store: Mapping[int, Store]
    ) -> list[Any]:
        """Runs the second half on the inputs and on what the first half returned, as global arrays."""
        values, (passed, inner) = initial_values(self.body, inputs), boundary
        values.update(zip(self.passed, passed, strict=True))
        inner_of = dict(zip(self._branches, inner, strict=True))
        outs, computed = self.jaxpr.outvars, outputs_of(self._second)
        to_store = {v: store[i] for i, v in enumerate(outs) if i in store and not is_literal(v)}

        def override_of(eqn: Any) -> Override:
            if (branches := self._branches.get(id(eqn))) is None:
                return None
            # Inside the branch, so that a branch that leaves state unchanged costs nothing.
            early = {i: to_store.pop(v) for i, v in enumerate(eqn.outvars) if v in to_store}
            return functools.partial(branches.second, inner_of[id(eqn)], early)

        run_with(self.jaxpr, self._second, values, [*inputs_of(self._second), *outs], override_of)
        values.update((v, put(value_of(v, values), v in computed)) for v, put in to_store.items())
        return [value_of(v, values) for v in outs]


class Branches:
    """A condition around a collective, with the same predicate on all replicas: each branch is split."""

    def __init__(
        self,
        eqn: Any,
        operands: Sequence[Mark],
        around: SplitStep,
        wanted: Mapping[int, ShareSpec | None],
    ) -> None:
        of, mirrored = type(around), [True] * len(eqn.outvars)
        self.halves = [
            of(body, operands[1:], mirrored, around.mesh, {}, wanted)
            for body in eqn.params["branches"]
        ]
        self._operands = sorted({i for halves in self.halves for i in halves.reads})
        self.reads = [eqn.invars[0], *(eqn.invars[1 + i] for i in self._operands)]
        """The index of the branch, and the operands that the first half of any branch takes."""

    def first(self, reads: Sequence[Any]) -> list[Boundary]:
        """Runs the first half of the branch that is taken, and returns zeros for the others."""
        index, *operands = reads

        def branch(taken: SplitStep, *operands: Any) -> list[Boundary]:
            operand = dict(zip(self._operands, operands, strict=True))
            return [
                halves.first([operand[i] for i in halves.reads])
                if halves is taken
                else jax.tree.map(BoundaryValue.zeros, halves.boundary())
                for halves in self.halves
            ]

        branches = [functools.partial(branch, halves) for halves in self.halves]
        outs: list[Boundary] = jax.lax.switch(index, branches, *operands)
        return outs

    def second(
        self, boundary: Sequence[Boundary], store: Mapping[int, Store], index: Any, *operands: Any
    ) -> list[Any]:
        """Runs the second half of the branch that is taken."""
        branches = [
            lambda inputs, parts, k=k, halves=halves: halves.second(inputs, parts[k], store)
            for k, halves in enumerate(self.halves)
        ]
        outs: list[Any] = jax.lax.switch(index, branches, list(operands), boundary)
        return outs


def _wanted(jaxpr: Any, results: Mapping[int, ShareSpec | None]) -> dict[Any, ShareSpec]:
    """Returns the specs of values that divided results are computed from, if of the same shape."""
    outs = [(jaxpr.outvars[i], spec) for i, spec in results.items()]
    wanted = {v: spec for v, spec in outs if spec and not is_literal(v)}
    for eqn in reversed(jaxpr.eqns):
        for v, out in itertools.product(variables(eqn.invars), eqn.outvars):
            if out in wanted and getattr(v.aval, "shape", None) == out.aval.shape:
                wanted.setdefault(v, wanted[out])
    return wanted


def is_bound_to_replicas(eqn: Any) -> bool:
    """True if an equation communicates, has effects, or draws numbers that depend on its shape."""
    acts = any(collectives(eqn, DATA)) or has_effects(eqn)
    return acts or any(map(draws_by_shape, with_inner(eqn)))


def draws_by_shape(eqn: Any) -> bool:
    """True if an equation draws other numbers when XLA partitions it, as ``rbg`` keys do."""
    of_rbg = eqn.primitive.name == "random_bits" and "rbg" in str(eqn.invars[0].aval.dtype)
    return of_rbg or eqn.primitive.name in {"rng_bit_generator", "rng_uniform"}


def _is_for_each(eqn: Any) -> bool:
    """True if an equation must run on each replica although its results are equal on all."""
    inside = (inner.primitive.name for inner in with_inner(eqn))
    return is_bound_to_replicas(eqn) or not _SHARDING_PRIMITIVES.isdisjoint(inside)


def _is_sum(eqn: Any) -> bool:
    """True if an equation only sums arrays over all replicas."""
    usual = eqn.params.get("axes") == (DATA,) and eqn.params.get("axis_index_groups") is None
    arrays = not any(is_literal(v) or v.aval.dtype == bool for v in eqn.invars)
    return eqn.primitive.name == "psum" and usual and arrays


def is_plain_cond(eqn: Any) -> bool:
    """True if an equation is a condition without effects."""
    return eqn.primitive.name == "cond" and not has_effects(eqn)
