"""Converts and distributes the data passed to ``fit``, ``evaluate`` and ``predict``; checks placement."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from distribute_jax._checks import brief, check_int, converting
from distribute_jax._errors import ArgumentError
from distribute_jax._messages import PyTree, leaf_text, listed
from distribute_jax.data import DatasetCreator, DistributedDataset, from_arrays
from distribute_jax.data.sources._base import on_host
from distribute_jax.strategies import Strategy
from distribute_jax.training._batches import INPUT_ERRORS
from distribute_jax.training._objective import variables

_NUMBERS = (int, float, np.number)


class Arrays(NamedTuple):
    x: PyTree
    y: PyTree = None
    weight: PyTree = None

    @property
    def parts(self) -> tuple[PyTree, ...]:
        """``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``."""
        if self.weight is not None:
            return tuple(self)
        return (self.x,) if self.y is None else (self.x, self.y)

    @property
    def length(self) -> int:
        with converting("x", self.x, "arrays whose dim 0 is the examples"):
            return int(jax.tree.leaves(self.x)[0].shape[0])

    def split(self, fraction: float) -> tuple[Arrays, Arrays]:
        """Splits off the last ``fraction``, before any shuffling, as Keras does."""
        end = int(self.length * (1 - fraction))
        if not 0 < end < self.length:
            raise ArgumentError(
                f"validation_split must leave examples to train and to validate on; got {fraction!r} of "
                f"{self.length} examples."
            )
        first: Arrays = jax.tree.map(lambda leaf: leaf[:end], self)
        return first, jax.tree.map(lambda leaf: leaf[end:], self)


def arrays_of(method: str, x: Any, y: Any, weight: Any) -> Arrays | None:
    """Returns the arrays that a method got; None if ``x`` is a dataset.

    As in Keras, a list or tuple of equally long arrays is several inputs; one of a single array is that
    array.
    """
    if isinstance(x, (list, tuple)) and len(x) == 1 and _has_rows(x[0]):
        x = x[0]
    if y is None and weight is None and not _is_arrays(x):
        return None
    if isinstance(x, DistributedDataset):
        raise ArgumentError(
            f"{method} got a distributed dataset and y or sample_weight. Its batches hold all: (x, y) or "
            "(x, y, sample_weight)."
        )
    parts = {"x": x, "y": y, "sample_weight": weight}
    parts = {name: _as_arrays(method, name, part) for name, part in parts.items()}
    _check_lengths(method, parts)
    return Arrays(*parts.values())


def dataset_of(
    strategy: Strategy, method: str, data: Any, batch_size: int | None, *, seed: int | None = None
) -> DistributedDataset:
    """Distributes a source of global batches, or ``Arrays``, which are batched and with a seed shuffled."""
    if isinstance(data, Arrays):
        rows = from_arrays(data.parts)
        shuffled = rows if seed is None else rows.shuffle(seed=seed)
        # The default is Keras's.
        size = 32 if batch_size is None else check_int(f"{method}(batch_size)", batch_size)
        return strategy.distribute_dataset(shuffled.batch(size))
    if batch_size is not None:
        raise ArgumentError(
            f"{method}(batch_size={batch_size}) got a dataset, whose batches are the global batches. Leave "
            "batch_size out."
        )
    if data is None:
        raise ArgumentError(
            f"{method} got no data. Pass arrays, {method}(x, y), or a dataset of batches (x, y)."
        )
    if isinstance(data, DistributedDataset):
        return data
    if isinstance(data, DatasetCreator):
        return strategy.distribute_datasets_from_function(data.dataset_fn, data.input_options)
    return strategy.distribute_dataset(data)


def _is_arrays(x: Any) -> bool:
    """True for arrays of examples; False for datasets, such as a list of arrays of different lengths."""
    if isinstance(x, dict):
        return all(_is_arrays(value) for value in x.values())
    return _is_array(x) or _is_numbers(x) or _is_several(x)


def _is_array(x: Any) -> bool:
    """True for an array, or a table or tensor that NumPy can read, such as pandas's."""
    return isinstance(x, jax.Array) or (hasattr(x, "__array__") and hasattr(x, "shape"))


def _is_numbers(x: Any) -> bool:
    """True for a possibly nested list of numbers; only the first element of each is checked."""
    return isinstance(x, list) and bool(x) and (isinstance(x[0], _NUMBERS) or _is_numbers(x[0]))


