"""Where a captured value is kept, so that it can be read again and swapped while tracing."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Iterable
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


class Attribute:
    """An attribute that is in no dict of its object: of a class, or in a slot."""

    __slots__ = ("name", "owner")
    can_set = True

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner
        self.name = name

    def get(self) -> Any:
        """Reads the attribute; one that is gone gives the unassigned marker."""
        return getattr(self.owner, self.name, UNASSIGNED)

    def set(self, value: Any) -> None:
        """Assigns the attribute, of a frozen object too."""
        if isinstance(self.owner, type):
            type.__setattr__(self.owner, self.name, value)
        else:
            object.__setattr__(self.owner, self.name, value)


class Argument:
    """An argument of a ``functools.partial``, by position or by name."""

    __slots__ = ("key", "owner")
    can_set = True

    def __init__(self, owner: functools.partial[Any], key: int | str) -> None:
        self.owner = owner
        self.key = key

    def get(self) -> Any:
        """Reads the argument."""
        return (
            self.owner.args[self.key]
            if isinstance(self.key, int)
            else self.owner.keywords[self.key]
        )

    def set(self, value: Any) -> None:
        """Replaces the argument in the partial itself."""
        partial, args, keywords = self.owner, self.owner.args, dict(self.owner.keywords)
        if isinstance(self.key, int):
            args = (*args[: self.key], value, *args[self.key + 1 :])
        else:
            keywords[self.key] = value
        state = (partial.func, args, keywords, vars(partial) or None)
        partial.__setstate__(state)  # type: ignore[attr-defined]


class Default:
    """A default value of a function's argument."""

    __slots__ = ("function", "index")
    can_set = True

    def __init__(self, function: types.FunctionType, index: int) -> None:
        self.function = function
        self.index = index

    def get(self) -> Any:
        """Reads the default."""
        return (self.function.__defaults__ or ())[self.index]

    def set(self, value: Any) -> None:
        """Gives the function another default."""
        old = self.function.__defaults__ or ()
        self.function.__defaults__ = (*old[: self.index], value, *old[self.index + 1 :])


class Fixed:
    """A value that sits where nothing can be assigned: in a frozenset, or behind a read-only view."""

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


Place = Cell | Item | Member | Attribute | Argument | Default | Fixed


def anchor(place: Place) -> Place:
    """Gives the outermost place that is assigned when this one is."""
    while isinstance(place, Member):
        place = place.owner
    return place


_contents = operator.attrgetter("cell_contents")


def cell_values(cells: Iterable[types.CellType]) -> list[Any]:
    """Reads closure cells, in C where all are assigned: this is done at every call of ``run``."""
    try:
        return list(map(_contents, cells))
    except ValueError:
        return list(map(cell_value, cells))


def cell_value(cell: types.CellType) -> Any:
    """Reads a closure cell; a name that is not assigned yet gives a marker."""
    try:
        return cell.cell_contents
    except ValueError:
        return UNASSIGNED
