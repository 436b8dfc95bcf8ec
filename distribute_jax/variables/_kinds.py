"""When the replicas' values of a variable are combined, and how."""

from __future__ import annotations

import enum
from typing import Any

import jax.numpy as jnp

from distribute_jax._errors import ArgumentError


class VariableSynchronization(enum.Enum):
    """When the replicas' values of a variable become one.

    Source: https://www.tensorflow.org/api_docs/python/tf/VariableSynchronization
    """

    __module__ = "distribute_jax"

    AUTO = "AUTO"
    """``ON_WRITE``."""
    NONE = "NONE"
    """Never: refused, since the replicas would drift apart."""
    ON_WRITE = "ON_WRITE"
    """At every write: the variable is mirrored."""
    ON_READ = "ON_READ"
    """When it is read outside of ``run``: each replica has its own value."""


class VariableAggregation(enum.Enum):
    """How the replicas' values become one.

    Source: https://www.tensorflow.org/api_docs/python/tf/VariableAggregation
    """

    __module__ = "distribute_jax"

    NONE = "NONE"
    """Not at all: the replicas must write the same value, which is proved."""
    SUM = "SUM"
    """Their sum."""
    MEAN = "MEAN"
    """Their mean."""
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"
    """The value of replica 0."""


def checked_kinds(
    synchronization: Any, aggregation: Any, dtype: Any
) -> tuple[VariableSynchronization, VariableAggregation]:
    """Checks what a variable is asked to be, and turns AUTO into ON_WRITE."""
    for name, value, kind in (
        ("synchronization", synchronization, VariableSynchronization),
        ("aggregation", aggregation, VariableAggregation),
    ):
        if not isinstance(value, kind):
            raise ArgumentError(
                f"dj.Variable got {name}={value!r}, which is no {kind.__name__}. Use one of "
                + ", ".join(f"dj.{kind.__name__}.{member.name}" for member in kind)
                + "."
            )
    if synchronization is VariableSynchronization.NONE:
        raise ArgumentError(
            "dj.Variable got synchronization=NONE, which is invalid: the replicas' values would drift "
            "apart for good. Use ON_WRITE, or ON_READ where each replica keeps its own value."
        )
    if aggregation is VariableAggregation.MEAN and not jnp.issubdtype(dtype, jnp.inexact):
        raise ArgumentError(
            f"dj.Variable got aggregation=MEAN for {dtype}: the mean of integers is not an integer. "
            "Use a floating dtype, SUM or ONLY_FIRST_REPLICA."
        )
    if synchronization is VariableSynchronization.AUTO:
        synchronization = VariableSynchronization.ON_WRITE
    return synchronization, aggregation
