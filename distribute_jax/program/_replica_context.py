"""What a step sees of its replica inside ``run``: the replica context, and random streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from distribute_jax import _context, _frames
from distribute_jax._absent import getattr_with_hints
from distribute_jax._errors import ArgumentError, ContextError
from distribute_jax._jax_private import read_raw, write_raw
from distribute_jax._mesh import DATA, replicas_per_device
from distribute_jax._messages import PyTree
from distribute_jax._values import DistributedValues
from distribute_jax.collectives._all_reduce import all_gather, all_reduce, stacked_over_replicas
from distribute_jax.collectives._markers import real_rows
from distribute_jax.collectives._reduction import (
    CommunicationImplementation,
    CommunicationOptions,
    ReduceOp,
    reduce_op as as_reduce_op,
)
from distribute_jax.program._aggregation import FOLD
from distribute_jax.program._arguments import check_call

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


class ReplicaContext:
    """The id of this replica, its share of the batch, and its collectives.

    ``get_replica_context()`` returns it inside a function passed to ``strategy.run``. All replicas run
    one program, so every replica takes part in every collective, in the same order.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/ReplicaContext
    """

    if not TYPE_CHECKING:
        __getattr__ = getattr_with_hints("dj.ReplicaContext")

    def __init__(
        self,
        strategy: Any,
        *,
        bound: bool = True,
        share: int | None = None,
        counts: jax.Array | None = None,
    ) -> None:
        """Creates the context of the replicas of a strategy; ``run`` does this.

        Args:
            strategy: the current strategy.
            bound: whether the replica axis is bound.
            share: rows of this replica's share of the batch; None if no batch was passed.
            counts: real examples of every replica, int32 of shape (N,), for a padded batch.
        """
        self._strategy = strategy
        self._bound = bound
        self._share = share
        self._counts = counts
        self.divides_by_share = False
        """True if a loss was divided by the rows of one replica, so that gradients must be averaged."""

    @property
    def strategy(self) -> Any:
        """The current strategy."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas whose gradients are combined."""
        if not self._bound:  # a step's number is right in its callbacks too
            self._require_current("num_replicas_in_sync")
        return int(self._strategy.num_replicas_in_sync)

    @property
    def replica_id_in_sync_group(self) -> Any:
        """The id of this replica, 0 to N-1: inside ``run`` a traced int32 scalar.

        It has no value for Python control flow; use ``jnp.where`` or ``jax.lax.cond``.
        """
        self._require_current("replica_id_in_sync_group")
        return jax.lax.axis_index(DATA) if self._bound else 0

    @property
    def batch_mask(self) -> jax.Array | None:
        """Which rows of the batch are real: bool, shape (per-replica batch,), per replica.

        Constant True for a full batch; None when no distributed batch was passed to ``run``.
        """
        self._require_current("batch_mask")
        if self._share is None:
            return None
        if self._counts is None:
            return jnp.ones((self._share,), bool)
        return real_rows(jnp.arange(self._share) < self._counts[self.replica_id_in_sync_group])

    @property
    def is_padded(self) -> bool:
        """True if the batch of this call is partial, so that some of its rows are padding."""
        return self._counts is not None

    @property
    def real_examples(self) -> Any:
        """The number of real examples in the global batch: an int, traced for a padded batch.

        None when no distributed batch was passed to ``run``.
        """
        self._require_current("real_examples")
        if self._counts is not None:
            return self._counts.sum(dtype=jnp.int32)
        return None if self._share is None else self._share * self.num_replicas_in_sync

    def all_reduce(
        self, reduce_op: ReduceOp | str, value: PyTree, options: CommunicationOptions | None = None
    ) -> PyTree:
        """Combines a pytree over the replicas; every replica gets the same result.

        All leaves of a dtype are combined in one collective, by the strategy's ``cross_device_ops``. The
        gradient is the same reduction of the upstream gradients, as in TensorFlow.

        Args:
            reduce_op: ``"sum"`` or ``"mean"``. A sum has the dtype of ``jnp.sum``: integers are added
                exactly, narrow ones in the default integer. The mean of integers is floating-point, and
                that of float16 is computed in float32, so that its sum does not overflow.
            value: a pytree of arrays of any numeric dtypes; shapes equal on all replicas. The entries of
                a ``jax.experimental.sparse.BCOO`` are concatenated, and add up when it is made dense.
            options: packing or another algorithm for this call; overrides the options of the strategy.

        Returns:
            The pytree with every leaf combined, mirrored.

        Raises:
            ValueError: a leaf is not numeric (a bool is not), ``reduce_op`` is not SUM or MEAN, or
                ``options`` are not ``CommunicationOptions``, or a ring with ``replicas_per_device``.

        Example:
            >>> import distribute_jax as dj
            >>> strategy = dj.OneDeviceStrategy("cpu:0")
            >>> def step():
            ...     return dj.get_replica_context().all_reduce("sum", {"loss": 2.0})
            >>> float(strategy.run(step)["loss"])
            2.0

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/ReplicaContext#all_reduce
        """
        self._require_current("all_reduce")
        options_of_strategy = (
            getattr(self._strategy, "_communication_options", None) or CommunicationOptions()
        )
        options = options_of_strategy.merge(options)
        is_ring = options.implementation is CommunicationImplementation.RING
        if is_ring and (each := replicas_per_device(self._strategy._mesh)) > 1:
            raise ArgumentError(
                f"CommunicationOptions(implementation='ring') with replicas_per_device={each}: the replicas "
                "of a device run one after the other, so none can send to another. Leave one of the two out."
            )
        return all_reduce(
            as_reduce_op(reduce_op),
            value,
            self.num_replicas_in_sync,
            bound=self._bound,
            ops=getattr(self._strategy, "_cross_device_ops", None),
            options=options,
        )

    def all_gather(
        self, value: PyTree, axis: int, options: CommunicationOptions | None = None
    ) -> PyTree:
        """Joins the replicas' arrays along a dim, in replica order, for every replica.

        The gradient at a replica is its slice of the summed upstream gradients.

        Args:
            value: a pytree of arrays of numbers, bools or random keys with at least one dim (each
                replica's view).
            axis: the dim to join along; may be negative.
            options: accepted as in TensorFlow's signature; has no effect on how XLA gathers.

        Returns:
            The pytree with dim ``axis`` N times as long, mirrored.

        Raises:
            ValueError: a leaf is a scalar, does not have the dim, or holds no numbers, bools or keys.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/ReplicaContext#all_gather
        """
        self._require_current("all_gather")
        return all_gather(value, int(axis), bound=self._bound)

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> PyTree:
        """Calls a function once in cross-replica context, with all replicas' arguments regrouped.

        Args:
            merge_fn: called as ``merge_fn(strategy, *args, **kwargs)``; its array arguments are
                per-replica values that ``strategy.reduce`` and
                ``strategy.experimental_local_results`` take.
            args: this replica's positional arguments.
            kwargs: this replica's keyword arguments.

        Returns:
            The result of ``merge_fn``, each per-replica value replaced by this replica's part.

        Raises:
            RuntimeError: called in cross-replica context.
            ValueError: ``merge_fn`` is not a function, ``args`` not a tuple or ``kwargs`` not a dict.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/ReplicaContext#merge_call
        """
        top = _frames.entered()
        if top is not None and top.replica is None:
            raise ContextError(
                "merge_call was called in cross-replica context. Call it inside a function given to "
                "strategy.run, on dj.get_replica_context()."
            )
        self._require_current("merge_call")
        check_call(args, kwargs, "merge_call(merge_fn")
        args, kwargs = jax.tree.map(
            self._regroup,
            (tuple(args), kwargs or {}),
            is_leaf=lambda leaf: isinstance(leaf, (nnx.Variable, nnx.Pytree)),
        )
        with _frames.frame(self._strategy, merging=True):
            result = merge_fn(self._strategy, *args, **kwargs)
        return jax.tree.map(
            self._local_part, result, is_leaf=lambda leaf: isinstance(leaf, DistributedValues)
        )

    def _require_current(self, name: str) -> None:
        """Raises outside the step, or the code without a strategy, that the context belongs to."""
        frames = _frames.stack.frames or (_frames.default(),)
        if all(frame.replica is not self for frame in frames):
            raise ContextError(
                f"{name} of a replica context was used outside the step that the context belongs to. Call "
                f"dj.get_replica_context() in the step, each time: dj.get_replica_context().{name}"
            )

    def _regroup(self, leaf: Any) -> Any:
        if not self._bound or not isinstance(leaf, jax.Array):
            return leaf
        return MergedValues(stacked_over_replicas(leaf), self.num_replicas_in_sync)

    def _local_part(self, leaf: Any) -> Any:
        if not isinstance(leaf, DistributedValues):
            return leaf
        return jnp.stack(leaf.values)[self.replica_id_in_sync_group]


class MergedValues(DistributedValues):
    """The values of one array on all replicas, as a function given to ``merge_call`` sees them."""

    def __init__(self, stacked: jax.Array, replicas: int) -> None:
        self._stacked = stacked
        self._replicas = replicas

    @property
    def values(self) -> tuple[jax.Array, ...]:
        """One array for each replica."""
        return tuple(self._stacked[i] for i in range(self._replicas))

    def __repr__(self) -> str:
        return f"PerReplica:{self._replicas} × {self._stacked[0].aval}"
