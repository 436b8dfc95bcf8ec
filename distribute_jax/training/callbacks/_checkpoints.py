"""Callbacks that save checkpoints: ``ModelCheckpoint`` and ``BackupAndRestore``."""

from __future__ import annotations

import os
from typing import Any

from distribute_jax._checks import check_choice, check_int
from distribute_jax._errors import ArgumentError
from distribute_jax._supervision import GRACE_SECONDS, SAVED
from distribute_jax.checkpoint import CheckpointManager
from distribute_jax.checkpoint._agreement import by_chief
from distribute_jax.checkpoint._manager import delete_all, wait_locally
from distribute_jax.processes import Preemption
from distribute_jax.processes._status import report_step
from distribute_jax.training.callbacks._callback import Callback
from distribute_jax.training.callbacks._monitor import Monitor, print_on_chief


class ModelCheckpoint(Monitor):
    """Saves the model after each epoch, or after every so many batches.

    Args:
        filepath: the folder; ``{epoch}``, counted from 1, ``{batch}`` and the names of the logs are
            filled in, as in ``"best-{epoch:02d}-{val_loss:.2f}"``.
        monitor: the name of the number by which models are compared.
        verbose: 1 to print what is saved.
        save_best_only: whether to save only if the number improved; as long as the logs lack
            ``monitor`` everything is saved, with a warning.
        save_weights_only: whether to call ``model.save_weights`` instead of ``model.save``.
        mode: ``"min"``, ``"max"``, or ``"auto"``: inferred from the name.
        save_freq: ``"epoch"``, or a number of batches.
        initial_value_threshold: the value that the first one must beat.

    Raises:
        ValueError: an unknown ``mode`` or ``save_freq``; a name in ``filepath`` that the logs lack.

    Source: https://keras.io/api/callbacks/model_checkpoint/
    """

    reads_late = True

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        initial_value_threshold: float | None = None,
    ) -> None:
        super().__init__(monitor, mode)
        self.filepath, self.verbose = os.fspath(filepath), verbose
        self.save_best_only, self.save_weights_only = save_best_only, save_weights_only
        self.best = initial_value_threshold
        self._schedule = SaveSchedule(save_freq)
        self._epoch = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._schedule.start()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._schedule.is_due(self.params["batches"]):
            self.model.strategy._sync_state()
            self._save(self._epoch, {"batch": batch + 1, **self._read_logs()})

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._schedule.each_epoch:
            self._save(epoch, logs or {})

    def _save(self, epoch: int, logs: dict[str, Any]) -> None:
        if not self._should_save(epoch, logs):
            return
        try:
            path = self.filepath.format(epoch=epoch + 1, **logs)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"ModelCheckpoint(filepath={self.filepath!r}) cannot be filled in: {error}. Between braces "
                f"it may have, with a format for numbers: {', '.join(['epoch', *logs])}."
            ) from None
        print_on_chief(self.verbose, f"Epoch {epoch + 1}: saving the model to {path}")
        if self.save_weights_only:
            self.model.save_weights(path)
        else:
            self.model.save(path)

    def _should_save(self, epoch: int, logs: dict[str, Any]) -> bool:
        if not self.save_best_only:
            return True
        value = self.value(logs, "saves every time")
        if value is None:
            return not self.was_logged
        if not self.is_better(value, self.best):
            print_on_chief(
                self.verbose, f"Epoch {epoch + 1}: {self.monitor} is not better than {self.best}"
            )
            return False
        self.best = value
        return True


