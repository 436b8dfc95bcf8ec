"""Calls of a model inside its own callbacks, and from another thread."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import distribute_jax as dj
from tests.training.model_factory import Scale, compile_model


@pytest.fixture(scope="module")
def model() -> dj.Model:
    strategy = dj.MirroredStrategy([0, 1])
    return compile_model(strategy, Scale, metrics=["mae"], steps_per_execution=2)


X = np.arange(1.0, 13.0, dtype=np.float32).reshape(12, 1)
DATA: dict[str, Any] = {"x": X, "y": 0 * X, "batch_size": 2, "shuffle": False, "verbose": 0}


@pytest.mark.exhaustive
def test_nested_calls_do_not_change_the_numbers_of_fit(model: dj.Model):
    model.learning_rate = 0.0
    data = {**DATA, "epochs": 2, "validation_data": (X, X)}
    plain = model.fit(**data).history
    seen: list[Any] = []

    def between(*_: Any) -> None:
        seen.append(model.train_on_batch(X[:2], 9 + X[:2], class_weight={0: 2.0}))
        seen.append(model.evaluate(X[:4], X[:4], batch_size=2, verbose=0))
        seen.append(model.test_on_batch(X[:2], X[:2]))
        seen.append(float(model.predict(X[:2], verbose=0).sum()))

    hooks = ("on_epoch_begin", "on_train_batch_end", "on_test_batch_end", "on_epoch_end")
    for hook in hooks:
        callback = dj.callbacks.LambdaCallback(**{hook: between})
        assert model.fit(**data, callbacks=[callback]).history == plain, hook
    assert seen[:4] == seen[-4:]
    assert seen[0][0] == pytest.approx(81.0)
    evaluated = model.evaluate(X, X, batch_size=2, callbacks=[callback], verbose=0)
    assert evaluated == [plain["val_loss"][0], plain["val_mae"][0]]


@pytest.mark.exhaustive
def test_a_nested_fit_does_not_change_the_outer_one(model: dj.Model):
    model.learning_rate = 0.0
    data = {**DATA, "class_weight": {0: 3.0}}
    plain = model.fit(**data).history
    inner = dj.callbacks.LambdaCallback(on_train_batch_end=lambda *_: model.fit(**DATA))
    assert model.fit(**data, callbacks=[inner]).history == plain


def test_another_thread_is_refused_while_a_model_runs(model: dj.Model):
    errors: list[Exception] = []

    def call(method: Any, *args: Any) -> None:
        try:
            method(*args, verbose=0)
        except Exception as error:
            errors.append(error)

    def elsewhere(*_: Any) -> None:
        for method, args in ((model.fit, (X, X, 2)), (model.predict, (X, 2))):
            thread = threading.Thread(target=call, args=(method, *args))
            thread.start()
            thread.join()

    model.fit(**DATA, callbacks=[dj.callbacks.LambdaCallback(on_epoch_end=elsewhere)])
    assert [type(error) for error in errors] == [dj.ContextError] * 2
    assert "another thread" in str(errors[0])
    assert "dj.Model for each thread" in str(errors[0])
    elsewhere()
    assert len(errors) == 2
