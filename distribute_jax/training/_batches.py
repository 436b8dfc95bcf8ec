"""The data of ``fit``, ``evaluate`` and ``predict``, its batches, and their inputs, targets and weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from distribute_jax._checks import check_int, converting
from distribute_jax._errors import ArgumentError
from distribute_jax._messages import PyTree, leaf_text, listed
from distribute_jax._values import DistributedValues, PerReplica
from distribute_jax.data import DatasetCreator, DistributedDataset, from_arrays
from distribute_jax.data._dataset import batch_layout, observe, observed
from distribute_jax.data._element import taken
from distribute_jax.data.sources._base import on_host
from distribute_jax.strategies import Strategy, get_replica_context
from distribute_jax.training._objective import LabelCheck, variables

_NUMBERS = (int, float, np.number)


class Arrays(NamedTuple):
    x: PyTree
    y: PyTree = None
    weight: PyTree = None

    @property
    def parts(self) -> tuple[PyTree, ...]:
        """``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``."""
        if self.weight is not None:
            return tuple(self)
        return (self.x,) if self.y is None else (self.x, self.y)

    @property
    def length(self) -> int:
        with converting("x", self.x, "arrays whose dim 0 is the examples"):
            return int(jax.tree.leaves(self.x)[0].shape[0])

    def split(self, fraction: float) -> tuple[Arrays, Arrays]:
        """Splits off the last ``fraction``, before any shuffling, as Keras does."""
        end = int(self.length * (1 - fraction))
        if not 0 < end < self.length:
            raise ArgumentError(
                f"validation_split must leave examples to train and to validate on; got {fraction!r} of "
                f"{self.length} examples."
            )
        first: Arrays = jax.tree.map(lambda leaf: taken(leaf, slice(end)), self)
        return first, jax.tree.map(lambda leaf: taken(leaf, slice(end, None)), self)


def arrays_of(method: str, x: Any, y: Any, weight: Any) -> Arrays | None:
    """Returns the arrays that a method got; None if ``x`` is a dataset.

    As in Keras, a list or tuple of equally long arrays is several inputs; one of a single array is that
    array.
    """
    if isinstance(x, (list, tuple)) and len(x) == 1 and _has_rows(x[0]):
        x = x[0]
    if y is None and weight is None and not _is_arrays(x):
        return None
    if isinstance(x, DistributedDataset):
        raise ArgumentError(
            f"{method} got a distributed dataset and y or sample_weight. Its batches hold all: (x, y) or "
            "(x, y, sample_weight)."
        )
    parts = {"x": x, "y": y, "sample_weight": weight}
    parts = {name: _as_arrays(method, name, part) for name, part in parts.items()}
    _check_lengths(method, parts)
    return Arrays(*parts.values())


def dataset_of(
    strategy: Strategy, method: str, data: Any, batch_size: int | None, *, seed: int | None = None
) -> DistributedDataset:
    """Distributes a source of global batches, or ``Arrays``, which are batched and with a seed shuffled."""
    if isinstance(data, Arrays):
        rows = from_arrays(data.parts)
        shuffled = rows if seed is None else rows.shuffle(seed=seed)
        # The default is Keras's.
        size = 32 if batch_size is None else check_int(f"{method}(batch_size)", batch_size)
        return strategy.distribute_dataset(shuffled.batch(size))
    if batch_size is not None:
        raise ArgumentError(
            f"{method}(batch_size={batch_size}) got a dataset, whose batches are the global batches. Leave "
            "batch_size out."
        )
    if isinstance(data, DistributedDataset):
        return data
    if isinstance(data, DatasetCreator):
        return strategy.distribute_datasets_from_function(data.dataset_fn, data.input_options)
    return strategy.distribute_dataset(data)


def _is_arrays(x: Any) -> bool:
    """True for arrays of examples; False for datasets, such as a list of arrays of different lengths."""
    if isinstance(x, dict):
        return all(_is_arrays(value) for value in x.values())
    return _is_array(x) or _is_numbers(x) or _is_several(x)


def _is_array(x: Any) -> bool:
    """True for an array, or a table or tensor that NumPy can read, such as pandas's."""
    return isinstance(x, jax.Array) or (hasattr(x, "__array__") and hasattr(x, "shape"))


