"""Callbacks for debugging: profiles, losses that are not finite or spike, devices that compute wrongly."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from distribute_jax._checks import check_choice, check_int
from distribute_jax._errors import (
    ArgumentError,
    OutOfSyncError,
    PaddingLeakError,
    log_once,
    warn_user,
)
from distribute_jax._mesh import on_host
from distribute_jax._messages import is_array
from distribute_jax.collectives._check_in_sync import Hashes, as_bits, heal
from distribute_jax.processes import is_chief
from distribute_jax.program import snapshot
from distribute_jax.program._skipped_steps import CHECK_DELAY, SKIPPED, Guard, copy_counts
from distribute_jax.training._objective import variables
from distribute_jax.training.callbacks._callback import Callback
from distribute_jax.training.callbacks._checkpoints import SaveSchedule


class ProfilerCallback(Callback):
    """Records what JAX and the devices do in some batches of ``fit``, with ``jax.profiler``.

    TensorBoard's profile plugin, XProf and Perfetto show it. The devices finish earlier work before the
    recording starts, and these batches before it ends. Each process writes its own profile.

    Args:
        log_dir: the folder; the profile is in its ``plugins/profile``.
        batches: the first and the last batch, counted from 0 at the beginning of ``fit`` over all its
            epochs; or one batch. The first ones compile, so leave them out.

    Raises:
        ValueError: the last batch is before the first.

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
        self.first = check_int("batches: the first", first, 0)
        self.log_dir, self.last = os.fspath(log_dir), check_int("batches: the last", last, first)
        self._is_recording = False

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        done, size = self.params["batches"], self.model.trainer.steps_per_execution("train").size
        if not self._is_recording and done <= self.first < done + size:
            self._wait()
            jax.profiler.start_trace(self.log_dir)
            self._is_recording = True

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self.params["batches"] > self.last:
            self._release()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._release()
        if self.params["batches"] <= self.first:
            warn_user(
                f"ProfilerCallback(batches=({self.first}, {self.last})) recorded nothing: the training had "
                f"{self.params['batches']} batches."
            )

    def _wait(self) -> None:
        self.model.strategy._sync_state()
        jax.block_until_ready(nnx.state(self.model.module))

    def _release(self) -> None:
        if self._is_recording:
            self._is_recording = False
            try:
                self._wait()
            finally:
                jax.profiler.stop_trace()


_is_finite = jax.jit(jnp.isfinite)


class TerminateOnNaN(Callback):
    """Ends the training when the loss is NaN or infinite, and names the first such leaf of the state.

    The loop does not wait for the loss: it is checked a few batches later, and at the end of the epoch.

    Attributes:
        message: names the batch or epoch, and the leaf; None as long as the loss is finite.

    Source: https://keras.io/api/callbacks/terminate_on_nan/
    """

    reads_late = True

    def __init__(self) -> None:
        super().__init__()
        self.message: str | None = None
        self._pending: deque[tuple[int, Any]] = deque()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.message = None
        self._pending.clear()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # A fixed delay: all processes of a job stop after the same batch.
        if len(self._pending) == CHECK_DELAY:
            earlier, is_finite = self._pending.popleft()
            if not np.asarray(is_finite).all():
                self._stop(f"batch {earlier}")
                return
        total = self.model.trainer.settled_tracker("train").loss.total.get_raw_value()
        self._pending.append((batch, _is_finite(total)))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._pending.clear()
        if self.message is None and not np.isfinite((logs or {}).get("loss", 0.0)).all():
            self._stop(f"epoch {epoch}")

    def _stop(self, when: str) -> None:
        self.model.strategy._sync_state()
        leaf = _first_nonfinite(self.model.module) or _first_nonfinite(
            self.model.optimizer, "optimizer."
        )
        where = "Weights and optimizer are still finite: look at the batch and the loss function."
        if leaf:
            where = f"The first leaf that is not finite: {leaf}."
        self.message = f"The loss is no longer finite (seen in {when}); the training ends. {where}"
        self.model.stop_training = True
        if is_chief():
            warn_user(self.message, RuntimeWarning)


def _first_nonfinite(node: nnx.Pytree, root: str = "") -> str | None:
    for path, variable in variables(node).items():
        for leaf in jax.tree.leaves(variable.get_raw_value()):
            if not is_array(leaf) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
                continue
            is_bad = ~np.isfinite(on_host(leaf).astype(np.float32))
            if is_bad.any():
                name = root + ".".join(map(str, path))
                return f"{name}, in {int(is_bad.sum())} of {is_bad.size} elements"
    return None


