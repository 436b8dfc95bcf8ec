"""Tracebacks hide the library's frames, unless an environment variable is set."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import distribute_jax as dj

ANY: Any = dj
HIDDEN = tuple(package.__path__[0] for package in (dj, jax, nnx))


def frames(error: BaseException | None, *, hidden: bool) -> list[str]:
    """Returns the names of functions in the tracebacks of an error and its causes."""
    found: list[str] = []
    while error is not None:
        every = traceback.extract_tb(error.__traceback__)
        found += [one.name for one in every if one.filename.startswith(HIDDEN) == hidden]
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return found


class Linear(nnx.Linear):
    def __call__(self, x: Any) -> Any:
        raise ZeroDivisionError("in the layer")


def failing(strategy: dj.Strategy) -> dict[str, Callable[[], Any]]:
    """Returns calls that fail in various ways."""
    with strategy.scope():
        count = nnx.Variable(jnp.zeros(()))
        model = dj.Model(Linear(2, 1, rngs=nnx.Rngs(0)))
        layer = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    model.compile(optimizer="sgd", loss="mse")
    x = np.ones((8, 2), np.float32)

    def users_step(x: jax.Array) -> jax.Array:
        return jnp.dot(x, jnp.ones((7, 7)))

    def drifts(x: jax.Array) -> None:
        count[...] += x.sum()

    def batches() -> Any:
        yield x
        raise OSError("a file is missing")

    def loop() -> None:
        for _ in strategy.distribute_dataset(batches()):
            pass

    def steps() -> None:
        strategy.run_steps(users_step, iter(strategy.distribute_dataset([x, x])), 2)

    (batch,) = strategy.distribute_dataset([x])
    return {
        "run": lambda: strategy.run(users_step, args=(batch,)),
        "a layer": lambda: strategy.run(lambda: nnx.grad(lambda m: m(x[:, :1]).sum())(layer)),
        "run, refused": lambda: strategy.run(drifts, args=(batch,)),
        "run_steps": steps,
        "reduce": lambda: strategy.reduce("product", batch),
        "gather": lambda: strategy.gather(batch, axis="rows"),
        "distribute_dataset": lambda: strategy.distribute_dataset(3),
        "iteration": loop,
        "fit": lambda: model.fit(x, x[:, :1], batch_size=4, verbose=0),
        "evaluate": lambda: model.evaluate(x, x[:, :1], batch_size=4, verbose=0),
        "compile": lambda: model.compile(optimizer="no such optimizer"),
        "metric": lambda: model.compile("sgd", "mse", metrics=["no such metric"]),
        "not compiled": lambda: dj.Model(nnx.Linear(2, 1, rngs=nnx.Rngs(0))).fit(x, x),
        "keyword": lambda: ANY.MirroredStrategy(device=[]),
        "a name": lambda: ANY.keras,
        "a number": lambda: float(batch),
        "arithmetic": lambda: batch + 1,
    }


CALLS = (
    *("run", "run, refused", "run_steps", "reduce", "gather", "distribute_dataset", "iteration"),
    *("fit", "evaluate", "compile", "metric", "not compiled", "keyword", "a name", "a number"),
    *("arithmetic", "a layer"),
)


@pytest.mark.parametrize("call", CALLS)
def test_a_traceback_has_no_frame_of_a_library(
    s2: dj.Strategy, call: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("DISTRIBUTE_JAX_FULL_TRACEBACK", raising=False)
    with pytest.raises(Exception) as raised:  # noqa: PT011
        failing(s2)[call]()
    assert frames(raised.value, hidden=True) == []
    shown = frames(raised.value, hidden=False)
    assert shown[0] == raised.traceback[0].name
    assert "__init__" not in shown  # of a dataclass


def test_a_step_without_run_prints_the_users_lines_only(
    s2: dj.Strategy, capsys: pytest.CaptureFixture[str]
):
    """Python prints the error, which the library raised below Flax and JAX."""
    module = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    (batch,) = s2.distribute_dataset([np.ones((8, 2), np.float32)])
    with pytest.raises(dj.PerReplicaError) as raised:
        nnx.grad(lambda module: module(batch).mean())(module)
    sys.excepthook(raised.type, raised.value, raised.value.__traceback__)
    assert frames(raised.value, hidden=False) == [raised.traceback[0].name, "<lambda>"]
    assert len(capsys.readouterr().err.splitlines()) < 15


@pytest.mark.parametrize("call", ["run", "fit"])
def test_the_frames_of_the_users_step_stay(s2: dj.Strategy, call: str):
    with pytest.raises((TypeError, ZeroDivisionError)) as raised:
        failing(s2)[call]()
    assert {"users_step", "__call__"} & set(frames(raised.value, hidden=False))


@pytest.mark.parametrize("call", ["run", "run, refused", "fit"])
def test_an_environment_variable_shows_all_frames(
    s2: dj.Strategy, call: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DISTRIBUTE_JAX_FULL_TRACEBACK", "1")
    with pytest.raises(Exception) as raised:  # noqa: PT011
        failing(s2)[call]()
    assert len(frames(raised.value, hidden=True)) > 3


def test_the_message_of_the_library_is_the_last_line(s2: dj.Strategy):
    model = {"kept": jnp.zeros(2)}

    def step(x: jax.Array) -> None:
        model["kept"] = x.sum()

    with pytest.raises(dj.StaleCaptureError) as raised:
        s2.run(step, args=(jnp.ones(3),))
    lines = "".join(traceback.format_exception(raised.value)).splitlines()
    assert lines[-1].endswith(str(raised.value).splitlines()[-1])


def test_a_note_says_how_to_see_all_frames_of_an_error_in_a_layer(s2: dj.Strategy):
    with pytest.raises(TypeError, match=r"dot_general .*\n.*FULL_TRACEBACK=1 .*\n.*Linear"):
        failing(s2)["a layer"]()
