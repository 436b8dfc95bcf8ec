"""Variables made while a step is traced are noted, so that their first values can be computed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Notes(threading.local):
    def __init__(self) -> None:
        self.lists: list[list[tuple[Any, Any]]] = []


_notes = _Notes()


@contextmanager
def noting_created() -> Iterator[list[tuple[Any, Any]]]:
    """Gives a list that every ``Variable`` made in the block joins, with its first raw value."""
    _notes.lists.append([])
    try:
        yield _notes.lists[-1]
    finally:
        _notes.lists.pop()


def note_created(variable: Any, raw: Any) -> None:
    """Notes a variable that is being made."""
    if _notes.lists:
        _notes.lists[-1].append((variable, raw))
