"""The loops behind ``fit``, ``evaluate`` and ``predict``, several steps in one dispatch."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from distribute_jax._errors import ArgumentError, ContextError
from distribute_jax._mesh import is_local
from distribute_jax._user_frames import warn_user
from distribute_jax._values import PerReplica
from distribute_jax.losses._shapes import check_probabilities
from distribute_jax.processes import current_job
from distribute_jax.program import RunOptions, library_options
from distribute_jax.strategies import Strategy
from distribute_jax.training import _steps
from distribute_jax.training._batches import Batches, dicts_explained
from distribute_jax.training._compile import Setup
from distribute_jax.training._objective import at
from distribute_jax.training._steps import mode
from distribute_jax.training._tracker import (
    OwnLogs,
    Snapshot,
    Tracker,
    copied,
    inequality_explained,
    padding_explained,
    variables,
)
from distribute_jax.training.callbacks._callback import CallbackList


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


Step = Callable[..., Any]


class Dispatch:
    """One batch of an epoch, or several that go to the devices together."""

    def __init__(
        self, strategy: Strategy, step: Step, batches: Batches, first: int, most: int, begun: int
    ) -> None:
        """Waits for ``run``; ``first`` is the first batch, counted in the epoch from 0."""
        self._strategy, self._step, self._batches = strategy, step, batches
        self.first, self._most = first, most
        self.last = first
        self._begun = begun
        self.examples = batches.examples - begun
        """The real ones of all batches of the epoch up to this dispatch's last."""

    def run(self, options: RunOptions | None = None) -> Any:
        """Runs the step on the batches, and gives what it returned."""
        before = self._batches.taken
        if self._most == 1:
            outs = self._strategy.run(self._step, args=next(self._batches), options=options)
        else:
            outs = self._strategy.run_steps(self._step, self._batches, self._most, options)
        self.last = self.first + self._batches.taken - before - 1
        self.examples = self._batches.examples - self._begun
        return outs


def dispatches(
    strategy: Strategy,
    step: Step,
    batches: Batches,
    *,
    limit: int | None,
    together: Together,
    done: int = 0,
) -> Iterator[Dispatch]:
    """Gives each dispatch of an epoch, to be run before the next one is asked for.

    Args:
        strategy: what runs the step.
        step: takes a batch as its arguments.
        batches: where the batches come from.
        limit: how many batches; None for all.
        together: how many go into one dispatch.
        done: how many batches of the epoch there were before, in a training that goes on.
    """
    begun = batches.examples
    while (limit is None or done < limit) and batches.peek() is not None:
        most = together.size if limit is None else min(together.size, limit - done)
        dispatch = Dispatch(strategy, step, batches, done, most, begun)
        yield dispatch
        together.note(dispatch.last + 1 - done)
        done = dispatch.last + 1


def warn_of_early_end(what: str, done: int, wanted: int) -> None:
    """Says that the data ended before the steps that were asked for."""
    warn_user(
        f"Your input ran out of data after {done} of {wanted} batches; the {what} ends here. Give the "
        "dataset as many batches as steps * epochs: repeat() it, or leave the number of steps out."
    )


_NO_ROWS = (
    "predict got outputs that are not one row for each example{names}, so they cannot be joined in order. "
    "Let the module return arrays whose dim 0 is the batch."
)


def check_rows(strategy: Strategy, step: Step, batches: Batches) -> None:
    """Refuses outputs of which the batch is no dim, also where they are just as long."""
    batch = batches.peek()
    found = [] if batch is None else strategy._not_rows(step, batch)
    if found:
        raise ArgumentError(_NO_ROWS.format(names=f": {', '.join(found)}"))


class Collected:
    """The outputs of ``predict``, brought to the host one batch late."""

    def __init__(self, strategy: Strategy) -> None:
        """Starts with nothing."""
        self._strategy = strategy
        self._waiting: Any = None
        self._parts: list[Any] = []

    def add(self, outputs: Any, examples: int) -> Any:
        """Takes the outputs of a batch of so many examples, which may not be computed yet."""
        gathered = jax.tree.map(
            self._gathered, outputs, is_leaf=lambda leaf: isinstance(leaf, PerReplica)
        )
        if any(leaf.shape[0] != examples for leaf in jax.tree.leaves(gathered)):
            raise ArgumentError(_NO_ROWS.format(names=""))
        self._flush()
        self._waiting = gathered
        return gathered

    def result(self) -> Any:
        """Gives all outputs, joined along dim 0."""
        self._flush()
        if not self._parts:
            return None
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *self._parts)

    def _flush(self) -> None:
        if self._waiting is not None:
            self._parts.append(jax.tree.map(np.asarray, self._waiting))
            self._waiting = None

    def _gathered(self, leaf: Any) -> Any:
        if not getattr(leaf, "ndim", 0) and not isinstance(leaf, PerReplica):
            raise ArgumentError(_NO_ROWS.format(names=""))
        return self._strategy.gather(leaf, axis=0)


