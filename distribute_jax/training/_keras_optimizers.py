"""Keras's optimizers by name, as optax transformations with Keras's defaults and formulas.

Keras adds epsilon to the root of the second moment before its bias is corrected, optax after; with
gradients of 1e-3 that is 3% in the first steps. Keras's Nadam has Dozat's schedule of the momentum.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import put
from distribute_jax._messages import promoting

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-7


class _Moments(NamedTuple):
    step: jax.Array
    """int32: how many updates there were."""
    mu: Any
    nu: Any


class _NesterovMoments(NamedTuple):
    moments: _Moments
    product: jax.Array
    """float32: the product of the momenta of all updates."""


def _start(params: Any) -> _Moments:
    zeros = optax.tree_utils.tree_zeros_like(params)
    return _Moments(jnp.zeros((), jnp.int32), zeros, zeros)


def _after(moments: _Moments, gradients: Any) -> _Moments:
    mu = optax.tree_utils.tree_update_moment(gradients, moments.mu, BETA_1, 1)
    nu = optax.tree_utils.tree_update_moment_per_elem_norm(gradients, moments.nu, BETA_2, 2)
    return _Moments(optax.safe_increment(moments.step), mu, nu)


def _scale_by_adam() -> optax.GradientTransformation:
    @promoting
    def update(gradients: Any, state: _Moments, params: Any = None) -> tuple[Any, _Moments]:
        state = _after(state, gradients)
        factor = jnp.sqrt(1 - BETA_2**state.step) / (1 - BETA_1**state.step)
        updates = jax.tree.map(
            lambda m, v: m * factor / (jnp.sqrt(v) + EPSILON), state.mu, state.nu
        )
        return updates, state

    return optax.GradientTransformation(_start, update)


def _scale_by_nadam() -> optax.GradientTransformation:
    def start(params: Any) -> _NesterovMoments:
        return _NesterovMoments(_start(params), jnp.ones((), jnp.float32))

    @promoting
    def update(
        gradients: Any, state: _NesterovMoments, params: Any = None
    ) -> tuple[Any, _NesterovMoments]:
        moments = _after(state.moments, gradients)
        now, coming = (_momentum(moments.step + more) for more in (0, 1))
        product = state.product * now
        ahead, own = coming / (1 - product * coming), (1 - now) / (1 - product)
        correction = 1 - BETA_2**moments.step
        updates = jax.tree.map(
            lambda m, v, g: (ahead * m + own * g) / (jnp.sqrt(v / correction) + EPSILON),
            moments.mu,
            moments.nu,
            gradients,
        )
        return updates, _NesterovMoments(moments, product)

    return optax.GradientTransformation(start, update)


def _momentum(step: jax.Array) -> jax.Array:
    """Gives the momentum of an update, from 0.47 in the first to 0.9."""
    return BETA_1 * (1 - 0.5 * 0.96**step)


def adam(learning_rate: Any) -> optax.GradientTransformation:
    """Gives Keras's Adam."""
    return optax.chain(_scale_by_adam(), optax.scale_by_learning_rate(learning_rate))


def adamw(learning_rate: Any, weight_decay: float) -> optax.GradientTransformation:
    """Gives Keras's AdamW: all weights decay, by the learning rate times this share."""
    return optax.chain(
        _scale_by_adam(),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )


def nadam(learning_rate: Any) -> optax.GradientTransformation:
    """Gives Keras's Nadam."""
    return optax.chain(_scale_by_nadam(), optax.scale_by_learning_rate(learning_rate))


_Options = Mapping[str, Any]

