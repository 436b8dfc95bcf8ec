"""The same training step, written in the five ways that a JAX user can write it.

Every way starts from the same weights, finds its batch on the devices, and computes the same losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import distribute_jax as dj
from benchmarks._workloads import Workload, example_losses, forward_of, initial_weights

RUN, SHARD_MAP, SHARDED_JIT = "strategy.run", "hand-written shard_map", "sharded jit"
PMAP, NNX_JIT = "jax.pmap", "nnx.jit"

Step = Callable[[], Any]
"""Dispatches one step and gives its loss, which the caller waits for."""
FlatStep = tuple[Any, list[Any], list[Any]]
"""A jitted step over flat arrays, its state and its batch on the devices."""


@dataclass(frozen=True)
class Trained:
    """What a step under a strategy trains, and what it takes."""

    strategy: dj.Strategy
    model: nnx.Module
    optimizer: nnx.Optimizer[Any]
    step: Callable[..., Any]
    batch: Any

    def run(self) -> Any:
        """Dispatches one step."""
        return self.strategy.run(self.step, args=self.batch)


def trained_under(strategy: dj.Strategy, work: Workload) -> Trained:
    """Builds model, optimizer, step and distributed batch under a strategy."""
    with strategy.scope():
        model = work.model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, work.optimizer(), wrt=nnx.Param)

    def train_step(x: jax.Array, y: jax.Array) -> jax.Array:
        def loss_fn(model: Any) -> jax.Array:
            return dj.compute_average_loss(example_losses(model(x), y))

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, dj.get_replica_context().all_reduce("sum", grads))
        return loss

    batch = next(iter(strategy.distribute_dataset([work.first_batch()])))
    return Trained(strategy, model, optimizer, train_step, batch)


def mirrored(work: Workload, replicas: int) -> Trained:
    """The step under ``MirroredStrategy``."""
    return trained_under(dj.MirroredStrategy(list(range(replicas))), work)


def mesh_of(replicas: int) -> Mesh:
    """Lays the replicas along ``data``."""
    return Mesh(np.asarray(jax.devices()[:replicas]), ("data",), axis_types=(AxisType.Auto,))


def flat_state(work: Workload) -> tuple[list[Any], Any]:
    """Returns weights, optimizer state and a step counter as flat arrays, and their structure."""
    params = initial_weights(work)
    state = jax.tree.map(np.asarray, work.optimizer().init(params))
    return jax.tree.flatten((params, state, np.zeros((), np.uint32)))


def flat_step(work: Workload, structure: Any, *, summed: bool) -> Callable[..., list[Any]]:
    """Writes the step over flat arrays: state, x and y in; state and this share's loss, (1,), out."""
    forward, optimizer = forward_of(work), work.optimizer()

    def loss_fn(params: Any, x: Any, y: Any) -> jax.Array:
        return example_losses(forward(params, x), y).sum() / work.batch

    def step(*flat: Any) -> list[Any]:
        params, state, count = jax.tree.unflatten(structure, flat[:-2])
        loss, grads = jax.value_and_grad(loss_fn)(params, *flat[-2:])
        if summed:
            grads = jax.lax.psum(grads, "data")
        updates, state = optimizer.update(grads, state, params)
        new = (optax.apply_updates(params, updates), state, count + 1)
        return [*jax.tree.leaves(new), loss[None]]

    return step


def placed(value: np.ndarray[Any, Any], to: NamedSharding) -> jax.Array:
    """Sends what each device of this process needs of an array that all processes have."""
    return jax.make_array_from_callback(value.shape, to, lambda index: value[index])


def shard_map_parts(work: Workload, mesh: Mesh, *, summed: bool = True) -> FlatStep:
    """Returns the hand-written step over a mesh; without its all-reduce where not ``summed``."""
    leaves, structure = flat_state(work)
    count = len(leaves)
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    mapped = jax.shard_map(
        flat_step(work, structure, summed=summed),
        mesh=mesh,
        in_specs=(P(),) * count + (P("data"),) * 2,
        out_specs=[P()] * count + [P("data")],
        check_vma=False,
    )
    jitted = jax.jit(mapped, donate_argnums=tuple(range(count)))
    batch = [placed(part, split) for part in work.first_batch()]
    return jitted, [placed(leaf, whole) for leaf in leaves], batch


