"""The loops of ``fit``, ``evaluate`` and ``predict``, with several batches in one dispatch."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from distribute_jax._errors import ArgumentError, ContextError, NotEqualError, warn_user
from distribute_jax._mesh import explicit_transfers, is_local, on_host
from distribute_jax._messages import listed
from distribute_jax._values import PerReplica
from distribute_jax.losses._shapes import check_probabilities
from distribute_jax.processes import current_job
from distribute_jax.program import PreparationClock, RunOptions, library_options, snapshot
from distribute_jax.strategies import Strategy
from distribute_jax.training._batches import Batches, dict_hint, hint
from distribute_jax.training._compile import Setup
from distribute_jax.training._objective import select_output, variables
from distribute_jax.training._steps import Step, bind_step, checking_first_call, mode
from distribute_jax.training._tracker import Snapshot, StepLogs, Tracker, copy_arrays, failure_hint
from distribute_jax.training.callbacks._callback import CallbackList


@dataclass(eq=False)
class Trainer:
    strategy: Strategy
    module: nnx.Module
    setup: Setup
    model: weakref.ref[Any] | None = None
    """The model, if it overrides a step."""
    overridden: frozenset[str] = frozenset()
    """The names of the steps that it overrides."""
    batches: Batches | None = None
    """The batches of the running ``fit``."""
    is_running: bool = False
    _lock: Any = field(default_factory=threading.RLock)
    """Forbids running one model in two threads."""
    _steps: dict[Any, Step] = field(default_factory=dict)
    _executions: dict[str, StepsPerExecution] = field(default_factory=dict)
    _outputs_checked: bool = False
    _label_checked: weakref.ref[Any] | None = None
    """The dataset whose first labels were checked last."""
    _verified: set[str] = field(default_factory=set)
    _kinds_read: frozenset[str] = frozenset()
    """The kinds whose logs were computed before; the first time compiles."""

    def __post_init__(self) -> None:
        self.step_logs = {kind: StepLogs(self.strategy) for kind in ("train", "test")}
        self.clock = PreparationClock(self._wait_for_steps)

    @contextmanager
    def running(self, method: str) -> Iterator[None]:
        """Marks a run for the block; after a nested run the loss and metrics of the outer one return."""
        # Waiting could deadlock: the other run may be in a callback that waits for this thread.
        if not self._lock.acquire(blocking=False):
            raise ContextError(
                f"{method} was called while another thread runs this model, whose weights and mode both "
                "would change. Wait for the other call to end, or make a dj.Model for each thread."
            )
        try:
            with explicit_transfers(), self._restored() if self.is_running else nullcontext():
                outer, self.is_running = self.is_running, True
                try:
                    yield
                finally:
                    self.is_running = outer
        finally:
            self._lock.release()

    @contextmanager
    def _restored(self) -> Iterator[None]:
        self.strategy._sync_state()
        tracked = self._tracked()
        values = copy_arrays([v.get_raw_value() for v in tracked])
        texts = [logs.text for logs in self.step_logs.values()]
        try:
            yield
        finally:
            for variable, value in zip(tracked, values, strict=True):
                variable.set_raw_value(value)
            for logs, text in zip(self.step_logs.values(), texts, strict=True):
                logs.text = text

    def _tracked(self) -> list[Any]:
        """Returns the variables of loss and metrics, of training and evaluation."""
        trackers = self.setup.tracker, self.setup.test_tracker
        return [v for tracker in trackers for v in variables(tracker).values()]

    def step(self, kind: str, *, of_user: bool = True) -> Step:
        """Returns the step of a kind: ``"train"``, ``"test"``, ``"predict"`` or ``"replay"``.

        With ``of_user`` it is the model's override, if there is one.
        """
        weights = self.setup.class_weight if kind in ("train", "replay") else ()
        # What a step reads from the setup, in which ``run`` would not notice a change.
        constants = *self.setup.objective.functions(), weights
        model = self.model() if self.model and of_user and self.overrides(kind) else None
        if model is not None:  # not cached: the step holds the model
            return bind_step(kind, self.module, self.setup, constants, model)
        if (kind, weights) not in self._steps:
            self._steps[kind, weights] = bind_step(kind, self.module, self.setup, constants)
        return self._steps[kind, weights]

    def replay_gradients(self, batch: tuple[Any, ...], times: int = 2) -> dict[str, np.ndarray]:
        """Computes the gradients of a batch several times; raises if the bits differ, else returns hashes."""
        if self.overrides("train"):
            raise ArgumentError("A model that overrides train_step cannot be replayed.")
        with self._training():
            step = self.step("replay")
            run = partial(self.strategy.run, step, args=batch, options=library_options())
            runs = [on_host(run()) for _ in range(times)]
        state = nnx.to_flat_state(nnx.state(self.module, self.setup.optimizer.wrt))
        names = [".".join(map(str, path)) for path, _ in state]
        differ = np.any([run != runs[0] for run in runs], axis=(0, 3))
        if differ.any():
            lines = [
                f"replica {r}: {', '.join(names[k] for k in np.flatnonzero(differ[r]))}"
                for r in np.flatnonzero(differ.any(1))
            ]
            raise NotEqualError(_NOT_REPRODUCIBLE.format(times=times, lines=listed(lines)))
        return {name: runs[0][:, k] for k, name in enumerate(names)}

    def steps_per_execution(self, kind: str) -> StepsPerExecution:
        """Returns the ``StepsPerExecution`` of a kind, which later epochs share."""
        if kind not in self._executions:
            agree = float if is_local(self.strategy.mesh) else _chief_seconds
            steps = 1 if kind == "predict" else self.setup.steps_per_execution
            self._executions[kind] = StepsPerExecution(steps, self._wait, agree=agree)
        return self._executions[kind]

    def overrides(self, kind: str) -> bool:
        return f"{kind}_step" in self.overridden

    def tracker(self, kind: str) -> Tracker:
        return self.setup.tracker if kind == "train" else self.setup.test_tracker

    def reset(self, kind: str) -> None:
        self.tracker(kind).reset()
        self.step_logs[kind].reset()

    def settled_tracker(self, kind: str) -> Tracker:
        """Returns the tracker with the newest numbers that the strategy has."""
        tracker = self.tracker(kind)
        self.strategy._sync_state(list(variables(tracker).values()))
        if self.strategy._max_pending and not np.asarray(tracker.loss.count.get_raw_value()):
            self.strategy._sync_state()  # the mean of no batch would be NaN
        return tracker

    def _wait(self) -> None:
        jax.block_until_ready([v.get_raw_value() for v in self._tracked()])

    def _wait_for_steps(self) -> None:
        with suppress(Exception):  # a step's error is raised where its results are read
            self._wait()
            jax.block_until_ready(jax.tree.leaves(nnx.state(self.module)))

    def copy_state(self) -> list[Any]:
        """Returns a copy of the state of the module and the optimizer, after all steps so far."""
        self.strategy._sync_state()
        return [snapshot(node) for node in (self.module, self.setup.optimizer)]

    def restore_state(self, states: Sequence[Any]) -> None:
        """Sets the state from ``copy_state``, whose arrays are donated to the next step."""
        self.strategy._sync_state()
        for node, state in zip((self.module, self.setup.optimizer), states, strict=True):
            nnx.update(node, state)

    def epoch(
        self, batches: Batches, *, limit: int | None, callbacks: CallbackList, done: int = 0
    ) -> tuple[int, dict[str, Any]]:
        """Trains on the batches after the first ``done``; returns how many are done then, and the logs."""
        if not done:
            self.reset("train")
        with hint(partial(dict_hint, "fit", batches)), self._training():
            self._check_labels("train", batches)
            batches.check_not_empty("fit", limit)
            self._check_first(batches)
            done = self._loop("train", batches, callbacks, self.logs, limit, done)
        return done, self.logs()

    def logs(self, kind: str = "train") -> dict[str, Any]:
        """Returns loss and metrics so far, and the means of the logs of a user's step."""
        returned = self.step_logs[kind] if self.overrides(kind) else None
        compiles, self._kinds_read = kind not in self._kinds_read, self._kinds_read | {kind}
        with self.clock.running() if compiles else nullcontext():
            return Snapshot(self.settled_tracker(kind), returned).logs()

    def snapshot(self, kind: str = "train") -> Snapshot:
        """Returns a copy of loss and metrics so far, without waiting; the chief may call it alone."""
        returned = None
        if self.overrides(kind):
            # Summing the logs of several processes needs all of them, so there they are left out.
            can_sum = is_local(self.strategy.mesh)
            returned = self.step_logs[kind].copy() if can_sum else StepLogs(self.strategy)
        return Snapshot(self.settled_tracker(kind), returned)

    def evaluate(
        self,
        batches: Batches,
        *,
        limit: int | None,
        callbacks: CallbackList,
        method: str = "evaluate",
    ) -> dict[str, Any]:
        """Returns loss and metrics over the batches of a method, in evaluation mode."""
        self.reset("test")
        with hint(partial(dict_hint, "evaluate", batches)), mode(self.module, training=False):
            self._check_labels("test", batches)
            batches.check_not_empty(method, limit)
            self._check_first(batches)
            callbacks.call("on_test_begin")
            done = self._loop("test", batches, callbacks, partial(self.logs, "test"), limit)
        if limit is not None and done < limit:
            warn_of_early_end("evaluation", done, limit)
        logs = self.logs("test")
        callbacks.call("on_test_end", logs)
        return logs

    def predict(self, batches: Batches, *, limit: int | None, callbacks: CallbackList) -> Any:
        outputs = Outputs(self.strategy)
        batches.check_not_empty("predict", limit)
        with hint(partial(dict_hint, "predict", batches)), mode(self.module, training=False):
            callbacks.call("on_predict_begin")
            batch = batches.peek()
            names = (
                []
                if batch is None
                else self.strategy._non_batched_results(self.step("predict"), batch)
            )
            if names:  # even if they happen to be as long as the batch
                raise ArgumentError(_NOT_ROWS.format(names=f": {', '.join(names)}"))
            self._loop("predict", batches, callbacks, outputs.logs, limit, 0, outputs.add)
        callbacks.call("on_predict_end")
        return outputs.result()

    def _loop(
        self,
        kind: str,
        batches: Batches,
        callbacks: CallbackList,
        logs: Callable[[], dict[str, Any]],
        limit: int | None,
        done: int = 0,
        consume: Callable[[Any, int], None] | None = None,
    ) -> int:
        """Runs a step over the batches of an epoch, and returns how many are done then.

        ``consume`` gets the results of each dispatch, and its number of real examples.
        """
        step, size, start = self.step(kind), self.steps_per_execution(kind), batches.examples
        with _draining(self.strategy), self.clock.counting():
            while (limit is None or done < limit) and batches.peek() is not None:
                max_batches = size.size if limit is None else min(size.size, limit - done)
                callbacks.call(f"on_{kind}_batch_begin", done)
                count, examples = batches.count, batches.examples
                outs = self._run(kind, step, batches, max_batches)
                num_batches = batches.count - count
                done += num_batches
                if consume is not None:
                    consume(outs, batches.examples - examples)
                elif self.overrides(kind):
                    self.step_logs[kind].add(outs, num_batches)
                callbacks.batch_end(kind, done - 1, num_batches, batches.examples - start, logs)
                if kind == "train" and callbacks.model.stop_training:
                    break
                size.note(num_batches)
        return done

    def _run(self, kind: str, step: Step, batches: Batches, max_batches: int) -> Any:
        """Runs one dispatch; with ``compile(verify="first")`` the first of its kind is verified."""
        # A user's step is verified as in the user's own loop.
        of_user, is_first = self.overrides(kind), kind not in self._verified
        options: RunOptions | None = library_options()
        if of_user:
            options = _NEVER_COMPARED if self.setup.verify == "off" else None
        is_requested = self.setup.verify == "first"
        if is_requested and is_first:
            options = RunOptions(verify="first") if of_user else library_options("first")
        check = checking_first_call(kind, self.module) if of_user and is_first else nullcontext()
        with check, hint(partial(failure_hint, kind, self.tracker(kind), is_requested)):
            outs = self.strategy._dispatch(step, batches, max_batches, options)
            if of_user and is_first:
                self.strategy._sync_state()  # the check reads the new state
        self._verified.add(kind)
        return outs

    def _training(self) -> AbstractContextManager[None]:
        return mode(self.module, training=True, trained=self.setup.trained)

    def _check_first(self, batches: Batches) -> None:
        """Checks once that outputs are probabilities where the loss expects them."""
        losses = self.setup.objective.losses
        expecting = [key for key, loss in losses.items() if loss.expects]
        batch = batches.peek()
        if self._outputs_checked or not expecting or batch is None:
            return
        with mode(self.module, training=False):
            step = self.step("predict", of_user=False)
            outputs = self.strategy.run(step, args=batch, options=library_options())
        for key in expecting:
            values = self.strategy.gather(select_output(outputs, key, "outputs"), axis=0)
            check_probabilities(losses[key], np.asarray(values))
        self._outputs_checked = True

    def _check_labels(self, kind: str, batches: Batches) -> None:
        """Raises for labels that are not valid class numbers.

        The labels of a dataset's first batch are checked here, wherever they are, by all processes together.
        Later ones are checked as they come, if they come from the host.
        """
        labels = self.setup.objective.labels
        labels.restart()
        if not labels or self.overrides(kind):
            return
        batches.observe_labels(labels)
        _, y, *_ = (*(batches.peek() or ()), None, None)
        if self._label_checked is None or self._label_checked() is not batches.dataset:
            self._label_checked = weakref.ref(batches.dataset)
            labels.add(labels.ranges(jax.tree.map(self._on_host, y, is_leaf=is_per_replica)))
        batches.check_labels(labels)

    def _on_host(self, leaf: Any) -> Any:
        return np.asarray(self.strategy.gather(leaf, axis=0)) if is_per_replica(leaf) else leaf


