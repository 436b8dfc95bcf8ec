"""``SidecarEvaluator``: evaluates the checkpoints of a training that runs in another process."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Sequence
from typing import Any

from flax import nnx

from distribute_jax import checkpoint
from distribute_jax._checks import check_int, check_optional
from distribute_jax._errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointFileError,
    log_once,
)
from distribute_jax.checkpoint._save_load import directory_of
from distribute_jax.training._batches import Keys
from distribute_jax.training._fit import check_ends, validation_dataset
from distribute_jax.training._model import Model
from distribute_jax.training.callbacks._callback import Callback

_POLL_SECONDS = 1.0
_POLLS_BEFORE_WARNING = 60
_SKIPPED = CheckpointDamagedError, CheckpointFileError
_LOG = logging.getLogger("distribute_jax")


class SidecarEvaluator:
    """Evaluates each new checkpoint of a training that runs in another process.

    Checkpoints are written by ``ModelCheckpoint``, ``model.save``, ``model.save_weights``, or by a
    ``CheckpointManager`` of a tree with the entry ``"module"``. The newest is the one whose name ends with
    the largest number, as in ``"ckpt-{epoch}"``; older ones that appeared meanwhile are skipped. An
    incomplete or damaged one is skipped with a warning.

    Args:
        model: a compiled model of the same structure.
        data: what to evaluate on, as ``validation_data`` of ``fit``.
        checkpoint_dir: the folder of the checkpoints, or its URL.
        steps: batches of an evaluation; None for all.
        max_evaluations: the evaluator ends after so many evaluations, or after that of a checkpoint whose
            name ends with a dash and this number or a larger one; None for never.
        callbacks: ``dj.callbacks``, as for ``model.evaluate``.

    Raises:
        ValueError: invalid arguments.

    Example:
        >>> import distribute_jax as dj, numpy as np, optax, tempfile
        >>> from flax import nnx
        >>> model = dj.Model(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
        >>> model.compile(optax.sgd(0.1), loss="mse")
        >>> x = np.ones((4, 1), np.float32)
        >>> folder = tempfile.mkdtemp()
        >>> saves = dj.callbacks.ModelCheckpoint(f"{folder}/ckpt-{{epoch}}", save_weights_only=True)
        >>> history = model.fit(x, x, epochs=2, verbose=0, callbacks=[saves])
        >>> losses = []
        >>> notes = dj.callbacks.LambdaCallback(on_test_end=lambda logs: losses.append(logs["loss"]))
        >>> dj.SidecarEvaluator(model, (x, x), folder, max_evaluations=2, callbacks=[notes]).start()
        evaluate - 1 batch - ...
        >>> losses[0] < history.history["loss"][1]
        True

    Source: https://www.tensorflow.org/api_docs/python/tf/keras/utils/SidecarEvaluator
    """

    def __init__(
        self,
        model: Model,
        data: Any,
        checkpoint_dir: str | os.PathLike[str],
        steps: int | None = None,
        max_evaluations: int | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> None:
        for name, value in [("steps", steps), ("max_evaluations", max_evaluations)]:
            check_optional(check_int, f"SidecarEvaluator({name})", value)
        self.model, self.steps, self.max_evaluations = model, steps, max_evaluations
        self.callbacks = callbacks
        self._directory = directory_of("SidecarEvaluator", checkpoint_dir)
        self._last = -1
        model.trainer  # noqa: B018  raises if the model is not compiled
        with model.strategy.scope():
            self._data = validation_dataset(model.strategy, data, None, Keys())
        check_ends("SidecarEvaluator", self._data, steps)

    def start(self) -> None:
        """Evaluates the newest complete checkpoint, again and again, until ``max_evaluations``."""
        evaluations = polls = 0
        while True:
            if (name := self._load_newest()) is None:
                time.sleep(_POLL_SECONDS)
                polls += 1
                if polls == _POLLS_BEFORE_WARNING:
                    _LOG.warning(
                        "SidecarEvaluator is waiting for a new checkpoint in %s.", self._directory
                    )
                continue
            polls = 0
            self.model.evaluate(self._data, steps=self.steps, callbacks=self.callbacks, verbose=2)
            evaluations += 1
            if self.max_evaluations is not None and (
                evaluations >= self.max_evaluations
                or ("-" in name and self._last >= self.max_evaluations)
            ):
                return

    def _load_newest(self) -> str | None:
        """Loads the newest checkpoint since the last one, and returns its name; None if there is none."""
        numbers = {
            name: int(match[1])
            for name in self._directory.names()
            if (match := re.fullmatch(r"(?!\.)(?:.*?\D)?(\d+)", name))
        }
        newer = [name for name, number in numbers.items() if number > self._last]
        for name in sorted(newer, key=numbers.__getitem__, reverse=True):
            try:
                with self.model.strategy.scope():
                    self._load(self._directory.path_of(name))
            except CheckpointError as error:
                is_deleted = not self._directory.exists(name)  # meanwhile, as by max_to_keep
                if not (is_deleted or isinstance(error, _SKIPPED)):
                    raise
                log_once(f"SidecarEvaluator skips {name}: {error}")
            else:
                self._last = numbers[name]
                return name
        return None

    def _load(self, path: str) -> None:
        tree = {"module": self.model.module, "optimizer": nnx.Dict(step=self.model.optimizer.step)}
        try:
            checkpoint.load(path, tree, partial=True)  # callbacks log the step of the optimizer
        except _SKIPPED:
            raise
        except CheckpointError:
            checkpoint.load(path, {"module": self.model.module}, partial=True)
