"""Random programs for the padding proof: operations on the rows of a share, with and without the mask.

A program starts with rows of three numbers, a class for each row, a vector of three that is not a row, the
mask and the counts of real rows. Each statement applies one operation, plainly or inside ``jit``,
``checkpoint``, ``cond``, ``scan`` or a derivative, to values of the kinds that it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax import lax

WIDTH = 3


class Setting(NamedTuple):
    """What every operation can read besides its operands."""

    mask: Any
    counts: Any
    classes: Any

    @property
    def column(self) -> Any:
        """The mask, in the shape of a column."""
        return self.mask[:, None]

    @property
    def real(self) -> Any:
        """How many rows of this share are real, at least 1."""
        return jnp.maximum(self.mask.sum(), 1)


Operation = Callable[..., Any]
"""A function of a setting and operands."""


def _loss_gradient(loss: Callable[[Setting, Any], Any]) -> Operation:
    def gradient(s: Setting, rows: Any, vector: Any) -> Any:
        return jax.grad(lambda v: loss(s, jnp.tanh(rows * v).sum(1)))(vector)

    return gradient


def _loop(s: Setting, rows: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, rows))[1]


OPERATIONS: dict[str, dict[str, Operation]] = {
    # From rows of three numbers.
    "rows>rows": {
        "tanh": lambda s, x: jnp.tanh(x),
        "softmax": lambda s, x: jax.nn.softmax(x, axis=1),
        "sorted in the row": lambda s, x: jnp.sort(x, axis=1),
        "added up in the row": lambda s, x: jnp.cumsum(x, axis=1),
        "zero in padding": lambda s, x: jnp.where(s.column, x, 0),
        "one in padding": lambda s, x: jnp.where(s.column, x, 1),
        "times mask": lambda s, x: x * s.column,
        "only padding": lambda s, x: jnp.where(s.column, 0, x),
        "less the mean": lambda s, x: x - x.mean(0),
        "less the real mean": lambda s, x: x - jnp.where(s.column, x, 0).sum(0) / s.real,
        "turned round": lambda s, x: x[::-1],
        "rolled": lambda s, x: jnp.roll(x, 1, axis=0),
        "added up": lambda s, x: jnp.cumsum(x, axis=0),
        "sorted": lambda s, x: jnp.sort(x, axis=0),
        "flattened": lambda s, x: jnp.sin(x.reshape(-1)).reshape(x.shape),
        "flattened and sorted": lambda s, x: jnp.sort(x.reshape(-1)).reshape(x.shape),
        "transposed": lambda s, x: jnp.cos(x.T).T,
        "mapped": lambda s, x: jax.vmap(lambda row: row / (1 + jnp.abs(row).sum()))(x),
        "looped": _loop,
        "doubled and split": lambda s, x: jnp.split(jnp.concatenate([x, -x]) * 2, 2)[1],
        "a column replaced": lambda s, x: x.at[:, 1].set(x[:, 0] * 2),
        "its own class added": lambda s, x: x.at[jnp.arange(len(x)), s.classes].add(1),
        "noise": lambda s, x: x + jax.random.normal(jax.random.key(0), x.shape),
        "attention": lambda s, x: jax.nn.softmax(x @ x.T) @ x,
        "attention to real": lambda s, x: jax.nn.softmax(jnp.where(s.mask, x @ x.T, -jnp.inf)) @ x,
        "class of a row": lambda s, x: jax.nn.one_hot(s.classes, WIDTH) * x,
        "nan in padding": lambda s, x: jnp.where(s.column, x, jnp.nan),
        "over the mask": lambda s, x: x / s.column,
        "pooled": lambda s, x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 1), "SAME"),
        "pooled over rows": lambda s, x: lax.reduce_window(x, 0.0, lax.add, (2, 1), (1, 1), "SAME"),
        "mapped in turn": lambda s, x: lax.map(jnp.sin, x),
        "padded and cut": lambda s, x: jnp.pad(x, ((0, 0), (1, 1)))[:, 1:-1],
    },
    "rows>row": {
        "row sum": lambda s, x: x.sum(1),
        "row maximum": lambda s, x: x.max(1),
        "of the class": lambda s, x: jnp.take_along_axis(x, s.classes[:, None], axis=1)[:, 0],
        "of the class by index": lambda s, x: x[jnp.arange(len(x)), s.classes],
        "where largest": lambda s, x: jnp.argmax(x, axis=1).astype(x.dtype),
        "cross entropy": lambda s, x: (
            -(jax.nn.log_softmax(x) * jax.nn.one_hot(s.classes, WIDTH)).sum(1)
        ),
        "length": lambda s, x: jnp.sqrt((x * x).sum(1) + 1),
    },
    "rows>vector": {
        "sum": lambda s, x: x.sum(0),
        "mean": lambda s, x: x.mean(0),
        "maximum": lambda s, x: x.max(0),
        "minimum": lambda s, x: x.min(0),
        "real sum": lambda s, x: jnp.where(s.column, x, 0).sum(0),
        "real mean": lambda s, x: jnp.where(s.column, x, 0).sum(0) / s.real,
        "real maximum": lambda s, x: jnp.where(s.column, x, -jnp.inf).max(0),
        "real minimum": lambda s, x: x.min(0, where=s.column, initial=jnp.inf),
        "real product": lambda s, x: jnp.where(s.column, x, 1).prod(0),
        "mean of where": lambda s, x: x.mean(0, where=s.column),
        "variance of where": lambda s, x: x.var(0, where=s.column),
        "variance": lambda s, x: x.var(0),
        "real log sum": lambda s, x: jax.nn.logsumexp(jnp.where(s.column, x, -jnp.inf).T, axis=1),
        "first": lambda s, x: x[0],
        "last": lambda s, x: x[-1],
        "of each class": lambda s, x: jnp.zeros(WIDTH).at[s.classes].add(x[:, 0]),
        "of each class, real": lambda s, x: (
            jnp.zeros(WIDTH).at[s.classes].add(jnp.where(s.mask, x[:, 0], 0))
        ),
        "any above": lambda s, x: (x > 1).any(0).astype(x.dtype),
        "sum over number of rows": lambda s, x: jnp.where(s.column, x, 0).sum(0) / len(x),
        "zero in all": lambda s, x: 0 * x.sum(0),
    },
    "row>row": {
        "abs": lambda s, v: jnp.abs(v),
        "log": lambda s, v: jnp.log1p(jnp.abs(v)),
        "zero in padding": lambda s, v: jnp.where(s.mask, v, 0),
        "over the sum": lambda s, v: v / (1 + jnp.abs(v).sum()),
        "over the real sum": lambda s, v: v / (1 + jnp.abs(v * s.mask).sum()),
        "place": lambda s, v: v * jnp.arange(len(v)),
        "inverse": lambda s, v: 1 / v,
        "sign": lambda s, v: jnp.sign(v),
    },
    "row>number": {
        "sum": lambda s, v: v.sum(),
        "mean": lambda s, v: v.mean(),
        "maximum": lambda s, v: v.max(),
        "real mean": lambda s, v: jnp.where(s.mask, v, 0).sum() / s.counts.sum(),
        "masked sum": lambda s, v: (v * s.mask).sum(),
        "weighted": lambda s, v: jnp.dot(v, s.mask.astype(v.dtype) * (s.classes > 0)),
        "count above": lambda s, v: (v > 0.5).sum().astype(v.dtype),
        "real count above": lambda s, v: ((v > 0.5) & s.mask).sum().astype(v.dtype),
        "number of rows": lambda s, v: jnp.asarray(len(v), v.dtype),
        "of all replicas": lambda s, v: lax.psum(jnp.where(s.mask, v, 0).sum(), "data"),
        "of all replicas, unmasked": lambda s, v: lax.pmean(v.mean(), "data"),
        "summed one by one": lambda s, v: lax.scan(lambda c, a: (c + a, None), 0.0 * v[0], v)[0],
        "mean times share": lambda s, v: jnp.where(s.mask, v, 0).mean() * len(v),
        "all less padding": lambda s, v: v.sum() - jnp.where(s.mask, 0, v).sum(),
    },
    "rows,rows>rows": {
        "plus": lambda s, x, y: (x + y) / 2,
        "times": lambda s, x, y: x * y,
        "larger": lambda s, x, y: jnp.maximum(x, y),
        "chosen": lambda s, x, y: jnp.where(x > 0, x, y),
        "by the mask": lambda s, x, y: jnp.where(s.column, x, y),
    },
    "rows,rows>vector": {
        "products": lambda s, x, y: (x.T @ y).sum(1),
        "real products": lambda s, x, y: (x.T @ jnp.where(s.column, y, 0)).sum(1),
    },
    "rows,row>rows": {"scaled": lambda s, x, v: x * v[:, None]},
    "rows,vector>rows": {
        "vector added": lambda s, x, w: x + w,
        "dense": lambda s, x, w: x @ jnp.outer(w, w),
        "table": lambda s, x, w: x + w[s.classes][:, None],
    },
    "rows,vector>vector": {
        "gradient of a mean": _loss_gradient(lambda s, v: v.mean()),
        "gradient of the real mean": _loss_gradient(
            lambda s, v: jnp.where(s.mask, v, 0).sum() / s.counts.sum()
        ),
        "gradient of a masked product": _loss_gradient(lambda s, v: (v * v * s.mask).sum()),
        "gradient over classes": lambda s, x, w: jax.grad(
            lambda w: jnp.where(s.mask, w[s.classes] * x.sum(1), 0).sum()
        )(w),
    },
    "vector>vector": {"sin": lambda s, w: jnp.sin(w), "psum": lambda s, w: lax.psum(w, "data") / 2},
    "vector,number>vector": {"times number": lambda s, w, a: w * a},
}
"""Operations by the kinds of operands and result: rows of three, a number for each row, a vector of three
that is not a row, and a number."""

WRAPPERS = ("plainly", "plainly", "jit", "checkpoint", "cond", "cond by rows", "scan", "tangent")


class Statement(NamedTuple):
    """One operation of a program."""

    kinds: str
    name: str
    wrapper: str
    places: tuple[int, int]


def _statements() -> st.SearchStrategy[Statement]:
    names = [(kinds, name) for kinds, some in OPERATIONS.items() for name in some]
    return st.builds(
        lambda kind, wrapper, a, b: Statement(kind[0], kind[1], wrapper, (a, b)),
        st.sampled_from(names),
        st.sampled_from(WRAPPERS),
        st.integers(0, 5),
        st.integers(0, 5),
    )


row_programs = st.lists(_statements(), min_size=4, max_size=10)


def _wrapped(wrapper: str, apply: Callable[..., Any], s: Setting, operands: list[Any]) -> Any:
    if wrapper == "jit":
        return jax.jit(apply)(*operands)
    if wrapper == "checkpoint":
        return jax.checkpoint(apply)(*operands)
    if wrapper == "tangent":
        return jax.jvp(apply, tuple(operands), tuple(operands))[1]
    if wrapper.startswith("cond"):
        more = s.counts.sum() > 1 if wrapper == "cond" else s.mask.sum() > 1
        shapes = jax.eval_shape(apply, *operands)
        return lax.cond(
            more, lambda: apply(*operands), lambda: jnp.zeros(shapes.shape, shapes.dtype)
        )
    if wrapper == "scan":
        return lax.scan(
            lambda c, _: (c, apply(*[jnp.cos(c) * o for o in operands])), 0.5, None, length=2
        )[1][1]
    return apply(*operands)


def outputs_of(
    statements: list[Statement], vector: Any, rows: Any, s: Setting
) -> tuple[list[Any], list[Any]]:
    """Runs a program; returns the values without rows, and those with a row for each example."""
    values: dict[str, list[Any]] = {
        "rows": [rows],
        "row": [rows[:, 0]],
        "vector": [vector],
        "number": [vector.sum()],
    }
    for statement in statements:
        operand_kinds, result_kind = statement.kinds.split(">")
        operands = [
            values[kind][-1 - place % len(values[kind])]
            for kind, place in zip(operand_kinds.split(","), statement.places, strict=False)
        ]
        operation = OPERATIONS[statement.kinds][statement.name]
        apply = lambda *operands, run=operation: run(s, *operands)  # noqa: E731
        values[result_kind].append(_wrapped(statement.wrapper, apply, s, operands))
    clean = values["vector"][1:] + values["number"][1:]
    return clean, values["rows"][1:] + values["row"][1:]
