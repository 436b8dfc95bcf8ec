"""Random programs for what a step captures: where values are kept, what they are, what happens to them.

A program is made twice from one seed. One runs under a strategy; the other is called as plain Python on one
device, where nothing can be stale. Between the calls the same things happen to both.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from random import Random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

Average = Callable[[jax.Array], Any]
Scope = Callable[[], AbstractContextManager[Any]]


class Place(NamedTuple):
    """Where a value is kept: how the step reads it, and how it is replaced."""

    read: Callable[..., Any]
    write: Callable[[Any], None]


# Roots: what a function reaches directly.


def cell(value: Any) -> Place:
    """A variable of the enclosing function."""

    def read() -> Any:
        return value

    def write(new: Any) -> None:
        nonlocal value
        value = new

    return Place(read, write)


def in_globals(value: Any) -> Place:
    """A global of a module."""
    scope: dict[str, Any] = {"__name__": "user_program", "held": value}
    exec("def read():\n    return held\n", scope)
    return Place(scope["read"], lambda new: scope.__setitem__("held", new))


def default(value: Any) -> Place:
    """A default value."""

    def read(held: Any = value) -> Any:
        return held

    return Place(read, lambda new: setattr(read, "__defaults__", (new,)))


def keyword_default(value: Any) -> Place:
    """A default value that is given by name."""

    def read(*, held: Any = value) -> Any:
        return held

    defaults: Any = read.__kwdefaults__
    return Place(read, lambda new: defaults.__setitem__("held", new))


def in_partial(value: Any) -> Place:
    """An argument of a partial."""
    held: Any = functools.partial(lambda held: held, value)
    return Place(held, lambda new: held.__setstate__((held.func, (new,), {}, None)))


def in_partial_by_name(value: Any) -> Place:
    """A keyword argument of a partial."""
    held: Any = functools.partial(lambda *, held: held, held=value)
    return Place(held, lambda new: held.__setstate__((held.func, (), {"held": new}, None)))


class Trainer:
    """An object with a method that reads its attribute."""

    def __init__(self, held: Any) -> None:
        self.held = held
        self.calls = 0

    def get(self) -> Any:
        """Reads the attribute."""
        return self.held

    __call__ = get


def bound_method(value: Any) -> Place:
    """An attribute of ``self``."""
    owner = Trainer(value)
    return Place(owner.get, lambda new: setattr(owner, "held", new))


def callable_object(value: Any) -> Place:
    """An attribute of an object that is called."""
    owner = Trainer(value)
    return Place(owner, lambda new: setattr(owner, "held", new))


def class_attribute(value: Any) -> Place:
    """An attribute of a class of the user's."""

    class Settings:
        held = value

    return Place(lambda: Settings.held, lambda new: setattr(Settings, "held", new))


def wrapped(value: Any) -> Place:
    """A variable of a function behind a decorator."""
    inner = cell(value)

    @functools.wraps(inner.read)
    def read() -> Any:
        return inner.read()

    return Place(read, inner.write)


ROOTS = (
    cell, in_globals, default, keyword_default, in_partial, in_partial_by_name, bound_method,
    callable_object, class_attribute, wrapped,
)  # fmt: skip


# Containers in between.


class Plain:
    """An object with one attribute."""

    def __init__(self, held: Any) -> None:
        self.held = held


@dataclasses.dataclass(slots=True)
class Slots:
    """An object without a dict."""

    held: Any


class Pair(NamedTuple):
    """A tuple with names."""

    held: Any
    other: int = 1


class Holder(nnx.Module):
    """A module with one attribute."""

    def __init__(self, held: Any) -> None:
        self.held = nnx.data(held)


def _item(make: Callable[[Any], Any], key: Any) -> Callable[[Any, Random], tuple[Any, Any, Any]]:
    def wrap(value: Any, _: Random) -> tuple[Any, Any, Any]:
        return (
            make(value),
            lambda outer: outer[key],
            lambda place, new: place.read().__setitem__(key, new),
        )

    return wrap


def _attribute(make: Callable[[Any], Any]) -> Callable[[Any, Random], tuple[Any, Any, Any]]:
    def wrap(value: Any, _: Random) -> tuple[Any, Any, Any]:
        def write(place: Place, new: Any) -> None:
            owner = place.read()
            owner.held = nnx.data(new) if isinstance(owner, nnx.Module) else new

        return make(value), lambda outer: outer.held, write

    return wrap