def _is_several(x: Any) -> bool:
    """True for a list or tuple of equally long arrays, that is, several inputs."""
    return (
        isinstance(x, (list, tuple))
        and len(x) > 1
        and all(_has_rows(part) for part in x)
        and len({part.shape[0] for part in x}) == 1
    )


def _has_rows(x: Any) -> bool:
    return _is_array(x) and len(x.shape) > 0


def several_inputs_hint(method: str, x: Any, y: Any, error: Exception) -> str:
    """Returns what to write if a list of equally long arrays was meant as ``[x, y]`` or as batches."""
    if y is not None or not _is_several(x) or not isinstance(error, INPUT_ERRORS):
        return ""
    with_targets = "" if method == "predict" else f"For inputs and targets call {method}(x, y). "
    return (
        f"{method} got {len(x)} arrays of equal length in a {type(x).__name__}, and passed them to the "
        f"module as one tuple: the {len(x)} inputs of each example, as in Keras. {with_targets}If they are "
        f"batches, put each into a tuple: {method}([(batch,) for batch in x])."
    )


def check_batch_size(method: str, batch_size: Any) -> None:
    """Raises if targets were passed in the position of the batch size."""
    if hasattr(batch_size, "shape") or isinstance(batch_size, (list, tuple)):
        raise ArgumentError(
            f"The second argument of {method} is batch_size, an int; got {brief(batch_size)}. It takes no "
            "targets: evaluate(x, y) compares with them."
        )


def _as_arrays(method: str, name: str, tree: Any) -> Any:
    """Converts the leaves to arrays; a list of numbers is one array, a list of arrays is several."""
    if tree is None:
        return None
    if isinstance(tree, (list, tuple)) and any(map(_has_rows, tree)):
        return tuple(_as_arrays(method, name, part) for part in tree)
    if isinstance(tree, dict):
        return {key: _as_arrays(method, name, part) for key, part in tree.items()}
    tree = on_host(tree, f"{method}: {name}")
    with converting(f"{method}: {name}", tree, "an array whose dim 0 is the examples"):
        array = tree if isinstance(tree, (np.ndarray, jax.Array)) else np.asarray(tree)
    if array.ndim and array.dtype == object and hasattr(tree, "shape"):
        raise ArgumentError(
            f"{method} got {name}={leaf_text(tree)}, an array of dtype object. Encode texts and "
            "dates as numbers, such as series.cat.codes for categories, fill missing values, and pass "
            'table.to_numpy("float32").'
        )
    if array.ndim == 0 or array.dtype == object:
        raise ArgumentError(
            f"{method} got {name}={leaf_text(tree)}. Examples in memory are arrays whose dim 0 is the "
            "examples, or dicts of them. A dataset contains its targets, and is passed alone."
        )
    return array


def _check_lengths(method: str, parts: dict[str, Any]) -> None:
    lengths = {
        f"{name}{jax.tree_util.keystr(path)}": leaf.shape[0]
        for name, tree in parts.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    if len(set(lengths.values())) > 1:
        lines = ", ".join(f"{name} has {n}" for name, n in lengths.items())
        raise ArgumentError(f"{method} got different numbers of examples in dim 0: {lines}.")


def check_placed(module: nnx.Module, strategy: Strategy) -> None:
    """Raises if arrays of a module are not on the devices where the strategy stores parameters."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(nnx.state(module))):
        raise ArgumentError(
            "A dj.Model cannot be made inside strategy.create, or a function that JAX traces. Make "
            "its module there: `with strategy.scope(): model = dj.Model(strategy.create(make_module))`."
        )
    device = getattr(strategy, "parameter_device", None)
    devices = set(strategy.mesh.devices.flat) if device is None else {device}
    misplaced = [
        f"{'.'.join(map(str, path))}: on {', '.join(sorted(map(str, value.sharding.device_set)))}"
        for path, variable in variables(module).items()
        for value in jax.tree.leaves(variable.get_raw_value())
        if isinstance(value, jax.Array) and value.sharding.device_set != devices
    ]
    if misplaced:
        raise ArgumentError(
            f"The module passed to dj.Model was not built for {strategy!r}; these arrays are on other "
            f"devices:\n{listed(misplaced)}\nBuild it, and the Model, inside the scope: `with "
            "strategy.scope(): model = dj.Model(MyModule(rngs=nnx.Rngs(0)))`."
        )
