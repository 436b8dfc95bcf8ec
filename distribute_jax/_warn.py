"""Warnings that point to the line that the user wrote."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Hashable
from pathlib import Path
from types import FrameType

_LOG = logging.getLogger("distribute_jax")
_logged: set[Hashable] = set()
_PACKAGE = str(Path(__file__).parent)


def warn_user(text: str) -> None:
    """Warns at the innermost line that is none of this library's."""
    warnings.warn(text, stacklevel=_users_frame()[0])


def log_once(text: str, *named: object, about: Hashable = None) -> None:
    """Logs a warning, the first time that this text is logged about this object."""
    if (text, about) not in _logged:
        _logged.add((text, about))
        _LOG.warning(text, *named)


def users_line() -> str:
    """Returns that line, as ``file:line``."""
    frame = _users_frame()[1]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "an unknown line"


def _users_frame() -> tuple[int, FrameType | None]:
    """Returns the innermost frame outside of this library, and how far it is from the caller."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level, frame
