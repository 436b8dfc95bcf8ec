"""A model's weights as a list of NumPy arrays, and its state in files."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from distribute_jax import checkpoint
from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import put
from distribute_jax._messages import listed
from distribute_jax.strategies import Strategy
from distribute_jax.variables import Variable


def weight_variables(module: nnx.Module) -> list[tuple[str, nnx.Variable[Any]]]:
    """Gives trained weights first, then statistics such as batch norm's, each by its path.

    A ``dj.Variable`` stands among the weights or, where it is not trained, among the statistics.
    """
    found = [(path, v) for path, v in nnx.iter_graph(module) if isinstance(v, nnx.Variable)]
    named: list[tuple[str, nnx.Variable[Any]]] = [
        (".".join(map(str, path)), v)
        for belongs in (is_trained, _is_kept)
        for path, v in sorted(found, key=lambda item: tuple(map(str, item[0])))
        if belongs(path, v)
    ]
    return named


def is_trained(path: Any, variable: Any) -> bool:
    """Tells, as a filter of NNX, what ``fit`` trains: ``nnx.Param``, and Variables that say so."""
    del path
    kind = variable.type if isinstance(variable, nnx.Variable) else None
    if kind is not None and issubclass(kind, Variable):
        return bool(variable.get_metadata("trainable"))
    return kind is not None and issubclass(kind, nnx.Param)


def _is_kept(path: Any, variable: Any) -> bool:
    """Tells what belongs to a model and is not trained."""
    return isinstance(variable, (nnx.BatchStat, Variable)) and not is_trained(path, variable)


def get_weights(module: nnx.Module) -> list[np.ndarray[Any, Any]]:
    """Reads every weight to the host."""
    return [np.asarray(jax.device_get(v[...])) for _, v in weight_variables(module)]


def set_weights(module: nnx.Module, weights: Sequence[Any]) -> None:
    """Writes every weight where it lies, or none if any does not fit."""
    variables = weight_variables(module)
    if len(weights) != len(variables):
        raise ArgumentError(
            f"set_weights got {len(weights)} arrays, and the module has {len(variables)} weights: "
            f"{', '.join(name for name, _ in variables[:10])}. Pass what get_weights() of such a "
            "module gave."
        )
    wrong = [
        f"{name}: {np.shape(new)} instead of {v[...].shape}"
        for (name, v), new in zip(variables, weights, strict=True)
        if np.shape(new) != v[...].shape
    ]
    if wrong:
        raise ArgumentError(f"set_weights got arrays of other shapes:\n{listed(wrong)}")
    for (_, variable), new in zip(variables, weights, strict=True):
        if isinstance(variable, Variable):
            variable.assign(np.asarray(new, variable[...].dtype))
            continue
        old = variable.get_raw_value()
        value = np.asarray(new, old.dtype)
        variable.set_raw_value(put(value, old.sharding))


class Stored(ABC):
    """Reads, writes, saves and loads the state of a module that a strategy holds."""

    __module__ = "distribute_jax"

    module: nnx.Module
    strategy: Strategy

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """Gives what a checkpoint holds."""

    def get_weights(self) -> list[np.ndarray[Any, Any]]:
        """Gives every weight as a NumPy array: the trained ones first, then statistics."""
        return get_weights(self.module)

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets every weight; takes what ``get_weights`` gives."""
        set_weights(self.module, weights)

    def save(self, path: str | os.PathLike[str], overwrite: bool = True) -> None:
        """Saves weights, statistics, random streams and optimizer, to go on training from.

        At every moment the folder holds the old checkpoint or the new one, whole. What is saved under
        one strategy can be loaded under any other.

        Args:
            path: a folder, which is made.
            overwrite: whether an older checkpoint at this place is replaced.

        Raises:
            CheckpointError: there is one and ``overwrite=False``.
            CheckpointFileError: it cannot be written.
        """
        with self.strategy.scope():
            checkpoint.save(path, self._state(), overwrite=overwrite)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Loads what ``save`` saved, into a model of the same structure, or changes nothing.

        Args:
            path: the folder.

        Raises:
            CheckpointError: there is none, or its leaves are not those of this model: all are listed.
            CheckpointDamagedError: what is there is not what was saved.
        """
        with self.strategy.scope():
            checkpoint.load(path, self._state())

    def save_weights(self, path: str | os.PathLike[str], overwrite: bool = True) -> None:
        """Saves the module alone: weights, statistics and random streams; see ``save``."""
        with self.strategy.scope():
            checkpoint.save(path, {"module": self.module}, overwrite=overwrite)

    def load_weights(self, path: str | os.PathLike[str]) -> None:
        """Loads what ``save_weights`` saved; see ``load``."""
        with self.strategy.scope():
            checkpoint.load(path, {"module": self.module})
