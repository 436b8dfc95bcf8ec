"""Sources from data of other libraries: Grain, ``tf.data``, PyTorch and Hugging Face."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, nullcontext
from functools import cached_property
from itertools import islice
from typing import Any, NoReturn

import jax

from distribute_jax._errors import ArgumentError
from distribute_jax._messages import PyTree, listed, path_text
from distribute_jax.data.sources._base import Source, Stream, on_host

_READ_AHEAD = 4
"""Batches that Grain reads ahead, in one thread each; its default of 500 would fill the memory."""
_INFINITE = 2**40
"""Grain's endless repeat has a huge length, which ``batch`` divides; no finite dataset reaches this one."""


class GrainMap(Source):
    """A ``grain.MapDataset`` of batches; its random transformations differ between epochs."""

    text = "a grain.MapDataset"
    can_resume = True

    def __init__(self, dataset: Any, method: str) -> None:
        super().__init__(dataset, method)
        self.is_infinite = len(dataset) >= _INFINITE

    def open(self, epoch: int = 0, position: int = 0) -> Iterator[PyTree]:
        import grain

        options = grain.ReadOptions(num_threads=_READ_AHEAD, prefetch_buffer_size=_READ_AHEAD)
        # Indices of a repeated dataset continue through its epochs; an endless one has a single epoch.
        batches = self._dataset if self.is_infinite else self._dataset.repeat(epoch + 1)
        start = 0 if self.is_infinite else epoch * len(self._dataset)
        skipped = position if _filters(self._dataset) else 0
        start += position - skipped
        if start:
            batches = batches.slice(slice(start, None))
        return _rest(batches.to_iter_dataset(options), skipped)

    @property
    def length(self) -> int | None:
        return None if self.is_infinite or _filters(self._dataset) else len(self._dataset)


class GrainIter(Source):
    """A ``grain.IterDataset`` or ``grain.DataLoader`` of batches.

    Every epoch is the same, as in Grain, and it resumes by reading all earlier batches.
    """

    can_resume = True
    length = None  # of batches; it may have one of examples

    @property
    def text(self) -> str:
        return f"a Grain {type(self._dataset).__name__}"

    @property
    def batching(self) -> str:
        if hasattr(self._dataset, "batch"):
            return super().batching
        return f"Add grain.transforms.Batch(256) to the operations of this {self.text[2:]}."

    def open(self, epoch: int = 0, position: int = 0) -> Iterator[PyTree]:
        return _rest(self._dataset, position)


def _rest(dataset: Any, skipped: int) -> Iterator[PyTree]:
    iterator = iter(dataset)
    # Grain's threads and processes stop as soon as the loop is left, not at garbage collection.
    with closing(iterator) if hasattr(iterator, "close") else nullcontext():
        yield from map(on_host, islice(iterator, skipped, None))


def _filters(dataset: Any) -> bool:
    """True if a filter removes elements, so that an index is not the number of a batch."""
    import grain

    filtered = type(grain.MapDataset.range(1).filter(bool))
    return isinstance(dataset, filtered) or any(map(_filters, dataset.parents))


class TfData(Stream):
    """A batched ``tf.data.Dataset``; the user has imported TensorFlow."""

    text = "a tf.data.Dataset"
    how_to_resume = (
        "A tf.data.Dataset can if TensorFlow alone computes it, without random numbers, and every pass is "
        "the same: shuffle(n, seed=1, reshuffle_each_iteration=False), and not deterministic=False. "
    )

    def __init__(self, dataset: Any, method: str) -> None:
        super().__init__(dataset, method)
        self._tf = tf = sys.modules["tensorflow"]
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
        return self._dataset.as_numpy_iterator()

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
        return self._dataset.skip(position).as_numpy_iterator()

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


class TorchLoader(Stream):
    """A ``torch.utils.data.DataLoader``, which shuffles at every start."""

    text = "a PyTorch DataLoader"
    batching = "Pass batch_size=256 to this PyTorch DataLoader, which yields single examples."

    def __init__(self, loader: Any, method: str) -> None:
        super().__init__(loader, method)
        shares = getattr(getattr(loader, "sampler", None), "num_replicas", 1)
        # A dataset function gets an InputContext, by which it may shard.
        if shares > jax.process_count() and "function" not in method:
            raise ArgumentError(
                f"{method} got a DataLoader whose sampler yields 1 of {shares} shares of the examples, and "
                "the others are never read. Remove the DistributedSampler: the strategy divides each batch."
            )

    def start(self) -> Iterator[PyTree]:
        return map(on_host, iter(self._dataset))


def refuse_torch_dataset(dataset: Any, method: str) -> NoReturn:
    """Raises for a PyTorch dataset, whose elements are single examples."""
    raise ArgumentError(
        f"{method} got {type(dataset).__name__}, a PyTorch dataset of single examples. Put it in a loader "
        "that batches it: torch.utils.data.DataLoader(dataset, batch_size=256), with the number of "
        "examples of all replicas together. If its elements are batches, pass batch_size=None."
    )


class HuggingFaceTable(Source):
    """A batched ``datasets.Dataset``: each row is a batch, and rows have random access."""

    text = "a Hugging Face Dataset"
    can_resume = True

    def __init__(self, dataset: Any, method: str) -> None:
        if dataset.format["type"] is None:
            dataset = dataset.with_format("numpy", columns=dataset.format["columns"])
        super().__init__(dataset, method)

    def open(self, epoch: int = 0, position: int = 0) -> Iterator[PyTree]:
        rest = range(position, len(self._dataset))
        return map(on_host, self._dataset.select(rest)) if rest else iter(())


class HuggingFaceStream(Source):
    """A batched ``datasets.IterableDataset``."""

    text = "a Hugging Face IterableDataset"

    def open(self, epoch: int = 0, position: int = 0) -> Iterator[PyTree]:
        dataset = self._dataset.with_format("numpy")
        dataset.set_epoch(self._dataset.epoch)  # a new dataset begins with 0
        return iter(dataset)


def refuse_splits(splits: Any, method: str) -> NoReturn:
    """Raises for a dictionary of datasets."""
    name = next(iter(splits), "train")
    raise ArgumentError(
        f"{method} got a {type(splits).__name__} with the splits {list(splits)}. Choose one, and batch it: "
        f"dataset[{name!r}].batch(256)."
    )
