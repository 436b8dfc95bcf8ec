"""Which attributes of an object a step can read: those that the code it reaches mentions."""

from __future__ import annotations

import argparse
import functools
import types
from collections import ChainMap, UserDict, UserList
from collections.abc import Iterator
from typing import Any

import jax

from distribute_jax.program.binding._capture import is_library

_HOLDERS = (
    types.SimpleNamespace, argparse.Namespace, UserDict, UserList, ChainMap,
)  # fmt: skip
"""Classes of the standard library that hold the user's values in attributes."""

_MAKING = frozenset({"__init__", "__new__", "__post_init__"})
_NEVER = frozenset({
    "__repr__", "__str__", "__del__", "__getstate__", "__setstate__", "__reduce__",
    "__reduce_ex__", "__init_subclass__", "__set_name__", "__class_getitem__", "__hash__",
})  # fmt: skip
"""Methods that a step does not call, though it may call every other special one unseen."""

_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType, property)


def is_whole(value: Any) -> bool:
    """Tells whether everything that an object holds counts, whatever the code mentions."""
    # A pytree, such as Flax's TrainState, is read leaf by leaf.
    return isinstance(value, _HOLDERS) or not jax.tree_util.all_leaves([value])


class Attributes:
    """The attribute names that code mentions, and what of an object they select.

    Attributes:
        names: every name mentioned.
        any: whether code reads attributes by computed names, so that all of them count.
    """

    def __init__(self) -> None:
        """Starts with no name."""
        self.names: set[str] = set()
        self.any = False

    def extent(self) -> tuple[int, bool]:
        """Grows with every name that is added."""
        return (len(self.names), self.any)

    def table_of(self, value: Any) -> dict[str, Any]:
        """Returns the dict of an object; an object with slots only has none."""
        table = getattr(value, "__dict__", None)
        return table if isinstance(table, dict) else {}

    def of_table(self, table: dict[str, Any], *, whole: bool) -> list[str]:
        """Gives the keys that may be read."""
        return [key for key in list(table) if whole or self.any or key in self.names]

    def without_table(self, value: Any) -> list[str]:
        """Gives the attributes that may be read and are in no dict."""
        found = {
            key
            for owner in type(value).__mro__
            if not is_library(owner.__module__)
            for key, member in vars(owner).items()
            if isinstance(member, types.MemberDescriptorType)
        }
        return sorted(key for key in found if self.any or key in self.names)

    def of_class(self, cls: type, *, every: bool, makes: bool) -> Iterator[tuple[type, str, Any]]:
        """Gives class, name and value of all that may be read from the user's classes.

        A name that one class of the family has is given for each: assigned there later, it hides the
        other. Its value is then None.
        """
        owners = [owner for owner in cls.__mro__ if not is_library(owner.__module__)]
        keys = dict.fromkeys(
            key
            for owner in owners
            for key, member in list(vars(owner).items())
            if self._is_used(key, makes=makes) or (every and function_of(member) is not None)
        )
        for owner in owners:
            for key in keys:
                yield owner, key, vars(owner).get(key)

    def is_data(self, key: str, member: Any) -> bool:
        """Tells whether a member of a class is a value rather than machinery of Python."""
        special = key.startswith("__") and key.endswith("__")
        return not special and member is not None and not isinstance(member, _DESCRIPTORS)

    def _is_used(self, key: str, *, makes: bool) -> bool:
        if key.startswith("__") and key.endswith("__"):
            return key not in _NEVER and (makes or key not in _MAKING)
        return self.any or key in self.names


def function_of(member: Any) -> types.FunctionType | None:
    """Gives the function behind a method, property or cached property."""
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    if isinstance(member, property):
        member = member.fget
    if isinstance(member, functools.cached_property):
        member = member.func
    return member if isinstance(member, types.FunctionType) else None
