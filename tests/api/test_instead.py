"""Names of TensorFlow and Keras that are not here are answered with what to type."""

from __future__ import annotations

import inspect
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distribute_jax as dj
from distribute_jax._lazy import INSTEAD

OWNERS: dict[str, Any] = {
    "distribute_jax": dj,
    "distribute_jax.data": dj.data,
    "distribute_jax.metrics": dj.metrics,
    "Metric": dj.metrics.Metric,
    "Optimizer": dj.Optimizer,
    "Model": dj.Model,
    "DistributedDataset": dj.DistributedDataset,
    "ArrayDataset": dj.data.ArrayDataset,
    "Strategy": dj.Strategy,
}


@pytest.mark.parametrize("owner", INSTEAD)
def test_a_name_that_is_answered_is_not_here(owner: str):
    """So that an entry goes when the name comes."""
    for name in INSTEAD[owner]:
        with pytest.raises(AttributeError):
            inspect.getattr_static(OWNERS[owner], name)


def test_modules_and_objects_answer(s2: dj.MirroredStrategy):
    """The answer stands in the AttributeError; ``hasattr`` is False, and other names get no answer."""
    with s2.scope():
        model = dj.Model(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
        optimizer = dj.Optimizer(model.module, optax.sgd(0.1))
    x = np.ones((4, 3), np.float32)
    asked = {
        "keras": (dj, "dj.Model"),
        "Dataset": (dj.data, "from_arrays"),
        "Mean": (dj.metrics, "Average"),
        "result": (dj.metrics.Average("loss"), r"compute\(\)"),
        "apply_gradients": (optimizer, r"update\(model, grads\)"),
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
    """As Keras's; the module keeps its own keywords."""
    with s2.scope():
        model = dj.Model(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    x = jnp.ones((2, 3))
    expected = np.asarray(model.module(x))
    np.testing.assert_array_equal(model(x), expected)


def test_a_property_that_fails_keeps_its_error():
    """Python asks ``__getattr__`` after an AttributeError in a property."""

    class Mine(dj.metrics.Metric):
        @property
        def broken(self) -> Any:
            return np.nothing  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="'numpy' has no attribute 'nothing'"):
        _ = Mine().broken
