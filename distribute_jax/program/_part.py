"""The programs of a worker and of servers: some equations of a step, compiled for one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp

from distribute_jax._mesh import DATA, inside_replica, num_replicas
from distribute_jax.program._jaxprs import opened
from distribute_jax.program._lowerings import without_axis
from distribute_jax.program._pieces import Values, start, value_of
from distribute_jax.program._rows import Ids, Needs, Rows, filled
from distribute_jax.program._trace import Call


@dataclass(frozen=True, eq=False)
class Part:
    """A program for one device; it donates nothing, but for ``in_place``."""

    jitted: Callable[[Sequence[Any], Sequence[Any]], list[jax.Array]]
    """Takes state and other values; it may return more than is asked for."""
    state: tuple[jax.ShapeDtypeStruct, ...]
    """The types of the state that it takes."""
    values: tuple[jax.ShapeDtypeStruct, ...]
    """The types of what it takes beside."""
    returns: tuple[jax.ShapeDtypeStruct, ...]
    """The types of what it returns."""
    jaxpr: Any
    """What it runs."""
    touched: tuple[int, ...]
    """The state of which it changes some rows alone."""
    by_rows: bool
    """Whether values may come without the zeros at their ends."""

    def __call__(self, state: Sequence[Any], values: Sequence[Any]) -> list[jax.Array]:
        if self.by_rows:
            values = [*map(filled, values, self.values)]
        return self._returned(self.jitted(state, values))

    def in_place(self, state: Sequence[Any], values: Sequence[Any]) -> list[jax.Array]:
        """Returns the same in the memory of what is ``touched``, which nobody may read after it."""
        given = [state[i] for i in self.touched]
        rest = [None if i in self.touched else x for i, x in enumerate(state)]
        return self._returned(self._donating(given, rest, [*map(filled, values, self.values)]))

    @functools.cached_property
    def _donating(self) -> Callable[..., list[jax.Array]]:
        def run(given: Sequence[Any], rest: Sequence[Any], values: Sequence[Any]) -> Any:
            flow = iter(given)
            state = [next(flow) if i in self.touched else x for i, x in enumerate(rest)]
            return self.jitted(state, values)

        return jax.jit(run, donate_argnums=0)

    def _returned(self, outs: list[jax.Array]) -> list[jax.Array]:
        # The same memory, without the mesh under which the step was traced: nothing else runs under it.
        return [out.addressable_data(0) for out in outs[: len(self.returns)]]


Some = tuple[Any, Rows | Ids | None]
"""A value of the program, and which rows of it; None for all."""


def all_of(some: Iterable[Any]) -> list[Some]:
    """Returns values of which all rows are meant."""
    return [(v, None) for v in some]


def build_part(
    call: Call,
    body: Any,
    needs: Needs,
    takes: tuple[Sequence[Some], Sequence[Some]],
    outs: Sequence[Some],
    shared: Sequence[Any] = (),
    ids: Sequence[Ids] = (),
    touched: Mapping[Any, Any] = MappingProxyType({}),
    by_first: Collection[Any] = (),
) -> Part:
    """Compiles some equations for one device; it returns also what is ``shared``, which nobody reads.

    It takes the numbers of the rows ``ids`` after other values. Of what was ``touched``, by its new value the
    old one, the rows are new that the equations compute. What goes ``by_first`` is zero on all replicas but
    the first: where all are added up, it stays as it is.
    """
    jaxpr = opened(body)
    inputs = [*takes[0], *takes[1]]

    def run(*values: Any) -> list[Any]:
        known, some = start(body, [None] * len(jaxpr.invars)), Values()
        given = dict(zip((v for v, _ in inputs), values[: len(inputs)], strict=True))
        for of, plus_one in zip(ids, values[len(inputs) :], strict=True):
            of.set(plus_one)
        for v, rows in inputs:
            _start(needs, v, rows, given[v], known, some)
        needs.run(jaxpr, known, some)
        more = jax.lax.optimization_barrier([known[v] for v in shared])
        for v in by_first:  # to -0.0 every number can be added
            nothing = jnp.full_like(known[v], -0.0)
            known[v] = jnp.where(known[jaxpr.invars[0]] == 0, known[v], nothing)

        def result(v: Any, rows: Rows | Ids | None) -> Any:
            if not isinstance(v, jex_core.Literal) and v in touched:
                of: Any = needs.rows[v]
                return of.put(given[touched[v]], some[v])
            if rows is None:
                return value_of(v, known)
            return some[v] if v in some else rows.of(known[v])

        return [*(jnp.asarray(result(v, rows)) for v, rows in outs), *more]

    numbers = [jax.ShapeDtypeStruct((rows.number,), jnp.int32) for rows in ids]
    with jax.sharding.use_abstract_mesh(inside_replica(call.mesh)):
        closed = jax.make_jaxpr(run, axis_env=[(DATA, num_replicas(call.mesh))])(
            *map(_like, inputs), *numbers
        )
    whole = without_axis(closed)
    function = jex_core.jaxpr_as_fun(whole)

    def part(state: Sequence[Any], values: Sequence[Any]) -> list[jax.Array]:
        outs: list[jax.Array] = function(*state, *values)
        return outs

    state, values = (tuple(map(_like, some)) for some in takes)
    given = set(touched.values())
    return Part(
        jitted=jax.jit(part),
        state=state,
        values=(*values, *numbers),
        returns=tuple(map(_like, outs)),
        jaxpr=whole,
        touched=tuple(i for i, (v, _) in enumerate(takes[0]) if v in given),
        by_rows=bool(ids),
    )


def _start(needs: Needs, v: Any, rows: Any, value: Any, known: Values, some: Values) -> None:
    """Adds a value that a program takes to those that it starts from: the rows that are needed, or all."""
    wanted: Any = None if v in needs.whole else needs.rows.get(v)
    if isinstance(rows, Ids) and wanted is not rows:
        value = rows.put(jnp.zeros((rows.rows.stop, *value.shape[1:]), value.dtype), value)
        rows = rows.whole
    elif isinstance(wanted, Ids) and wanted is not rows:
        value, rows = wanted.of(value), wanted
    (known if rows is None else some)[v] = value


def _like(pair: Some) -> jax.ShapeDtypeStruct:
    v, rows = pair
    aval, weak = v.aval, getattr(v.aval, "weak_type", False)
    shape = aval.shape if rows is None else rows.shape(aval.shape)
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=weak)
