"""Partial batches: exact, one more program at most, and padding that leaks is refused."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import long
from flax import nnx
from leaves import replica_number

import distribute_jax as dj
from distribute_jax.program import _padding_check


def batches(*sizes: int, width: int = 3) -> list[np.ndarray]:
    """Random batches of these sizes."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=(n, width)).astype(np.float32) for n in sizes]


def test_the_average_loss_divides_by_the_real_examples(strategy: dj.Strategy):
    data = batches(8, 5, 1)
    losses = [
        float(
            strategy.reduce(
                "sum", strategy.run(lambda x: dj.compute_average_loss(x.sum(1)), args=(x,))
            )
        )
        for x in strategy.distribute_dataset(data)
    ]
    np.testing.assert_allclose(losses, [x.sum(1).mean() for x in data], rtol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The global batch has")
def test_batches_are_explicit_transfers(strategy: dj.Strategy):
    """JAX's transfer guard lets full and partial batches pass, and ``fit``; not the numbers of a user."""
    with strategy.scope():
        model = dj.Model(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
        model.compile(optax.sgd(0.1), "mse")
    of_replicas = strategy.experimental_distribute_values_from_function
    with jax.transfer_guard("disallow"):
        each = of_replicas(lambda context: np.ones(1 + context.replica_id_in_sync_group % 2))
        strategy.experimental_local_results(strategy.run(lambda x: 2 * x, args=(each,)))
        for x in strategy.distribute_dataset(batches(8, 5)):
            rows = strategy.run(lambda x: 2 * x, args=(x,), options=dj.RunOptions(verify="always"))
            strategy.reduce("sum", rows, axis=0)
            strategy.run(lambda x: jax.lax.pmax(x.max(), "data"), args=(x,))
        model.fit(np.ones((5, 3), np.float32), np.ones((5, 1)), batch_size=4, verbose=0)
        with pytest.raises(RuntimeError, match="Disallowed host-to-device transfer"):
            strategy.run(lambda x: x, args=(2.0,))


@pytest.mark.filterwarnings("ignore:The global batch has 4 examples for 8")
def test_five_samples_in_batches_of_four_give_the_exact_weight(strategy: dj.Strategy):
    """TensorFlow has 0.6375 on two replicas and 0.74375 on four; one device has 0.425."""
    with strategy.scope():
        weight = nnx.Param(jnp.ones(()))

    def step(x: jax.Array):
        loss, grad = jax.value_and_grad(lambda w: dj.compute_average_loss((w * x) ** 2))(
            weight[...]
        )
        weight[...] -= 0.01 * dj.get_replica_context().all_reduce("sum", grad)
        return loss

    rows = np.arange(1.0, 6.0, dtype=np.float32)
    losses = [
        float(strategy.reduce("sum", strategy.run(step, args=(x,))))
        for x in strategy.distribute_dataset([rows[:4], rows[4:]])
    ]
    assert float(weight[...]) == pytest.approx(0.425, abs=1e-6)
    assert (4 * losses[0] + losses[1]) / 5 == pytest.approx(9.6125, rel=1e-6)


def mask() -> jax.Array:
    """The mask of this replica's rows."""
    return dj.get_replica_context().batch_mask


def test_the_mask_marks_the_real_rows(s4: dj.MirroredStrategy):
    full, partial = s4.distribute_dataset(batches(8, 5))
    seen = s4.run(lambda _: (mask(), dj.get_replica_context().real_examples), args=(full,))
    assert seen[0].tolist() == [True, True]
    assert seen[1] == 8
    rows, real = s4.run(
        lambda _: (dj.per_example(mask()), dj.get_replica_context().real_examples), args=(partial,)
    )
    assert [v.tolist() for v in s4.experimental_local_results(rows)] == [
        [True] * 2,
        [True] * 2,
        [True],
        [],
    ]
    assert int(real) == 5
    assert s4.run(mask) is None


@pytest.mark.parametrize("sizes", [(8, 5), (8, 1), (6, 6)])
def test_steps_without_a_mask_are_refused(s4: dj.MirroredStrategy, sizes: tuple[int, int]):
    with s4.scope():
        weight = nnx.Param(jnp.ones(3))

    def step(x: jax.Array):
        grads = dj.get_replica_context().all_reduce("sum", x.mean(0))
        weight[...] -= grads
        return x.mean()

    elements = list(s4.distribute_dataset(batches(*sizes), dj.InputOptions()))
    if sizes[0] == 8:
        s4.run(step, args=(elements[0],))
    before = np.asarray(weight[...])
    with pytest.raises(dj.PaddingLeakError, match=r"weight depends on it: reduce_sum at") as caught:
        s4.run(step, args=(elements[-1],))
    assert isinstance(caught.value, ValueError)
    assert "result" in str(caught.value)
    assert 'InputOptions(partial="drop")' in str(caught.value)
    assert f"{sizes[1]} real examples" in str(caught.value)
    np.testing.assert_array_equal(weight[...], before)


def counted(step: Any) -> tuple[Any, Any]:
    """A step that counts how often a replica runs it, and the counter."""
    calls: SimpleQueue[int] = SimpleQueue()  # not searched for captured arrays

    def counting(x: jax.Array) -> Any:
        jax.debug.callback(lambda: calls.put(1))
        return step(x)

    return counting, calls.qsize


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules that XLA compiles from here on, by name."""
    names: list[str] = []

    def note(event: str, duration: float, **known: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(known.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(note)
    yield names
    jax.monitoring.unregister_event_duration_listener(note)


def test_a_proved_step_compiles_once_at_its_first_partial_batch_and_runs_nothing_twice(
    s4: dj.MirroredStrategy, compilations: list[str]
):
    """It is traced once for the program, and once at another size."""
    traces: SimpleQueue[int] = SimpleQueue()

    def step(x: jax.Array):
        traces.put(1)
        return dj.compute_average_loss(x.sum(1))

    counting, calls = counted(step)
    elements = list(s4.distribute_dataset(batches(8, 5, 6, 7)))
    wanted = zip(elements, (1, 1, 0, 0), (1, 3, 3, 3), (4, 8, 12, 16), strict=True)
    for element, compiled, traced, called in wanted:
        compilations.clear()
        jax.block_until_ready(s4.run(counting, args=(element,)).global_array)
        jax.effects_barrier()
        assert (len(compilations), traces.qsize(), calls()) == (compiled, traced, called)


def test_an_unproved_step_is_checked_again_at_the_2nd_4th_and_8th_partial_batch(
    s4: dj.MirroredStrategy, caplog: pytest.LogCaptureFixture
):
    """Each check runs it five times on four replicas; the one with more padding is compiled once."""
    step, calls = counted(lambda x: dj.compute_average_loss(x.max() + 0 * x.sum(1)))
    elements = list(s4.distribute_dataset([np.ones((8, 3)), *[np.ones((5, 3))] * 9]))
    ran = []
    for element in elements:
        before = calls()
        jax.block_until_ready(s4.run(step, args=(element,)).global_array)
        jax.effects_barrier()
        ran.append((calls() - before) // 4)
    assert ran == [1, 5, 5, 1, 5, 1, 1, 1, 5, 1]
    [text] = [r.getMessage() for r in caplog.records if "is not proved" in r.getMessage()]
    assert "result depends on reduce_max at test_partial.py:" in text


def test_a_leak_is_an_error_even_if_the_batch_does_not_show_it(s4: dj.MirroredStrategy):
    """The mask is forgotten in counting a class that the first batches do not have."""
    with s4.scope():
        rare = nnx.Variable(jnp.zeros((), jnp.int32))

    def step(y: jax.Array):
        rare[...] += total(jnp.sum(y == 2))

    full, partial = s4.distribute_dataset([np.full(8, 2), np.zeros(5, int)])
    s4.run(step, args=(full,))
    with pytest.raises(dj.PaddingLeakError, match=r"rare depends on it: reduce_sum at .*\.py") as e:
        s4.run(step, args=(partial,))
    assert 'all_reduce("sum", ...)' in str(e.value)
    assert 'all_reduce("mean", ...) goes with a mean' in str(e.value)
    assert "dj.Optimizer sums the gradients by itself" in str(e.value)
    assert int(rare[...]) == 8


FILLED: dict[str, Callable[[jax.Array], jax.Array]] = {
    "max": lambda x: jax.lax.pmax(jnp.max(jnp.where(mask(), x, 0)), "data"),
    "min": lambda x: jax.lax.pmin(jnp.min(jnp.where(mask(), -x, 0)), "data"),
    "all": lambda x: total(jnp.any(~jnp.where(mask(), x < 0, False)).astype(int)),
    "product": lambda x: total(jnp.log(jnp.prod(jnp.where(mask(), 2.0, 0)) + 1e-9)),
    "cummax": lambda x: jax.lax.pmax(jax.lax.cummax(jnp.where(mask(), x, 0))[-1], "data"),
}


@pytest.mark.parametrize("name", FILLED)
@pytest.mark.parametrize("replicas", [1, 4])
def test_a_number_that_is_written_into_the_padding_is_a_leak(name: str, replicas: int):
    """It is the same in each padded batch, and a change only from one without padding."""
    strategy = dj.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    numbers = -np.arange(1, 9, dtype=np.float32)
    full, partial = strategy.distribute_dataset([numbers, numbers[:5]])
    strategy.run(FILLED[name], args=(full,))
    with pytest.raises(dj.PaddingLeakError, match=r"(?s)result differs.*padding and with none"):
        strategy.run(FILLED[name], args=(partial,))


def test_a_neutral_number_in_the_padding_does_not_leak(s4: dj.MirroredStrategy):
    numbers = -np.arange(1, 9, dtype=np.float32)

    def step(x: jax.Array) -> jax.Array:
        return jax.lax.pmax(jnp.max(x, initial=-jnp.inf, where=mask()), "data")

    for size, batch in zip(
        (8, 5, 1), s4.distribute_dataset([numbers[:n] for n in (8, 5, 1)]), strict=True
    ):
        assert float(s4.run(step, args=(batch,))) == numbers[:size].max()


@pytest.mark.exhaustive
def test_an_undecided_leak_is_found_by_a_later_check(s4: dj.MirroredStrategy):
    """True if a share has a number above 7, which the first batch has not."""
    step = lambda x: jax.lax.psum((x > 7).any().astype(float), "data")  # noqa: E731
    ones, above = np.ones(5, np.float32), np.arange(4, 9, dtype=np.float32)
    _, first, later = s4.distribute_dataset([np.ones(8, np.float32), ones, above])
    assert float(s4.run(step, args=(first,))) == 0
    with pytest.raises(dj.PaddingLeakError, match="two different paddings"):
        s4.run(step, args=(later,))
    assert [float(s4.run(step, args=(first,))) for _ in range(2)] == [0, 0]
    with pytest.raises(dj.PaddingLeakError):  # a step that leaked once is compared at every batch
        s4.run(step, args=(later,))


def test_an_interrupted_check_is_made_again_in_full(
    s4: dj.MirroredStrategy, monkeypatch: pytest.MonkeyPatch
):
    """Only the step with more padding, which it compiles, shows that this one counts all rows."""
    _, batch = s4.distribute_dataset(batches(8, 5))
    step = lambda x: jax.lax.psum(jnp.float32(x.shape[0]), "data")  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(_padding_check, "build", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            s4.run(step, args=(batch,))
    with pytest.raises(dj.PaddingLeakError, match="more padding"):
        s4.run(step, args=(batch,))


def test_a_nan_that_only_padding_makes_is_an_error(s4: dj.MirroredStrategy):
    """The norm of a row of zeros has no derivative, and NaN times zero is NaN."""
    with s4.scope():
        weight = nnx.Param(jnp.ones(3))

    def step(x: jax.Array):
        def loss(w: jax.Array):
            return dj.compute_average_loss(jnp.linalg.norm(x * w * mask()[:, None], axis=1))

        weight[...] -= total(jax.grad(loss)(weight[...]))

    (rows,) = batches(8)
    full, partial, of_nan = s4.distribute_dataset([rows, rows[:5], rows[:5] * np.nan])
    s4.run(step, args=(full,))
    with pytest.raises(dj.PaddingLeakError, match=r"weight is NaN: .* set the padding to 1"):
        s4.run(step, args=(partial,))
    assert np.isfinite(weight[...]).all()
    s4.run(step, args=(of_nan,))
    assert np.isnan(weight[...]).all()


def test_rows_summed_over_the_replicas_are_not_proved_to_ignore_padding(
    s4: dj.MirroredStrategy, caplog: pytest.LogCaptureFixture
):
    """They belong to no example, and cannot be cut to the real ones."""
    _, partial = s4.distribute_dataset(batches(8, 5))
    s4.run(lambda x: total(jnp.where(mask()[:, None], x, 0)), args=(partial,))
    assert "result depends on all rows of a share" in caplog.text


def test_a_step_that_is_not_deterministic_is_not_a_leak(s4: dj.MirroredStrategy):
    rng = np.random.default_rng(0)

    def step(x: jax.Array):
        noise = jax.pure_callback(
            lambda: np.float32(rng.normal()), jax.ShapeDtypeStruct((), np.float32)
        )
        return jnp.sum(jnp.where(mask()[:, None], x, 0)) * 0 + noise

    _, partial = s4.distribute_dataset(batches(8, 5))
    assert isinstance(s4.run(step, args=(partial,)), dj.PerReplica)


def test_per_example_results_are_recognised_and_cut(s4: dj.MirroredStrategy):
    data = batches(8, 5)
    _, partial = s4.distribute_dataset(data)

    def step(x: jax.Array):
        # The second has two rows as well, which is the size of a share by chance.
        return {
            "rows": x * 2,
            "chance": jnp.ones((2, 1)) * replica_number(),
            "sum": jnp.sum(jnp.where(mask()[:, None], x, 0)),
        }

    result = s4.run(step, args=(partial,))
    np.testing.assert_allclose(s4.gather(result["rows"], axis=0), data[1] * 2, rtol=1e-6)
    assert [v.shape for v in s4.experimental_local_results(result["chance"])] == [(2, 1)] * 4
    np.testing.assert_allclose(s4.reduce("sum", result["sum"]), data[1].sum(), rtol=1e-5)


def test_a_result_of_unknown_rows_cannot_be_read_unless_declared(s4: dj.MirroredStrategy):
    data = batches(8, 5)
    _, partial = s4.distribute_dataset(data)

    def step(x: jax.Array, declare: bool):
        if x.shape[0] != 2:
            raise ValueError("only shares of two")
        return dj.per_example(x) if declare else x

    unknown = s4.run(step, args=(partial, False))
    for read in (
        lambda: unknown.values,
        lambda: s4.gather(unknown, axis=0),
        lambda: s4.reduce("sum", unknown, axis=0),
        lambda: s4.experimental_local_results(unknown),
    ):
        with pytest.raises(ValueError, match=r"only shares of two.*dj\.per_example") as caught:
            read()
        assert 'partial="drop"' in str(caught.value)
    declared = s4.run(step, args=(partial, True))
    np.testing.assert_allclose(s4.gather(declared, axis=0), data[1])


def test_one_replica_gives_plain_arrays_cut_to_the_real_rows():
    one = dj.OneDeviceStrategy(0)
    data = batches(4, 3)
    results = [one.run(lambda x: x + 1, args=(x,)) for x in one.distribute_dataset(data)]
    assert [r.shape for r in results] == [(4, 3), (3, 3)]
    np.testing.assert_allclose(results[1], data[1] + 1)


def test_batches_with_different_real_counts_are_refused(s4: dj.MirroredStrategy):
    _, five = s4.distribute_dataset(batches(8, 5))
    full, six = s4.distribute_dataset(batches(8, 6))
    for pair in ((five, six), (five, full)):
        with pytest.raises(ValueError, match=r"different numbers of real examples.*\n.*args\[0\]"):
            s4.run(lambda a, b: a + b, args=pair)


def test_dropping_partial_batches_needs_no_mask(s4: dj.MirroredStrategy):
    options = dj.InputOptions(partial="drop")
    sums = [
        float(s4.reduce("sum", s4.run(lambda x: x.sum(), args=(x,))))
        for x in s4.distribute_dataset(batches(8, 8, 5), options)
    ]
    assert len(sums) == 2


@pytest.mark.parametrize("policy", ["mask", "shrink"])
def test_evaluation_to_the_last_example(strategy: dj.Strategy, policy: str):
    data = batches(8, 8, 3)
    with strategy.scope():
        model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    outs = [
        np.asarray(strategy.gather(strategy.run(model, args=(x,)), axis=0))
        for x in strategy.distribute_dataset(data, dj.InputOptions(partial=policy))
    ]
    expected = np.concatenate(data) @ np.asarray(model.kernel[...]) + np.asarray(model.bias[...])
    np.testing.assert_allclose(np.concatenate(outs), expected, rtol=1e-5, atol=1e-6)


def total(value: jax.Array) -> jax.Array:
    """Sums over the replicas."""
    return dj.get_replica_context().all_reduce("sum", value)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (lambda x: total(jnp.float32(x.shape[0])), r"more padding.*\n.*\n?.*real_examples"),
        (
            lambda x: total(jnp.sum(jnp.where(mask()[:, None], x, 0)) / (x.shape[0] * 4)),
            r"more padding.*\n.*\n?.*real_examples",
        ),
        (lambda x: total(jnp.sum(x > -100)), "reduce_sum"),
    ],
    ids=["share counted", "divided by the share", "all rows compared"],
)
def test_counting_the_padding_is_refused(s4: dj.MirroredStrategy, step: object, text: str):
    """The result is wrong but equal for every padding of the same length."""
    _, partial = s4.distribute_dataset(batches(8, 5))
    with pytest.raises(dj.PaddingLeakError, match=text):
        s4.run(step, args=(partial,))


def test_random_numbers_from_a_key_argument_are_not_a_leak(s4: dj.MirroredStrategy):
    """They depend on the batch size, so that only other padding is tried."""
    _, partial = s4.distribute_dataset(batches(8, 5))

    def step(x: jax.Array, key: jax.Array):
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        return total(dj.compute_average_loss(jnp.sum(jnp.where(kept, x, 0), axis=1)))

    assert np.isfinite(float(s4.run(step, args=(partial, jax.random.key(0)))))


def test_rows_gathered_inside_the_step_are_refused_with_their_padding(s4: dj.MirroredStrategy):
    full, partial = s4.distribute_dataset(batches(8, 5))
    step = lambda x: dj.get_replica_context().all_gather(x, axis=0)  # noqa: E731
    assert s4.run(step, args=(full,)).shape == (8, 3)
    with pytest.raises(dj.PaddingLeakError, match=r"use strategy\.gather"):
        s4.run(step, args=(partial,))


def masked_norm(norm: nnx.BatchNorm, x: jax.Array) -> jax.Array:
    """Applies a batch norm to the real rows."""
    return norm(x, mask=mask()[:, None])


@pytest.mark.parametrize(
    ("masked", "axis_name"), [(True, None), (False, "data"), long(True, "data"), long(False, None)]
)
def test_batch_norm_trained_on_uneven_shares_is_refused_by_name(
    s4: dj.MirroredStrategy, axis_name: str | None, masked: bool
):
    """Flax weighs the replicas equally, and an empty share makes NaN."""
    with s4.scope():
        model = nnx.Sequential(nnx.BatchNorm(3, axis_name=axis_name, rngs=nnx.Rngs(0)))
    norm = model.layers[0]
    full, five, six = s4.distribute_dataset(batches(8, 5, 6))
    step = lambda x: masked_norm(norm, x) if masked else model(x)  # noqa: E731
    s4.run(step, args=(full,))
    before = np.asarray(norm.mean[...])
    for partial in (five, six):
        with pytest.raises(
            dj.PaddingLeakError, match=r"\(BatchNorm\): .*\.mean, .*\.var"
        ) as caught:
            s4.run(step, args=(partial,))
        assert 'InputOptions(partial="drop")' in str(caught.value)
        assert "model.eval()" in str(caught.value)
    np.testing.assert_array_equal(norm.mean[...], before)
    model.eval()
    out = s4.gather(s4.run(step, args=(five,)), axis=0)
    mean, variance = map(np.asarray, (norm.mean[...], norm.var[...]))
    expected = (batches(8, 5)[1] - mean) / np.sqrt(variance + norm.epsilon)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_masked_batch_norm_on_even_shares_and_on_one_device_is_exact(strategy: dj.Strategy):
    """A batch of 8 after one of 16 is padded, but every replica has as many real rows."""
    with strategy.scope():
        norm = nnx.BatchNorm(3, axis_name="data", rngs=nnx.Rngs(0))
    data = batches(16, 8)
    for x in strategy.distribute_dataset(data):
        strategy.run(lambda x: masked_norm(norm, x), args=(x,))
    mean, variance = np.zeros(3), np.ones(3)
    for x in data:
        mean, variance = 0.99 * mean + 0.01 * x.mean(0), 0.99 * variance + 0.01 * x.var(0)
    np.testing.assert_allclose(norm.mean[...], mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(norm.var[...], variance, rtol=1e-4, atol=1e-6)


def test_batch_norm_over_padding_on_one_device_is_refused():
    one = dj.OneDeviceStrategy(0)
    with one.scope():
        norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    _, partial = one.distribute_dataset(batches(8, 5))
    with pytest.raises(
        dj.PaddingLeakError, match=r"norm \(BatchNorm\): norm\.mean, norm\.var"
    ) as caught:
        one.run(lambda x: norm(x), args=(partial,))
    assert one.run(lambda x: masked_norm(norm, x), args=(partial,)).shape == (5, 3)
    assert "without padding, which is possible where" in str(caught.value)
    _, cut = one.distribute_dataset(batches(8, 5), dj.InputOptions(partial="shrink"))
    assert one.run(lambda x: norm(x), args=(cut,)).shape == (5, 3)


@pytest.mark.exhaustive
def test_counted_padding_is_found_beside_random_numbers_of_fixed_shape(s4: dj.MirroredStrategy):
    _, partial = s4.distribute_dataset(batches(8, 5))

    def step(x: jax.Array, key: jax.Array):
        return total(jax.random.normal(key) + jnp.float32(x.shape[0]))

    with pytest.raises(dj.PaddingLeakError, match="more padding"):
        s4.run(step, args=(partial, jax.random.key(0)))


@pytest.mark.exhaustive
def test_an_incomplete_check_is_logged_once(
    s4: dj.MirroredStrategy, caplog: pytest.LogCaptureFixture
):
    _, five, six = s4.distribute_dataset(batches(8, 5, 6))

    def dropping(x: jax.Array, key: jax.Array):
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        largest = jnp.max(jnp.where(mask()[:, None], jnp.abs(x), 0))  # 0 is not proved neutral
        return total(dj.compute_average_loss(jnp.sum(jnp.where(kept, x, 0), axis=1)) + largest)

    for partial in (five, six):
        s4.run(dropping, args=(partial, jax.random.key(0)))
    (text,) = [r.getMessage() for r in caplog.records if "counts no padding" in r.getMessage()]
    assert "dropping met a partial batch" in text
    assert "model.eval()" in text
    assert 'InputOptions(partial="drop")' in text

    def rigid(x: jax.Array):
        if x.shape[0] != 2:
            raise ValueError("only shares of two")
        return dj.compute_average_loss(x.sum(1))

    caplog.clear()
    s4.run(rigid, args=(five,))
    assert "could not be traced with more rows (ValueError: only shares of two)" in caplog.text


def test_a_mirrored_result_of_unknown_rows_is_accepted(s4: dj.MirroredStrategy):
    """It is refused only if its shape is known to follow the batch."""
    _, partial = s4.distribute_dataset(batches(8, 5))

    def step(x: jax.Array):
        if x.shape[0] != 2:
            raise ValueError("only shares of two")
        return total(jnp.sum(jnp.where(mask()[:, None], x, 0), axis=0))

    assert s4.run(step, args=(partial,)).shape == (3,)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The global batch has 2 examples for 4")
def test_a_gradient_that_is_only_rounding_is_not_a_leak(s4: dj.MirroredStrategy):
    """The bias of an attention's keys changes no output; Adam makes full steps of its rounding."""
    with s4.scope():
        model = nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0))
        optimizer = dj.Optimizer(model, optax.adam(1e-2))

    def step(x: jax.Array):
        def loss(model):
            return dj.compute_average_loss(jnp.sum((model(x) - x[:, ::-1]) ** 2, axis=(1, 2)))

        optimizer.update(model, nnx.grad(loss)(model))

    rows = np.random.default_rng(0).normal(size=(34, 16, 16)).astype(np.float32)
    whole, batch = s4.distribute_dataset([rows[:32], rows[32:]])
    s4.run(step, args=(whole,))
    s4.run(step, args=(batch,))

    def counts_rows(x: jax.Array):
        optimizer.update(model, nnx.grad(lambda m: jnp.sum(m(x) ** 2) / x.shape[0])(model))

    with pytest.raises(dj.PaddingLeakError, match=r"depends on it: .* at test_partial\.py"):
        s4.run(counts_rows, args=(batch,))


