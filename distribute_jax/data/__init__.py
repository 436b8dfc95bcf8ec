"""Input: global batches in, one share for each replica out, in order and to the last example.

``_source`` starts the user's batches. A feed makes elements of them on the host: ``_feed`` checks
(``_check``) and divides (``_partial``, ``_split``) global batches, ``_from_function`` deals out those
of each replica. Elements (``_element``, ``_parts``) put themselves on the devices; ``_dataset`` is
what the user iterates. ``_shard`` says which part of a source a process reads.
"""

from distribute_jax.data._dataset import DistributedDataset, DistributedIterator
from distribute_jax.data._input_context import InputContext
from distribute_jax.data._optional import OptionalElement
from distribute_jax.data._options import InputOptions
from distribute_jax.data._policies import AutoShardPolicy, InputReplicationMode, PartialPolicy

__all__ = [
    "AutoShardPolicy",
    "DistributedDataset",
    "DistributedIterator",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "OptionalElement",
    "PartialPolicy",
]
