"""By default the first call of a training step is compared with the step on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import long
from flax import nnx
from jax.experimental import io_callback

import distribute_jax as dj
from distribute_jax.program import _verify as checked
from distribute_jax.program._options import default_run_options

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
Y = np.arange(16) % 3
context = dj.get_replica_context


@pytest.fixture(autouse=True)
def by_default(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The default of users: no environment variable, no options."""
    monkeypatch.delenv("DISTRIBUTE_JAX_VERIFY")
    default_run_options.cache_clear()
    yield
    monkeypatch.undo()
    default_run_options.cache_clear()


def classifier(
    strategy: dj.Strategy,
    tx: optax.GradientTransformation,
    make: Callable[[nnx.Module, Any], Any] = dj.Optimizer,
) -> tuple[nnx.Linear, Any]:
    """A model and its optimizer."""
    with strategy.scope():
        model = nnx.Linear(8, 3, rngs=nnx.Rngs(0))
        return model, make(model, tx)


def losses(model: nnx.Linear, x: jax.Array, y: jax.Array) -> jax.Array:
    """The loss of each example."""
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y)


def step_of(
    model: nnx.Linear, optimizer: Any, mean: Callable[..., jax.Array] = dj.compute_average_loss
) -> Callable[..., None]:
    """A step with a loss of each example, and an optimizer that sums."""

    def step(x: jax.Array, y: jax.Array) -> None:
        optimizer.update(model, nnx.grad(lambda m: mean(losses(m, x, y)))(model))

    return step


def mean_step(model: nnx.Linear, optimizer: Any) -> Callable[..., None]:
    """The commonest mistake in a port: a loss with mean, and an optimizer that sums."""
    return step_of(model, optimizer, jnp.mean)


def test_a_mean_with_an_optimizer_that_sums_is_found_at_the_first_call(s4: dj.MirroredStrategy):
    """Adam hides the factor in the weights, but not in its state; the error changes no state."""
    model, optimizer = classifier(s4, optax.adam(1e-3))
    (batch,) = s4.distribute_dataset([(X, Y)])
    before = [np.asarray(v) for v in jax.tree.leaves(nnx.state((model, optimizer)))]
    with pytest.raises(
        dj.NotEqualError, match=r"4\.000 = number of replicas: gradients of a mean were summed"
    ) as caught:
        s4.run(mean_step(model, optimizer), args=batch)
    for text in (
        "dj.compute_average_loss(losses)",
        'all_reduce("mean", gradients)',
        'verify="off"',
    ):
        assert text in str(caught.value)
    after = [np.asarray(v) for v in jax.tree.leaves(nnx.state((model, optimizer)))]
    assert all(map(np.array_equal, before, after))


