"""Gradients added up over several batches, on each replica by itself, before one update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from distribute_jax._errors import ArgumentError
from distribute_jax.variables import Variable, VariableAggregation, VariableSynchronization


class PartialGradient(Variable):
    """What one replica has added up of one gradient; the whole is the sum over the replicas."""

    is_optimizer_state = True


class Accumulation(nnx.Module):
    """Adds up this replica's gradients, and says when they are to be applied.

    Nothing is sent between the replicas until then, so k batches cost one reduction.

    Args:
        params: the variables whose gradients are added up.
        steps: how many batches make one update.
    """

    def __init__(self, params: Sequence[nnx.Variable[Any]], steps: int) -> None:
        self.steps = steps
        self.batches = nnx.OptState(jnp.zeros((), jnp.int32))
        self.sums = nnx.List([
            PartialGradient(
                jnp.zeros_like(param.get_raw_value()),
                trainable=False,
                synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation.SUM,
                name=f"gradient_{i}",
            )
            for i, param in enumerate(params)
        ])  # fmt: skip

    def add(self, gradients: Sequence[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        """Adds this replica's gradients of a batch.

        Returns:
            Whether this batch completes an update, and this replica's mean gradient over its batches.
        """
        count = self.batches[...] + 1
        is_last = count == self.steps
        self.batches[...] = jnp.where(is_last, 0, count)
        totals = [total[...] + new for total, new in zip(self.sums, gradients, strict=True)]
        for variable, total in zip(self.sums, totals, strict=True):
            variable[...] = jnp.where(is_last, jnp.zeros_like(total), total)
        return is_last, [total / self.steps for total in totals]


def checked_accumulation(steps: Any) -> int:
    """Refuses what is no number of batches."""
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ArgumentError(
            f"gradient_accumulation_steps={steps!r}: it is the number of batches of one update, an int "
            "of at least 1."
        )
    return steps