class CheckInSync(Callback):
    """Checks regularly that all devices hold the same bits, as ``dj.check_in_sync`` does.

    Each device hashes its copies of weights, optimizer, random streams and metrics. The loop does not wait
    for the hashes: they are compared a few batches later, and at the end of the training.

    Args:
        every: after how many batches.
        policy: what to do if copies differ: ``"raise"``, or ``"heal"``: devices that differ get the copy of
            the majority, with a warning. Two copies have no majority: that raises.

    Raises:
        ValueError: ``every`` is below 1, or an unknown policy.
        OutOfSyncError: copies differ; the array and the devices are named.

    Example:
        >>> import distribute_jax as dj
        >>> callback = dj.callbacks.CheckInSync(every=100, policy="heal")
    """

    reads_late = True

    def __init__(self, every: int = 100, policy: str = "raise") -> None:
        super().__init__()
        check_choice("CheckInSync(policy)", policy, ("raise", "heal"))
        self.every, self.policy = check_int("every", every), policy

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._schedule = SaveSchedule(self.every)
        self._hashes: Hashes | None = None
        self._batches = 0
        self._variables: list[tuple[str, nnx.Variable[Any]]] = []

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._batches += 1
        if self._hashes is not None and self._batches >= CHECK_DELAY:
            self._compare()
        if self._schedule.is_due(self.params["batches"]):
            self._compare()
            self._hashes, self._batches = Hashes(self._leaves()), 0

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._compare()

    def _leaves(self) -> Iterator[tuple[str, jax.Array]]:
        # Collected once: traversing hundreds of layers takes longer than a small step.
        self._variables = self._variables or [
            (".".join(map(str, (root, *path))), variable)
            for root, node in self._tree().items()
            for path, variable in variables(node).items()
        ]
        for name, variable in self._variables:
            for leaf in jax.tree.leaves(variable.get_raw_value()):
                if isinstance(leaf, jax.Array):
                    yield name, as_bits(leaf)

    def _tree(self) -> dict[str, Any]:
        setup = self.model.trainer.setup
        return {"module": self.model.module, "optimizer": setup.optimizer, "metrics": setup.tracker}

    def _compare(self) -> None:
        hashes, self._hashes = self._hashes, None
        if hashes is None:
            return
        try:
            hashes.check()
        except OutOfSyncError as error:
            if self.policy == "raise":
                raise
            heal(self._tree())
            if is_chief():
                text = f"These copies were replaced by those of the majority.\n{error}"
                warn_user(text, RuntimeWarning)


_PARTIAL_BATCH = (
    "ReplaySteps skips a partial batch whose gradients depend on the padding. fit refuses such a batch if "
    "that changes what it trains."
)


class ReplaySteps(Callback):
    """Computes the gradients of a sampled batch twice before they are used, and compares them bit by bit.

    This detects a device that sometimes computes wrongly, before the model is trained on the batch: the
    error names the replica and the variables. Each sample costs two more backward passes.

    Args:
        every: after how many batches a batch is sampled.

    Raises:
        ValueError: ``every`` is below 1.
        NotEqualError: the gradients of a replica differ in their bits.

    Example:
        >>> import distribute_jax as dj
        >>> callback = dj.callbacks.ReplaySteps(every=1000)
    """

    reads_late = True

    def __init__(self, every: int = 1000) -> None:
        super().__init__()
        self.every = check_int("every", every)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._schedule = SaveSchedule(self.every)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._schedule.is_due(self.params["batches"] + 1):
            trainer = self.model.trainer
            trainer.strategy._sync_state()
            try:
                trainer.replay_gradients(trainer.batches.peek())
            except PaddingLeakError:
                # The step itself refuses such a batch and says why, or ignores the padding.
                log_once(_PARTIAL_BATCH)