@pytest.mark.parametrize("steps", [3, long(1)])
def test_a_correct_step_is_compared_once_and_logs_nothing(
    s4: dj.MirroredStrategy, caplog: pytest.LogCaptureFixture, steps: int
):
    """One more trace at the first call, none at another batch size, with run and with run_steps."""
    model, optimizer = classifier(s4, optax.sgd(0.1))
    traces: list[int] = []
    note = traces.append  # a captured list would be compared, and make the step compile again
    train = step_of(model, optimizer)

    def step(x: jax.Array, y: jax.Array) -> None:
        note(len(x))
        train(x, y)

    for size in (16, 8):
        iterator = iter(s4.distribute_dataset([(X[:size], Y[:size])] * 6))
        for _ in range(6 // steps):
            if steps == 1:
                s4.run(step, args=next(iterator))
            else:
                s4.run_steps(step, iterator, steps=steps)
    assert traces == [4, 16, 2]
    assert caplog.records == []


@pytest.mark.parametrize("is_right", [False, True])
def test_a_step_that_prints_is_compared_and_prints_once(s4: dj.MirroredStrategy, is_right: bool):
    """In loops and branches too; a print is what one adds to a step in which something is wrong."""
    model, optimizer = classifier(s4, optax.sgd(0.1))
    printed = list[float]()

    def step(x: jax.Array, y: jax.Array) -> None:
        def again(total: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
            jax.lax.cond(row[0] > 9, lambda: jax.debug.print("large", ordered=False), lambda: None)
            return total + row.sum(), None

        total, _ = jax.lax.scan(again, jnp.zeros(()), x)
        jax.debug.callback(lambda value: printed.append(float(value)), total)
        (step_of if is_right else mean_step)(model, optimizer)(x, y)

    (batch,) = s4.distribute_dataset([(X, Y)])
    if is_right:
        s4.run(step, args=batch)
    else:
        with pytest.raises(dj.NotEqualError, match=r"4.000 times that on one device"):
            s4.run(step, args=batch)
    jax.effects_barrier()
    assert len(printed) == 4 * is_right


@pytest.mark.exhaustive
def test_several_steps_in_one_dispatch_are_compared_before(s4: dj.MirroredStrategy):
    model, optimizer = classifier(s4, optax.adam(1e-3))
    iterator = iter(s4.distribute_dataset([(X, Y)] * 3))
    with pytest.raises(dj.NotEqualError, match=r"4\.000 = number of replicas"):
        s4.run_steps(mean_step(model, optimizer), iterator, steps=3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [jnp.asarray, nnx.Param])
def test_state_that_a_function_takes_and_returns_is_compared(
    s4: dj.MirroredStrategy, kind: Callable[[jax.Array], Any]
):
    """As with Linen and nnx.split. The change is compared, which is small relative to the weights."""
    tx = optax.sgd(1e-4)
    with s4.scope():
        params = {"kernel": kind(jnp.ones((8, 3))), "bias": kind(jnp.zeros(3))}
        state = {"params": params, "opt": tx.init(params), "step": 0, "again": kind(jnp.ones(3))}
    (batch,) = s4.distribute_dataset([(X, Y)])

    def step(op: str, state: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            logits = x @ params["kernel"][...] + params["bias"][...]
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        gradients = context().all_reduce(op, jax.grad(loss)(state["params"]))
        updates, opt = tx.update(gradients, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        not_read = jax.tree.map(jnp.zeros_like, state["again"])
        new = {"params": params, "opt": opt, "step": state["step"] + 1, "again": not_read}
        return new, context().all_gather(x, axis=0)

    new, _ = s4.run(step, args=("mean", state, *batch))
    assert int(new["step"]) == 1
    with pytest.raises(
        dj.NotEqualError, match=r"kernel.*: differs .* 4\.000 times that on one device"
    ):
        s4.run(step, args=("sum", state, *batch))


@pytest.mark.parametrize("kind", [nnx.Variable, long(dj.Variable), "an argument", "captured"])
def test_weights_without_a_type_that_says_so_are_compared(s4: dj.MirroredStrategy, kind: Any):
    """Variables of other types, and arrays outside of a pytree; the order of the results is free."""
    with s4.scope():
        array = jnp.ones(8)
        weights = kind(array) if callable(kind) else None
    held = {"old": array}
    (batch,) = s4.distribute_dataset([(X, X[:, 0])])

    def step(op: str, x: jax.Array, y: jax.Array, old: jax.Array | None = None) -> Any:
        old = held["old"] if kind == "captured" else weights[...] if weights is not None else old
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(old)
        new = old - 1e-3 * context().all_reduce(op, gradient)
        if weights is not None:
            weights[...] = new
        return loss, new

    more = (array,) if kind == "an argument" else ()
    s4.run(step, args=("mean", *batch, *more))
    with pytest.raises(dj.NotEqualError, match=r"4\.000 = number of replicas"):
        s4.run(step, args=("sum", *batch, *more))


def test_a_variance_that_is_a_mean_of_variances_is_refused_without_training(
    s4: dj.MirroredStrategy,
):
    with s4.scope():
        mean, variance = nnx.Variable(jnp.zeros(8)), nnx.Variable(jnp.ones(8))
    (batch,) = s4.distribute_dataset([X])

    def step(x: jax.Array) -> None:
        mean[...] = 0.9 * mean[...] + 0.1 * context().all_reduce("mean", x.mean(0))
        variance[...] = 0.9 * variance[...] + 0.1 * context().all_reduce("mean", x.var(0))

    with pytest.raises(
        dj.NotEqualError, match=r"(?s)\n  variance: differs by .* such as a variance, the norm"
    ):
        s4.run(step, args=(batch,))


@pytest.mark.exhaustive
def test_a_step_that_changes_nothing_at_first_is_compared_again(s4: dj.MirroredStrategy):
    """Such as a step whose learning rate warms up from 0."""
    model, optimizer = classifier(s4, optax.sgd(optax.linear_schedule(0.0, 0.1, 10)))
    (batch,) = s4.distribute_dataset([(X, Y)])
    step = mean_step(model, optimizer)
    s4.run(step, args=batch)
    with pytest.raises(dj.NotEqualError, match=r"4\.000 = number of replicas"):
        s4.run(step, args=batch)


@pytest.mark.exhaustive
def test_gradients_that_are_added_up_first_are_compared(s4: dj.MirroredStrategy):
    """Each replica accumulates locally; the value is the sum over the replicas."""
    model, optimizer = classifier(
        s4, optax.sgd(0.1), lambda m, tx: dj.Optimizer(m, tx, gradient_accumulation_steps=2)
    )
    (batch,) = s4.distribute_dataset([(X, Y)])
    with pytest.raises(dj.NotEqualError, match=r"4\.000 = number of replicas"):
        s4.run(mean_step(model, optimizer), args=batch)


@pytest.mark.exhaustive
def test_a_first_batch_that_is_partial_is_compared_without_its_padding(s4: dj.MirroredStrategy):
    model, optimizer = classifier(s4, optax.sgd(0.1))
    (batch,) = s4.distribute_dataset([(X[:13], Y[:13])])
    s4.run(step_of(model, optimizer), args=batch)
    with pytest.raises(dj.PaddingLeakError):  # the more precise error of the two
        s4.run(mean_step(model, optimizer), args=batch)


class Watched:
    """A counter in Python."""

    calls = 0


@pytest.mark.parametrize("is_part", [False, True])
def test_the_first_partial_batch_is_compared_too(
    s4: dj.MirroredStrategy, capsys: pytest.CaptureFixture[str], is_part: bool
):
    """A mean over the real rows of each share is right for equal shares, compute_average_loss for all."""
    model, _ = classifier(s4, optax.sgd(0.1))
    with s4.scope():
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(x: jax.Array, y: jax.Array) -> None:
        print(f"traced for {len(x)} rows")
        mask = context().batch_mask

        def loss(model: nnx.Linear) -> jax.Array:
            if is_part:
                return dj.compute_average_loss(losses(model, x, y))
            return jnp.sum(losses(model, x, y), where=mask) / jnp.maximum(mask.sum(), 1)

        gradients = nnx.grad(loss)(model)
        optimizer.update(model, context().all_reduce("sum" if is_part else "mean", gradients))

    full, partial = s4.distribute_dataset([(X, Y), (X[:11], Y[:11])])
    s4.run(step, args=full)
    unequal = pytest.raises(dj.NotEqualError, match="not the step on one device")
    with nullcontext() if is_part else unequal:
        s4.run(step, args=partial)
    assert ("traced for 11 rows" in capsys.readouterr().out) != is_part


def wrong(kind: str, strategy: dj.Strategy) -> tuple[Callable[..., Any], list[Any]]:
    """A step that is not compared, although it sums gradients of means; and more arguments for it."""
    model, optimizer = classifier(strategy, optax.sgd(0.1))
    train = mean_step(model, optimizer)
    with strategy.scope():
        rngs = nnx.Rngs(0)
    ids = strategy.experimental_distribute_values_from_function(
        lambda c: c.replica_id_in_sync_group
    )

    def refuse(x: jax.Array, y: jax.Array) -> None:
        if len(x) != 4:
            raise ValueError("only shares of four")
        train(x, y)

    def until_large(x: jax.Array, y: jax.Array) -> None:
        def again(keys: jax.Array) -> jax.Array:
            return jax.random.split(keys[0])

        first = jax.random.split(rngs())
        keys = jax.lax.while_loop(lambda k: jax.random.uniform(k[1]) < 0.5, again, first)
        train(x * jax.random.bernoulli(keys[1], 0.9, x.shape), y)

    def calls(x: jax.Array, y: jax.Array) -> None:
        io_callback(lambda _: None, None, x.sum())
        train(x, y)

    steps = {
        "draws a gamma": lambda x, y: train(x * jax.random.gamma(rngs(), 2.0, x.shape), y),
        "draws rows": lambda x, y: train(x[jax.random.permutation(rngs(), 4)], y),
        "draws latents": lambda x, y: train(x + rngs.normal((4, 8)).mean(0), y),
        "draws until a number is large": until_large,
        "has a value of each replica": lambda x, y, ids: train(x + ids, y),
        "calls Python": calls,
        "takes shares of one size": refuse,
        "does not train": lambda x, _: context().all_reduce("sum", (model(x).T @ model(x)) ** 2),
    }
    return steps[kind], [ids] if "each replica" in kind else []


@pytest.mark.parametrize(
    "kind",
    [
        "draws a gamma",
        pytest.param("draws rows", marks=pytest.mark.exhaustive),
        pytest.param("draws latents", marks=pytest.mark.exhaustive),
        "draws until a number is large",
        "has a value of each replica",
        "calls Python",
        "takes shares of one size",
        "does not train",
    ],
)
def test_a_step_that_cannot_be_compared_runs(
    s4: dj.MirroredStrategy, caplog: pytest.LogCaptureFixture, kind: str
):
    step, more = wrong(kind, s4)
    (batch,) = s4.distribute_dataset([(X, Y)])
    for _ in range(2):
        s4.run(step, args=(*batch, *more))
    # Only the notices that every run logs: what makes the step differ from one device, summed means, and
    # the squares of sums over a share.
    logged = [r.getMessage() for r in caplog.records]
    notices = (
        "so this step is not exactly that of one device",
        "by the sum over the replicas",
        "from its examples by more than a sum",
    )
    assert all(any(notice in text for notice in notices) for text in logged), logged


@pytest.mark.parametrize("kind", ["a variable", long("an attribute"), long("an element")])
def test_a_step_that_divides_by_a_captured_number_of_replicas_is_compared(
    s4: dj.MirroredStrategy, caplog: pytest.LogCaptureFixture, kind: str
):
    """It may be another number of the same value, so that it is logged."""
    model, optimizer = classifier(s4, optax.sgd(0.1))
    (batch,) = s4.distribute_dataset([(X, Y)])
    replicas, settings, numbers = 4, SimpleNamespace(replicas=4), (1, 4)
    steps: dict[str, Any] = {
        "a variable": lambda: replicas,
        "an attribute": lambda: settings.replicas,
        "an element": lambda: numbers[1],
    }
    number = steps[kind]

    def step(x: jax.Array, y: jax.Array) -> None:
        step_of(model, optimizer, lambda each: each.mean() / number())(x, y)

    s4.run(step, args=batch)
    [text] = [record.getMessage() for record in caplog.records]
    assert "equals one device only if" in text
    assert "is the number of replicas, 4" in text
    assert (replicas, settings.replicas, numbers) == (4, 4, (1, 4))


@pytest.mark.parametrize("temperature", [4, long(0.25)])
def test_a_captured_number_that_equals_the_number_of_replicas_hides_no_mistake(
    s4: dj.MirroredStrategy, temperature: float
):
    model, optimizer = classifier(s4, optax.sgd(0.1))
    (batch,) = s4.distribute_dataset([(X, Y)])

    def step(x: jax.Array, y: jax.Array) -> None:
        mean_step(model, optimizer)(x / temperature, y)

    with pytest.raises(dj.NotEqualError, match=r"4\.000 = number of replicas"):
        s4.run(step, args=batch)


@pytest.mark.parametrize("kind", ["a quantile", long("places of experts")])
def test_a_wrong_variable_beside_right_weights_is_found(s4: dj.MirroredStrategy, kind: str):
    """Whole numbers, such as the places of examples, are exact: rounding moves none to another place."""
    model, optimizer = classifier(s4, optax.sgd(0.1))
    (batch,) = s4.distribute_dataset([(X, Y)])
    with s4.scope():
        seen = nnx.Variable(jnp.zeros(()))

    def places(values: jax.Array) -> jax.Array:  # an expert has room for two examples
        expert = jax.nn.one_hot((values > 1.0).astype(jnp.int32), 2)
        place = (jnp.cumsum(expert, 0) * expert).sum(1) - 1
        kept = jax.nn.one_hot(place.astype(jnp.int32), 2) * values[:, None]
        return (kept.sum(0) ** 2).sum()

    of_share = places if "places" in kind else lambda values: jnp.quantile(values, 0.8)

    def step(x: jax.Array, y: jax.Array) -> None:
        step_of(model, optimizer)(x, y)
        seen[...] += context().all_reduce("mean", of_share(losses(model, x, y)))

    with pytest.raises(dj.NotEqualError, match=r"\n  seen: differs by up to \S+; the change is"):
        s4.run(step, args=batch)


def dropout_step(
    strategy: dj.Strategy, loss: Callable[..., jax.Array], rate: float = 0.3
) -> tuple[Any, Callable[..., None]]:
    """A model with dropout and its step; the loss takes each example's loss, its weights and the outputs."""
    with strategy.scope():
        rngs = nnx.Rngs(0)
        first, last = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        model = nnx.Sequential(first, nnx.Dropout(rate, rngs=rngs), last)
        optimizer = dj.Optimizer(model, optax.sgd(0.1))

    def step(x: jax.Array, y: jax.Array) -> None:
        def value(m: Any) -> jax.Array:
            return loss(losses(m, x, y), jnp.abs(x[:, 0]), m(x))

        optimizer.update(model, nnx.grad(value)(model))

    return model, step


@pytest.mark.parametrize(("rate", "sizes"), [(0.1, (11, 11)), long(0.5, (16, 11))])
def test_a_step_with_dropout_is_compared_with_equal_masks_and_trains_with_those_of_the_replicas(
    strategy: dj.Strategy, caplog: pytest.LogCaptureFixture, rate: float, sizes: tuple[int, int]
):
    """The step is right, so it runs, and the comparison leaves the bits of its training as they are."""
    batches = [(X[:size], Y[:size]) for size in sizes]
    ends = []
    for verify in ("auto", "first", "off"):
        model, step = dropout_step(strategy, lambda each, w, z: dj.compute_average_loss(each), rate)
        for batch in strategy.distribute_dataset(batches):
            strategy.run(step, args=batch, options=dj.RunOptions(verify=verify))
        ends.append(jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param))))
    for end in ends[:-1]:
        assert all(map(np.array_equal, end, ends[-1]))
    assert not [r for r in caplog.records if "not exactly" not in r.getMessage()]


@pytest.mark.parametrize(
    "loss",
    [
        long(lambda each, w, z: each.mean()),
        long(lambda each, w, z: jnp.sqrt(dj.compute_average_loss(each**2))),
        lambda each, w, z: (each * w).sum() / w.sum() / context().num_replicas_in_sync,
        long(lambda each, w, z: dj.compute_average_loss(jax.lax.top_k(each, 2)[0])),
        long(lambda each, w, z: (z @ z.T).mean() / context().num_replicas_in_sync),
    ],
    ids=["mean", "root", "weighted", "largest", "pairs"],
)
def test_a_wrong_loss_of_a_model_with_dropout_is_found(
    s4: dj.MirroredStrategy, loss: Callable[..., jax.Array]
):
    """Also one that no notice knows, since its value is not returned."""
    _, step = dropout_step(s4, loss)
    (batch,) = s4.distribute_dataset([(X, Y)])
    with pytest.raises(dj.NotEqualError, match="Both ran with the same masks of dropout"):
        s4.run(step, args=batch)


def local_step(
    strategy: dj.Strategy, kind: str, loss: Callable[..., jax.Array], op: str = "sum"
) -> tuple[Any, Callable[..., None]]:
    """A model and its step, with noise for each row or of the gradients, or statistics of each share."""
    with strategy.scope():
        rngs = nnx.Rngs(0)
        layers = [nnx.Linear(8, 3, rngs=rngs)]
        model = nnx.Sequential(*[nnx.BatchNorm(8, rngs=rngs)] * ("norm" in kind), *layers)
        noise = [optax.add_noise(0.01, 0.5, 0)] * ("gradients" in kind)
        optimizer = nnx.Optimizer(model, optax.chain(*noise, optax.sgd(0.1)), wrt=nnx.Param)

    def step(x: jax.Array, y: jax.Array) -> None:
        if "noise" in kind:
            time = rngs.randint((len(x),), 0, 5)
            x += jnp.linspace(0, 1, 5)[time][:, None] * rngs.normal(x.shape)
        gradients = nnx.grad(lambda m: loss(losses(m, x, y), m.layers[-1].kernel))(model)
        optimizer.update(model, context().all_reduce(op, gradients))

    return model, step


LOCAL = ["noise", "norm", long("noise and norm"), long("noisy gradients")]


@pytest.mark.parametrize("kind", LOCAL)
def test_a_step_with_noise_or_batch_norm_is_compared_with_equal_shares_and_trains_with_its_batch(
    s4: dj.MirroredStrategy, caplog: pytest.LogCaptureFixture, kind: str
):
    """The step is right, so it runs, and the comparison leaves the bits of its training as they are."""
    ends = []
    for verify in ("auto", "off"):
        model, step = local_step(
            s4,
            kind,
            lambda each, w: (
                dj.compute_average_loss(each) + dj.scale_regularization_loss((w**2).sum())
            ),
        )
        (batch,) = s4.distribute_dataset([(X, Y)])
        for _ in range(2):
            s4.run(step, args=batch, options=dj.RunOptions(verify=verify))
        ends.append(jax.tree.leaves(nnx.to_pure_dict(nnx.state(model))))
    assert all(map(np.array_equal, *ends))
    assert not [r for r in caplog.records if "not exactly" not in r.getMessage()]


MEAN = lambda each, w: each.mean(), "sum", r"4\.000 = number of replicas"
PARTS = lambda each, w: dj.compute_average_loss(each), "mean", r"0\.250 = 1 / number of replicas"
PENALTY = (
    lambda each, w: dj.compute_average_loss(each) + (w**2).sum(), "sum", "scale_regularization_loss",
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "loss", "op", "cause"),
    [
        pytest.param("noise", *PARTS, id="noise, mean of parts"),
        pytest.param("norm", *PENALTY, id="norm, penalty"),
        pytest.param("noisy gradients", *PENALTY, id="noisy gradients, penalty"),
        *(
            pytest.param(kind, *case, id=f"{kind}, {name}", marks=pytest.mark.exhaustive)
            for kind, name, case in [
                ("noise", "mean", MEAN),
                ("noise", "penalty", PENALTY),
                ("norm", "mean", MEAN),
                ("norm", "mean of parts", PARTS),
                ("noise and norm", "penalty", PENALTY),
            ]
        ),
    ],
)
def test_a_wrong_loss_or_reduction_with_noise_or_batch_norm_is_an_error(
    s4: dj.MirroredStrategy, kind: str, loss: Callable[..., jax.Array], op: str, cause: str
):
    """As without them."""
    _, step = local_step(s4, kind, loss, op)
    (batch,) = s4.distribute_dataset([(X, Y)])
    with pytest.raises(dj.NotEqualError, match=cause) as caught:
        s4.run(step, args=batch)
    assert "every replica got the examples and random numbers of the first one" in str(caught.value)