def _is_numbers(x: Any) -> bool:
    """True for a possibly nested list of numbers; only the first element of each is checked."""
    return isinstance(x, list) and bool(x) and (isinstance(x[0], _NUMBERS) or _is_numbers(x[0]))


def _is_several(x: Any) -> bool:
    """True for a list or tuple of equally long arrays, that is, several inputs."""
    return (
        isinstance(x, (list, tuple))
        and len(x) > 1
        and all(_has_rows(part) for part in x)
        and len({part.shape[0] for part in x}) == 1
    )


def _has_rows(x: Any) -> bool:
    return _is_array(x) and len(x.shape) > 0


def several_inputs_hint(method: str, x: Any, y: Any, error: Exception) -> str:
    """Returns what to write if a list of equally long arrays was meant as ``[x, y]`` or as batches."""
    if y is not None or not _is_several(x) or not isinstance(error, INPUT_ERRORS):
        return ""
    with_targets = "" if method == "predict" else f"For inputs and targets call {method}(x, y). "
    return (
        f"{method} got {len(x)} arrays of equal length in a {type(x).__name__}, and passed them to the "
        f"module as one tuple: the {len(x)} inputs of each example, as in Keras. {with_targets}If they are "
        f"batches, put each into a tuple: {method}([(batch,) for batch in x])."
    )


def _as_arrays(method: str, name: str, tree: Any) -> Any:
    """Converts the leaves to arrays; a list of numbers is one array, a list of arrays is several."""
    if tree is None:
        return None
    if isinstance(tree, (list, tuple)) and any(map(_has_rows, tree)):
        return tuple(_as_arrays(method, name, part) for part in tree)
    if isinstance(tree, dict):
        return {key: _as_arrays(method, name, part) for key, part in tree.items()}
    tree = on_host(tree, f"{method}: {name}")
    alone = ", or a dataset, alone, whose batches contain y" if name == "x" else ""
    with converting(f"{method}: {name}", tree, f"an array whose dim 0 is the examples{alone}"):
        array = tree if isinstance(tree, (np.ndarray, jax.Array)) else np.asarray(tree)
    if array.ndim == 0 or array.dtype == object:
        raise ArgumentError(
            f"{method} got {name}={leaf_text(tree)}. Examples in memory are arrays of numbers whose dim 0 is "
            "the examples, or dicts of them: encode texts and dates, such as by series.cat.codes, fill "
            'missing values, and pass table.to_numpy("float32"). A dataset contains its targets, and is '
            "passed alone."
        )
    return array