def _added(values: jax.Array) -> jax.Array:
    """Adds up along dim 0, one after the other, and rounds each sum."""
    return jax.lax.scan(lambda total, row: (total + row, None), jnp.zeros_like(values[0]), values)[
        0
    ]


@pytest.mark.parametrize(("seed", "half"), [(45, False), long(36, False), long(9, True)])
def test_sums_whose_order_depends_on_the_number_of_rows_are_not_a_leak(seed: int, half: bool):
    """Of float16, in a step that changes a float32, or of terms that cancel up to rounding.

    As in the gradient of a bias by a loss of differences; those of changed inputs may be exactly 0.
    """
    strategy = dj.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        total = nnx.Variable(jnp.zeros(()))

    def step(x: jax.Array) -> None:
        real = jnp.where(mask(), x, 0).astype(jnp.float16 if half else jnp.float32)
        added = _added(_added(real.reshape(8, -1).T))
        total[...] += 0.01 * added.astype(jnp.float32) if half else added - jnp.sum(real)

    x = np.random.default_rng(seed).uniform(1, 2, size=53).astype(np.float32)
    for batch in strategy.distribute_dataset([x[:32], x[32:]]):
        strategy.run(step, args=(batch,))
    wanted = pytest.approx(0.01 * x.sum(), rel=1e-2) if half else pytest.approx(0, abs=1e-4)
    assert float(total[...]) == wanted


