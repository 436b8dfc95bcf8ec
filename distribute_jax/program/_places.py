"""Paths to captured values: reading, replacing while tracing, and noticing that one was replaced."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import numpy as np

from distribute_jax._jax_private import metadata_entries, read_metadata

UNASSIGNED = object()
"""What a closure cell gives before the enclosing function has assigned the name."""


@dataclass(slots=True, eq=False)
class ItemPath:
    """A value of a dict or list: a global, an attribute, an element."""

    container: Any
    key: Any
    can_set = True

    def get(self) -> Any:
        """Reads the element; one that is gone gives the unassigned marker."""
        try:
            return self.container[self.key]
        except LookupError:
            return UNASSIGNED

    def set(self, value: Any) -> None:
        """Assigns the element."""
        self.container[self.key] = value


@dataclass(slots=True, eq=False)
class MemberPath:
    """An element of a tuple: assigning it puts a new tuple into the place of the old one."""

    owner: CapturePath
    index: int

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


@dataclass(slots=True, eq=False)
class AttributePath:
    """What is in no dict: an attribute of a class or in a slot, a closure cell, defaults, partial's args."""

    owner: Any
    name: str
    can_set = True

    def get(self) -> Any:
        """Reads the attribute; one that is gone gives the unassigned marker."""
        try:
            return getattr(self.owner, self.name, UNASSIGNED)
        except ValueError:  # a closure cell whose name is not assigned yet
            return UNASSIGNED

    def set(self, value: Any) -> None:
        """Assigns the attribute, of a frozen object too."""
        owner = self.owner
        if isinstance(owner, type):
            type.__setattr__(owner, self.name, value)
        elif isinstance(owner, functools.partial):
            state = (owner.func, value, owner.keywords, vars(owner) or None)
            owner.__setstate__(state)  # type: ignore[attr-defined]
        else:
            object.__setattr__(owner, self.name, value)


@dataclass(slots=True, eq=False)
class FixedValue:
    """A value that sits where nothing can be assigned: in a frozenset, or behind a read-only view."""

    value: Any
    can_set = False

    def get(self) -> Any:
        """Returns the value."""
        return self.value

    def set(self, value: Any) -> None:
        """Refuses: nothing can be assigned here."""
        raise TypeError(f"a fixed place cannot be assigned {value!r}")


CapturePath = ItemPath | MemberPath | AttributePath | FixedValue


_contents = operator.attrgetter("cell_contents")


def cell_values(cells: Iterable[types.CellType]) -> list[Any]:
    """Reads closure cells, in C where all are assigned: this is done at every call of ``run``."""
    try:
        return list(map(_contents, cells))
    except ValueError:
        return [AttributePath(cell, "cell_contents").get() for cell in cells]


class IdentityGuard:
    """Containers, attributes, globals and cells whose contents must stay the same objects.

    All reading is done by maps over C functions, since it happens at every call of ``run``.
    """

    def __init__(self) -> None:
        self._contents: list[Iterable[Any]] = []
        self._items: dict[tuple[int, str], dict[Any, Any]] = {}
        self._class_items: dict[tuple[int, str], types.MappingProxyType[str, Any]] = {}
        self._attributes: list[tuple[Any, str]] = []
        self._variables: list[Any] = []
        self._with_metadata: list[Any] = []
        self._cells: list[types.CellType] = []
        self._bytes: list[tuple[Any, bytes]] = []
        self.containers: list[dict[Any, Any] | list[Any]] = []
        """The dicts and lists whose contents a step may change while it is traced."""
        self.weak: list[Any] = []
        """The variables with an array of a weak type, which adopts the dtype of what it meets."""

    def contents(self, items: Iterable[Any]) -> None:
        """Watches every item of a list, set, deque or bytearray."""
        self._contents.append(items)
        if isinstance(items, list):
            self.containers.append(items)

    def table(self, table: Mapping[Any, Any]) -> None:
        """Watches every key and value of a mapping."""
        if isinstance(table, dict):
            self.containers.append(table)
        # A view follows its dict, so that reading everything again is one pass in C.
        self._contents += (table.keys(), table.values())

    def item(self, table: dict[Any, Any], key: str) -> None:
        """Watches one entry of a dict: a global, or an attribute of a plain object."""
        self._items[id(table), key] = table

    def class_item(self, owner: type, key: str) -> None:
        """Watches one attribute in the class that it is, or would be, written in."""
        self._class_items[id(owner), key] = vars(owner)

    def attribute(self, owner: Any, name: str) -> None:
        """Watches an attribute that is in no dict: one in a slot."""
        self._attributes.append((owner, name))

    def metadata_of(self, variable: Any) -> None:
        """Watches the metadata of a variable: the user's entries, and whether any are added."""
        self._variables.append(variable)
        [table] = read_metadata([variable])
        if len(table) > len(variable.required_metadata):
            self._with_metadata.append(variable)

    def cells(self, cells: Iterable[types.CellType]) -> None:
        """Watches closure cells."""
        self._cells += cells

    def bytes_of(self, array: np.ndarray[Any, Any]) -> None:
        """Watches the numbers of a small NumPy array, which may be changed in place."""
        self._bytes.append((array, array.tobytes()))

    def seal(self) -> None:
        """Prepares the lists that ``look`` reads, once all is known."""
        self._tables, self._keys = list(self._items.values()), [key for _, key in self._items]
        self._class_tables = list(self._class_items.values())
        self._class_keys = [key for _, key in self._class_items]
        self._metadata = metadata_entries(self._variables)
        self._owners = [owner for owner, _ in self._attributes]
        self._names = [name for _, name in self._attributes]

    def look(self) -> list[Any]:
        """Reads every watched object."""
        return [
            *chain.from_iterable(self._contents),
            *map(dict.get, self._tables, self._keys),
            *map(types.MappingProxyType.get, self._class_tables, self._class_keys),
            *map(getattr, self._owners, self._names, repeat(UNASSIGNED)),
            *chain.from_iterable(map(dict.values, read_metadata(self._with_metadata))),
            *cell_values(self._cells),
        ]

    def same_numbers(self) -> bool:
        """Whether no small NumPy array was changed in place, no metadata added, no weak type got a dtype."""
        return (
            metadata_entries(self._variables) == self._metadata
            and (not self._bytes or all(array.tobytes() == old for array, old in self._bytes))
            and (not self.weak or all(map(_is_weak, self.weak)))
        )

    def release(self) -> None:
        """Lets go of everything."""
        self.__init__()  # type: ignore[misc]
        self.seal()


def _is_weak(variable: Any) -> bool:
    return bool(getattr(variable.get_raw_value(), "weak_type", False))
