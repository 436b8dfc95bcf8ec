"""What the checks look at: a strategy on known devices, and how they run a step on it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax.program import RunOptions
from distribute_jax.strategies import Strategy, get_replica_context
from distribute_jax.testing._checks._facts import Fact


@dataclass(frozen=True)
class Subject:
    """A strategy that is being checked."""

    strategy: Strategy
    devices: tuple[jax.Device, ...]
    """Where its replicas should lie, in order."""
    options: RunOptions
    """What every step runs with: the lowering."""

    @property
    def n(self) -> int:
        """The number of replicas."""
        return len(self.devices)

    def made(self, make: Callable[[], Any]) -> Any:
        """Makes state under the strategy's scope."""
        with self.strategy.scope():
            return make()

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Runs a step on all replicas."""
        return self.strategy.run(step, args=args, options=self.options)

    def seen(self, step: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs a step; gives what each replica itself has of the result, as NumPy arrays."""

        @functools.wraps(step)  # so that run finds the state that the step captures
        def with_results_apart(*own: Any) -> Any:
            return apart(step(*own))

        return self.parts(self.run(with_results_apart, *args))

    def parts(self, value: Any) -> list[Any]:
        """Gives each replica's part of a value, as NumPy arrays."""
        parts = self.strategy.experimental_local_results(value)
        return [jax.tree.map(np.asarray, part) for part in parts]

    def own(self, values: Sequence[Any]) -> Any:
        """Gives each replica its own value."""
        return self.strategy.experimental_distribute_values_from_function(
            lambda context: values[context.replica_id_in_sync_group]
        )

    def batches(self, data: Sequence[Any]) -> list[Any]:
        """Spreads global batches over the replicas."""
        return list(self.strategy.distribute_dataset(data))


Check = Callable[[Subject], Iterator[Fact]]


def replica() -> Any:
    """Gives the context of this replica."""
    return get_replica_context()


def number() -> jax.Array:
    """Gives 1.0 to replica 0, 2.0 to replica 1, and so on."""
    return jnp.asarray(replica().replica_id_in_sync_group, jnp.float32) + 1


def power() -> jax.Array:
    """Gives 1, 2, 4, … to the replicas: no two sets of replicas have the same sum."""
    return jnp.exp2(number() - 1)


def apart(tree: Any) -> Any:
    """Makes arrays per-replica values, so that all can be read even where they should be equal."""
    real = number() > 0
    return jax.tree.map(lambda leaf: jnp.where(real, leaf, jnp.zeros_like(leaf)), tree)
