"""What a peer is asked and answers: one process for each peer, JSON lines over its standard streams.

A peer is started as ``python -m benchmarks.peers.<name> <model> <replicas> <file.npz>``. It then says

    {"ready": {"python": "3.11.8", "torch": "2.13.0", ...}}

and answers each line that it reads with one line:

    {"losses": 20}   the losses of the first steps, from the initial weights; asked first
    {"turn": 10}     {"seconds": ...} of one step, over a turn of so many
    {"state": true}  {"state": ...} bytes of weights and optimizer on the device that has most of them
    {"end": true}    nothing: the process ends, as it does when its input ends

Standard library and NumPy only: every peer imports this, whatever its framework.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]

LEARNING_RATE, EPSILON = 1e-3, 1e-9
"""Of Adam. Frameworks add epsilon before or after the correction of the moments; this one is small
enough not to show the difference."""


@dataclass(frozen=True)
class Start:
    """What every peer starts from."""

    model: str
    """Which of the models: ``mlp``, ``cnn`` or ``transformer``."""
    replicas: int
    weights: dict[str, Array]
    """Initial weights by name, such as ``layers.0.kernel``."""
    x: Array
    """Inputs, shape (batches, global batch, ...): steps take the batches in turn."""
    y: Array
    """Labels, shape (batches, global batch, ...)."""


class Trainer(Protocol):
    """A model with its optimizer and batches, ready to train."""

    def losses(self, steps: int) -> list[float]:
        """Trains, and gives each step's mean loss over the global batch."""

    def run(self, steps: int) -> None:
        """Trains, and returns when the last step has finished."""


def serve(build: Callable[[Start], Trainer], *packages: ModuleType) -> None:
    """Runs a peer until it is told to end.

    Args:
        build: makes the trainer.
        packages: those whose versions are told.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a framework prints must not stand between the answers
    model, replicas, path = sys.argv[1:]
    trainer = build(read_start(model, int(replicas), path))
    versions = {package.__name__: package.__version__ for package in packages}
    _say(answers, {"ready": {"python": platform.python_version(), **versions}})
    for line in sys.stdin:
        question = json.loads(line)
        if "end" in question:
            return
        _say(answers, _answer(trainer, question))


def _answer(trainer: Trainer, question: dict[str, Any]) -> dict[str, Any]:
    if "losses" in question:
        return {"losses": trainer.losses(question["losses"])}
    if "state" in question:
        return {"state": trainer.state_bytes()}  # type: ignore[attr-defined]
    calls = question["turn"]
    trainer.run(1)  # brings this process's data back into the caches
    start = time.perf_counter()
    trainer.run(calls)
    return {"seconds": (time.perf_counter() - start) / calls}


def most_on_a_device(arrays: Iterable[Any]) -> int:
    """Counts the bytes of arrays of JAX on the device that has most of them."""
    held = Counter[Any]()
    for shard in (shard for array in arrays for shard in array.addressable_shards):
        held[shard.device] += shard.data.nbytes
    return max(held.values())


def _say(answers: Any, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers, flush=True)


def write_start(path: str, weights: dict[str, Array], x: Array, y: Array) -> None:
    """Writes weights and batches where peers read them."""
    arrays: dict[str, Any] = {f"weights/{name}": value for name, value in weights.items()}
    np.savez(path, x=x, y=y, **arrays)


def read_start(model: str, replicas: int, path: str) -> Start:
    """Reads what ``write_start`` wrote."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    x, y = arrays.pop("x"), arrays.pop("y")
    weights = {name.removeprefix("weights/"): value for name, value in arrays.items()}
    return Start(model, replicas, weights, x, y)
