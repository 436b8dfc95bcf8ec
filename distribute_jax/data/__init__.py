"""The input pipeline: divides global batches among the replicas, in order and to the last example.

``from_arrays`` and ``from_files`` create datasets; strategies also take those of Grain, ``tf.data``, PyTorch
and Hugging Face, and any iterable of batches. ``sources`` has a class for each kind. ``_feed`` turns
their batches into elements on the host, checked by ``_check`` and divided by ``_split``. ``_element``
transfers an element to the devices, and ``_prefetch`` reads ahead in a background thread. Users iterate
``_dataset``. ``_split`` also decides which part of a source each process reads, and ``_agreement`` makes
all processes end an epoch at the same step.
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
