"""Input: global batches in, one share for each replica out, in order and to the last example.

``from_arrays`` and ``from_files`` make datasets; strategies also take Grain's, ``tf.data``'s, PyTorch's
and Hugging Face's, and any iterable of batches: ``sources`` has a class for each kind. ``_feed`` makes
elements of their batches on the host, checked (``_check``) and divided (``_split``). Elements
(``_element``) put themselves on the devices, read ahead by a thread (``_prefetch``); ``_dataset`` is what
the user iterates. ``_split`` also decides which part of a source a process reads, and ``_agreement`` how
several processes end an epoch together.
"""

from distribute_jax._lazy import public_names, publish
from distribute_jax.data._dataset import (
    DistributedDataset as DistributedDataset,
    DistributedIterator as DistributedIterator,
    OptionalElement as OptionalElement,
)
from distribute_jax.data._options import (
    AutoShardPolicy as AutoShardPolicy,
    DatasetCreator as DatasetCreator,
    InputContext as InputContext,
    InputOptions as InputOptions,
    InputReplicationMode as InputReplicationMode,
    PartialPolicy as PartialPolicy,
)
from distribute_jax.data.sources import (
    ArrayDataset as ArrayDataset,
    FileDataset as FileDataset,
    from_arrays as from_arrays,
    from_files as from_files,
)

__all__ = public_names(globals())

publish(
    globals(),
    ["ArrayDataset", "FileDataset", "OptionalElement", "from_arrays", "from_files"],
    "distribute_jax.data",
)
