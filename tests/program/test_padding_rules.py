"""What the padding proof decides about single steps, from their traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from distribute_jax.collectives._markers import real_rows
from distribute_jax.program._padding_marks import CLEAN, Mark, Rows, UndecidedError
from distribute_jax.program._padding_proof import prove_padding

SHARE, LARGER, REPLICAS = 4, 12, 2

Step = Callable[..., Any]


def proved(step: Step, share: int = SHARE) -> list[Mark]:
    """The marks of the results of a step of weights (3, 5), rows (share, 3), classes, mask, counts."""
    jaxprs = []
    for rows in (share, 3 * share):

        def masked(w: Any, x: Any, y: Any, counts: Any, rows: int = rows) -> Any:
            mask = real_rows(jnp.arange(rows) < counts[lax.axis_index("data")])
            return step(w, x, y, mask, counts)

        inputs = [np.ones((3, 5), np.float32), np.ones((rows, 3), np.float32)]
        inputs += [np.zeros(rows, np.int32), np.ones(REPLICAS, np.int32)]
        jaxprs.append(jax.make_jaxpr(masked, axis_env=[("data", REPLICAS)])(*inputs))
    row = Mark((Rows(0),))
    return prove_padding(*jaxprs, (share, 3 * share), [CLEAN, row, row, CLEAN])


cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def real_mean(losses: Any, mask: Any, counts: Any) -> Any:
    """As ``compute_average_loss``."""
    return jnp.sum(jnp.where(mask, losses, 0)) / counts.sum()


CLEAN_STEPS: dict[str, Step] = {
    "the gradient of a masked loss": lambda w, x, y, m, c: jax.value_and_grad(
        lambda w: real_mean(cross_entropy(x @ w, y), m, c)
    )(w),
    "a loss times the mask": lambda w, x, y, m, c: jax.grad(
        lambda w: (cross_entropy(x @ w, y) * m).sum() / c.sum()
    )(w),
    "weights over the sum of all": lambda w, x, y, m, c: (
        jnp.sum(x[:, 0] * m * (y > 0)) / lax.psum((m * (y > 0)).sum(), "data")
    ),
    "the loss of each class by index": lambda w, x, y, m, c: jax.grad(
        lambda w: -real_mean(jax.nn.log_softmax(x @ w)[jnp.arange(len(x)), y], m, c)
    )(w),
    "an embedding": lambda w, x, y, m, c: jax.grad(lambda w: real_mean(w[y].sum(1), m, c))(w),
    "a histogram of real rows": lambda w, x, y, m, c: jnp.zeros(5).at[y].add(m.astype(float)),
    "the largest real number": lambda w, x, y, m, c: jnp.where(m[:, None], x, -jnp.inf).max(0),
    "the least with an initial": lambda w, x, y, m, c: x.min(0, where=m[:, None], initial=jnp.inf),
    "all and any of real rows": lambda w, x, y, m, c: (
        jnp.all((y > 0) | ~m),
        jnp.any((y > 0) & m),
        m.any(),
    ),
    "mean and variance with where": lambda w, x, y, m, c: (
        x.mean(0, where=m[:, None]),
        x.var(0, where=m[:, None]),
    ),
    "dropout": lambda w, x, y, m, c: real_mean(
        jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x, 0).sum(1), m, c
    ),
    "pairs of real rows": lambda w, x, y, m, c: real_mean(
        jax.nn.softmax(jnp.where(m, x @ x.T, -jnp.inf)) @ x[:, 0], m, c
    ),
    "tokens": lambda w, x, y, m, c: jax.grad(
        lambda w: real_mean(
            cross_entropy(x.reshape(-1, 1) * w[0], jnp.repeat(y, 3)).reshape(-1, 3).sum(1), m, c
        )
    )(w),
    "two batches in one": lambda w, x, y, m, c: jax.grad(
        lambda w: real_mean(jnp.split(jnp.concatenate([x, -x]) @ w, 2)[1].sum(1), m, c)
    )(w),
    "halves of two batches in one": lambda w, x, y, m, c: jax.grad(
        lambda w: real_mean(jnp.tanh((jnp.concatenate([x, -x]) @ w)[len(x) :]).sum(1), m, c)
    )(w),
    "a convolution": lambda w, x, y, m, c: jax.grad(
        lambda k: real_mean(lax.conv_general_dilated(x[:, None], k, (1,), "SAME").max((1, 2)), m, c)
    )(w.T[:, None]),
    "a causal shift": lambda w, x, y, m, c: jax.grad(
        lambda w: real_mean(cross_entropy(jnp.pad(x, ((0, 0), (1, 0)))[:, :3] @ w, y), m, c)
    )(w),
    "pooling": lambda w, x, y, m, c: jax.grad(
        lambda w: real_mean(
            lax.reduce_window(x @ w, -jnp.inf, lax.max, (1, 2), (1, 2), "SAME").sum(1), m, c
        )
    )(w),
    "recomputation": lambda w, x, y, m, c: jax.grad(
        lambda w: real_mean(jax.checkpoint(lambda w: jnp.tanh(x @ w).sum(1))(w), m, c)
    )(w),
    "a scan": lambda w, x, y, m, c: lax.scan(
        lambda a, _: (a + jnp.where(m[:, None], x, 0).sum(0), a), jnp.zeros(3), None, length=3
    ),
    "a loop": lambda w, x, y, m, c: lax.while_loop(
        lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] + real_mean(x[:, 0], m, c)), (0, 0.0)
    ),
    "a branch": lambda w, x, y, m, c: lax.cond(
        c.sum() > 3, lambda: real_mean(x[:, 0], m, c), lambda: 0.0
    ),
    "a function for each row": lambda w, x, y, m, c: real_mean(
        jax.vmap(lambda r, t: jnp.where(t > 0, (r @ w).sum(), 1.0))(x, y), m, c
    ),
    "a column at a place": lambda w, x, y, m, c: real_mean(
        lax.dynamic_slice_in_dim(x, c.sum() % 2, 1, axis=1).sum(1), m, c
    ),
    "a column in its place": lambda w, x, y, m, c: real_mean(
        lax.dynamic_update_slice_in_dim(x, x[:, :1], c.sum() % 2, axis=1).sum(1), m, c
    ),
    "columns": lambda w, x, y, m, c: real_mean(
        jnp.stack(jnp.unstack(x, axis=1)[1:], axis=1).sum(1), m, c
    ),
    "numbers that change nothing in the padding": lambda w, x, y, m, c: (
        (x[:, 0] / jnp.where(m, y, 1) * m).sum(),
        (jnp.maximum(x[:, 0], jnp.where(m, x[:, 1], -jnp.inf)) * m).sum(),
    ),
    "the best two": lambda w, x, y, m, c: real_mean(lax.top_k(x, 2)[0].sum(1), m, c),
}


@pytest.mark.parametrize("name", CLEAN_STEPS)
def test_steps_that_exclude_padding_are_proved_clean(name: str):
    marks = proved(CLEAN_STEPS[name])
    assert marks
    assert all(mark.is_clean and not mark.row_count_at for mark in marks), marks


def test_a_result_with_a_row_for_each_example_keeps_its_rows():
    for mark in proved(lambda w, x, y, m, c: (x @ w, jnp.argmax(x, axis=1) == y, x.T.sum(0))):
        [rows] = mark.rows
        assert (rows.dim, rows.outer, rows.inner) == (0, 1, 1)


@pytest.mark.parametrize(
    ("step", "where"),
    [
        (lambda w, x, y, m, c: lax.psum((y == 2).sum(), "data"), "reduce_sum"),
        (
            lambda w, x, y, m, c: jax.grad(lambda w: cross_entropy(x @ w, y).mean())(w),
            "dot_general",
        ),
        (lambda w, x, y, m, c: real_mean(((x - x.mean(0)) ** 2).sum(1), m, c), "reduce_sum"),
        (lambda w, x, y, m, c: jnp.zeros(5).at[y].add(1), "scatter-add"),
        (lambda w, x, y, m, c: lax.psum(x, "data"), "psum"),
    ],
)
def test_a_certain_leak_is_reported_at_its_line(step: Step, where: str):
    [mark] = proved(step)
    assert mark.leak is not None
    assert mark.leak.certain
    assert mark.leak.where.startswith(f"{where} at test_padding_rules.py:")


def test_a_function_that_jax_itself_traced_is_named_with_the_line_of_its_call():
    """As cumsum, fft and cholesky, of which the user's line is unknown."""
    [mark] = proved(lambda w, x, y, m, c: jnp.cumsum(x, axis=0))
    assert mark.leak is not None
    assert mark.leak.where.startswith("cumsum at test_padding_rules.py:")


