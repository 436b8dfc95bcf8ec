"""Binds a step to the objects that it reaches: compares them at each call, swaps tracers in for a trace.

After a trace everything is restored by identity, never by position, since a step may reorder, shorten or
sort containers.
"""

from __future__ import annotations

import copy
import operator
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
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
from distribute_jax.program._paths import CapturePath, FixedValue, ItemPath, MemberPath
from distribute_jax.program._placement import variable_paths
from distribute_jax.variables import readable_by_other_threads

# While a step is traced, the user's objects hold tracers, which no other thread may see.
step_lock = threading.RLock()


class Binding:
    """The variables, modules and arrays behind one step and one set of objects.

    The roots, which the step reaches directly (closure cells, globals, ``self``, modules among the
    arguments), are referenced weakly, so that a binding keeps no model alive.
    """

    def __init__(self, fn: Callable[..., Any], arguments: Arguments) -> None:
        captured = captures(fn, named=True)
        named = zip(arguments.bound, arguments.names_of("bound"), strict=True)
        bound = [(value, name, FixedValue(value)) for value, name in named]
        roots = [*captured.roots, *bound]
        graph, structure = _walk(captured.codes, roots)
        values = [*captured.values, *arguments.bound]
        self.key = (tuple(captured.key), structure)
        self.variables = graph.variables
        self._again = graph.again
        self.names = graph.names
        self.nodes = [weakref.ref(node) for node in graph.nodes]
        self.node_names = graph.node_names
        self.statics = {name: place.get() for name, place in graph.static_paths}
        at = {id(place): i for i, (_, _, place) in enumerate(roots)}
        # An array that is a root is read by its index among the roots of the call, others by their path.
        self.arrays = [(name, place, at.get(id(place))) for name, place in graph.arrays]
        self.copies = graph.copies
        self.guard = graph.guard
        self.guard.seal()
        self._guarded = self.guard.read()
        self._types = self._array_types(values)
        self._reference_roots(values)

    def with_arrays(self, arrays: list[Any]) -> Binding:
        """Returns a binding for one call, with these captured arrays."""
        fixed = copy.copy(self)
        fixed.arrays = [
            (name, FixedValue(array), root)
            for (name, _, root), array in zip(self.arrays, arrays, strict=True)
        ]
        return fixed

    def _reference_roots(self, values: list[Any]) -> None:
        self._num_roots = len(values)
        # Arrays are inputs: a new one in the place of an old one is not compared.
        compared = [i for i, value in enumerate(values) if not isinstance(value, jax.Array)]
        self._pick = operator.itemgetter(*compared) if len(compared) > 1 else None
        self._compared = compared
        self._root_ids = [id(values[i]) for i in compared]
        self.alive = True
        self.on_release: list[Callable[[], None]] = []
        self.model_ids = {id(v) for v in values if isinstance(v, (nnx.Pytree, nnx.Variable))}
        """The modules and variables among the roots."""
        self._roots = [_weak(values[i], weakref.ref(self)) for i in compared]
        # The lists of the guard would keep a root alive that is also in them.
        root_ids = set(self._root_ids)
        self.guard.owners = [
            weakref.proxy(v) if id(v) in root_ids and type(v).__weakrefoffset__ else v
            for v in self.guard.owners
        ]
        self._guarded_roots = {i: id(v) for i, v in enumerate(self._guarded) if id(v) in root_ids}
        for i in self._guarded_roots:
            self._guarded[i] = None

    def matches(self, values: list[Any]) -> bool:
        """True if these roots, and everything below them, are the identical objects."""
        if len(values) != self._num_roots:
            return False
        pick = self._pick
        roots = pick(values) if pick is not None else [values[i] for i in self._compared]
        if list(map(id, roots)) != self._root_ids or not self.alive:
            return False
        if self.arrays and self._array_types(values) != self._types:
            return False
        if self.guard.is_empty:
            return True
        if not self.guard.is_unchanged_in_place():
            return False
        guarded = self.guard.read()
        if len(guarded) != len(self._guarded):
            return False
        for i, root_id in self._guarded_roots.items():
            if id(guarded[i]) != root_id:
                return False
            guarded[i] = None
        return all(map(operator.is_, guarded, self._guarded))

    def _array_types(self, values: list[Any]) -> list[Any]:
        """Returns the type of each captured array, of which the step may read no more than the shape."""
        return [_array_type(p.get() if i is None else values[i]) for _, p, i in self.arrays]

    def containers(self) -> list[Any]:
        """Returns the dicts, lists and attributes of modules that a step may change while it is traced."""
        return [*self.guard.containers, *map(vars, self._alive_nodes())]

    def paths(self) -> list[tuple[Any, ...]]:
        """Returns the path of each variable in the outermost module that holds it."""
        return variable_paths(self.variables, self.names, self._alive_nodes())

    def _alive_nodes(self) -> list[Any]:
        return [node for ref in self.nodes if (node := ref()) is not None]

    def captured_arrays(self) -> list[Any]:
        """Returns the arrays that are at their paths now."""
        return [place.get() for _, place, _ in self.arrays]

    def reaches_same(self, before: Binding, arrays: list[Any]) -> bool:
        """True if the variables of another binding, and these arrays, are at the same places in this one."""
        now = [*self.variables, *self.captured_arrays()]
        same = list(map(id, now)) == list(map(id, [*before.variables, *arrays]))
        return same and self._places() == before._places()

    def _places(self) -> list[Any]:
        return [*self.names, *self._again, *(name for name, _, _ in self.arrays)]

    def owners(self) -> tuple[weakref.ref[Any], ...]:
        """Returns the modules among the roots; without them the step cannot run again."""
        refs = (ref for ref in self._roots if isinstance(ref, weakref.ref))
        return tuple(ref for ref in refs if isinstance(ref(), nnx.Pytree))

    def release(self) -> None:
        """Drops all references, once a root was deleted."""
        self.variables, self.arrays, self.copies, self.statics = [], [], [], {}
        self.guard = Graph().guard
        self._guarded, self._guarded_roots = [], {}
        for callback in self.on_release:
            callback()
        self.on_release = []


