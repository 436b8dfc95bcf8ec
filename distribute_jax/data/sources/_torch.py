"""Batches of a PyTorch ``DataLoader`` and of Hugging Face datasets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import jax

from distribute_jax._errors import ArgumentError
from distribute_jax._messages import PyTree
from distribute_jax.data.sources._base import Source, Stream, length_of, on_host


class TorchLoader(Stream):
    """A ``torch.utils.data.DataLoader``, which shuffles at every start."""

    text = "a PyTorch DataLoader"
    batching = "Pass batch_size=256 to this PyTorch DataLoader, which yields single examples."

    def __init__(self, loader: Any, method: str) -> None:
        self._loader = loader
        shares = getattr(getattr(loader, "sampler", None), "num_replicas", 1)
        # A dataset function gets an InputContext, by which it may shard.
        if shares > jax.process_count() and "function" not in method:
            raise ArgumentError(
                f"{method} got a DataLoader whose sampler yields 1 of {shares} shares of the examples, and "
                "the others are never read. Remove the DistributedSampler: the strategy divides each batch."
            )

    def start(self) -> Iterator[PyTree]:
        return map(on_host, iter(self._loader))

    @property
    def length(self) -> int | None:
        return length_of(self._loader)


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
        self._dataset = dataset

    def open(self, epoch: int = 0, position: int = 0) -> Iterator[PyTree]:
        rest = range(position, len(self._dataset))
        return map(on_host, self._dataset.select(rest)) if rest else iter(())

    @property
    def length(self) -> int | None:
        return length_of(self._dataset)


class HuggingFaceStream(Source):
    """A batched ``datasets.IterableDataset``."""

    text = "a Hugging Face IterableDataset"

    def __init__(self, dataset: Any, method: str) -> None:
        self._dataset = dataset.with_format("numpy")

    def open(self, epoch: int = 0, position: int = 0) -> Iterator[PyTree]:
        return iter(self._dataset)


def refuse_splits(splits: Any, method: str) -> NoReturn:
    """Raises for a dictionary of datasets."""
    name = next(iter(splits), "train")
    raise ArgumentError(
        f"{method} got a {type(splits).__name__} with the splits {list(splits)}. Choose one, and batch it: "
        f"dataset[{name!r}].batch(256)."
    )
