"""The position of an iterator, as a small dict that JSON can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from distribute_jax._checks import check_int
from distribute_jax._errors import ArgumentError
from distribute_jax.data._element import EpochProgress
from distribute_jax.data.sources import Source

State: TypeAlias = Mapping[str, Any]

SAME_BATCHES = (
    "The position counts batches, so the examples and the global batch size must be the same."
)

VERSION = 1
_NUMBERS = ("epoch", "position", "first_batch", "largest_batch")


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
    if isinstance(state, Mapping) and state.get("version", VERSION) != VERSION:
        raise ArgumentError(
            f"iterator.restore got a state of version {state['version']!r:.20}; this release reads "
            f"version {VERSION}. Restore it with the release that saved it."
        )
    try:
        source_text, seed, batches = state["source"], state["seed"], state["batches"]
        epoch, position, first, largest = (check_int(name, state[name], 0) for name in _NUMBERS)
        if length is not None and batches == length:
            check_int("position", position, 0, length + 1)
    except (TypeError, LookupError, ArgumentError) as error:
        raise ArgumentError(
            f"iterator.restore got {state!r:.80}, which is not what iterator.state() returned: "
            f"{type(error).__name__}: {error}"
        ) from None
    check_same("source", source_text, source.text, "Distribute the source that it was saved from.")
    check_same("seed", seed, source.seed, "Shuffle with the seed that it was saved with.")
    check_same("batches", batches, length, SAME_BATCHES)
    return epoch, EpochProgress(position, first, largest)


def check_same(name: str, saved: Any, now: Any, remedy: str) -> None:
    """Raises if a field of a state has another value than this dataset."""
    if saved != now:
        raise ArgumentError(
            f"iterator.restore got a state with {name} {saved!r}, but this dataset has {name} {now!r}, "
            f"so the next batch would be another one. {remedy}"
        )
