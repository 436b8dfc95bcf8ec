"""Random streams inside ``run``: different numbers on each replica, the same stored state on all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from distribute_jax import _context
from distribute_jax._errors import ArgumentError
from distribute_jax._jax_private import read_raw, write_raw
from distribute_jax._mesh import DATA
from distribute_jax.program._dataflow import FOLD

T = TypeVar("T", bound=nnx.Pytree)

WEIGHTS = "params"
"""The stream that draws the same numbers on every replica by default, since it initialises weights."""


class _SameOnAll(str):
    """The tag of a marked stream, which forks of the stream inherit.

    It equals the plain tag, so that Flax's filters match the stream as before.
    """

    __slots__ = ()


def same_on_all_replicas(node: T) -> T:
    """Lets random streams draw the same numbers on every replica inside ``run``.

    Inside ``run`` each stream except ``params`` draws different numbers on each replica. After this call
    the streams of ``node`` do not: dropout with such a stream drops the same units on all replicas. The
    same holds for streams that are forked or split from them later, as by layers built with ``rngs``.

    Args:
        node: an ``nnx.RngStream`` such as ``rngs.noise``, or an ``nnx.Rngs`` or module, for all its streams.

    Returns:
        The node itself.

    Raises:
        ValueError: ``node`` holds no stream.
        RuntimeError: called inside ``run``, where the keys have been folded already.

    Example:
        >>> import distribute_jax as dj
        >>> from flax import nnx
        >>> strategy = dj.OneDeviceStrategy("cpu:0")
        >>> with strategy.scope():
        ...     rngs = nnx.Rngs(dropout=0, augment=1)
        ...     stream = dj.same_on_all_replicas(rngs.augment)
        >>> strategy.run(lambda: rngs.augment.normal((2,))).shape
        (2,)
    """
    _context.require_cross_replica("dj.same_on_all_replicas")
    _context.require_outside_step("dj.same_on_all_replicas")
    nodes = nnx.iter_graph(node) if isinstance(node, nnx.Pytree) else ()
    streams = [stream for _, stream in nodes if isinstance(stream, nnx.RngStream)]
    if not streams:
        raise ArgumentError(
            f"dj.same_on_all_replicas got {node!r:.200}, which holds no random stream. Give it a stream, "
            "dj.same_on_all_replicas(rngs.dropout), or the nnx.Rngs or module that holds streams."
        )
    for stream in streams:
        stream.tag = _SameOnAll(stream.tag)
    return node


def draws_per_replica(variable: nnx.Variable[Any], stream: Any) -> bool:
    """True if a key or counter, of a stream or alone, draws different numbers on each replica."""
    return variable.tag != WEIGHTS and not isinstance(getattr(stream, "tag", None), _SameOnAll)


def per_replica_keys(
    variables: Sequence[nnx.Variable[Any]], nodes: Sequence[Any], replicas: int
) -> list[Any]:
    """Folds the replica id into the key of each stream, and returns the raw values of all variables.

    Replica 0 keeps its key, so that one replica draws what undistributed code draws.
    """
    if replicas > 1:
        stream_of = {id(node.key): node for node in nodes if isinstance(node, nnx.RngStream)}
        keys = [v for v in variables if isinstance(v, nnx.RngKey)]
        folded = [key for key in keys if draws_per_replica(key, stream_of.get(id(key)))]
        write_raw(folded, [_replica_key(raw) for raw in read_raw(folded)])
    return read_raw(variables)


def _fold_replica_id(key: jax.Array) -> jax.Array:
    replica = jax.lax.axis_index(DATA)

    def fold(one: jax.Array) -> jax.Array:
        return jnp.where(replica == 0, one, jax.random.fold_in(one, replica))

    for _ in range(key.ndim):
        fold = jax.vmap(fold)
    return fold(key)


# A jitted function is one equation, whose name the proof recognizes.
_fold_replica_id.__name__ = FOLD
_replica_key = jax.jit(_fold_replica_id)