KERAS: Mapping[str, tuple[Callable[..., optax.GradientTransformation], float, _Options]] = {
    "sgd": (optax.sgd, 0.01, {}),
    "rmsprop": (optax.rmsprop, 0.001, {"decay": 0.9, "eps": 1e-7, "eps_in_sqrt": True}),
    "adam": (adam, 0.001, {}),
    "adamw": (adamw, 0.001, {"weight_decay": 0.004}),
    "adadelta": (optax.adadelta, 0.001, {"rho": 0.95, "eps": 1e-7}),
    "adagrad": (optax.adagrad, 0.001, {"initial_accumulator_value": 0.1, "eps": 1e-7}),
    "adamax": (optax.adamax, 0.001, {"eps": 1e-7}),
    "adafactor": (optax.adafactor, 0.001, {"min_dim_size_to_factor": 1}),
    "nadam": (nadam, 0.001, {}),
    "lion": (optax.lion, 0.001, {"b1": 0.9, "b2": 0.99, "weight_decay": 0.0}),
    "lamb": (optax.lamb, 0.001, {"eps": 1e-7}),
}
"""For each name the function, Keras's learning rate, and where else Keras's defaults are others."""


def optimizer(identifier: Any) -> optax.GradientTransformation:
    """Gives the optax transformation that an identifier stands for.

    Of a name, and of a transformation where that can be done, the learning rate is part of the state,
    ``state.hyperparams["learning_rate"]``, where it can be read and set between steps.

    Updates equal Keras's to rounding but for two: adamax, where optax adds epsilon to each gradient
    rather than to their maximum, which shows below 1e-5; and adafactor, which factors the two longest
    dims of a weight rather than the last two, and whose rate does not fall after a million steps.

    Args:
        identifier: an ``optax.GradientTransformation`` or ``optax.MultiSteps``; or a name of Keras, in
            lower or upper case, with Keras's defaults.

    Raises:
        ValueError: neither.
    """
    if isinstance(identifier, optax.GradientTransformation):
        return with_adjustable_rate(identifier)
    if isinstance(identifier, optax.MultiSteps):
        several: optax.GradientTransformation = identifier.gradient_transformation()
        return several
    if isinstance(identifier, str) and identifier.lower() in KERAS:
        make, learning_rate, options = KERAS[identifier.lower()]
        fixed = set(inspect.signature(make).parameters) - {"learning_rate"}
        adjustable = optax.inject_hyperparams(make, static_args=fixed)
        made: optax.GradientTransformation = adjustable(learning_rate=learning_rate, **options)
        return made
    raise ArgumentError(
        f"{identifier!r:.80} is no optimizer. Pass an optax transformation, as optax.adam(1e-3) with "
        f"its parentheses, or one of Keras's names: {', '.join(sorted(KERAS))}."
    )


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


def learning_rate(optimizer: nnx.Pytree) -> float:
    """Returns the rate that the next update uses; of a schedule, the one that the last update used."""
    return float(np.asarray(_variable(optimizer)[...]))


def set_learning_rate(optimizer: nnx.Pytree, rate: float) -> None:
    """Sets the rate on the devices where it is, so that the compiled step needs no other."""
    variable = _variable(optimizer)
    if _find(optimizer, "hyperparams_states"):
        raise ArgumentError(
            "The learning rate of this optimizer follows a schedule, which sets it at each update, so it "
            "cannot be set. Compile with a number, as optax.adam(1e-3), to set it, or leave out the callback "
            "that sets it."
        )
    old = variable.get_raw_value()
    value = jnp.asarray(rate, old.dtype)
    variable.set_raw_value(put(np.asarray(value), old.sharding))


def _variable(optimizer: nnx.Pytree) -> Any:
    variables = _find(optimizer, "hyperparams")
    if len(variables) != 1:
        raise ArgumentError(
            "The learning rate of this optimizer is not part of its state, so it can be neither read nor "
            "set. Compile with optax.adam(1e-3) or another optimizer of optax or chain of them, with Keras's "
            'name, as optimizer="adam", or with optax.inject_hyperparams(make)(learning_rate=1e-3), where '
            "make(learning_rate) returns your transformation."
        )
    return variables[0]


def _find(optimizer: nnx.Pytree, kind: str) -> list[Any]:
    return [
        variable
        for path, variable in nnx.iter_graph(optimizer)
        if isinstance(variable, nnx.Variable)
        and kind in path
        and path[path.index(kind) + 1 :][:1] == ("learning_rate",)
    ]
