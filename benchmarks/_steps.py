"""The same training step, written in the five ways that a JAX user can write it.

Every way starts from the same weights, finds its batch on the devices, and computes the same
losses. The step is that of a classifier: cross entropy over the global batch, Adam.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import distribute_jax as dj

Params = list[tuple[Any, Any]]
"""Kernel and bias of each layer, as the hand-written steps keep them."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A multi-layer perceptron and the size of its batch."""

    name: str
    sizes: tuple[int, ...]
    """Features before the first layer, and after each."""
    batch: int
    """Examples in the global batch."""

    @property
    def variables(self) -> int:
        """Arrays of weights and optimizer state: what every step reads and writes."""
        return 3 * 2 * (len(self.sizes) - 1) + 2


MLP = Workload(name="MLP 784-512-10", sizes=(784, 512, 10), batch=256)
DEEP = Workload(name="MLP of 40 layers, 16 wide", sizes=(16,) * 41, batch=16)


class Perceptron(nnx.Module):
    """Dense layers with ``relu`` between them."""

    def __init__(self, sizes: tuple[int, ...], rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairwise(sizes)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Gives the logits, shape (batch, classes)."""
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


def optimizer() -> optax.GradientTransformation:
    """Gives the optimizer of every column."""
    return optax.adam(1e-3)


def batch_of(work: Workload) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Draws a global batch on the host: features and labels."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((work.batch, work.sizes[0]), np.float32)
    return x, draw.integers(0, work.sizes[-1], work.batch, np.int32)


@dataclass(frozen=True)
class Column:
    """One way to write the step, ready to be called."""

    name: str
    step: Callable[[], Any]
    """Dispatches one step; gives its loss, which the caller waits for."""
    loss: Callable[[Any], float]
    """Reads the loss over the global batch from what ``step`` gave."""


def with_run(work: Workload, replicas: int) -> Column:
    """The step under ``strategy.run``."""
    strategy, step, batch = run_parts(work, replicas)

    def loss(value: Any) -> float:
        return float(strategy.reduce("sum", value, axis=None))

    return Column("strategy.run", lambda: strategy.run(step, args=batch), loss)


def run_parts(work: Workload, replicas: int) -> tuple[dj.Strategy, Callable[..., Any], Any]:
    """Gives strategy, step and distributed batch."""
    strategy = dj.MirroredStrategy(list(range(replicas)))
    with strategy.scope():
        model = Perceptron(work.sizes, nnx.Rngs(0))
        adam = nnx.Optimizer(model, optimizer(), wrt=nnx.Param)

    def train_step(x: jax.Array, y: jax.Array) -> jax.Array:
        def loss_fn(model: Perceptron) -> jax.Array:
            losses = optax.softmax_cross_entropy_with_integer_labels(model(x), y)
            return dj.compute_average_loss(losses)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        adam.update(model, dj.get_replica_context().all_reduce("sum", grads))
        return loss

    return strategy, train_step, next(iter(strategy.distribute_dataset([batch_of(work)])))


def mesh_of(replicas: int) -> Mesh:
    """Lays the replicas along ``data``."""
    return Mesh(np.asarray(jax.devices()[:replicas]), ("data",), axis_types=(AxisType.Auto,))


def flat_state(work: Workload) -> tuple[list[Any], Any]:
    """Gives weights, optimizer state and a step counter as flat arrays, and their structure."""
    model = Perceptron(work.sizes, nnx.Rngs(0))
    params = [(np.asarray(a.kernel[...]), np.asarray(a.bias[...])) for a in model.layers]
    return jax.tree.flatten((params, optimizer().init(params), np.zeros((), np.uint32)))


def flat_step(work: Workload, structure: Any, *, summed: bool) -> Callable[..., list[Any]]:
    """Writes the step over flat arrays: state, x and y in; state and this share's loss out."""

    def step(*flat: Any) -> list[Any]:
        params, state, count = jax.tree.unflatten(structure, flat[:-2])
        loss, grads = jax.value_and_grad(_loss)(params, *flat[-2:], work.batch)
        if summed:
            grads = jax.lax.psum(grads, "data")
        updates, state = optimizer().update(grads, state, params)
        new = (optax.apply_updates(params, updates), state, count + 1)
        return [*jax.tree.leaves(new), loss[None] if summed else loss]

    return step


def _loss(params: Params, x: Any, y: Any, examples: int) -> jax.Array:
    for kernel, bias in params[:-1]:
        x = nnx.relu(x @ kernel + bias)
    kernel, bias = params[-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ kernel + bias, y)
    return jnp.sum(losses) / examples


def shard_map_parts(work: Workload, replicas: int) -> tuple[Any, list[Any], list[Any]]:
    """Gives the hand-written, jitted step with its state and its batch on the devices."""
    leaves, structure = flat_state(work)
    mesh, count = mesh_of(replicas), len(leaves)
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    mapped = jax.shard_map(
        flat_step(work, structure, summed=True),
        mesh=mesh,
        in_specs=(P(),) * count + (P("data"),) * 2,
        out_specs=[P()] * count + [P("data")],
        check_vma=False,
    )
    jitted = jax.jit(mapped, donate_argnums=tuple(range(count)))
    batch = [jax.device_put(part, split) for part in batch_of(work)]
    return jitted, [jax.device_put(leaf, whole) for leaf in leaves], batch


def with_shard_map(work: Workload, replicas: int) -> Column:
    """The hand-written, donated ``jit(shard_map)`` over flat arrays: the yardstick."""
    jitted, state, batch = shard_map_parts(work, replicas)
    return Column("hand-written shard_map", _carried(jitted, state, batch), _sum)


def with_sharded_jit(work: Workload, replicas: int) -> Column:
    """``jit`` over a sharded batch: the compiler finds the collectives."""
    leaves, structure = flat_state(work)
    mesh, count = mesh_of(replicas), len(leaves)
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    jitted = jax.jit(
        flat_step(work, structure, summed=False),
        in_shardings=(whole,) * count + (split,) * 2,
        out_shardings=[whole] * (count + 1),
        donate_argnums=tuple(range(count)),
    )
    state = [jax.device_put(leaf, whole) for leaf in leaves]
    batch = [jax.device_put(part, split) for part in batch_of(work)]
    return Column("sharded jit", _carried(jitted, state, batch), float)


def with_pmap(work: Workload, replicas: int) -> Column:
    """``jax.pmap`` over state with a leading dim for the devices."""
    leaves, structure = flat_state(work)
    split = NamedSharding(mesh_of(replicas), P("data"))
    mapped = jax.pmap(
        flat_step(work, structure, summed=True),
        axis_name="data",
        devices=jax.devices()[:replicas],
        donate_argnums=tuple(range(len(leaves))),
    )
    shares = [part.reshape(replicas, -1, *part.shape[1:]) for part in batch_of(work)]
    state = [jax.device_put(np.stack([leaf] * replicas), split) for leaf in leaves]
    batch = [jax.device_put(part, split) for part in shares]
    return Column("jax.pmap", _carried(mapped, state, batch), _sum)


def with_nnx_jit(work: Workload, replicas: int) -> Column:
    """``nnx.jit`` over a sharded batch, model and optimizer as arguments."""
    mesh = mesh_of(replicas)
    with jax.set_mesh(mesh):
        model = Perceptron(work.sizes, nnx.Rngs(0))
        adam = nnx.Optimizer(model, optimizer(), wrt=nnx.Param)

    @nnx.jit
    def train_step(model: Perceptron, adam: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        def loss_fn(model: Perceptron) -> jax.Array:
            losses = optax.softmax_cross_entropy_with_integer_labels(model(x), y)
            return jnp.sum(losses) / work.batch

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        adam.update(model, grads)
        return loss

    split = NamedSharding(mesh, P("data"))
    x, y = (jax.device_put(part, split) for part in batch_of(work))

    def step() -> jax.Array:
        with jax.set_mesh(mesh):
            return train_step(model, adam, x, y)

    return Column("nnx.jit", step, float)


COLUMNS = (with_run, with_shard_map, with_sharded_jit, with_pmap, with_nnx_jit)


def _carried(compiled: Any, state: list[Any], batch: list[Any]) -> Callable[[], Any]:
    """Gives a step that hands its state on to the next one."""
    held = [state]

    def step() -> Any:
        *held[0], loss = compiled(*held[0], *batch)
        return loss

    return step


def _sum(parts: Any) -> float:
    return float(np.sum(np.asarray(parts), dtype=np.float64))