@pytest.mark.parametrize("verified", ["off", "auto", "first"])
def test_a_step_that_counts_its_traces_is_compiled_once(s4: dj.MirroredStrategy, verified: Any):
    """Full and partial batches have one program each, although every trace changes a captured object."""
    counter = Counter()
    traces: list[int] = []

    def step(x: jax.Array) -> jax.Array:
        counter.calls += 1
        traces.append(1)
        return dj.compute_average_loss(x[:, 0])

    data = s4.distribute_dataset([np.ones((16, 2), np.float32), np.ones((13, 2), np.float32)])
    seen = []
    for _ in range(3):
        for batch in data:
            s4.run(step, args=(batch,), options=dj.RunOptions(verify=verified))
        seen.append((counter.calls, len(traces), len(s4._runner.cache.programs)))
    assert seen[1:] == [seen[0]] * 2, seen
    counter.calls = 0  # a change by the user compiles again
    s4.run(step, args=(batch,))
    assert counter.calls > 0


class Counter:
    """Counts calls in a plain attribute."""

    calls = 0


@pytest.mark.parametrize("declared", [False, True])
def test_rows_of_a_partial_batch_that_are_passed_on_keep_their_mask(
    strategy: dj.Strategy, declared: bool
):
    """Per-example results are a partial batch for the next step, alone or with the original batch."""

    def encode(x: jax.Array) -> jax.Array:
        return dj.per_example(x * 2) if declared else x * 2

    def total(h: jax.Array) -> jax.Array:
        return dj.get_replica_context().all_reduce("sum", dj.compute_average_loss(h))

    def both(h: jax.Array, x: jax.Array) -> jax.Array:
        mask = dj.get_replica_context().batch_mask
        return dj.get_replica_context().all_reduce("sum", jnp.where(mask, h * x, 0).sum())

    for rows in (8, 5, 3):
        x = np.arange(rows, dtype=np.float32)
        batch = list(strategy.distribute_dataset([np.arange(8, dtype=np.float32), x]))[-1]
        encoded = strategy.run(encode, args=(batch,))
        np.testing.assert_allclose(strategy.run(total, args=(encoded,)), 2 * x.mean())
        if strategy.num_replicas_in_sync > 1:  # one replica returns a plain array of the real rows
            np.testing.assert_allclose(strategy.run(both, args=(encoded, batch)), 2 * (x * x).sum())


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_a_leak_through_ties_is_found(s4: dj.MirroredStrategy, rows: int):
    """Padding repeats rows, so the two largest rows may be one example twice; each call is an error."""

    def hardest(x: jax.Array) -> jax.Array:
        return jax.lax.top_k(dj.get_replica_context().all_gather(x, axis=0), 2)[0]

    data = np.array([1.0, 3.0, 2.0, 0.5, -1.0], np.float32)[:rows]
    for batch in list(s4.distribute_dataset([np.zeros(8, np.float32), data, data, data]))[1:]:
        with pytest.raises(dj.PaddingLeakError):
            s4.run(hardest, args=(batch,))