def _in_tuple(value: Any, _: Random) -> tuple[Any, Any, Any]:
    return (1, value), lambda outer: outer[1], lambda place, new: place.write((1, new))


def _in_pair(value: Any, _: Random) -> tuple[Any, Any, Any]:
    return Pair(value), lambda outer: outer.held, lambda place, new: place.write(Pair(new))


STEPS = (
    _item(lambda value: {"other": 1.0, "held": value}, "held"),
    _item(lambda value: [0.0, value], 1),
    _item(lambda value: UserDict(held=value), "held"),
    _attribute(Plain), _attribute(Slots), _attribute(Holder),
    _attribute(lambda value: types.SimpleNamespace(held=value)),
    _in_tuple, _in_pair,
)  # fmt: skip


def placed(value: Any, random: Random) -> Place:
    """Puts a value somewhere: a root, and up to two containers below it."""
    readers: list[Any] = []
    writers: list[Any] = []
    for _ in range(random.choice((0, 0, 1, 1, 2))):
        value, reader, writer = random.choice(STEPS)(value, random)
        readers.insert(0, reader)
        writers.insert(0, writer)
    place = random.choice(ROOTS)(value)
    for reader, writer in zip(readers, writers, strict=True):
        place = _below(place, reader, writer)
    return place


def _below(outer: Place, reader: Any, writer: Any) -> Place:
    return Place(lambda: reader(outer.read()), lambda new: writer(outer, new))


# What is kept.


class Scaled(nnx.Module):
    """A layer with a parameter, a number and a flag."""

    def __init__(self, weight: float) -> None:
        self.kernel = nnx.Param(jnp.full((2, 2), weight))
        self.scale = 1.0
        self.frozen = False

    def __call__(self, x: jax.Array) -> jax.Array:
        out = x @ self.kernel[...] * self.scale
        return jax.lax.stop_gradient(out) if self.frozen else out


class Stack(nnx.Module):
    """Layers in a dict whose keys are not sorted."""

    def __init__(self, weight: float) -> None:
        self.layers = nnx.data({"z": Scaled(weight), "a": Scaled(weight + 1)})
        self.shifts = nnx.data({"y": jnp.full(2, weight), "b": jnp.full(2, weight + 3)})

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers.values():
            x = layer(x) * 0.1
        return x + self.shifts["y"] - 2 * self.shifts["b"]


DTYPES = (np.float64, np.float32, np.int64, np.int32, np.bool_, np.float16)


class Maker:
    """Makes values, and remembers every variable, so that two programs can be compared."""

    def __init__(self, random: Random, scope: Scope) -> None:
        self.random, self.scope = random, scope
        self.variables: list[nnx.Variable[Any]] = []
        self._made = 0

    def make(self, kind: str) -> Any:
        """Makes a value of a kind; each has other numbers."""
        self._made += 1
        number = float(self._made)
        with self.scope():
            value = self._make(kind, number)
        if isinstance(value, nnx.Variable):
            self.variables.append(value)
        elif isinstance(value, nnx.Module):
            leaves = jax.tree.leaves(nnx.state(value), is_leaf=_is_variable)
            self.variables += [leaf for leaf in leaves if _is_variable(leaf)]
        return value

    def _make(self, kind: str, number: float) -> Any:
        makers: dict[str, Callable[[], Any]] = {
            "param": lambda: nnx.Param(jnp.full(2, number), scale=1.0),
            "variable": lambda: nnx.Variable(jnp.full(2, number)),
            "array": lambda: jnp.full(2, number),
            "numpy": lambda: np.full(2, number, self.random.choice(DTYPES)),
            "large numpy": lambda: np.full(20_000, number, self.random.choice(DTYPES[:4])),
            "number": lambda: number,
            "flag": lambda: self.random.random() < 0.5,
            "module": lambda: Scaled(number),
            "stack": lambda: Stack(number),
        }
        return makers[kind]()


def _is_variable(value: Any) -> bool:
    return isinstance(value, nnx.Variable)


def _is_object(value: Any) -> bool:
    return isinstance(value, (nnx.Variable, nnx.Module)) and not isinstance(value, nnx.List)


KINDS = (
    "param", "variable", "variable", "array", "numpy", "large numpy", "number", "flag", "module", "stack",
)  # fmt: skip
CONTAINERS = ("single", "list", "list", "dict", "dict", "tuple", "nnx.List", "object")
IN_LISTS_OF_FLAX = ("param", "variable", "array", "module")


