"""While a step is traced, the user's objects hold the tracers; afterwards they hold their arrays again.

Everything is put back by identity, never by position: a step may reorder, shorten or sort what it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
from flax import nnx

from distribute_jax._errors import StaleCaptureError
from distribute_jax._internals import HIDDEN_ATTRIBUTES, owned_by_current_trace, read_raw, write_raw
from distribute_jax.program.binding._bind import Binding
from distribute_jax.program.binding._place import Item, Place, anchor
from distribute_jax.variables import readable_elsewhere

_ASSIGNED = """\
The step assigned {names} on {node}, an array that exists only while the step is traced, so later code \
could not read it. State that a step changes lives in variables made before: \
self.name = nnx.Variable(value) in __init__, and self.name[...] = value in the step; or return the \
array."""

_MADE = """\
The step put {names} on {node}, made while it was traced. Layers and variables are made before, in \
__init__ under strategy.scope(), and change in the step by variable[...] = value; only a dj.Variable \
may be made in the first run. To see an intermediate value, return it from the step instead of \
self.sow."""

_REPLACED = (
    "The step assigned {names}, a plain array that it captured; the new value exists only while the step "
    "is traced and would be lost. Keep state that a step changes in a variable, "
    "state = nnx.Variable(value) and state[...] = value, or pass the array in args and return the new one."
)


class Rebuilt(NamedTuple):
    """A plain array of a module that came out of a transformation of Flax's: the same, if that is proved."""

    old: Any
    new: Any
    key: str
    """The attribute."""
    node: str
    """The type of the module."""


@contextmanager
def swapped_state(
    variables: list[nnx.Variable[Any]], nodes: list[Any], raws: list[Any], rebuilt: list[Rebuilt]
) -> Iterator[None]:
    """Lets the user's variables hold the tracers, and puts everything back afterwards.

    ``rebuilt`` gets the arrays for which it remains to be proved that they are as before.
    """
    before = read_raw(variables)
    tables = [(node, vars(node), dict(vars(node))) for node in nodes]
    with owned_by_current_trace(variables, nodes), readable_elsewhere(variables, before):
        try:
            write_raw(variables, raws)
            yield
        except BaseException:
            for _, table, old in tables:
                table.clear()
                table.update(old)
            raise
        finally:
            write_raw(variables, before)
    for node, table, old in tables:
        _restore(node, table, old, rebuilt)


def _restore(node: Any, table: dict[str, Any], old: dict[str, Any], rebuilt: list[Rebuilt]) -> None:
    """Undoes Flax's reordering of attributes and containers; refuses tracers that the step put there.

    A plain value that the step assigned stays, as any side effect of Python at trace time, and so does
    the removal of an attribute.
    """
    changed = {}
    for key, value in table.items():
        pairs: list[tuple[Any, Any]] = []
        if key not in old or not _same_contents(old[key], value, pairs):
            changed[key] = value
        else:
            rebuilt += [Rebuilt(*pair, key, type(node).__name__) for pair in pairs]
    kept = {key: old[key] for key in old if key in table or key in HIDDEN_ATTRIBUTES}
    table.clear()
    table.update(kept)
    traced = {key: value for key, value in changed.items() if _holds_tracers(value)}
    if traced:
        made = any(isinstance(value, (nnx.Variable, nnx.Pytree)) for value in traced.values())
        kinds = (f"{key} ({type(value).__name__})" for key, value in traced.items())
        names = ", ".join(kinds if made else traced)
        message = _MADE if made else _ASSIGNED
        raise StaleCaptureError(message.format(names=names, node=type(node).__name__))
    owner = HIDDEN_ATTRIBUTES[0]
    table.update({key: value for key, value in changed.items() if key != owner})