def _check_lengths(method: str, parts: dict[str, Any]) -> None:
    lengths = {
        f"{name}{jax.tree_util.keystr(path)}": leaf.shape[0]
        for name, tree in parts.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    if len(set(lengths.values())) > 1:
        firsts = {n: name for name, n in reversed(lengths.items())}
        lines = ", ".join(f"{name} has {n}" for n, name in reversed(firsts.items()))
        several = " A list of arrays is several inputs: pass a list of examples as np.stack(x)."
        several = several if isinstance(parts["x"], tuple) else ""
        raise ArgumentError(
            f"{method} got different numbers of examples in dim 0: {lines}.{several}"
        )


def check_placed(module: nnx.Module, strategy: Strategy) -> None:
    """Raises if arrays of a module are not on the devices where the strategy stores parameters."""
    leaves = jax.tree.leaves(nnx.state(module))
    if any(isinstance(leaf, (jax.ShapeDtypeStruct, jax.core.Tracer)) for leaf in leaves):
        raise ArgumentError(
            "dj.Model got a module without weights: one of nnx.eval_shape, or inside strategy.create. Make "
            "them before: `with strategy.scope(): model = dj.Model(strategy.create(make_module))`."
        )
    device = getattr(strategy, "parameter_device", None)
    devices = set(strategy.mesh.devices.flat) if device is None else {device}
    misplaced = [
        f"{'.'.join(map(str, path))}: on {', '.join(sorted(map(str, value.sharding.device_set)))}"
        for path, variable in variables(module).items()
        for value in jax.tree.leaves(variable.get_raw_value())
        if isinstance(value, jax.Array) and value.sharding.device_set != devices
    ]
    if misplaced:
        raise ArgumentError(
            f"The module passed to dj.Model was not built for {strategy!r}; these arrays are on other "
            f"devices:\n{listed(misplaced)}\nBuild it, and the Model, inside the scope: `with "
            "strategy.scope(): model = dj.Model(MyModule(rngs=nnx.Rngs(0)))`."
        )


@dataclass(frozen=True)
class Keys:
    """Which entries of a dict batch are its inputs and targets: a name, or a list for a dict of several."""

    x: Any = None
    y: Any = None

    def __bool__(self) -> bool:
        return self.x is not None or self.y is not None

    def arguments(self, batch: Any) -> tuple[Any, ...]:
        """Returns a batch as a step's positional arguments: ``(x,)``, ``(x, y)`` or with weights."""
        if not self:
            return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        if not isinstance(batch, dict) or self.x is None:
            raise ArgumentError(
                f"x_key={self.x!r}, y_key={self.y!r} name entries of batches that are dicts; a batch is a "
                f"{type(batch).__name__}. Pass x_key, also beside y_key, or leave both out."
            )
        return tuple(_entry(batch, key) for key in (self.x, self.y) if key is not None)


def _entry(batch: dict[Any, Any], key: Any) -> Any:
    if isinstance(key, (list, tuple)):
        return {one: _entry(batch, one) for one in key}
    if key not in batch:
        raise ArgumentError(f"A batch has no entry {key!r}. Its entries are {sorted(batch)}.")
    return batch[key]


class Batches(Iterator[tuple[Any, ...]]):
    """Iterates over the batches of one epoch as arguments of a step; counts them and can peek."""

    def __init__(self, dataset: DistributedDataset, keys: Keys | None = None) -> None:
        self.dataset = dataset
        self.iterator = iter(dataset)
        self._dealt_to = batch_layout(dataset)
        self.keys = keys or Keys()
        self.names: list[str] = []
        """The names in dict batches, if no keys were passed."""
        self.count = self.examples = 0
        self._next: list[tuple[Any, ...]] = []
        self._labels: LabelCheck | None = None

    def observe_labels(self, labels: LabelCheck) -> None:
        """Computes the label range of every batch while it is on the host."""
        keys = self.keys  # the prefetching thread must not hold a reference to self

        def ranges(batch: PyTree) -> Any:
            with suppress(ArgumentError):
                return labels.ranges((*keys.arguments(batch), None, None)[1])

        observe(self.iterator, ranges)

    def check_labels(self, labels: LabelCheck) -> None:
        """Checks the labels of the newest batch and of all later ones, if they were on the host."""
        labels.add(observed(self.iterator) or {}, f" in batch {self.count} of the dataset")
        self._labels = labels

    def peek(self) -> tuple[Any, ...] | None:
        """Returns the next batch without taking it; None at the end."""
        if not self._next:
            batch = next(self.iterator, _END)
            if batch is _END:
                return None
            if isinstance(batch, dict) and not self.keys:
                self.names = sorted(map(repr, batch))
            self._next.append(self.keys.arguments(batch))
            if self._labels is not None:
                self.check_labels(self._labels)
        return self._next[0]

    def check_not_empty(self, method: str, limit: int | None) -> None:
        """Raises if the data of a method has no example."""
        if limit != 0 and not self.count and self.peek() is None:
            raise ArgumentError(
                f"{method} got data without any example. Pass arrays, or a dataset that has batches; in "
                "place of an iterator that is used up, a function that returns a new one."
            )

    def position(self) -> str:
        """Returns the data position of the next batch, or, if there is none, to which replicas it goes."""
        with suppress(ArgumentError):  # the source cannot seek
            if not self._next:
                return json.dumps(self.iterator.state())
        return self._dealt_to

    def resume(self, count: int, position: str) -> None:
        """Continues after ``count`` batches; without a ``position`` it reads and drops them."""
        if position.startswith("{"):
            self.iterator.restore(json.loads(position))
            self.count = count
            return
        if position != self._dealt_to:
            raise ArgumentError(
                f"fit cannot continue in the middle of an epoch: a batch of {position or 'one reader'} and "
                f"one of {self._dealt_to or 'one reader'} are not the same examples. Distribute global "
                'batches that every process reads, dj.InputOptions(auto_shard_policy="data"), or save only '
                "at the end of an epoch."
            )
        for _ in range(count):
            next(self, None)

    def __next__(self) -> tuple[Any, ...]:
        batch = self.peek()
        if batch is None:
            raise StopIteration
        self._next.clear()
        self.count += 1
        self.examples += _real_rows(batch)
        return batch


_END = object()


class Unfinished:
    """The batches that a call left of an iterator: the next continues, with those that were read ahead."""

    def __init__(self) -> None:
        self._left: tuple[Any, Batches | None] = None, None

    def take(self, source: Any, keys: Keys) -> Batches | None:
        """Returns what is left of a source; None for another one, and after its end."""
        left = self._left[1] if source is self._left[0] else None
        if left is None or left.keys != keys or left.peek() is None:
            return None
        self._left, left.count, left.examples = (None, None), 0, 0
        return left

    def keep(self, source: Any, batches: Batches | None) -> None:
        if isinstance(source, Iterator):
            self._left = source, batches


@contextmanager
def hint(text: Callable[[Exception], str]) -> Iterator[None]:
    """Adds a note to an error that the block raises, unless ``text`` returns an empty string."""
    try:
        yield
    except Exception as error:
        if note := text(error):
            error.add_note(note)
        raise


INPUT_ERRORS = (TypeError, ValueError, AttributeError, KeyError)
"""Errors that a module raises if its inputs are not those that it expects."""


def dict_hint(method: str, batches: Batches, error: Exception) -> str:
    """Returns what to write if the module failed on dict batches, which it gets as they are."""
    if not batches.names or not isinstance(error, INPUT_ERRORS):
        return ""
    y_key, parts = ", y_key=…", '(batch["…"], batch["…"])'
    if method == "predict":
        y_key, parts = "", 'batch["…"]'
    return (
        f"{method} got batches that are dicts of {', '.join(batches.names)}, and passed each to the module "
        f"as one input, without targets. Say which entry is what, {method}(dataset, x_key=…{y_key}), or "
        f"dataset.map(lambda batch: {parts})."
    )


def _real_rows(batch: tuple[Any, ...]) -> int:
    """Returns the number of real examples in a global batch, without reading from the devices."""
    for leaf in jax.tree.leaves(batch, is_leaf=lambda leaf: isinstance(leaf, DistributedValues)):
        if isinstance(leaf, PerReplica):
            return sum(leaf.counts) if leaf.counts else int(leaf.global_array.shape[0])
    return 0


def unpack_x_y_sample_weight(batch: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    """Splits a batch into inputs, targets and sample weights; those that it lacks are None.

    Args:
        batch: a tuple or list ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``, or the inputs alone.

    Raises:
        ValueError: a tuple of more than three parts.

    Example:
        >>> import distribute_jax as dj
        >>> dj.unpack_x_y_sample_weight((1, 2))
        (1, 2, None)

    Source: https://keras.io/api/utils/data_loading_utils/
    """
    if not isinstance(batch, (tuple, list)):
        return batch, None, None
    if not 1 <= len(batch) <= 3:
        raise ArgumentError(
            "Expected a batch (x,), (x, y) or (x, y, sample_weight); got a tuple of "
            f"{len(batch)}. Put several inputs into a dict, ({{'a': a, 'b': b}}, y)."
        )
    x, y, weight = (*batch, None, None)[:3]
    return x, y, weight


def example_counts(x: PyTree) -> tuple[Any, Any]:
    """Returns the numbers of real examples of this replica and of the global batch."""
    leaves = [leaf for leaf in jax.tree.leaves(x) if getattr(leaf, "ndim", 0)]
    if not leaves:
        raise ArgumentError(
            f"The inputs of a batch hold no array of examples, but {leaf_text(x)}. Pass arrays "
            "whose dim 0 is the batch."
        )
    replica = get_replica_context()
    if replica.is_padded:
        return replica.batch_mask.sum(dtype=jnp.int32), replica.real_examples
    rows = int(leaves[0].shape[0])
    return rows, rows * replica.num_replicas_in_sync
