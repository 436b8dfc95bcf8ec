"""Callbacks that look for problems: ``Profiler`` and ``TerminateOnNaN``."""

from __future__ import annotations

import os
import warnings
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from distribute_jax._errors import ArgumentError
from distribute_jax._messages import is_array
from distribute_jax.processes import current_job, is_chief
from distribute_jax.training.callbacks._callback import Callback


class ProfilerCallback(Callback):
    """Records what JAX and the devices do in some batches of ``fit``, with ``jax.profiler``.

    TensorBoard's profile plugin, XProf and Perfetto show it. The devices finish what was running before
    the first of the batches, and those batches before the recording ends. Each process records its own.

    Args:
        log_dir: the folder; the profile lies in its ``plugins/profile``.
        batches: the first and the last batch, counted from 0 at the beginning of ``fit`` over all its
            epochs; or one batch. The first ones compile, so leave them out.

    Raises:
        ValueError: a last batch before the first.

    Example:
        >>> import distribute_jax as dj
        >>> callback = dj.callbacks.ProfilerCallback("profiles", batches=(10, 20))

    Source: https://docs.jax.dev/en/latest/profiling.html
    """

    reads_late = True

    def __init__(
        self, log_dir: str | os.PathLike[str], batches: int | tuple[int, int] = (10, 20)
    ) -> None:
        super().__init__()
        first, last = batches if isinstance(batches, tuple) else (batches, batches)
        if not 0 <= first <= last:
            raise ArgumentError(
                f"ProfilerCallback(batches={batches!r}): give the first batch and the last, such as (10, 20)."
            )
        self.log_dir, self.first, self.last = os.fspath(log_dir), first, last
        self._records = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Counts anew."""
        self._before = self._done = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Goes on counting."""
        self._before = self._done

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins to record, if it is time."""
        if not self._records and self._done <= self.first < self._next(batch):
            self._wait()
            jax.profiler.start_trace(self.log_dir)
            self._records = True

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Ends the recording, if it is time."""
        self._done = self._before + batch + 1
        if self._done > self.last:
            self._release()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Ends a recording that the training did not reach the end of, and says if there was none."""
        self._release()
        if self._done <= self.first:
            warnings.warn(
                f"ProfilerCallback(batches=({self.first}, {self.last})) recorded nothing: the training had "
                f"{self._done} batches.",
                stacklevel=2,
            )

    def _next(self, batch: int) -> int:
        """Gives the batch after the dispatch that begins; several may go to the devices together."""
        return self._before + batch + int(self.model.trainer.together("train").size)

    def _wait(self) -> None:
        jax.block_until_ready(nnx.state(self.model.module))

    def _release(self) -> None:
        if self._records:
            self._records = False
            try:
                self._wait()
            finally:
                jax.profiler.stop_trace()


BEHIND = 4
"""Dispatches after which the processes of a job look at a loss; it is there by then, or about to be."""


@jax.jit
def _finite(value: jax.Array) -> jax.Array:
    return jnp.isfinite(value)


class TerminateOnNaN(Callback):
    """Ends the training when the loss is NaN or infinite, and names the first such leaf of the state.

    The loop does not wait for the loss: it is looked at when the devices have it, a batch or so later,
    and once more at the end of the epoch. The processes of a job have to end at the same batch, so that there
    the loss is looked at a fixed number of dispatches later.

    Attributes:
        message: what was found; None as long as all is well.

    Source: https://keras.io/api/callbacks/terminate_on_nan/
    """

    reads_late = True

    def __init__(self) -> None:
        super().__init__()
        self.message: str | None = None
        self._waiting: deque[tuple[int, Any]] = deque()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Forgets an earlier training."""
        self.message = None
        self._waiting.clear()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Looks at the loss of an earlier batch, if it is there, and asks for this one's."""
        if self._waiting and self._is_time():
            before, finite = self._waiting.popleft()
            if not np.asarray(finite).all():
                self._end(f"batch {before}")
                return
        if not current_job().is_alone or not self._waiting:
            total = self.model.trainer.setup.tracker.loss.total.get_raw_value()
            self._waiting.append((batch, _finite(total)))

    def _is_time(self) -> bool:
        if not current_job().is_alone:
            return len(self._waiting) == BEHIND
        return bool(self._waiting[0][1].is_ready())

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Looks at the loss of the epoch."""
        self._waiting.clear()
        if self.message is None and not np.isfinite((logs or {}).get("loss", 0.0)).all():
            self._end(f"epoch {epoch}")

    def _end(self, when: str) -> None:
        found = _first_bad(self.model.module) or _first_bad(self.model.optimizer, "optimizer.")
        where = (
            f"The first leaf that is not finite: {found}."
            if found
            else "Weights and optimizer are still finite: look at the batch and the loss function."
        )
        self.message = (
            f"The loss is not finite any more (seen in {when}); the training ends. {where}"
        )
        self.model.stop_training = True
        if is_chief():
            warnings.warn(self.message, RuntimeWarning, stacklevel=2)


def _first_bad(node: nnx.Pytree, root: str = "") -> str | None:
    for path, variable in nnx.iter_graph(node):
        if not isinstance(variable, nnx.Variable):
            continue
        for leaf in jax.tree.leaves(variable.get_raw_value()):
            if not is_array(leaf) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
                continue
            bad = ~np.isfinite(np.asarray(jax.device_get(leaf)).astype(np.float32))
            if bad.any():
                name = root + ".".join(map(str, path))
                return f"{name}, in {int(bad.sum())} of {bad.size} places"
    return None
