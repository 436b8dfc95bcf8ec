"""What the peers on JAX share: the step as a function of flat arrays, and the loop around a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from benchmarks.peers._flax_models import example_losses, model_of, optimizer
from benchmarks.peers._protocol import Start, most_on_a_device

AHEAD = 2
"""Steps that may be dispatched and not finished: a loop that does not read each loss. On CPU devices
a loop without a bound can wait for itself for ever."""


@dataclass
class JaxTrainer:
    """Takes the batches in turn."""

    step: Callable[[Any], Any]
    """Dispatches one step on a batch that is on the devices."""
    read: Callable[[Any], float]
    """Reads the loss over the global batch from what ``step`` gave."""
    placed: Sequence[Any]
    """The batches."""
    state: Callable[[], Any] = tuple
    """Reads the arrays of weights and optimizer as they are now."""

    def __post_init__(self) -> None:
        """Begins with the first batch."""
        self._next = cycle(self.placed)

    def losses(self, steps: int) -> list[float]:
        """Trains, and gives each step's loss."""
        return [self.read(self.step(next(self._next))) for _ in range(steps)]

    def run(self, steps: int) -> None:
        """Trains, and returns when the last step has finished."""
        unfinished: deque[Any] = deque()
        for _ in range(steps):
            unfinished.append(self.step(next(self._next)))
            if len(unfinished) > AHEAD:
                jax.block_until_ready(unfinished.popleft())
        jax.block_until_ready(list(unfinished))

    def state_bytes(self) -> int:
        """Counts what the state takes on the device that has most of it."""
        return most_on_a_device(jax.tree.leaves(self.state()))


def mesh_of(replicas: int) -> Mesh:
    """Lays the replicas along ``data``."""
    return Mesh(np.asarray(jax.devices()[:replicas]), ("data",), axis_types=(AxisType.Auto,))


def shardings_of(replicas: int) -> tuple[Mesh, NamedSharding, NamedSharding]:
    """Returns the mesh, and how whole and divided arrays are placed on it."""
    mesh = mesh_of(replicas)
    return mesh, NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))


def placed_batches(start: Start, sharding: Any) -> list[Any]:
    """Puts the batches on the devices."""
    return [jax.device_put(batch, sharding) for batch in zip(start.x, start.y, strict=True)]


def flat_step(start: Start, *, summed: bool) -> tuple[Callable[..., Any], list[Any]]:
    """Writes the step over flat arrays, as one does by hand, and gives its first state.

    Args:
        start: the model.
        summed: whether the step sees one replica's share, and sums the gradients over ``data`` itself.

    Returns:
        The step, from the state's arrays, x and y to the new state's arrays and its share's loss;
        and the state.
    """
    graph, *parts = nnx.split(model_of(start), nnx.Param, ...)
    params, rest = parts
    leaves, structure = jax.tree.flatten((params, optimizer().init(params)))
    examples = start.x.shape[1]

    def step(*flat: Any) -> list[Any]:
        params, state = jax.tree.unflatten(structure, flat[:-2])
        x, y = flat[-2:]

        def loss_fn(params: Any) -> jax.Array:
            return jnp.sum(example_losses(nnx.merge(graph, params, rest)(x), y)) / examples

        loss, grads = jax.value_and_grad(loss_fn)(params)
        if summed:
            grads = jax.lax.psum(grads, "data")
        updates, state = optimizer().update(grads, state, params)
        new = jax.tree.leaves((optax.apply_updates(params, updates), state))
        return [*new, loss[None] if summed else loss]

    return step, leaves


def carried(compiled: Any, state: list[Any]) -> Callable[[Any], Any]:
    """Returns a step that hands its state on to the next one."""
    held = [state]

    def step(batch: Any) -> Any:
        *held[0], loss = compiled(*held[0], *batch)
        return loss

    return step


def sum_of_shares(losses: Any) -> float:
    """Adds the replicas' parts of the mean."""
    return float(np.sum(np.asarray(losses), dtype=np.float64))