def is_per_replica(leaf: Any) -> bool:
    return isinstance(leaf, PerReplica)


@contextmanager
def _draining(strategy: Strategy) -> Iterator[None]:
    """Waits for the steps in flight before and after a loop; an error of the loop takes precedence."""
    strategy._sync_state()
    try:
        yield
    except BaseException:
        with suppress(Exception):
            strategy._sync_state()
        raise
    strategy._sync_state()


_NEVER_COMPARED = RunOptions(verify="off")

_NOT_REPRODUCIBLE = """\
The gradients of one batch were computed {times} times from the same state, and their bits differ:
{lines}
The state is as before the batch. Either a device is faulty, or the step is not deterministic: on GPUs \
XLA_FLAGS=--xla_gpu_deterministic_ops=true makes it so."""


def warn_of_early_end(what: str, done: int, requested: int) -> None:
    warn_user(
        f"Your input ran out of data after {done} of {requested} batches; the {what} ends here. Give the "
        "dataset as many batches as steps * epochs: repeat() it, or leave the number of steps out."
    )


_NOT_ROWS = (
    "predict got outputs that are not one row for each example{names}, so they cannot be joined in order. "
    "Let the module return arrays whose dim 0 is the batch. An overridden predict_step gets its inputs in a "
    "tuple: batch[0]."
)


