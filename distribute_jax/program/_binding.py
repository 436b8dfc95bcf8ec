"""Binds a step to the objects that it reaches: checked at each call, holding tracers during a trace.

After a trace everything is put back by identity, never by position: a step may reorder, shorten or sort
what it reads.
"""

from __future__ import annotations

import copy
import operator
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
from flax import nnx

from distribute_jax._errors import StaleCaptureError
from distribute_jax._jax_private import (
    HIDDEN_ATTRIBUTES,
    owned_by_current_trace,
    read_raw,
    write_raw,
)
from distribute_jax._messages import listed
from distribute_jax.program._arguments import Arguments
from distribute_jax.program._capture import AttributeNames, captures
from distribute_jax.program._graph import Graph, Walker
from distribute_jax.program._placement import variable_paths
from distribute_jax.program._places import CapturePath, FixedValue, ItemPath, MemberPath
from distribute_jax.variables import readable_by_other_threads

# While a step is traced the user's own objects hold tracers, which no other thread may see.
one_at_a_time = threading.RLock()


class Binding:
    """The variables, modules and arrays behind one step and one set of objects.

    What the step reaches directly (closure cells, globals, ``self``, modules among the arguments) is
    held weakly, so that a binding keeps no model alive; what hangs below is held by those objects.
    """

    def __init__(self, fn: Callable[..., Any], arguments: Arguments) -> None:
        """Walks everything that ``fn`` and the bound arguments reach."""
        captured = captures(fn, named=True)
        named = zip(arguments.bound, arguments.names_of("bound"), strict=True)
        bound = [(value, name, FixedValue(value)) for value, name in named]
        graph, structure = _walk(captured.codes, [*captured.roots, *bound])
        values = [*captured.values, *arguments.bound]
        self.key = (tuple(captured.key), structure)
        self.variables = graph.variables
        self.names = graph.names
        self.nodes = [weakref.ref(node) for node in graph.nodes]
        self.node_names = graph.node_names
        self.statics = graph.statics
        at = {id(value): i for i, value in enumerate(values) if isinstance(value, jax.Array)}
        # Each is read from the roots of the call, where it is one of them, or from its place.
        self.arrays = [(name, place, at.get(id(place.get()))) for name, place in graph.arrays]
        self.copies = graph.copies
        self.watch = graph.watch
        self.watch.seal()
        self._below = self.watch.look()
        self._types = self._array_types(values)
        self._hold(values)

    def with_arrays(self, arrays: list[Any]) -> Binding:
        """Returns this binding for one call, with these captured arrays."""
        fixed = copy.copy(self)
        fixed.arrays = [
            (name, FixedValue(array), root)
            for (name, _, root), array in zip(self.arrays, arrays, strict=True)
        ]
        return fixed

    def _hold(self, values: list[Any]) -> None:
        self._count = len(values)
        steady = [i for i, value in enumerate(values) if not isinstance(value, jax.Array)]
        self._pick = operator.itemgetter(*steady) if len(steady) > 1 else None
        self._steady = steady
        self._root_ids = [id(values[i]) for i in steady]
        self.alive = True
        self.on_release: list[Callable[[], None]] = []
        self.anchors = {id(v) for v in values if isinstance(v, (nnx.Pytree, nnx.Variable))}
        self._roots = [_weakly(values[i], weakref.ref(self)) for i in steady]
        # A root that is also seen from below must not be kept alive from here.
        root_ids = set(self._root_ids)
        self._shared = {i: id(v) for i, v in enumerate(self._below) if id(v) in root_ids}
        for i in self._shared:
            self._below[i] = None

    def holds(self, values: list[Any]) -> bool:
        """Returns by identity whether these roots, and all below, are what was bound."""
        if len(values) != self._count:
            return False
        pick = self._pick
        steady = pick(values) if pick is not None else [values[i] for i in self._steady]
        if list(map(id, steady)) != self._root_ids or not self.alive:
            return False
        if not self.watch.same_numbers():
            return False
        if self.arrays and self._array_types(values) != self._types:
            return False
        below = self.watch.look()
        if len(below) != len(self._below):
            return False
        for i, shared in self._shared.items():
            if id(below[i]) != shared:
                return False
            below[i] = None
        return all(map(operator.is_, below, self._below))

    def _array_types(self, values: list[Any]) -> list[Any]:
        """Returns the type of each captured array: the step may read no more of it than its shape."""
        return [
            _array_type(place.get() if root is None else values[root])
            for _, place, root in self.arrays
        ]

    def paths(self) -> list[tuple[Any, ...]]:
        """Returns the path of each variable in the outermost module that holds it."""
        return variable_paths(
            self.variables, self.names, filter(None, (node() for node in self.nodes))
        )

    def captured(self) -> list[Any]:
        """Returns the captured arrays as they are now."""
        return [place.get() for _, place, _ in self.arrays]

    def reaches_same(self, variables: list[Any], arrays: list[Any]) -> bool:
        """Whether these variables and captured arrays are this binding's, in the same order."""
        now = [*self.variables, *self.captured()]
        return list(map(id, now)) == list(map(id, [*variables, *arrays]))

    def shares_roots(self, other: Binding) -> bool:
        """Returns whether a module or variable that both reach directly is the same."""
        return bool(self.anchors & other.anchors)

    def owners(self) -> tuple[weakref.ref[Any], ...]:
        """Returns the modules that the step reaches directly; without them it cannot run again."""
        refs = (ref for ref in self._roots if isinstance(ref, weakref.ref))
        return tuple(ref for ref in refs if isinstance(ref(), nnx.Pytree))

    def release(self) -> None:
        """Drops everything bound, once an object that the step reached is gone."""
        self.variables, self.arrays, self.copies, self.statics = [], [], [], {}
        self.watch.release()
        self._below, self._shared = [], {}
        for clear in self.on_release:
            clear()
        self.on_release = []