def _walk(
    step_codes: list[types.CodeType], roots: list[tuple[Any, str, CapturePath]]
) -> tuple[Graph, tuple[Any, ...]]:
    """Walks again until the code that it reaches mentions no further attribute names."""
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
    except AttributeError:  # a NumPy array, a key, or no longer an array
        return (type(value), getattr(value, "shape", None), getattr(value, "dtype", None))


def _weak(value: Any, owner: weakref.ref[Binding]) -> Any:
    """Returns a weak reference that releases the binding, or the value itself if it has none."""

    def release(_: object) -> None:
        if (binding := owner()) is not None:
            binding.alive = False
            binding.release()

    try:
        return weakref.ref(value, release)
    except TypeError:
        return value


_ASSIGNED = """\
The step assigned {names} on {node}, an array that exists only while the step is traced, so later code \
could not read it. State that a step changes lives in variables made before: \
self.name = nnx.Variable(value) in __init__, and self.name[...] = value in the step; or return the \
array."""

_CREATED = """\
The step put {names} on {node}, created while the step was traced. Create layers and variables before, in \
__init__ under strategy.scope(), and change them in the step by variable[...] = value; only a dj.Variable \
may be created in the first run. To see an intermediate value, return it from the step instead of \
self.sow."""

_REPLACED = (
    "The step assigned {names}, a plain array that it captured; the new value exists only while the step "
    "is traced and would be lost. Keep state that a step changes in a variable, "
    "state = nnx.Variable(value) and state[...] = value, or pass the array in args and return the new one."
)


class Rebuilt(NamedTuple):
    """An array attribute that Flax rebuilt in a module; that it is unchanged remains to be proved."""

    old: Any
    new: Any
    key: str
    """The attribute."""
    node: str
    """The type of the module."""

    def assigned_error(self) -> StaleCaptureError:
        """Returns the error for an array that the step assigned, rather than Flax rebuilt."""
        return StaleCaptureError(_ASSIGNED.format(names=self.key, node=self.node))


@contextmanager
def swapped_state(
    variables: list[nnx.Variable[Any]], nodes: list[Any], raws: list[Any], rebuilt: list[Rebuilt]
) -> Iterator[None]:
    """Stores tracers in the user's variables for a block, and restores variables and modules after it.

    Arrays for which it remains to be proved that they are unchanged are appended to ``rebuilt``.
    """
    before, attributes = read_raw(variables), copy_contents(map(vars, nodes))
    with (
        owned_by_current_trace(variables, nodes), readable_by_other_threads(variables, before),
        contents_restored_on_error(attributes),
    ):  # fmt: skip
        try:
            write_raw(variables, raws)
            yield
        finally:
            write_raw(variables, before)
    for node, (table, old) in zip(nodes, attributes, strict=True):
        _restore(node, table, old, rebuilt)


def _restore(node: Any, table: dict[str, Any], old: dict[str, Any], rebuilt: list[Rebuilt]) -> None:
    """Undoes Flax's reordering of attributes and containers; refuses tracers that the step stored.

    A plain value that the step assigned stays, as any side effect of Python at trace time does, and so
    does the removal of an attribute.
    """
    changed = {}
    for key, value in table.items():
        pairs: list[tuple[Any, Any]] = []
        if key in HIDDEN_ATTRIBUTES and old.get(key) == value:  # Flax makes an equal one
            continue
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
        message = _CREATED if is_new else _ASSIGNED
        raise StaleCaptureError(message.format(names=names, node=type(node).__name__))
    table.update({key: value for key, value in changed.items() if key != HIDDEN_ATTRIBUTES[0]})


def _same_contents(old: Any, new: Any, pairs: list[tuple[Any, Any]]) -> bool:
    """True if Flax only rebuilt what it had flattened, provided that each of the ``pairs`` is equal."""
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


def _holds_tracers(value: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value))


