"""Errors for names of TensorFlow, Keras and others that are absent here say what to type instead."""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distribute_jax as dj
from distribute_jax._absent import ABSENT, KEYWORDS

PAGE = Path(__file__).parents[2] / "docs" / "absent_names.md"


def thing(path: str) -> Any:
    package, *names = path.split(".")
    return functools.reduce(getattr, names, {"dj": dj, "jax": jax}[package])


@pytest.mark.parametrize("owner", ABSENT)
def test_names_in_the_table_are_absent(owner: str):
    for name in ABSENT[owner]:
        with pytest.raises(AttributeError):
            inspect.getattr_static(thing(owner), name)


@pytest.mark.parametrize("owner", KEYWORDS)
def test_keywords_in_the_table_are_absent_and_hinted_at(owner: str):
    function = thing(owner)
    assert not KEYWORDS[owner].keys() & inspect.signature(function).parameters.keys()
    for name, instead in KEYWORDS[owner].items():
        with pytest.raises(
            TypeError, match=rf"no argument '{name}'\. Instead: {re.escape(instead)}"
        ):
            function(**{name: 1})


def test_docs_absent_names_shows_the_table():
    lines = [f"| `{o}.{name}` | {text} |" for o in ABSENT for name, text in ABSENT[o].items()]
    lines += [
        f"| `{o}({name}=)` | {text} |" for o in KEYWORDS for name, text in KEYWORDS[o].items()
    ]
    shown = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    assert shown == lines, "\n".join(lines)


def test_modules_and_objects_say_what_to_type(s2: dj.MirroredStrategy):
    with s2.scope():
        model = dj.Model(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
        optimizer = dj.Optimizer(model.module, optax.sgd(0.1))
    x = np.ones((4, 3), np.float32)
    asked = {
        "keras": (dj, "dj.Model"),
        "Dataset": (dj.data, "from_arrays"),
        "reset_states": (dj.metrics.Average("loss"), r"reset_state\(\)"),
        "minimize": (optimizer, r"update\(model, grads\)"),
        "F1Score": (dj.metrics, "a function"),
        "rpc": (dj.experimental, r"dj\.coordinator"),
        "layers": (model, r"model\.module"),
        "map": (s2.distribute_dataset([x]), "on the dataset that strategy.distribute_dataset gets"),
        "prefetch": (dj.data.from_arrays(x), "InputOptions"),
        "experimental_run_v2": (s2, "run"),
    }
    for name, (owner, words) in asked.items():
        assert not hasattr(owner, name)
        with pytest.raises(AttributeError, match=rf"no attribute '{name}'\. Instead: .*{words}"):
            getattr(owner, name)
        with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
            owner.nothing  # noqa: B018
    with pytest.raises(TypeError, match=r"from_arrays\(\(x, y\)\)"):
        dj.data.from_arrays(x, x)


def test_a_model_is_called_as_its_module(s2: dj.MirroredStrategy):
    with s2.scope():
        model = dj.Model(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    x = jnp.ones((2, 3))
    expected = np.asarray(model.module(x))
    np.testing.assert_array_equal(model(x), expected)


def test_apply_gradients_of_keras(s2: dj.MirroredStrategy):
    with s2.scope():
        model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
        optimizer = dj.Optimizer(model, optax.sgd(0.5))

    def step(x: Any) -> None:
        grads = nnx.grad(lambda m: dj.compute_average_loss(m(x)[:, 0]))(model)
        optimizer.apply_gradients(grads, model)

    before = np.asarray(model.kernel[...])
    (batch,) = s2.distribute_dataset([np.ones((4, 2), np.float32)])
    s2.run(step, args=(batch,))
    np.testing.assert_allclose(before - np.asarray(model.kernel[...]), 0.5)
    with pytest.raises(TypeError, match=r"write apply_gradients\(grads, model\)"):
        optimizer.apply_gradients(zip([1], [2], strict=True))


def test_a_property_that_fails_keeps_its_error():
    """Python calls ``__getattr__`` after an AttributeError in a property."""

    class Mine(dj.metrics.Metric):
        @property
        def broken(self) -> Any:
            return np.nothing  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="'numpy' has no attribute 'nothing'"):
        _ = Mine().broken
