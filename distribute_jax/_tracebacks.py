"""Tracebacks without the frames of this library, as JAX leaves out its own."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from distribute_jax._errors import DistributeError

P = ParamSpec("P")
R = TypeVar("R")

VARIABLE = "DISTRIBUTE_JAX_FULL_TRACEBACK"

_LIBRARY = str(Path(__file__).parent) + os.sep
_BETWEEN = contextlib.__file__
_NOTE_OF_JAX = "JAX has removed its internal frames"


def frames_hidden(fn: Callable[P, R]) -> Callable[P, R]:
    """Makes errors that leave a public function show the user's lines only.

    ``DISTRIBUTE_JAX_FULL_TRACEBACK=1`` shows all.
    """

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return fn(*args, **kwargs)
        except BaseException as error:
            hide_frames(error)
            raise

    return call


def hide_frames(error: BaseException) -> None:
    """Takes the frames of this library out of the traceback of an error and of its causes."""
    if os.environ.get(VARIABLE, "0") not in ("", "0"):
        return
    for each in _chain(error):
        each.__traceback__ = _without_library(each.__traceback__)
        notes: list[str] = getattr(each, "__notes__", [])
        if isinstance(each, DistributeError):
            notes[:] = [note for note in notes if _NOTE_OF_JAX not in note]


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and what is printed above it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _without_library(found: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    hidden = False
    while found is not None:
        file = found.tb_frame.f_code.co_filename
        hidden = file.startswith(_LIBRARY) or (hidden and file == _BETWEEN)
        if not hidden:
            kept.append(found)
        found = found.tb_next
    rest = None
    for one in reversed(kept):
        rest = TracebackType(rest, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return rest
