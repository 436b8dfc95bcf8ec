"""Batches of a PyTorch ``DataLoader`` and of Hugging Face datasets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from distribute_jax._errors import ArgumentError
from distribute_jax._messages import PyTree, listed
from distribute_jax.data.sources._base import Seekable, Source, Stream, on_host


class TorchLoader(Stream):
    """A ``torch.utils.data.DataLoader``; it shuffles anew at every start, by its own generator."""

    text = "a PyTorch DataLoader"

    def __init__(self, loader: Any, called: str) -> None:
        self._loader = loader

    def start(self) -> Iterator[PyTree]:
        """See ``Stream.start``."""
        return map(on_host, iter(self._loader))

    @property
    def batching(self) -> str:
        """See ``Source.batching``."""
        return "Pass batch_size=256 to this PyTorch DataLoader, which gives single examples."

    def __len__(self) -> int:
        """See ``Source.__len__``."""
        return len(self._loader)


def refuse_torch_dataset(dataset: Any, called: str) -> TorchLoader:
    """Refuses a PyTorch dataset, whose elements are single examples."""
    raise ArgumentError(
        f"{called} got {type(dataset).__name__}, a PyTorch dataset of single examples. Put it in a loader "
        "that batches it: torch.utils.data.DataLoader(dataset, batch_size=256), with the number of "
        "examples of all replicas together. If its elements are batches, pass batch_size=None."
    )


class TableSource(Seekable):
    """A batched ``datasets.Dataset``: each row is a batch, and rows can be reached by number."""

    text = "a Hugging Face Dataset"

    def __init__(self, dataset: Any, called: str) -> None:
        form = dataset.format
        # A format of the user's own gives what it likes, which the features do not describe.
        if form["type"] != "custom":
            _check_features(dataset.features, form["columns"], self.text, called)
        if form["type"] is None:
            dataset = dataset.with_format("numpy", columns=form["columns"])
        self._dataset = dataset

    def read(self, epoch: int, position: int) -> Iterator[PyTree]:
        """See ``Seekable.read``."""
        rest = range(position, len(self._dataset))
        return map(on_host, self._dataset.select(rest)) if rest else iter(())

    def __len__(self) -> int:
        """See ``Source.__len__``."""
        return len(self._dataset)


class StreamedSource(Source):
    """A batched ``datasets.IterableDataset``."""

    text = "a Hugging Face IterableDataset"

    def __init__(self, dataset: Any, called: str) -> None:
        if dataset.features is not None:
            _check_features(dataset.features, list(dataset.features), self.text, called)
        self._dataset = dataset.with_format("numpy")

    @property
    def batching(self) -> str:
        """See ``Source.batching``."""
        return f"Call .batch(256) on this {self.text[2:]}, which gives single examples."

    def open(self) -> Iterator[PyTree]:
        """See ``Source.open``."""
        return iter(self._dataset)

    def preview(self) -> Iterator[PyTree]:
        """See ``Source.preview``."""
        return iter(self._dataset)


def refuse_splits(splits: Any, called: str) -> Source:
    """Refuses a dictionary of datasets."""
    name = next(iter(splits), "train")
    raise ArgumentError(
        f"{called} got a {type(splits).__name__} with the splits {list(splits)}. Choose one, and batch it: "
        f"dataset[{name!r}].batch(256)."
    )


def _check_features(features: Any, columns: list[str], text: str, called: str) -> None:
    package = sys.modules["datasets"]
    scalar = (package.Value, package.ClassLabel)
    shown = {name: features[name] for name in columns}
    single = [
        f"{name}: {feature}" for name, feature in shown.items() if isinstance(feature, scalar)
    ]
    if single:
        raise ArgumentError(
            f"{called} got {text} of single examples:\n{listed(single)}\nCall .batch(256) on it first, "
            "with the number of examples of all replicas together."
        )
    words = [f"{name}: {feature}" for name, feature in shown.items() if _holds_text(feature)]
    if words:
        raise ArgumentError(
            f"{called} got {text} with text:\n{listed(words)}\nDevices hold no strings. Encode them as "
            "integers with .map, or leave them out with .remove_columns."
        )


def _holds_text(feature: Any) -> bool:
    if isinstance(feature, dict):
        return any(map(_holds_text, feature.values()))
    inner = getattr(feature, "feature", None)
    if inner is not None:
        return _holds_text(inner)
    # Other features, such as images, are decoded into arrays and have no such dtype of their own.
    is_value = isinstance(feature, sys.modules["datasets"].Value)
    return is_value and "string" in feature.dtype
