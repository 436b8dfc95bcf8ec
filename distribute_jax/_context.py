"""What this thread is doing, and what must not be called meanwhile."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from distribute_jax import _frames
from distribute_jax._errors import ContextError, MixedStrategiesError
from distribute_jax._jax_private import at_top_level


class _Doing(threading.local):
    def __init__(self) -> None:
        self.reads_ahead = False
        self.batches_taken: int | None = None


_doing = _Doing()
_threads_of_steps: set[int] = set()
_holders: weakref.WeakSet[Any] = weakref.WeakSet()


def require_method(strategy: Any, method: str) -> None:
    """Raises where a cross-replica method of a strategy must not be called."""
    top = _frames.entered()
    if top is not None and (top.replica is not None or top.strategy is not strategy):
        require_cross_replica(method)
        require_unmixed(strategy)
    require_loop_thread(method)
    if not at_top_level() or in_tf_function():
        require_untraced(method)


def register_state_holder(holder: Any) -> None:
    """Registers what has newer values of variables, as servers do, and how these come back."""
    _holders.add(holder)


def fetch_state(after_all: Callable[[], bool]) -> None:
    """Lets all variables hold their newest values, of one moment, or what all scheduled work leaves."""
    for holder in list(_holders):
        holder.join() if after_all() else holder.write_back()


def record_step_thread() -> None:
    """Remembers that this thread runs steps."""
    _threads_of_steps.add(threading.get_ident())


def other_thread_runs_steps() -> bool:
    """Returns whether another thread than this one has run steps, and may be running one."""
    return len(_threads_of_steps) > (threading.get_ident() in _threads_of_steps)


@contextmanager
def prefetching() -> Iterator[None]:
    """Marks this thread as one that reads batches for a loop in another thread."""
    _doing.reads_ahead = True
    try:
        yield
    finally:
        _doing.reads_ahead = False


@contextmanager
def one_dispatch() -> Iterator[None]:
    """Marks the batches that are taken for one dispatch: only before the first is a step over."""
    _doing.batches_taken = 0
    try:
        yield
    finally:
        _doing.batches_taken = None


def is_between_steps() -> bool:
    """Returns whether the steps of all batches taken so far have run, as a batch is taken."""
    if _doing.batches_taken is None:
        return True
    _doing.batches_taken += 1
    return _doing.batches_taken == 1


plan_hooks: list[Callable[[Callable[[int | None], Any]], None]] = []
"""What to call, where there is such, in place of compiling the next step, with what plans that step."""


def require_loop_thread(method: str) -> None:
    """Raises in a thread that reads batches ahead of the loop, which would wait for the loop itself."""
    if _doing.reads_ahead:
        raise ContextError(
            f"{method} was called by a source of batches, in the thread that reads ahead of the loop. Two "
            "programs at once could wait for each other without end, and would use weights of an earlier "
            "step. Pass InputOptions(experimental_per_replica_buffer_size=0): then each batch is read in "
            "the loop's own thread, when it is asked for."
        )


def require_cross_replica(method: str) -> None:
    """Raises inside ``run``, where cross-replica methods make no sense."""
    if _frames.in_replica_context():
        raise ContextError(
            f"{method} was called inside a function given to strategy.run, on one replica. Method "
            "requires being in cross-replica context, use get_replica_context().merge_call() to "
            "reach it, or call it outside of run."
        )


def in_merge_call() -> bool:
    """Returns whether this is the inside of ``merge_call`` in a step that is being compiled."""
    top = _frames.entered()
    return top is not None and top.merging and not at_top_level()


def require_outside_step(method: str) -> None:
    """Raises in ``merge_call`` too, whose code is part of the step of every replica."""
    if in_merge_call():
        raise ContextError(
            f"{method} was called inside merge_call. What merge_call does is part of the step that "
            "strategy.run compiles, and a program cannot start another one or make data. Call the function "
            "itself, or strategy.extended.update(variable, fn) to change a variable; start other programs "
            "outside of run."
        )


def require_unmixed(strategy: Any) -> None:
    """Raises where another strategy than this one is current."""
    top = _frames.entered()
    if top is not None and top.strategy is not strategy:
        raise MixedStrategiesError(
            f"Mixing different tf.distribute.Strategy objects: {top.strategy!r} is current, and "
            f"{strategy!r} was used inside its scope. Leave the first scope before using the other."
        )


def in_tf_function() -> bool:
    """Returns whether this is inside of a ``tf.function``."""
    tf = sys.modules.get("tensorflow")
    return tf is not None and not getattr(tf, "executing_eagerly", at_top_level)()


def require_untraced(method: str) -> None:
    """Raises under the user's own jit, grad, vmap or scan, which our methods cannot be part of."""
    if in_tf_function():
        raise ContextError(
            f"{method} was called inside a tf.function. Leave @tf.function out: strategy.run compiles the "
            "step, and a loop over batches is plain Python."
        )
    if at_top_level() or in_merge_call():
        return
    raise ContextError(
        f"{method} was called inside a function that JAX is tracing (jax.jit, nnx.jit, grad, vmap or "
        "scan). strategy.run compiles its function itself: remove the jit around it. The function "
        "given to run may itself be jitted or use any transformation."
    )
