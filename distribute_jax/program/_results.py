"""The results of a step: their structure, arrays, static values and bound objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._absent import is_foreign
from distribute_jax._checks import converting
from distribute_jax._errors import ArgumentError
from distribute_jax._messages import check_int_range, leaf_text
from distribute_jax.program._binding import Binding


@dataclass(frozen=True, eq=False)
class Results:
    """The structure of what a step returned."""

    treedef: Any
    leaves: tuple[Any, ...]
    """For each leaf: ``("array", k)``, ``("static", value)``, ``("node", i)``, ``("variable", i)``."""
    names: tuple[str, ...]
    """The path of each array in the result."""
    declared: frozenset[int]
    """The arrays that were marked by ``dj.per_example``."""


def flatten_results(
    result: Any, binding: Binding, nodes: list[Any]
) -> tuple[Results, list[jax.Array]]:
    """Returns the structure of a result and its arrays."""
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
        elif isinstance(leaf, (str, bytes)):  # of NumPy too, which are np.generic
            leaves.append(("static", leaf))
        elif isinstance(leaf, (PerExample, jax.Array, np.ndarray, np.generic)):
            if isinstance(leaf, PerExample):
                declared.add(len(arrays))
                leaf = leaf.value
            leaves.append(("array", len(arrays)))
            names.append("result" + jax.tree_util.keystr(path))
            with converting(f"strategy.run: {names[-1]} of its step", leaf, "an array of numbers"):
                arrays.append(
                    jnp.asarray(check_int_range(leaf, "strategy.run, in the result of its step,"))
                )
        else:
            _check_holds_no_arrays(leaf, "result" + jax.tree_util.keystr(path))
            leaves.append(("static", leaf))
    return Results(treedef, tuple(leaves), tuple(names), frozenset(declared)), arrays


def _check_holds_no_arrays(value: Any, name: str) -> None:
    """Raises for an object whose arrays JAX does not see: they would be leaked tracers."""
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
            "but JAX does not know that class as a pytree. Return the arrays themselves or a dict of them, "
            "or register the class, as with @jax.tree_util.register_dataclass."
        )


def rebuild(results: Results, arrays: list[Any], binding: Binding) -> Any:
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
    """Marks a leaf of the result that has one row for each example of the replica's batch."""

    value: Any


def per_example(tree: T) -> T:
    """Declares that each array of a result has one row for each example of the replica's batch.

    ``local_results``, ``gather`` and ``reduce(axis=0)`` drop the rows of padding from such results. Usually
    ``run`` finds such results itself, by tracing the step at another batch size; use this for steps that
    cannot be traced at another size.

    Args:
        tree: a pytree of arrays, whose dim 0 is as long as this replica's share of the batch.

    Returns:
        The pytree, marked; return it from the function given to ``run``.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> strategy = dj.OneDeviceStrategy("cpu:0")
        >>> strategy.run(lambda: dj.per_example(jnp.arange(2.0)))
        Array([0., 1.], dtype=float32)
    """
    return jax.tree.map(PerExample, tree)
