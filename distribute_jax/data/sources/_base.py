"""Base classes of sources, and the conversion of tensors to NumPy arrays."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import tee
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._errors import ArgumentError
from distribute_jax._messages import KeyPath, PyTree, error_text, path_text


class Source(ABC):
    """Global batches on the host, epoch after epoch.

    A batch is a tree of NumPy or JAX arrays whose dim 0 counts the examples; it is not checked yet.
    """

    can_resume: bool = False
    """True if ``open`` can start at any batch of any epoch."""
    how_to_resume: str = ""
    """What ``can_resume`` requires: a sentence followed by a space."""
    is_infinite: bool = False
    """True if an epoch never ends."""
    runs_user_code: bool = True
    """True if reading may call functions of the user, which must then stay in one thread."""
    seed: int | None = None
    """The seed of its shuffling, if known."""
    examples: int | None = None
    batch_size: int | None = None
    """The numbers of examples in all, and in a full batch, where they are known without reading."""
    num_files: int | None = None
    """How many files it reads; None if it reads none, or their number is unknown."""
    auto_shard_policy: str | None = None
    """The name of the ``AutoShardPolicy`` that is set on the source itself."""

    def __init__(self, dataset: Any, method: str) -> None:
        self._dataset, self._method = dataset, method

    @property
    @abstractmethod
    def text(self) -> str:
        """What messages call it, for example ``a tf.data.Dataset``."""

    @property
    def batching(self) -> str:
        """How to batch it, for the error if it yields single examples."""
        return f"Call .batch(256) on this {self.text[2:]}, which yields single examples."

    @abstractmethod
    def open(self, epoch: int = 0, position: int = 0) -> Iterator[PyTree]:
        """Starts at a batch of an epoch; raises an ArgumentError if the source is exhausted.

        A source that cannot resume starts its next epoch, from its first batch.
        """

    def preview(self) -> Iterator[PyTree]:
        """Yields the batches of an epoch without consuming them."""
        return self.open()

    @property
    def length(self) -> int | None:
        """The number of batches of an epoch; None if unknown."""
        try:
            return len(self._dataset)
        except TypeError:
            return None

    def shard_files(self, count: int, index: int) -> Source:
        """Returns a source of the files index, index + count, …."""
        raise ArgumentError(f"{self.text} reads no files that are known.")


class Stream(Source):
    """A source of which each start has a side effect: it draws random numbers or consumes an iterator.

    A start for ``preview`` is therefore that of the next epoch, which yields the same batches again.
    """

    _previewed: Iterator[PyTree] | None = None
    """The epoch that was started for a preview, from its first batch."""

    @abstractmethod
    def start(self) -> Iterator[PyTree]:
        """Starts the next epoch."""

    def open(self, epoch: int = 0, position: int = 0) -> Iterator[PyTree]:
        batches, self._previewed = self._previewed, None
        return self.start() if batches is None else batches

    def preview(self) -> Iterator[PyTree]:
        batches, self._previewed = tee(self.open())
        try:
            yield from batches
        except (Exception, KeyboardInterrupt):
            self._previewed = None
            raise


def unbatched(text: str, method: str) -> ArgumentError:
    """Returns the error for one of the library's datasets that is not batched."""
    return ArgumentError(
        f"{method} got {text} without batches. It takes global batches: call .batch(256) on the dataset "
        "first, with the number of examples of all replicas together."
    )


def loaded_class(module: str, *names: str) -> Any:
    """Returns a class of a package that is already imported, else an empty tuple, for ``isinstance``.

    An instance of a class exists only if its package was imported, so nothing has to be imported here.
    """
    value: Any = sys.modules.get(module)
    for name in names:
        value = getattr(value, name, None)
    return () if value is None else value


def on_host(batch: PyTree, name: str = "batch") -> PyTree:
    """Converts PyTorch and TensorFlow tensors in a tree to NumPy arrays that share memory if possible."""
    torch_tensor = loaded_class("torch", "Tensor")
    tf_tensor = loaded_class("tensorflow", "Tensor")
    if torch_tensor == () and tf_tensor == ():
        return batch

    def convert(path: KeyPath, leaf: Any) -> Any:
        try:
            if isinstance(leaf, torch_tensor):
                return _from_torch(leaf)
            return leaf.numpy() if isinstance(leaf, tf_tensor) else leaf
        except Exception as error:
            raise ArgumentError(
                f"{path_text(path, name)} is a {type(leaf).__name__} that has no NumPy "
                f"counterpart: {error_text(error)} Pass dense tensors of numbers."
            ) from None

    return jax.tree.map_with_path(convert, batch)


def _from_torch(tensor: Any) -> np.ndarray[Any, Any]:
    dense = tensor.detach().cpu()
    name = str(dense.dtype).removeprefix("torch.")
    dtype: Any = None
    if name == "bfloat16" or name.startswith("float8"):
        # PyTorch cannot convert these to NumPy; the dtypes of ml_dtypes have the same bits.
        dtype = np.dtype(getattr(jnp, name))
        torch = sys.modules["torch"]
        dense = dense.view(torch.int16 if dtype.itemsize == 2 else torch.uint8)
    array: np.ndarray[Any, Any] = dense.numpy()
    return array if dtype is None else array.view(dtype)
