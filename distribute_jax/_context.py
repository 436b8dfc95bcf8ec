"""What the current thread is doing, and checks that refuse calls that it must not make meanwhile."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from distribute_jax import _frames
from distribute_jax._errors import ContextError, MixedStrategiesError
from distribute_jax._jax_private import at_top_level, backend_is_started


class _ThreadState(threading.local):
    refusal = ""
    """Why this thread must not run programs, as the second half of a sentence."""
    batches_taken: int | None = None


_CONFIG: Any = jax.config
_thread = _ThreadState()
_step_threads: set[int] = set()
_state_holders: weakref.WeakSet[Any] = weakref.WeakSet()


def require_method(strategy: Any, method: str, *, starts_program: bool = False) -> None:
    """Raises if a cross-replica method of a strategy must not be called here."""
    frames = _frames.stack.frames  # every call of run comes here
    if frames and (frames[-1].replica is not None or frames[-1].strategy is not strategy):
        require_cross_replica(method)
        require_unmixed(strategy)
    if _thread.refusal:
        require_loop_thread(method)
    if not at_top_level() or in_tf_function():
        if starts_program:
            require_outside_step(method)
        require_untraced(method)
    if _CONFIG.jax_disable_jit:
        raise ContextError(
            f"{method} was called under jax.disable_jit, but its programs run on several devices at once "
            "and must be compiled. Remove jax.disable_jit: look at values with jax.debug.print in the "
            "step, or call the function itself, without strategy.run, on the batch of one replica."
        )


def register_state_holder(holder: Any) -> None:
    """Registers an object, such as a coordinator, that has newer values than the variables."""
    _state_holders.add(holder)


def fetch_state(wanted: Callable[[], tuple[set[int], bool]]) -> None:
    """Writes a consistent snapshot back to variables, by their ids; if wanted, that after all work."""
    for holder in list(_state_holders):
        holder.write_back(*wanted())


def record_step_thread() -> None:
    """Records that this thread runs steps."""
    _step_threads.add(threading.get_ident())


def other_thread_runs_steps() -> bool:
    """True if a thread other than this one has run steps, and may be running one now."""
    others = _step_threads - {threading.get_ident()}
    return bool(others) and any(thread.ident in others for thread in threading.enumerate())


@contextmanager
def prefetching() -> Iterator[None]:
    """Marks this thread as one that prefetches batches for a loop in another thread."""
    _thread.refusal = _PREFETCHES
    try:
        yield
    finally:
        _thread.refusal = ""


@contextmanager
def one_dispatch() -> Iterator[None]:
    """Marks the batches that are taken in the block as those of one dispatch of several steps."""
    _thread.batches_taken = 0
    try:
        yield
    finally:
        _thread.batches_taken = None


def is_between_steps() -> bool:
    """True if the steps of all batches taken so far have been dispatched; call it once for each batch."""
    if _thread.batches_taken is None:
        return True
    _thread.batches_taken += 1
    return _thread.batches_taken == 1


plan_hooks: list[Callable[[Callable[[int | None], Any]], None]] = []
"""Functions to call in place of compiling the next step, with one that plans it for N replicas."""


_PREFETCHES = """\
by a source of batches, in the thread that reads ahead of the loop. Two programs at once could deadlock, and \
would use weights of an earlier step. Pass InputOptions(experimental_per_replica_buffer_size=0): then each \
batch is read in the loop's own thread, when it is asked for."""
_FORKED = """\
in a process that was forked from one in which JAX had started. JAX's threads do not exist here, so programs \
would hang. Start processes with multiprocessing.get_context("spawn"), or fork before anything uses JAX."""


def require_loop_thread(method: str) -> None:
    """Raises in a prefetching thread, which would wait for the loop that waits for it, and after a fork."""
    if _thread.refusal:
        raise ContextError(f"{method} was called {_thread.refusal}")


def _after_fork() -> None:
    if backend_is_started():
        _ThreadState.refusal = _FORKED


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def require_cross_replica(method: str) -> None:
    """Raises inside ``run``."""
    if _frames.in_replica_context():
        raise ContextError(
            f"{method} was called inside a function given to strategy.run, on one replica. Method "
            "requires being in cross-replica context, use get_replica_context().merge_call() to "
            "reach it, or call it outside of run."
        )


def in_merge_call() -> bool:
    """True inside ``merge_call`` of a step that is being traced."""
    top = _frames.entered()
    return top is not None and top.merging and not at_top_level()


def require_outside_step(method: str) -> None:
    """Raises in ``merge_call``, whose code is part of the step."""
    if in_merge_call():
        raise ContextError(
            f"{method} was called inside merge_call. What merge_call does is part of the step that "
            "strategy.run compiles, and a program cannot start another one or create datasets. Call the "
            "function itself, or strategy.extended.update(variable, fn) to change a variable; start other "
            "programs outside of run."
        )


def require_unmixed(strategy: Any) -> None:
    """Raises if another strategy is current."""
    top = _frames.entered()
    if top is not None and top.strategy is not strategy:
        raise MixedStrategiesError(
            f"Mixing different tf.distribute.Strategy objects: {top.strategy!r} is current, and "
            f"{strategy!r} was used inside its scope. Leave the first scope before using the other."
        )


def in_tf_function() -> bool:
    """True inside a ``tf.function``."""
    tf = sys.modules.get("tensorflow")
    return tf is not None and not getattr(tf, "executing_eagerly", at_top_level)()


def require_untraced(method: str) -> None:
    """Raises under the user's own jit, grad, vmap or scan, or in a ``tf.function``."""
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
