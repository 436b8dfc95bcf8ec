"""Strategies and operations with one defect each, for the conformance suite to find."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp

import distribute_jax as dj


class ForgetsReplica0(dj.CrossDeviceOps):
    """Adds all but the first."""

    def all_reduce_sum(self, value: jax.Array, axis_name: str) -> jax.Array:
        return jnp.sum(jax.lax.all_gather(value, axis_name)[1:], axis=0, dtype=value.dtype)


class Averages(dj.CrossDeviceOps):
    """Returns the mean, as pmean would."""

    def all_reduce_sum(self, value: jax.Array, axis_name: str) -> jax.Array:
        return (jax.lax.psum(value, axis_name) / jax.lax.axis_size(axis_name)).astype(value.dtype)


class Rounds(dj.CrossDeviceOps):
    """Sends bfloat16."""

    def all_reduce_sum(self, value: jax.Array, axis_name: str) -> jax.Array:
        return jax.lax.psum(value.astype(jnp.bfloat16), axis_name).astype(value.dtype)


class AddsInFloat32(dj.CrossDeviceOps):
    """Adds large integers as numbers that cannot hold them."""

    def all_reduce_sum(self, value: jax.Array, axis_name: str) -> jax.Array:
        return jax.lax.psum(value.astype(jnp.float32), axis_name).astype(value.dtype)


class AddsInDifferentOrders(dj.CrossDeviceOps):
    """Adds in an order that depends on the replica, so that the copies differ in the last bits."""

    def all_reduce_sum(self, value: jax.Array, axis_name: str) -> jax.Array:
        own = jax.lax.axis_index(axis_name)
        parts = jnp.roll(jax.lax.all_gather(value, axis_name), -own, axis=0)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return dj.assume_mirrored(total)


class UnprovedRing(dj.CrossDeviceOps):
    """Adds around a ring, without declaring the result equal on all replicas."""

    def all_reduce_sum(self, value: jax.Array, axis_name: str) -> jax.Array:
        n = jax.lax.axis_size(axis_name)
        total = moving = value
        for _ in range(n - 1):
            moving = jax.lax.ppermute(moving, axis_name, [(i, (i + 1) % n) for i in range(n)])
            total = total + moving
        return total


class Reversed(dj.MirroredStrategy):
    """Replica 0 is on the last device."""

    def __init__(self, devices: Any) -> None:
        super().__init__(devices[::-1])


class HasNoScope(dj.MirroredStrategy):
    def scope(self) -> Any:
        return nullcontext(self)


class Delegates(dj.MirroredStrategy):
    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        return dj.MirroredStrategy(list(self.mesh.devices.flat)).run(fn, args, kwargs, options)


class RunsTwice(dj.MirroredStrategy):
    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        super().run(fn, args, kwargs, options)
        return super().run(fn, args, kwargs, options)


class TurnsChecksOff(dj.MirroredStrategy):
    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        options = dataclasses.replace(options or dj.RunOptions(), check_sync=False, verify=None)
        return super().run(fn, args, kwargs, options)


class ForgetsKeywords(dj.MirroredStrategy):
    """Passes no keyword arguments to the step."""

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        return super().run(fn, args, None, options)


class ReturnsOnlyReplica0(dj.MirroredStrategy):
    def experimental_local_results(self, value: Any) -> Any:
        return super().experimental_local_results(value)[:1]


class NeverDonates(dj.MirroredStrategy):
    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        options = dataclasses.replace(options or dj.RunOptions(), donate_state=False)
        return super().run(fn, args, kwargs, options)


class DropsPartialBatches(dj.MirroredStrategy):
    def distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        return super().distribute_dataset(dataset, dj.InputOptions(partial="drop"))


class ReducesWithoutChecks(dj.MirroredStrategy):
    """Adds the parts by hand, in any context and for any operation."""

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        return sum(map(jnp.sum, jax.tree.leaves(value)))


class GathersReversed(dj.MirroredStrategy):
    def gather(self, value: Any, axis: int) -> Any:
        parts = [jnp.asarray(part) for part in self.experimental_local_results(value)]
        return jnp.concatenate(parts[::-1], axis=axis)


class RunsOneStepLess(dj.MirroredStrategy):
    def run_steps(self, fn: Any, iterator: Any, steps: int, options: Any = None) -> Any:
        return super().run_steps(fn, iterator, steps - 1, options)


def mirrored_with(ops: type[dj.CrossDeviceOps]) -> Callable[[Any], dj.Strategy]:
    """Returns a factory of mirrored strategies with an operation."""
    return lambda devices: dj.MirroredStrategy(devices, cross_device_ops=ops())
