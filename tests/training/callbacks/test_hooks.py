"""Which hooks are called, in which order, with what, and what happens to errors in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import distribute_jax as dj

HOOKS = [n for n in vars(dj.callbacks.Callback) if n.startswith("on_") and "on_batch" not in n]


class Recorder(dj.callbacks.Callback):
    """Records every call, with the names in its logs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []


def _recording(hook: str) -> Any:
    def call(self: Recorder, *args: Any) -> None:
        self.calls.append((hook, *(sorted(a) if isinstance(a, dict) else a for a in args)))

    return call


for name in HOOKS:
    setattr(Recorder, name, _recording(name))

TRAIN = [
    ("on_train_batch_begin", 0, []),
    ("on_train_batch_end", 2, ["loss"]),
    ("on_train_batch_begin", 3, []),
    ("on_train_batch_end", 3, ["loss"]),
]


def evaluation_calls(*last: int) -> list[tuple[Any, ...]]:
    """Returns the calls of an evaluation whose dispatches end with these batches."""
    batches = []
    first = 0
    for end in last:
        batches += [("on_test_batch_begin", first, []), ("on_test_batch_end", end, ["loss"])]
        first = end + 1
    return [("on_test_begin", []), *batches, ("on_test_end", ["loss"])]


@pytest.fixture(scope="module")
def by_three(_compiled: Any) -> Any:
    return type(_compiled)(steps_per_execution=3)


def test_fit_calls_keras_hooks_in_keras_order(by_three: Any):
    """Four batches, three in a dispatch; Keras numbers the last batch 5, not 3."""
    recorder = Recorder()
    by_three.fit(recorder, batch_size=2, validation_data=(by_three.x, by_three.y))
    assert recorder.calls == [
        ("on_train_begin", []),
        ("on_epoch_begin", 0, []),
        *TRAIN,
        *evaluation_calls(2, 3),
        ("on_epoch_end", 0, ["loss", "val_loss"]),
        ("on_train_end", ["loss", "val_loss"]),
    ]


@pytest.mark.exhaustive
def test_evaluate_and_predict_call_their_hooks(by_three: Any):
    recorder = Recorder()
    model = by_three.model
    model.evaluate(by_three.x, by_three.y, batch_size=4, callbacks=[recorder], verbose=0)
    calls = [(hook, *rest) for hook, *rest in recorder.calls]
    assert calls[0] == ("on_test_begin", [])
    assert calls[-1] == ("on_test_end", ["loss"])
    assert {hook for hook, *_ in calls} <= {hook for hook, *_ in evaluation_calls(0)}
    recorder.calls.clear()
    model.predict(by_three.x, batch_size=4, callbacks=[recorder], verbose=0)
    assert recorder.calls == [
        ("on_predict_begin", []),
        ("on_predict_batch_begin", 0, []),
        ("on_predict_batch_end", 0, ["outputs"]),
        ("on_predict_batch_begin", 1, []),
        ("on_predict_batch_end", 1, ["outputs"]),
        ("on_predict_end", []),
    ]


@pytest.mark.exhaustive
def test_callbacks_get_model_and_params(example: Any):
    """``examples`` counts the real ones, from 0 in each epoch."""
    seen = []
    callback = dj.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append((batch, callback.params["examples"])),
        on_test_batch_end=lambda batch, logs: seen.append(("test", callback.params["examples"])),
    )
    held_out = (example.x[:3], example.y[:3])
    example.fit(callback, x=example.x[:7], y=example.y[:7], batch_size=4, epochs=2,
                validation_data=held_out, validation_batch_size=4)  # fmt: skip
    assert seen == [(0, 4), (1, 7), ("test", 3)] * 2
    assert callback.model is example.model
    assert {k: callback.params[k] for k in ("epochs", "steps")} == {"epochs": 2, "steps": 2}


@pytest.mark.parametrize("hook", ["on_batch_end", "on_epoch_end"])
def test_stop_training_ends_the_training_after_the_step(example: Any, hook: str):
    """An epoch that a batch hook stops still counts as an epoch."""

    def stop(at: int, logs: Any) -> None:
        example.model.stop_training = at == 1

    history = example.fit(dj.callbacks.LambdaCallback(**{hook: stop}), batch_size=2, epochs=5)
    epochs, steps = (1, 2) if hook == "on_batch_end" else (2, 8)
    assert len(history.history["loss"]) == epochs
    assert int(example.model.optimizer.step[...]) == steps


def test_a_later_fit_trains_again_after_stop_training(example: Any):
    example.model.stop_training = True
    assert example.fit(epochs=2).epoch == [0, 1]


class FailedError(Exception):
    """Raised by a callback."""


