"""Batches of a ``tf.data.Dataset``, which is sharded by files if it reads files.

``tf.raw_ops.DatasetToGraphV2`` serializes a dataset as a graph, which shows the files that it reads and
whether passes may differ. ``tf.raw_ops.AutoShardDataset`` is the op with which ``tf.distribute`` shards by
files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import jax

from distribute_jax._errors import ArgumentError
from distribute_jax._messages import PyTree, listed, path_text
from distribute_jax.data.sources._base import Stream


class TfData(Stream):
    """A batched ``tf.data.Dataset``; the user has imported TensorFlow."""

    text = "a tf.data.Dataset"
    how_to_resume = (
        "A tf.data.Dataset can if TensorFlow alone computes it, without random numbers, and every pass is "
        "the same: shuffle(n, seed=1, reshuffle_each_iteration=False), and not deterministic=False. "
    )

    def __init__(self, dataset: Any, method: str) -> None:
        self._tf = tf = sys.modules["tensorflow"]
        self._dataset = dataset
        self._method = method
        # Raised if TensorFlow cannot serialize the dataset, or if its file names come from its data.
        self._unknown = (tf.errors.OpError, ValueError, TypeError)
        self._cardinality = int(dataset.cardinality())
        self.is_infinite = self._cardinality == int(tf.data.INFINITE_CARDINALITY)
        policy = dataset.options().experimental_distribute.auto_shard_policy.name
        # AUTO is the default.
        self.auto_shard_policy = None if policy == "AUTO" else str(policy)
        specs = jax.tree_util.tree_leaves_with_path(dataset.element_spec)
        sparse = [
            f"{path_text(path, 'batch')}: {spec}"
            for path, spec in specs
            if isinstance(spec, (tf.RaggedTensorSpec, tf.SparseTensorSpec, tf.data.DatasetSpec))
        ]
        if sparse:
            raise ArgumentError(
                f"{method} cannot take this tf.data.Dataset:\n{listed(sparse)}\nDevices hold dense arrays: "
                "call .map with to_tensor() or tf.sparse.to_dense first, or of windows .flat_map(lambda "
                "window: window.batch(size))."
            )

    def start(self) -> Iterator[PyTree]:
        batches: Iterator[PyTree] = self._dataset.as_numpy_iterator()
        return batches

    @property
    def length(self) -> int | None:
        return self._cardinality if self._cardinality >= 0 else None

    @cached_property
    def num_files(self) -> int | None:  # type: ignore[override]
        """The smallest number of several readers; None also if file names are not known in advance."""
        try:
            graph = self._graph()
            counts = [_count(self._tf, graph, name) for name in _file_names(graph)]
        except self._unknown:
            return None
        return min(counts, default=None)

    def shard_files(self, count: int, index: int) -> TfData:
        spec, variants = self._dataset.element_spec, self._tf.data.experimental
        flat = self._tf.nest.flatten(spec, expand_composites=True)
        sharded = self._tf.raw_ops.AutoShardDataset(
            input_dataset=variants.to_variant(self._dataset),
            num_workers=count,
            index=index,
            auto_shard_policy=_FILE,
            output_types=[one.dtype for one in flat],
            output_shapes=[one.shape for one in flat],
        )
        return TfData(variants.from_variant(sharded, spec), self._method)

    @cached_property
    def can_resume(self) -> bool:  # type: ignore[override]
        """True if the graph shows that every pass yields the same batches, in any process."""
        try:
            graph = self._graph()
        except self._unknown:
            return False
        constants = {
            node.name: node.attr["value"].tensor for node in graph.node if node.op == "Const"
        }

        def repeats(node: Any) -> bool:
            if node.op == "ShuffleDatasetV3":
                seeds = [name for name in node.input[2:4] if name in constants]
                seeded = any(self._tf.make_ndarray(constants[name]) for name in seeds)
                return seeded and not node.attr["reshuffle_each_iteration"].b
            return not node.op.startswith(_VARYING) and node.attr["deterministic"].s != b"false"

        nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
        return self._dataset.options().deterministic is not False and all(map(repeats, nodes))

    def open(self, epoch: int = 0, position: int = 0) -> Iterator[PyTree]:
        if not position:
            return super().open()
        batches: Iterator[PyTree] = self._dataset.skip(position).as_numpy_iterator()
        return batches

    def _graph(self) -> Any:
        variant = self._tf.data.experimental.to_variant(self._dataset)
        serialized = self._tf.raw_ops.DatasetToGraphV2(
            input_dataset=variant, external_state_policy=_IGNORE_STATE
        )
        return self._tf.compat.v1.GraphDef.FromString(serialized.numpy())


_READERS = ("TFRecordDataset", "TextLineDataset", "FixedLengthRecordDataset")
"""Prefixes of the names of ops that read files; a version follows."""
_IGNORE_STATE = 1
"""``external_state_policy`` of the op: variables and tables are not saved."""
_FILE = 1
"""``tf.data.experimental.AutoShardPolicy.FILE``, as the op takes it."""
_VARYING = (
    *("Random", "Rng", "Multinomial", "TruncatedNormal", "ParameterizedTruncatedNormal", "Sampl"),
    *("StatefulRandom", "StatefulStandardNormal", "StatefulTruncatedNormal", "StatefulUniform"),
    *("Generator", "PyFunc", "EagerPyFunc", "Shuffle", "Snapshot", "LoadDataset"),
    *("DataService", "ReadVariable", "Timestamp"),
)
"""Prefixes of the names of ops whose output may differ in another pass."""


def _file_names(graph: Any) -> Iterator[str]:
    """Yields the nodes whose dataset contains the file names of a reader."""
    bodies = {f.signature.name: f.node_def for f in graph.library.function}

    def reads(nodes: Any) -> bool:
        return any(node.op.startswith(_READERS) or reads(_inner(node)) for node in nodes)

    def _inner(node: Any) -> list[Any]:
        names = [a.func.name for a in node.attr.values() if a.HasField("func")]
        return [inner for name in names for inner in bodies.get(name, ())]

    yield from (node.input[0] for node in graph.node if reads(_inner(node)))


def _count(tf: Any, graph: Any, node: str) -> int:
    part = tf.compat.v1.graph_util.extract_sub_graph(graph, [node])

    def read() -> Any:
        (variant,) = tf.graph_util.import_graph_def(part, return_elements=[f"{node}:0"])
        return variant

    names = tf.data.experimental.from_variant(tf.function(read)(), tf.TensorSpec([], tf.string))
    known = int(names.cardinality())
    if known == tf.data.INFINITE_CARDINALITY:
        raise ValueError("the file names are repeated without end")
    return known if known >= 0 else sum(1 for _ in names)
