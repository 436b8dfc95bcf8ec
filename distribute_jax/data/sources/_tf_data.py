"""Batches of a tf.data.Dataset."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import jax

from distribute_jax._errors import ArgumentError
from distribute_jax._tree import listed, path_text
from distribute_jax._typing import PyTree
from distribute_jax.data.sources._stream import Stream
from distribute_jax.data.sources._tf_files import count_files, shard_by_files


class TfData(Stream):
    """A batched ``tf.data.Dataset``; TensorFlow was imported by whoever made it."""

    text = "a tf.data.Dataset"

    def __init__(self, dataset: Any, called: str) -> None:
        self._tf = sys.modules["tensorflow"]
        self._dataset = dataset
        self._called = called
        self._cardinality = int(dataset.cardinality())
        self._check_spec()

    @property
    def is_infinite(self) -> bool:
        """See ``Source.is_infinite``."""
        return self._cardinality == int(self._tf.data.INFINITE_CARDINALITY)

    def start(self) -> Iterator[PyTree]:
        """See ``Stream.start``."""
        batches: Iterator[PyTree] = self._dataset.as_numpy_iterator()
        return batches

    def __len__(self) -> int:
        """See ``Source.__len__``."""
        if self._cardinality < 0:
            raise TypeError("the cardinality of this tf.data.Dataset is unknown or infinite")
        return self._cardinality

    @property
    def own_policy(self) -> str | None:
        """The dataset's own option; None for AUTO, which every dataset has that sets none."""
        policy = self._dataset.options().experimental_distribute.auto_shard_policy
        return None if policy.name == "AUTO" else str(policy.name)

    @cached_property
    def num_files(self) -> int | None:
        """See ``Source.num_files``; None also where the file names are not known beforehand."""
        return count_files(self._tf, self._dataset)

    def shard_files(self, count: int, index: int) -> TfData | None:
        """See ``Source.shard_files``."""
        if self.num_files is None:
            return None
        return TfData(shard_by_files(self._tf, self._dataset, count, index), self._called)

    def _check_spec(self) -> None:
        leaves = jax.tree_util.tree_leaves_with_path(self._dataset.element_spec)
        faults: dict[str, list[str]] = {}
        for path, spec in leaves:
            rule = self._rule_against(spec)
            if rule is not None:
                faults.setdefault(rule, []).append(f"{path_text(path, 'batch')}: {spec}")
        if faults:
            reasons = "\n".join(f"{listed(lines)}\n{rule}" for rule, lines in faults.items())
            raise ArgumentError(f"{self._called} cannot take this tf.data.Dataset:\n{reasons}")

    def _rule_against(self, spec: Any) -> str | None:
        tf = self._tf
        if not isinstance(spec, tf.TypeSpec) or isinstance(
            spec, type(tf.type_spec_from_value(None))
        ):
            return None
        if not isinstance(spec, tf.TensorSpec):
            return _NOT_DENSE
        if spec.shape.rank == 0:
            return _UNBATCHED
        return _NOT_NUMERIC if spec.dtype == tf.string else None


_UNBATCHED = (
    "It gives single examples: call .batch(256) on it first, with the number of examples of all "
    "replicas together."
)
_NOT_NUMERIC = (
    "Devices hold no strings. Encode them as integers with .map, or leave these leaves out with it."
)
_NOT_DENSE = "Devices hold dense arrays: call .map with to_tensor() or tf.sparse.to_dense first."
