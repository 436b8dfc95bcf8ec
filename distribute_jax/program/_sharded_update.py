"""Sharded updates: splits a step into what each replica computes and the rest, which XLA partitions.

In a training step the gradients are reduce-scattered, each replica updates its share of the weights with its
share of the optimizer's state, and the new weights are gathered. The second half reads only what is equal on
all replicas, so it needs no replica axis, and XLA divides its work as its inputs are sharded.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar

import jax
import jax.extend.core as jex_core
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
from distribute_jax.program._gather import Cut, Gathering, Share, without_forwarding
from distribute_jax.program._jaxprs import (
    Override,
    Values,
    collectives,
    has_effects,
    initial_values,
    inputs_of,
    is_jit_of_collectives,
    outputs_of,
    run_equations,
    value_of,
    variables,
    with_inner,
    with_overrides,
)
from distribute_jax.program._lowerings import Compiled, FlatStep, compile_for_mesh
from distribute_jax.program._placement import share_sharding, share_spec
from distribute_jax.program._replication import Walk
from distribute_jax.program._replication_rules import MIRRORED, Control, Mark

_NOT_REPLICATED = frozenset({"a divided input"})


_S = TypeVar("_S", bound="SplitStep")


def compile_shares(step: FlatStep) -> Compiled:
    """Compiles a step of all replicas, over global arrays."""
    return compile_for_mesh(step, step.function)


def on_shares(step: FlatStep, split: type[SplitStep]) -> FlatStep:
    """Returns a step of all replicas, over global arrays, from that of one; sharded state is shared."""
    mesh, shardings = step.mesh, step.shardings
    over: Any = next((to.mesh for to in shardings.sharded_in.values()), mesh)
    body = traced(step)
    outs = [v.aval for v in body.jaxpr.outvars]
    # What is stored whole is computed in shares too, as the weights of a sharded update.
    wanted = {
        i: shardings.sharded_out.get(i) or share_sharding(outs[i], over)
        for i in (*range(shardings.state), *shardings.sharded_out)
        if shardings.mirrored[i]
    }
    shares = {i: Cut.of(to, step.avals[i].ndim) for i, to in shardings.sharded_in.items()}
    results = {i: Cut.of(to, outs[i].ndim) for i, to in wanted.items() if to is not None}
    halves = split_in(split, step, body, shares, results)
    first: Callable[..., Any] = jax.shard_map(
        lambda *inputs: halves.first(inputs),
        mesh=mesh,
        in_specs=tuple(
            share_spec(0 if shardings.split[i] else cut and cut.dim)
            for i in halves.reads
            for cut in [shares.get(i)]
        ),
        out_specs=[share_spec(value.dim) for value in halves.handed()],
        axis_names=manual_axes(mesh),
        check_vma=False,
    )
    settle = {
        i: functools.partial(
            _settled, to=in_device_memory(to), mesh=mesh, kept=i in shardings.sharded_out
        )
        for i, to in wanted.items()
        if to is not None
    }

    def all_replicas(*inputs: Any) -> list[Any]:
        parts = first(*(_every_copy(inputs[i], shares.get(i), over) for i in halves.reads))
        handed = [
            _every_copy(x, value.cut, over, back=True)
            for x, value in zip(parts, halves.handed(), strict=True)
        ]
        return halves.rest(inputs, handed, settle)

    return replace(step, function=all_replicas)


def _every_copy(array: Any, cut: Cut | None, mesh: Mesh, *, back: bool = False) -> Any:
    """Returns the copies of a divided array that the groups of a mesh have, one after the other.

    Or ``back``, from equal copies the array. That is how the mesh of all replicas divides it too, so nothing
    is sent.
    """
    if cut is None or GROUP not in mesh.axis_names or cut.shares == mesh.size:
        return array
    specs = share_spec(cut.dim, SHARD), share_spec(cut.dim, (GROUP, SHARD))
    one, every = reversed(specs) if back else specs
    return jax.shard_map(lambda x: x, mesh=mesh, in_specs=one, out_specs=every, check_vma=False)(
        array
    )


def split_in(
    kind: type[_S],
    step: FlatStep,
    body: Any,
    shares: Mapping[int, Cut | None],
    results: Mapping[int, Cut | None],
) -> _S:
    """Returns the two halves of a traced step."""
    marks = [_NOT_REPLICATED if split else MIRRORED for split in step.shardings.split]
    each, replicas = replicas_per_device(step.mesh), num_replicas(step.mesh)
    return kind(
        body,
        marks,
        step.shardings.mirrored,
        replicas,
        each,
        shares,
        results,
        step.reshard_after_forward,
    )


def traced(step: FlatStep, opens: Callable[[Any], bool] = lambda eqn: False) -> Any:
    """Traces the step of one replica with all that the lowering added to it.

    In the place of ``jit``s around collectives, and of those that it ``opens``, is what they run.
    """

    def way(eqn: Any) -> Override:
        is_opened = is_jit_of_collectives(eqn) or opens(eqn)
        return with_overrides(eqn.params["jaxpr"], way) if is_opened else None

    replicas = num_replicas(step.mesh)
    shares = [
        jax.ShapeDtypeStruct((a.shape[0] // replicas, *a.shape[1:]), a.dtype) if split else a
        for a, split in zip(step.avals, step.shardings.split, strict=True)
    ]
    with jax.sharding.use_abstract_mesh(inside_replica(step.mesh)):
        body = jax.make_jaxpr(step.function, axis_env=[(DATA, replicas)])(*shares)
        if any(map(way, body.jaxpr.eqns)):
            body = jax.make_jaxpr(with_overrides(body, way), axis_env=[(DATA, replicas)])(*shares)
    return without_forwarding(body)


def _settled(
    new: jax.Array, computed: bool, *, to: NamedSharding, mesh: Mesh, kept: bool
) -> jax.Array:
    """Has each replica compute its share of new state, which is kept so, or gathered."""
    if not (computed or kept):
        return new
    settled: jax.Array = jax.lax.with_sharding_constraint(new, to)
    if not kept:
        settled = jax.lax.with_sharding_constraint(settled, mirrored_sharding(mesh))
    return settled


_PLACED = frozenset({"sharding_constraint", "layout_constraint", "shard_map", "reshard"})
"""What speaks of the mesh as code inside sees it."""


Settle = Callable[[jax.Array, bool], jax.Array]
"""Places an output where it is stored between steps; the flag says whether the second half computed it."""


@dataclass(frozen=True, eq=False)
class BoundaryValue:
    """A value that the first half hands to the second."""

    aval: Any
    cut: Cut | None = None
    """How it is divided where each replica hands on its share; None where each has the whole."""

    @property
    def dim(self) -> int | None:
        """The dim along which it is divided."""
        return None if self.cut is None else self.cut.dim

    def zeros(self) -> jax.Array:
        """Stands in, on one replica, for the value where it is not computed."""
        shape = list(self.aval.shape)
        if self.cut is not None:
            shape[self.cut.dim] //= self.cut.shares
        return jnp.zeros(shape, self.aval.dtype)


class SplitStep:
    """The two halves of a jaxpr of one replica; outputs that are not mirrored are stacked along dim 0."""

    def __init__(
        self,
        body: Any,
        marks: Sequence[Mark],
        mirrored: Sequence[bool],
        replicas: int,
        each: int,
        shares: Mapping[int, Cut | None],
        results: Mapping[int, Cut | None],
        reshard_after_forward: bool | None = None,
    ) -> None:
        """Splits a step of so many replicas, ``each`` of them on a device.

        ``shares`` says how inputs are divided, ``results`` how outputs should be.
        """
        self._reshard = reshard_after_forward
        self.body, self.jaxpr, self.replicas, self.each = body, body.jaxpr, replicas, each
        self._shares = {i: cut for i, cut in shares.items() if cut is not None}
        self._wanted = _wanted(self.jaxpr, results)
        self._marks: dict[Any, Mark] = dict(zip(self.jaxpr.invars, marks, strict=True))
        self._walk = Walk(replicas)
        self._first: list[Any] = []
        self._sums: list[Any] = []
        self._branches: dict[int, Branches] = {}
        self._rest: list[Any] = []
        outs = zip(self.jaxpr.outvars, mirrored, strict=True)
        self.per_replica = set(variables(v for v, same in outs if not same))
        self._needed = set(self.per_replica)
        self._sort(self._marked())
        self.passed = self._passed()
        """What goes from the first half to the second, by variable of the jaxpr."""
        first = [*self._first, *self._sums]
        read = {v for eqn in first for v in variables(eqn.invars)} | self._needed | set(self.passed)
        self.reads = [i for i, v in enumerate(self.jaxpr.invars) if v in read]
        """The inputs that the first half takes."""

    def _marked(self) -> list[tuple[Any, list[Mark], bool]]:
        """Returns each equation with its operands' marks, and whether replicas differ in its results."""
        marks = self._marks
        marks.update(dict.fromkeys(self.jaxpr.constvars, MIRRORED))
        marked = []
        for eqn in self.jaxpr.eqns:
            operands = [
                MIRRORED if isinstance(v, jex_core.Literal) else marks[v] for v in eqn.invars
            ]
            outcome = self._walk.apply(eqn, operands, Control())
            marks.update(zip(eqn.outvars, outcome.outs, strict=True))
            for i, mark in outcome.writes.items():
                marks[eqn.invars[i]] = mark
            marked.append((eqn, operands, any(outcome.outs)))
        return marked

    def is_for_each(self, eqn: Any) -> bool:
        """Returns whether an equation belongs on each replica although all of them do the same in it."""
        return is_bound_to_replicas(eqn) or any(
            inner.primitive.name in _PLACED for inner in with_inner(eqn)
        )

    def _sort(self, marked: Sequence[tuple[Any, list[Mark], bool]]) -> None:
        """Goes from the end to the start: a replica computes what it needs itself, and no more."""
        for eqn, operands, differs in reversed(marked):
            needed = any(v in self._needed for v in eqn.outvars)
            each = differs or any(operands) or self.is_for_each(eqn)
            if not needed and not each:
                self._rest.append(eqn)
            elif not needed and not differs and _is_sum(eqn):
                self._sums.append(eqn)
                self._needed.update(variables(eqn.invars))
            elif not needed and not differs and _is_cond(eqn) and not operands[0]:
                wanted = {i: self._wanted.get(v) for i, v in enumerate(eqn.outvars)}
                branches = Branches(eqn, operands, self, wanted)
                self._branches[id(eqn)] = branches
                self._rest.append(eqn)
                self._needed.update(variables(branches.reads))
            else:
                self._first.append(eqn)
                self._needed.update(variables(eqn.invars))
        for eqns in (self._first, self._sums, self._rest):
            eqns.reverse()

    def _passed(self) -> dict[Any, BoundaryValue]:
        outs = variables(self.jaxpr.outvars)
        after = variables([*inputs_of(self._rest), *outs])
        first = outputs_of(self._first)
        passed: dict[Any, BoundaryValue] = {}
        for v in after:
            if v in self.per_replica:
                passed[v] = BoundaryValue(
                    v.aval, Cut(0, (None,) * v.aval.ndim, self.replicas // self.each)
                )
            elif v in first or self._marks.get(v):
                passed[v] = BoundaryValue(v.aval)
        used = set(after)
        for v in (v for eqn in self._sums for v in eqn.outvars if v in used):
            # What is a result is wanted whole.
            passed[v] = BoundaryValue(v.aval, None if v in outs else self._wanted.get(v))
        return passed

    def handed(self) -> list[BoundaryValue]:
        """Returns what the first half returns, in order."""
        inner = [value for branches in self._branches.values() for value in branches.handed()]
        return [*self.passed.values(), *inner]

    def first(self, inputs: Sequence[Any]) -> list[Any]:
        """Runs the first half on one replica, from the inputs that it reads."""
        values, gathering = self.started(inputs), self.gathering()
        wanted = [*self.passed, *self._needed]
        gathering.run(self.jaxpr, self._first, values, wanted, self.scattered())
        self.add_up(values)
        inner = self.of_branches(values, gathering)
        return [*gathering.whole([values[v] for v in self.passed]), *inner]

    def of_branches(self, values: Values, gathering: Gathering) -> list[Any]:
        """Returns what the first halves of all branches return."""
        return [
            value
            for branches in self._branches.values()
            for value in branches.first(
                gathering.whole([value_of(v, values) for v in branches.reads])
            )
        ]

    def started(self, inputs: Sequence[Any]) -> Values:
        """Returns the values that the first half starts from, of the inputs that it reads."""
        read: dict[int, Any] = dict(zip(self.reads, inputs, strict=True))
        read.update((i, Share(read[i], cut)) for i, cut in self._shares.items() if i in read)
        return initial_values(self.body, [read.get(i) for i in range(len(self.jaxpr.invars))])

    def gathering(self) -> Gathering:
        """Returns what runs equations that read shares."""
        total = sum(prod(self.jaxpr.invars[i].aval.shape) for i in self._shares)
        return Gathering(total, self._reshard)

    def sums(self) -> list[tuple[Any, Any]]:
        """Returns what is summed between the halves, with the sum."""
        pairs = [pair for eqn in self._sums for pair in zip(eqn.invars, eqn.outvars, strict=True)]
        return [(x, out) for x, out in pairs if out in self.passed]

    def scattered(self) -> dict[Any, Cut]:
        """Returns what is summed and not read otherwise, with how the sum is divided."""
        uses = Counter(v for eqn in (*self._first, *self._sums) for v in set(variables(eqn.invars)))
        return {
            x: cut
            for x, out in self.sums()
            if (cut := self.passed[out].cut) and uses[x] == 1 and x not in self.passed
        }

    def add_up(self, values: Values) -> None:
        """Adds up over the replicas; of an array that is divided, each gets only its share."""
        passed, sums = self.passed, self.sums()
        undivided = [(x, out) for x, out in sums if passed[out].cut is None]
        totals = (
            jax.lax.psum([value_of(x, values) for x, _ in undivided], DATA) if undivided else []
        )
        values.update(zip([out for _, out in undivided], totals, strict=True))
        for x, out in sums:
            if (cut := passed[out].cut) is not None:
                value = value_of(x, values)
                share = value if isinstance(value, Share) else cut.scatter(value)
                values[out] = share.local

    def rest(
        self, inputs: Sequence[Any], handed: Sequence[Any], settle: Mapping[int, Settle]
    ) -> list[Any]:
        """Runs the second half on all inputs and what the first half returned, as global arrays."""
        values = initial_values(self.body, inputs)
        flow = iter(handed)
        values.update((v, next(flow)) for v in self.passed)
        inner = {
            key: [next(flow) for _ in branches.handed()] for key, branches in self._branches.items()
        }
        wanted = [*inputs_of(self._rest), *self.jaxpr.outvars]
        to_settle = {
            v: settle[i]
            for i, v in enumerate(self.jaxpr.outvars)
            if i in settle and not isinstance(v, jex_core.Literal)
        }
        computed = outputs_of(self._rest)
        for has_branches, eqns in itertools.groupby(
            self._rest, lambda eqn: id(eqn) in self._branches
        ):
            if not has_branches:
                run_equations(self.jaxpr, list(eqns), values, wanted)
                continue
            for eqn in eqns:
                # In the branch, so that what is left as it is costs nothing.
                early = {i: to_settle.pop(v) for i, v in enumerate(eqn.outvars) if v in to_settle}
                self._branches[id(eqn)].rest(values, inner[id(eqn)], early)
        values.update((v, put(value_of(v, values), v in computed)) for v, put in to_settle.items())
        return [value_of(v, values) for v in self.jaxpr.outvars]


class Branches:
    """A condition on which all replicas agree, around a collective: each branch is split by itself."""

    def __init__(
        self,
        eqn: Any,
        operands: Sequence[Mark],
        around: SplitStep,
        wanted: Mapping[int, Cut | None],
    ) -> None:
        self.eqn = eqn
        mirrored, of = [True] * len(eqn.outvars), type(around)
        self.halves = [
            of(body, operands[1:], mirrored, around.replicas, around.each, {}, wanted)
            for body in eqn.params["branches"]
        ]
        self._operands = sorted({i for halves in self.halves for i in halves.reads})
        self.reads = [eqn.invars[0], *(eqn.invars[1 + i] for i in self._operands)]
        """The operands that the first half of any branch takes, after the index of the branch."""

    def handed(self) -> list[BoundaryValue]:
        """Returns what the first halves of all branches return."""
        return [value for halves in self.halves for value in halves.handed()]

    def first(self, reads: Sequence[Any]) -> list[Any]:
        """Runs the first half of the branch that is taken; those of the others give zeros."""
        index, *operands = reads

        def branch(number: int, *operands: Any) -> list[Any]:
            operand = dict(zip(self._operands, operands, strict=True))
            return [
                value
                for k, halves in enumerate(self.halves)
                for value in (
                    halves.first([operand[i] for i in halves.reads])
                    if k == number
                    else [boundary.zeros() for boundary in halves.handed()]
                )
            ]

        branches = [functools.partial(branch, number) for number in range(len(self.halves))]
        return list(jax.lax.switch(index, branches, *operands))

    def rest(self, values: Values, handed: Sequence[Any], settle: Mapping[int, Settle]) -> None:
        """Runs the second half of the branch that is taken, and adds its results to the values."""
        index, *inputs = (value_of(v, values) for v in self.eqn.invars)
        flow = iter(handed)
        parts = [list(itertools.islice(flow, len(halves.handed()))) for halves in self.halves]

        def branch(number: int, inputs: Any, parts: Any) -> list[Any]:
            return self.halves[number].rest(inputs, parts[number], settle)

        branches = [functools.partial(branch, number) for number in range(len(self.halves))]
        outs = jax.lax.switch(index, branches, inputs, parts)
        values.update(zip(self.eqn.outvars, outs, strict=True))


def _wanted(jaxpr: jex_core.Jaxpr, results: Mapping[int, Cut | None]) -> dict[Any, Cut]:
    """Returns how the values are divided of which divided results are made, element by element."""
    outs = [(jaxpr.outvars[i], cut) for i, cut in results.items()]
    wanted = {v: cut for v, cut in outs if cut and not isinstance(v, jex_core.Literal)}
    for eqn in reversed(jaxpr.eqns):
        for v, out in itertools.product(variables(eqn.invars), eqn.outvars):
            if out in wanted and _shape(v) == _shape(out):
                wanted.setdefault(v, wanted[out])
    return wanted


def _shape(v: Any) -> Any:
    return getattr(v.aval, "shape", None)


def is_bound_to_replicas(eqn: Any) -> bool:
    """Returns whether an equation communicates, has effects, or draws numbers that depend on its shape."""
    acts = any(collectives(eqn, DATA)) or has_effects(eqn)
    return acts or any(map(draws_by_shape, with_inner(eqn)))


def draws_by_shape(eqn: Any) -> bool:
    """Returns whether an equation draws other numbers where XLA divides it, as ``rbg`` keys do."""
    of_rbg = eqn.primitive.name == "random_bits" and "rbg" in str(eqn.invars[0].aval.dtype)
    return of_rbg or eqn.primitive.name in {"rng_bit_generator", "rng_uniform"}


def _is_sum(eqn: Any) -> bool:
    """Returns whether an equation adds arrays up over all replicas, and nothing else."""
    usual = eqn.params.get("axes") == (DATA,) and eqn.params.get("axis_index_groups") is None
    literal = any(isinstance(v, jex_core.Literal) for v in eqn.invars)
    boolean = any(v.aval.dtype == bool for v in eqn.invars)
    return eqn.primitive.name == "psum" and usual and not literal and not boolean


def _is_cond(eqn: Any) -> bool:
    return eqn.primitive.name == "cond" and not has_effects(eqn)
