"""Parses the HLO text of a compiled program: its collectives, and which are in loops and branches."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import NamedTuple


class Collective(NamedTuple):
    """Collectives of one kind in a compiled step."""

    kind: str
    """XLA's name, such as ``"all-reduce"``."""
    number: int
    """How many the program has; one in a loop counts once."""
    bytes: int
    """The size of their results on each device; in a loop, of one iteration."""
    in_loop: bool
    """Whether they are in the body of a loop, as of ``nnx.scan``."""


_COMPUTATION = re.compile(r"^(?:ENTRY )?%(\S+) \(", re.MULTILINE)
_COLLECTIVE = re.compile(
    r" = (\(.*?\)|\S+) "
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)(?:-done)?\("
)
"""An asynchronous one is counted at its ``-done``, whose type is that of the result alone."""
_ARRAY = re.compile(r"([a-z]+\d*)\w*\[([\d,]*)\]")
_BODY = re.compile(r" body=%([\w.\-]+)")
_REFERENCE = re.compile(r"%([\w.\-]+)")


def collectives_of(text: str) -> Iterator[Collective]:
    """Yields the collectives of a compiled program by kind; those in loops separately."""
    bodies = _computations(text)
    in_loop = _reached(bodies, _BODY.findall(text))
    counts: Counter[tuple[str, bool]] = Counter()
    sizes: Counter[tuple[str, bool]] = Counter()
    for name, body in bodies.items():
        for result, kind in _COLLECTIVE.findall(body):
            counts[kind, name in in_loop] += 1
            sizes[kind, name in in_loop] += sum(
                map(_array_bytes, *zip(*_ARRAY.findall(result), strict=True))
            )
    for (kind, loop), count in sorted(counts.items()):
        yield Collective(kind, count, sizes[kind, loop], loop)


def has_exchange_in_branch(text: str) -> bool:
    """True if a collective-permute is in a branch, or in a loop without a known trip count.

    Other collectives wait for their group of devices, a permute for all devices of the program.
    """
    bodies = _computations(text)
    decided = [
        name
        for line in text.splitlines()
        if " conditional(" in line or (" while(" in line and "known_trip_count" not in line)
        for name in _REFERENCE.findall(line)
    ]
    inside = _reached(bodies, decided)
    return any(
        kind == "collective-permute"
        for name in inside
        for _, kind in _COLLECTIVE.findall(bodies[name])
    )


def _computations(text: str) -> dict[str, str]:
    """Returns the text of each computation by its name."""
    _, *pieces = _COMPUTATION.split(text)
    return dict(zip(pieces[::2], pieces[1::2], strict=True))


def _reached(bodies: Mapping[str, str], names: Iterable[str]) -> set[str]:
    """Returns these computations, and all that they reach."""
    reached: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name in bodies and name not in reached:
            reached.add(name)
            pending += _REFERENCE.findall(bodies[name])
    return reached


def _array_bytes(dtype: str, dims: str) -> int:
    return prod(map(int, filter(None, dims.split(",")))) * int(re.sub(r"\D", "", dtype) or 8) // 8
