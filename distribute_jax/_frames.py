"""The thread-local stack of current strategies and, inside ``run``, replicas."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from distribute_jax._errors import ContextError


@dataclass(frozen=True, eq=False)
class Frame:
    """One entry of the thread's stack."""

    strategy: Any
    replica: Any = None
    """The replica context inside ``run``; None in cross-replica context."""
    merging: bool = False
    """True inside ``merge_call``, where cross-replica methods are traced."""
    leave: Callable[[], None] = lambda: None
    """Exits the contexts that were entered with the strategy, such as its mesh."""


class _Stack(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []


stack = _Stack()
_default: list[Callable[[], Frame]] = []


def set_default(make: Callable[[], Frame]) -> None:
    """Sets what makes the default frame; ``strategies`` calls this once."""
    _default[:] = [make]


def entered() -> Frame | None:
    """Returns the innermost frame of this thread, or None."""
    return stack.frames[-1] if stack.frames else None


def default() -> Frame:
    """Returns the frame that is current on a thread that has entered none."""
    return _default[0]()


def current() -> Frame:
    """Returns the innermost frame of this thread, or the default one."""
    return stack.frames[-1] if stack.frames else default()


def in_replica_context() -> bool:
    """True inside ``run``, as one replica."""
    return bool(stack.frames) and stack.frames[-1].replica is not None


def push(frame: Frame) -> None:
    stack.frames.append(frame)


def pop(frame: Frame) -> None:
    """Leaves a frame, which must be the current one."""
    if entered() is not frame:
        raise ContextError(
            "A strategy scope was left in the wrong order: another scope that was entered later is "
            "still open. Leave the inner one first, or nest the `with` statements."
        )
    leave_to(len(stack.frames) - 1)


def depth() -> int:
    return len(stack.frames)


def leave_to(depth: int) -> None:
    """Leaves frames until ``depth`` are left, such as scopes that an interrupt has left open."""
    while len(stack.frames) > depth:
        stack.frames.pop().leave()


@contextmanager
def frame(strategy: Any, replica: Any = None, *, merging: bool = False) -> Iterator[None]:
    """Makes a strategy, and maybe a replica, current for the block."""
    new, outer_depth = Frame(strategy, replica, merging), depth()
    push(new)
    try:
        yield
        pop(new)
    finally:
        leave_to(outer_depth)  # also closes scopes that were left open in the block
