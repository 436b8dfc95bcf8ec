"""Means that are summed, and roots and ratios of shares, are reported when a step is traced."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import io_callback

import distribute_jax as dj

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
REPLICAS = 4
RING = dj.experimental.CommunicationOptions(implementation="RING")


def all_reduce(op: Any, value: Any, options: Any = None) -> Any:
    return dj.get_replica_context().all_reduce(op, value, options)


def ratio(x: jax.Array) -> jax.Array:
    """The mean of positive elements."""
    mask = x > 0
    return jnp.sum(x * mask) / jnp.maximum(mask.sum(), 1)


cross_entropy = optax.softmax_cross_entropy_with_integer_labels


SUMS: dict[str, Callable[[jax.Array], Any]] = {
    "a mean": lambda x: all_reduce("sum", x.mean()),
    "half of it, in a dict": lambda x: {"loss": 0.5 * all_reduce("sum", x[:, 0].mean()) + 1.0},
    "by the rows of a share": lambda x: all_reduce("sum", x[:, 0].sum() / x.shape[0]),
    "of reshaped rows": lambda x: all_reduce("sum", x.reshape(-1).mean()),
    "of each column": lambda x: all_reduce("sum", x.mean(0)),
    "in a scan": lambda x: jax.lax.scan(lambda c, _: (c, all_reduce("sum", x.mean())), 0, None, 2),
    "by a ring": lambda x: all_reduce("sum", x.mean(), RING),
    "an accuracy": lambda x: all_reduce("sum", jnp.mean(x.argmax(1) == 1)),
}

NONLINEAR: dict[str, Callable[[jax.Array], Any]] = {
    "a root": lambda x: all_reduce("mean", jnp.sqrt((x**2).mean())),
    "a perplexity": lambda x: all_reduce("sum", jnp.exp(x.mean())) / REPLICAS,
    "a perplexity of parts": lambda x: all_reduce("sum", jnp.exp(dj.compute_average_loss(x[:, 0]))),
    "a perplexity of sums": lambda x: all_reduce("sum", jnp.exp(x[:, 0].sum() / len(X))),
    "a ratio": lambda x: all_reduce("mean", ratio(x)),
    "a variance": lambda x: all_reduce("mean", x.var(0)),
    "a standard deviation": lambda x: all_reduce("mean", x.std(ddof=1)),
    "twice a sum by a sum": lambda x: all_reduce("mean", 2 * (x > 1).sum() / ((x > 0).sum() + 1)),
    "a maximum": lambda x: all_reduce("mean", x.max()),
    "a median": lambda x: all_reduce("mean", jnp.median(x[:, 0])),
    "the largest losses": lambda x: all_reduce(
        "sum", dj.compute_average_loss(jax.lax.top_k(x[:, 0], 2)[0], global_batch_size=8)
    ),
    "a function of what is combined": lambda x: jnp.exp(all_reduce("mean", jnp.log((x**2).mean()))),
    "a ratio of products": lambda x: all_reduce("mean", (x[:, 0] @ x[:, 1]) / (x[:, 0] @ x[:, 0])),
    "a reciprocal": lambda x: all_reduce("mean", 1 / (x**2).mean()),
    "the largest of means": lambda x: all_reduce("mean", (x**2).mean(0).max()),
    "the mean of each class": lambda x: all_reduce(
        "mean",
        jax.ops.segment_sum(x[:, 0], x.argmax(1), 3) / jnp.bincount(x.argmax(1), length=3),
    ),
    "products of frequencies": lambda x: all_reduce(
        "mean", (lambda p: p @ p)(jnp.bincount(x.argmax(1), length=3) / len(x))
    ),
    "pairs of examples": lambda x: all_reduce("mean", jnp.exp(x @ x.T).mean()),
    "pairs of two views": lambda x: all_reduce(
        "mean", jax.nn.logsumexp(jnp.concatenate([x, -x]) @ jnp.concatenate([x, -x]).T, 1).mean()
    ),
    "gathered rows that were centered": lambda x: dj.get_replica_context().all_gather(
        x - x.mean(0), axis=0
    ),
    "the norm of a sum": lambda x: all_reduce("sum", jnp.linalg.norm(x.sum(0))),
}

MIXED: dict[str, Callable[[jax.Array], Any]] = {
    "centered": lambda x: x - x.mean(0),
    "standardized": lambda x: jnp.tanh((x - x.mean()) / x.std()),
    "divided by a norm": lambda x: x / jnp.linalg.norm(x, axis=0),
    "softmax": lambda x: jax.nn.softmax(x, axis=0),
    "from 0 to 1": lambda x: (x - x.min(0)) / (x.max(0) - x.min(0)),
    "imputed": lambda x: jnp.where(x > 0, x, x.mean(0)),
    "ranks": lambda x: jnp.argsort(jnp.argsort(x[:, 0])),
    "weights of classes": lambda x: x[:, 0] * (1 / (x[:, 0] > 0).sum()),
    "similarities": lambda x: x @ x.T,
    "attention": lambda x: jax.nn.softmax(x @ x.T) @ x,
    "distances": lambda x: ((x[:, None] - x[None]) ** 2).sum(-1),
    "in-batch negatives": lambda x: optax.softmax_cross_entropy_with_integer_labels(
        x @ x.T, jnp.arange(len(x))
    ),
}


def time_first(x: jax.Array, function: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Applies a function to sequences as long as a share has rows, with the time as dim 0."""
    return jnp.swapaxes(function(jnp.swapaxes(x[:, None] * jnp.ones((4, 1)), 0, 1)), 0, 1)


