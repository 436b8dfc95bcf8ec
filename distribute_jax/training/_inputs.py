"""Makes a distributed dataset of what ``fit``, ``evaluate`` and ``predict`` get; checks placement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from distribute_jax._errors import ArgumentError, DistributeError
from distribute_jax._messages import PyTree, error_text, leaf_text, listed
from distribute_jax.data import DistributedDataset, from_arrays
from distribute_jax.strategies import Strategy

DEFAULT_BATCH = 32
"""Keras's."""

_SEVERAL = (
    "{called} got {number} arrays of equal length in a {kind}, and gave them to the module as one tuple: "
    "the {number} inputs of each example, as in Keras. If they are batches, put each into a tuple: "
    "{called}([(batch,) for batch in x])."
)

_NUMBERS = (int, float, np.number)


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """Examples in memory."""

    x: PyTree
    y: PyTree = None
    weight: PyTree = None

    @property
    def tree(self) -> tuple[PyTree, ...]:
        """``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``."""
        if self.weight is not None:
            return (self.x, self.y, self.weight)
        return (self.x,) if self.y is None else (self.x, self.y)

    @property
    def length(self) -> int:
        """The number of examples."""
        return int(jax.tree.leaves(self.x)[0].shape[0])

    def split(self, fraction: float) -> tuple[Arrays, Arrays]:
        """Takes the last part off, before any shuffling, as Keras does."""
        if not 0 < fraction < 1:
            raise ArgumentError(
                f"fit(validation_split={fraction!r}): it is a fraction of the examples, above 0 and "
                "below 1."
            )
        at = int(self.length * (1 - fraction))
        if not 0 < at < self.length:
            raise ArgumentError(
                f"fit(validation_split={fraction}) of {self.length} examples leaves nothing to train "
                "on or nothing to validate on. Choose another fraction, or pass validation_data."
            )
        parts = [
            jax.tree.map(lambda leaf, rows=rows: leaf[rows], (self.x, self.y, self.weight))
            for rows in (slice(None, at), slice(at, None))
        ]
        first, last = (Arrays(x=x, y=y, weight=w) for x, y, w in parts)
        return first, last


def arrays_of(called: str, x: Any, y: Any, weight: Any) -> Arrays | None:
    """Gives the examples in memory that a method was given; None where ``x`` is a dataset.

    As in Keras, a list or tuple of equally long arrays is several inputs, and of one array that array.
    """
    if isinstance(x, (list, tuple)) and len(x) == 1 and _has_rows(x[0]):
        x = x[0]
    if y is None and weight is None and not _is_arrays(x):
        return None
    if isinstance(x, DistributedDataset):
        raise ArgumentError(
            f"{called} got a distributed dataset and y or sample_weight beside it. Its elements hold "
            "all: (x, y) or (x, y, sample_weight)."
        )
    x, y, weight = (
        _as_arrays(called, name, v) for name, v in (("x", x), ("y", y), ("sample_weight", weight))
    )
    _check_lengths(called, {"x": x, "y": y, "sample_weight": weight})
    return Arrays(x=x, y=y, weight=weight)


def dataset_of(
    strategy: Strategy,
    called: str,
    data: Any,
    batch_size: int | None,
    *,
    seed: int | None = None,
) -> DistributedDataset:
    """Distributes examples in memory, batched here, or a dataset of global batches.

    Args:
        strategy: the strategy of the model.
        called: the method, for messages.
        data: ``Arrays``, or any source of batches, or a distributed dataset.
        batch_size: examples in a global batch, for arrays.
        seed: shuffles arrays, anew in each epoch; None for their own order.
    """
    if isinstance(data, Arrays):
        rows = from_arrays(data.tree)
        shuffled = rows if seed is None else rows.shuffle(seed=seed)
        size = DEFAULT_BATCH if batch_size is None else batch_size
        return strategy.distribute_dataset(shuffled.batch(size))
    if batch_size is not None:
        raise ArgumentError(
            f"{called}(batch_size={batch_size}) got a dataset, whose batches have their size already. "
            "Leave batch_size out; a dataset's batches are global batches."
        )
    if isinstance(data, DistributedDataset):
        return data
    return strategy.distribute_dataset(data)


