"""Makes the learning rate of an optax transformation part of its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

# An optax transformation is two functions, and what it was made of is in their closures. A chain is made
# again of its own parts, but for the one that multiplies by the rate: what is computed stays the same.
# Where a closure is not as expected, as in another version of optax, the transformation stays as it is.
_CHAIN = "chain.<locals>.update_fn"
_SCALE = "scale.<locals>.update_fn"
_DECAY = "add_decayed_weights.<locals>.update_fn"
_SCHEDULE = "scale_by_schedule.<locals>.update_fn"


def with_adjustable_rate(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns a transformation that does the same and keeps its learning rate as state.

    Of the parts of a chain exactly one may multiply by a rate, as in ``optax.adam(1e-3)`` and in
    ``optax.chain(optax.clip(1.0), optax.adam(schedule))``. Any other transformation is returned as it is.
    """
    parts = list(_parts(tx.init, tx.update))
    scales = [(at, found) for at, part in enumerate(parts) if (found := _rate(part.update))]
    if len(scales) != 1:
        return tx
    ((at, rate),) = scales
    if any(_name(part.update) == _DECAY for part in parts[at + 1 :]):
        return tx  # as in optax.fromage, where it belongs to one rate
    parts[at] = optax.GradientTransformationExtraArgs(rate.init, rate.update)
    return optax.chain(*parts)


class RateState(NamedTuple):
    """The state of the part that multiplies by the rate, its fields named as those of optax."""

    hyperparams: dict[str, Any]
    hyperparams_states: dict[str, Any]
    """Of a schedule, which sets the rate at each update, how many there were."""


@dataclass(frozen=True)
class _Rate:
    """Multiplies updates by a rate, as ``optax.scale`` and ``optax.scale_by_schedule`` do."""

    step: float | Callable[[Any], Any]

    def init(self, params: Any) -> RateState:
        del params
        if callable(self.step):
            count = jnp.zeros([], jnp.int32)
            return self._state(abs(self.step(count)), count)
        return self._state(abs(self.step), None)

    def update(
        self, updates: Any, state: RateState, params: Any = None, **extra: Any
    ) -> tuple[Any, RateState]:
        del params, extra
        if callable(self.step):
            count = state.hyperparams_states["learning_rate"]
            step = self.step(count)
            state = self._state(abs(step), optax.safe_increment(count))
        else:
            rate = state.hyperparams["learning_rate"]
            step = -rate if self.step < 0 else rate
        return jax.tree.map(lambda g: jnp.array(step, dtype=g.dtype) * g, updates), state

    def _state(self, rate: Any, count: Any) -> RateState:
        states = {} if count is None else {"learning_rate": count}
        return RateState({"learning_rate": jnp.asarray(rate, jnp.result_type(float))}, states)


def _parts(init: Any, update: Any) -> Iterator[optax.GradientTransformationExtraArgs]:
    """The parts of a chain and of the chains in it, in order."""
    inside = _closure(update)
    if _name(update) != _CHAIN or "update_fns" not in inside:
        yield optax.GradientTransformationExtraArgs(init, update)
        return
    inits = _closure(init).get("init_fns", ())
    for one_init, one_update in zip(inits, inside["update_fns"], strict=True):
        yield from _parts(one_init, one_update)


def _rate(update: Any) -> _Rate | None:
    """What a part multiplies by, if that is a rate or a schedule."""
    update = _inner(update)
    name, inside = _name(update), _closure(update)
    step = inside.get("step_size")
    # A factor of -1 only turns the sign.
    if name == _SCALE and isinstance(step, (int, float)) and abs(step) != 1:
        return _Rate(float(step))
    schedule = inside.get("step_size_fn")
    return _Rate(schedule) if name == _SCHEDULE and callable(schedule) else None


def _name(update: Any) -> str | None:
    return getattr(_inner(update), "__qualname__", None)


def _inner(update: Any) -> Any:
    """What ``optax.with_extra_args_support`` was given."""
    tx = _closure(update).get("tx")
    return tx.update if isinstance(tx, optax.GradientTransformation) else update


def _closure(function: Any) -> dict[str, Any]:
    """The variables that a function closes over, by name."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or not cells:
        return {}
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))
