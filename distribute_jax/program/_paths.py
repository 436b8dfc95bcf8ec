"""Where captured values are stored: paths to read and replace them, and a guard that notices changes."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from distribute_jax._jax_private import metadata_entries, read_metadata

UNASSIGNED = object()
"""What a path reads where there is no value, as in a closure cell that is not assigned yet."""


@dataclass(slots=True, eq=False)
class ItemPath:
    """A value of a dict or list: a global, an attribute, an element."""

    container: Any
    key: Any
    can_set = True

    def get(self) -> Any:
        try:
            return self.container[self.key]
        except LookupError:
            return UNASSIGNED

    def set(self, value: Any) -> None:
        self.container[self.key] = value


@dataclass(slots=True, eq=False)
class MemberPath:
    """An element of a tuple, which is assigned by replacing the tuple where that is stored."""

    owner: CapturePath
    index: int

    @property
    def can_set(self) -> bool:
        return self.owner.can_set

    def get(self) -> Any:
        try:
            return self.owner.get()[self.index]
        except (LookupError, TypeError):
            return UNASSIGNED

    def set(self, value: Any) -> None:
        old = self.owner.get()
        items = (*old[: self.index], value, *old[self.index + 1 :])
        self.owner.set(type(old)(*items) if hasattr(old, "_fields") else items)


@dataclass(slots=True, eq=False)
class AttributePath:
    """An attribute that is not in a dict: of a class, in a slot, of a cell, a function or a partial."""

    owner: Any
    name: str
    can_set = True

    def get(self) -> Any:
        try:
            return getattr(self.owner, self.name, UNASSIGNED)
        except ValueError:  # a closure cell that is not assigned yet
            return UNASSIGNED

    def set(self, value: Any) -> None:
        owner = self.owner
        if isinstance(owner, type):
            type.__setattr__(owner, self.name, value)
        elif isinstance(owner, functools.partial):
            state = (owner.func, value, owner.keywords, vars(owner) or None)
            owner.__setstate__(state)  # type: ignore[attr-defined]
        else:
            object.__setattr__(owner, self.name, value)  # frozen objects too


@dataclass(slots=True, eq=False)
class FixedValue:
    """A value whose place cannot be assigned: in a frozenset, or behind a read-only view."""

    value: Any
    can_set = False

    def get(self) -> Any:
        return self.value

    def set(self, value: Any) -> None:
        raise TypeError(f"a fixed place cannot be assigned {value!r}")


CapturePath = ItemPath | MemberPath | AttributePath | FixedValue


_contents = operator.attrgetter("cell_contents")


def cell_values(cells: Iterable[types.CellType]) -> list[Any]:
    """Reads closure cells; in C if all are assigned, since each call of ``run`` does it."""
    try:
        return list(map(_contents, cells))
    except ValueError:
        return [AttributePath(cell, "cell_contents").get() for cell in cells]


class IdentityGuard:
    """Containers, attributes, globals and cells that must keep containing the same objects.

    All reading is done by maps over C functions, since each call of ``run`` does it.
    """

    def __init__(self) -> None:
        self._iterables: list[Iterable[Any]] = []
        self._items: dict[tuple[int, str], Callable[[str], Any]] = {}
        self.owners: list[Any] = []
        self._names: list[str] = []
        self._variables: list[Any] = []
        self._with_metadata: list[Any] = []
        self._cells: list[types.CellType] = []
        self._bytes: list[tuple[Callable[[], Any], Any]] = []
        self._tables: list[dict[str, Any]] = []
        self.containers: list[dict[Any, Any] | list[Any]] = []
        """The dicts and lists whose contents a step may change while it is traced."""
        self.is_empty = False
        """True if nothing is guarded."""
        self.weakly_typed: list[Any] = []
        """The variables with a weakly typed array, which adopts the dtype of its operands."""

    def add_contents(self, items: Iterable[Any]) -> None:
        """Guards every item of a list or set, or every value of a dict."""
        self._iterables.append(items)
        if isinstance(items, list):
            self.containers.append(items)

    def add_mapping(self, table: Mapping[Any, Any]) -> None:
        if isinstance(table, dict):
            self.containers.append(table)
        # A view follows its dict, so that reading everything again is one pass in C.
        self._iterables += (table.keys(), table.values())

    def add_item(self, table: dict[Any, Any], key: str) -> None:
        """Guards one entry of a dict: a global, or an attribute of a plain object."""
        self._items[id(table), key] = table.get

    def add_class_item(self, owner: type, key: str) -> None:
        """Guards one attribute in the class that defines it, or would if it were assigned."""
        self._items[id(owner), key] = vars(owner).get

    def add_attribute(self, owner: Any, name: str) -> None:
        """Guards an attribute that is not in a dict, as in a slot."""
        self.owners.append(owner)
        self._names.append(name)

    def add_metadata(self, variable: Any) -> None:
        """Guards the metadata of a variable: the user's entries, and their number."""
        self._variables.append(variable)
        [table] = read_metadata([variable])
        if len(table) > len(variable.required_metadata):
            self._with_metadata.append(variable)

    def add_cells(self, cells: Iterable[types.CellType]) -> None:
        self._cells += cells

    def add_bytes(self, read: Callable[[], Any]) -> None:
        """Guards what may be changed in place, such as a small NumPy array: ``read`` returns a copy."""
        self._bytes.append((read, read()))

    def add_table(self, table: dict[str, Any]) -> None:
        """Guards the number of attributes: code may ask whether there is one."""
        self.containers.append(table)
        self._tables.append(table)

    def seal(self) -> None:
        """Prepares the lists that ``read`` maps over, once everything is added."""
        self._getters, self._keys = list(self._items.values()), [key for _, key in self._items]
        self._sizes = list(map(len, self._tables))
        self._metadata = metadata_entries(self._variables)
        self.is_empty = not any(vars(self).values())

    def read(self) -> list[Any]:
        """Returns every guarded object that is there now."""
        now = list(chain.from_iterable(self._iterables))
        if self._getters:
            now += map(operator.call, self._getters, self._keys)
        if self.owners:
            now += map(getattr, self.owners, self._names, repeat(UNASSIGNED))
        if self._with_metadata:
            now += chain.from_iterable(map(dict.values, read_metadata(self._with_metadata)))
        if self._cells:
            now += cell_values(self._cells)
        return now

    def is_unchanged_in_place(self) -> bool:
        """True if no bytes, no number of attributes or metadata, and no weakly typed array changed."""
        return (
            (not self._variables or metadata_entries(self._variables) == self._metadata)
            and (not self._tables or list(map(len, self._tables)) == self._sizes)
            and (not self._bytes or all(read() == old for read, old in self._bytes))
            and (not self.weakly_typed or self._are_weakly_typed())
        )

    def _are_weakly_typed(self) -> bool:
        return all(getattr(v.get_raw_value(), "weak_type", False) for v in self.weakly_typed)
