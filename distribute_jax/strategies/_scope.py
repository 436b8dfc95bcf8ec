"""``strategy.scope()``: the strategy becomes current, and arrays are made on its mesh."""

from __future__ import annotations

from typing import Any

import jax

from distribute_jax import _context


class Scope:
    """What ``strategy.scope()`` gives: a ``with`` block that can be entered again and again."""

    def __init__(self, strategy: Any) -> None:
        """Remembers the strategy; nothing is entered yet."""
        self._strategy = strategy
        self._entered: list[tuple[_context.Frame, Any]] = []

    def __enter__(self) -> Any:
        """Makes the strategy current and gives it."""
        _context.require_cross_replica("strategy.scope()")
        _context.require_unmixed(self._strategy)
        frame = _context.Frame(self._strategy)
        # Flax builds variables that are replicated over the mesh in this context, by itself.
        mesh = jax.set_mesh(self._strategy.mesh)
        mesh.__enter__()
        _context.push(frame)
        self._entered.append((frame, mesh))
        return self._strategy

    def is_current(self) -> bool:
        """Tells whether this scope was entered last on this thread."""
        return bool(self._entered) and _context.entered() is self._entered[-1][0]

    def __exit__(self, *error: Any) -> None:
        """Makes current what was current before."""
        frame, mesh = self._entered[-1]
        _context.pop(frame)
        self._entered.pop()
        mesh.__exit__(*error)
