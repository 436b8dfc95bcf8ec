"""TensorFlow's ``PreemptionCheckpointHandler`` and ``TerminationConfig``."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax

from distribute_jax._checks import check_number
from distribute_jax._errors import ArgumentError, MissingPackageError
from distribute_jax._supervision import GRACE_SECONDS, SAVED
from distribute_jax.checkpoint._leaves import iterators_in
from distribute_jax.checkpoint._manager import CheckpointManager
from distribute_jax.checkpoint._save_load import check_can_save, check_context
from distribute_jax.checkpoint._steps import save_last
from distribute_jax.cluster_resolver._gce import metadata_server
from distribute_jax.data._dataset import at_position, position
from distribute_jax.processes import Preemption
from distribute_jax.processes._preemption import TERMINATED
from distribute_jax.processes._status import report_step

_R = TypeVar("_R")

_MARGIN_STEPS = 6
"""The last save begins this many mean steps before the grace period ends: 3 · 2, as in TensorFlow."""
_POLL_SECONDS = 1.0
"""How often the time left is compared."""

_PRODUCT_NAME = Path("/sys/class/dmi/id/product_name")
"""Where Linux shows the kind of machine. Asking the metadata server would cost other machines a timeout."""
_COMPUTE_ENGINE_GRACE_SECONDS = 3600.0
"""How long before it stops a VM with GPUs Compute Engine announces that."""
_LOG = logging.getLogger("distribute_jax")


@dataclass(frozen=True)
class TerminationConfig:
    """How :class:`PreemptionCheckpointHandler` notices that a process will be ended, and what it does then.

    An argument that is None has the default of the platform. On a Google Compute Engine VM with GPUs the
    defaults use the hour between the metadata server's notice of maintenance and the stop of the host.

    Args:
        termination_watcher_fn: called each second in another thread; True means that this process will be
            ended. SIGTERM to the process means so too. If None, on a Compute Engine VM with GPUs: True once
            the metadata server's ``instance/maintenance-event`` is ``TERMINATE_ON_HOST_MAINTENANCE``, for
            which ``distribute-jax[gcp]`` must be installed; elsewhere only SIGTERM counts.
        exit_fn: called after the last save; if None, the program exits with code 42, by which
            ``distribute-jax launch`` knows to start the job again; with 143 on a Compute Engine VM with
            GPUs, unless SIGTERM was the notice.
        grace_period: the seconds between the notice and the end of the process, at least. With 0
            the processes save once and exit. With more they save, go on training, and save once more when
            little time is left: 6 mean steps, and the time that the first save took. If None, 3600 on a
            Compute Engine VM with GPUs, unless SIGTERM was the notice; otherwise 0.
        save_fn: called instead of saving, with the arguments of ``save_checkpoint_if_preempted``.

    Raises:
        ValueError: a negative grace period.

    Example:
        >>> import distribute_jax as dj
        >>> config = dj.experimental.TerminationConfig(grace_period=120.0)

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/TerminationConfig
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], object] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., object] | None = None

    def __post_init__(self) -> None:
        if self.grace_period is not None:
            check_number("TerminationConfig: grace_period", self.grace_period, at_least=0)


