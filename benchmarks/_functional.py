"""Programs whose state goes in and out of the step, as in JAX's own examples: ``run`` beside ``jit``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import distribute_jax as dj

RUN, JIT = "strategy.run", "jax.jit"

Step = Callable[[], Any]


@dataclass(frozen=True)
class Functional:
    """One program, written for ``run`` on one replica and for ``jax.jit``."""

    steps: Callable[[], dict[str, Step]]
    """Builds both; each call dispatches one step and returns what is waited for."""
    beyond_us: float | None
    """The target for what ``run`` takes more than ``jit``; None where it is a ratio."""
    ratio: float = 1.05
    """The target for ``run`` by ``jit`` where the step itself takes 5 ms and more."""


class _Layers(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(1)(x)


def _train_step(state: TrainState, x: jax.Array, y: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss_fn(params: Any) -> jax.Array:
        return jnp.mean((state.apply_fn(params, x) - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    loss, grads = dj.get_replica_context().all_reduce("mean", (loss, grads))
    return state.apply_gradients(grads=grads), loss


MEMORY, GENERATOR = "memory", "generator"


def _trained(width: int, rows: int, *, fed_from: str = "") -> dict[str, Step]:
    """Returns the step of a ``TrainState``; with ``fed_from`` each takes a new batch from the host."""
    model = _Layers(width)
    random = np.random.default_rng(0)
    data = [random.normal(size=(rows, width)).astype(np.float32) for _ in range(8)]
    batches = [(x, x[:, :1]) for x in data]
    params = model.init(jax.random.key(0), data[0])
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))
    strategy = dj.OneDeviceStrategy("cpu:0")
    held_in_memory = dj.data.from_arrays((np.concatenate(data), np.concatenate(data)[:, :1]))
    dataset = strategy.distribute_dataset(
        (lambda: cycle(batches)) if fed_from == GENERATOR else held_in_memory.batch(rows).repeat()
    )
    source: Iterator[Any] = iter(dataset)
    here = next(source)
    placed = jax.device_put(batches[0])
    jitted, host = jax.jit(_train_step), cycle(batches)

    def carried(step: Callable[..., Any], batch: Callable[[], Any]) -> Step:
        held = [state]

        def call() -> Any:
            held[0], loss = step(held[0], *batch())
            return loss

        return call

    def run(*args: Any) -> Any:
        return strategy.run(_train_step, args=args)

    return {
        RUN: carried(run, lambda: next(source) if fed_from else here),
        JIT: carried(jitted, lambda: next(host) if fed_from else placed),
    }


def _dict_of_arrays() -> dict[str, Step]:
    arrays = {f"array {i}": jnp.full(4, float(i)) for i in range(20)}
    strategy = dj.OneDeviceStrategy("cpu:0")

    def step(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: value + 1 for name, value in arrays.items()}

    jitted = jax.jit(step)
    return {RUN: lambda: strategy.run(step, args=(arrays,)), JIT: lambda: jitted(arrays)}


FUNCTIONAL: dict[str, Functional] = {
    "TrainState in args": Functional(lambda: _trained(8, 16), 40.0),
    "a dict of 20 arrays": Functional(_dict_of_arrays, 40.0),
    "TrainState, fed a new batch each step": Functional(
        lambda: _trained(8, 16, fed_from=MEMORY), 100.0
    ),
    "TrainState, fed by a generator": Functional(
        lambda: _trained(8, 16, fed_from=GENERATOR), 100.0
    ),
    "a whole program of large steps, fed": Functional(
        lambda: _trained(768, 256, fed_from=MEMORY), None
    ),
}
