"""Where a variable is accessed: on a replica, in a step, under another strategy, on another thread.

To compute with an array whose memory a step takes crashes JAX 0.10, and two threads that start programs on
several devices can wait for each other without end. To copy it to the host is safe: that returns the
numbers, or raises an error after which the next array is there to be copied.
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

from distribute_jax import _context
from distribute_jax._errors import ContextError, DonatedError, MixedStrategiesError
from distribute_jax._jax_private import at_top_level
from distribute_jax._mesh import outside_mesh
from distribute_jax._messages import is_donated, is_key
from distribute_jax._values import Mirrored, mark_mirrored, step_of
from distribute_jax.variables._components import made_anew


def inside_replica() -> bool:
    """Tells whether the code runs as one replica."""
    top = _context.entered()
    return top is not None and top.replica is not None


def inside_run() -> bool:
    """Tells whether the raw value is one replica's: inside ``run``, ``merge_call`` included."""
    top = _context.entered()
    return top is not None and (top.replica is not None or (top.merging and not at_top_level()))


def readable_here(raw: Any) -> Any:
    """Gives a value that computes under the strategy that is current, though it lies on another's devices.

    To read another strategy's variable is allowed, as in TensorFlow; JAX would not add its value to one
    of the mesh that the scope has set. What no process holds whole is left to who combines it.
    """
    if _mesh_elsewhere(raw) is None or not (raw.is_fully_addressable or raw.is_fully_replicated):
        return raw
    with outside_mesh():
        return made_anew(raw)


def require_own(raw: Any, name: str) -> None:
    """Raises where code under one strategy writes a variable of another.

    One that lies on a single device is taken for one made under no strategy, as ``run`` takes it.
    """
    mesh = _mesh_elsewhere(raw)
    if mesh is None or mesh.size == 1:
        return
    current = _context.current().strategy
    raise MixedStrategiesError(
        f"Variable {name!r} was written under {current!r}, but it was made under another strategy, over "
        f"[{', '.join(map(str, mesh.devices.flat))}]. Mixing different tf.distribute.Strategy objects: "
        "reading it there is allowed, writing is not. Leave this scope before assigning it, or make a "
        "variable of this strategy's own with dj.Variable(other.numpy())."
    )


def _mesh_elsewhere(raw: Any) -> Mesh | None:
    """Gives the mesh of a value that lies on other devices than those of the current strategy."""
    top = _context.entered()
    if top is None or not isinstance(raw, jax.Array) or isinstance(raw, jax.core.Tracer):
        return None
    sharding = raw.sharding
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    if not isinstance(mesh, Mesh) or mesh == top.strategy.mesh:
        return None
    own = top.strategy.mesh.devices.flat
    return None if mesh.devices.flatten().tolist() == list(own) else mesh


_PATIENCE = 30.0
"""Seconds to wait for a step's new value; it is written microseconds after the old one is taken."""

_UNEXPLAINED = 1.0
"""Seconds until an error counts although the array is there: it is marked after its memory is gone."""

_PAUSE = 0.0005

_GONE = """\
Variable {name!r} cannot be read: a step took its memory and {why}. Restore it from a checkpoint or a \
dj.snapshot that was taken before, or assign it anew; RunOptions(donate_state=False) keeps the state of \
a step that fails."""

_before_trace: dict[int, Any] = {}
"""What variables held before the step that is being traced put its own values into them, by identity."""


@contextmanager
def readable_elsewhere(
    variables: Sequence[nnx.Variable[Any]], raws: Sequence[Any]
) -> Iterator[None]:
    """Lets other threads read what variables held before a trace, for the time of the trace."""
    held = {id(v): raw for v, raw in zip(variables, raws, strict=True)}
    outer = {key: _before_trace[key] for key in held if key in _before_trace}
    # In a trace inside a trace the outermost values are the numbers.
    _before_trace.update({key: raw for key, raw in held.items() if key not in outer})
    try:
        yield
    finally:
        for key in held:
            if key not in outer:
                del _before_trace[key]


def readable_raw(variable: nnx.Variable[Any]) -> Any:
    """Gives the raw value of a variable; in another thread than that of the steps, a copy of it.

    Raises:
        DonatedError: a step took it and left no new value.
    """
    raw = variable.get_raw_value()
    if not at_top_level():
        return raw
    if _context.other_thread_runs_steps() or id(variable) in _before_trace:
        return _copied_when_there(variable)
    if is_donated(raw):
        raise _gone(variable, "left no new value, as it failed or is not finished")
    return raw


def on_this_thread(array: jax.Array) -> jax.Array:
    """Gives an array that this thread can compute with: apart from the devices of another's steps."""
    if not _context.other_thread_runs_steps() or not at_top_level():
        return array
    if not array.is_fully_addressable:
        raise ContextError(
            "An ON_READ variable was read in another thread than the one that runs steps. Its components "
            "lie in several processes, so reading it is a collective, and collectives in two threads may "
            "meet in another order in each process and wait without end. Read it in the thread that runs "
            "the steps and hand the number over, or read this process's .values."
        )
    return jnp.asarray(np.asarray(array))


def _copied_when_there(variable: nnx.Variable[Any]) -> Any:
    started = time.monotonic()
    while True:
        raw = _before_trace.get(id(variable), variable.get_raw_value())
        try:
            return jax.tree.map(_copied, raw)
        except Exception:
            waited = time.monotonic() - started
            taken = any(map(_is_missing, jax.tree.leaves(raw)))
            if not taken and waited > _UNEXPLAINED:
                raise
        if waited > _PATIENCE:
            raise _gone(variable, f"left no new value within {_PATIENCE:g} s")
        time.sleep(_PAUSE)


def _copied(leaf: Any) -> Any:
    """Copies an array through the host, its placement kept, without a computation."""
    if not isinstance(leaf, jax.Array):
        return leaf
    if is_key(leaf):
        data = _copied(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    kind = leaf.sharding.memory_kind
    shards = [(s.device, np.array(s.data)) for s in leaf.addressable_shards]
    parts = [
        jax.device_put(host, jax.sharding.SingleDeviceSharding(device, memory_kind=kind))
        for device, host in shards
    ]
    copy = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)
    return mark_mirrored(copy, step_of(leaf)) if isinstance(leaf, Mirrored) else copy


def _is_missing(leaf: Any) -> bool:
    """Tells whether a step has the array: it took its memory, or is being traced with it."""
    return isinstance(leaf, jax.core.Tracer) or is_donated(leaf)


def _gone(variable: nnx.Variable[Any], why: str) -> DonatedError:
    name = variable.get_metadata().get("name") or type(variable).__name__
    return DonatedError(_GONE.format(name=name, why=why))
