"""Every exception of the library; warnings at the user's line, tracebacks without library frames.

Each exception is a ``DistributeError``, and the builtin that a user of TensorFlow would catch. Messages about
a step or its data say what failed, where in the tree, what was received, the rule, and what to type next;
messages about arguments are one line. ``docs/errors.md`` has the cause and the cure of each.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import os
import sys
import warnings
from collections.abc import Hashable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

MORE = "More on this error: distribute-jax explain"


class DistributeError(Exception):
    """The base class of the errors of this library; long messages end with the command that explains them."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        _shorten_uncaught()

    def __str__(self) -> str:
        text = super().__str__()
        if "\n" not in text or MORE in text or isinstance(self, ArgumentError):
            return text
        return f"{text.rstrip()}\n{MORE} {type(self).__name__}"


class ContextError(DistributeError, RuntimeError):
    """A method was called in a context that does not allow it."""


class IterationError(ContextError, ValueError):
    """A distributed dataset was iterated inside ``run``, on one replica."""


class MixedStrategiesError(ContextError):
    """An object of one strategy was used while another strategy was current."""


class DeadlockError(DistributeError, RuntimeError):
    """A collective might not be reached by every replica, so the step could hang."""


class DonatedError(DistributeError, RuntimeError):
    """An array was read after it had been donated to a step, which reused its memory."""


class CancelledError(DistributeError, RuntimeError):
    """A scheduled function did not run, since another one had failed."""


class EndOfDataError(DistributeError, StopIteration):
    """A scheduled function took an element from a per-worker iterator that had no more."""


class StepFailedError(DistributeError, RuntimeError):
    """The compiled step failed while running, after its state had been donated to it."""


class StepsSkippedError(DistributeError, ArithmeticError):
    """Too many steps in a row were skipped for their numbers; none of them changed anything."""


class BackendStartedError(DistributeError, RuntimeError):
    """JAX had already started its devices when a call tried to choose them."""


class ArgumentError(DistributeError, ValueError):
    """An argument has the wrong structure, shape, dtype or value."""


class CheckpointError(DistributeError, ValueError):
    """A tree cannot be saved, or a checkpoint does not match the tree that it should be restored into."""


class CheckpointDamagedError(CheckpointError):
    """The files of a checkpoint are damaged: they are not what was saved."""


class CheckpointFileError(CheckpointError, OSError):
    """The file system failed to write or to read a checkpoint."""


class TFConfigError(ArgumentError, json.JSONDecodeError):
    """The environment variable TF_CONFIG is not JSON; the message has the position."""


class TaskConflictError(ArgumentError, KeyError):
    """Two clusters that are joined have different addresses for the same task."""

    __str__ = Exception.__str__  # a KeyError would show the text in quotes


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument has the wrong type."""


class ClusterError(DistributeError, RuntimeError):
    """The environment of the process does not describe the cluster correctly, or not at all."""


class NoClusterError(ClusterError):
    """No cluster was detected; the message lists what was looked for."""


class ProcessesDifferError(ClusterError):
    """The processes of a job differ in something that must be equal on all of them."""


class DeadlineExceededError(DistributeError, TimeoutError):
    """A process did not connect, or a collective did not end, in time; the message names the process."""


class ServiceError(ClusterError):
    """A service that knows the cluster did not answer in time, or refused a request.

    ``status`` is the HTTP status of a refusal; None if there was no answer.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ProcessFailedError(DistributeError, RuntimeError):
    """A process of a ``LocalCluster`` failed, or did not end in time; the message has its output."""


class MissingPackageError(DistributeError, ImportError):
    """An optional package that is needed is not installed."""


class OutOfSyncError(DistributeError, ValueError):
    """State, or a result with the structure of state, would differ between replicas."""


class PaddingLeakError(DistributeError, ValueError):
    """The padding of a partial batch changed the state or a result."""


class NotEqualError(DistributeError, ValueError):
    """The step on several replicas is not equal to the step on one device."""


class StaleCaptureError(DistributeError, ValueError):
    """The step captured an array in a way in which later calls would not see changes."""


class PerReplicaError(DistributeError, ValueError):
    """A per-replica value was used where one array is needed."""


class PerReplicaAttributeError(PerReplicaError, AttributeError):
    """An attribute of single arrays, such as ``shape`` or ``numpy``, was read from a per-replica value."""


class PerReplicaTypeError(DistributeError, TypeError):
    """A per-replica value was used in arithmetic outside ``run``."""


class TracedValueError(DistributeError, TypeError):
    """Python code needed the value of a number that is traced inside ``run``."""


class LoweringError(DistributeError, NotImplementedError):
    """The chosen lowering cannot run a step under this strategy."""


class UnsupportedError(DistributeError, NotImplementedError):
    """The strategy, or the method, does not support an option."""


_LOG = logging.getLogger("distribute_jax")
_logged: set[Hashable] = set()
_FILES = (str(Path(__file__).parent) + os.sep, contextlib.__file__)
"""The files of this library and of its context managers, as the beginnings of paths."""


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line outside this library."""
    warnings.warn(text, category, stacklevel=_users_frame()[0])


def log_once(text: str, *named: object, about: Hashable = None) -> None:
    """Logs a warning once for each text and ``about``."""
    if (text, about) not in _logged:
        _logged.add((text, about))
        _LOG.warning(text, *named)


def users_line() -> str:
    """Returns the innermost line outside this library, as ``file:line``."""
    frame = _users_frame()[1]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "an unknown line"


def _users_frame() -> tuple[int, FrameType | None]:
    """Returns the stack level of the innermost frame outside this library, and the frame."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_FILES):
        level, frame = level + 1, frame.f_back
    return level, frame


VARIABLE = "DISTRIBUTE_JAX_FULL_TRACEBACK"

_HIDDEN = ("distribute_jax", "jax", "numpy", "flax", "optax")
_CALL_BACK = ("contextlib", "importlib")
_JAX_NOTE = "JAX has removed its internal frames"
_NOTE = f"Frames of JAX, Flax and distribute_jax are left out; {VARIABLE}=1 shows them."


def hide_frames(error: BaseException) -> None:
    """Removes frames of JAX, Flax and this library from the tracebacks of an error and of its causes.

    ``DISTRIBUTE_JAX_FULL_TRACEBACK=1`` shows all.
    """
    if os.environ.get(VARIABLE, "0") not in ("", "0"):
        return
    for each in _chain(error):
        each.__traceback__ = _users_frames(each.__traceback__)
        notes: list[str] = getattr(each, "__notes__", [])
        shown = [] if isinstance(each, DistributeError) else [_NOTE]
        notes[:] = [n for note in notes for n in (shown if _JAX_NOTE in note else [note])]


@functools.cache
def _shorten_uncaught() -> None:
    """Hides frames of uncaught errors too: a step that is called without ``run`` fails deep inside Flax."""
    outer = sys.excepthook

    def print_short(kind: Any, error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, DistributeError):
            hide_frames(error)
        outer(kind, error, error.__traceback__)

    sys.excepthook = print_short


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error, its cause or context, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _users_frames(traceback: TracebackType | None) -> TracebackType | None:
    frames: list[TracebackType] = []
    hidden = False
    while traceback is not None:
        module = str(traceback.tb_frame.f_globals.get("__name__"))
        package = module.partition(".")[0]
        hidden = package in _HIDDEN or (hidden and package in _CALL_BACK)
        if not hidden:
            frames.append(traceback)
        traceback = traceback.tb_next
    for entry in reversed(frames):
        traceback = TracebackType(traceback, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return traceback