@pytest.mark.parametrize(
    "step",
    [
        lambda w, x, y, m, c: x.max(),
        lambda w, x, y, m, c: x[0],
        lambda w, x, y, m, c: jnp.sort(x, axis=0)[:, 0].sum() * 0,
        lambda w, x, y, m, c: 0 * x.sum() + real_mean(x[:, 0], m, c),
        lambda w, x, y, m, c: x.sum() - jnp.where(m[:, None], 0, x).sum(),
        lambda w, x, y, m, c: (x > 100).sum() > 0,
        lambda w, x, y, m, c: jnp.where(m[:, None], 0, x).sum(),
        lambda w, x, y, m, c: lax.top_k(x[:, 0], 2)[0],
        # On a replica without real rows these are NaN in the class of the padding.
        lambda w, x, y, m, c: jnp.zeros(5).at[y].add(jnp.where(m, x[:, 0], 0) / m.sum()),
        lambda w, x, y, m, c: (
            jnp.zeros(5).at[y].add(m * (x + jnp.where(m[:, None], x, -jnp.inf).max(0)).sum(1))
        ),
        lambda w, x, y, m, c: jnp.isnan(jnp.zeros(5).at[y].add(jnp.where(m, x[:, 0], 0) / m.sum())),
        lambda w, x, y, m, c: jnp.zeros(5).at[y + m].add(jnp.where(m, x[:, 0], 0) / m.sum()),
        # From 128 on an int8 is negative, and counts from the end, where the padding is.
        lambda w, x, y, m, c: real_mean(x[jnp.arange(len(x)).astype(np.int8).astype(int), y], m, c),
        # A mask of the step itself, and a class that only padding has.
        lambda w, x, y, m, c: jnp.zeros(5).at[y].add(jnp.arange(len(y)) < m.sum()),
        lambda w, x, y, m, c: (
            jnp.zeros((len(y), 5)).at[jnp.arange(len(y)), jnp.where(m, y, 0)].set(1)[:, 1:].sum(0)
        ),
        lambda w, x, y, m, c: real_mean(x[jnp.arange(2 * len(x)).reshape(-1, 2), 1].sum(1), m, c),
        lambda w, x, y, m, c: jnp.where(
            m, jnp.hstack([jnp.ones(len(x) - 1), x[:, 0], jnp.ones(len(x) + 1)]).reshape(3, -1), 0
        ).sum(),
        lambda w, x, y, m, c: jnp.where(m, x[:, 0], 0).sum() / jnp.where(m, x[:, 0], jnp.nan).max(),
        lambda w, x, y, m, c: jnp.where(m, 0, (x / m[:, None]).sum(1)).sum(),
        lambda w, x, y, m, c: lax.scan(lambda a, r: (a + r, None), jnp.zeros(3), x)[0],
        lambda w, x, y, m, c: lax.all_gather(x, "data").sum(),
        lambda w, x, y, m, c: jnp.where(m[:, None], x, 1).at[:, 0].add(1).prod(0),
    ],
)
def test_undecided_steps_are_neither_proved_nor_refused(step: Step):
    [mark] = proved(step, share=300)
    assert mark.leak is not None
    assert not mark.leak.certain