@pytest.mark.parametrize(
    "hook", ["on_train_begin", "on_train_batch_end", "on_test_end", "on_epoch_end"]
)
def test_an_error_in_a_callback_propagates_and_the_model_stays_usable(example: Any, hook: str):
    error = FailedError("mine")

    def fail(*args: Any) -> None:
        raise error

    with pytest.raises(FailedError) as raised:
        example.fit(
            dj.callbacks.LambdaCallback(**{hook: fail}), class_weight={0: 3.0},
            validation_data=(example.x, example.y),
        )  # fmt: skip
    assert raised.value is error
    example.reset()
    assert example.fit().history["loss"] == pytest.approx([25.5])
    assert example.w == pytest.approx(0.49)


def test_a_failing_run_closes_the_files_of_other_callbacks(example: Any, tmp_path: Any):
    def fail(epoch: int, logs: Any) -> None:
        raise FailedError

    logger = dj.callbacks.CSVLogger(tmp_path / "log.csv")
    with pytest.raises(FailedError):
        example.fit(logger, dj.callbacks.LambdaCallback(on_epoch_end=fail))
    assert logger._file is None
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 2


def test_callbacks_may_be_single_or_nested(example: Any):
    ends = []
    one = dj.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ends.append(epoch))
    options = {"batch_size": 8, "verbose": 0}
    example.model.fit(example.x, example.y, callbacks=one, **options)
    example.model.fit(example.x, example.y, callbacks=[[one], [one]], **options)
    assert ends == [0, 0, 0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dj.callbacks.EarlyStopping, r"EarlyStopping\(\).*got <class.*EarlyStopping'>"),
        (print, r"LambdaCallback\(on_epoch_end=function\).*got <built-in function print>"),
        ("early", r"objects of dj\.callbacks\.Callback.*got 'early'"),
    ],
)
def test_other_objects_are_refused_before_anything_runs(example: Any, given: Any, words: str):
    for callbacks in (given, [given]):
        for call in (example.model.fit, example.model.evaluate):
            with pytest.raises(ValueError, match=words):
                call(example.x, example.y, callbacks=callbacks, verbose=0)
    assert example.w == 1.0


def test_logs_are_copied_from_the_devices_only_for_callbacks_that_read_them(
    example: Any, monkeypatch: pytest.MonkeyPatch
):
    trainer = example.model.trainer
    read, count = type(trainer).logs, []
    monkeypatch.setattr(type(trainer), "logs", lambda *args: count.append(1) or read(*args))
    example.fit(dj.callbacks.TerminateOnNaN(), batch_size=2)
    assert len(count) == 1
    example.fit(dj.callbacks.LambdaCallback(on_train_batch_end=print), batch_size=2)
    assert len(count) == 1 + 5


def test_unknown_hooks_of_lambda_callback_are_refused():
    with pytest.raises(ValueError, match=r"on_epoch_end.*got 'on_epoch_stop'"):
        dj.callbacks.LambdaCallback(on_epoch_stop=print)
    with pytest.raises(ValueError, match="must be None or a function; got 3"):
        dj.callbacks.LambdaCallback(on_epoch_end=3)


def test_compile_in_a_callback_is_refused_and_allowed_after_it(example: Any):
    """It would have no effect on the ``fit`` that runs."""
    example = type(example)()  # another model
    model = example.model

    def compile_again(*args: Any) -> None:
        model.compile("sgd", "mae")

    again = dj.callbacks.LambdaCallback(on_epoch_end=compile_again)
    with pytest.raises(dj.ContextError, match=r"compile was called while fit.*initial_epoch="):
        example.fit(again, epochs=2)
    compile_again()
    assert model.evaluate(example.x, example.y, verbose=0) == pytest.approx(4.5 * abs(example.w))


def test_predictions_of_a_hook_are_those_that_predict_returns(example: Any):
    found = []
    hook = dj.callbacks.LambdaCallback(
        on_predict_batch_end=lambda batch, logs: found.append(np.asarray(logs["outputs"]))
    )
    whole = example.model.predict(example.x[:7], batch_size=4, callbacks=[hook], verbose=0)
    np.testing.assert_array_equal(np.concatenate(found), whole)


def test_later_runs_reuse_the_compiled_programs(example: Any):
    options = {"validation_data": (example.x, example.y)}

    def fail(*args: Any) -> None:
        raise KeyError("mine")

    example.fit(**options)
    before = example.traces
    example.fit(dj.callbacks.TerminateOnNaN(), dj.callbacks.EarlyStopping(), epochs=2, **options)
    with pytest.raises(KeyError, match="mine"):
        example.fit(dj.callbacks.LambdaCallback(on_test_end=fail), **options)
    example.reset()
    example.fit(**options)
    example.model.evaluate(example.x, example.y, batch_size=8, verbose=0)
    assert example.traces == before