@pytest.mark.exhaustive
def test_padding_that_only_changes_the_rounding_is_not_a_leak(s4: dj.MirroredStrategy):
    """Weights are normalised over all rows, and again over the real ones."""

    def pooled(x: jax.Array) -> jax.Array:
        replica = dj.get_replica_context()
        p = jax.nn.softmax(replica.all_gather(x, axis=0)) * replica.all_gather(
            replica.batch_mask, axis=0
        )
        return (p / p.sum()) @ replica.all_gather(x, axis=0)

    x = np.random.default_rng(0).normal(size=8).astype(np.float32)
    for rows, batch in zip((8, 5, 6), s4.distribute_dataset([x, x[:5], x[:6]]), strict=True):
        p = np.exp(x[:rows]) / np.exp(x[:rows]).sum()
        np.testing.assert_allclose(s4.run(pooled, args=(batch,)), p @ x[:rows], rtol=1e-5)


def test_padding_repeats_examples_of_the_batch(s4: dj.MirroredStrategy):
    """The number of classes that occur is that of the real rows."""

    def classes(y: jax.Array) -> jax.Array:
        seen = jnp.zeros(4, bool).at[dj.get_replica_context().all_gather(y, axis=0)].set(True)
        return seen.sum()

    for batch in s4.distribute_dataset([np.arange(8) % 4, np.array([2, 2, 3])]):
        assert int(s4.run(classes, args=(batch,))) == (4 if batch.counts is None else 2)