@pytest.mark.exhaustive
def test_a_step_that_advances_a_stream_without_drawing_is_compared(s4: dj.MirroredStrategy):
    """Such as ``nnx.RNN``: the count of its stream is state, but the step has no random number."""
    with s4.scope():
        rnn = nnx.RNN(nnx.LSTMCell(8, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
        optimizer = dj.Optimizer(rnn, optax.sgd(0.1))

    def step(x: jax.Array) -> None:
        optimizer.update(rnn, nnx.grad(lambda rnn: rnn(x[:, None]).mean())(rnn))

    (batch,) = s4.distribute_dataset([X])
    with pytest.raises(dj.NotEqualError, match="gradients of a mean were summed") as caught:
        s4.run(step, args=(batch,))
    assert "random numbers" not in str(caught.value)


@pytest.mark.parametrize("options", [{"verify": "off"}, {"check_sync": False}])
def test_the_comparison_can_be_turned_off(s4: dj.MirroredStrategy, options: dict[str, Any]):
    model, optimizer = classifier(s4, optax.sgd(0.1))
    (batch,) = s4.distribute_dataset([(X, Y)])
    s4.run(mean_step(model, optimizer), args=batch, options=dj.RunOptions(**options))


@pytest.mark.exhaustive
def test_metrics_sums_and_results_are_not_compared(s4: dj.MirroredStrategy):
    """One device correctly has other numbers."""
    model, optimizer = classifier(s4, optax.sgd(0.1))
    with s4.scope():
        seen = nnx.metrics.Average("loss")
        writes = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)
    (batch,) = s4.distribute_dataset([(X, Y)])

    def step(x: jax.Array, y: jax.Array) -> Any:
        step_of(model, optimizer)(x, y)
        seen.update(loss=losses(model, x, y).mean())
        writes.assign_add(1.0)
        return context().replica_id_in_sync_group, context().all_reduce("sum", 1.0)

    s4.run(step, args=batch)
    assert float(writes.numpy()) == 4


@pytest.mark.exhaustive
def test_the_strategy_has_one_replica_in_the_run_on_one_device(s4: dj.MirroredStrategy):
    """A step may ask the strategy itself for the number to divide by."""
    model, optimizer = classifier(s4, optax.sgd(0.1))
    (batch,) = s4.distribute_dataset([(X, Y)])

    def step(x: jax.Array, y: jax.Array) -> None:
        examples = len(x) * s4.num_replicas_in_sync
        optimizer.update(model, nnx.grad(lambda m: losses(m, x, y).sum() / examples)(model))

    s4.run(step, args=batch)
    assert s4.num_replicas_in_sync == 4


@pytest.mark.exhaustive
def test_a_python_counter_does_not_make_the_step_compile_again(s4: dj.MirroredStrategy):
    model, optimizer = classifier(s4, optax.sgd(0.1))
    (batch,) = s4.distribute_dataset([(X, Y)])
    watched, train = Watched(), step_of(model, optimizer)

    def step(x: jax.Array, y: jax.Array) -> None:
        watched.calls += 1
        train(x, y)

    for _ in range(3):
        s4.run(step, args=batch)
    assert watched.calls == 2
    assert s4._runner.programs() == 1


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names the steps that are repeated in float64."""
    called: list[str] = []

    def note(call: Any, entry: Any, flat: Any, **options: Any) -> Any:
        called.append(entry.step)
        return repeat(call, entry, flat, **options)

    repeat = checked.in_float64
    monkeypatch.setattr(checked, "in_float64", note)
    return called


class Shifted(nnx.Linear):
    """A shift of all logits changes no loss, so that its gradient is only rounding."""

    def __init__(self, dtype: Any) -> None:
        super().__init__(8, 3, dtype=dtype, rngs=nnx.Rngs(0))
        self.shift = nnx.Param(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        """The logits."""
        return super().__call__(x) + self.shift[...]


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_weights_that_follow_from_the_state_of_adam_need_no_float64(
    s4: dj.MirroredStrategy, in_float64: list[str], dtype: Any
):
    """The equations from state to weights are those of one device; a wrong factor is still found."""
    with s4.scope():
        model = Shifted(dtype)
        optimizer = dj.Optimizer(model, optax.adam(1e-2))
    (batch,) = s4.distribute_dataset([(X, Y)])
    s4.run(step_of(model, optimizer), args=batch)
    assert not in_float64
    with pytest.raises(dj.NotEqualError, match="kernel"):
        s4.run(mean_step(model, optimizer), args=batch)


@pytest.mark.parametrize("factor", ["asked for", "counted"])
def test_a_factor_between_state_and_weights_is_found(s4: dj.MirroredStrategy, factor: str):
    """The state is that of one device; the weights, computed from it alone, are not."""
    with s4.scope():
        weights, moments = nnx.Param(jnp.zeros(8)), nnx.Variable(jnp.zeros(8))
    (batch,) = s4.distribute_dataset([X])

    def step(x: jax.Array) -> None:
        moments[...] = 0.1 * context().all_reduce("mean", x.mean(0))
        number: Any = context().num_replicas_in_sync
        if factor == "counted":
            number = context().all_reduce("sum", jnp.ones(()))
        weights[...] -= number * moments[...] / (jnp.abs(moments[...]) + 1e-8)

    with pytest.raises(dj.NotEqualError, match=r"weights: .*4\.000 = number of replicas"):
        s4.run(step, args=(batch,))


@pytest.mark.exhaustive
@pytest.mark.parametrize("factor", [1, 4])
def test_signs_that_cancel_up_to_rounding_are_equal(s4: dj.MirroredStrategy, factor: float):
    """The bias's gradient is 6/12 - 6/12, whose rounding depends on no input; a factor elsewhere is found."""
    with s4.scope():
        layers = (nnx.Linear(8, 2, rngs=nnx.Rngs(0)), nnx.Linear(2, 1, rngs=nnx.Rngs(1)))
        model = nnx.Sequential(*layers)
        optimizer = dj.Optimizer(model, optax.lion(1e-2))
    labels = 100 * np.sign([3, -1, -1, 1, 1, 1, -1, -1, 1, -1, 1, -1], dtype=np.float32)
    (batch,) = s4.distribute_dataset([(X[:12], labels)])

    def step(x: jax.Array, y: jax.Array) -> None:
        gradients = nnx.grad(lambda m: dj.compute_average_loss(jnp.abs(jnp.squeeze(m(x), 1) - y)))(
            model
        )
        if context().num_replicas_in_sync > 1:
            gradients.layers[1].kernel[...] *= factor
        optimizer.update(model, gradients)

    if factor == 1:
        s4.run(step, args=batch)
    else:
        with pytest.raises(dj.NotEqualError, match=r"\['kernel'\]: .*4\.000") as caught:
            s4.run(step, args=batch)
        assert "bias" not in str(caught.value)


@pytest.mark.parametrize("devices", [long(1), 2, long(4)])
def test_a_change_hidden_by_large_weights_is_compared_in_float64(
    devices: int, in_float64: list[str]
):
    strategy = dj.MirroredStrategy(list(range(devices)), replicas_per_device=4 // devices)
    with strategy.scope():
        weights = nnx.Param(jnp.full(8, 1e4))
    (batch,) = strategy.distribute_dataset([X])

    def step(x: jax.Array) -> None:
        weights[...] -= 1e-4 * context().all_reduce("sum", x.mean(0) + 1)

    options = dj.RunOptions(verify="auto")
    with pytest.raises(dj.NotEqualError, match=r"4\.000 = number of replicas"):
        strategy.run(step, args=(batch,), options=options)
    assert in_float64


@pytest.mark.parametrize("wrong", ["", "place", "sign", "finite"])
def test_infinities_are_compared_by_position(s4: dj.MirroredStrategy, wrong: str):
    """And the finite numbers beside them among themselves."""
    with s4.scope():
        weights = nnx.Param(jnp.arange(8.0))
    (batch,) = s4.distribute_dataset([X])

    def step(x: jax.Array) -> None:
        several = context().num_replicas_in_sync > 1
        last = {"place": 1.0, "sign": -jnp.inf}.get(wrong, jnp.inf) if several else jnp.inf
        change = context().all_reduce("sum" if wrong == "finite" else "mean", x.mean(0))
        weights[...] = (weights[...] + change).at[7].set(last)

    ways = {
        "": nullcontext(),
        "finite": pytest.raises(dj.NotEqualError, match=r"4\.000"),
    }
    with ways.get(wrong, pytest.raises(dj.NotEqualError, match="NaNs or infinities in other")):
        s4.run(step, args=(batch,))


@pytest.mark.parametrize("value", ["off", "auto", "first", "always"])
def test_the_environment_sets_the_default(monkeypatch: pytest.MonkeyPatch, value: str):
    monkeypatch.setenv("DISTRIBUTE_JAX_VERIFY", value)
    assert dj.RunOptions().verify == value
    assert dj.RunOptions(verify="first").verify == "first"


def test_another_value_of_the_environment_is_refused(
    s4: dj.MirroredStrategy, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DISTRIBUTE_JAX_VERIFY", "yes")
    with pytest.raises(ValueError, match="DISTRIBUTE_JAX_VERIFY must be one of 'off'"):
        s4.run(lambda: 1.0)


@pytest.mark.exhaustive
def test_fit_is_compared_where_the_step_is_the_users(s2: dj.MirroredStrategy):
    """The built-in step is compared on request only."""

    class Own(dj.Model):
        def train_step(self, batch: Any) -> dict[str, jax.Array]:
            mean_step(self.module, self.optimizer)(*batch)
            return {}

    def sums_a_mean(y: jax.Array, logits: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(logits, y)

    for kind in (dj.Model, Own):
        with s2.scope():
            model = kind(nnx.Linear(8, 3, rngs=nnx.Rngs(0)))
        model.compile(optax.sgd(0.1), loss=sums_a_mean)
        if kind is Own:
            with pytest.raises(dj.NotEqualError, match=r"2\.000 = number of replicas"):
                model.fit(X, Y, batch_size=16, verbose=0)
        else:
            model.fit(X, Y, batch_size=16, verbose=0)


class Pairs(dj.Model):
    """Compares the examples of a replica with each other."""

    def train_step(self, batch: Any) -> dict[str, jax.Array]:
        x, _, _ = dj.unpack_x_y_sample_weight(batch)

        def loss_fn(module: Any) -> jax.Array:
            z = module(x)
            return ((z[:, None] - z) ** 2).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(self.module)
        self.optimizer.update(self.module, grads)
        return {"loss": loss}


@pytest.mark.exhaustive
def test_a_train_step_that_is_meant_to_differ_turns_the_comparison_off(s2: dj.Strategy):
    """By default its first batch is an error, which names the option."""
    with s2.scope():
        model = Pairs(nnx.Linear(8, 3, rngs=nnx.Rngs(0)))
    model.compile("sgd")
    with pytest.raises(dj.NotEqualError) as caught:
        model.fit(X, Y, batch_size=8, verbose=0)
    assert (
        'train_step that is meant to differ: compile(..., verify="off")'
        in caught.value.__notes__[-1]
    )
    model.compile("sgd", verify="off")
    assert len(model.fit(X, Y, batch_size=8, verbose=0).history["loss"]) == 1


def test_a_mean_or_a_maximum_that_an_evaluation_reports_is_logged(
    s2: dj.Strategy, caplog: pytest.LogCaptureFixture
):
    """Their sums over the replicas are reported, of which that of a maximum was not logged."""

    class Reporting(dj.Model):
        def test_step(self, batch: Any) -> Any:
            part = dj.compute_average_loss(batch[0][:, 0])
            rows = context().batch_mask.sum()  # of a full batch it is equal on all replicas
            return {"size": batch[0].mean(), "top": batch[0].max(), "part": part, "rows": rows}

    with s2.scope():
        model = Reporting(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
    model.compile("sgd", "mse")
    model.evaluate(np.array([[1], [2], [3], [6]], np.float32), verbose=0)
    assert "test_step returned result['size'], a mean" in caplog.text
    assert "test_step returned result['top'], which is reported as 8, " in caplog.text
    assert "test_step returned result['rows'], which is reported as 2, " in caplog.text
    assert "result['part']" not in caplog.text


@pytest.mark.exhaustive
def test_fit_is_compared_without_the_padding_that_a_batch_norm_does_not_need(
    s4: dj.Strategy, monkeypatch: pytest.MonkeyPatch
):
    """The last 4 rows divide over four replicas; with padding they would not be those of one device."""
    monkeypatch.setenv("DISTRIBUTE_JAX_VERIFY", "always")
    with s4.scope():
        model = dj.Model(nnx.BatchNorm(1, axis_name="data", rngs=nnx.Rngs(0)))
    model.compile("sgd", "mse")
    x, plain = np.arange(12.0, dtype=np.float32)[:, None], nnx.BatchNorm(1, rngs=nnx.Rngs(0))
    model.fit(x, x, batch_size=8, shuffle=False, verbose=0)
    plain(x[:8]), plain(x[8:])
    np.testing.assert_allclose(model.module.mean[...], plain.mean[...], rtol=1e-5)


COMBINED: dict[str, tuple[Callable[[jax.Array, jax.Array], Any], str]] = {
    "the sum of parts": (lambda loss, x: context().all_reduce("sum", loss), ""),
    "a number of each replica": (lambda loss, x: x.std(), ""),
    "the number of replicas": (lambda loss, x: context().num_replicas_in_sync, ""),
    "the sum of parts, divided": (
        lambda loss, x: context().all_reduce("sum", loss) / context().num_replicas_in_sync,
        "result: 0.0409, on one device 0.1635",
    ),
    "the mean of covariances": (
        lambda loss, x: {"cov": context().all_reduce("mean", jnp.cov(x.T))},
        "result['cov']: [",
    ),
}


@pytest.mark.parametrize("name", COMBINED)
def test_a_combined_result_that_is_another_number_on_one_device_is_logged(
    s4: dj.MirroredStrategy, caplog: pytest.LogCaptureFixture, name: str
):
    """Both values are shown, once; what is not combined, and whole numbers, may be meant so."""
    result, shown = COMBINED[name]
    with s4.scope():
        weight = nnx.Param(jnp.ones(8))

    def step(x: jax.Array) -> Any:
        loss, gradient = jax.value_and_grad(
            lambda w: dj.compute_average_loss(jnp.square(x @ w / 8))
        )(weight[...])
        weight[...] -= context().all_reduce("sum", gradient)
        return result(loss, x)

    step.__qualname__ = name
    (batch,) = s4.distribute_dataset([X])
    for _ in range(2):
        s4.run(step, args=(batch,), options=dj.RunOptions(verify="auto"))
    texts = [r.getMessage() for r in caplog.records if "another one on one device" in r.message]
    assert [shown in text for text in texts] == [True] * bool(shown)
