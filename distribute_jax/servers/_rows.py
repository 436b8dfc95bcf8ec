"""Runs equations on some rows of their arrays, for variables whose rows are divided among servers.

The update of a variable is mostly elementwise: a server that has some rows of it computes their new values
from the same rows of the gradient. Values that an equation needs whole, such as a step count or random
numbers for all rows, are passed whole.

A table that the step reads only by lookups, with indices computed from the batch, is sparse: a worker
computes the indices first, reads these rows, and pushes their gradients, which are zero in all other rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from distribute_jax._errors import ArgumentError, log_once
from distribute_jax.program._jaxprs import (
    Values,
    equations_before,
    has_effects,
    initial_values,
    inputs_of,
    is_literal,
    line,
    open_jaxpr,
    run_equations,
    value_of,
    variables,
)
from distribute_jax.program._padding_rules import ELEMENTWISE


class Rows(NamedTuple):
    """Consecutive rows of an array."""

    first: int
    stop: int

    def of(self, array: Any) -> Any:
        """Returns these rows."""
        return array[self.first : self.stop]

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of these rows of an array of a shape."""
        return (self.stop - self.first, *whole[1:])


class RowIds:
    """The rows of an array that a batch looks up: their number is static, the ids are traced."""

    def __init__(self, number: int, rows: Rows, whole: Rows | None = None) -> None:
        """Takes the largest number of rows that are looked up, among these ``rows`` of the array.

        ``whole`` are the rows that a server has of the array, if not all.
        """
        self.number, self.rows, self.whole = number, rows, whole
        self._ids: Any = None

    def among(self, rows: Rows | None) -> RowIds:
        """Returns those that a server looks up, which has some rows of the array, or all of them."""
        size = (rows or self.rows).stop - (rows or self.rows).first
        return RowIds(min(self.number, size), Rows(0, size), rows)

    def set(self, plus_one: Any) -> None:
        """Sets the row ids: sorted, each plus 1, and padded with zeros."""
        plus_one = jnp.asarray(plus_one)
        self._ids = jnp.where(plus_one == 0, np.iinfo(np.int32).max, plus_one - 1)

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of these rows of an array of a shape."""
        return (self.number, *whole[1:])

    def of(self, array: Any) -> Any:
        """Returns these rows of an array that has all rows."""
        return self.of_part(self.whole.of(array) if self.whole else array)

    def of_part(self, array: Any) -> Any:
        """Returns these rows of an array that has those of the server."""
        return array.at[self._ids].get(mode="fill", fill_value=0)

    def put(self, array: Any, values: Any) -> Any:
        """Returns an array with other values in these rows."""
        return array.at[self._ids].set(values, mode="drop")

    def local(self, eqn: Any, indices: Any) -> Any:
        """Returns the indices of an equation, relative to these rows; those out of range have no effect."""
        flat = indices[..., 0].astype(jnp.int32)
        if _clips(eqn):
            flat = jnp.clip(flat, 0, eqn.invars[0].aval.shape[0] - 1)
        at = jnp.minimum(jnp.searchsorted(self._ids, flat), self.number - 1)
        known = (self._ids[at] == flat) & (flat >= 0) & (flat < self.rows.stop)
        return jnp.where(known, at, self.number)[..., None].astype(indices.dtype)


def _clips(eqn: Any) -> bool:
    return "CLIP" in str(eqn.params["mode"])


def filled(array: Any, like: Any) -> Any:
    """Restores the trailing zeros of an array that was sent without them."""
    if np.shape(array) == like.shape:
        return array
    whole = np.zeros(like.shape, like.dtype)
    whole[: len(array)] = array
    return whole


def joined(arrays: Sequence[Any]) -> Any:
    """Concatenates the parts of an array."""
    first = arrays[0]
    np_or_jnp: Any = np if isinstance(first, np.ndarray) else jnp
    return first if len(arrays) == 1 else np_or_jnp.concatenate(arrays)


def parts(partitioner: Callable[..., Any] | None, most: int, name: str, like: Any) -> list[Rows]:
    """Returns the rows of each part that the user's partitioner divides a variable into, at most ``most``."""
    shape = tuple(like.shape)
    if partitioner is None or not shape:
        return []
    numbers = partitioner(shape=shape, dtype=like.dtype)
    is_list = isinstance(numbers, (list, tuple)) and len(numbers) == len(shape)
    valid = is_list and all(type(n) is int and n >= 1 for n in numbers)
    if not valid or max(numbers[1:], default=1) > 1:
        raise ArgumentError(_BAD_PARTITION.format(name=name, shape=shape, numbers=numbers))
    number = min(numbers[0], shape[0], most)
    size, more = divmod(shape[0], number) if number else (0, 0)
    firsts = [i * size + min(i, more) for i in range(number + 1)]
    return [Rows(*pair) for pair in itertools.pairwise(firsts)]


