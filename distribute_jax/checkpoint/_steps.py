"""The steps that a manager keeps: their folders, when the next one is saved, and preemption."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self, SupportsIndex

from distribute_jax._errors import ArgumentError, CheckpointDamagedError, CheckpointFileError
from distribute_jax.checkpoint._manifest import Manifest, is_step
from distribute_jax.checkpoint._read import manifest_of
from distribute_jax.checkpoint._storage import Directory
from distribute_jax.data import DistributedIterator
from distribute_jax.data._dataset import watch
from distribute_jax.processes import Preemption
from distribute_jax.processes._status import SAVED, report_step


def checked_step(step: SupportsIndex) -> int:
    """Gives the number of a step that a user passed."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise ArgumentError(f"A step is an int of at least 0; got {step!r}.")
    return number


def folders(directory: Directory) -> list[int]:
    """Gives the steps that are there, complete or not, in ascending order."""
    try:
        names = directory.names()
    except OSError as error:
        raise CheckpointFileError(f"{directory} cannot be read: {error}") from error
    return sorted(int(name) for name in names if is_step(name))


def read_step(directory: Directory, step: int) -> Manifest:
    """Reads the manifest of a step.

    Raises:
        CheckpointDamagedError: it is missing, or of another step.
    """
    manifest = manifest_of(directory, str(step))
    if manifest.step != step:
        raise CheckpointDamagedError(
            f"{directory.path_of(str(step))} holds step {manifest.step}: it was renamed"
        )
    return manifest


def is_complete(directory: Directory, step: int) -> bool:
    """Tells whether a step was written to its end."""
    try:
        read_step(directory, step)
    except CheckpointDamagedError:
        return False
    return True


def prune(directory: Directory, keep: int | None, newest: int) -> None:
    """Removes the oldest steps, so that ``keep`` remain, ``newest`` among them."""
    if keep is None:
        return
    older = [step for step in folders(directory) if step != newest]
    for step in older[: max(0, len(older) - (keep - 1))]:
        directory.remove(str(step))


@dataclass
class Schedule:
    """Says of a step whether it should be saved; without intervals every step should."""

    every_steps: int | None = None
    """Save when a multiple of this was reached or passed since the last save."""
    every_minutes: float | None = None
    """Save when this much time has passed since the last save, or since this was made."""
    _step: int = 0
    _time: float = field(default_factory=lambda: time.monotonic())

    def __post_init__(self) -> None:
        """Refuses intervals that never come."""
        for name in ("every_steps", "every_minutes"):
            every = getattr(self, name)
            if every is not None and not every > 0:
                raise ArgumentError(f"CheckpointManager got {name}={every!r}; it must be above 0.")

    @property
    def has_intervals(self) -> bool:
        """Whether not every step is due."""
        return self.every_steps is not None or self.every_minutes is not None

    @property
    def reads_clock(self) -> bool:
        """Whether the time counts, so that processes may see it differently."""
        return self.every_minutes is not None

    def is_due(self, step: int) -> bool:
        """Tells whether to save now; loops that take several steps at once may pass a multiple."""
        if self.every_steps is None and self.every_minutes is None:
            return True
        steps, minutes = self.every_steps, self.every_minutes
        passed = steps is not None and step // steps > self._step // steps
        return passed or (minutes is not None and time.monotonic() - self._time >= 60 * minutes)

    def note(self, step: int) -> None:
        """Counts from this step and from now on."""
        self._step, self._time = step, time.monotonic()


class Saver(Protocol):
    """What the loop needs of a ``CheckpointManager``."""

    @property
    def saves_at_intervals(self) -> bool:
        """Whether it saves by itself now and then."""

    def save(self, step: int, tree: Any, *, force: bool = False) -> bool: ...

    def restore_latest(self, tree: Any) -> int | None: ...

    def wait(self) -> None: ...


class Preemptible:
    """The ``with`` block of ``CheckpointManager.preemptible``, around a loop.

    Attributes:
        step: the steps that are done, over all starts of the program.
    """

    def __init__(
        self,
        manager: Saver,
        tree: dict[str, Any],
        iterator: DistributedIterator,
        preemption: Preemption,
    ) -> None:
        """Prepares the block; nothing is read yet."""
        self._manager, self._iterator, self._preemption = manager, iterator, preemption
        self._tree = tree
        self._exits = ExitStack()
        self._saved = -1
        self.step = 0

    def __enter__(self) -> Self:
        """Restores the newest step, if there is one, and begins to watch."""
        self._saved = self.step = self._manager.restore_latest(self._tree) or 0
        report_step(self.step)
        self._exits.enter_context(self._preemption)
        watch(self._iterator, self)
        self._exits.callback(watch, self._iterator, None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Saves what the loop has come to, where it ended by itself."""
        if kind is None and self.step > self._saved:
            self._manager.save(self.step, self._tree, force=True)
            self._manager.wait()
        self._exits.__exit__(kind, error, traceback)

    def between_steps(self) -> None:
        """See ``Loop``: saves when it is time to, and leaves when all have agreed to."""
        report_step(self.step)
        if self._preemption.reached(self.step):
            if self.step > self._saved:
                self._manager.save(self.step, self._tree, force=True)
                self._manager.wait()
            raise SystemExit(SAVED)
        saves = self._manager.saves_at_intervals and self.step > self._saved
        if saves and self._manager.save(self.step, self._tree):
            self._saved = self.step

    def took_batch(self) -> None:
        """See ``Loop``."""
        self.step += 1


def preemptible(
    manager: Saver,
    tree: Any,
    iterator: Any,
    grace_seconds: float,
    termination_watcher_fn: Callable[[], bool] | None,
) -> Preemptible:
    """Checks the arguments of ``CheckpointManager.preemptible``, and makes its block."""
    if not isinstance(iterator, DistributedIterator):
        raise ArgumentError(
            f"CheckpointManager.preemptible got {type(iterator).__name__} as its iterator. Pass "
            "iter(strategy.distribute_dataset(...)), and take every batch of the loop from it."
        )
    if not isinstance(tree, dict):
        raise ArgumentError(
            f"CheckpointManager.preemptible got {type(tree).__name__} as its tree. Pass a dict, such as "
            "{'model': model, 'optimizer': optimizer}."
        )
    if not grace_seconds > 0:
        raise ArgumentError(
            f"CheckpointManager.preemptible(grace_seconds={grace_seconds!r}): a number of seconds above 0."
        )
    has_iterator = any(value is iterator for value in tree.values())
    if not has_iterator and "iterator" in tree:
        raise ArgumentError(
            "CheckpointManager.preemptible got a tree whose 'iterator' is another one than the iterator of "
            "the loop. Leave it out, or put the iterator of the loop there."
        )
    iterator.state()  # raises by name where the source could not go on in the middle
    whole = tree if has_iterator else {**tree, "iterator": iterator}
    preemption = Preemption(grace_seconds, termination_watcher_fn)
    return Preemptible(manager, whole, iterator, preemption)
