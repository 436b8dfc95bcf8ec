"""``CheckpointManager``: saves and restores the last steps of a training run, each complete or absent."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsIndex

from distribute_jax._absent import getattr_with_hints
from distribute_jax._checks import check_choice, check_int, check_number, check_optional
from distribute_jax._errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointFileError,
    warn_user,
)
from distribute_jax._supervision import GRACE_SECONDS
from distribute_jax.checkpoint import _steps
from distribute_jax.checkpoint._agreement import (
    Background,
    by_chief,
    check_shared,
    pop_error,
    wait_until_written,
)
from distribute_jax.checkpoint._save_load import (
    check_context,
    check_target,
    directory_of,
    make_draft,
    restore_tree,
)
from distribute_jax.checkpoint._steps import Preemptible, Schedule
from distribute_jax.checkpoint._write import Draft, write_checkpoint
from distribute_jax.collectives._check_in_sync import hashes_of
from distribute_jax.data import DistributedIterator
from distribute_jax.processes import SAVING, Preemption, current_job, doing, is_chief
from distribute_jax.processes._status import status_writer

_SAVE, _RESTORE = "CheckpointManager.save", "CheckpointManager.restore"
_LATEST, _LIST = "CheckpointManager.restore_latest", "CheckpointManager.all_steps"


class CheckpointManager:
    """Keeps the last checkpoints of a training run in a directory, one folder for each step.

    ``save`` copies the tree to the host and returns; the copy is written in the background. A step is on
    the disk complete or not at all, even if the program is killed. Every leaf is compared with its digest
    when it is restored: a damaged step is set aside with a warning, and the one before it is used. What
    was saved under one strategy can be restored under any other.

    A tree is a dict, or any pytree, of NNX objects (modules, optimizers, metrics, ``Rngs``), variables,
    distributed iterators, arrays, random keys, and Python numbers, strings and None. Attributes of a
    module that are not arrays are not saved: they belong to the code that builds it.

    All processes of a job call its methods, in the same order, with a directory that all of them see. Each
    writes its shards of arrays that are sharded over the processes, and process 0 commits when all have;
    each reads and verifies what it restores. An error of one process is raised on all, and a step that one
    of them finds damaged is set aside for all.

    Args:
        directory: a path or the URL of an object store, such as ``"gs://bucket/run"``; it is created at
            the first save.
        max_to_keep: how many steps to keep; None for all.
        every_steps: ``save`` saves if a multiple of this was reached since the last save.
        every_minutes: ``save`` saves if so many minutes have passed since the last save. With both,
            whichever comes first; with neither, at each call.
        on_error: what happens if a step cannot be written: ``"raise"`` raises at the next ``save``
            or ``wait`` or at the end of the ``with`` block; ``"warn"`` warns there, and training
            continues. A save before a preemption raises in any case.

    Raises:
        ValueError: an interval is not above 0, ``max_to_keep`` is below 1, or ``on_error`` is neither.

    Example:
        >>> import distribute_jax as dj, tempfile
        >>> from flax import nnx
        >>> tree = {"model": nnx.Linear(2, 1, rngs=nnx.Rngs(0)), "best": 0.5}
        >>> with dj.CheckpointManager(tempfile.mkdtemp(), every_steps=10) as manager:
        ...     print(manager.restore_latest(tree), manager.save(9, tree), manager.save(10, tree))
        ...     tree["best"] = 0.7
        ...     print(manager.restore_latest(tree), tree["best"])
        None False True
        10 0.5

    Source: https://www.tensorflow.org/api_docs/python/tf/train/CheckpointManager
    """

    if not TYPE_CHECKING:
        __getattr__ = getattr_with_hints("dj.CheckpointManager")

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_to_keep: int | None = 5,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        on_error: Literal["raise", "warn"] = "raise",
    ) -> None:
        check_optional(check_int, "max_to_keep", max_to_keep)
        check_choice("on_error", on_error, ("raise", "warn"))
        self._directory = directory_of("CheckpointManager", directory)
        self._keep = max_to_keep
        self._warns = on_error == "warn"
        self._schedule = Schedule(every_steps, every_minutes)
        self._background = Background()
        self._is_shared = False

    @property
    def directory(self) -> Path | str:
        """The directory of the steps: a path, or the URL of an object store as a str."""
        return self._directory.path

    # Saving

    def save(
        self, step: SupportsIndex, tree: Any, *, force: bool = False, check: bool = False
    ) -> bool:
        """Saves a tree as a step, if it is time to.

        When it returns, the tree may change: the next step may run. One save is written at a time;
        a second one waits for the first.

        Args:
            step: its number, above all that were saved before.
            tree: what to save; see the class.
            force: save in any case, even if the same or a later step exists.
            check: check first that all devices hold the same bits, as ``dj.check_in_sync`` does; a
                checkpoint is written from one copy of each array.

        Returns:
            True if the step is being saved; False if the interval has not passed.

        Raises:
            CheckpointError: the tree has leaves that cannot be saved (all are listed), or the same or a
                later step exists.
            OutOfSyncError: copies of an array differ, and ``check`` is True; nothing is saved.
            CheckpointFileError: the previous save could not be written.
        """
        method = _SAVE + "(force=True)" * bool(force)  # which processes compare
        number = check_int("step", step, at_least=0)
        check_context(method)
        if current_job().is_alone and not self._background.is_running:
            # In a job the errors are exchanged below, when all are about to save.
            self._report(self._background.pop_error())
        if not force:
            is_due = functools.partial(self._schedule.is_due, number)
            # The clocks of the processes may differ.
            if not (by_chief(_SAVE, is_due) if self._schedule.reads_clock else is_due()):
                return False
        self._report(pop_error(method, self._background))
        if not force:
            by_chief(method, lambda: self._check_new(number))
        self._check_shared(method)
        if check:
            hashes_of(tree).check()
        draft = make_draft(self._directory, str(number), tree, number, method)
        self._schedule.note(number)
        self._background.start(functools.partial(self._write, number, draft))
        return True

    def _check_shared(self, method: str) -> None:
        if not self._is_shared:
            check_shared(method, self._directory)
        self._is_shared = True

    def _check_new(self, step: int) -> None:
        try:
            later = [other for other in _steps.folders(self._directory) if other >= step]
        except CheckpointFileError:  # writing will fail too, with a better message
            return
        if later:
            raise CheckpointError(
                f"CheckpointManager.save got step {step}, but {self._directory} holds step {later[-1]} "
                "already. Continue from it with restore_latest(tree), use another directory, or save it all "
                "the same with force=True."
            )

    def _write(self, step: int, draft: Draft) -> None:
        write_checkpoint(draft, lambda: self._directory.prepare(r"\d+"))
        if not is_chief():
            return
        try:
            _steps.prune(self._directory, self._keep, step)
        except OSError as error:
            raise CheckpointFileError(
                f"{self._directory.path_of(draft.name)} was written, but an older step could not be removed: "
                f"{error}. Remove it by hand, or keep all with max_to_keep=None."
            ) from error

    def _report(self, error: CheckpointError | None) -> None:
        if error is not None and not self._warns:
            raise error
        if error is not None and is_chief():
            warn_user(f"{error}\nTraining continues.", RuntimeWarning)

    def wait(self) -> None:
        """Waits until the current save is on the disk.

        Raises:
            CheckpointFileError: it could not be written.
        """
        self._report(pop_error("CheckpointManager.wait", self._background))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Waits as ``wait`` does; after an error of the block, an error of writing is only a warning."""
        if error is None:
            self.wait()
        else:
            wait_locally(self)

    def preemptible(
        self,
        tree: dict[str, Any],
        iterator: DistributedIterator,
        *,
        grace_seconds: float = GRACE_SECONDS,
        termination_watcher_fn: Callable[[], bool] | None = None,
    ) -> Preemptible:
        """Returns a ``with`` block that makes the loop in it safe against preemption.

        On entering, the newest checkpoint is restored, if there is one, including the position of the
        iterator: the loop continues at the very next example. When a process is preempted (SIGTERM, or
        ``termination_watcher_fn`` returns True), all processes of the job save at one common step, between
        two steps, and exit with ``SystemExit(42)``, by which ``distribute-jax launch`` knows to start
        them again. The loop is also saved at the intervals of the manager, if it has any, and at its end.

        The loop takes every batch from the iterator and runs its step before it takes the next.

        Args:
            tree: a dict of what changes in the loop, as for ``save``; the iterator is saved with it. Only
                what is changed in place is noticed: keep counters in variables.
            iterator: a distributed iterator of a source that can resume within an epoch.
            grace_seconds: a process that was preempted exits after this time in any case, with exit
                code 143 if it has not saved.
            termination_watcher_fn: called each second in another thread; True means that this process will be
                preempted.

        Returns:
            The block; its ``step`` counts the finished steps, over all starts.

        Raises:
            ValueError: ``iterator`` is not a distributed iterator or its source cannot resume, ``tree`` is
                not a dict, or ``grace_seconds`` is not positive.

        Example:
            >>> import distribute_jax as dj, numpy as np, tempfile
            >>> strategy = dj.OneDeviceStrategy("cpu:0")
            >>> total = dj.Variable(0.0)
            >>> def step(x):
            ...     total.assign_add(x.sum())
            >>> source = dj.data.from_arrays(np.arange(6.0)).batch(2)
            >>> iterator = iter(strategy.distribute_dataset(source))
            >>> with dj.CheckpointManager(tempfile.mkdtemp()) as manager:
            ...     with manager.preemptible({"total": total}, iterator) as loop:
            ...         for x in iterator:
            ...             strategy.run(step, args=(x,))
            >>> loop.step, float(total.numpy())
            (3, 15.0)

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/PreemptionCheckpointHandler
        """
        check_number("CheckpointManager.preemptible: grace_seconds", grace_seconds)
        preemption = Preemption(grace_seconds, termination_watcher_fn)
        return Preemptible(self, tree, iterator, preemption)

    @property
    def saves_at_intervals(self) -> bool:
        """True if ``save`` waits for an interval to pass."""
        return self._schedule.has_intervals

    # Restoring

    def all_steps(self) -> list[int]:
        """Returns the complete steps, in ascending order."""
        wait_until_written(_LIST, self._background)
        return by_chief(_LIST, lambda: _steps.complete(self._directory))

    def latest_step(self) -> int | None:
        """Returns the last of ``all_steps``, or None if there is none."""
        return max(self.all_steps(), default=None)

    def restore(self, step: SupportsIndex, tree: Any) -> Any:
        """Restores a step into a tree of the same leaves.

        Args:
            step: its number.
            tree: as it was saved. NNX objects, variables and iterators are changed in place and keep their
                sharding; other entries of a dict are replaced in that dict. On an error nothing is changed.

        Returns:
            The tree with the saved values: the same object for an NNX object or a dict.

        Raises:
            CheckpointError: there is no such step, or leaves are missing, extra, or of another shape
                or dtype: all are listed.
            CheckpointDamagedError: the files are not those that were saved.
        """
        number = check_int("step", step, at_least=0)

        def check_exists() -> None:
            if not self._directory.exists(str(number)):
                steps = _steps.complete(self._directory)
                there = f"There are {steps}." if steps else "It has no checkpoint."
                raise CheckpointError(f"There is no step {number} in {self._directory}. {there}")

        check_context(_RESTORE)
        wait_until_written(_RESTORE, self._background)
        by_chief(_RESTORE, check_exists)
        return self._restore(number, tree, _RESTORE)

    def restore_latest(self, tree: Any) -> int | None:
        """Restores the newest undamaged step into a tree of the same leaves.

        A damaged step is renamed to ``<step>.damaged``, with a warning that describes the damage, and the
        one before is used.

        Args:
            tree: as for ``restore``. Arrays and numbers are replaced in their dict, so read them from
                there afterwards.

        Returns:
            The step, or None if there is none yet.

        Raises:
            CheckpointError: leaves are missing, extra, or of another shape or dtype: all are listed.
            CheckpointDamagedError: there are steps, and all of them are damaged.
        """
        check_target(tree, _LATEST)
        wait_until_written(_LATEST, self._background)
        self._check_shared(_LATEST)
        steps = by_chief(_LATEST, lambda: _steps.folders(self._directory))
        for step in reversed(steps):
            try:
                self._restore(step, tree, _LATEST)
            except CheckpointDamagedError as error:
                by_chief(_LATEST, functools.partial(self._set_aside, step, error))
            else:
                return step
        if steps and by_chief(_LATEST, lambda: _steps.folders(self._directory)) != steps:
            return self.restore_latest(tree)  # another program has saved, and removed these steps
        by_chief(_LATEST, lambda: self._check_none_damaged(steps))
        return None

    def _check_none_damaged(self, steps: list[int]) -> None:
        damaged = self._directory.damaged_names() or list(map(str, steps))
        if damaged:
            raise CheckpointDamagedError(
                f"{self._directory} holds no undamaged checkpoint; damaged are {', '.join(damaged)}. "
                "Restore the directory from a copy, or start from the beginning in another one."
            )

    def _restore(self, step: int, tree: Any, method: str) -> Any:
        manifest_of = functools.partial(_steps.read_step, self._directory, step)
        tree = restore_tree(self._directory, str(step), manifest_of, tree, method)
        self._schedule.note(step)
        # For a supervisor, which counts a step beyond it as progress.
        status_writer().restored(step)
        return tree

    def _set_aside(self, step: int, error: CheckpointDamagedError) -> None:
        if not self._directory.exists(str(step)):  # another program removed an old step
            return
        aside = self._directory.set_aside(str(step))
        where = f"set aside as {aside}" if aside else "left where it is, for lack of permission"
        text = (
            f"The checkpoint of step {step} is damaged and was {where}; the step before it is used."
        )
        warn_user(f"{text}\n{error}", RuntimeWarning)


def wait_locally(manager: CheckpointManager) -> None:
    """Waits for this process's part of a save, without the others, and warns if it failed."""
    with doing(SAVING):  # so that the watchdog names a process that never writes its part
        error = manager._background.pop_error()
    if error is not None:
        warn_user(str(error), RuntimeWarning)


def delete_all(manager: CheckpointManager) -> None:
    """Removes every step, including those that were set aside; only the chief calls it."""
    directory = manager._directory
    steps = map(str, _steps.folders(directory))
    for name in [*steps, *directory.damaged_names()]:
        directory.remove(name.partition("/")[0])  # in a bucket the name is folder/file
