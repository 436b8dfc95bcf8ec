"""The files that a tf.data.Dataset reads, found and sharded as TensorFlow does, by its public API.

A dataset does not tell what it was made of, but ``tf.raw_ops.DatasetToGraphV2`` writes it down as a graph,
and ``tf.raw_ops.AutoShardDataset`` is the op by which ``tf.distribute`` itself shards by files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_READERS = ("TFRecordDataset", "TextLineDataset", "FixedLengthRecordDataset")
"""The beginnings of the names of the ops that read files; versions follow."""
_IGNORE_STATE = 1
"""``external_state_policy`` of the op: variables and tables need not be saved, only read."""
_FILE = 1
"""``tf.data.experimental.AutoShardPolicy.FILE``, as the op takes it."""


def count_files(tf: Any, dataset: Any) -> int | None:
    """Gives the number of files that the dataset's readers are given.

    The fewest where it has several readers; None where it has none or the number cannot be told.
    """
    try:
        serialized = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=_IGNORE_STATE,
        )
        graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
        return min((_count(tf, graph, name) for name in _file_names(graph)), default=None)
    except (tf.errors.OpError, ValueError, TypeError):
        # A dataset that TensorFlow cannot write down, or whose file names come from its data.
        return None


def shard_by_files(tf: Any, dataset: Any, count: int, index: int) -> Any:
    """Gives the dataset that reads files index, index + count, … of each reader."""
    flat = tf.nest.flatten(dataset.element_spec, expand_composites=True)
    sharded = tf.raw_ops.AutoShardDataset(
        input_dataset=tf.data.experimental.to_variant(dataset),
        num_workers=count,
        index=index,
        auto_shard_policy=_FILE,
        output_types=[spec.dtype for spec in flat],
        output_shapes=[spec.shape for spec in flat],
    )
    return tf.data.experimental.from_variant(sharded, dataset.element_spec)


def _file_names(graph: Any) -> Iterator[str]:
    """Gives the nodes whose dataset holds the names of the files that a reader is given."""
    bodies = {f.signature.name: f.node_def for f in graph.library.function}

    def reads(nodes: Any) -> bool:
        return any(node.op.startswith(_READERS) or reads(_inner(node)) for node in nodes)

    def _inner(node: Any) -> list[Any]:
        called = [a.func.name for a in node.attr.values() if a.HasField("func")]
        return [inner for name in called for inner in bodies.get(name, ())]

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
