"""Goes on with a training that was interrupted."""

from __future__ import annotations

import os
from typing import Any

from distribute_jax._errors import ArgumentError
from distribute_jax.checkpoint import CheckpointManager
from distribute_jax.checkpoint._manager import delete_all, finish_alone
from distribute_jax.checkpoint._together import by_chief
from distribute_jax.cluster._exit_codes import SAVED
from distribute_jax.cluster._status import report_step
from distribute_jax.processes import Preemption
from distribute_jax.training.callbacks._callback import Callback
from distribute_jax.training.callbacks._save_freq import SaveFrequency


class BackupAndRestore(Callback):
    """Saves the training on the way; ``fit``, called again after an interruption, goes on from there.

    Weights, optimizer, random streams, running loss and metrics, and the position in the data are those
    of a training that was not interrupted: a batch that was trained on before the backup is not trained
    on again, nor read again where the source can start at any batch. Call ``fit`` with the same
    arguments and data that come in the same order.

    Args:
        backup_dir: a folder for this alone.
        save_freq: ``"epoch"``, or a number of batches; False to save before a preemption only.
        double_checkpoint: whether the backup before the last one is kept too, for the case that the
            last one is damaged.
        delete_checkpoint: whether the backups are deleted when the training ends.
        save_before_preemption: whether the training is saved when a process is told to end (SIGTERM): all
            processes save after the same batch and leave with ``SystemExit(42)``, by which
            ``distribute-jax launch`` knows to start them again.

    Raises:
        ValueError: no folder; another ``save_freq``; nothing would ever be saved.
        CheckpointError: what is in the folder is not of this model, or cannot be read or written.

    Example:
        >>> import distribute_jax as dj
        >>> callback = dj.callbacks.BackupAndRestore("backup", save_freq=1000)

    Source: https://keras.io/api/callbacks/backup_and_restore/
    """

    reads_late = True

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
        save_before_preemption: bool = False,
    ) -> None:
        super().__init__()
        if not os.fspath(backup_dir):
            raise ArgumentError(
                "BackupAndRestore got an empty backup_dir. Name a folder for it alone."
            )
        if save_freq is False and not save_before_preemption:
            raise ArgumentError(
                "BackupAndRestore(save_freq=False) saves nothing. Pass save_before_preemption=True, or how "
                "often to save."
            )
        self._often = SaveFrequency("BackupAndRestore", save_freq, may_be_never=True)
        self._watches = save_before_preemption
        self._preemption: Preemption | None = None
        self._manager = CheckpointManager(backup_dir, max_to_keep=2 if double_checkpoint else 1)
        self.delete_checkpoint = delete_checkpoint

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restores the last backup, if there is one, and lets ``fit`` go on behind it."""
        self._often.start()
        self._steps, self._last = 0, -1
        tree = self._tree(epoch=0, batch=0)
        number = self._manager.restore_latest(tree)
        self._number = 0 if number is None else number + 1
        if number is not None:
            self.params["initial_epoch"] = tree["epoch"]
            self.params["initial_batch"] = tree["batch"]
            self.params["position"] = tree["position"]
            self.model.trainer.own_logs.text = tree["own"]
            self._often.go_on_from(tree["batch"])
            self._steps, self._last = tree["steps"], tree["batch"] - 1
        report_step(self._steps)
        if self._watches:
            self._preemption = Preemption(_GRACE_SECONDS).__enter__()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves, if it is time, and leaves, if all processes have agreed to."""
        self._steps += batch - self._last
        self._last = batch
        report_step(self._steps)
        leaves = self._preemption is not None and self._preemption.reached(self._steps)
        if self._often.batch_is_due(batch) or leaves:
            self._save(self._epoch, batch + 1)
        if leaves:
            self._manager.wait()
            raise SystemExit(SAVED)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves, if it is time."""
        self._often.epoch_ended()
        self._last = -1
        if self._often.each_epoch:
            self._save(epoch + 1, 0)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Deletes the backups, if wanted."""
        preemption, self._preemption = self._preemption, None
        if preemption is not None:
            preemption.__exit__(None, None, None)
        self._manager.wait()
        if self.delete_checkpoint:
            by_chief("BackupAndRestore", lambda: delete_all(self._manager))

    def _save(self, epoch: int, batch: int) -> None:
        self._manager.save(self._number, self._tree(epoch=epoch, batch=batch))
        self._number += 1

    def _tree(self, *, epoch: int, batch: int) -> dict[str, Any]:
        """Gives all that a training is, and what comes next."""
        trainer = self.model.trainer
        return {
            "module": trainer.module,
            "optimizer": trainer.setup.optimizer,
            "tracker": trainer.setup.tracker,
            "own": trainer.own_logs.text,
            "epoch": epoch,
            "batch": batch,
            "steps": self._steps,
            "position": "" if trainer.batches is None else trainer.batches.position(),
        }

    def _release(self) -> None:
        # Where an error ends the run, it goes first, and other processes may not come here.
        preemption, self._preemption = self._preemption, None
        if preemption is not None:
            preemption.__exit__(SystemExit, None, None)
        finish_alone(self._manager)


_GRACE_SECONDS = 30.0
"""How long a process that was told to end may take to save."""
