"""Callbacks that look for problems: ``ProfilerCallback`` and ``TerminateOnNaN``."""

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
from distribute_jax._mesh import on_host
from distribute_jax._messages import is_array
from distribute_jax.processes import current_job, is_chief
from distribute_jax.training.callbacks._callback import Callback


class ProfilerCallback(Callback):
    """Records what JAX and the devices do in some batches of ``fit``, with ``jax.profiler``.

    TensorBoard's profile plugin, XProf and Perfetto show it. The devices finish earlier work before the
    recording starts, and these batches before it ends. Each process records itself.

    Args:
        log_dir: the folder; the profile is in its ``plugins/profile``.
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
                f"batches must be the first batch and the last, such as (10, 20); got {batches!r}."
            )
        self.log_dir, self.first, self.last = os.fspath(log_dir), first, last
        self._records = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._before = self._done = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._before = self._done

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        size = self.model.trainer.steps_per_execution("train").size
        if not self._records and self._done <= self.first < self._before + batch + size:
            self._wait()
            jax.profiler.start_trace(self.log_dir)
            self._records = True

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._done = self._before + batch + 1
        if self._done > self.last:
            self._release()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._release()
        if self._done <= self.first:
            warnings.warn(
                f"ProfilerCallback(batches=({self.first}, {self.last})) recorded nothing: the training had "
                f"{self._done} batches.",
                stacklevel=2,
            )

    def _wait(self) -> None:
        self.model.strategy._settle()
        jax.block_until_ready(nnx.state(self.model.module))

    def _release(self) -> None:
        if self._records:
            self._records = False
            try:
                self._wait()
            finally:
                jax.profiler.stop_trace()


BEHIND = 4
"""Dispatches after which the processes of a job look at a loss, which is computed by then or soon."""


@jax.jit
def _finite(value: jax.Array) -> jax.Array:
    return jnp.isfinite(value)


class TerminateOnNaN(Callback):
    """Ends the training when the loss is NaN or infinite, and names the first such leaf of the state.

    The loop does not wait for the loss: it is checked when the devices have computed it, a batch or so
    later, and at the end of the epoch. The processes of a job must end at the same batch, so they check
    it a fixed number of dispatches later.

    Attributes:
        message: which batch or epoch and which leaf; None as long as the loss is finite.

    Source: https://keras.io/api/callbacks/terminate_on_nan/
    """

    reads_late = True

    def __init__(self) -> None:
        super().__init__()
        self.message: str | None = None
        self._waiting: deque[tuple[int, Any]] = deque()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.message = None
        self._waiting.clear()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        alone = current_job().is_alone
        if self._waiting and (
            self._waiting[0][1].is_ready() if alone else len(self._waiting) == BEHIND
        ):
            before, finite = self._waiting.popleft()
            if not np.asarray(finite).all():
                self._end(f"batch {before}")
                return
        if not alone or not self._waiting:
            total = self.model.trainer.tracked("train").loss.total.get_raw_value()
            self._waiting.append((batch, _finite(total)))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._waiting.clear()
        if self.message is None and not np.isfinite((logs or {}).get("loss", 0.0)).all():
            self._end(f"epoch {epoch}")

    def _end(self, when: str) -> None:
        self.model.strategy._settle()
        leaf = _first_bad(self.model.module) or _first_bad(self.model.optimizer, "optimizer.")
        where = (
            f"The first leaf that is not finite: {leaf}."
            if leaf
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
            bad = ~np.isfinite(on_host(leaf).astype(np.float32))
            if bad.any():
                name = root + ".".join(map(str, path))
                return f"{name}, in {int(bad.sum())} of {bad.size} places"
    return None