class Outputs:
    """Collects the outputs of ``predict`` on the host, without waiting for the newest steps."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._parts: list[Any] = []
        self._pending: deque[tuple[Any, int]] = deque()

    def add(self, outputs: Any, examples: int) -> None:
        """Adds the outputs of a batch of ``examples``, which may not be computed yet."""
        self._pending.append((outputs, examples))
        self._gather(max_pending=max(self._strategy._max_pending, 1))

    def _gather(self, max_pending: int) -> None:
        gather = partial(self._strategy.gather, axis=0)
        while len(self._pending) > max_pending:
            outputs, examples = self._pending.popleft()
            gathered = jax.tree.map(gather, self._strategy._fetch(outputs), is_leaf=is_per_replica)
            if any(leaf.shape[0] != examples for leaf in jax.tree.leaves(gathered)):
                raise ArgumentError(_NOT_ROWS.format(names=""))
            self._parts.append(jax.tree.map(np.asarray, gathered))

    def logs(self) -> dict[str, Any]:
        self._gather(max_pending=0)
        return {"outputs": self._parts[-1]}

    def result(self) -> Any:
        self._gather(max_pending=0)
        if not self._parts:
            return None
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *self._parts)


_MAX_STEPS = 32
_MEASURED_SECONDS = 0.2
"""How long each size is measured."""
_WORTHWHILE = 0.95
"""A larger size is kept if a batch takes less than this fraction of the time."""


def _chief_seconds(seconds: float) -> float:
    return float(current_job().exchange("steps_per_execution", repr(seconds))[0])


class StepsPerExecution:
    """The number of batches in the next dispatch.

    With ``"auto"`` it starts at one and doubles as long as that is faster. A larger number saves host
    time, but costs memory for the batches and calls the batch hooks of callbacks less often. All
    processes of a job use what process 0 measures, since they must dispatch the same batches.
    """

    def __init__(
        self, steps: int | str, wait: Callable[[], None], agree: Callable[[float], float] = float
    ) -> None:
        self.size = 1 if isinstance(steps, str) else steps
        self.is_settled = not isinstance(steps, str)
        self._wait, self._agree = wait, agree
        self._best: float | None = None
        self._started: float | None = None
        self._batches = self._dispatches = 0

    def note(self, batches: int) -> None:
        if self.is_settled or batches != self.size:
            return  # the remainder of an epoch is not representative
        if self._started is None:  # the first one compiles
            self._wait()
            self._started = time.perf_counter()
            self._batches = self._dispatches = 0
            return
        self._batches += batches
        self._dispatches += 1
        if self._dispatches & (self._dispatches - 1):
            return  # only after 1, 2, 4, 8, …, so that the exchange between processes costs little
        if self._agree(time.perf_counter() - self._started) < _MEASURED_SECONDS:
            return
        self._wait()
        self._judge(self._agree(time.perf_counter() - self._started) / self._batches)

    def _judge(self, seconds: float) -> None:
        """Tries the next size, or settles on this one or the one before."""
        if self._best is not None and seconds > _WORTHWHILE * self._best:
            self.size //= 2
            self.is_settled = True
        elif self.size == _MAX_STEPS:
            self.is_settled = True
        else:
            self._best = seconds
            self.size *= 2
            self._started = None
