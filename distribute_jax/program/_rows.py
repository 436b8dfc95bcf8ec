"""Equations that are run on some rows of their arrays, which several servers have parts of.

The update of a variable is mostly element by element: a server that has some of its rows computes those of
the new value from the same rows of the gradient. What an equation needs whole, such as a number of steps or
random numbers for all rows, it gets whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex_core
import jax.numpy as jnp

from distribute_jax._errors import ArgumentError
from distribute_jax.program._jaxprs import CALLS, called_body, opened
from distribute_jax.program._padding_rules import ELEMENTWISE
from distribute_jax.program._pieces import Values, run_piece, start, value_of, variables


class Rows(NamedTuple):
    """Some rows of an array."""

    first: int
    stop: int

    def of(self, array: Any) -> Any:
        """Returns these rows."""
        return array[self.first : self.stop]

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of these rows of an array of a shape."""
        return (self.stop - self.first, *whole[1:])


def joined(arrays: Sequence[Any]) -> Any:
    """Returns an array of its parts."""
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays)


def parts(partitioner: Callable[..., Any] | None, most: int, name: str, like: Any) -> list[Rows]:
    """Returns the rows of each part that a variable is divided into, by the user's partitioner."""
    shape = tuple(like.shape)
    if partitioner is None or not shape:
        return []
    numbers = partitioner(shape=shape, dtype=like.dtype)
    is_list = isinstance(numbers, (list, tuple)) and all(type(n) is int for n in numbers)
    if (
        not is_list
        or len(numbers) != len(shape)
        or min(numbers) < 1
        or any(n > 1 for n in numbers[1:])
    ):
        raise ArgumentError(_NOT_PARTS.format(name=name, shape=shape, numbers=numbers))
    number = min(numbers[0], shape[0], most)
    size, more = divmod(shape[0], number) if number else (0, 0)
    firsts = [i * size + min(i, more) for i in range(number + 1)]
    return [Rows(*pair) for pair in itertools.pairwise(firsts)]


_NOT_PARTS = """\
variable_partitioner returned {numbers!r:.80} for {name} of shape {shape}. It must return a list with the \
number of parts along each dim, such as [2, 1] for two dims; only dim 0 is divided."""


class Needs:
    """What some equations need to compute some values, whole or some rows of them."""

    def __init__(
        self, eqns: Sequence[Any], rows: Mapping[Any, Rows], whole: Iterable[Any] = ()
    ) -> None:
        """Takes of which variables ``rows`` are asked for, and of which the ``whole``."""
        self.eqns, self.rows = eqns, {v: rows[v] for v in variables(rows)}
        self.whole: dict[Any, Any] = dict.fromkeys(variables(whole))
        """What is needed whole, with an equation that needs it so."""
        for eqn in reversed(eqns):
            asked = [self.rows[v] for v in eqn.outvars if v in self.rows]
            is_whole = any(v in self.whole for v in eqn.outvars)
            operands = _operands(eqn, asked[0]) if asked and not is_whole else None
            if operands is None and (asked or is_whole):
                operands = [None] * len(eqn.invars)
                self._ask_whole(eqn.outvars, eqn)
            for v, of in zip(eqn.invars, operands or (), strict=False):
                if isinstance(v, jex_core.Literal) or of == ():
                    continue
                if of is None or self.rows.setdefault(v, of) != of:
                    self._ask_whole([v], eqn)

    def _ask_whole(self, some: Iterable[Any], eqn: Any) -> None:
        for v in some:
            self.whole.setdefault(v, eqn)

    def by_rows(self, eqn: Any) -> bool:
        """Returns whether an equation is run on some rows."""
        return any(v in self.rows for v in eqn.outvars) and not any(
            v in self.whole for v in eqn.outvars
        )

    def run(self, jaxpr: Any, known: Values, some: Values, wanted: Iterable[Any] = ()) -> None:
        """Runs the equations: adds what is needed whole to what is ``known``, and to ``some`` the rows."""
        eqns = [eqn for eqn in self.eqns if not self.by_rows(eqn)]
        run_piece(jaxpr, eqns, known, [*self.whole, *wanted])
        for eqn in filter(self.by_rows, self.eqns):
            outs = _run(eqn, self, known, some)
            some.update(zip(eqn.outvars, outs, strict=True))

    def value(self, v: Any, known: Values, some: Values) -> Any:
        """Returns the rows that are needed of a value."""
        return some[v] if v in some else self.rows[v].of(value_of(v, known))


_REDUCTIONS = frozenset({
    "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum", "reduce_xor",
    "argmax", "argmin",
})  # fmt: skip


def _operands(eqn: Any, rows: Rows) -> list[Any] | None:
    """Returns what some rows of the result need of each operand; None for all operands whole.

    That is those rows, None for the whole operand, or () for nothing of it.
    """
    kind, params = eqn.primitive.name, eqn.params
    shapes: list[Any] = [getattr(v.aval, "shape", ()) for v in (*eqn.invars, *eqn.outvars)]
    if kind in CALLS and (body := called_body(eqn)) is not None:
        needs = _in_body(opened(body), rows)
        return [None if v in needs.whole else needs.rows.get(v, ()) for v in opened(body).invars]
    if len(eqn.outvars) > 1 or not shapes[-1]:
        return None
    if kind in ELEMENTWISE or kind == "select_n":
        fits = all(shape in ((), shapes[-1]) for shape in shapes)
        return [rows if shape else None for shape in shapes[:-1]] if fits else None
    if kind == "broadcast_in_dim":
        added = 0 not in params["broadcast_dimensions"] or shapes[0][0] != shapes[-1][0]
        return [None if added else rows]
    keeps = shapes[0] != () and shapes[0][0] == shapes[-1][0]
    keeps &= kind not in _REDUCTIONS or 0 not in params["axes"]
    keeps &= kind != "squeeze" or 0 not in params["dimensions"]
    keeps &= kind != "reshape" or params["dimensions"] is None
    return [rows] if keeps and kind in {*_REDUCTIONS, "squeeze", "reshape"} else None


def _in_body(jaxpr: Any, rows: Rows) -> Needs:
    return Needs(jaxpr.eqns, dict.fromkeys(variables(jaxpr.outvars), rows))


def _run(eqn: Any, needs: Needs, known: Values, some: Values) -> list[Any]:
    """Runs an equation on some rows."""
    rows = next(needs.rows[v] for v in eqn.outvars if v in needs.rows)
    ways = _operands(eqn, rows) or []
    operands = [
        None if of == () else needs.value(v, known, some) if of else value_of(v, known)
        for v, of in zip(eqn.invars, ways, strict=True)
    ]
    if eqn.primitive.name in CALLS:
        body = called_body(eqn)
        inner = opened(body)
        inside, of_rows = start(body, operands), dict(zip(inner.invars, operands, strict=True))
        of_rows = {v: of_rows[v] for v, of in zip(inner.invars, ways, strict=True) if of}
        of_body = _in_body(inner, rows)
        of_body.run(inner, inside, of_rows)
        return [of_body.value(v, inside, of_rows) for v in inner.outvars]
    params = dict(eqn.params)
    for key in {"shape", "new_sizes"} & params.keys():
        params[key] = rows.shape(params[key])
    if "sharding" in params:
        params["sharding"] = None
    return [eqn.primitive.bind(*operands, **params)]
