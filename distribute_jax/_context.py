"""Who is current on this thread: which strategy, and inside ``run`` which replica."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from distribute_jax._errors import ContextError, MixedStrategiesError
from distribute_jax._jax_private import at_top_level


@dataclass(frozen=True, eq=False)
class Frame:
    """One entry of the thread's stack."""

    strategy: Any
    """The strategy that is current."""
    replica: Any = None
    """The replica context inside ``run``; None in cross-replica context."""
    merging: bool = False
    """Whether this is the inside of ``merge_call``, where cross-replica methods are traced."""


class _Stack(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.reads_ahead = False
        self.batches_taken: int | None = None


_stack = _Stack()
_threads_of_steps: set[int] = set()
_default: list[Callable[[], Frame]] = []
_holders: weakref.WeakSet[Any] = weakref.WeakSet()


def set_default(make: Callable[[], Frame]) -> None:
    """Registers what is current where nothing was entered; the strategies call this once."""
    _default[:] = [make]


def entered() -> Frame | None:
    """Returns the innermost frame of this thread, or None where none was entered."""
    return _stack.frames[-1] if _stack.frames else None


def default() -> Frame:
    """Returns the frame that stands in where none was entered."""
    return _default[0]()


def current() -> Frame:
    """Returns the innermost frame of this thread, or the default one."""
    return _stack.frames[-1] if _stack.frames else default()


def push(frame: Frame) -> None:
    """Makes a frame current."""
    _stack.frames.append(frame)


def pop(frame: Frame) -> None:
    """Leaves a frame, which must be the current one."""
    if entered() is not frame:
        raise ContextError(
            "A strategy scope was left in the wrong order: another scope that was entered later is "
            "still open. Leave the inner one first, or nest the `with` statements."
        )
    _stack.frames.pop()


@contextmanager
def frame(strategy: Any, replica: Any = None, *, merging: bool = False) -> Iterator[None]:
    """Makes a strategy, and maybe a replica, current for the block."""
    new, below = Frame(strategy, replica, merging), len(_stack.frames)
    push(new)
    try:
        yield
        pop(new)
    finally:
        del _stack.frames[below:]  # a scope left open inside ends with the block


def require_method(strategy: Any, method: str) -> None:
    """Raises where a cross-replica method of a strategy must not be called."""
    top = entered()
    if top is not None and (top.replica is not None or top.strategy is not strategy):
        require_cross_replica(method)
        require_unmixed(strategy)
    require_loop(method)
    if not at_top_level():
        require_untraced(method)


def keeps_state(holder: Any) -> None:
    """Registers what has newer values of variables, as servers do, and how these come back."""
    _holders.add(holder)


def bring_state(after_all: Callable[[], bool]) -> None:
    """Lets all variables hold their newest values, of one moment, or what all scheduled work leaves."""
    for holder in list(_holders):
        holder.join() if after_all() else holder.write_back()


def note_step() -> None:
    """Remembers that this thread runs steps."""
    _threads_of_steps.add(threading.get_ident())


def other_thread_runs_steps() -> bool:
    """Returns whether another thread than this one has run steps, and may be running one."""
    return len(_threads_of_steps) > (threading.get_ident() in _threads_of_steps)


@contextmanager
def reading_ahead() -> Iterator[None]:
    """Marks this thread as one that reads batches for a loop in another thread."""
    _stack.reads_ahead = True
    try:
        yield
    finally:
        _stack.reads_ahead = False


@contextmanager
def taking_several() -> Iterator[None]:
    """Marks the batches that are taken for one dispatch: only before the first is a step over."""
    _stack.batches_taken = 0
    try:
        yield
    finally:
        _stack.batches_taken = None


def is_between_steps() -> bool:
    """Returns whether the steps of all batches taken so far have run, as a batch is taken."""
    if _stack.batches_taken is None:
        return True
    _stack.batches_taken += 1
    return _stack.batches_taken == 1


_show_program: list[Callable[[Callable[[int | None], Any]], None]] = []


@contextmanager
def showing_first_program(show: Callable[[Callable[[int | None], Any]], None]) -> Iterator[None]:
    """Calls ``show`` in place of compiling the next step, with what plans that for a number of replicas."""
    _show_program.append(show)
    try:
        yield
    finally:
        _show_program.clear()


def show_program(plan: Callable[[int | None], Any]) -> None:
    """Shows a step that is about to be compiled, if that was asked for."""
    if _show_program:
        _show_program.pop()(plan)


def require_loop(method: str) -> None:
    """Raises in a thread that reads batches ahead of the loop, which would wait for the loop itself."""
    if _stack.reads_ahead:
        raise ContextError(
            f"{method} was called by a source of batches, in the thread that reads ahead of the loop. Two "
            "programs at once could wait for each other without end, and would use weights of an earlier "
            "step. Pass InputOptions(experimental_per_replica_buffer_size=0): then each batch is read in "
            "the loop's own thread, when it is asked for."
        )


def require_cross_replica(method: str) -> None:
    """Raises inside ``run``, where cross-replica methods make no sense."""
    top = entered()
    if top is not None and top.replica is not None:
        raise ContextError(
            f"{method} was called inside a function given to strategy.run, on one replica. Method "
            "requires being in cross-replica context, use get_replica_context().merge_call() to "
            "reach it, or call it outside of run."
        )


def merging() -> bool:
    """Returns whether this is the inside of ``merge_call`` in a step that is being compiled."""
    top = entered()
    return top is not None and top.merging and not at_top_level()


def require_outside_step(method: str) -> None:
    """Raises in ``merge_call`` too, whose code is part of the step of every replica."""
    if merging():
        raise ContextError(
            f"{method} was called inside merge_call. What merge_call does is part of the step that "
            "strategy.run compiles, and a program cannot start another one or make data. Call the function "
            "itself, or strategy.extended.update(variable, fn) to change a variable; start other programs "
            "outside of run."
        )


def require_unmixed(strategy: Any) -> None:
    """Raises where another strategy than this one is current."""
    top = entered()
    if top is not None and top.strategy is not strategy:
        raise MixedStrategiesError(
            f"Mixing different tf.distribute.Strategy objects: {top.strategy!r} is current, and "
            f"{strategy!r} was used inside its scope. Leave the first scope before using the other."
        )


def require_untraced(method: str) -> None:
    """Raises under the user's own jit, grad, vmap or scan, which our methods cannot be part of."""
    if at_top_level() or merging():
        return
    raise ContextError(
        f"{method} was called inside a function that JAX is tracing (jax.jit, nnx.jit, grad, vmap or "
        "scan). strategy.run compiles its function itself: remove the jit around it. The function "
        "given to run may itself be jitted or use any transformation."
    )
