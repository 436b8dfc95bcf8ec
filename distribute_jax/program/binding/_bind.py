"""Binding: the objects a step reaches, found once, and checked by identity at each later call."""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from distribute_jax.program.binding._arguments import Arguments
from distribute_jax.program.binding._attributes import Attributes
from distribute_jax.program.binding._capture import codes, roots
from distribute_jax.program.binding._graph import Graph, Walker
from distribute_jax.program.binding._place import Fixed, Place


class Binding:
    """The variables, modules and arrays behind one step and one set of objects.

    What the step reaches directly (closure cells, globals, ``self``, modules among the arguments) is
    held weakly, so that a binding keeps no model alive; what hangs below is held by those objects.
    """

    def __init__(self, fn: Callable[..., Any], arguments: Arguments) -> None:
        """Walks everything that ``fn`` and the bound arguments reach."""
        found = roots(fn, named=True)
        names = [*(found.names or ()), *_bound_names(arguments)]
        values = [*found.values, *arguments.bound]
        places = [*(found.places or ()), *(None for _ in arguments.bound)]
        graph, structure = _walk(fn, names, values, places)
        self.key = (tuple(found.key), structure)
        self.variables = graph.variables
        self.names = graph.names
        self.nodes = [weakref.ref(node) for node in graph.nodes]
        self.node_names = graph.node_names
        self.statics = graph.statics
        self.arrays = _array_sources(graph, values)
        self.copies = graph.copies
        self.watch = graph.watch
        self.watch.seal()
        self._below = self.watch.look()
        self._types = self._array_types(values)
        self._hold(values)

    def with_arrays(self, arrays: list[Any]) -> Binding:
        """Returns this binding for one call, with these arrays wherever its own are kept by now."""
        fixed = copy.copy(self)
        fixed.arrays = [
            (name, Fixed(array), root)
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
        """Tells by identity whether these roots, and all below, are what was bound."""
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
        """Says of each captured array what it is: the step may read no more of it than its shape."""
        return [
            _array_type(place.get() if root is None else values[root])
            for _, place, root in self.arrays
        ]

    def captured(self) -> list[Any]:
        """Returns the captured arrays as they are now."""
        return [place.get() for _, place, _ in self.arrays]

    def reaches_same(self, variables: list[Any], arrays: list[Any]) -> bool:
        """Whether these variables and captured arrays are this binding's, in the same order."""
        now = [*self.variables, *self.captured()]
        return list(map(id, now)) == list(map(id, [*variables, *arrays]))

    def shares_roots(self, other: Binding) -> bool:
        """Tells whether a module or variable that both reach directly is the same."""
        return bool(self.anchors & other.anchors)

    def owners(self) -> tuple[weakref.ref[Any], ...]:
        """Gives the modules that the step reaches directly; without them it cannot run again."""
        return tuple(ref for ref in self._roots if isinstance(ref, weakref.ref) and _is_node(ref()))

    def release(self) -> None:
        """Lets go of everything bound, once an object that the step reached is gone."""
        self.variables, self.arrays, self.copies, self.statics = [], [], [], {}
        self.watch.release()
        self._below, self._shared = [], {}
        for clear in self.on_release:
            clear()
        self.on_release = []


def _walk(
    fn: Callable[..., Any], names: list[str], values: list[Any], places: list[Place | None]
) -> tuple[Graph, tuple[Any, ...]]:
    """Walks until no further attribute name turns up in the code reached."""
    used = Attributes()
    while True:
        before = used.extent()
        walker = Walker(codes(fn), used)
        structure = tuple(
            walker.visit_root(value, name, place)
            for value, name, place in zip(values, names, places, strict=True)
        )
        if used.extent() == before:
            return walker.graph, structure


def _bound_names(arguments: Arguments) -> list[str]:
    named = zip(arguments.names, arguments.kinds, strict=True)
    return [name for name, kind in named if kind == "bound"]


def _array_sources(graph: Graph, values: list[Any]) -> list[tuple[str, Place, int | None]]:
    """Says of each captured array whether it is read from the roots of the call or from below."""
    at = {id(value): i for i, value in enumerate(values) if isinstance(value, jax.Array)}
    return [(name, place, at.get(id(place.get()))) for name, place in graph.arrays]


_read_type = operator.attrgetter("shape", "dtype", "weak_type")


def _array_type(value: Any) -> Any:
    try:
        return _read_type(value)
    except AttributeError:  # a NumPy array, a key, or no array any more
        return (type(value), getattr(value, "shape", None), getattr(value, "dtype", None))


def _is_node(value: Any) -> bool:
    return isinstance(value, nnx.Pytree)


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