def dispatched(x: jax.Array) -> jax.Array:
    """Gathers the rows of each expert, as by a sum of products, and puts them back."""
    mask = jax.nn.one_hot(x.argmax(1), 3)
    place = jax.nn.one_hot((jnp.cumsum(mask, 0) * mask).sum(1).astype(int) - 1, len(x))
    mask = mask[:, :, None] * place[:, None]
    return jnp.einsum("tec,ecd->td", mask, jnp.tanh(jnp.einsum("tec,td->ecd", mask, x)))


PER_EXAMPLE: dict[str, Callable[[jax.Array], Any]] = {
    "centered features": lambda x: x - x.mean(1, keepdims=True),
    "centered over the batch": lambda x: x - all_reduce("mean", x.mean(0)),
    "centered over time": lambda x: time_first(x, lambda x: x - x.mean(0)),
    "softmax over time": lambda x: time_first(x, lambda x: jax.nn.softmax(x, axis=0)),
    "a softmax with the range of all": lambda x: jnp.exp(x - x.max()) / jnp.exp(x - x.max()).sum(1)[:, None],
    "similarities to all": lambda x: x @ dj.get_replica_context().all_gather(x, axis=0).T,
    "distances to as many centers": lambda x: ((x[:, None] - jnp.ones((4, 3))) ** 2).sum(-1),
    "pairs of features": lambda x: x[:, :, None] - x[:, None],
    "put back after a sort": lambda x: (lambda order: x[order][jnp.argsort(order)])(
        jnp.argsort(x.argmax(1))
    ),
    "sent to experts": dispatched,
}  # fmt: skip


