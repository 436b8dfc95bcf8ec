"""The loops of ``fit``, ``evaluate`` and ``predict`` over the batches of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from distribute_jax._errors import ArgumentError
from distribute_jax._values import PerReplica
from distribute_jax._warn import warn_user
from distribute_jax.program import RunOptions
from distribute_jax.strategies import Strategy
from distribute_jax.training._batches import Batches
from distribute_jax.training._together import Together

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
