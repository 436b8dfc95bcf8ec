"""Sets the learning rate of every epoch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from distribute_jax._errors import ArgumentError
from distribute_jax.training.callbacks._callback import Callback
from distribute_jax.training.callbacks._monitor import say


class LearningRateScheduler(Callback):
    """Sets the learning rate before every epoch.

    The rate is part of the optimizer's state, so a new one needs no compilation. The logs get it as
    ``learning_rate``.

    Args:
        schedule: takes the epoch, from 0, and the rate, or the epoch alone; returns the new rate.
        verbose: 1 to say the rate of each epoch.

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
        self._takes_rate = _takes_rate(schedule)
        self.schedule, self.verbose = schedule, verbose

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the rate."""
        old = self.model.learning_rate
        rate = self.schedule(epoch, old) if self._takes_rate else self.schedule(epoch)
        if np.ndim(rate) or not isinstance(rate, (float, int, np.floating)):
            raise ArgumentError(
                f"The schedule of LearningRateScheduler returned {rate!r} for epoch {epoch}. It must "
                "return the new rate, a float."
            )
        self.model.learning_rate = float(rate)
        say(
            self.verbose,
            f"Epoch {epoch + 1}: LearningRateScheduler sets the rate to {float(rate):.6g}.",
        )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the rate to the logs."""
        if logs is not None:
            logs["learning_rate"] = self.model.learning_rate


def _takes_rate(schedule: Callable[..., float]) -> bool:
    """Whether a schedule takes the rate too, as Keras finds out by calling it."""
    try:
        signature = inspect.signature(schedule)
    except ValueError:  # a builtin, which does not say
        return True
    except TypeError:
        raise ArgumentError(_SCHEDULE.format(schedule)) from None
    for arguments in ((0, 0.0), (0,)):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return len(arguments) == 2
    raise ArgumentError(_SCHEDULE.format(schedule))


_SCHEDULE = (
    "LearningRateScheduler({!r:.80}): schedule must be a function of (epoch) or of (epoch, learning_rate)."
)  # fmt: skip
