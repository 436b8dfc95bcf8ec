"""Sources of global batches: one file for each kind, and ``find_source``, which selects one.

``_base`` is the interface. ``_iterables`` and ``_loaders`` adapt the datasets of users; ``_arrays``
and ``_files`` are the library's. None of them imports a package that may be missing.
"""

from __future__ import annotations

from typing import Any

from distribute_jax.data.sources._arrays import ArrayDataset, ArraySource, from_arrays
from distribute_jax.data.sources._base import Source as Source, loaded_class
from distribute_jax.data.sources._files import FileDataset, FileSource, from_files
from distribute_jax.data.sources._iterables import from_iterable
from distribute_jax.data.sources._loaders import (
    GrainIter,
    GrainMap,
    HuggingFaceStream,
    HuggingFaceTable,
    TfData,
    TorchLoader,
    refuse_splits,
    refuse_torch_dataset,
)

__all__ = ["ArrayDataset", "FileDataset", "from_arrays", "from_files"]


_LIBRARIES = (
    (("tensorflow", "data", "Dataset"), TfData),
    (("datasets", "Dataset"), HuggingFaceTable),
    # If PyTorch is installed, this is a subclass of its Dataset, so it comes first.
    (("datasets", "IterableDataset"), HuggingFaceStream),
    (("datasets", "DatasetDict"), refuse_splits),
    (("datasets", "IterableDatasetDict"), refuse_splits),
    (("torch", "utils", "data", "DataLoader"), TorchLoader),
    (("torch", "utils", "data", "Dataset"), refuse_torch_dataset),
    (("grain", "MapDataset"), GrainMap),
    (("grain", "IterDataset"), GrainIter),
    (("grain", "DataLoader"), GrainIter),
)
"""Classes of other packages, and what creates a source from an instance; the first match wins."""


def find_source(source: Any, method: str = "strategy.distribute_dataset") -> Source:
    """Returns the source of what the user passed to a method; raises an ArgumentError for anything else."""
    if isinstance(source, ArrayDataset):
        return ArraySource(source, method)
    if isinstance(source, FileDataset):
        return FileSource(source, method)
    for names, make in _LIBRARIES:
        if isinstance(source, loaded_class(*names)):
            return make(source, method)
    return from_iterable(source, method)
