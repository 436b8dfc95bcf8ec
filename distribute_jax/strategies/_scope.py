"""``strategy.scope()``: makes the strategy current, and the place of its state the default for new arrays."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

import jax
from flax import nnx

from distribute_jax import _context, _frames
from distribute_jax._errors import log_once, users_line
from distribute_jax._interrupts import interrupts_held_back
from distribute_jax.program import Replicas

_LOGICAL = """\
If these are names of logical axes in the metadata of Flax: dj.ModelParallelStrategy(rules=...) maps them to \
the mesh. Under another strategy write `with strategy.scope(), nnx.use_eager_sharding(False):`."""


class Scope:
    """What ``strategy.scope()`` returns: a reentrant context manager."""

    def __init__(self, strategy: Any, replicas: Replicas) -> None:
        self._strategy, self._replicas = strategy, replicas
        self._entered: list[_frames.Frame] = []
        self._unused: str | None = users_line()

    def __del__(self) -> None:
        line = getattr(self, "_unused", None)
        if line and not sys.is_finalizing():
            log_once(
                "strategy.scope() at %s was never entered, so models made there do not belong to the "
                "strategy. Write with strategy.scope(): and indent what it is for, or "
                "dj.experimental_set_strategy(strategy).",
                line,
                about=line,
            )

    def __enter__(self) -> Any:
        self._unused = None
        _context.require_cross_replica("strategy.scope()")
        _context.require_unmixed(self._strategy)
        _context.require_untraced("strategy.scope()")
        depth = _frames.depth()
        try:
            with interrupts_held_back():
                self._entered.append(self._enter())
        except BaseException:
            _frames.leave_to(depth)  # an interrupt that was held back: __exit__ will not be called
            raise
        return self._strategy

    def _enter(self) -> _frames.Frame:
        contexts = ExitStack()
        merging = _context.in_merge_call()
        frame = _frames.Frame(self._strategy, merging=merging, leave=contexts.close)
        # In merge_call the step's mesh is set already, and its arrays are tracers.
        if not merging:
            contexts.enter_context(self._placement_context())
            if self._replicas.rules is not None:
                # Flax would take logical axes for axes of the mesh. Only with rules: variables store this
                # setting, and trees of variables that differ in it do not match.
                contexts.enter_context(nnx.use_eager_sharding(False))
        _frames.push(frame)
        return frame

    def is_current(self) -> bool:
        """True if this scope is the innermost one of this thread."""
        return bool(self._entered) and _frames.entered() is self._entered[-1]

    def __exit__(self, *error: Any) -> None:
        if isinstance(error[1], ValueError) and str(error[1]).startswith("Resource axis"):
            error[1].add_note(_LOGICAL)
        frame = self._entered[-1]
        try:
            with interrupts_held_back():
                _frames.pop(frame)
        finally:
            if _frames.entered() is frame:
                _frames.pop(frame)  # an interrupt came before interrupts were held back
        self._entered.pop()

    def _placement_context(self) -> Any:
        """Returns the context that places new arrays where the strategy stores state."""
        if (storage := self._replicas.parameter_device) is not None:
            return jax.default_device(storage.device)
        return jax.set_mesh(self._replicas.state_mesh)
