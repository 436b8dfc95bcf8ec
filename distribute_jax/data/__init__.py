"""Input: global batches in, one share for each replica out, in order and to the last example.

A batch passes through the files in this order: ``_source`` starts the user's batches, ``_host``
checks each (``_check``) and decides its shares (``_partial``, ``_split``), ``_assemble`` puts them
on the devices; ``_dataset`` is what the user iterates.
"""

from distribute_jax.data._dataset import DistributedDataset, DistributedIterator
from distribute_jax.data._optional import OptionalElement
from distribute_jax.data._options import InputOptions, PartialPolicy

__all__ = [
    "DistributedDataset",
    "DistributedIterator",
    "InputOptions",
    "OptionalElement",
    "PartialPolicy",
]