@dataclasses.dataclass
class Group:
    """A container of values of one kind, somewhere."""

    kind: str
    container: str
    place: Place
    writes: bool
    transform: str
    moves: bool
    """Whether the step itself moves the first item of a list to its end."""

    def items(self, held: Any) -> list[Any]:
        """Returns the values in order."""
        if self.container == "single":
            return [held]
        if self.container == "dict":
            return list(held.values())
        if self.container == "object":
            return [held.first, held.second, held.third]
        return list(held)


def contained(container: str, values: list[Any]) -> Any:
    """Puts values into a container."""
    if container == "single":
        return values[0]
    if container == "list":
        return list(values)
    if container == "tuple":
        return tuple(values)
    if container == "nnx.List":
        return nnx.List(values)
    if container == "object":
        return Three(*values)
    # The keys are not in order.
    return dict(zip(("m", "c", "x", "a", "t", "b")[: len(values)], values, strict=True))


class Three:
    """An object with several attributes."""

    def __init__(self, first: Any, second: Any, third: Any) -> None:
        self.first, self.second, self.third = first, second, third


def used(value: Any, weight: float, group: Group) -> Any:
    """What a step does with a value: the result tells them apart, and what is written too."""
    if isinstance(value, nnx.Variable):
        read = value[...]
        if group.writes:
            value[...] = read * 0.5 + weight
        return weight * read.sum() * value.get_metadata("scale", 1.0)
    if isinstance(value, nnx.Module):
        return weight * _called(value, group.transform)
    if isinstance(value, bool):
        return weight if value else 0.25
    return weight * jnp.sum(jnp.atleast_1d(jnp.asarray(value, jnp.float32))[:3])


def _called(module: Any, transform: str) -> Any:
    def total(module: Any) -> jax.Array:
        out: jax.Array = module(jnp.ones(2)).sum()
        return out

    if transform == "grad":
        value, gradients = nnx.value_and_grad(total)(module)
        return value + 0.1 * sum(leaf.sum() for leaf in jax.tree.leaves(gradients))
    if transform == "remat":
        return nnx.remat(total)(module)
    if transform == "jit":
        return jax.jit(lambda: total(module))()
    if transform == "checkpoint":
        return jax.checkpoint(lambda: total(module))()
    return total(module)