RIGHT: dict[str, Callable[[jax.Array], Any]] = {
    "a mean of means": lambda x: all_reduce("mean", x.mean()),
    "a part": lambda x: all_reduce("sum", x.mean() / REPLICAS),
    "a sum of means by the replicas": lambda x: all_reduce("sum", x.mean()) / REPLICAS,
    "by the examples of all": lambda x: all_reduce("sum", x.sum() / len(X)),
    "by as many as elements of a share": lambda x: all_reduce(
        "sum", jnp.tile(x[:, :1], 4).sum() / 16
    ),
    "reshaped rows by the elements of all": lambda x: all_reduce("sum", x.ravel().sum() / X.size),
    "a loss by as many steps as rows": lambda x: all_reduce(
        "sum", dj.compute_average_loss(x[:, 0]) / REPLICAS
    ),
    "a loss": lambda x: all_reduce("sum", dj.compute_average_loss(x[:, 0])),
    "a gradient of a mean in each example, of as many items as rows": lambda x: all_reduce(
        "sum",
        dj.compute_average_loss(
            jax.vmap(jax.grad(lambda v: jnp.mean((v * jnp.ones(REPLICAS)) ** 2)))(x[:, 0]) ** 2
        ),
    ),
    "a mean over an ensemble of as many members as rows": lambda x: all_reduce(
        "sum",
        dj.compute_average_loss(
            jax.vmap(lambda k: cross_entropy(k * x, x.argmin(1)))(jnp.ones(REPLICAS)).mean(0)
        ),
    ),
    "a mean over as many steps of a scan as rows": lambda x: all_reduce(
        "sum",
        dj.compute_average_loss(
            jax.lax.scan(lambda c, _: (c, c[:, 0]), x, None, length=REPLICAS)[1].mean(0)
        ),
    ),
    "a count in a loop": lambda x: jax.lax.fori_loop(
        0, 2, lambda i, c: c - all_reduce("sum", x.sum()) / c, 4.0
    ),
    "a root of the mean": lambda x: jnp.sqrt(all_reduce("mean", (x**2).mean())),
    "a count of each class": lambda x: all_reduce("sum", jnp.bincount(x.argmax(1), length=3)),
    "a ratio of sums": lambda x: all_reduce("sum", x.sum()) / all_reduce("sum", (x > 0).sum()),
    "a mean of roots": lambda x: all_reduce("mean", jnp.linalg.norm(x, axis=1).mean()),
    "a mean over features": lambda x: all_reduce("sum", x.mean(1).sum()),
    "normalized rows": lambda x: all_reduce("mean", ((x - x.mean(1, keepdims=True)) ** 2).mean()),
    "a maximum that cancels": lambda x: all_reduce("mean", (x - x.max() + x.max()).mean()),
    "a complex constant": lambda x: all_reduce("mean", jnp.abs((x * 1j + 2j).mean(1)).mean()),
    "the least of as many heads as rows": lambda x: all_reduce(
        "mean", jnp.stack([x[:, 0], x[:, 1], x[:, 2], -x[:, 0]]).min(0).mean()
    ),
    "gathered": lambda x: dj.get_replica_context().all_gather(x, axis=0).max(),
    "normalized weights": lambda x: all_reduce("mean", jax.nn.softmax(x, axis=1).mean()),
}


def logged(caplog: pytest.LogCaptureFixture, run: Callable[[], Any]) -> list[str]:
    with caplog.at_level(logging.WARNING, logger="distribute_jax"):
        run()
    return [record.getMessage() for record in caplog.records]


def batch(strategy: dj.Strategy) -> Any:
    return next(iter(strategy.distribute_dataset([X])))


@pytest.mark.parametrize("kind", SUMS)
def test_a_sum_of_means_is_logged_with_its_line(
    s4: dj.MirroredStrategy, caplog: pytest.LogCaptureFixture, trace_only: Any, kind: str
):
    """It is N times the mean over the batch, and no state shows it."""
    [text] = logged(caplog, lambda: trace_only(lambda: s4.run(SUMS[kind], (batch(s4),))))
    assert "returned result" in text
    assert "the mean that each took over its examples at test_means_of_shares.py" in text
    assert "4 times the mean over the batch. Write all_reduce('mean', ...)" in text


def test_a_sum_of_rows_and_features_by_the_rows_is_a_mean(
    s2: dj.MirroredStrategy, caplog: pytest.LogCaptureFixture, trace_only: Any
):
    """As losses that are summed over features are written."""

    def step(x: jax.Array) -> Any:
        return all_reduce("sum", x.sum() / len(x))

    [text] = logged(caplog, lambda: trace_only(lambda: s2.run(step, (batch(s2),))))
    assert "2 times the mean over the batch" in text


@pytest.mark.parametrize(
    "mean_of", [lambda v: all_reduce("mean", v), lambda v: jax.lax.pmean(v, "data")]
)
def test_the_mean_of_parts_is_logged(
    s4: dj.MirroredStrategy, caplog: pytest.LogCaptureFixture, trace_only: Any, mean_of: Any
):
    """It is the mean over the batch by the replicas once more; a sum by as many tasks is not."""

    def step(x: jax.Array) -> Any:
        part = dj.compute_average_loss(x[:, 0])
        mean = mean_of((part, REPLICAS * part))
        return {"loss": mean[0] + 1.0, "sum": all_reduce("sum", part) / 4, "times": mean[1]}

    [text] = logged(caplog, lambda: trace_only(lambda: s4.run(step, (batch(s4),))))
    assert (
        "returned result['loss'], the mean over the replicas of what compute_average_loss" in text
    )
    assert "4 times too small. Write all_reduce('sum', loss)" in text


