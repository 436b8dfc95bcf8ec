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


class Member:
    """An element of a tuple: assigning it puts a new tuple into the place of the old one."""

    __slots__ = ("index", "owner")

    def __init__(self, owner: Place, index: int) -> None:
        self.owner = owner
        self.index = index

    @property
    def can_set(self) -> bool:
        """Whether the tuple's own place can be assigned."""
        return self.owner.can_set

    def get(self) -> Any:
        """Reads the element; one that is gone gives the unassigned marker."""
        try:
            return self.owner.get()[self.index]
        except (LookupError, TypeError):
            return UNASSIGNED

    def set(self, value: Any) -> None:
        """Replaces the tuple by one with another element."""
        old = self.owner.get()
        items = (*old[: self.index], value, *old[self.index + 1 :])
        self.owner.set(type(old)(*items) if hasattr(old, "_fields") else items)


class Fixed:
    """A value that sits where nothing can be assigned: a default, the argument of a partial."""

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


Place = Cell | Item | Member | Fixed


def anchor(place: Place) -> Place:
    """Gives the outermost place that is assigned when this one is."""
    while isinstance(place, Member):
        place = place.owner
    return place


def cell_value(cell: types.CellType) -> Any:
    """Reads a closure cell; a name that is not assigned yet gives a marker."""
    try:
        return cell.cell_contents
    except ValueError:
        return UNASSIGNED
