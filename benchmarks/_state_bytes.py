"""The bytes of weights and of optimizer state that each device holds under a strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

import distribute_jax as dj


def bytes_per_device(tree: Any) -> int:
    """Gives the bytes of an NNX object, or a nest of arrays, on the device that holds most of it."""
    held: dict[jax.Device, int] = {}
    for array in jax.tree.leaves(nnx.state(tree) if isinstance(tree, nnx.Pytree) else tree):
        for shard in array.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values(), default=0)


def state_bytes(
    make_strategy: Callable[[], dj.Strategy],
    make: Callable[[], tuple[nnx.Module, nnx.Optimizer[Any]]],
    step: Callable[..., Any],
    batch: Any,
) -> dict[str, int]:
    """Gives what each device holds after a step, as ``{"params": …, "optimizer": …}``.

    Args:
        make_strategy: makes the strategy.
        make: makes the model and its optimizer; called in the strategy's scope.
        step: a step of one replica, over model, optimizer and the parts of the batch.
        batch: a global batch, as a tuple of host arrays.
    """
    strategy = make_strategy()
    with strategy.scope():
        model, optimizer = make()
    (share,) = strategy.distribute_dataset([batch])
    strategy.run(step, args=(model, optimizer, *share))
    return {
        "params": bytes_per_device(nnx.state(model, nnx.Param)),
        "optimizer": bytes_per_device(nnx.state(optimizer, nnx.OptState)),
    }
