"""Where a captured value is kept, so that it can be read again and swapped while tracing."""

from __future__ import annotations

import types
from typing import Any

UNASSIGNED = object()
"""What a closure cell gives before the enclosing function has assigned the name."""


class Cell:
    """A closure variable."""

    __slots__ = ("cell",)
    can_set = True

    def __init__(self, cell: types.CellType) -> None:
        self.cell = cell

    def get(self) -> Any:
        """Reads the variable."""
        return cell_value(self.cell)

    def set(self, value: Any) -> None:
        """Assigns the variable."""
        self.cell.cell_contents = value


class Item:
    """A value of a dict or list: a global, an attribute, an element."""

    __slots__ = ("container", "key")
    can_set = True

    def __init__(self, container: Any, key: Any) -> None:
        self.container = container
        self.key = key

    def get(self) -> Any:
        """Reads the element; one that is gone gives the unassigned marker."""
        try:
            return self.container[self.key]
        except LookupError:
            return UNASSIGNED

    def set(self, value: Any) -> None:
        """Assigns the element."""
        self.container[self.key] = value


class Fixed:
    """A value that sits where nothing can be assigned: in a tuple, a default, a partial."""

    __slots__ = ("value",)
    can_set = False

    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        """Gives the value."""
        return self.value

    def set(self, value: Any) -> None:
        """Refuses: nothing can be assigned here."""
        raise TypeError(f"a fixed place cannot be assigned {value!r}")


Place = Cell | Item | Fixed


def cell_value(cell: types.CellType) -> Any:
    """Reads a closure cell; a name that is not assigned yet gives a marker."""
    try:
        return cell.cell_contents
    except ValueError:
        return UNASSIGNED