class Runs:
    """Keeps calls apart that would mix the numbers, or the mode, of one model.

    Args:
        trackers: of training and of evaluation.
        own_logs: what a user's own step returned.
    """

    def __init__(self, trackers: Sequence[Tracker], own_logs: OwnLogs) -> None:
        self._variables = [v for tracker in trackers for v in variables(tracker)]
        self._own_logs = own_logs
        self._lock = threading.RLock()
        self._depth = 0

    @contextmanager
    def one(self, called: str) -> Iterator[None]:
        """Marks a call for a block; inside another, the numbers of that are afterwards as they were.

        Args:
            called: the method, for messages.

        Raises:
            ContextError: another thread is in a call.
        """
        # Whoever waited here in a callback's thread, for which the callback waits, would hang.
        if not self._lock.acquire(blocking=False):
            raise ContextError(
                f"{called} was called while another thread runs this model, whose weights and mode "
                "(dropout on or off) both would change. Wait for the other call to end, or make a "
                "dj.Model for each thread."
            )
        try:
            with self._untouched():
                yield
        finally:
            self._lock.release()

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        before = self._numbers() if self._depth else None
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if before is not None:
                self._put_back(*before)

    def _numbers(self) -> tuple[list[Any], str]:
        return copied([v.get_raw_value() for v in self._variables]), self._own_logs.text

    def _put_back(self, values: list[Any], text: str) -> None:
        for variable, value in zip(self._variables, values, strict=True):
            variable.set_raw_value(value)
        self._own_logs.text = text


_TOPIC = "steps_per_execution"
_SIZES = (1, 2, 4, 8, 16, 32)
_WINDOW = 0.2
"""Seconds for which a size is measured."""
_WORTH = 0.95
"""A larger group is kept where a batch takes less than this part of the time."""


def own_seconds(seconds: float) -> float:
    """Gives a process that measures for itself its own seconds."""
    return seconds


def seconds_of_chief(seconds: float) -> float:
    """Gives every process of a job the seconds of process 0."""
    return float(current_job().exchange(_TOPIC, repr(seconds))[0])


class Together:
    """Says how many batches the next dispatch takes.

    With ``"auto"`` it begins with one and doubles as long as that is worth it. Larger groups save host
    time, and cost memory for the batches and a longer wait between the batch hooks of callbacks. What
    process 0 measures counts for all processes of a job, which dispatch the same groups.

    Args:
        given: the number, or ``"auto"``.
        wait: waits until the devices have done everything.
        clock: gives seconds.
        agreed: gives all processes the number that process 0 passes.
    """

    def __init__(
        self,
        given: int | str,
        wait: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
        agreed: Callable[[float], float] = own_seconds,
    ) -> None:
        self.size = 1 if isinstance(given, str) else given
        self.is_settled = not isinstance(given, str)
        self._wait, self._clock, self._agreed = wait, clock, agreed
        self._best: float | None = None
        self._started: float | None = None
        self._batches = self._dispatches = 0

    def note(self, batches: int) -> None:
        """Hears how many batches a dispatch took."""
        if self.is_settled or batches != self.size:
            return  # the rest of an epoch says nothing about the size
        if self._started is None:
            self._restart()  # the first one compiles
            return
        self._batches += batches
        self._dispatches += 1
        if self._dispatches & (self._dispatches - 1):
            return  # to look after 1, 2, 4, 8, … keeps the talk between processes out of what is measured
        if self._agreed(self._clock() - self._started) < _WINDOW:
            return
        self._wait()
        self._judge(self._agreed(self._clock() - self._started) / self._batches)

    def _judge(self, seconds: float) -> None:
        """Goes on to the next size, or settles on the one before."""
        if self._best is not None and seconds > _WORTH * self._best:
            self.size //= 2
            self.is_settled = True
        elif self.size == _SIZES[-1]:
            self.is_settled = True
        else:
            self._best = seconds
            self.size *= 2
            self._started = None

    def _restart(self) -> None:
        self._wait()
        self._started = self._clock()
        self._batches = self._dispatches = 0
