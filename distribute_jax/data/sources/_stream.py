"""A source that cannot be started twice for the same batches."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import final

from distribute_jax._typing import PyTree
from distribute_jax.data.sources._base import Source


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
