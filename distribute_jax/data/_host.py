"""The batches of one pass, checked and laid out, still on the host."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import jax
import numpy as np

from distribute_jax._mesh import outside_mesh
from distribute_jax._typing import PyTree
from distribute_jax.data._alike import Alike
from distribute_jax.data._check import check_batch
from distribute_jax.data._element import HostElement
from distribute_jax.data._partial import Divider


def laid_out(batches: Iterable[PyTree], divider: Divider, batching: str) -> Iterator[HostElement]:
    """Gives each batch that becomes an element, with the shares of its rows.

    Raises:
        ArgumentError: a batch cannot be divided, or is not like the first one.
    """
    alike, is_first = Alike(), True
    for position, batch in enumerate(batches, divider.seen.batches):
        where = f"Batch {position} of the dataset"
        n = check_batch(batch, where, batching)
        if n > 0:
            alike.check(batch, where)
        whole = _digest(batch) if divider.is_common and is_first else None
        is_first = False
        for cut in divider.divide(n, where):
            mine = batch if len(cut.rows) == n else _rows(batch, cut.rows)
            yield HostElement(mine, cut.division, divider.seen, cut.all_counts, whole)


def _rows(batch: PyTree, rows: range) -> PyTree:
    # Inside scope() the mesh context would refuse any computation on one device.
    with outside_mesh():
        return jax.tree.map(lambda leaf: leaf[rows.start : rows.stop], batch)


def _digest(batch: PyTree) -> str:
    total = hashlib.blake2b(digest_size=8)
    for leaf in jax.tree.leaves(batch):
        total.update(np.ascontiguousarray(leaf).tobytes())
    return total.hexdigest()
