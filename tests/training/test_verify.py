"""``compile(verify="first")``, and which outputs ``predict`` can join."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from model_factory import compile_model

import distribute_jax as dj

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


class Rows(nnx.Module):
    def __init__(self) -> None:
        self.layer = nnx.Linear(4, 1, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> Any:
        return self.layer(x)


class Mixed(Rows):
    """Subtracts the mean of a replica's examples."""

    def __call__(self, x: jax.Array) -> Any:
        z = self.layer(x)
        return z - z.mean(axis=0)


def make_model(strategy: dj.Strategy, module: type[Rows], **options: Any) -> dj.Model:
    defaults = {"optimizer": optax.sgd(0.1, momentum=0.9), "metrics": ["mae"], "verify": "first"}
    return compile_model(strategy, module, **defaults | options)


CALLS = {
    "fit": lambda model: model.fit(X, Y, batch_size=8, verbose=0),
    "evaluate": lambda model: model.evaluate(X, Y, batch_size=8, verbose=0),
    "predict": lambda model: model.predict(X, batch_size=8, verbose=0),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("called", ["fit", "predict", "evaluate"])
def test_a_module_that_mixes_the_examples_of_a_batch_is_found(s4: dj.Strategy, called: str):
    model, unasked = make_model(s4, Mixed), make_model(s4, Mixed, verify=None)
    before = model.get_weights()
    with pytest.raises(dj.NotEqualError, match="is not the step on one device") as caught:
        CALLS[called](model)
    wanted = {
        "fit": "module.layer.kernel",
        "evaluate": "test_tracker",
        "predict": "its rows differ",
    }
    assert wanted[called] in str(caught.value)
    assert "no mean over dim 0" in caught.value.__notes__[-1]
    assert all(map(np.array_equal, before, model.get_weights()))
    CALLS[called](unasked)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options", [{}, {"steps_per_execution": 2, "gradient_accumulation_steps": 2}]
)
def test_a_module_that_treats_examples_separately_passes(
    strategy: dj.Strategy, options: dict[str, Any]
):
    model, unasked = (make_model(strategy, Rows, verify=v, **options) for v in ("first", None))
    for _ in range(2):
        found = [CALLS["fit"](m).history for m in (model, unasked)]
        assert found[0] == found[1]
    assert CALLS["evaluate"](model) == CALLS["evaluate"](unasked)
    np.testing.assert_array_equal(CALLS["predict"](model), CALLS["predict"](unasked))


class Normed(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nnx.BatchNorm(1, axis_name="data", rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> Any:
        return self.norm(self.layer(x))


@pytest.mark.exhaustive
def test_a_batch_norm_passes_on_shares_of_different_lengths(s4: dj.Strategy):
    """The first batch, of 7 for 4 replicas, is run as every later one, and equals one device."""
    losses = [
        make_model(strategy, Normed).fit(X[:14], Y[:14], batch_size=7, verbose=0).history["loss"]
        for strategy in (s4, dj.OneDeviceStrategy("cpu:0"))
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.exhaustive
def test_only_the_first_batch_is_compared(s4: dj.Strategy, monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []
    run = type(s4).run

    def noted(self: Any, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        seen.append((fn.__name__, options and options.verify))
        return run(self, fn, args, kwargs, options)

    monkeypatch.setattr(type(s4), "run", noted)
    model = make_model(s4, Rows)
    for call in (*CALLS.values(), *CALLS.values()):
        call(model)
    assert [name for name, verify in seen if verify == "first"] == [
        "train_step", "test_step", "predict_step",
    ]  # fmt: skip


def test_unknown_values_are_refused(s2: dj.Strategy):
    with pytest.raises(
        ValueError, match=r"verify\) must be one of None, 'first', 'off'; got 'always'"
    ):
        make_model(s2, Rows, verify="always")


class Table(Rows):
    """Rows, and a table that is as long as a replica's share."""

    def __call__(self, x: jax.Array) -> Any:
        return {"rows": self.layer(x), "table": x.T @ x}


@pytest.mark.exhaustive
def test_outputs_that_are_not_rows_are_refused(strategy: dj.Strategy):
    """Even if they are as long as the batch."""
    model = make_model(strategy, Table, loss={"rows": "mse"}, metrics=None, verify=None)
    size = 4 * strategy.num_replicas_in_sync
    x = np.resize(X, (size, 4))
    with pytest.raises(ValueError, match=r"one row for each example: .*table.* so they"):
        model.predict(x, batch_size=size, verbose=0)
    assert make_model(strategy, Rows).predict(x, batch_size=size, verbose=0).shape == (size, 1)
