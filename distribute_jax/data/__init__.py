"""Input: global batches in, one share for each replica out, in order and to the last example.

``from_arrays`` and ``from_files`` make datasets; strategies also take Grain's, ``tf.data``'s, PyTorch's
and Hugging Face's, and any iterable of batches: ``_source`` finds the kind of the user's source and
starts it (``sources``). A feed makes elements of the batches on the host: ``_feed`` checks (``_check``,
``_alike``) and divides (``_partial``, ``_split``) global batches, ``_from_function`` deals out those of each
replica. Elements (``_element``, ``_parts``) put themselves on the devices, read ahead by a thread
(``_prefetch``); ``_dataset`` is what the user iterates. ``_shard`` says which part of a source a process
reads, and ``_ends`` and ``_agreement`` how several end an epoch together.
"""

from typing import TYPE_CHECKING

from distribute_jax._instead import answering_module
from distribute_jax._public import publish
from distribute_jax.data._dataset import DistributedDataset, DistributedIterator
from distribute_jax.data._input_context import InputContext
from distribute_jax.data._optional import OptionalElement
from distribute_jax.data._options import InputOptions
from distribute_jax.data._policies import AutoShardPolicy, InputReplicationMode, PartialPolicy
from distribute_jax.data.sources import ArrayDataset, FileDataset, from_arrays, from_files

__all__ = [
    "ArrayDataset",
    "AutoShardPolicy",
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
    globals(), ["ArrayDataset", "FileDataset", "from_arrays", "from_files"], "distribute_jax.data"
)

if not TYPE_CHECKING:
    __getattr__ = answering_module("distribute_jax.data")
