"""Access to variables from other threads, and under other strategies.

Computing with an array that was donated to a step crashes JAX 0.10, and two threads that start programs on
several devices can deadlock. Copying an array to the host is safe: it returns the numbers or raises an
error, after which the variable may have a new array.
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
from distribute_jax.variables._rules import uncommitted_copy


def inside_run() -> bool:
    """True if a raw value is that of one replica: inside ``run``, also in ``merge_call``."""
    return _frames.in_replica_context() or _context.in_merge_call()


def for_current_strategy(raw: Any) -> Any:
    """Returns a raw value; of another strategy's variable a copy that the current one can compute with."""
    # An array of which no process has all the data is combined by the caller.
    if _foreign_mesh(raw) is None or not (raw.is_fully_addressable or raw.is_fully_replicated):
        return raw
    with outside_mesh():
        return uncommitted_copy(raw)


def check_current_strategy(raw: Any, name: str) -> None:
    """Raises if a variable of another strategy, on several devices, is written."""
    mesh = _foreign_mesh(raw)
    if mesh is None or mesh.size == 1:
        return
    current = _frames.current().strategy
    raise MixedStrategiesError(
        f"Variable {name!r} was written under {current!r}, but it was created under another strategy, on "
        f"[{', '.join(map(str, mesh.devices.flat))}]. Mixing different tf.distribute.Strategy objects: "
        "reading it there is allowed, writing is not. Leave this scope before assigning it, or create a "
        "variable of this strategy with dj.Variable(other.numpy())."
    )


def _foreign_mesh(raw: Any) -> Mesh | None:
    """Returns the mesh of a value if its devices are not those of the current strategy."""
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

_MAX_RETRY_SECONDS = 1.0
"""Seconds after which the error of an array that is not donated is raised: JAX marks it late."""

_POLL_INTERVAL = 0.0005

_before_trace: dict[int, Any] = {}
"""By id, the values of variables before the step being traced, which stores tracers in them."""


@contextmanager
def readable_by_other_threads(
    variables: Sequence[nnx.Variable[Any]], raws: Sequence[Any]
) -> Iterator[None]:
    """During a trace, makes other threads read the values that variables had before it."""
    values = {id(v): raw for v, raw in zip(variables, raws, strict=True)}
    # In nested traces only the outermost values are not tracers.
    new = {key: raw for key, raw in values.items() if key not in _before_trace}
    _before_trace.update(new)
    try:
        yield
    finally:
        for key in new:
            del _before_trace[key]


def readable_raw(variable: nnx.Variable[Any]) -> Any:
    """Returns the raw value of a variable; a copy if another thread runs the steps."""
    raw = variable.get_raw_value()
    if not at_top_level():
        return raw
    if _context.other_thread_runs_steps() or id(variable) in _before_trace:
        return _copy_when_written(variable)
    if is_donated(raw):
        raise _donated_error(variable, "wrote no new value, because it failed or has not finished")
    return raw


def for_this_thread(array: jax.Array) -> jax.Array:
    """Returns an array; if another thread runs steps, a copy with which this thread can compute."""
    is_on_host = isinstance(array, np.ndarray)  # in a copy of metrics
    if is_on_host or not _context.other_thread_runs_steps() or not at_top_level():
        return array
    if not array.is_fully_addressable:
        raise ContextError(
            "An ON_READ variable was read in another thread than the one that runs steps. Its components "
            "are distributed over several processes, so reading it is a collective, and collectives in two "
            "threads may deadlock. Read it in the thread that runs the steps and pass the number on, or "
            "read the .values of this process."
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
            # A step uses the variable if the array was donated to it, or replaced by a tracer.
            leaves = jax.tree.leaves(raw)
            in_use = any(isinstance(x, jax.core.Tracer) or is_donated(x) for x in leaves)
            if not in_use and waited > _MAX_RETRY_SECONDS:
                raise
        if waited > _TIMEOUT:
            raise _donated_error(variable, f"wrote no new value within {_TIMEOUT:g} s")
        time.sleep(_POLL_INTERVAL)


def _copied(leaf: Any) -> Any:
    """Copies an array through the host, without a computation; keeps its sharding."""
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


def _donated_error(variable: nnx.Variable[Any], why: str) -> DonatedError:
    name = variable.get_metadata().get("name") or type(variable).__name__
    return DonatedError(
        f"Variable {name!r} cannot be read: it was donated to a step, which {why}. Restore it from a "
        "checkpoint or an earlier dj.snapshot, or assign it again; with RunOptions(donate_state=False) "
        "state is kept if a step fails."
    )
