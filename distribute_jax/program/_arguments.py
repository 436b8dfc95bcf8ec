"""Classifies the arguments of a call: batches to divide, arrays to trace, static values, bound objects."""

from __future__ import annotations

import enum
import functools
import inspect
import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from distribute_jax._checks import is_function
from distribute_jax._errors import ArgumentError
from distribute_jax._jax_private import ARRAY, trace_settings
from distribute_jax._mesh import sharding_over, transfers_are_guarded
from distribute_jax._messages import (
    check_int_range,
    devices_hold,
    flatten,
    leaf_text,
    listed,
    path_text,
)
from distribute_jax._padding import rows_to_joined, uneven_to_joined, with_all_rows, with_rows
from distribute_jax._values import Layout, PerReplica, UnevenPerReplica

_STATIC_TYPES = (bool, str, bytes, enum.Enum, np.dtype, type)
_NUMBER_TYPES = (int, float, complex)


@functools.lru_cache(maxsize=1024)  # the instance check of Flax is slow
def _is_one_leaf(cls: type) -> bool:
    """True if values of a type count as one leaf although they are pytrees."""
    return issubclass(cls, (PerReplica, nnx.Pytree, nnx.Variable))


def is_one_leaf(value: Any) -> bool:
    """True if a value counts as one leaf although it is a pytree."""
    cls: Any = type(value)
    return _is_one_leaf(cls)


@dataclass(slots=True, eq=False)
class Arguments:
    """The flattened arguments of one call."""

    treedef: Any
    """The structure of ``(args, kwargs)``."""
    signature: tuple[Any, ...]
    """Equal for calls that the same program can serve."""
    data: list[Any]
    """Arrays, numbers and ``PerReplica``s, in order: the inputs of the program."""
    kinds: list[str]
    """For each leaf: ``data``, ``static`` or ``bound``."""
    leaves: list[Any]
    """Every leaf, in order."""
    bound: list[Any]
    """Leaves that are walked: modules, variables, objects."""
    counts: tuple[int, ...] | None
    """The number of real examples of each replica; None if no argument is a padded batch."""
    has_batch: bool
    """True if a distributed batch is among the arguments."""
    batches: int
    """The number of leaves that are ``PerReplica``s."""
    has_all_rows: bool = False
    """True if the padding of each replica is the real examples of the others, which the step may use."""
    shardings: tuple[NamedSharding | None, ...] = ()
    """How each of ``data`` is sharded in the program; empty if none is."""

    @property
    def is_repeatable(self) -> bool:
        """True if all leaves are arrays or full batches, so that :class:`RepeatedArguments` may be noted."""
        are_arrays = (type(x) is PerReplica or isinstance(x, jax.Array) for x in self.leaves)
        return self.counts is None and not self.shardings and all(are_arrays)

    def with_data(self, data: list[Any]) -> Arguments:
        """Returns the same arguments with other data, and the counts of that data."""
        joined = [v for v in data if isinstance(v, PerReplica) and v.layout is Layout.JOINED]
        counts = joined[0].counts if joined else None
        return replace(self, data=data, counts=counts, shardings=())

    @property
    def names(self) -> list[str]:
        """The path of every leaf, as in ``args[0]['image']``."""
        tree = self.unflatten(range(len(self.leaves)))
        return [argument_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]

    @property
    def arrays(self) -> list[Any]:
        """``data``, with the array of each ``PerReplica``, as compiled programs take it."""
        return [x.program_input if isinstance(x, PerReplica) else x for x in self.data]

    def unflatten(self, leaves: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns ``(args, kwargs)`` with these leaves."""
        args, kwargs = jax.tree.unflatten(self.treedef, leaves)
        return args, kwargs

    def names_of(self, kind: str) -> list[str]:
        """The paths of the leaves of one kind."""
        return [name for name, of in zip(self.names, self.kinds, strict=True) if of == kind]


def flatten_arguments(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: Mesh,
    *,
    divided: Mesh | None = None,
    more: tuple[type, ...] = (),
) -> Arguments:
    """Flattens the arguments and classifies the leaves by what ``run`` does with them.

    Arrays that are sharded over the mesh ``divided`` stay so; others are replicated. ``more`` types count
    as arrays.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_one_leaf)
    signature: list[Any] = [treedef, trace_settings()]
    kinds = ["data"] * len(leaves)
    bound: list[Any] = []
    batches: list[PerReplica] = []
    for index, leaf in enumerate(leaves):
        if type(leaf) is ARRAY:  # as most are
            signature.append(_array_signature(leaf.aval))
        elif isinstance(leaf, PerReplica):
            leaves[index] = batch = _as_batch(leaf)
            signature.append(_batch_signature(batch, mesh))
            batches.append(batch)
        else:
            kinds[index], of_leaf = _classified(leaf, more)
            signature.append(of_leaf)
            if kinds[index] == "bound":
                bound.append(leaf)
    data = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind == "data"]
    joined = [b for b in batches if b.layout is Layout.JOINED]
    counts = _common_counts(joined, leaves, treedef) if joined else None
    shardings: tuple[NamedSharding | None, ...] = ()
    if divided and any(shardings := tuple(sharding_over(leaf, divided) for leaf in data)):
        signature += shardings
    return Arguments(
        treedef, tuple(signature), data, kinds, leaves, bound, counts, bool(joined), len(batches),
        shardings=shardings,
    )  # fmt: skip


