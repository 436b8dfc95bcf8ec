"""Variables that a step makes and keeps: given their first values before the step runs.

The first trace ends with those values instead of the step's own outcome. They are computed on the
replicas and stored, and the step is traced again, in which it finds the variables made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distribute_jax._errors import ArgumentError
from distribute_jax._internals import adopt, write_raw
from distribute_jax._values import PerReplica
from distribute_jax.program.binding._aggregation import keeps_own_values
from distribute_jax.program.binding._bind import Binding


def kept_variables(call: Any, noted: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Gives those of the variables made in a step that outlive it, with their first values."""
    if not noted:
        return []
    reached = {id(variable) for variable in Binding(call.fn, call.arguments).variables}
    return [(variable, raw) for variable, raw in noted if id(variable) in reached]


def give_first_values(variables: Sequence[Any], values: Sequence[Any]) -> None:
    """Stores first values, as a program that computed them gave them."""
    adopt(variables)
    pairs = zip(variables, values, strict=True)
    write_raw(variables, [_raw(variable, value) for variable, value in pairs])


def _raw(variable: Any, value: Any) -> Any:
    if isinstance(value, PerReplica):
        return value.global_array
    return value[None] if keeps_own_values(variable) else value  # one replica's only component


def check_made_once(names: Sequence[str]) -> None:
    """Raises where a step makes variables although it made them before."""
    if names:
        raise ArgumentError(
            f"The step makes the variables {', '.join(names)} each time that it is traced. A step "
            "may make variables in its first run only: make them once, as with `if self.v is None: "
            "self.v = dj.Variable(0.0)`, or before, under strategy.scope()."
        )
