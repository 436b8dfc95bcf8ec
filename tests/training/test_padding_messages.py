"""Metrics that would count the padding of a partial batch are named, with a remedy."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import long
from flax import nnx
from model_factory import compile_model, linear

import distribute_jax as dj

X = np.arange(1.0, 15.0, dtype=np.float32).reshape(14, 1)


class Sum(nnx.Metric):
    def __init__(self) -> None:
        self.total = nnx.metrics.MetricState(jnp.zeros(()))

    def reset(self) -> None:
        self.total[...] = jnp.zeros(())

    def update(self, *, y_pred: Any, **_: Any) -> None:
        self.total[...] += y_pred.sum()

    def compute(self) -> Any:
        return self.total[...]


class MaskedSum(Sum):
    def update(self, *, y_pred: Any, mask: Any = None, **_: Any) -> None:
        self.total[...] += (y_pred if mask is None else jnp.where(mask, y_pred, 0)).sum()


def make_model(strategy: dj.Strategy, *metrics: Any) -> dj.Model:
    return compile_model(strategy, linear(1), optimizer=optax.sgd(0.0), metrics=list(metrics))


@pytest.mark.parametrize("called", ["fit", long("evaluate")])
def test_a_metric_without_a_mask_is_named_with_its_remedy(s4: dj.Strategy, called: str):
    metrics = [nnx.metrics.Welford("y_pred"), Sum(), dj.metrics.Average("y_pred"), MaskedSum()]
    model = make_model(s4, *metrics)
    with pytest.raises(dj.PaddingLeakError) as caught:
        getattr(model, called)(X, X, batch_size=8, verbose=0)
    text = caught.value.__notes__[-1]
    _, *names, cure, _ = text.splitlines()
    assert sorted(names) == ["  sum", "  welford"]
    assert cure.startswith("Use that of dj.metrics if there is one, or let its update leave")
    assert "drop_remainder=True" in text
    assert 'partial="drop"' in text


@pytest.mark.exhaustive
def test_a_metric_that_counts_padding_is_refused_after_a_batch_that_needed_none(s4: dj.Strategy):
    """12 rows divide over four replicas, without padding; 14 do not, and the proof is kept."""
    model = make_model(s4, Sum())
    logs = model.evaluate(X[:12], X[:12], batch_size=8, return_dict=True, verbose=0)
    assert logs["sum"] == pytest.approx(model.predict(X[:12], verbose=0).sum(), rel=1e-5)
    with pytest.raises(dj.PaddingLeakError, match="reaches what the step computes"):
        model.evaluate(X, X, batch_size=8, verbose=0)


class OfShares(dj.Model):
    def train_step(self, batch: Any) -> Any:
        return {"mean": dj.get_replica_context().all_reduce("mean", batch[0].mean())}


@pytest.mark.parametrize("verify", ["off", None])
def test_a_step_of_the_user_must_exclude_the_padding_itself(s4: dj.Strategy, verify: str | None):
    """It would be refused for other numbers of rows, so it is for those that divide too."""
    with s4.scope():
        model = OfShares(linear(1)())
    model.compile("sgd", "mse", verify=verify)
    with pytest.raises(dj.PaddingLeakError, match="reaches what the step computes"):
        model.fit(X[:12], X[:12], batch_size=8, verbose=0)


@pytest.mark.exhaustive
def test_the_remedies_give_the_numbers_of_the_real_examples(strategy: dj.Strategy):
    model = make_model(strategy, dj.metrics.Welford("y_pred"), MaskedSum())
    logs = model.evaluate(X, X, batch_size=8, return_dict=True, verbose=0)
    rows = model.predict(X, verbose=0)
    assert logs["welford_mean"] == pytest.approx(rows.mean(), rel=1e-5)
    assert logs["masked_sum"] == pytest.approx(rows.sum(), rel=1e-5)


@pytest.mark.exhaustive
def test_fewer_rows_than_replicas_are_trained_without_a_notice(
    s4: dj.Strategy, caplog: pytest.LogCaptureFixture
):
    """A share of one row is compared with other padding; there is nothing that the user could do about it."""
    model = make_model(s4)
    loss = np.mean((np.asarray(model.module(X[:3])) - X[:3]) ** 2)
    assert model.fit(X[:3], X[:3], verbose=0).history["loss"] == [pytest.approx(loss)]
    assert "partial batch" not in caplog.text
