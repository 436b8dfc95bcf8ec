"""The results of a step: arrays, static values and bound objects; and which have a row per example."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._absent import is_foreign
from distribute_jax._errors import ArgumentError
from distribute_jax._messages import check_int_range, leaf_text
from distribute_jax.program._binding import Binding


@dataclass(frozen=True, eq=False)
class Results:
    """The structure of what ``fn`` returned."""

    treedef: Any
    """The pytree of the result."""
    leaves: tuple[Any, ...]
    """For each leaf: ``("array", k)``, ``("static", value)``, ``("node", i)``, ``("variable", i)``."""
    names: tuple[str, ...]
    """For each array: its path in the result."""
    declared: frozenset[int]
    """The arrays that ``dj.per_example`` declared to hold one row for each example."""


def sort_results(
    result: Any, binding: Binding, nodes: list[Any]
) -> tuple[Results, list[jax.Array]]:
    """Takes a result apart into its structure and its arrays."""
    bound = {id(variable): ("variable", i) for i, variable in enumerate(binding.variables)}
    bound |= {id(node): ("node", i) for i, node in enumerate(nodes)}
    paths, treedef = jax.tree_util.tree_flatten_with_path(
        result, is_leaf=lambda value: id(value) in bound or isinstance(value, PerExample)
    )
    leaves: list[Any] = []
    names: list[str] = []
    arrays: list[jax.Array] = []
    declared: set[int] = set()
    for path, leaf in paths:
        if id(leaf) in bound:
            leaves.append(bound[id(leaf)])
        elif isinstance(leaf, (PerExample, jax.Array, np.ndarray, np.generic)):
            if isinstance(leaf, PerExample):
                declared.add(len(arrays))
                leaf = leaf.value
            leaves.append(("array", len(arrays)))
            names.append("result" + jax.tree_util.keystr(path))
            arrays.append(
                jnp.asarray(check_int_range(leaf, "strategy.run, in the result of its step,"))
            )
        else:
            _check_holds_no_arrays(leaf, "result" + jax.tree_util.keystr(path))
            leaves.append(("static", leaf))
    return Results(treedef, tuple(leaves), tuple(names), frozenset(declared)), arrays


def _check_holds_no_arrays(value: Any, name: str) -> None:
    """Refuses an object whose arrays JAX does not see: they would be dead, or old, once the trace ends."""
    if is_foreign(value) and hasattr(type(value), "__array__"):
        raise ArgumentError(
            f"The step returned {leaf_text(value)} as {name}, which is computed once, when the step is "
            "traced. Compute with jax.numpy, and draw with jax.random."
        )
    attributes = getattr(value, "__dict__", None) or {}
    arrays = [key for key, part in attributes.items() if isinstance(part, jax.core.Tracer)]
    if arrays:
        raise ArgumentError(
            f"The step returned a {type(value).__name__} as {name}, with arrays in {', '.join(arrays)}, "
            "but JAX does not know how to take that class apart. Return the arrays themselves or a dict "
            "of them, or register the class, as with @jax.tree_util.register_dataclass."
        )


def rebuild(results: Results, arrays: list[Any], binding: Binding) -> Any:
    """Puts a result together again from its arrays."""
    leaves = []
    for kind, content in results.leaves:
        if kind == "array":
            leaves.append(arrays[content])
        elif kind == "static":
            leaves.append(content)
        elif kind == "node":
            leaves.append(binding.nodes[content]())
        else:
            leaves.append(binding.variables[content])
    return jax.tree.unflatten(results.treedef, leaves)


T = TypeVar("T")


@dataclass(frozen=True)
class PerExample:
    """Marks a result leaf that has one row for each example of the per-replica batch."""

    value: Any


def per_example(tree: T) -> T:
    """Declares that each array of a result has one row for each example of the replica's batch.

    ``local_results``, ``gather`` and ``reduce(axis=0)`` leave the padding of a partial batch out of
    such results. Usually ``run`` finds out by itself, by tracing the step at another batch size; this
    is for steps that cannot be traced at another size.

    Args:
        tree: a pytree of arrays, dim 0 of each as long as this replica's share of the batch.

    Returns:
        The pytree, marked; return it from the function given to ``run``.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> strategy = dj.OneDeviceStrategy("cpu:0")
        >>> strategy.run(lambda: dj.per_example(jnp.arange(2.0)))
        Array([0., 1.], dtype=float32)
    """
    return jax.tree.map(PerExample, tree)  # type: ignore[no-any-return]
