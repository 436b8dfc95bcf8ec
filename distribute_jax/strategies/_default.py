"""The strategy that is current where none was entered: one replica on the default device."""

from __future__ import annotations

import functools

import jax

from distribute_jax import _context
from distribute_jax._mesh import replica_mesh
from distribute_jax.program import ReplicaContext
from distribute_jax.strategies._base import Strategy


class _DefaultStrategy(Strategy):
    """One replica on the default device; code runs as if there were no strategy."""

    def __init__(self) -> None:
        super().__init__(replica_mesh(jax.local_devices()[:1]), steps_in_flight=None)


@functools.cache
def default_frame() -> _context.Frame:
    """Gives the default strategy with its replica context, made at the first use."""
    strategy = _DefaultStrategy()
    return _context.Frame(strategy, ReplicaContext(strategy, bound=False))


_context.set_default(default_frame)