class BackupAndRestore(Callback):
    """Saves the training regularly; after an interruption the same call of ``fit`` continues from there.

    Weights, optimizer, random streams, running loss and metrics, and the position in the data are those
    of a training that was not interrupted: a batch that was trained on before the backup is not trained
    on again, nor read again if the source can start at any batch. Call ``fit`` with the same arguments,
    and with data in the same order. Accumulated gradients are saved as their sum over the replicas, so
    training that resumes within an accumulation equals the uninterrupted one to rounding. The state of
    other callbacks is not saved, as in Keras: ``EarlyStopping`` and ``ReduceLROnPlateau`` count from zero
    again, and ``ModelCheckpoint(save_best_only=True)`` forgets its best value.

    Args:
        backup_dir: a folder that nothing else uses.
        save_freq: ``"epoch"``, or a number of batches; False to save before a preemption only.
        double_checkpoint: whether the backup before the last one is kept too, in case the last one
            is damaged.
        delete_checkpoint: whether the backups are deleted when the training ends.
        save_before_preemption: whether to save when a process gets SIGTERM: all processes save after
            the same batch or validation and exit with ``SystemExit(42)``, after which
            ``distribute-jax launch`` restarts them.

    Raises:
        ValueError: no folder; an unknown ``save_freq``; nothing would ever be saved.
        CheckpointError: the folder holds a backup of another model, or cannot be read or written.

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
        if save_freq is False and not save_before_preemption:
            raise ArgumentError(
                "BackupAndRestore(save_freq=False) never saves without save_before_preemption=True."
            )
        self._schedule = SaveSchedule(None if save_freq is False else save_freq)
        self.save_before_preemption = save_before_preemption
        self._preemption: Preemption | None = None
        self._manager = CheckpointManager(backup_dir, max_to_keep=2 if double_checkpoint else 1)
        self.delete_checkpoint = delete_checkpoint

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._schedule.start()
        self._steps_before = self._epoch = self._save_points = 0
        self._must_exit = False
        tree = self._tree(epoch=0, batch=0)
        number = self._manager.restore_latest(tree)
        self._number = 0 if number is None else number + 1
        if number is not None:
            self.params["initial_epoch"] = tree["epoch"]
            self.params["initial_batch"] = tree["batch"]
            self.params["position"] = tree["position"]
            self.model.trainer.step_logs["train"].text = tree["step_logs"]
            self.model.trainer.setup.has_averages = bool(tree.get("averaged"))
            self._schedule.start(tree["batch"])
            self._epoch, self._steps_before = tree["epoch"], tree["steps"] - tree["batch"]
        report_step(tree["steps"])
        if self.save_before_preemption:
            self._preemption = Preemption(GRACE_SECONDS)
            self._preemption.__enter__()  # _release leaves it, also if this is interrupted

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._exit_if_preempted()  # not in on_epoch_end, which callbacks later in the list must see first
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        report_step(self._steps)
        self._save_if(self._schedule.is_due(self.params["batches"]), self._epoch, batch + 1)
        self._exit_if_preempted()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch + 1
        self._save_if(self._schedule.each_epoch, self._epoch, 0)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._save_if(False, self._epoch, 0)  # SIGTERM came after the last epoch
        self._exit_if_preempted()
        self._manager.wait()
        self._stop_preemption_watch(None)
        if self.delete_checkpoint:
            by_chief("BackupAndRestore", lambda: delete_all(self._manager))

    @property
    def _steps(self) -> int:
        return self._steps_before + int(self.params["batches"])

    def _save_if(self, is_due: bool, epoch: int, batch: int) -> None:
        """Saves if it is due, or when all processes have just agreed to exit."""
        self._save_points += 1
        had_agreed = self._must_exit
        self._must_exit = self._preemption is not None and self._preemption.reached(
            self._save_points
        )
        if is_due or self._must_exit > had_agreed:
            self._manager.save(self._number, self._tree(epoch=epoch, batch=batch))
            self._number += 1

    def _exit_if_preempted(self) -> None:
        if self._must_exit:
            self._manager.wait()
            raise SystemExit(SAVED)

    def _tree(self, *, epoch: int, batch: int) -> dict[str, Any]:
        """Returns the state of the training, and the epoch and batch at which it continues."""
        trainer = self.model.trainer
        self.model.strategy._sync_state()  # so that the state is that after exactly these batches
        return {
            "module": trainer.module,
            "optimizer": trainer.setup.optimizer,
            "tracker": trainer.setup.tracker,
            "step_logs": trainer.step_logs["train"].text,
            "epoch": epoch,
            "batch": batch,
            "steps": self._steps,
            **({"averaged": int(trainer.setup.has_averages)} if trainer.setup.use_ema else {}),
            "position": "" if trainer.batches is None else trainer.batches.position(),
        }

    def _release(self) -> None:
        # After an error this may be the only process that gets here: no barriers.
        self._stop_preemption_watch(SystemExit)
        wait_locally(self._manager)

    def _stop_preemption_watch(self, error: type[BaseException] | None) -> None:
        preemption, self._preemption = self._preemption, None
        if preemption is not None:
            preemption.__exit__(error, None, None)


class SaveSchedule:
    """Decides after which batches to act, None for never; several batches may be in one dispatch."""

    def __init__(self, save_freq: str | int | None) -> None:
        self.each_epoch = save_freq == "epoch"
        self._every: int | None = None
        if isinstance(save_freq, str):
            check_choice("save_freq, if not a number of batches,", save_freq, ("epoch",))
        elif save_freq is not None:
            self._every = check_int("save_freq", save_freq)
        self.start()

    def start(self, done: int = 0) -> None:
        """Counts from the ``done``-th batch of the training."""
        self._last = done

    def is_due(self, done: int) -> bool:
        """True if it is time to act after ``done`` batches of the training; the count then restarts."""
        if self._every is None or done - self._last < self._every:
            return False
        self._last = done
        return True