class PreemptionCheckpointHandler:
    """Saves on all processes at one common step when one of them is about to be ended, and exits.

    The constructor restores the newest checkpoint, and begins to watch for SIGTERM and other notices of
    ``TerminationConfig``. All processes then call the same method around, or between, the same steps. In a
    loop over an iterator, ``CheckpointManager.preemptible`` needs fewer lines, and also saves at intervals
    and at the end.

    Args:
        cluster_resolver: ignored, since the strategy knows the processes; accepted as in TensorFlow.
        checkpoint_or_checkpoint_manager: what to save, a dict as for ``CheckpointManager.save``: the model,
            the optimizer, and the iterator of the loop.
        checkpoint_dir: the directory, of which the newest checkpoint is kept; or a ``CheckpointManager``,
            whose steps are then numbered by ``total_run_calls``.
        termination_config: which notice means the end of a process, and what happens then.

    Raises:
        ValueError: the directory is missing, or a manager was passed as what to save; something in the tree
            cannot be saved.
        CheckpointFileError: the directory cannot be written.

    Example:
        >>> import distribute_jax as dj, tempfile
        >>> total, directory = dj.Variable(0.0), tempfile.mkdtemp()
        >>> def step():
        ...     total.assign_add(1.0)
        >>> handler = dj.experimental.PreemptionCheckpointHandler(None, {"total": total}, directory)
        >>> while handler.total_run_calls < 3:
        ...     handler.run(dj.get_strategy().run, step)
        >>> float(total.numpy())
        3.0

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/PreemptionCheckpointHandler
    """

    def __init__(
        self,
        cluster_resolver: Any,
        checkpoint_or_checkpoint_manager: Any,
        checkpoint_dir: str | os.PathLike[str] | CheckpointManager | None = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        del cluster_resolver
        check_context("PreemptionCheckpointHandler")
        if isinstance(checkpoint_or_checkpoint_manager, CheckpointManager) or not checkpoint_dir:
            raise ArgumentError(
                "PreemptionCheckpointHandler needs what to save and where: "
                'PreemptionCheckpointHandler(resolver, {"model": model, "data": iterator}, directory), or a '
                "dj.CheckpointManager in place of the directory."
            )
        self._tree = checkpoint_or_checkpoint_manager
        if not isinstance(checkpoint_dir, CheckpointManager):
            checkpoint_dir = CheckpointManager(checkpoint_dir, max_to_keep=1)
        self._manager = checkpoint_dir
        self._config = config = termination_config or TerminationConfig()
        on_compute_engine = _is_compute_engine_with_gpu()
        self._sigterm_grace = self._grace = config.grace_period or 0.0
        if config.grace_period is None and on_compute_engine:
            self._grace = _COMPUTE_ENGINE_GRACE_SECONDS
        self._exit_code = TERMINATED if on_compute_engine else SAVED
        watcher = config.termination_watcher_fn
        if watcher is None and on_compute_engine:
            watcher = _maintenance_watcher()
        self._run_calls = self._manager.restore_latest(self._tree) or 0
        if config.save_fn is None:
            check_can_save(self._manager._directory, self._tree, "PreemptionCheckpointHandler")
        self._timed, self._mean_seconds = 0, 0.0
        self._is_last = not self._grace
        self._preemption: Preemption | None
        self._leave: Callable[[], object]
        self._watch(watcher)
        self._note_step()

    @property
    def total_run_calls(self) -> int:
        """The number of calls of ``run`` and ``save_checkpoint_if_preempted``, over all starts."""
        return self._run_calls

    def run(self, distributed_train_function: Callable[..., _R], *args: Any, **kwargs: Any) -> _R:
        """Calls a function that trains; before that, saves and exits if all processes agreed to.

        A batch that the loop has taken after the last call is taken again by the restored iterator.

        Args:
            distributed_train_function: runs a step, or several.
            *args: its arguments.
            **kwargs: its keyword arguments.

        Returns:
            The result of the function.
        """
        self._check()
        begin = time.monotonic()
        result = distributed_train_function(*args, **kwargs)
        self._timed += 1
        self._mean_seconds += (time.monotonic() - begin - self._mean_seconds) / self._timed
        self._run_calls += 1
        self._note_step()
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Saves and exits if all processes have agreed to do so here; for loops that do not use ``run``.

        Args:
            *args: for ``save_fn``.
            **kwargs: for ``save_fn``.
        """
        self._run_calls += 1
        self._note_step()
        self._check(*args, **kwargs)

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Returns a ``with`` block for several steps, at whose end all save and exit if they agreed to."""
        yield
        self.save_checkpoint_if_preempted()

    def _note_step(self) -> None:
        """Notes the end of a step, and the batches taken by then: one taken for the next is not used yet."""
        report_step(self._run_calls)
        self._positions = [(iterator, position(iterator)) for iterator in iterators_in(self._tree)]

    def _check(self, *args: Any, **kwargs: Any) -> None:
        preemption = self._preemption
        if preemption is None or not preemption.reached(self._run_calls):
            return
        if self._config.save_fn is not None:
            self._config.save_fn(*args, **kwargs)
        else:
            with contextlib.ExitStack() as positions:
                for iterator, earlier in self._positions:
                    positions.enter_context(at_position(iterator, earlier))
                save_last(self._manager, self._run_calls, self._tree)
        self._leave()
        self._preemption = None
        if preemption.by_sigterm:
            self._exit_code = SAVED
            self._is_last |= not self._sigterm_grace
        if not self._is_last:
            self._is_last = True
            self._watch(self._short_of_time(preemption.requested_at))
        elif self._config.exit_fn is None:
            raise SystemExit(self._exit_code)
        else:
            self._config.exit_fn()

    def _short_of_time(self, notice: float | None) -> Callable[[], bool]:
        """Returns a watcher that is true when it is time to save again; never on a process without notice."""
        if notice is None:
            return lambda: False
        margin = _MARGIN_STEPS * self._mean_seconds + (time.monotonic() - notice) + _POLL_SECONDS
        limit = notice + self._grace - margin
        return lambda: time.monotonic() > limit

    def _watch(self, watcher: Callable[[], bool] | None) -> None:
        preemption = Preemption(
            max(self._sigterm_grace, GRACE_SECONDS), watcher, max(self._grace, GRACE_SECONDS)
        )
        # Also called when the handler is garbage-collected: SIGTERM then has its usual effect again.
        self._leave = weakref.finalize(self, _leave, preemption)
        self._preemption = preemption.__enter__()


def _leave(preemption: Preemption) -> None:
    if threading.current_thread() is threading.main_thread():  # elsewhere a handler cannot be set
        preemption.__exit__(SystemExit)


def _is_compute_engine_with_gpu() -> bool:
    try:
        product = _PRODUCT_NAME.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux, or not a PC
        return False
    return product.strip() == "Google Compute Engine" and _has_gpu()


def _has_gpu() -> bool:
    return any(device.platform == "gpu" for device in jax.local_devices())


def _maintenance_watcher() -> Callable[[], bool] | None:
    """Returns a function that asks whether this VM will be stopped; None without ``requests``."""
    try:
        server = metadata_server(timeout=5.0)
    except MissingPackageError as error:
        _LOG.warning("Maintenance of this Compute Engine VM will not be noticed. %s", error)
        return None
    return lambda: (
        server.text("/instance/maintenance-event").strip() == "TERMINATE_ON_HOST_MAINTENANCE"
    )
