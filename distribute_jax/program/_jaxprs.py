"""Reading jaxprs: their equations at any depth, the bodies that they call, and the user's lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