_BAD_PARTITION = """\
variable_partitioner returned {numbers!r:.80} for {name} of shape {shape}. It must return a list with the \
number of parts along each dim, such as [2, 1] for two dims; only dim 0 is divided."""


Selected = tuple[Any, Rows | RowIds | None]
"""A variable of a program, and which rows of it; None for all."""


class Needs:
    """The values, whole or some rows of them, that equations need to compute some results."""

    def __init__(
        self,
        eqns: Sequence[Any],
        rows: Mapping[Any, Rows | RowIds],
        whole: Iterable[Any] = (),
        lookups: Mapping[int, RowIds] = MappingProxyType({}),
    ) -> None:
        """Takes the results that are wanted, by ``rows`` or ``whole``.

        ``lookups`` are the equations, by id, that read only these rows of a table.
        """
        self.eqns, self.rows = eqns, {v: rows[v] for v in variables(rows)}
        self._lookups = lookups
        self.whole: dict[Any, Any] = dict.fromkeys(variables(whole))
        """The values that are needed whole, with an equation that needs them so."""
        for eqn in reversed(eqns):
            requested = [self.rows[v] for v in eqn.outvars if v in self.rows]
            is_whole = self.runs_whole(eqn)
            operands = _operands(eqn, requested[0]) if requested and not is_whole else None
            if operands is None and (requested or is_whole):
                operands = [lookups.get(id(eqn)), *[None] * (len(eqn.invars) - 1)]
                for v in eqn.outvars:
                    self.whole.setdefault(v, eqn)
            for v, of in zip(eqn.invars, operands or (), strict=False):
                if not is_literal(v) and (of is None or self.rows.setdefault(v, of) != of):
                    self.whole.setdefault(v, eqn)

    def runs_whole(self, eqn: Any) -> bool:
        """True if an equation has effects, or a result that is needed whole."""
        return has_effects(eqn) or any(v in self.whole for v in eqn.outvars)

    def by_rows(self, eqn: Any) -> bool:
        """True if an equation runs on some rows."""
        return any(v in self.rows for v in eqn.outvars) and not self.runs_whole(eqn)

    def is_lookup(self, eqn: Any) -> bool:
        """True if an equation reads some rows of a table."""
        return id(eqn) in self._lookups and eqn.invars[0] not in self.whole


class Computed:
    """The values that equations compute: whole, or the rows that are needed."""

    def __init__(self, body: Any, needs: Needs) -> None:
        """Starts with the constants of a program."""
        self._jaxpr, self._needs = open_jaxpr(body), needs
        self._whole = initial_values(body, [None] * len(self._jaxpr.invars))
        self._rows: Values = {}

    def add(self, v: Any, rows: Rows | RowIds | None, value: Any) -> None:
        """Adds an input, of which these rows are known: keeps what is needed of it."""
        wanted = None if v in self._needs.whole else self._needs.rows.get(v)
        if isinstance(rows, RowIds) and wanted is not rows:
            value = rows.put(jnp.zeros((rows.rows.stop, *value.shape[1:]), value.dtype), value)
            rows = rows.whole
        elif isinstance(wanted, RowIds) and wanted is not rows:
            value = wanted.of_part(value) if rows else wanted.of(value)
            rows = wanted
        (self._whole if rows is None else self._rows)[v] = value

    def run(self) -> None:
        """Runs the equations."""
        for kind, eqns in itertools.groupby(self._needs.eqns, self._kind):
            if kind == "whole":
                run_equations(self._jaxpr, list(eqns), self._whole, self._needs.whole)
            elif kind:
                values = self._rows if kind == "by rows" else self._whole
                values.update((eqn.outvars[0], self._on_rows(eqn)) for eqn in eqns)

    def _kind(self, eqn: Any) -> str:
        """Returns how an equation runs: ``"by rows"``, as a ``"lookup"``, ``"whole"``, or ``""`` (not)."""
        if self._needs.by_rows(eqn):
            return "by rows"
        if not self._needs.runs_whole(eqn):
            return ""
        return "lookup" if self._needs.is_lookup(eqn) else "whole"

    def _on_rows(self, eqn: Any) -> Any:
        """Returns the result of an equation on some rows, or of a lookup."""
        params = dict(eqn.params)
        if takes_rows(eqn):
            table, indices, *updates = eqn.invars
            ids: Any = self._needs.rows[table]
            others = [ids.local(eqn, self.of(indices)), *map(self.of, updates)]
            return eqn.primitive.bind(self.of(table, ids), *others, **params)
        rows: Any = self._needs.rows[eqn.outvars[0]]
        needed = zip(eqn.invars, _operands(eqn, rows) or (), strict=True)
        operands = [self.of(v, of) for v, of in needed]
        for key in {"shape", "new_sizes"} & params.keys():
            params[key] = rows.shape(params[key])
        if "sharding" in params:
            params["sharding"] = None
        out = eqn.primitive.bind(*operands, **params)
        return out[0] if eqn.primitive.multiple_results else out

    def of(self, v: Any, rows: Rows | RowIds | None = None) -> Any:
        """Returns a value, or these rows of it."""
        if rows is None:
            return value_of(v, self._whole)
        return self._rows[v] if v in self._rows else rows.of(self._whole[v])


