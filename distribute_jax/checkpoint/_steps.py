"""Parts of ``CheckpointManager``: the folders of steps, the schedule of saves, and ``preemptible``."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from typing import Any, Self

from distribute_jax._checks import check_number, check_optional
from distribute_jax._errors import ArgumentError, CheckpointDamagedError, CheckpointFileError
from distribute_jax._supervision import SAVED
from distribute_jax.checkpoint._agreement import pop_error
from distribute_jax.checkpoint._manifest import Manifest
from distribute_jax.checkpoint._read import manifest_of
from distribute_jax.checkpoint._storage import Directory, is_step_name
from distribute_jax.data._dataset import watch
from distribute_jax.processes import Preemption
from distribute_jax.processes._status import report_step


def folders(directory: Directory) -> list[int]:
    """Returns the steps that have a folder, complete or not, in ascending order."""
    try:
        names = directory.names()
    except OSError as error:
        raise CheckpointFileError(f"{directory} cannot be read: {error}") from error
    return sorted(int(name) for name in names if is_step_name(name))


def read_step(directory: Directory, step: int) -> Manifest:
    """Reads the manifest of a step; raises if it is missing, damaged, or of another step."""
    manifest = manifest_of(directory, str(step))
    if manifest.step != step:
        raise CheckpointDamagedError(
            f"Folder {directory.path_of(str(step))} contains step {manifest.step}; was it renamed?"
        )
    return manifest


def complete(directory: Directory) -> list[int]:
    steps = []
    for step in folders(directory):
        with suppress(CheckpointDamagedError):
            read_step(directory, step)
            steps.append(step)
    return steps


def prune(directory: Directory, keep: int | None, newest: int) -> None:
    """Removes the oldest steps, so that ``keep`` remain, including ``newest``."""
    if keep is None:
        return
    older = [step for step in folders(directory) if step != newest]
    for step in older[: max(0, len(older) - (keep - 1))]:
        directory.remove(str(step))


class Schedule:
    """When to save: after an interval since the last save, or at each step if there are no intervals."""

    def __init__(self, every_steps: int | None, every_minutes: float | None) -> None:
        for name, every in {"every_steps": every_steps, "every_minutes": every_minutes}.items():
            check_optional(check_number, f"CheckpointManager: {name}", every)
        self._every_steps, self._every_minutes = every_steps, every_minutes
        self.has_intervals = every_steps is not None or every_minutes is not None
        self.reads_clock = every_minutes is not None
        """True if the processes of a job may decide differently."""
        self.note(0)

    def is_due(self, step: int) -> bool:
        """True if it is time to save; a loop of several steps at once may pass a multiple of the interval."""
        steps, minutes = self._every_steps, self._every_minutes
        by_step = steps is not None and step // steps > self._step // steps
        by_time = minutes is not None and time.monotonic() - self._time >= 60 * minutes
        return not self.has_intervals or by_step or by_time

    def note(self, step: int) -> None:
        """Restarts the intervals at this step and time."""
        self._step, self._time = step, time.monotonic()


def save_last(manager: Any, step: int, tree: Any) -> None:
    """Saves before the program exits; raises an error even if the manager's policy is to warn."""
    manager.save(step, tree, force=True)
    if (error := pop_error("CheckpointManager.wait", manager._background)) is not None:
        raise error


class Preemptible:
    """The ``with`` block of ``CheckpointManager.preemptible``, around a loop.

    Attributes:
        step: the number of finished steps, over all starts of the program.
    """

    def __init__(self, manager: Any, tree: Any, iterator: Any, preemption: Preemption) -> None:
        if not any(value is iterator for value in tree.values()):
            if "iterator" in tree:
                raise ArgumentError(
                    "CheckpointManager.preemptible: tree['iterator'] must be the iterator of the loop."
                )
            tree = {**tree, "iterator": iterator}
        iterator.state()  # raises if its source cannot seek
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
        self._exits.push(self._save_at_end)
        return self

    def __exit__(self, *error: Any) -> None:
        """Saves the state at the end of the loop."""
        self._exits.__exit__(*error)

    def _save_at_end(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            if self.step > self._saved:
                self._manager.save(self.step, self._tree, force=True)
            self._manager.wait()  # also for a save at an interval, which may still run

    def between_steps(self) -> None:
        """Called by the iterator: saves at intervals, and saves and exits if all processes agreed to."""
        report_step(self.step)
        if self._preemption.reached(self.step):
            if self.step > self._saved:
                save_last(self._manager, self.step, self._tree)
            raise SystemExit(SAVED)
        saves = self._manager.saves_at_intervals and self.step > self._saved
        if saves and self._manager.save(self.step, self._tree):
            self._saved = self.step

    def took_batch(self) -> None:
        """Called by the iterator."""
        self.step += 1
