"""The words of the proof: a value's mark, what decides whether code runs, and the user's line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.extend import core, source_info_util

Mark = frozenset[str]
"""Why a value may differ between replicas, in words. Empty: it is proved mirrored."""

MIRRORED: Mark = frozenset()

ClosedJaxpr: Any = getattr(core, "ClosedJaxpr", core.Jaxpr)
"""A jaxpr with its constants. JAX 0.12 has one class for both, under both names."""

_PACKAGE = str(Path(__file__).parents[2])
_FRAME = re.compile(r"(?P<file>.+?):(?P<line>\d+)(:\d+)? \(.*\)")


def union(marks: Iterable[Mark]) -> Mark:
    """Returns the mark of a value that depends on all the marked values."""
    result = MIRRORED
    for mark in marks:
        if mark:
            result = result | mark if result else mark
    return result


@dataclass(frozen=True)
class Control:
    """What decides whether, and how often, a piece of the program runs."""

    mark: Mark = MIRRORED
    """Why replicas may decide differently. Empty: they all run it alike."""
    what: str = ""
    """The innermost deciding construct, such as ``the predicate of cond at train.py:12``."""

    def inside(self, mark: Mark, role: str, eqn: Any) -> Control:
        """Returns the control of code that runs if a value with this mark says so."""
        if not mark:
            return self
        return Control(self.mark | mark, f"{role} of {name(eqn)} at {line(eqn)}")


def num_scanned(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    """Counts the operands, or outputs, of a scan that have one dim more outside its body."""
    return sum(
        len(out.aval.shape) != len(body.aval.shape) for out, body in zip(outer, inner, strict=True)
    )


def name(eqn: Any) -> str:
    """Returns the name of the equation's primitive, as users know it."""
    primitive: str = eqn.primitive.name
    return "checkpoint" if primitive == "remat2" else primitive


def line(eqn: Any, *, full_path: bool = False) -> str:
    """Returns the user's line that made the equation, as ``file:line``."""
    known = user_line(eqn, full_path=full_path)
    return known or str(eqn.source_info.name_stack) or "an unknown line"


def user_line(eqn: Any, *, full_path: bool = False) -> str | None:
    """Returns that line, or None for an equation of a function that JAX itself has traced."""
    frames = source_info_util.summarize(eqn.source_info, num_frames=64).splitlines()
    for frame in reversed(frames):
        match = _FRAME.fullmatch(frame)
        if match and not _is_library(match["file"]):
            file = match["file"] if full_path else Path(match["file"]).name
            return f"{file}:{match['line']}"
    return None


def _is_library(file: str) -> bool:
    return file.startswith((_PACKAGE, "<frozen")) or "site-packages" in file