_REDUCTIONS = frozenset({
    "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum", "reduce_xor",
    "argmax", "argmin",
})  # fmt: skip


def _operands(eqn: Any, rows: Rows | RowIds) -> list[Any] | None:
    """Returns for each operand which rows of it some rows of the result need; None for the whole.

    None in place of the list means that the equation cannot run on rows.
    """
    kind, params = eqn.primitive.name, eqn.params
    *shapes, out = list[Any](getattr(v.aval, "shape", ()) for v in (*eqn.invars, *eqn.outvars))
    if len(eqn.outvars) > 1 or not out:
        return None
    if kind in SUMS:
        return [rows]
    if kind == "scatter-add" and isinstance(rows, RowIds) and takes_rows(eqn):
        return [rows, None, None]
    if kind in ELEMENTWISE or kind == "select_n":
        fits = all(not shape or (len(shape), shape[0]) == (len(out), out[0]) for shape in shapes)
        return [rows if shape else None for shape in shapes] if fits else None
    same = bool(shapes and shapes[0]) and shapes[0][0] == out[0]
    if kind == "broadcast_in_dim":
        return [rows if same and 0 in params["broadcast_dimensions"] else None]
    dims = params.get("axes", params.get("dimensions")) or ()  # those of a reshape are permuted
    keeps = same and 0 not in dims and kind in {*_REDUCTIONS, "squeeze", "reshape"}
    return [rows] if keeps else None


SUMS = frozenset({"psum", "psum_invariant"})


def takes_rows(eqn: Any) -> bool:
    """True if an equation looks up rows of its first operand, or adds to them."""
    kind, table = eqn.primitive.name, getattr(eqn.invars[0].aval, "shape", ()) if eqn.invars else ()
    if kind not in {"gather", "scatter-add"} or not table or eqn.invars[1].aval.shape[-1:] != (1,):
        return False
    d = eqn.params["dimension_numbers"]
    if kind == "gather":
        dims = d.collapsed_slice_dims, d.start_index_map, d.operand_batching_dims
        window = tuple(eqn.params["slice_sizes"][1:])
    else:
        dims = d.inserted_window_dims, d.scatter_dims_to_operand_dims, d.operand_batching_dims
        window = tuple(eqn.invars[2].aval.shape[i] for i in d.update_window_dims)
    return tuple(map(tuple, dims)) == ((0,), (0,), ()) and window == table[1:]


_MIN_TABLE_ELEMENTS = 1 << 14
"""Tables of fewer elements are read whole, which is faster."""

_WHOLE = """\
Parameter servers send %s whole at each step, though the step looks up rows of it: all rows are used at %s."""


class Lookup(NamedTuple):
    """A lookup of rows, of all tables that are read with the same indices."""

    indices: tuple[tuple[int, bool], ...]
    """The outputs of the index program that it reads, and whether these are clipped."""
    number: int
    """The largest number of rows."""
    rows: int
    """The number of rows of a table."""


