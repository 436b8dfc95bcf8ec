"""A source that starts at any batch of any epoch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import final

from distribute_jax._errors import ArgumentError
from distribute_jax._typing import PyTree
from distribute_jax.data.sources._base import Source


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
