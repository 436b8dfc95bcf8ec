"""Runs a compiled model over data: the loops behind ``fit``, ``evaluate`` and ``predict``."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from distribute_jax._mesh import is_local
from distribute_jax.losses._probabilities import check_probabilities
from distribute_jax.program import RunOptions, library_options
from distribute_jax.strategies import Strategy
from distribute_jax.training import _steps
from distribute_jax.training._batches import Batches, dicts_explained
from distribute_jax.training._explained import inequality_explained, padding_explained
from distribute_jax.training._loop import (
    Collected,
    Dispatch,
    check_rows,
    dispatches,
    warn_of_early_end,
)
from distribute_jax.training._mode import mode
from distribute_jax.training._objective import at
from distribute_jax.training._own_logs import OwnLogs
from distribute_jax.training._report import Snapshot, variables
from distribute_jax.training._runs import Runs
from distribute_jax.training._setup import Setup
from distribute_jax.training._together import Together, own_seconds, seconds_of_chief
from distribute_jax.training.callbacks._list import CallbackList


@dataclass(eq=False)
class Trainer:
    """A module, its strategy and what ``compile`` decided, with the programs made of them."""

    strategy: Strategy
    module: nnx.Module
    setup: Setup
    owner: weakref.ref[Any] | None = None
    """The model, where it overrides ``train_step``."""
    batches: Batches | None = None
    """Where the batches of the ``fit`` that is running come from."""
    _programs: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    _together: dict[str, Together] = field(default_factory=dict)
    _checked: bool = False
    _verified: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Starts with nothing returned."""
        self.own_logs = OwnLogs(self.strategy)
        self.runs = Runs((self.setup.tracker, self.setup.tested), self.own_logs)

    def step(self, kind: str) -> Callable[..., Any]:
        """Gives the step of a kind: ``"train"``, ``"test"`` or ``"predict"``."""
        key = kind, self.setup.class_weight if kind == "train" else ()
        model = self.owner() if self.owner is not None and kind == "train" else None
        if model is not None:
            return _steps.bound_to(model, self.module, self.setup, self._reached(key[1]))
        if key not in self._programs:
            made = _steps.Step(kind, self.module, self.setup)
            self._programs[key] = _steps.bound(made, self.module, self.setup, self._reached(key[1]))
        return self._programs[key]

    def _reached(self, weights: tuple[tuple[int, float], ...]) -> tuple[Any, ...]:
        """Gives what a step reads of the setup, where ``run`` does not see that it changed."""
        return (*self.setup.objective.functions(), weights)

    def together(self, kind: str) -> Together:
        """Says how many batches a dispatch takes; what was measured is kept for later epochs."""
        if kind not in self._together:
            agreed = own_seconds if is_local(self.strategy.mesh) else seconds_of_chief
            steps = self.setup.steps_per_execution
            self._together[kind] = Together(steps, self._wait, agreed=agreed)
        return self._together[kind]

    def _wait(self) -> None:
        jax.block_until_ready([v.get_raw_value() for v in variables(self.setup.tracker)])
        jax.block_until_ready([v.get_raw_value() for v in variables(self.setup.tested)])

    def epoch(
        self, batches: Batches, *, limit: int | None, callbacks: CallbackList, done: int = 0
    ) -> tuple[int, dict[str, Any]]:
        """Trains on the batches; gives how many there were, ``done`` before included, and the logs."""
        if not done:
            self.setup.tracker.reset()
            self.own_logs.reset()
        with dicts_explained("fit", batches), mode(self.module, training=True):
            self._check_first(batches)
            for dispatch in dispatches(
                self.strategy,
                self.step("train"),
                batches,
                limit=limit,
                together=self.together("train"),
                done=done,
            ):
                callbacks.call("on_train_batch_begin", dispatch.first)
                outs = self._run("train", dispatch)
                done = dispatch.last + 1
                if self.owner is not None:
                    self.own_logs.add(outs)
                callbacks.batch_end("train", dispatch, self.logs)
                if callbacks.model.stop_training:
                    break
        return done, self.logs()

    def _run(self, kind: str, dispatch: Dispatch) -> Any:
        """Runs a dispatch, the first of its kind on one device too if ``compile`` asked for it."""
        checks = self.setup.verify is not None and kind not in self._verified
        tracker = self.setup.tracker if kind == "train" else self.setup.tested
        # A train_step of the user's is compared as in a loop of one's own.
        unasked = None if self.owner is not None else library_options()
        with padding_explained(tracker), inequality_explained(kind):
            outs = dispatch.run(RunOptions(verify="first") if checks else unasked)
        self._verified.add(kind)
        return outs

    def logs(self) -> dict[str, Any]:
        """Reads loss and metrics of training so far, and the means of what an own step returned."""
        if self.owner is None:
            return Snapshot(self.setup.tracker).logs()
        means = self.own_logs.means()
        if not np.asarray(self.setup.tracker.loss.count.get_raw_value()):
            return means  # the step did not call the model's own one
        return {**Snapshot(self.setup.tracker).logs(), **means}

    def evaluate(
        self, batches: Batches, *, limit: int | None, callbacks: CallbackList
    ) -> dict[str, Any]:
        """Gives loss and metrics over the batches, in evaluation mode."""
        tested = self.setup.tested
        tested.reset()
        done = 0
        with dicts_explained("evaluate", batches), mode(self.module, training=False):
            self._check_first(batches)
            callbacks.call("on_test_begin")
            for dispatch in dispatches(
                self.strategy,
                self.step("test"),
                batches,
                limit=limit,
                together=self.together("test"),
            ):
                callbacks.call("on_test_batch_begin", dispatch.first)
                self._run("test", dispatch)
                done = dispatch.last + 1
                callbacks.batch_end("test", dispatch, lambda: Snapshot(tested).logs())
        if limit is not None and done < limit:
            warn_of_early_end("evaluation", done, limit)
        logs = Snapshot(tested).logs()
        callbacks.call("on_test_end", logs)
        return logs

    def predict(self, batches: Batches, *, limit: int | None, callbacks: CallbackList) -> Any:
        """Gives the outputs for every example, in order, as NumPy arrays."""
        collected, before = Collected(self.strategy), 0
        with dicts_explained("predict", batches), mode(self.module, training=False):
            callbacks.call("on_predict_begin")
            check_rows(self.strategy, self.step("predict"), batches)
            for dispatch in dispatches(
                self.strategy,
                self.step("predict"),
                batches,
                limit=limit,
                together=Together(1, self._wait),
            ):
                callbacks.call("on_predict_batch_begin", dispatch.first)
                outs = self._run("predict", dispatch)
                outputs = {"outputs": collected.add(outs, dispatch.examples - before)}
                before = dispatch.examples
                callbacks.batch_end("predict", dispatch, partial(_given, outputs))
        callbacks.call("on_predict_end")
        return collected.result()

    def _check_first(self, batches: Batches) -> None:
        """Looks once whether the outputs are what the loss takes: logits are no probabilities."""
        expecting = [k for k, loss in self.setup.objective.losses.items() if loss.expects]
        batch = batches.peek()
        if self._checked or not expecting or batch is None:
            return
        outputs = self.strategy.run(self.step("predict"), args=batch)
        for key in expecting:
            found = at(outputs, key, "outputs")
            whole = np.asarray(self.strategy.gather(found, axis=0))
            check_probabilities(self.setup.objective.losses[key], whole)
        self._checked = True


def _given(logs: dict[str, Any]) -> dict[str, Any]:
    return logs