class Lookups:
    """The tables that a worker reads by rows, and the gradients that it pushes by rows."""

    def __init__(
        self,
        eqns: Sequence[Any],
        tables: Mapping[Any, str],
        state: set[Any],
        sent: Sequence[Any],
        results: Iterable[Any],
    ) -> None:
        """Finds the lookups in a worker's equations, of state that may be a table, by name.

        Indices must not depend on ``state``. ``sent`` is for servers; ``results`` are returned whole.
        """
        self.eqns, self._state = [one for eqn in eqns for one in _single(eqn)], state
        uses = {v: gathers for v in tables if (gathers := self._gathers(v))}
        whole = list(results)
        while True:
            keys = {v: (_indices(gathers), v.aval.shape[0]) for v, gathers in uses.items()}
            self.ids = {
                key: RowIds(sum(prod(i.aval.shape[:-1]) for i in key[0]), Rows(0, key[1]))
                for key in dict.fromkeys(keys.values())
            }
            self.tables = {v: self.ids[key] for v, key in keys.items()}
            """The rows that are read of each table."""
            self.gradients = {
                v: ids
                for (indices, rows), ids in self.ids.items()
                for v, value in unchanged(self.eqns, {}, indices).items()
                if value is ZERO and v in sent and v.aval.shape[:1] == (rows,)
            }
            """The rows that are sent of each output; the others are zero."""
            lookups = {id(eqn): self.tables[v] for v, gathers in uses.items() for eqn in gathers}
            rest = [*whole, *(v for v in sent if v not in self.gradients)]
            self.needs = Needs(self.eqns, self.gradients, rest, lookups)
            wrong = [v for v in uses if v in self.needs.whole]
            for v in wrong:
                del uses[v]
                eqn = self.needs.whole[v]
                log_once(_WHOLE, tables[v], line(eqn) if eqn else "the end", about=tables[v])
            if not wrong:
                return

    def _gathers(self, table: Any) -> list[Any]:
        """Returns the equations that look up rows of a table; none if it is faster to read all of it."""
        same, gathers = {table}, []
        for eqn in self.eqns:
            if eqn.primitive.name == "gather" and eqn.invars[0] in same and takes_rows(eqn):
                gathers.append(eqn)
            elif eqn.primitive.name in ELEMENTWISE and same.issuperset(variables(eqn.invars)):
                same.update(eqn.outvars)
        indices, shape = _indices(gathers), table.aval.shape
        number = sum(prod(i.aval.shape[:-1]) for i in indices)
        is_worth = prod(shape) >= _MIN_TABLE_ELEMENTS and 2 * number <= shape[0]
        reads = variables(inputs_of(equations_before(self.eqns, indices)))
        return gathers if is_worth and self._state.isdisjoint(reads) else []

    def indices(self) -> tuple[list[Any], list[Lookup]]:
        """Returns the index arrays that a worker computes before it reads tables, and the lookups."""
        atoms = list(dict.fromkeys(v for indices, _ in self.ids for v in sorted(indices, key=id)))
        clipped = {e.invars[1] for e in self.eqns if takes_rows(e) and _clips(e)}
        return atoms, [
            Lookup(tuple((atoms.index(v), v in clipped) for v in indices), ids.number, rows)
            for (indices, rows), ids in self.ids.items()
        ]


def _indices(gathers: Iterable[Any]) -> frozenset[Any]:
    return frozenset(eqn.invars[1] for eqn in gathers)


def _single(eqn: Any) -> list[Any]:
    """Splits a sum of several arrays into sums of one array each."""
    if eqn.primitive.name not in SUMS:
        return [eqn]
    pairs = zip(eqn.invars, eqn.outvars, strict=True)
    return [eqn.replace(invars=[x], outvars=[out]) for x, out in pairs]


ZERO = object()
"""Represents zeros in ``unchanged``."""

_KEEP_ZERO = frozenset({
    "abs", "broadcast_in_dim", "convert_element_type", "copy", "cbrt", "div", "expm1", "integer_pow",
    "log1p", "neg", "psum", "psum_invariant", "reduce_precision", "reshape", "sign", "sin", "sinh", "sqrt",
    "square", "squeeze", "tan", "tanh", "transpose",
})  # fmt: skip
"""Operations whose result is zero where the first operand is zero."""


def unchanged(
    eqns: Iterable[Any], start: Mapping[Any, Any], indices: Collection[Any] = ()
) -> dict[Any, Any]:
    """Returns the values in rows that were not looked up, as far as they are known.

    ``start`` has those of inputs: ``ZERO``, or any object that represents the value. A gradient that is added
    at ``indices``, those of lookups, changes no other row.
    """
    values = dict(start)

    def read(v: Any) -> Any:
        if is_literal(v):
            return ZERO if np.ndim(v.val) == 0 and v.val == 0 else None
        return values.get(v)

    for eqn in eqns:
        value = _unlooked_value(eqn, list(map(read, eqn.invars)), indices)
        if value is not None:
            values[eqn.outvars[0]] = value
    return values


def _unlooked_value(eqn: Any, operands: Sequence[Any], indices: Collection[Any]) -> Any:
    kind, (first, *others) = eqn.primitive.name, operands or [None]
    if kind in _KEEP_ZERO and first is ZERO:
        return None if kind == "integer_pow" and eqn.params["y"] <= 0 else ZERO
    if kind == "mul" and ZERO in operands:
        return ZERO
    if kind in {"add", "add_any"} and first is ZERO:
        return others[0]
    if kind in {"add", "add_any", "sub"} and others[0] is ZERO:
        return first
    if kind == "select_n" and all(case is others[0] for case in others):
        return others[0]
    if kind in {"copy", "convert_element_type"}:
        return first if eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype else None
    is_ours = kind == "scatter-add" and eqn.invars[1] in indices and takes_rows(eqn)
    return first if is_ours else None