def _walk(
    step_codes: list[types.CodeType], roots: list[tuple[Any, str, CapturePath]]
) -> tuple[Graph, tuple[Any, ...]]:
    """Walks until no further attribute name turns up in the code reached."""
    used = AttributeNames()
    used.read(step_codes)
    while True:
        before = len(used)
        walker = Walker(used)
        structure = tuple(walker.visit(*root) for root in roots)
        if len(used) == before:
            return walker.graph, structure


_read_type = operator.attrgetter("shape", "dtype", "weak_type")


def _array_type(value: Any) -> Any:
    try:
        return _read_type(value)
    except AttributeError:  # a NumPy array, a key, or no array any more
        return (type(value), getattr(value, "shape", None), getattr(value, "dtype", None))


def _weakly(value: Any, owner: weakref.ref[Binding]) -> Any:
    def gone(_: object) -> None:
        binding = owner()
        if binding is not None:
            binding.alive = False
            binding.release()

    try:
        return weakref.ref(value, gone)
    except TypeError:
        return value


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
    """A plain array that Flax has rebuilt in a module: unchanged, which remains to be proved."""

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
    with owned_by_current_trace(variables, nodes), readable_by_other_threads(variables, before):
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
        is_new = any(isinstance(value, (nnx.Variable, nnx.Pytree)) for value in traced.values())
        kinds = (f"{key} ({type(value).__name__})" for key, value in traced.items())
        names = ", ".join(kinds if is_new else traced)
        message = _MADE if is_new else _ASSIGNED
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
    """The replacements made while a step is traced."""

    def __init__(self) -> None:
        self._names: list[tuple[CapturePath, str]] = []
        self._anchors: list[tuple[CapturePath, Any]] = []
        self._copies: dict[int, tuple[Any, Any]] = {}
        # By the identity of what is in place: that object, kept so that no other gets its identity, and
        # the original.
        self._originals: dict[int, tuple[Any, Any]] = {}

    def put(self, place: CapturePath, new: Any, name: str = "") -> None:
        """Replaces an array by what stands for it."""
        outer = place  # what is assigned when the place is
        while isinstance(outer, MemberPath):
            outer = outer.owner
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

    def put_copy(self, place: CapturePath) -> None:
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
            if isinstance(place, ItemPath):
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


_LEFT = """\
The step left arrays in objects that outlive it:
{lines}
They have numbers only while the step is traced, which happens once, so later code could not read \
them. Return the array instead; state that a step changes lives in a variable made before, \
state = nnx.Variable(value), and state[...] = value in the step. Numbers for a log go out with \
jax.debug.callback."""


Contents = list[tuple[Any, Any]]
"""Dicts and lists, each with a copy of what it held."""


def contents_of(containers: Iterable[Any]) -> Contents:
    """Returns what dicts and lists hold now."""
    return [(container, container.copy()) for container in containers]


def restore(contents: Contents) -> None:
    """Puts dicts and lists back as they were."""
    for container, old in contents:
        if isinstance(container, dict):
            container.clear()
            container.update(old)
        else:
            container[:] = old


@contextmanager
def contents_restored_on_error(contents: Contents) -> Iterator[None]:
    """Puts dicts, lists and attributes back as they were, if tracing the step fails."""
    try:
        yield
    except BaseException:
        restore(contents)
        raise


@contextmanager
def contents_as_before(contents: Contents) -> Iterator[None]:
    """Puts dicts and lists back for another trace of a step that moved what they hold."""
    now = contents_of(container for container, _ in contents)
    restore(contents)
    try:
        yield
    finally:
        restore(now)


def check_leaked_tracers(binding: Binding) -> None:
    """Raises where an object that the step reaches holds an array of a trace that has ended."""
    left = [name for name, place, _ in binding.arrays if _holds_tracers(place.get())]
    raws = read_raw(binding.variables)
    left += [
        f"{name} ({type(variable).__name__})"
        for name, variable, raw in zip(binding.names, binding.variables, raws, strict=True)
        if _holds_tracers(raw)
    ]
    if left:
        raise StaleCaptureError(_LEFT.format(lines=listed(left)))
