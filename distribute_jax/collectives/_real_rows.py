"""``real_rows``: marks the mask of a partial batch, so that the proof of its padding knows it."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

real_rows_p: Any = Primitive("real_rows")
"""An identity on bools of shape (rows,), which are False exactly for the rows that are padding."""


def real_rows(mask: jax.Array) -> jax.Array:
    """Marks a mask of the rows of this replica's share as the one that is False for padding."""
    marked: jax.Array = real_rows_p.bind(mask)
    return marked


def _identity(mask: Any) -> Any:
    return mask


real_rows_p.def_impl(_identity)
real_rows_p.def_abstract_eval(_identity)
mlir.register_lowering(real_rows_p, lambda ctx, mask: [mask])
batching.primitive_batchers[real_rows_p] = lambda masks, dims: (masks[0], *dims)
