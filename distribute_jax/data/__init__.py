"""Input: global batches in, one share for each replica out, in order and to the last example.

``from_arrays`` and ``from_files`` make datasets; strategies also take Grain's, ``tf.data``'s, PyTorch's
and Hugging Face's, and any iterable of batches: ``sources`` has a class for each kind. ``_feed`` makes
elements of their batches on the host, checked (``_check``) and divided (``_split``). Elements
(``_element``) put themselves on the devices, read ahead by a thread (``_prefetch``); ``_dataset`` is what
the user iterates. ``_split`` also decides which part of a source a process reads, and ``_agreement`` how
several processes end an epoch together.
"""

from distribute_jax._lazy import publish
from distribute_jax.data._dataset import DistributedDataset, DistributedIterator, OptionalElement
from distribute_jax.data._options import (
    AutoShardPolicy,
    DatasetCreator,
    InputContext,
    InputOptions,
    InputReplicationMode,
    PartialPolicy,
)
from distribute_jax.data.sources import ArrayDataset, FileDataset, from_arrays, from_files

__all__ = [
    "ArrayDataset",
    "AutoShardPolicy",
    "DatasetCreator",
    "DistributedDataset",
    "DistributedIterator",
    "FileDataset",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "OptionalElement",
    "PartialPolicy",
    "from_arrays",
    "from_files",
]

publish(
    globals(),
    ["ArrayDataset", "FileDataset", "OptionalElement", "from_arrays", "from_files"],
    "distribute_jax.data",
)