def _is_arrays(x: Any) -> bool:
    """Tells examples in memory from a dataset: arrays of different lengths in a list are batches."""
    if isinstance(x, (np.ndarray, jax.Array)) or _is_frame(x):
        return True
    if isinstance(x, dict):
        return all(_is_arrays(value) for value in x.values())
    return _is_numbers(x) or _is_several(x)


def _is_numbers(x: Any) -> bool:
    """Tells whether this is a list of numbers, or a nest of such lists; the first of each stands for all."""
    return isinstance(x, list) and bool(x) and (isinstance(x[0], _NUMBERS) or _is_numbers(x[0]))


def _is_several(x: Any) -> bool:
    """Tells whether this is a list or tuple of equally long arrays, which is several inputs."""
    return (
        isinstance(x, (list, tuple))
        and len(x) > 1
        and all(_has_rows(part) for part in x)
        and len({part.shape[0] for part in x}) == 1
    )


def _has_rows(x: Any) -> bool:
    return (isinstance(x, (np.ndarray, jax.Array)) or _is_frame(x)) and len(x.shape) > 0


@contextmanager
def inputs_explained(called: str, x: Any, y: Any) -> Iterator[None]:
    """Says where a step fails on a list of arrays that it may have been meant as batches.

    Raises:
        ArgumentError: in place of an error that is not one of ours, which gets a note.
    """
    try:
        yield
    except (TypeError, ValueError, AttributeError) as error:
        if y is not None or not _is_several(x):
            raise
        text = _SEVERAL.format(called=called, number=len(x), kind=type(x).__name__)
        if isinstance(error, DistributeError):
            error.add_note(text)
            raise
        raise ArgumentError(f"{text} The module failed on it: {error_text(error)}") from error


def _is_frame(x: Any) -> bool:
    """Tells whether this is a table or tensor that NumPy can read, such as pandas's."""
    return hasattr(x, "__array__") and hasattr(x, "shape")


def _as_arrays(called: str, name: str, tree: Any) -> Any:
    """Makes arrays of all leaves; a list of numbers is one array, a list of arrays several."""
    if isinstance(tree, (list, tuple)) and any(hasattr(part, "shape") for part in tree):
        return tuple(_as_arrays(called, name, part) for part in tree)
    if isinstance(tree, dict):
        return {key: _as_arrays(called, name, part) for key, part in tree.items()}
    return None if tree is None else _as_array(called, name, tree)


def _as_array(called: str, name: str, leaf: Any) -> Any:
    array = leaf if isinstance(leaf, (np.ndarray, jax.Array)) else np.asarray(leaf)
    if array.ndim == 0 or array.dtype == object:
        raise ArgumentError(
            f"{called} got {name}={leaf_text(leaf)}. Examples in memory are arrays whose dim 0 is the "
            "examples, or dicts of them."
        )
    return array


def _check_lengths(called: str, parts: dict[str, Any]) -> None:
    found = {
        f"{name}{jax.tree_util.keystr(path)}": leaf.shape[0]
        for name, tree in parts.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    if len(set(found.values())) > 1:
        lines = ", ".join(f"{name} has {n}" for name, n in found.items())
        raise ArgumentError(
            f"{called} got different numbers of examples: {lines}. All have the same, in dim 0."
        )


def check_placed(module: nnx.Module, strategy: Strategy) -> None:
    """Refuses a module whose arrays do not lie where the strategy keeps its state."""
    home = getattr(strategy, "parameter_device", None)
    wanted = set(strategy.mesh.devices.flat) if home is None else {home}
    wrong = [
        f"{'.'.join(map(str, path))}: on {_devices(value)}"
        for path, variable in nnx.iter_graph(module)
        if isinstance(variable, nnx.Variable)
        for value in jax.tree.leaves(variable.get_raw_value())
        if isinstance(value, jax.Array) and not _lies(value, wanted)
    ]
    if wrong:
        raise ArgumentError(
            f"The module given to dj.Model was not built for {strategy!r}: these arrays lie elsewhere.\n"
            f"{listed(wrong)}\nBuild it, and the Model, inside the scope: `with strategy.scope(): model "
            "= dj.Model(MyModule(rngs=nnx.Rngs(0)))`."
        )


def _lies(value: jax.Array, wanted: set[Any]) -> bool:
    return value.sharding.device_set == wanted


def _devices(value: jax.Array) -> str:
    return ", ".join(sorted(str(device) for device in value.sharding.device_set))
