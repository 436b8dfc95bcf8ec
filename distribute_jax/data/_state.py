"""The position of an iterator, as a small dict that JSON can hold."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, TypeAlias

from distribute_jax._errors import ArgumentError
from distribute_jax.data._element import EpochProgress
from distribute_jax.data.sources import Source

State: TypeAlias = Mapping[str, Any]

SAME_BATCHES = (
    "The position counts batches, so the examples and the global batch size must be the same."
)
_PASS = "Pass what iterator.state() returned."

VERSION = 1
_NUMBERS = ("epoch", "position", "first_batch", "largest_batch")
_FIELDS = ("version", "source", "seed", "batches", *_NUMBERS)


def make_state(
    source: Source, length: int | None, epoch: int, progress: EpochProgress
) -> dict[str, Any]:
    """Returns which batch comes next, and what must be the same for it to come next again."""
    return {
        "version": VERSION,
        "source": source.text,
        "seed": source.seed,
        "batches": length,
        "epoch": epoch,
        "position": progress.batches,
        "first_batch": progress.first,
        "largest_batch": progress.largest,
    }


def read_state(state: State, source: Source, length: int | None) -> tuple[int, EpochProgress]:
    """Reads a state of the same source; an ArgumentError if it is not one."""
    if not isinstance(state, Mapping) or "version" not in state:
        raise ArgumentError(
            f"iterator.restore got {state!r:.80}, which is not a state of an iterator. {_PASS}"
        )
    if state["version"] != VERSION:
        raise ArgumentError(
            f"iterator.restore got a state of version {state['version']!r:.20}; this release reads "
            f"version {VERSION}. Restore it with the release that saved it."
        )
    missing = [name for name in _FIELDS if name not in state]
    if missing:
        raise ArgumentError(f"iterator.restore got a state without {', '.join(missing)}. {_PASS}")
    check_same(
        "source", state["source"], source.text, "Distribute the source that it was saved from."
    )
    check_same("seed", state["seed"], source.seed, "Shuffle with the seed that it was saved with.")
    check_same("batches", state["batches"], length, SAME_BATCHES)
    epoch, position, first, largest = (_number(state, name) for name in _NUMBERS)
    if length is not None and position > length:
        raise ArgumentError(
            f"iterator.restore got the position {position}, but an epoch has {length} batches. {_PASS}"
        )
    return epoch, EpochProgress(position, first, largest)


def check_same(name: str, saved: Any, now: Any, remedy: str) -> None:
    """Raises if a field of a state has another value than this dataset."""
    if saved != now:
        raise ArgumentError(
            f"iterator.restore got a state with {name} {saved!r}, but this dataset has {name} {now!r}, "
            f"so the next batch would be another one. {remedy}"
        )


def _number(state: State, name: str) -> int:
    try:
        number = operator.index(state[name])
    except TypeError:
        number = -1
    if number < 0:
        raise ArgumentError(
            f"iterator.restore got a state whose {name} is {state[name]!r:.60}; it must be an int of "
            f"at least 0. {_PASS}"
        )
    return number
