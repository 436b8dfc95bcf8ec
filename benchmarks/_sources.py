"""The same batches from every kind of source that a dataset can be made of."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import distribute_jax as dj

Array = np.ndarray[Any, Any]
Make = Callable[[Array, Array, int], tuple[Any, str | None]]
"""Returns a source over x and y with a global batch size, and what is missing where it cannot be made."""


def needing(package: str, make: Callable[[Array, Array, int], Any]) -> Make:
    """Makes a source that stands on a package which may be missing."""

    def made(x: Array, y: Array, size: int) -> tuple[Any, str | None]:
        if importlib.util.find_spec(package) is None:
            return None, f"{package} is not installed"
        return make(x, y, size), None

    return made


def _list(x: Array, y: Array, size: int) -> Any:
    return [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]


def _generator(x: Array, y: Array, size: int) -> Any:
    def batches() -> Iterator[tuple[Array, Array]]:
        yield from _list(x, y, size)

    return batches


def _arrays(x: Array, y: Array, size: int) -> Any:
    return dj.data.from_arrays((x, y)).batch(size)


def _shuffled(x: Array, y: Array, size: int) -> Any:
    return dj.data.from_arrays((x, y)).shuffle(seed=0).batch(size)


def _grain(x: Array, y: Array, size: int) -> Any:
    import grain

    return grain.MapDataset.source(list(zip(x, y, strict=True))).batch(size)


def _tf_data(x: Array, y: Array, size: int) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((x, y)).batch(size)


def _torch(x: Array, y: Array, size: int) -> Any:
    import torch

    data = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    return torch.utils.data.DataLoader(data, batch_size=size)


def _hugging_face(x: Array, y: Array, size: int) -> Any:
    import datasets  # type: ignore[import-not-found]

    table = datasets.Dataset.from_dict({"x": x, "y": y}).with_format("numpy")
    return table.batch(size)


SOURCES: dict[str, Make] = {
    "a list of batches": needing("numpy", _list),
    "a generator": needing("numpy", _generator),
    "dj.data.from_arrays": needing("numpy", _arrays),
    "dj.data.from_arrays, shuffled": needing("numpy", _shuffled),
    "Grain MapDataset": needing("grain", _grain),
    "tf.data.Dataset": needing("tensorflow", _tf_data),
    "PyTorch DataLoader": needing("torch", _torch),
    "Hugging Face Dataset": needing("datasets", _hugging_face),
}