def _same_contents(old: Any, new: Any, pairs: list[tuple[Any, Any]]) -> bool:
    """Whether Flax has merely rebuilt what it took apart, if all pairs of arrays are the same."""
    if old is new:
        return True
    if isinstance(old, jax.core.Tracer) and isinstance(new, jax.core.Tracer):
        pairs.append((old, new))
        return (old.shape, old.dtype) == (new.shape, new.dtype)
    if type(old) is not type(new) or not isinstance(old, (dict, list, tuple)):
        return False
    if len(old) != len(new):
        return False
    if isinstance(old, dict):
        return all(
            key in new and _same_contents(value, new[key], pairs) for key, value in old.items()
        )
    return all(_same_contents(*pair, pairs) for pair in zip(old, new, strict=True))


def check_rebuilt(rebuilt: Rebuilt, *, unchanged: bool) -> None:
    """Raises where the step assigned an array to a module, rather than Flax the old one."""
    if not unchanged:
        raise StaleCaptureError(_ASSIGNED.format(names=rebuilt.key, node=rebuilt.node))


def _holds_tracers(value: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value))


@contextmanager
def swapped_arrays(binding: Binding, tracers: list[Any]) -> Iterator[None]:
    """Lets captured arrays be read as inputs, and small NumPy arrays through copies.

    JAX remembers what a 64-bit NumPy array becomes on a device by the identity of the array, and would
    take the old numbers of one that was changed in place.
    """
    swap = _Swap()
    try:
        for (name, place, _), tracer in zip(binding.arrays, tracers, strict=True):
            if place.can_set:
                swap.put(place, tracer, name)
        for place in binding.copies:
            swap.put_copy(place)
        yield
        swap.check_unassigned()
    finally:
        swap.undo()


class _Swap:
    """What stands for what while a step is traced."""

    def __init__(self) -> None:
        self._names: list[tuple[Place, str]] = []
        self._anchors: list[tuple[Place, Any]] = []
        self._copies: dict[int, tuple[Any, Any]] = {}
        # By the identity of what is in place: that object, kept so that no other gets its identity, and
        # the original.
        self._originals: dict[int, tuple[Any, Any]] = {}

    def put(self, place: Place, new: Any, name: str = "") -> None:
        """Replaces an array by what stands for it."""
        outer = anchor(place)
        before, old = self._original(outer.get()), self._original(place.get())
        self._anchors.append((outer, before))
        self._names.append((place, name))
        place.set(new)
        self._originals[id(new)] = new, old
        if outer is not place:  # a tuple is replaced as a whole
            self._originals[id(outer.get())] = outer.get(), before

    def _original(self, value: Any) -> Any:
        """Returns what a value stands for; one place may be reached in two ways."""
        return self._originals.get(id(value), (None, value))[1]

    def put_copy(self, place: Place) -> None:
        """Replaces a NumPy array by a copy, the same one wherever it occurs."""
        array = self._original(place.get())
        _, copied = self._copies.setdefault(id(array), (array, array.copy()))
        self.put(place, copied)

    def check_unassigned(self) -> None:
        """Refuses a step that assigned a captured array, since the new value would be lost."""
        assigned = [name for place, name in self._names if self._is_new(place.get())]
        if assigned:
            raise StaleCaptureError(_REPLACED.format(names=", ".join(assigned)))

    def _is_new(self, value: Any) -> bool:
        return id(value) not in self._originals and isinstance(value, jax.core.Tracer)

    def undo(self) -> None:
        """Puts every array back, wherever in its container it is by now."""
        for array, copied in self._copies.values():
            if array.tobytes() != copied.tobytes():
                array[...] = copied  # what Python did to it while the step was traced
        done: set[int] = set()
        for place, before in self._anchors:
            if isinstance(place, Item):
                if id(place.container) not in done:
                    done.add(id(place.container))
                    self._undo_in(place.container)
            elif id(place.get()) in self._originals:
                place.set(self._original(place.get()))
            if self._is_new(place.get()):
                place.set(before)

    def _undo_in(self, container: Any) -> None:
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in list(items):
            if id(value) in self._originals:
                container[key] = self._original(value)
