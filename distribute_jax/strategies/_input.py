"""The methods of a strategy that distribute datasets, and values from a function of the replica."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from distribute_jax import _context, _frames
from distribute_jax._checks import takes
from distribute_jax._errors import (
    ArgumentError,
    ArgumentTypeError,
    IterationError,
    UnsupportedError,
)
from distribute_jax._mesh import (
    is_local,
    local_replicas,
    num_replicas,
    outside_mesh,
    split_sharding,
)
from distribute_jax._messages import (
    PyTree,
    check_int_range,
    check_not_masked,
    devices_hold,
    is_key,
    leaf_text,
)
from distribute_jax._values import PerReplica, UnevenPerReplica
from distribute_jax.data import DistributedDataset, InputContext, InputOptions, InputReplicationMode
from distribute_jax.data._agreement import epoch_ends, worker_of
from distribute_jax.data._feed import Feed, GlobalBatches, PerReplicaFeed, sources_of
from distribute_jax.data.sources import find_source
from distribute_jax.processes import job_of


class InputMethods:
    """The methods of ``Strategy`` that distribute datasets."""

    _offers_per_replica_input = True
    """Whether ``InputReplicationMode.PER_REPLICA`` is supported; as in TensorFlow, not everywhere."""

    @final
    def distribute_dataset(
        self: Any,
        dataset: Iterable[PyTree] | Callable[[], Iterable[PyTree]],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Distributes global batches over the replicas.

        Each element keeps its structure; its arrays become per-replica values that ``run`` splits. The
        results for a partial batch are exactly those of one device.

        Args:
            dataset: an iterable of global batches (pytrees of arrays, dim 0 the examples), or a
                function that makes one.
            options: how partial batches are treated, and which part each process reads.

        Returns:
            An iterable of distributed elements.

        Raises:
            ValueError: the dataset does not yield batches, or an option does not fit it.
            NotImplementedError: ``InputReplicationMode.PER_REPLICA``.

        Example:
            >>> import distribute_jax as dj, numpy as np
            >>> strategy = dj.OneDeviceStrategy("cpu:0")
            >>> batches = [np.arange(4.0), np.arange(2.0)]
            >>> [float(strategy.reduce("sum", x, axis=0)) for x in strategy.distribute_dataset(batches)]
            [6.0, 1.0]

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy#experimental_distribute_dataset
        """
        self._enter_program("strategy.distribute_dataset")
        chosen = options or InputOptions()
        if chosen.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
            raise UnsupportedError(
                "strategy.distribute_dataset got InputReplicationMode.PER_REPLICA, but it divides "
                "the global batches of one dataset. `InputReplicationMode.PER_REPLICA` is only "
                "supported in `distribute_datasets_from_function`, which makes a dataset for each."
            )
        if isinstance(dataset, DistributedDataset):
            raise ArgumentError(
                "strategy.distribute_dataset got a dataset that is distributed already."
            )
        source = find_source(dataset)
        replicas, worker = len(local_replicas(self.mesh)), worker_of(self.mesh)
        feed = GlobalBatches(source, chosen, replicas, worker)
        return _dataset(self, feed, chosen, common=feed.is_common)

    experimental_distribute_dataset = distribute_dataset

    @final
    def distribute_datasets_from_function(
        self: Any, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distributes per-replica batches, of datasets that a function makes.

        Nothing is sharded and no batch is cut: the replicas take complete batches in turn, so the
        function batches by ``context.get_per_replica_batch_size`` and shards, if it should, by
        ``context.input_pipeline_id``.

        Args:
            dataset_fn: takes an ``InputContext`` and returns what ``distribute_dataset`` takes, with
                per-replica batches. It is called once for each process, or for each replica with
                ``InputOptions(experimental_replication_mode="per_replica")``.
            options: how elements are treated in which some replica has a short batch or none.

        Returns:
            An iterable of distributed elements, which ends when the data of every replica has ended.

        Raises:
            ValueError: ``dataset_fn`` is not a function or returns no batches, or an option does not fit.
            NotImplementedError: ``InputReplicationMode.PER_REPLICA`` under ``OneDeviceStrategy``.

        Example:
            >>> import distribute_jax as dj, numpy as np
            >>> strategy = dj.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> def dataset_fn(context):
            ...     size = context.get_per_replica_batch_size(4)
            ...     return [np.arange(i, min(i + size, 7)) for i in range(0, 7, size)]
            >>> for x in strategy.distribute_datasets_from_function(dataset_fn):
            ...     print([part.tolist() for part in x.values])
            [[0, 1], [2, 3]]
            [[4, 5], [6]]

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy#distribute_datasets_from_function
        """
        method = "strategy.distribute_datasets_from_function"
        self._enter_program(method)
        chosen = options or InputOptions()
        mode = chosen.experimental_replication_mode
        if mode is InputReplicationMode.PER_REPLICA and not self._offers_per_replica_input:
            raise UnsupportedError(
                f"{method}: InputReplicationMode.PER_REPLICA is not supported by "
                f"{type(self).__name__}, as in TensorFlow. Leave it out: PER_WORKER gives the one "
                "replica the same batches. MirroredStrategy supports it."
            )
        replicas = len(local_replicas(self.mesh))
        sources = sources_of(dataset_fn, chosen, replicas, worker_of(self.mesh))
        return _dataset(self, PerReplicaFeed(sources, chosen, replicas), chosen, common=False)


def guard_iteration() -> None:
    """Raises if a distributed dataset must not be iterated here."""
    if _frames.in_replica_context():
        raise IterationError(
            "A distributed dataset was iterated inside a function given to strategy.run, on one "
            "replica. `next(iterator)` should be called outside, and its element passed: "
            "strategy.run(step, args=(next(iterator),))."
        )
    _context.require_untraced("Iterating over a distributed dataset")


def _dataset(
    strategy: Any, feed: Feed, options: InputOptions, *, common: bool
) -> DistributedDataset:
    ahead = options.experimental_per_replica_buffer_size
    if not options.experimental_fetch_to_device:
        ahead = 0
    return DistributedDataset(
        feed,
        mesh=strategy.mesh,
        guard=guard_iteration,
        ends=epoch_ends(strategy.mesh, options, common=common),
        ahead=ahead,
    )


def values_from_function(value_fn: Callable[[Any], Any], context: Any, mesh: Mesh) -> Any:
    """Calls a function for each replica of this process, and joins the results into per-replica values."""
    method = "strategy.experimental_distribute_values_from_function"
    count = num_replicas(mesh)
    if not takes(value_fn, None):
        raise ArgumentTypeError(
            f"{method} calls {value_fn!r:.60} with a dj.ValueContext. Write def value_fn(context):."
        )
    # Copies, since the function may fill and return one array for all replicas.
    copied = lambda x: x.copy() if isinstance(x, np.ndarray) else x  # noqa: E731
    nests = [jax.tree.map(copied, value_fn(context(i, count))) for i in local_replicas(mesh)]
    for leaf in jax.tree.leaves(nests):
        check_not_masked(leaf, method)
        # An int that is too large has dtype object too; check_int_range refuses it below.
        if not (is_key(leaf) or isinstance(leaf, int) or devices_hold(np.asarray(leaf).dtype)):
            raise ArgumentError(
                f"{method}: value_fn returned {leaf_text(leaf)}, which no device can hold. Return bools, "
                "numbers of at most 64 bits, or arrays of them, such as an index of the object."
            )
    structures = list(dict.fromkeys(map(jax.tree.structure, nests)))
    if len(structures) > 1:
        raise ArgumentError(
            f"{method}: value_fn returned pytrees of different structure, {structures[0]} and "
            f"{structures[1]}. Give all replicas the same keys and lengths."
        )
    if count == 1:
        with outside_mesh():
            return jax.tree.map(
                lambda part: jnp.asarray(check_int_range(part, "A per-replica value")), nests[0]
            )
    return jax.tree.map(lambda *parts: stacked_value(parts, mesh), *nests)


def stacked_value(parts: Sequence[Any], mesh: Mesh) -> PerReplica:
    """Returns a per-replica value made of one host value for each replica."""
    if all(map(is_key, parts)):
        bits = stacked_value([jax.random.key_data(part) for part in parts], mesh)
        keys = jax.random.wrap_key_data(bits.global_array, impl=jax.random.key_impl(parts[0]))
        return PerReplica(keys, mesh)
    arrays = [check_int_range(np.asarray(part), "A per-replica value") for part in parts]
    if _are_uniform(arrays, mesh):
        stacked = np.stack(arrays).astype(jax.dtypes.canonicalize_dtype(arrays[0].dtype))
        to = split_sharding(mesh)
        if is_local(mesh):
            return PerReplica(jax.device_put(stacked, to), mesh)
        shape = (num_replicas(mesh), *stacked.shape[1:])
        return PerReplica(jax.make_array_from_process_local_data(to, stacked, shape), mesh)
    with outside_mesh():
        return UnevenPerReplica([jnp.asarray(array) for array in arrays], mesh)


def _are_uniform(arrays: Sequence[np.ndarray[Any, Any]], mesh: Mesh) -> bool:
    """True if the values of all replicas have the same shape and dtype."""
    local = [leaf_text(array) for array in arrays]
    job = job_of(mesh)
    if job.is_alone:
        return len(set(local)) == 1
    everyone = job.exchange("the shapes of values", json.dumps(local))
    shapes = [shape for text in everyone for shape in json.loads(text)]
    if len(set(shapes)) > 1:
        raise UnsupportedError(
            f"The replicas have values of different shapes, {', '.join(shapes[:8])}. In a job of several "
            "processes all must have one shape and dtype: pad them to the largest, with their real sizes as "
            "a second value."
        )
    return True
