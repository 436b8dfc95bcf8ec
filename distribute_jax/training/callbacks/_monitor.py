"""Callbacks that monitor one number: ``EarlyStopping``, ``ReduceLROnPlateau``; learning rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from distribute_jax._checks import (
    check_choice,
    check_int,
    check_number,
    check_optional,
    converting,
    refuse,
    takes,
)
from distribute_jax._errors import ArgumentError, warn_user
from distribute_jax.processes import is_chief
from distribute_jax.training.callbacks._callback import Callback

_LOWER_IS_BETTER = (
    *("loss", "error", "mse", "mae", "mape", "msle", "rmse", "entropy", "divergence", "hinge"),
    *("poisson", "cosh", "perplexity"),
)
_HIGHER_IS_BETTER = (
    *("acc", "auc", "precision", "recall", "f1", "f_1", "f_beta", "fbeta", "iou", "r2"),
    *("similarity", "sensitivity", "specificity"),
)
"""Parts of the names of metrics that are better when lower or higher; the first tuple that matches counts."""


class Monitor(Callback):
    """Monitors one number of the logs; only a change of more than ``min_delta`` is an improvement."""

    def __init__(self, monitor: str, mode: str, min_delta: float = 0.0) -> None:
        super().__init__()
        check_choice(f"{type(self).__name__}: mode", mode, ("auto", "min", "max"))
        self.monitor, self.mode = monitor, mode
        self.min_delta = abs(min_delta)
        self.was_logged = False

    def value(self, logs: dict[str, Any] | None, otherwise: str = "does nothing") -> float | None:
        """Returns the number; None if the logs lack it, with a warning unless it was logged before."""
        logs = logs or {}
        if self.monitor not in logs:
            if not self.was_logged:
                warn_user(
                    f"{type(self).__name__} monitors {self.monitor!r}, which is not in the logs, so it "
                    f"{otherwise}. The logs have: {', '.join(logs) or 'nothing'}."
                    + (" Pass validation_data to fit." if self.monitor.startswith("val_") else "")
                )
            return None
        self.was_logged = True
        what = f"{type(self).__name__}: {self.monitor!r} of the logs"
        with converting(what, logs[self.monitor], "one number"):
            return float(logs[self.monitor])

    def is_better(self, value: float, than: float | None) -> bool:
        """True if a value is better by more than ``min_delta``; NaN never is."""
        if than is None:
            return not math.isnan(value)
        if self._higher_is_better():
            return value - self.min_delta > than
        return value + self.min_delta < than

    def _higher_is_better(self) -> bool:
        if self.mode != "auto":
            return self.mode == "max"
        name = self.monitor.removeprefix("val_").lower()
        for words, higher in ((_LOWER_IS_BETTER, False), (_HIGHER_IS_BETTER, True)):
            if any(word in name for word in words):
                return higher
        raise ArgumentError(
            f"{type(self).__name__}(monitor={self.monitor!r}): the name does not say whether higher or "
            'lower is better. Pass mode="max" or mode="min".'
        )


def print_on_chief(verbose: int, text: str) -> None:
    if verbose > 0 and is_chief():
        print(text)


class EarlyStopping(Monitor):
    """Ends the training when a number has stopped improving.

    Args:
        monitor: the number's name in the logs.
        min_delta: a smaller change does not count as an improvement.
        patience: how many epochs without improvement end the training.
        verbose: 1 to print when it ends.
        mode: ``"min"``, ``"max"``, or ``"auto"``: inferred from the name; losses and errors should fall,
            accuracies rise.
        baseline: a value that must be beaten, too.
        restore_best_weights: whether the weights of the best epoch are restored at the end.
        start_from_epoch: epochs before this one, counted from 0, are ignored.

    Attributes:
        stopped_epoch: the epoch after which this callback ended the training; 0 if it did not.
        best: the best number.
        best_epoch: its epoch.

    Raises:
        ValueError: an unknown ``mode``, or a name that does not say which way is better.

    Source: https://keras.io/api/callbacks/early_stopping/
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0,
        patience: int = 0,
        verbose: int = 0,
        mode: str = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        self.patience, self.verbose, self.baseline = patience, verbose, baseline
        self.restore_best_weights, self.start_from_epoch = restore_best_weights, start_from_epoch
        self._reset()

    def _reset(self) -> None:
        self.wait = self.stopped_epoch = self.best_epoch = 0
        self.best: float | None = None
        self.best_weights: Any = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._reset()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        value = self.value(logs)
        if value is None or epoch < self.start_from_epoch:
            return
        if self.restore_best_weights and self.best_weights is None:
            self.best_weights, self.best_epoch = self.model.get_weights(), epoch
        self.wait += 1
        if self.is_better(value, self.best):
            self.best, self.best_epoch = value, epoch
            if self.restore_best_weights:
                self.best_weights = self.model.get_weights()
            if self.baseline is None or self.is_better(value, self.baseline):
                self.wait = 0
        elif self.wait >= self.patience and epoch > 0:
            self.stopped_epoch = epoch
            self.model.stop_training = True

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self.stopped_epoch:
            print_on_chief(self.verbose, f"Epoch {self.stopped_epoch + 1}: early stopping")
        if self.best_weights is not None:
            print_on_chief(
                self.verbose, f"Restoring the weights of the best epoch: {self.best_epoch + 1}."
            )
            self.model.set_weights(self.best_weights)
        self.best_weights = None


