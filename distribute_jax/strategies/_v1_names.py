"""Deprecated names of TensorFlow 1, each with a DeprecationWarning that names its replacement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np

from distribute_jax._errors import ArgumentError
from distribute_jax._messages import PyTree
from distribute_jax._user_frames import warn_user
from distribute_jax.data import (
    ArrayDataset,
    DistributedDataset,
    InputContext,
    InputOptions,
    InputReplicationMode,
    from_arrays,
)

T = TypeVar("T")


class V1Methods:
    """The deprecated methods of ``Strategy``."""

    def experimental_distribute_datasets_from_function(
        self: Any, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Older name of ``distribute_datasets_from_function``."""
        _warn(
            "experimental_distribute_datasets_from_function",
            "distribute_datasets_from_function(fn)",
        )
        dataset: DistributedDataset = self.distribute_datasets_from_function(dataset_fn, options)
        return dataset

    def experimental_make_numpy_dataset(
        self, numpy_input: PyTree, session: Any = None
    ) -> ArrayDataset:
        """Makes a dataset of single examples: batch it, then distribute it.

        Args:
            numpy_input: a pytree of arrays with the examples along dim 0; lists of arrays are stacked.
            session: accepted for TensorFlow's signature.

        Raises:
            ValueError: the arrays of a list differ in shape, or what ``dj.data.from_arrays`` refuses.

        Source: https://www.tensorflow.org/api_docs/python/tf/compat/v1/distribute/Strategy#experimental_make_numpy_dataset
        """
        del session
        _warn("experimental_make_numpy_dataset", "dj.data.from_arrays(x).batch(256)", method=False)
        return from_arrays(_stacked(numpy_input))

    def make_dataset_iterator(self: Any, dataset: Any) -> V1Iterator:
        """Distributes a dataset of global batches, and returns an iterator over it.

        Source: https://www.tensorflow.org/api_docs/python/tf/compat/v1/distribute/Strategy#make_dataset_iterator
        """
        _warn("make_dataset_iterator", "distribute_dataset(ds)")
        return V1Iterator(self.distribute_dataset(dataset))

    def make_input_fn_iterator(
        self: Any,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> V1Iterator:
        """Distributes the batches of a function's datasets, and returns an iterator over them.

        Source: https://www.tensorflow.org/api_docs/python/tf/compat/v1/distribute/Strategy#make_input_fn_iterator
        """
        _warn("make_input_fn_iterator", "distribute_datasets_from_function(fn)")
        options = InputOptions(experimental_replication_mode=replication_mode)
        return V1Iterator(self.distribute_datasets_from_function(input_fn, options))

    def experimental_run(
        self: Any, fn: Callable[..., Any], input_iterator: Iterator[Any] | None = None
    ) -> PyTree:
        """Runs a step on the next element of an iterator, its only argument, or on none.

        Source: https://www.tensorflow.org/api_docs/python/tf/compat/v1/distribute/Strategy#experimental_run
        """
        _warn("experimental_run", "run(fn, args=(next(iterator),))")
        return self.run(fn, args=() if input_iterator is None else (next(input_iterator),))

    def unwrap(self: Any, value: PyTree) -> tuple[PyTree, ...]:
        """Older name of ``experimental_local_results``."""
        _warn("unwrap", "experimental_local_results(value)")
        values: tuple[PyTree, ...] = self.experimental_local_results(value)
        return values

    def update_config_proto(self, config_proto: T) -> T:
        """Returns a session's configuration: there is no session to configure."""
        _warn("update_config_proto", "no call at all: a mesh needs no session", method=False)
        return config_proto


class V1Iterator(Iterator[Any]):
    """An iterator over a distributed dataset that ``initialize`` starts again."""

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._iterator: Iterator[Any] | None = None

    def initialize(self) -> list[Any]:
        """Starts the next epoch; no operations are left to run, so the list is empty."""
        self._iterator = iter(self._dataset)
        return []

    def __next__(self) -> PyTree:
        """Returns the next element; the first call starts an epoch."""
        if self._iterator is None:
            self._iterator = iter(self._dataset)
        return next(self._iterator)

    get_next = __next__


def _stacked(tree: PyTree) -> PyTree:
    """Stacks each list of arrays along a new dim 0, as tf.data does."""

    def stack(node: Any) -> Any:
        try:
            return np.asarray(node) if isinstance(node, list) else node
        except ValueError:
            raise ArgumentError(
                "strategy.experimental_make_numpy_dataset stacks the arrays of a list, which must have one "
                f"shape; got {', '.join(str(np.shape(array)) for array in node)}."
            ) from None

    return jax.tree.map(stack, tree, is_leaf=lambda node: isinstance(node, list))


def _warn(older: str, modern: str, *, method: bool = True) -> None:
    text = f"strategy.{older} is deprecated. Use {'strategy.' if method else ''}{modern}."
    warn_user(text, DeprecationWarning)
