"""Reading jaxprs: their equations at any depth, the bodies that they call, and the user's lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.extend import core, source_info_util
from jax.extend.core import Jaxpr, subjaxprs

ClosedJaxpr: Any = getattr(core, "ClosedJaxpr", core.Jaxpr)
"""A jaxpr with its constants. JAX 0.12 has one class for both, under both names."""

_PACKAGE = str(Path(__file__).parents[1])
_FRAME = re.compile(r"(?P<file>.+?):(?P<line>\d+)(:\d+)? \(.*\)")


def opened(body: Any) -> Any:
    """Returns a jaxpr without its constants."""
    return body.jaxpr if isinstance(body, ClosedJaxpr) else body


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Returns every equation of a program, at any depth."""
    yield from jaxpr.eqns
    for inner in subjaxprs(jaxpr):
        yield from equations(inner)


CALLS = (
    *(
        "jit",
        "pjit",
        "core_call",
        "call",
        "closed_call",
        "eval_jaxpr",
        "remat",
        "remat2",
        "checkpoint",
    ),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_vmap_call"),
    *("linear_call", "composite", "compute_on", "xla_metadata_call", "cross_device_sum"),
)
"""The primitives that run one body once, on their operands."""


_AXES = ("axes", "axis_name")
"""The parameters in which JAX's collectives name axes."""


class RenamedAxis:
    """Renames the user's axis in every collective to that of the mesh; equal jaxprs inside stay one."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new
        self._known: dict[int, tuple[Any, Any]] = {}

    def closed(self, closed: Any) -> Any:
        """Returns a program with the other name."""
        return closed.replace(jaxpr=self._jaxpr(closed.jaxpr))

    def _jaxpr(self, jaxpr: Any) -> Any:
        if id(jaxpr) not in self._known:
            new = jaxpr.replace(
                eqns=[self.equation(eqn) for eqn in jaxpr.eqns], effects=self.effects(jaxpr)
            )
            self._known[id(jaxpr)] = jaxpr, new  # held, so that its id stays its own
        return self._known[id(jaxpr)][1]

    def equation(self, eqn: Any) -> Any:
        """Returns an equation with the other name, also in the programs that it holds."""
        params = {
            key: jax.tree.map(self._axis if key in _AXES else self._inner, value)
            for key, value in eqn.params.items()
        }
        return eqn.replace(params=params, effects=self.effects(eqn))

    def effects(self, of: Any) -> Any:
        """Returns the effects of an equation or program with the other name."""
        return {
            type(e)(self._new) if getattr(e, "name", None) == self._old else e for e in of.effects
        }

    def _axis(self, name: Any) -> Any:
        return self._new if name == self._old else name

    def _inner(self, value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return self.closed(value)
        return self._jaxpr(value) if isinstance(value, Jaxpr) else value


def names_axis(eqn: Any, axis: str) -> bool:
    """Returns whether an equation itself speaks of an axis."""
    named = [eqn.params.get(key) for key in _AXES]
    return any(axis == n or (isinstance(n, tuple | frozenset) and axis in n) for n in named)


def called_body(eqn: Any) -> Any:
    """Returns the body that an equation runs on its operands; None for a form that is not known."""
    keys = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call", "callee")
    params = [eqn.params.get(key) for key in keys]
    bodies = [body for body in params if isinstance(body, Jaxpr | ClosedJaxpr)]
    is_call = len(bodies) == 1 and len(opened(bodies[0]).invars) == len(eqn.invars)
    return bodies[0] if is_call else None


def consts_and_carries(scan: Any) -> tuple[int, int]:
    """Returns how many operands of a scan are constants of its loop, and how many are carries.

    JAX 0.10 gives the numbers, 0.12 trees of a private type. The shapes tell in both: only what is
    scanned, or stacked, has one dim more outside the body.
    """
    inner = opened(scan.params["jaxpr"])
    scanned, stacked = (
        sum(len(x.aval.shape) != len(y.aval.shape) for x, y in zip(outer, of_body, strict=True))
        for outer, of_body in ((scan.invars, inner.invars), (scan.outvars, inner.outvars))
    )
    carries = len(scan.outvars) - stacked
    return len(scan.invars) - scanned - carries, carries


def has_effects(eqn: Any) -> bool:
    """Returns whether an equation does more than compute its results."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def is_ref(var: Any) -> bool:
    """Returns whether a variable of a jaxpr is a reference to memory that can be written."""
    return type(var.aval).__name__ == "AbstractRef" or bool(getattr(var.aval, "has_qdd", False))


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