def captured_numbers(
    fn: Callable[..., Any], wanted: Callable[[Any], bool]
) -> list[tuple[str, CapturePath]]:
    """Returns name and path of each number that a step captures, but for settings of modules."""
    captured = captures(fn, named=True)
    graph, _ = _walk(captured.codes, captured.roots)
    tables = {id(vars(node)) for node in graph.nodes}
    return [
        (name, place)
        for name, place in graph.static_paths
        if place.can_set
        and not (isinstance(place, ItemPath) and id(place.container) in tables)
        and wanted(place.get())
    ]


@contextmanager
def swapped_by_one(places: Sequence[CapturePath]) -> Iterator[None]:
    """Replaces captured numbers by 1 for a block."""
    before: list[tuple[CapturePath, Any]] = []
    try:
        for place in places:
            outer = place  # a tuple is replaced as a whole
            while isinstance(outer, MemberPath):
                outer = outer.owner
            before.append((outer, outer.get()))
            place.set(type(place.get())(1))
        yield
    finally:
        for outer, old in reversed(before):
            outer.set(old)


@contextmanager
def swapped_arrays(binding: Binding, tracers: list[Any]) -> Iterator[None]:
    """Replaces captured arrays by tracers for a block, and small NumPy arrays by copies.

    JAX caches the conversion of a 64-bit NumPy array by its identity, so that it would use the old
    numbers of one that was changed in place.
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
        self._assigned: list[tuple[CapturePath, Any]] = []
        self._copies: dict[int, tuple[Any, Any]] = {}
        # By the id of each replacement: the replacement, so that its id is not reused, and the original.
        self._originals: dict[int, tuple[Any, Any]] = {}

    def put(self, place: CapturePath, new: Any, name: str = "") -> None:
        outer = place  # the place that is assigned: that of the outermost tuple
        while isinstance(outer, MemberPath):
            outer = outer.owner
        before, old = self._original(outer.get()), self._original(place.get())
        self._assigned.append((outer, before))
        self._names.append((place, name))
        place.set(new)
        self._originals[id(new)] = new, old
        if outer is not place:  # a tuple is replaced as a whole
            self._originals[id(outer.get())] = outer.get(), before

    def _original(self, value: Any) -> Any:
        """Returns what a value replaces, or itself; one place may be reached in two ways."""
        return self._originals.get(id(value), (None, value))[1]

    def put_copy(self, place: CapturePath) -> None:
        """Replaces a NumPy array by a copy, by the same one wherever it occurs."""
        array = self._original(place.get())
        if id(array) not in self._copies:
            copied = array.copy()
            if type(array) is not np.ndarray:  # the attributes of a subclass are not copied
                vars(copied).update(vars(array))
            self._copies[id(array)] = array, copied
        self.put(place, self._copies[id(array)][1])

    def check_unassigned(self) -> None:
        """Raises if the step assigned a captured array, since the new value would be lost."""
        assigned = [name for place, name in self._names if self._is_new(place.get())]
        if assigned:
            raise StaleCaptureError(_REPLACED.format(names=", ".join(assigned)))

    def _is_new(self, value: Any) -> bool:
        return id(value) not in self._originals and isinstance(value, jax.core.Tracer)

    def undo(self) -> None:
        """Restores every array, wherever in its container it is by now."""
        for array, copied in self._copies.values():
            if array.tobytes() != copied.tobytes():
                array[...] = copied  # Python changed it while the step was traced
        done: set[int] = set()
        for place, before in self._assigned:
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


_LEAKED = """\
The step left arrays in objects that outlive it:
{lines}
They exist only while the step is traced, which happens once, so later code could not read them. Return \
the array instead. State that a step changes lives in a variable made before, state = nnx.Variable(value), \
and state[...] = value in the step. To log numbers, use jax.debug.callback."""


Contents = list[tuple[Any, Any]]
"""Dicts and lists, each with a copy."""


def copy_contents(containers: Iterable[Any]) -> Contents:
    return [(container, container.copy()) for container in containers]


def restore(contents: Contents) -> None:
    for container, old in contents:
        if isinstance(container, dict):
            container.clear()
            container.update(old)
        else:
            container[:] = old


@contextmanager
def contents_restored_on_error(contents: Contents) -> Iterator[None]:
    """Restores dicts, lists and attributes if tracing the step fails."""
    try:
        yield
    except BaseException:
        restore(contents)
        raise


@contextmanager
def contents_as_before(contents: Contents) -> Iterator[None]:
    """Restores dicts and lists for another trace of a step that changed them."""
    now = copy_contents(container for container, _ in contents)
    restore(contents)
    try:
        yield
    finally:
        restore(now)


def check_leaked_tracers(binding: Binding) -> None:
    """Raises if an object that the step reaches holds a tracer of a trace that has ended."""
    leaked = [name for name, place, _ in binding.arrays if _holds_tracers(place.get())]
    raws = read_raw(binding.variables)
    leaked += [
        f"{name} ({type(variable).__name__})"
        for name, variable, raw in zip(binding.names, binding.variables, raws, strict=True)
        if _holds_tracers(raw)
    ]
    if leaked:
        raise StaleCaptureError(_LEAKED.format(lines=listed(leaked)))