@pytest.mark.parametrize("kind", NONLINEAR)
def test_a_function_of_the_mean_of_each_share_is_logged(
    s4: dj.MirroredStrategy, caplog: pytest.LogCaptureFixture, trace_only: Any, kind: str
):
    """A mean of roots is not the root of the mean."""
    [text] = logged(caplog, lambda: trace_only(lambda: s4.run(NONLINEAR[kind], (batch(s4),))))
    assert "combines what each of the 4 replicas computed at test_means_of_shares.py" in text
    assert "Reduce first and compute then" in text


@pytest.mark.parametrize("kind", MIXED)
def test_rows_that_depend_on_their_share_are_logged(
    s4: dj.MirroredStrategy, caplog: pytest.LogCaptureFixture, trace_only: Any, kind: str
):
    """No state shows that they are not those of the whole batch."""
    [text] = logged(caplog, lambda: trace_only(lambda: s4.run(MIXED[kind], (batch(s4),))))[:1]
    assert "returned result, whose rows depend at test_means_of_shares.py" in text
    assert "Combine first, as x - all_reduce('mean', x.mean(0))" in text


def each(steps: dict[str, Callable[[jax.Array], Any]]) -> Callable[[jax.Array], Any]:
    """One step, and so one program, of several."""
    return lambda x: {kind: step(x) for kind, step in steps.items()}


def test_rows_that_depend_on_their_example_are_not_logged(
    s4: dj.MirroredStrategy, caplog: pytest.LogCaptureFixture
):
    one, several = dj.OneDeviceStrategy(0), list[Any]()
    assert not logged(caplog, lambda: several.append(s4.run(each(PER_EXAMPLE), (batch(s4),))))
    expected = one.run(each(PER_EXAMPLE), args=(batch(one),))
    for kind, rows in several[0].items():
        found = s4.gather(rows, axis=0)
        np.testing.assert_allclose(found, expected[kind], rtol=1e-5, atol=1e-6, err_msg=kind)


def test_batch_norm_while_training_is_not_taken_for_mixed_rows(
    s4: dj.MirroredStrategy, caplog: pytest.LogCaptureFixture, trace_only: Any
):
    """It normalizes by the statistics of a share by design, which its warning says."""
    with s4.scope():
        norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    texts = logged(caplog, lambda: trace_only(lambda: s4.run(lambda x: norm(x), (batch(s4),))))
    assert texts
    assert not [text for text in texts if "rows depend" in text]


def test_what_equals_one_device_is_not_logged(
    s4: dj.MirroredStrategy, caplog: pytest.LogCaptureFixture
):
    one, several = dj.OneDeviceStrategy(0), list[Any]()
    assert not logged(caplog, lambda: several.append(s4.run(each(RIGHT), args=(batch(s4),))))
    expected = one.run(each(RIGHT), args=(batch(one),))
    for kind in RIGHT:
        if kind not in ("a part", "a sum of means by the replicas"):  # 4 on one device too
            np.testing.assert_allclose(several[0][kind], expected[kind], rtol=1e-5, err_msg=kind)


@pytest.mark.parametrize(
    ("op", "step", "text"),
    [
        ("sum", lambda x: x.mean(), "the sum is 4 times the mean over the batch"),
        ("sum", ratio, "a ratio or a maximum, and so is not the value for the batch"),
        ("mean", ratio, "a ratio or a maximum, and so is not the value for the batch"),
        ("mean", lambda x: x.mean(), ""),
        ("sum", lambda x: x.sum(), ""),
        ("sum", lambda x: x.mean() / REPLICAS, ""),
    ],
)
def test_reduce_outside_of_the_step_says_the_same(
    s4: dj.MirroredStrategy,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    op: Any,
    step: Any,
    text: str,
):
    """Once for each step, whose name it has."""
    monkeypatch.setattr("distribute_jax._errors._logged", set())
    value = s4.run(step, args=(batch(s4),))
    texts = logged(caplog, lambda: s4.reduce(op, value, axis=None))
    assert [text in one for one in texts] == ([True] if text else [])


