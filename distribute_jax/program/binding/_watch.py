"""What a binding reads again at every call, to see by identity whether anything was replaced."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from itertools import chain, repeat
from typing import Any

import numpy as np

from distribute_jax._internals import metadata_entries, read_metadata
from distribute_jax.program.binding._place import UNASSIGNED, cell_values


class Watch:
    """Containers, attributes, globals and cells whose contents must stay the same objects.

    All reading is done by maps over C functions, since it happens at every call of ``run``.

    Attributes:
        containers: the dicts and lists whose contents a step may change while it is traced.
        weak: the variables whose array takes on the dtype of what it meets, as a Python number does.
    """

    def __init__(self) -> None:
        """Starts with nothing watched."""
        self._contents: list[Iterable[Any]] = []
        self._items: dict[tuple[int, str], dict[Any, Any]] = {}
        self._class_items: dict[tuple[int, str], types.MappingProxyType[str, Any]] = {}
        self._attributes: list[tuple[Any, str]] = []
        self._variables: list[Any] = []
        self._with_metadata: list[Any] = []
        self._cells: list[types.CellType] = []
        self._bytes: list[tuple[Any, bytes]] = []
        self.containers: list[dict[Any, Any] | list[Any]] = []
        self.weak: list[Any] = []

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
        """Lays everything out for quick reading, once all is known."""
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