def full_batch(arguments: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns ``(args, kwargs)`` without padding; each replica has all rows if shares differ in length."""
    counts = arguments.counts or (0,)

    def full(batch: PerReplica) -> PerReplica:
        is_even = len(set(counts)) == 1
        return with_rows(batch, range(counts[0]), None) if is_even else with_all_rows(batch)

    leaves = [
        full(leaf) if isinstance(leaf, PerReplica) and leaf.counts else leaf
        for leaf in arguments.leaves
    ]
    return arguments.unflatten(leaves)


class RepeatedArguments:
    """The structure and types of the arrays of one call, to recognise another call of the same signature.

    Unlike in :func:`flatten_arguments` JAX need not ask which types are leaves, and steps return arrays with
    identical avals each time.
    """

    __slots__ = ("_array_types", "_avals", "_settings", "_treedef", "_types", "batches")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], batches: int) -> None:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        self._treedef: Any = treedef
        # Those of random keys are other types than those of numbers.
        self._array_types = {ARRAY, *map(type, leaves)} | ({np.ndarray} if batches else set())
        self._types: list[Any] = list(map(_type_of, leaves))
        self._avals = self._types
        self._settings = trace_settings()
        self.batches = batches

    def arrays(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """Returns the arrays of a call that has the same signature; None for any other call."""
        leaves, treedef = flatten((args, kwargs), None)
        types = set(map(type, leaves))
        if (
            treedef != self._treedef
            or not types <= self._array_types
            or trace_settings() != self._settings
        ):
            return None
        if np.ndarray not in types:
            avals: list[Any] = list(map(_aval, leaves))
        elif transfers_are_guarded():
            return None
        else:
            avals = [x.aval if type(x) is not np.ndarray else _type_of(x) for x in leaves]
        # Lists compare identical items in C.
        if avals != self._avals and list(map(_type_of, leaves)) != self._types:
            return None
        self._avals = avals
        return leaves


_aval = operator.attrgetter("aval")
_aval_type = operator.attrgetter("shape", "dtype", "weak_type")


def _type_of(array: Any) -> tuple[Any, ...]:
    return (
        (array.shape, array.dtype, False) if type(array) is np.ndarray else _aval_type(array.aval)
    )


def _classified(leaf: Any, more: tuple[type, ...]) -> tuple[str, Any]:
    """Returns the kind of an argument that is not a batch, and its part of the signature."""
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, *more)):
        if isinstance(leaf, jax.core.Tracer):
            raise ArgumentError(_LEAKED.format(leaf=leaf_text(leaf)))
        if not isinstance(leaf, (jax.Array, *more)):
            _check_array(leaf)
        return "data", _array_signature(leaf)
    if isinstance(leaf, _STATIC_TYPES):
        return "static", (type(leaf), leaf)
    if isinstance(leaf, _NUMBER_TYPES):
        check_int_range(leaf, "strategy.run")
        return "data", type(leaf)
    return "bound", "bound"


_LEAKED = (
    "strategy.run got {leaf} among its arguments, which JAX was tracing: it has no value outside of the "
    "function that was traced (under jax.jit, grad, vmap, scan or strategy.run). Return it from there."
)


def _as_batch(value: PerReplica) -> PerReplica:
    """Converts values of unequal lengths, and results of a step on a partial batch, to a batch."""
    if isinstance(value, UnevenPerReplica):
        return uneven_to_joined(value.parts, value.mesh)
    is_partial = value.counts is not None or value.ambiguous is not None
    if not is_partial or value.layout is not Layout.STACKED:
        return value
    value.check_rows_known()
    return rows_to_joined(value)


def _array_signature(array: Any) -> Any:
    shape = array.shape
    if not shape:
        return _scalar_signature(array)
    return shape, array.dtype, getattr(array, "weak_type", False)


def _scalar_signature(array: Any) -> Any:
    """Returns the signature of a scalar: for a weakly typed one, that of the Python number.

    The ``step`` of a new ``TrainState`` is the int 0, and an array after the first step, which must not
    compile another program.
    """
    config: Any = jax.config
    if not getattr(array, "weak_type", False):
        return ((), array.dtype)
    of_python = array.dtype.itemsize == (8 if config.jax_enable_x64 else 4)
    return {"i": int, "f": float}.get(array.dtype.kind if of_python else "", ((), array.dtype))


def _check_array(array: Any) -> None:
    """Refuses a NumPy array that a device cannot hold, or would change."""
    if not devices_hold(array.dtype):
        raise ArgumentError(
            f"strategy.run got {leaf_text(array)} among its arguments. Devices hold bools and numbers "
            "of at most 64 bits: encode other values as integers, or bind them with functools.partial."
        )
    check_int_range(array, "strategy.run")


def _batch_signature(value: PerReplica, mesh: Mesh) -> Any:
    if value.mesh is not mesh and value.mesh != mesh:
        raise ArgumentError(
            f"strategy.run got a PerReplica made for the devices {value.mesh.devices.tolist()}, but "
            f"this strategy's are {mesh.devices.tolist()}. Distribute the data with the strategy "
            "that runs the step: strategy.distribute_dataset(dataset)."
        )
    return value.layout, *_type_of(value.array), value.counts is None


def _common_counts(joined: list[PerReplica], leaves: list[Any], treedef: Any) -> Any:
    counts = {value.counts for value in joined}
    if len(counts) == 1:
        return counts.pop()
    full = [value for value in joined if value.counts is None]
    known = counts - {None}
    if len(known) == 1 and not full:
        return known.pop()
    named = jax.tree_util.tree_leaves_with_path(
        jax.tree.unflatten(treedef, leaves), is_leaf=is_one_leaf
    )
    lines = [
        f"{argument_name(path)}: {leaf.counts or 'all real'} of {leaf.part_shape[:1]}"
        for path, leaf in named
        if isinstance(leaf, PerReplica)
    ]
    raise ArgumentError(
        "strategy.run got batches with different numbers of real examples on the replicas:\n"
        f"{listed(lines)}\nAll batches of one call share one mask. Put the leaves that belong "
        "together into one dataset element, or run them in separate calls."
    )


def argument_name(path: Any) -> str:
    """Returns the path of a leaf of ``(args, kwargs)`` in the user's words."""
    if path and getattr(path[0], "idx", None) == 1:
        return path_text(path[1:], "kwargs")
    return path_text(path[1:], "args")


def _brief(value: Any) -> str:
    return type(value).__name__ if isinstance(value, PerReplica) else leaf_text(value)


def check_function(fn: Any) -> None:
    """Raises if this cannot be a step of one replica."""
    is_async = inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn)
    if not is_function(fn) or is_async:
        kind = "a generator or async function" if is_async else leaf_text(fn)
        raise ArgumentError(
            f"strategy.run(fn={kind}): fn must be a plain function, which is traced once. Pass the "
            "function itself, and its arguments in args: strategy.run(step, args=(x, y))."
        )


def check_call(args: Any, kwargs: Any, call: str = "strategy.run(fn") -> None:
    """Raises if arguments are in the wrong container; the message begins with the user's ``call``."""
    if not isinstance(args, (list, tuple)):
        raise ArgumentError(
            f"{call}, args={_brief(args)}): args must be a list or tuple of positional arguments. For a "
            f"single one write args=(value,), for several {call}, args=(x, y))."
        )
    if kwargs is not None and not isinstance(kwargs, dict):
        raise ArgumentError(
            f"{call}, kwargs={_brief(kwargs)}): kwargs must be a dict of keyword "
            "arguments, such as kwargs={'training': True}."
        )
