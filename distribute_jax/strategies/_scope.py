"""``strategy.scope()``: the strategy becomes current, and arrays are made where its state is stored."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

import jax
from flax import nnx

from distribute_jax import _context, _frames
from distribute_jax._interrupts import interrupts_held_back
from distribute_jax._user_frames import log_once, users_line
from distribute_jax.program import Replicas

_LOGICAL = """\
If these are names of logical axes in the metadata of Flax: dj.ModelParallelStrategy(rules=...) maps them to \
the mesh. Under another strategy write `with strategy.scope(), nnx.use_eager_sharding(False):`."""


class Scope:
    """What ``strategy.scope()`` returns: a ``with`` block that can be entered again and again."""

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
        below = _frames.depth()
        try:
            with interrupts_held_back():
                self._entered.append(self._enter())
        except BaseException:
            _frames.leave_to(below)  # the interrupt that was held back: the block is not reached
            raise
        return self._strategy

    def _enter(self) -> _frames.Frame:
        where = ExitStack()
        frame = _frames.Frame(self._strategy, merging=_context.in_merge_call(), leave=where.close)
        # In merge_call the mesh is known already, and arrays have no place of their own.
        if not frame.merging:
            where.enter_context(self._where())
            if self._replicas.rules is not None:
                # Flax would take the names of logical axes for those of the mesh. It is for rules only,
                # since each variable keeps this setting, and trees of variables with two do not match.
                where.enter_context(nnx.use_eager_sharding(False))
        _frames.push(frame)
        return frame

    def is_current(self) -> bool:
        """Returns whether this scope was entered last on this thread."""
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
                _frames.pop(frame)  # an interrupt came before they were held back
        self._entered.pop()

    def _where(self) -> Any:
        """Returns the context in which Flax, by itself, builds variables where the strategy wants them."""
        if (storage := self._replicas.parameter_device) is not None:
            return jax.default_device(storage.device)
        return jax.set_mesh(self._replicas.state_mesh)
