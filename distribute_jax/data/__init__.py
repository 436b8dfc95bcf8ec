"""Input: global batches in, one share for each replica out, in order and to the last example.

``from_arrays`` and ``from_files`` make datasets; strategies also take Grain's, ``tf.data``'s, PyTorch's
and Hugging Face's, and any iterable of batches.

A batch passes through the files in this order: ``_source`` finds the kind of the user's source and
starts it (``sources``), ``_host`` checks each batch (``_check``) and decides its shares (``_partial``,
``_split``), ``_assemble`` puts them on the devices; ``_dataset`` is what the user iterates.
"""

from distribute_jax._public import publish
from distribute_jax.data._dataset import DistributedDataset, DistributedIterator
from distribute_jax.data._optional import OptionalElement
from distribute_jax.data._options import InputOptions, PartialPolicy
from distribute_jax.data.sources import ArrayDataset, FileDataset, from_arrays, from_files

__all__ = [
    "ArrayDataset",
    "DistributedDataset",
    "DistributedIterator",
    "FileDataset",
    "InputOptions",
    "OptionalElement",
    "PartialPolicy",
    "from_arrays",
    "from_files",
]

publish(
    globals(), ["ArrayDataset", "FileDataset", "from_arrays", "from_files"], "distribute_jax.data"
)
