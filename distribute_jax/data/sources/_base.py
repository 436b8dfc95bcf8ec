"""Base classes of sources: all of them, those that seek to any batch, and streams; NumPy conversion."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._errors import ArgumentError
from distribute_jax._messages import KeyPath, PyTree, error_text, path_text


class Source(ABC):
    """Global batches on the host, epoch after epoch.

    One subclass for each kind of source. A batch is a tree of NumPy or JAX arrays whose dim 0 counts
    the examples; it is as the user's source gave it, unchecked.
    """

    can_seek: bool = False
    """Whether ``open_at`` can start anywhere."""

    @property
    @abstractmethod
    def text(self) -> str:
        """What messages call it, for example ``a tf.data.Dataset``."""

    @property
    def is_infinite(self) -> bool:
        """Whether an epoch never ends."""
        return False

    @property
    def seed(self) -> int | None:
        """The seed of its shuffling, where the source tells it."""
        return None

    @property
    def num_files(self) -> int | None:
        """How many files it reads; None where it reads none, or it cannot be known."""
        return None

    @property
    def own_policy(self) -> str | None:
        """The name of the ``AutoShardPolicy`` that the source itself asks for."""
        return None

    @property
    def batching(self) -> str:
        """How to make it give batches, for an error about one of single examples."""
        return (
            "Batch the source first, for example [(x[i:i + 256], y[i:i + 256]) for i in "
            "range(0, len(x), 256)]."
        )

    @abstractmethod
    def open(self) -> Iterator[PyTree]:
        """Starts the next epoch and gives its batches from the first one.

        Raises:
            ArgumentError: the source was used up by an earlier epoch.
        """

    @abstractmethod
    def preview(self) -> Iterator[PyTree]:
        """Gives the batches that the next ``open`` will give, and uses nothing up."""

    def __len__(self) -> int:
        """The number of batches of an epoch; a TypeError where the source does not know it."""
        raise TypeError(f"{self.text} has no length")

    def open_at(self, epoch: int, position: int) -> Iterator[PyTree]:
        """Starts at batch ``position`` of epoch ``epoch``, both from 0.

        The next ``open`` gives epoch ``epoch + 1``.

        Raises:
            ArgumentError: the source cannot seek.
        """
        raise ArgumentError(
            f"{self.text[:1].upper()}{self.text[1:]} cannot be started at batch {position} of epoch "
            f"{epoch}: it only runs from its first batch. Arrays (dj.data.from_arrays), files "
            "(dj.data.from_files) and Grain datasets can resume in the middle of an epoch."
        )

    def shard_files(self, count: int, index: int) -> Source | None:
        """Gives a source of the files index, index + count, …; None where it reads no files."""
        return None


class Seekable(Source):
    """A source whose batches follow from the epoch and the position alone."""

    can_seek = True
    _next_epoch = 0

    @abstractmethod
    def read(self, epoch: int, position: int) -> Iterator[PyTree]:
        """Gives the batches of an epoch, from the one at ``position``."""

    @final
    def open(self) -> Iterator[PyTree]:
        """See ``Source.open``."""
        return self.open_at(self._next_epoch, 0)

    @final
    def preview(self) -> Iterator[PyTree]:
        """See ``Source.preview``."""
        return self.read(self._next_epoch, 0)

    @final
    def open_at(self, epoch: int, position: int) -> Iterator[PyTree]:
        """See ``Source.open_at``."""
        self._next_epoch = epoch + 1
        return self.read(epoch, position)


def unbatched(text: str, called: str) -> ArgumentError:
    """Says that one of the library's own datasets has no batches yet."""
    return ArgumentError(
        f"{called} got {text} without batches. It takes global batches: call .batch(256) on the dataset "
        "first, with the number of examples of all replicas together."
    )


class Stream(Source):
    """A source whose every start counts: it draws random numbers, starts workers, or is the only one.

    So what a preview reads is kept, and becomes the beginning of the next epoch.
    """

    _begun: _Begun | None = None

    @abstractmethod
    def start(self) -> Iterator[PyTree]:
        """Starts the next epoch."""

    @final
    def open(self) -> Iterator[PyTree]:
        """See ``Source.open``."""
        begun, self._begun = self._begun or _Begun(self.start()), None
        return begun.taken()

    @final
    def preview(self) -> Iterator[PyTree]:
        """See ``Source.preview``."""
        self._begun = self._begun or _Begun(self.start())
        try:
            yield from self._begun.looked_at()
        except Exception:
            self._begun = None
            raise


class _Begun:
    """An epoch that was started, with the batches that were only looked at so far."""

    def __init__(self, batches: Iterator[PyTree]) -> None:
        self._seen: deque[PyTree] = deque()
        self._rest = batches

    def looked_at(self) -> Iterator[PyTree]:
        yield from tuple(self._seen)
        for batch in self._rest:
            self._seen.append(batch)
            yield batch

    def taken(self) -> Iterator[PyTree]:
        # Let go one by one, so that no batch lives longer than its step.
        while self._seen:
            yield self._seen.popleft()
        yield from self._rest


def loaded_class(module: str, *names: str) -> Any:
    """Gives a class of a package that is imported already, else an empty tuple, for isinstance.

    Nothing is an instance of a class that was never loaded, so no package needs to be imported here.
    """
    found: Any = sys.modules.get(module)
    for name in names:
        found = getattr(found, name, None)
    return () if found is None else found


def on_host(batch: PyTree) -> PyTree:
    """Turns PyTorch's and TensorFlow's tensors in a batch into NumPy arrays.

    They share their memory with the tensor where the library allows it. Other leaves stay as they are.

    Raises:
        ArgumentError: a tensor is none that NumPy can hold; names the leaf.
    """
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
                f"{path_text(path, 'batch')} is a {type(leaf).__name__} that has no NumPy "
                f"counterpart: {error_text(error)} Give the batch dense tensors of numbers."
            ) from None

    return jax.tree.map_with_path(convert, batch)


def _from_torch(tensor: Any) -> np.ndarray[Any, Any]:
    dense = tensor.detach().cpu().resolve_conj().resolve_neg()
    name = str(dense.dtype).removeprefix("torch.")
    # NumPy has no such dtypes of its own, so PyTorch refuses to convert them; JAX's have the same bits.
    extended = name == "bfloat16" or name.startswith("float8")
    if not extended:
        array: np.ndarray[Any, Any] = dense.numpy()
        return array
    dtype = np.dtype(getattr(jnp, name))
    bits = sys.modules["torch"].int16 if dtype.itemsize == 2 else sys.modules["torch"].uint8
    same_bits: np.ndarray[Any, Any] = dense.view(bits).numpy().view(dtype)
    return same_bits