class Program:
    """One of the two programs of a seed.

    Attributes:
        variables: every variable that was made, in order.
        happened: what has happened between the calls, in words.
    """

    def __init__(self, seed: int, average: Average, scope: Scope) -> None:
        """Makes the values and the step."""
        self.random = Random(seed)
        self.maker = Maker(self.random, scope)
        self.average = average
        self.groups = [self._group() for _ in range(self.random.choice((1, 2, 2, 3)))]
        self.as_arguments = [self.random.random() < 0.25 for _ in self.groups]
        self.calling = self.random.choice(("same", "same", "lambda", "partial", "method"))
        self.with_batch = self.random.random() < 0.5
        self.happened: list[str] = []

    @property
    def variables(self) -> list[nnx.Variable[Any]]:
        """Every variable that was made, in order."""
        return self.maker.variables

    def _group(self) -> Group:
        random = self.random
        kind, container = random.choice(KINDS), random.choice(CONTAINERS)
        if container == "nnx.List" and kind not in IN_LISTS_OF_FLAX:
            container = "list"
        values = [self.maker.make(kind) for _ in range(3)]
        place = placed(contained(container, values), random)
        moves = container == "list" and kind in ("variable", "array") and random.random() < 0.2
        transform = random.choice(("none", "grad", "remat", "jit", "checkpoint"))
        return Group(kind, container, place, random.random() < 0.6, transform, moves)

    def call(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Returns the step of the next call, and its arguments after the batch."""
        arguments = [
            group.place.read()
            for group, passed in zip(self.groups, self.as_arguments, strict=True)
            if passed
        ]
        # JAX takes arguments apart, and puts a dict together in the order of its keys.
        arguments = jax.tree.map(lambda leaf: leaf, arguments, is_leaf=_is_object)
        step = self._step()
        if self.calling == "lambda":
            return (lambda *args: step(*args)), tuple(arguments)
        if self.calling == "partial":
            return functools.partial(step), tuple(arguments)
        return step, tuple(arguments)

    def _step(self) -> Callable[..., Any]:
        if not hasattr(self, "_made_step"):
            self._made_step = _step_of(self)
        return self._made_step

    def change(self) -> None:
        """Lets something happen between two calls."""
        random = self.random
        group = random.choice(self.groups)
        changes = [
            change for change in CHANGES if (change is not reorder or group.container != "single")
        ]
        change = random.choice(changes)
        self.happened.append(f"{change.__name__} of {group.container} of {group.kind}")
        change(self, group)


def _step_of(program: Program) -> Callable[..., Any]:
    """Makes the step: it reads every group, in a closure that holds no more than it needs."""
    groups, as_arguments, average = program.groups, program.as_arguments, program.average
    reads = [group.place.read for group in groups]

    def step(x: jax.Array, *arguments: Any) -> Any:
        flow = iter(arguments)
        total: Any = jnp.float32(0)
        for number, group in enumerate(groups):
            held = next(flow) if as_arguments[number] else reads[number]()
            for index, value in enumerate(group.items(held)):
                total = total + used(value, 1.0 + number + 0.37 * index, group)
            if group.moves:
                held.append(held.pop(0))
        return total, average(x * total)

    return step


# What happens between calls.


def nothing(program: Program, group: Group) -> None:
    """Nothing."""


def replace(program: Program, group: Group) -> None:
    """One value is replaced by a new one."""
    held = group.place.read()
    values = group.items(held)
    index = program.random.randrange(len(values))
    new = program.maker.make(group.kind)
    if group.container in ("single", "tuple"):
        values[index] = new
        group.place.write(contained(group.container, values))
    elif group.container == "dict":
        held[list(held)[index]] = new
    elif group.container == "object":
        setattr(held, ("first", "second", "third")[index], new)
    else:
        held[index] = new


def reorder(program: Program, group: Group) -> None:
    """The values change places."""
    held = group.place.read()
    values = group.items(held)
    program.random.shuffle(values)
    if group.container == "tuple":
        group.place.write(tuple(values))
    elif group.container == "dict":
        if program.random.random() < 0.5:  # another order of the same entries
            keys = sorted(held)
            entries = {key: held.pop(key) for key in keys}
            held.update(entries)
        else:
            held.update(zip(list(held), values, strict=True))
    elif group.container == "object":
        held.first, held.second, held.third = values
    else:
        held[:] = values


def add(program: Program, group: Group) -> None:
    """A value more."""
    held = group.place.read()
    if group.container == "list":
        held.insert(program.random.randrange(len(held) + 1), program.maker.make(group.kind))
    elif group.container == "dict":
        held[f"k{program.random.randrange(100)}"] = program.maker.make(group.kind)
    elif group.container == "tuple":
        group.place.write((*held, program.maker.make(group.kind)))


def remove(program: Program, group: Group) -> None:
    """A value less."""
    held = group.place.read()
    if group.container in ("list", "dict") and len(held) > 1:
        keys = list(held) if group.container == "dict" else list(range(len(held)))
        del held[program.random.choice(keys)]
    elif group.container == "tuple" and len(held) > 1:
        group.place.write(held[1:])


def replace_container(program: Program, group: Group) -> None:
    """Another container with the same values."""
    if group.container != "nnx.List":
        values = group.items(group.place.read())[:3]
        group.place.write(contained(group.container, (values * 3)[:3]))


def in_place(program: Program, group: Group) -> None:
    """A value changes where it is."""
    values = group.items(group.place.read())
    value = program.random.choice(values)
    number = program.random.randrange(2, 9)
    if isinstance(value, np.ndarray):
        value[1] = not value[1] if value.dtype == bool else number
    elif isinstance(value, nnx.Variable):
        if program.random.random() < 0.5:
            with program.maker.scope():
                value[...] = value[...] * 0 + number
        else:
            value.set_metadata(scale=float(number))
    elif isinstance(value, Scaled):
        value.scale = float(number)
    elif isinstance(value, Stack):
        value.layers["z"].frozen = not value.layers["z"].frozen
        with program.maker.scope():
            value.shifts["b"] = jnp.full(2, float(number))


def freeze(program: Program, group: Group) -> None:
    """The group is no longer written, or again."""
    group.writes = not group.writes


CHANGES: tuple[Callable[[Program, Group], None], ...] = (
    nothing, replace, replace, reorder, reorder, add, remove, replace_container, in_place, in_place, freeze,
)  # fmt: skip


def batches(seed: int, calls: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yields the batch of each call, of 8 examples."""
    rng = np.random.default_rng(seed)
    for _ in range(calls):
        yield rng.normal(size=8).astype(np.float32)
