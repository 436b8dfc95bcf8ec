"""State on the mesh before the first step: mirrored where it is not, shared buffers told apart."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from distribute_jax._errors import ArgumentError
from distribute_jax._internals import read_raw, write_raw
from distribute_jax._mesh import mirrored_sharding, num_replicas
from distribute_jax._tree import leaf_text, listed
from distribute_jax.program._bind import Binding


def place_state(binding: Binding, mesh: Mesh, *, warn: bool = True) -> None:
    """Mirrors every variable over the mesh, with one warning where state was made elsewhere."""
    whole = mirrored_sharding(mesh)
    raws = read_raw(binding.variables)
    _check_arrays(binding, raws)
    placed = [jax.tree.map(lambda leaf: _placed(leaf, whole), raw) for raw in raws]
    moved = [
        name
        for name, old, new in zip(binding.names, raws, placed, strict=True)
        if any(a is not b for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True))
    ]
    write_raw(binding.variables, placed)
    if moved and warn and num_replicas(mesh) > 1:
        warnings.warn(_OUTSIDE.format(n=len(moved), lines=listed(moved, 3)), stacklevel=5)


def _placed(leaf: Any, whole: NamedSharding) -> Any:
    if isinstance(leaf, jax.Array):
        if leaf.sharding.is_equivalent_to(whole, leaf.ndim):
            return leaf
        return jax.device_put(leaf, whole)
    return jax.device_put(jnp.asarray(leaf), whole)


def _check_arrays(binding: Binding, raws: list[Any]) -> None:
    bad = [
        f"{name}: {leaf_text(leaf)}"
        for name, raw in zip(binding.names, raws, strict=True)
        for leaf in jax.tree.leaves(raw)
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float, complex))
    ]
    if bad:
        raise ArgumentError(
            f"strategy.run found variables that hold no array:\n{listed(bad)}\nThe state of a step "
            "is made of arrays and numbers. Keep other values as plain attributes of the module."
        )


_OUTSIDE = """\
{n} variables were made outside of strategy.scope() and are now mirrored over its devices:
{lines}
Build the model and the optimizer inside `with strategy.scope():`, so that they are placed at once."""
