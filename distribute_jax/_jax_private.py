"""Everything this library uses that Python, JAX and Flax do not promise to keep, in one file.

Each entry says why no public way exists. ``tests/test_jax_private.py`` names the version that moves one.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # what it registers has to run after before_exit's
import functools
import importlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import jax
import jax.extend.core as jex_core
from flax import nnx
from flax.nnx import tracers

from distribute_jax._mesh import outside_mesh

_TRACE_STATE = "_trace_state"
_NODE_STATE = "_pytree__state"
_RAW = "_raw_value"

HIDDEN_ATTRIBUTES = (_NODE_STATE, "_pytree__nodes")
"""Attributes of a module in which Flax keeps its own books; they are no state of the user's.

The first says which trace owns the module, the second which attributes are data.
"""

# Reading and writing 242 raw values through the public methods costs 300 µs a step, through the slot
# 25 µs: the slot's own C descriptor is used, after one check of the trace level for all of them.
_read_raw = attrgetter(_RAW)
_read_metadata = attrgetter("_var_metadata")
_write_raw = nnx.Variable.__dict__[_RAW].__set__
_write_trace_state = nnx.Variable.__dict__[_TRACE_STATE].__set__


def read_raw(variables: Iterable[nnx.Variable[Any]]) -> list[Any]:
    """Returns the raw value of each variable, hooks and all left out."""
    return list(map(_read_raw, variables))


def write_raw(variables: Iterable[nnx.Variable[Any]], values: Iterable[Any]) -> None:
    """Stores a raw value into each variable without checking the trace level again."""
    deque(map(_write_raw, variables, values), maxlen=0)


def read_metadata(variables: Iterable[nnx.Variable[Any]]) -> list[dict[str, Any]]:
    """Returns the metadata dict of each variable itself; the public method copies it, at every call."""
    return list(map(_read_metadata, variables))


def metadata_entries(variables: Iterable[nnx.Variable[Any]]) -> int:
    """Counts all metadata of variables, at every call of ``run``: without a list, in half the time."""
    return sum(map(len, map(_read_metadata, variables)))


def at_top_level() -> bool:
    """Returns whether no JAX transformation is being traced on this thread."""
    return bool(jex_core.get_opaque_trace_state(convention="nnx") == _TOP_LEVEL)


with concurrent.futures.ThreadPoolExecutor(1) as _other:  # this thread may be tracing a step
    _TOP_LEVEL = _other.submit(jex_core.get_opaque_trace_state, convention="nnx").result()


@contextmanager
def owned_by_current_trace(
    variables: Sequence[nnx.Variable[Any]], nodes: Sequence[Any]
) -> Iterator[None]:
    """Lets the trace that is now current write to these variables and modules.

    Flax refuses to change an object from another trace level than the one that made it. A step is
    traced with the user's own objects holding tracers, so for that time they belong to the trace.
    """
    mine = tracers.TraceState()
    old_variables = [getattr(v, _TRACE_STATE) for v in variables]
    old_nodes = [getattr(n, _NODE_STATE) for n in nodes]
    for variable in variables:
        _write_trace_state(variable, mine)
    for node, old in zip(nodes, old_nodes, strict=True):
        object.__setattr__(node, _NODE_STATE, type(old)(old.initializing, old.is_setup))
    try:
        yield
    finally:
        for variable, old in zip(variables, old_variables, strict=True):
            _write_trace_state(variable, old)
        for node, old in zip(nodes, old_nodes, strict=True):
            object.__setattr__(node, _NODE_STATE, old)


def adopt(variables: Iterable[nnx.Variable[Any]]) -> None:
    """Lets code outside of every trace write to variables that were made while a step was traced."""
    mine = tracers.TraceState()
    for variable in variables:
        _write_trace_state(variable, mine)


def deleted_arrays_crash(devices: int) -> bool:
    """Returns whether a program over so many devices ends the process when an input was donated.

    Measured on JAX 0.10.2; version 0.12, and programs on one device, raise before they take anything, so
    that hundreds of arrays need not be asked at every step.
    """
    return devices > 1 and jax.__version_info__ < (0, 12)


def before_exit(call: Callable[[], None]) -> None:
    """Calls a function when the program ends, while threads may still give work to other threads.

    ``atexit`` is later: by then ``concurrent.futures`` takes no more work, and Orbax cannot write.
    """
    getattr(threading, "_register_atexit", atexit.register)(call)


def uncommitted(array: jax.Array) -> jax.Array:
    """Returns a one-device array that mixes with arrays on any devices, without waiting for it.

    The public way to such an array goes through the host, which would block until the step is done.
    """
    try:
        return type(array)(array.aval, array.sharding, [array], committed=False)  # type: ignore[call-arg]
    except TypeError:  # the constructor moved: the host copy is slower and just as right
        with outside_mesh():
            return jax.numpy.asarray(jax.device_get(array))


def backend_is_started() -> bool:
    """Returns whether JAX has begun to use devices, after which processes can no longer be connected.

    ``jax.distributed.initialize`` says so itself, but only when all other processes wait for it already.
    """
    bridge: Any = importlib.import_module("jax._src.xla_bridge")
    started: bool = bridge.backends_are_initialized()
    return started


def coordination_client() -> Any:
    """Returns this process's client of the coordination service that ``jax.distributed`` has started.

    JAX offers the service to nobody: its public functions that use it run a collective on the devices,
    which is what hangs when processes disagree.
    """
    distributed: Any = importlib.import_module("jax._src.distributed")
    return distributed.global_state.client


_OUTSIDE_OF_THE_KEY = frozenset({
    "mesh_context_manager", "abstract_mesh_context_manager", "axis_env_state",
})  # fmt: skip
"""Where a step is called: ``scope()`` sets the mesh, and run sets its own for the trace."""

_known_settings: tuple[Any, int] = ((), 0)


def trace_settings() -> tuple[Any, ...]:
    """Returns a key of all settings of JAX that a trace depends on, as ``jax.jit`` forms its own.

    JAX has no public list of them, and to read some fifty flags at each call would take longer than all
    else that ``run`` does. The default kind of random keys, which JAX leaves out, is added.
    """
    global _known_settings
    now = _trace_context()
    known, number = _known_settings
    if now != known:
        names = _jax_config.trace_context_names()
        number = _number_of(tuple(
            pair for pair in zip(names, now, strict=True) if pair[0] not in _OUTSIDE_OF_THE_KEY
        ))  # fmt: skip
        _known_settings = now, number
    return number, _config.jax_default_prng_impl


@functools.lru_cache(maxsize=256)
def _number_of(settings: tuple[Any, ...]) -> int:
    del settings
    return next(_numbers)


_numbers = itertools.count()
_jax_config: Any = importlib.import_module("jax._src.config")
_trace_context: Callable[[], tuple[Any, ...]] = _jax_config.trace_context
_config: Any = jax.config


def last_settings() -> tuple[Any, ...]:
    """Returns all settings at the last call of ``trace_settings``: one object until they change."""
    now: tuple[Any, ...] = _known_settings[0]
    return now


ARRAY: Any = importlib.import_module("jax._src.array").ArrayImpl
"""The type of an array on devices, no tracer and no random key; ``isinstance(x, jax.Array)`` takes 1 µs."""

_JITTED = type(jax.jit(lambda: None))


def call_in_c(compiled: Any) -> Callable[..., list[Any]] | None:
    """Returns the call of a compiled program that runs no Python, or None where it has none.

    ``Compiled.__call__`` is a Python function around it, after which an interrupt can lose the outputs.
    """
    call = getattr(compiled, "_call", None)
    return call if type(call) is _JITTED else None


def is_high(jaxpr: Any) -> bool:
    """Returns whether a trace has operations that JAX 0.12 replaces by others before it compiles.

    Such a trace cannot be the body of an equation whose rules are not JAX's; older versions have none.
    """
    return bool(getattr(jaxpr, "is_high", False))


_PACKED = frozenset({"int2", "uint2", "int4", "uint4", "float4_e2m1fn"})


def without_layout_check(compiled: Any, avals: Sequence[Any]) -> Any:
    """Returns a compiled program as it is, or, where it takes numbers of less than a byte, without a check.

    JAX 0.10 says of such arrays on a CPU that they are not packed, and of the program that it wants them
    packed, and refuses every call; ``jax.jit`` does not look. The shardings and shapes are checked by XLA.
    """
    packed = any(getattr(getattr(aval, "dtype", None), "name", "") in _PACKED for aval in avals)
    if not packed or jax.__version_info__ >= (0, 12):
        return compiled
    return compiled._executable.unsafe_call