def sharded_jit_parts(work: Workload, mesh: Mesh) -> FlatStep:
    """Returns ``jit`` over a sharded batch: the compiler finds the collectives."""
    leaves, structure = flat_state(work)
    count = len(leaves)
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    jitted = jax.jit(
        flat_step(work, structure, summed=False),
        in_shardings=(whole,) * count + (split,) * 2,
        out_shardings=[whole] * (count + 1),
        donate_argnums=tuple(range(count)),
    )
    batch = [placed(part, split) for part in work.first_batch()]
    return jitted, [placed(leaf, whole) for leaf in leaves], batch


def pmap_parts(work: Workload, replicas: int) -> FlatStep:
    """Returns ``jax.pmap`` over state with a leading dim for the devices."""
    leaves, structure = flat_state(work)
    split = NamedSharding(mesh_of(replicas), P("data"))
    mapped = jax.pmap(
        flat_step(work, structure, summed=True),
        axis_name="data",
        devices=jax.devices()[:replicas],
        donate_argnums=tuple(range(len(leaves))),
    )
    shares = [part.reshape(replicas, -1, *part.shape[1:]) for part in work.first_batch()]
    state = [placed(np.stack([leaf] * replicas), split) for leaf in leaves]
    return mapped, state, [placed(part, split) for part in shares]


def nnx_jit_parts(work: Workload, mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """Returns ``nnx.jit`` over a sharded batch, and its arguments: model and optimizer among them."""
    with jax.set_mesh(mesh):
        model = work.model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, work.optimizer(), wrt=nnx.Param)

    @nnx.jit
    def train_step(model: Any, optimizer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        def loss_fn(model: Any) -> jax.Array:
            return example_losses(model(x), y).sum() / work.batch

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    split = NamedSharding(mesh, P("data"))
    return train_step, (model, optimizer, *(placed(part, split) for part in work.first_batch()))


def with_run(work: Workload, replicas: int) -> Step:
    """The step under ``strategy.run``."""
    return mirrored(work, replicas).run


def with_shard_map(work: Workload, replicas: int) -> Step:
    """The hand-written, donated ``jit(shard_map)`` over flat arrays: the yardstick."""
    return carried(*shard_map_parts(work, mesh_of(replicas)))


def with_sharded_jit(work: Workload, replicas: int) -> Step:
    """The step that the compiler divides."""
    return carried(*sharded_jit_parts(work, mesh_of(replicas)))


def with_pmap(work: Workload, replicas: int) -> Step:
    """The step under ``jax.pmap``."""
    return carried(*pmap_parts(work, replicas))


def with_nnx_jit(work: Workload, replicas: int) -> Step:
    """The step under ``nnx.jit``."""
    mesh = mesh_of(replicas)
    train_step, arguments = nnx_jit_parts(work, mesh)

    def step() -> jax.Array:
        with jax.set_mesh(mesh):
            return train_step(*arguments)

    return step


COLUMNS: dict[str, Callable[[Workload, int], Step]] = {
    RUN: with_run,
    SHARD_MAP: with_shard_map,
    SHARDED_JIT: with_sharded_jit,
    PMAP: with_pmap,
    NNX_JIT: with_nnx_jit,
}
"""What makes the step of each column."""


def carried(jitted: Any, state: list[Any], batch: list[Any]) -> Step:
    """Returns a step that hands its state on to the next one."""
    held = [state]

    def step() -> Any:
        *held[0], loss = jitted(*held[0], *batch)
        return loss

    return step


def total_loss(loss: Any) -> float:
    """Reads the loss over the global batch from what any of the steps gave."""
    parts = loss.values if isinstance(loss, dj.PerReplica) else [loss]
    return sum(float(np.sum(np.asarray(part), dtype=np.float64)) for part in parts)
