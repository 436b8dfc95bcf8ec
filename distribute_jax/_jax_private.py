"""Everything this library uses beyond the public API of Python, JAX and Flax.

Each entry says why no public way exists, and has a test in ``tests/test_jax_private.py``, which fails if a
new version moves it.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  registers its exit handler, to run after those of before_exit
import functools
import importlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from flax import nnx
from flax.nnx import tracers

from distribute_jax._mesh import outside_mesh

_TRACE_STATE = "_trace_state"
_NODE_STATE = "_pytree__state"

HIDDEN_ATTRIBUTES = (_NODE_STATE, "_pytree__nodes")
"""Attributes of a module that belong to Flax: the trace that owns it, and which attributes are data."""

# Reading and writing 242 raw values by the public methods costs 300 µs a step, by the slots 25 µs, after one
# check of the trace level for all. Python 3.13 reads a slot three times faster in a comprehension than in C.
_write_raw = nnx.Variable.__dict__["_raw_value"].__set__
_write_trace_state = nnx.Variable.__dict__[_TRACE_STATE].__set__


def read_raw(variables: Iterable[nnx.Variable[Any]]) -> list[Any]:
    """Returns the raw values of variables without calling hooks."""
    return [variable._raw_value for variable in variables]


def write_raw(variables: Iterable[nnx.Variable[Any]], values: Iterable[Any]) -> None:
    """Sets the raw values of variables without checking the trace level."""
    deque(map(_write_raw, variables, values), maxlen=0)


def read_metadata(variables: Iterable[nnx.Variable[Any]]) -> list[dict[str, Any]]:
    """Returns the metadata dicts of variables, which the public method would copy."""
    return [variable._var_metadata for variable in variables]


def metadata_entries(variables: Iterable[nnx.Variable[Any]]) -> int:
    """Returns the number of metadata entries."""
    return sum([len(variable._var_metadata) for variable in variables])


def at_top_level() -> bool:
    """True if no JAX transformation is being traced on this thread.

    The public way makes two objects to compare, which every call of ``run`` would wait for.
    """
    return _trace.value is _TOP_LEVEL


_core: Any = importlib.import_module("jax._src.core")
_trace, _TOP_LEVEL = _core.trace_state_strong_ref, _core.eval_trace


@contextmanager
def owned_by_current_trace(
    variables: Sequence[nnx.Variable[Any]], nodes: Sequence[Any]
) -> Iterator[None]:
    """Makes the current trace the owner of variables and modules in the block, so that it may write to them.

    Flax refuses writes from another trace level than that which made the object, and a step is traced with
    the user's own objects.
    """
    current = tracers.TraceState()
    old_variables = [getattr(v, _TRACE_STATE) for v in variables]
    old_nodes = [getattr(n, _NODE_STATE) for n in nodes]
    for variable in variables:
        _write_trace_state(variable, current)
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
    """Makes the current trace level the owner of variables that were made while a step was traced."""
    current = tracers.TraceState()
    for variable in variables:
        _write_trace_state(variable, current)


def deleted_arrays_crash(devices: int) -> bool:
    """True if a program on this many devices crashes the process when an input was donated before.

    Measured on JAX 0.10.2. JAX 0.12, and programs on one device, raise an error, so that hundreds of arrays
    need not be checked at every step.
    """
    return devices > 1 and jax.__version_info__ < (0, 12)


def before_exit(call: Callable[[], None]) -> None:
    """Registers an exit handler that runs while thread pools still accept work.

    ``atexit`` handlers run after ``concurrent.futures`` has shut down, when Orbax cannot write any more.
    """
    getattr(threading, "_register_atexit", atexit.register)(call)


def uncommitted(array: jax.Array) -> jax.Array:
    """Returns an array on one device as uncommitted, so that it mixes with arrays on any device.

    The public way goes through the host, and would block until the step is done.
    """
    try:
        return type(array)(array.aval, array.sharding, [array], committed=False)  # type: ignore[call-arg]
    except TypeError:  # the constructor changed: a copy through the host is slower but correct
        with outside_mesh():
            return jax.numpy.asarray(jax.device_get(array))


def backend_is_started() -> bool:
    """True if JAX has initialized its backend, after which processes can no longer be connected.

    ``jax.distributed.initialize`` raises then too, but only once all other processes wait for this one.
    """
    bridge: Any = importlib.import_module("jax._src.xla_bridge")
    return bridge.backends_are_initialized()


def coordination_client() -> Any:
    """Returns this process's client of the coordination service of ``jax.distributed``.

    The public functions that use the service run a collective on the devices, which hangs when processes
    have diverged.
    """
    distributed: Any = importlib.import_module("jax._src.distributed")
    return distributed.global_state.client


_IGNORED_SETTINGS = frozenset({
    "mesh_context_manager", "abstract_mesh_context_manager", "axis_env_state",
})  # fmt: skip
"""They depend on where a step is called: ``scope()`` sets the mesh, and run sets its own for the trace."""

_known_settings: tuple[Any, int] = ((), 0)


def trace_settings() -> tuple[Any, ...]:
    """Returns a cache key of all settings of JAX that a trace depends on, as ``jax.jit`` has.

    JAX has no public list of them, and reading some fifty flags would take longer than the rest of a call of
    ``run``. The default implementation of random keys, which is not in JAX's key, is added.
    """
    global _known_settings
    now = _trace_context()
    known, number = _known_settings
    if now != known:
        names = _jax_config.trace_context_names()
        number = _number_of(tuple(
            pair for pair in zip(names, now, strict=True) if pair[0] not in _IGNORED_SETTINGS
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
    """Returns the settings at the last call of ``trace_settings``; the same object until they change."""
    return _known_settings[0]


ARRAY: Any = importlib.import_module("jax._src.array").ArrayImpl
"""The type of arrays, excluding tracers and random keys; ``isinstance(x, jax.Array)`` takes 1 µs."""

UNNOTED: Any = object()


def note_all(arrays: Iterable[jax.Array], name: str, note: Any) -> None:
    """Notes something about arrays for as long as they live, in an attribute of theirs.

    JAX promises none. A table of weak references, since arrays have no hash, took a tenth of a call of
    ``run``.
    """
    for array in arrays:
        setattr(array, name, note)


def note_on(value: Any, name: str) -> Any:
    """Returns the note about an array, or ``UNNOTED``."""
    return getattr(value, name, UNNOTED) if isinstance(value, jax.Array) else UNNOTED


_JITTED = type(jax.jit(lambda: None))


def call_in_c(compiled: Any) -> Callable[..., list[Any]] | None:
    """Returns the C++ call of a compiled program, or None if it has none.

    ``Compiled.__call__`` wraps it in Python, where an interrupt can lose the outputs.
    """
    call = getattr(compiled, "_call", None)
    return call if type(call) is _JITTED else None


def is_high(jaxpr: Any) -> bool:
    """True if a jaxpr has "hi" primitives, which JAX 0.12 lowers to others before it compiles.

    Such a jaxpr cannot be the body of a primitive that is not JAX's; older versions have none.
    """
    return bool(getattr(jaxpr, "is_high", False))


_PACKED_DTYPES = frozenset({"int2", "uint2", "int4", "uint4", "float4_e2m1fn"})


def without_layout_check(compiled: Any, avals: Sequence[Any]) -> Any:
    """Returns a compiled program, without its check of layouts if inputs have less than a byte an element.

    On CPU JAX 0.10 reports such arrays as unpacked and the program as wanting them packed, and refuses every
    call; ``jax.jit`` does not check. XLA checks shardings and shapes.
    """
    packed = any(
        getattr(getattr(aval, "dtype", None), "name", "") in _PACKED_DTYPES for aval in avals
    )
    if not packed or jax.__version_info__ >= (0, 12):
        return compiled
    return compiled._executable.unsafe_call
