"""Warnings that point at the user's line, and tracebacks without the library's frames."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import warnings
from collections.abc import Hashable, Iterator
from pathlib import Path
from types import FrameType, TracebackType

from distribute_jax._errors import DistributeError

_LOG = logging.getLogger("distribute_jax")
_logged: set[Hashable] = set()
_PACKAGE = str(Path(__file__).parent) + os.sep


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
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level, frame


VARIABLE = "DISTRIBUTE_JAX_FULL_TRACEBACK"

_CONTEXTLIB = contextlib.__file__
_JAX_NOTE = "JAX has removed its internal frames"


def hide_frames(error: BaseException) -> None:
    """Removes the frames of this library from the tracebacks of an error and of its causes.

    ``DISTRIBUTE_JAX_FULL_TRACEBACK=1`` shows all.
    """
    if os.environ.get(VARIABLE, "0") not in ("", "0"):
        return
    for each in _chain(error):
        each.__traceback__ = _without_library(each.__traceback__)
        notes: list[str] = getattr(each, "__notes__", [])
        if isinstance(each, DistributeError):
            notes[:] = [note for note in notes if _JAX_NOTE not in note]


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error, its cause or context, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _without_library(traceback: TracebackType | None) -> TracebackType | None:
    frames: list[TracebackType] = []
    hidden = False
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        hidden = file.startswith(_PACKAGE) or (hidden and file == _CONTEXTLIB)
        if not hidden:
            frames.append(traceback)
        traceback = traceback.tb_next
    for entry in reversed(frames):
        traceback = TracebackType(traceback, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return traceback