class Net(nnx.Module):
    """Convolution, embedding and dropout, so that ``verify`` does not compare its steps."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(2, 3, rngs=rngs)
        self.conv = nnx.Conv(1, 2, (2,), rngs=rngs)
        self.linear = nnx.Linear(6, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.embed((x[:, 0] > 0).astype(jnp.int32))
        return self.linear(self.dropout(self.conv(x[..., None]).reshape(len(x), -1)))[:, 0]


def mean(x: jax.Array) -> jax.Array:
    return (x**2).mean()


def features(x: jax.Array) -> jax.Array:
    return (x[:, None] * jnp.ones(3)) ** 2


def trained(strategy: dj.Strategy, loss: Any, combine: Any, tx: Any) -> None:
    """Runs one step; ``combine`` None leaves the sum to ``dj.Optimizer``."""
    with strategy.scope():
        net = Net()
        optimizer = (
            dj.Optimizer(net, tx) if combine is None else nnx.Optimizer(net, tx, wrt=nnx.Param)
        )

    def step(x: jax.Array) -> None:
        gradients = nnx.grad(lambda net: loss(net(x)))(net)
        optimizer.update(net, gradients if combine is None else combine(gradients))

    strategy.run(step, args=(batch(strategy),))


SUMMED: dict[str, tuple[Any, Any, Any]] = {
    "by dj.Optimizer": (mean, None, optax.adam(0.1)),
    "of half a mean": (lambda x: 0.5 * mean(x), None, optax.sgd(0.1)),
    "of halves of the rows": (
        lambda x: sum(map(mean, jnp.split(x, 2))) / 2,
        None,
        optax.sgd(0.1),
    ),
    "of a negated mean": (lambda x: -(-(x**2)).mean(), None, optax.sgd(0.1)),
    "by all_reduce": (mean, lambda g: all_reduce("sum", g), optax.sgd(0.1)),
    "clipped": (mean, None, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))),
    "of features": (lambda x: -(-features(x)).sum() / len(x), None, optax.sgd(0.1)),
    "of several": (
        lambda x: mean(x[:, None]) + jnp.abs(x).mean(),
        None,
        optax.sgd(0.1, momentum=0.9),
    ),
}
WELL: dict[str, tuple[Any, Any, Any]] = {
    "compute_average_loss": (lambda x: dj.compute_average_loss(x**2), None, optax.adam(0.1)),
    "a mean by all_reduce": (mean, lambda g: all_reduce("mean", g), optax.sgd(0.1)),
    "parts of as many microbatches as replicas": (
        lambda x: sum(dj.compute_average_loss(features(p).sum(1)) for p in jnp.split(x, REPLICAS)),
        None,
        optax.sgd(0.1),
    ),
    "a number that is one by the rows": (
        lambda x: dj.compute_average_loss(jnp.where(x > 0, 0.25, 1.0) * x**2),
        None,
        optax.sgd(0.1),
    ),
    "a part by the rows": (
        lambda x: features(x).sum() / (REPLICAS * len(x)), None, optax.sgd(0.1),
    ),
    "a part of a mean": (lambda x: mean(x) / REPLICAS, None, optax.sgd(0.1)),
    "half a part": (lambda x: 0.5 * mean(x) / REPLICAS, None, optax.sgd(0.1)),
    "a product with the part": (lambda x: mean(x) * (1 / REPLICAS), None, optax.sgd(0.1)),
    "a mean in each part": (
        lambda x: dj.compute_average_loss(jax.lax.map(jnp.mean, x[:, None])),
        None,
        optax.sgd(0.1),
    ),
    "a sum": (lambda x: (x**2).sum() / len(X), None, optax.sgd(0.1)),
    "divided gradients": (
        mean, lambda g: jax.tree.map(lambda v: v / REPLICAS, all_reduce("sum", g)), optax.sgd(0.1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", [*SUMMED, *WELL])
def test_gradients_of_a_mean_that_are_summed_are_logged_where_the_step_is_not_compared(
    s4: dj.MirroredStrategy, caplog: pytest.LogCaptureFixture, trace_only: Any, kind: str
):
    """The commonest port trains with gradients N times too large; with dropout nothing else shows it."""
    texts = logged(caplog, lambda: trace_only(lambda: trained(s4, *(SUMMED | WELL)[kind])))
    [text] = [text for text in texts if "gradients of the mean" in text][:1] or [""]
    assert ("4 times those of one device. Take dj.compute_average_loss" in text) == (kind in SUMMED)
    assert ("at test_means_of_shares.py" in text) == (kind in SUMMED)


@pytest.mark.parametrize("norm", [1e-3, 1e3])
@pytest.mark.parametrize("loss", [mean, lambda x: dj.compute_average_loss(x[:, 0] ** 2)])
def test_gradients_of_a_mean_that_are_clipped_are_logged(
    s4: dj.MirroredStrategy, caplog: pytest.LogCaptureFixture, loss: Any, norm: float
):
    """As long as both are clipped, the first step is that of one device; a later one is not."""
    with s4.scope():
        net = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        optimizer = dj.Optimizer(net, optax.adam(0.1), clip_global_norm=norm)

    def step(x: jax.Array) -> None:
        optimizer.update(net, nnx.grad(lambda net: loss(net(x)))(net))

    is_wrong = loss is mean
    error = pytest.raises(dj.NotEqualError, match=r"4\.000 = number of replicas")
    with error if is_wrong and norm > 1 else contextlib.nullcontext():
        options = dj.RunOptions(verify="auto")
        texts = logged(caplog, lambda: s4.run(step, args=(batch(s4),), options=options))
        assert ["4 times those of one device. Take" in text for text in texts] == [True] * is_wrong


@pytest.mark.parametrize("is_ratio", [True, False])
def test_a_mean_over_the_real_rows_of_each_share_is_logged_at_a_partial_batch(
    s4: dj.MirroredStrategy, caplog: pytest.LogCaptureFixture, is_ratio: bool
):
    """The replicas have different numbers of them."""

    def step(x: jax.Array) -> jax.Array:
        mask = dj.get_replica_context().batch_mask
        total, count = jnp.sum(x[:, 0], where=mask), jnp.maximum(mask.sum(), 1)
        if is_ratio:
            return all_reduce("mean", total / count)
        return all_reduce("sum", total) / all_reduce("sum", mask.sum())

    for part in s4.distribute_dataset([X, X[:11]]):
        texts = logged(caplog, lambda part=part: s4.run(step, args=(part,)))
    assert ["from its examples by more than a sum" in text for text in texts] == [True] * is_ratio


@pytest.mark.parametrize("why", ["a callback", "its size", "a value of each replica", ""])
def test_so_are_those_of_a_step_that_cannot_run_twice_or_on_one_device(
    s4: dj.MirroredStrategy,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    trace_only: Any,
    why: str,
):
    """With a callback, a model that is large, or a value that one device has no equivalent of."""
    if why == "its size":
        monkeypatch.setattr("distribute_jax.program._trace._MAX_COMPARED_BYTES", 16)
    with s4.scope():
        net = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        optimizer = dj.Optimizer(net, optax.sgd(0.1))

    def step(x: jax.Array, value: Any) -> None:
        if why == "a callback":
            io_callback(lambda: None, None)
        optimizer.update(net, nnx.grad(lambda net: mean(net(x)))(net))

    value = s4.experimental_distribute_values_from_function(lambda context: np.float32(1))
    args = batch(s4), value if why == "a value of each replica" else 1
    texts = logged(caplog, lambda: trace_only(lambda: s4.run(step, args=args)))
    assert any("gradients of the mean" in text for text in texts) == bool(why)


def test_every_gradient_of_a_mean_is_recognised(
    s2: dj.MirroredStrategy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Of a convolution, an embedding and biases: each is logged when it is summed outside of the step."""
    monkeypatch.setattr("distribute_jax._errors._logged", set())
    with s2.scope():
        net = Net()

    def step(x: jax.Array) -> Any:
        return nnx.to_pure_dict(nnx.grad(lambda net: mean(net(x)))(net))

    gradients = s2.run(step, args=(batch(s2),))
    leaves = jax.tree.leaves(gradients, is_leaf=lambda x: isinstance(x, dj.PerReplica))
    assert [value.share for value in leaves] == ["mean"] * 5
    caplog.clear()
    [text] = logged(caplog, lambda: s2.reduce("sum", gradients, axis=None))
    assert "the sum is 2 times the mean over the batch" in text