@pytest.mark.parametrize(
    "step",
    [
        lambda w, x, y, m, c: jnp.float32(len(x)),
        lambda w, x, y, m, c: jnp.where(m, x[:, 0], 0).sum() / (4 * len(x)),
        lambda w, x, y, m, c: jnp.where(m, x[:, 0], 0).mean(),
        lambda w, x, y, m, c: jnp.ones(len(x)).sum(),
        lambda w, x, y, m, c: (~m).sum(),
        lambda w, x, y, m, c: jnp.where(m, 1, 2).sum(),
        lambda w, x, y, m, c: jnp.asarray(np.arange(6) * len(x))[1],
        lambda w, x, y, m, c: real_mean(x[:, 0], m, c) ** len(x),
        # Numbers in the padding wrap, are rounded, and are not neutral for bits.
        lambda w, x, y, m, c: (jnp.where(m, y, 2**31 - 1) + 1).min(),
        lambda w, x, y, m, c: (jnp.where(m, y, 0).astype(np.uint8) - np.uint8(1)).max(),
        lambda w, x, y, m, c: (jnp.where(m, y, 1e8) + 1 - 1e8).prod(),
        lambda w, x, y, m, c: lax.reduce_and(jnp.where(m, y, 1), (0,)),
    ],
)
def test_what_depends_on_the_number_of_rows_is_not_proved(step: Step):
    [mark] = proved(step)
    assert mark.row_count_at or mark.leak
    assert not (mark.leak and mark.leak.certain)


def test_zero_times_padding_that_may_be_nan_is_not_proved():
    """What only the mask put into the padding need not be what a real row could have."""
    values = [lambda x, m: jnp.where(m, x, jnp.nan), lambda x, m: jnp.where(m, x, jnp.inf)]
    values += [lambda x, m: jnp.log(m * x), lambda x, m: jnp.log(m + x)]
    values += [lambda x, m: jnp.log(jnp.where(m, 1, x)), lambda x, m: jnp.where(m, x, 1e30) ** 2]
    values += [lambda x, m: (m * x)[:, None].at[jnp.arange(len(x)), 1 - m].get(mode="fill")]
    for value in values:
        [mark] = proved(lambda w, x, y, m, c, value=value: (value(x[:, 0], m) * m).sum())
        assert mark.leak or mark.row_count_at


def test_refs_and_traces_that_differ_are_undecided():
    with pytest.raises(UndecidedError, match="a ref"):
        proved(lambda w, x, y, m, c: jax.new_ref(x.sum())[...])
    with pytest.raises(UndecidedError, match="another"):
        proved(lambda w, x, y, m, c: jnp.sin(c.sum()) if len(x) > 5 else jnp.cos(c.sum()))