class LossSpike(Callback):
    """Detects a batch whose loss is far above the recent ones, and skips it.

    A loss is a spike if it is not finite, or if it is more than ``factor`` times the median of the last
    ``window`` losses and above all of them; until there are that many losses, only if it is not finite.
    (The distance from the median counts, so losses may be negative.) The loss of a skipped batch does not
    enter the window. ``BackupAndRestore`` saves the window, but not the weights to roll back to: after an
    interruption the earliest ones are those with which the training continued.

    Args:
        factor: how many times the median.
        window: how many losses.
        policy: ``"skip"`` leaves all state as it was before the batch; ``"rollback"`` also goes back to the
            weights and the optimizer of up to ``window`` batches before, and continues with the next batch;
            ``"warn"`` only logs a warning, as the others do too. After ``window`` spikes in a row the
            training ends with an error, except with ``"warn"``.

    Attributes:
        spikes: how many there were, after ``fit``.

    Raises:
        ValueError: ``factor`` is not above 1, ``window`` is below 1, or an unknown policy.
        StepsSkippedError: there were more than ``window`` spikes in a row.

    Example:
        >>> import distribute_jax as dj
        >>> callback = dj.callbacks.LossSpike(factor=10, window=100, policy="skip")
    """

    reads_late = True

    def __init__(self, factor: float = 10.0, window: int = 100, policy: str = "skip") -> None:
        super().__init__()
        if not factor > 1:
            raise ArgumentError(f"LossSpike: factor must be a number above 1; got {factor!r:.60}.")
        check_choice("LossSpike(policy)", policy, ("skip", "rollback", "warn"))
        self.factor, self.window, self.policy = factor, check_int("window", window), policy
        self.spikes = 0
        self._losses: Any = None

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        if model is None or model._trainer is None:
            return
        # Not in on_train_begin, where BackupAndRestore may already restore the window.
        with model.strategy.scope():
            self._losses = LossWindow(self.factor, self.window, skips=self.policy != "warn")
        model.trainer.setup.tracker.spikes = self._losses

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._pending_counts: deque[Any] = deque()
        self._schedule = SaveSchedule(self.window)
        self._saved_state: Any = None

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self.policy == "rollback" and self._saved_state is None:
            self.spikes = self._losses.guard.skipped  # before an interruption
            self._saved_state = self.model.trainer.copy_state()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self.policy != "rollback":
            return
        if is_due := self._schedule.is_due(self.params["batches"]):
            self.model.strategy._sync_state()
        self._pending_counts.append(copy_counts(self._losses.guard.counts))
        if not self._roll_back(0 if is_due else CHECK_DELAY) and is_due:
            self._saved_state = self.model.trainer.copy_state()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self.policy == "rollback":
            self._pending_counts.append(copy_counts(self._losses.guard.counts))
        self._roll_back(0)
        self.spikes = self._losses.guard.skipped
        losses = on_host(self._losses.losses.get_raw_value())
        if self.params["batches"] and not self.spikes and np.isnan(losses).all():
            log_once(
                "LossSpike has seen no loss: train_step does not call super().train_step(batch)."
            )

    def _roll_back(self, behind: int) -> bool:
        """Rolls back, and returns True, if there was a spike before the last ``behind`` dispatches."""
        while len(self._pending_counts) > behind:
            if int(on_host(self._pending_counts.popleft())[SKIPPED]) > self.spikes:
                self._pending_counts.clear()
                self.spikes = self._losses.guard.skipped
                self.model.trainer.restore_state(snapshot(self._saved_state))
                return True
        return False

    def _release(self) -> None:
        if self.model is not None and self.model._trainer is not None:
            self.model.trainer.setup.tracker.spikes = None


class LossWindow(nnx.Module):
    """The last losses that were not spikes, oldest first; NaN until there are that many."""

    def __init__(self, factor: float, window: int, *, skips: bool) -> None:
        self.factor = factor
        self.losses = nnx.Variable(jnp.full((window,), jnp.nan, jnp.float32))
        what = f"the loss is more than {factor:g} times the median of the last {window}"
        self.skips, self.guard = skips, Guard(what, window if skips else None)

    def judge(self, loss: jax.Array) -> None:
        old = self.losses[...]
        loss = loss.astype(old.dtype)
        median = jnp.median(old)
        is_far = (loss - median > (self.factor - 1) * jnp.abs(median)) & (loss > jnp.max(old))
        is_spike = is_far | ~jnp.isfinite(loss)
        is_ignored = is_spike if self.skips else ~jnp.isfinite(loss)
        self.losses[...] = jnp.where(is_ignored, old, jnp.append(old[1:], loss))
        self.guard.judge(~is_spike)
