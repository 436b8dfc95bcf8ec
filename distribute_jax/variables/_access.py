"""Where a variable is accessed: on a replica, in a step, under another strategy, on another thread.

Computing with an array that was donated to a step crashes JAX 0.10, and two threads that start programs on
several devices can wait for each other without end. Copying it to the host is safe: that returns the
numbers, or raises an error after which the next array can be copied.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from distribute_jax import _context, _frames
from distribute_jax._errors import ContextError, DonatedError, MixedStrategiesError
from distribute_jax._jax_private import at_top_level
from distribute_jax._mesh import outside_mesh
from distribute_jax._messages import is_donated, is_key, on_bits
from distribute_jax._values import Mirrored, mark_mirrored, step_of
from distribute_jax.variables._components import uncommitted_copy


def inside_run() -> bool:
    """Whether the raw value is one replica's: inside ``run``, ``merge_call`` included."""
    return _frames.in_replica_context() or _context.in_merge_call()


def readable_here(raw: Any) -> Any:
    """Returns a value of another strategy's variable as one that computes under the current strategy.

    An array of which no process has all the data is left to who combines it.
    """
    if _foreign_mesh(raw) is None or not (raw.is_fully_addressable or raw.is_fully_replicated):
        return raw
    with outside_mesh():
        return uncommitted_copy(raw)


def check_current_strategy(raw: Any, name: str) -> None:
    """Raises if code under one strategy writes a variable of another, over several devices."""
    mesh = _foreign_mesh(raw)
    if mesh is None or mesh.size == 1:
        return
    current = _frames.current().strategy
    raise MixedStrategiesError(
        f"Variable {name!r} was written under {current!r}, but it was made under another strategy, over "
        f"[{', '.join(map(str, mesh.devices.flat))}]. Mixing different tf.distribute.Strategy objects: "
        "reading it there is allowed, writing is not. Leave this scope before assigning it, or make a "
        "variable of this strategy with dj.Variable(other.numpy())."
    )


def _foreign_mesh(raw: Any) -> Mesh | None:
    """Returns the mesh of a value on other devices than those of the current strategy."""
    top = _frames.entered()
    if top is None or not isinstance(raw, jax.Array) or isinstance(raw, jax.core.Tracer):
        return None
    sharding = raw.sharding
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    if not isinstance(mesh, Mesh) or mesh == top.strategy.mesh:
        return None
    return None if list(mesh.devices.flat) == list(top.strategy.mesh.devices.flat) else mesh


_TIMEOUT = 30.0
"""Seconds to wait for a step's new value; it is written microseconds after the old one is donated."""

_UNEXPLAINED = 1.0
"""Seconds until an error counts although the array is valid: it is marked after its memory is gone."""

_PAUSE = 0.0005

_before_trace: dict[int, Any] = {}
"""The values of variables before the step that is being traced, which puts tracers into them, by id."""


@contextmanager
def readable_by_other_threads(
    variables: Sequence[nnx.Variable[Any]], raws: Sequence[Any]
) -> Iterator[None]:
    """Lets other threads read the values of variables before a trace, for the time of the trace."""
    values = {id(v): raw for v, raw in zip(variables, raws, strict=True)}
    # In a trace inside a trace the outermost values are the numbers.
    new = {key: raw for key, raw in values.items() if key not in _before_trace}
    _before_trace.update(new)
    try:
        yield
    finally:
        for key in new:
            del _before_trace[key]


def readable_raw(variable: nnx.Variable[Any]) -> Any:
    """Returns the raw value of a variable; in another thread than that of the steps, a copy of it."""
    raw = variable.get_raw_value()
    if not at_top_level():
        return raw
    if _context.other_thread_runs_steps() or id(variable) in _before_trace:
        return _copy_when_written(variable)
    if is_donated(raw):
        raise _gone(variable, "left no new value, as it failed or is not finished")
    return raw


def on_this_thread(array: jax.Array) -> jax.Array:
    """Returns an array that this thread can compute with while another thread runs steps."""
    if not _context.other_thread_runs_steps() or not at_top_level():
        return array
    if not array.is_fully_addressable:
        raise ContextError(
            "An ON_READ variable was read in another thread than the one that runs steps. Its components "
            "are distributed over several processes, so reading it is a collective, and collectives in two "
            "threads may deadlock. Read it in the thread that runs the steps and hand the number over, or "
            "read this process's .values."
        )
    return jnp.asarray(np.asarray(array))


def _copy_when_written(variable: nnx.Variable[Any]) -> Any:
    started = time.monotonic()
    while True:
        raw = _before_trace.get(id(variable), variable.get_raw_value())
        try:
            return jax.tree.map(_copied, raw)
        except Exception:
            waited = time.monotonic() - started
            missing = any(map(_is_missing, jax.tree.leaves(raw)))
            if not missing and waited > _UNEXPLAINED:
                raise
        if waited > _TIMEOUT:
            raise _gone(variable, f"left no new value within {_TIMEOUT:g} s")
        time.sleep(_PAUSE)


def _copied(leaf: Any) -> Any:
    """Copies an array through the host, with its sharding, without a computation."""
    if not isinstance(leaf, jax.Array):
        return leaf
    if is_key(leaf):
        return on_bits(_copied, leaf)
    kind = leaf.sharding.memory_kind
    shards = [(s.device, np.array(s.data)) for s in leaf.addressable_shards]
    parts = [
        jax.device_put(host, jax.sharding.SingleDeviceSharding(device, memory_kind=kind))
        for device, host in shards
    ]
    copy = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)
    return mark_mirrored(copy, step_of(leaf)) if isinstance(leaf, Mirrored) else copy


def _is_missing(leaf: Any) -> bool:
    """Whether a step has the array: it was donated, or the step is being traced with it."""
    return isinstance(leaf, jax.core.Tracer) or is_donated(leaf)


def _gone(variable: nnx.Variable[Any], why: str) -> DonatedError:
    name = variable.get_metadata().get("name") or type(variable).__name__
    return DonatedError(
        f"Variable {name!r} cannot be read: it was donated to a step, which {why}. Restore it from a "
        "checkpoint or a dj.snapshot made before, or assign it again; RunOptions(donate_state=False) keeps "
        "the state of a step that fails."
    )
