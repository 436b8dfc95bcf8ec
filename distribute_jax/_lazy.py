"""Attributes of packages and classes on request: names that load late, and hints for missing ones."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def lazy_exports(
    namespace: dict[str, Any],
    parts: Mapping[str, Sequence[str]],
    public: str | None = None,
    core: Sequence[str] = (),
) -> Callable[[str], Any]:
    """Returns the ``__getattr__`` of a package that loads some of its modules when they are first read.

    Args:
        namespace: the globals of the package; a name that was read is kept there.
        parts: the modules directly below the package, with the names that it takes from each. The
            modules themselves can be read too.
        public: where users import the names from, if not from the package.
        core: modules below the package that hold all other names of its ``__all__``, and load together.
    """
    package: str = namespace["__name__"]
    home = {name: part for part, names in parts.items() for name in names}

    def load(name: str) -> Any:
        if name in parts:
            return importlib.import_module(f"{package}.{name}")
        if core and name in namespace["__all__"] and name not in home:
            for part in core:
                found = vars(importlib.import_module(f"{package}.{part}"))
                for each in namespace["__all__"]:
                    if each in found and each not in {*home, *parts}:
                        namespace.setdefault(each, found[each])
            publish(namespace, namespace["__all__"], public or package)
            return namespace[name]
        if name not in home:
            raise missing(package, f"module {package!r}", name)
        namespace[name] = getattr(load(home[name]), name)
        publish(namespace, [name], public or package)
        return namespace[name]

    return load


def publish(namespace: dict[str, Any], names: Iterable[str], module: str) -> None:
    """Sets ``__module__`` of functions and classes that are listed in a public package and loaded."""
    for name in names:
        value = namespace.get(name)
        package, *inner = str(getattr(value, "__module__", "")).split(".")
        if package == "distribute_jax" and any(part.startswith("_") for part in inner):
            value.__module__ = module


_FLAX = "layers and models are Flax's, flax.nnx or flax.linen"
_OPTIMIZERS = "optimizers are optax's, as optax.adam(1e-3), or Keras's names in Model.compile"
_MEAN = 'dj.metrics.Average("loss") is the mean of what update(loss=…) got'
_BY_NAME = "pass its name to Model.compile(metrics=[…]), or use dj.metrics.Accuracy"
_GRADIENTS = "nnx.value_and_grad(loss_fn)(model) computes gradients"
_READS_AHEAD = "strategy.distribute_dataset reads ahead by itself, see dj.InputOptions"
_BEFORE = "call it on the dataset that strategy.distribute_dataset gets"
_OF_DATA = ("batch", "filter", "map", "repeat", "shuffle", "skip", "take")
_WEIGHTS = "nnx.state(model.module, nnx.Param), or model.get_weights()"

INSTEAD: dict[str, dict[str, str]] = {
    "distribute_jax": {
        "GradientTape": _GRADIENTS,
        "Trainer": "dj.Model has fit, evaluate and predict",
        "distribute": "its names are here, as dj.MirroredStrategy",
        "function": "strategy.run compiles the step",
        "keras": "dj.Model, dj.losses, dj.metrics and dj.callbacks have its names; " + _FLAX,
        "layers": _FLAX,
        "load_model": "dj.Model(module).load(folder) reads what Model.save wrote",
        "nn": _FLAX,
        "optimizers": _OPTIMIZERS,
        "train": "dj.CheckpointManager saves and restores",
    },
    "distribute_jax.data": {
        "Dataset": "dj.data.from_arrays(…), as from_tensor_slices; a tf.data.Dataset is taken as it is",
    },
    "distribute_jax.metrics": {
        "BinaryAccuracy": _BY_NAME,
        "CategoricalAccuracy": _BY_NAME,
        "Mean": _MEAN,
        "SparseCategoricalAccuracy": "dj.metrics.Accuracy takes logits= and labels=",
        "Sum": _MEAN,
    },
    "Metric": {
        "reset_state": "reset()",
        "reset_states": "reset()",
        "result": "compute()",
        "update_state": "update(…), with the names that the metric takes",
    },
    "Optimizer": {
        "apply_gradients": "update(model, grads), which sums the gradients over the replicas",
        "iterations": "step",
        "lr": "learning_rate",
        "minimize": _GRADIENTS + "; then update(model, grads)",
        "variables": "nnx.state(optimizer)",
    },
    "Model": {
        "fit_generator": "fit takes generators",
        "layers": "the layers are attributes of model.module",
        "trainable_variables": _WEIGHTS,
        "trainable_weights": _WEIGHTS,
        "variables": "nnx.state(model.module)",
        "weights": _WEIGHTS,
    },
    "DistributedDataset": dict.fromkeys(_OF_DATA, _BEFORE) | {"prefetch": _READS_AHEAD},
    "ArrayDataset": {
        "cache": "the arrays are in memory",
        "prefetch": _READS_AHEAD,
        "take": "from_arrays(x[:n])",
    },
    "Strategy": {"experimental_run_v2": "run"},
}
"""By the class or module that is asked."""


def missing(owner: str, subject: str, name: str, obj: Any = None) -> AttributeError:
    """Returns the error for an attribute that is not there, with what to type where that is known."""
    instead = INSTEAD.get(owner, {}).get(name)
    text = f"{subject} has no attribute {name!r}" + (f". Instead: {instead}" if instead else "")
    return AttributeError(text, name=name, obj=obj)


def answering(owner: str) -> Callable[[Any, str], Any]:
    """Returns a ``__getattr__`` for a class."""

    def answer(self: Any, name: str) -> Any:
        # Python also comes here for the AttributeError of a property that failed.
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)
        raise missing(owner, f"{type(self).__name__!r} object", name, self)

    return answer