class ReduceLROnPlateau(Monitor):
    """Lowers the learning rate when a number has stopped improving.

    The rate is part of the optimizer's state, so nothing is compiled again. It is logged as
    ``learning_rate``.

    Args:
        monitor: the number's name in the logs.
        factor: what the rate is multiplied by; below 1.
        patience: how many epochs without improvement lower the rate.
        verbose: 1 to print when the rate is lowered.
        mode: ``"min"``, ``"max"``, or ``"auto"``: inferred from the name.
        min_delta: a smaller change does not count as an improvement.
        cooldown: how many epochs to wait after a change before counting again.
        min_lr: the rate is never lowered below it.

    Raises:
        ValueError: a factor that is not between 0 and 1; an optimizer whose rate cannot be set.

    Source: https://keras.io/api/callbacks/reduce_lr_on_plateau/
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 0,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        if not 0 < factor < 1:
            raise ArgumentError(f"factor must be between 0 and 1; got {factor!r}.")
        self.factor, self.patience, self.verbose = factor, patience, verbose
        self.cooldown, self.min_lr = cooldown, min_lr
        self._reset()

    def _reset(self) -> None:
        self.best: float | None = None
        self.wait = self.cooldown_counter = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._reset()
        _ = self.model.learning_rate  # raises early if it cannot be read

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        rate = self.model.learning_rate
        if logs is not None:
            logs["learning_rate"] = rate
        value = self.value(logs)
        if value is None:
            return
        if self.cooldown_counter:
            self.cooldown_counter -= 1
            self.wait = 0
        if self.is_better(value, self.best):
            self.best, self.wait = value, 0
        elif not self.cooldown_counter:
            self.wait += 1
            if self.wait >= self.patience and rate > np.float32(self.min_lr):
                rate = self.model.learning_rate = max(rate * self.factor, self.min_lr)
                self.cooldown_counter, self.wait = self.cooldown, 0
                print_on_chief(
                    self.verbose,
                    f"Epoch {epoch + 1}: ReduceLROnPlateau sets the rate to {rate:.6g}.",
                )


class LearningRateScheduler(Callback):
    """Sets the learning rate before every epoch.

    The rate is part of the optimizer's state, so nothing is compiled again. It is logged as
    ``learning_rate``.

    Args:
        schedule: a function of the epoch, counted from 0, or of the epoch and the rate, that
            returns the new rate.
        verbose: 1 to print the rate of each epoch.

    Raises:
        ValueError: the schedule takes other arguments or does not return a number; an optimizer whose rate
            cannot be set.

    Example:
        >>> import distribute_jax as dj
        >>> halved = dj.callbacks.LearningRateScheduler(lambda epoch, lr: lr if epoch < 10 else lr / 2)

    Source: https://keras.io/api/callbacks/learning_rate_scheduler/
    """

    def __init__(self, schedule: Callable[..., float], verbose: int = 0) -> None:
        super().__init__()
        self._takes_rate = takes(schedule, 0, 0.0)
        if not self._takes_rate and not takes(schedule, 0):
            wanted = "a function of (epoch) or of (epoch, learning_rate)"
            refuse("LearningRateScheduler: schedule", wanted, schedule)
        self.schedule, self.verbose = schedule, verbose

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        is_resumed = self.params.get("initial_batch") and epoch == self.params["initial_epoch"]
        if is_resumed and self._takes_rate:
            return  # the restored rate is already that of this epoch
        old = self.model.learning_rate
        rate = self.schedule(epoch, old) if self._takes_rate else self.schedule(epoch)
        self.model.learning_rate = rate
        print_on_chief(
            self.verbose, f"Epoch {epoch + 1}: LearningRateScheduler sets the rate to {rate:.6g}."
        )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["learning_rate"] = self.model.learning_rate


class SwapEMAWeights(Callback):
    """Evaluates, validates and predicts with the moving averages of the weights.

    Args:
        swap_on_epoch: whether the averages also replace the weights between the end of an epoch and the
            next one, for callbacks later in the list such as ``ModelCheckpoint``.

    Raises:
        ValueError: the model was not compiled with ``use_ema=True``.

    Example:
        >>> import distribute_jax as dj
        >>> callbacks = [dj.callbacks.SwapEMAWeights(), dj.callbacks.EarlyStopping()]

    Source: https://keras.io/api/callbacks/swap_ema_weights/
    """

    def __init__(self, swap_on_epoch: bool = False) -> None:
        super().__init__()
        self.swap_on_epoch = swap_on_epoch

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        if not model.trainer.setup.use_ema:
            raise ArgumentError("SwapEMAWeights needs a model with compile(use_ema=True).")

    def _swap(self, *, averages: bool) -> None:
        trainer = self.model.trainer
        trainer.setup.swap_averages(trainer.module, averages=averages)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._swap(averages=False)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._swap(averages=self.swap_on_epoch)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._swap(averages=True)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        self._swap(averages=False)

    on_predict_begin, on_predict_end = on_test_begin, on_test_end

    def _release(self) -> None:
        self._swap(averages=False)


class LearningRateFinder(Callback):
    """Tries learning rates, one per batch, from low to high, in a ``fit`` that changes nothing.

    The rates grow exponentially until the smoothed loss is far above its lowest value. Then ``fit`` ends,
    with weights, optimizer and random streams as they were before it.

    Args:
        min_lr: the first rate.
        max_lr: the last rate.
        num_training_steps: how many rates; ``fit`` needs as many batches, in any number of epochs.
        early_stop_threshold: the search ends when the loss is more than this many times the lowest one;
            None to try all rates.

    Attributes:
        rates: the rates that were tried.
        losses: the smoothed loss of each.
        suggestion: the rate at which the loss falls most steeply; None if there are too few.

    Raises:
        ValueError: ``max_lr`` is below ``min_lr``; the rate cannot be set; the logs have no loss.

    Example:
        >>> import distribute_jax as dj
        >>> finder = dj.callbacks.LearningRateFinder()
        >>> # model.fit(x, y, epochs=100, callbacks=[finder])
        >>> # model.learning_rate = finder.suggestion

    Source: https://lightning.ai/docs/pytorch/stable/api/lightning.pytorch.callbacks.LearningRateFinder.html
    """

    reads_late = True

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training_steps: int = 100,
        early_stop_threshold: float | None = 4.0,
    ) -> None:
        super().__init__()
        check_number("LearningRateFinder: min_lr", min_lr)
        check_number("LearningRateFinder: max_lr", max_lr, at_least=min_lr)
        check_int("LearningRateFinder: num_training_steps", num_training_steps, 2)
        name = "LearningRateFinder: early_stop_threshold"
        check_optional(check_number, name, early_stop_threshold)
        self._rates_to_try = np.geomspace(min_lr, max_lr, num_training_steps)
        self._threshold = early_stop_threshold
        self._initial_state: Any = None
        self._reset()

    def _reset(self) -> None:
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.suggestion: float | None = None
        self._mean = 0.0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._reset()
        self._initial_state = self.model.trainer.copy_state()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.model.trainer.reset("train")  # so that the logs are those of this batch alone
        self.model.learning_rate = float(self._rates_to_try[len(self.rates)])

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.model.strategy._sync_state()
        logs = self._read_logs()
        if "loss" not in logs:
            raise ArgumentError("LearningRateFinder needs a loss, and the logs have none.")
        self.rates.append(self.model.learning_rate)
        self._mean = _SMOOTHING * self._mean + (1 - _SMOOTHING) * float(logs["loss"])
        self.losses.append(self._mean / (1 - _SMOOTHING ** len(self.rates)))
        last, lowest = self.losses[-1], min(self.losses[_NUM_IGNORED:], default=math.inf)
        max_rise = math.inf if self._threshold is None else (self._threshold - 1) * abs(lowest)
        diverges = not math.isfinite(last) or last - lowest > max_rise
        if diverges or len(self.rates) == len(self._rates_to_try):
            self.model.stop_training = True

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if not self.model.stop_training:
            warn_user(
                f"LearningRateFinder tried {len(self.rates)} of {len(self._rates_to_try)} rates, since there "
                "were no more batches. Pass more epochs to fit."
            )
        smooth = self.losses[_NUM_IGNORED:-1]
        if len(smooth) > 1:
            self.suggestion = self.rates[_NUM_IGNORED + int(np.argmin(np.gradient(smooth)))]
        self._release()

    def _release(self) -> None:
        state, self._initial_state = self._initial_state, None
        if state is not None:
            self.model.trainer.restore_state(state)


_SMOOTHING = 0.98
"""The momentum of the moving average of the losses, as in Lightning and fastai."""
_NUM_IGNORED = 10
"""The losses of the first rates are ignored, since they are not smooth yet."""
