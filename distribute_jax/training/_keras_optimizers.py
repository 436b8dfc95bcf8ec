"""Keras's optimizers by name, as optax transformations with Keras's defaults and formulas.

Keras adds epsilon to the root of the second moment before its bias is corrected, optax after; with
gradients of 1e-3 that is 3% in the first steps. Keras's Nadam has Dozat's schedule of the momentum.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from distribute_jax._checks import brief
from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import put
from distribute_jax._messages import not_a_name, promoting
from distribute_jax.training._objective import variables

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-7


def _scale_by_adam() -> optax.GradientTransformation:
    @promoting
    def update(gradients: Any, state: Any, params: Any = None) -> Any:
        correction = jnp.sqrt(1 - BETA_2 ** optax.safe_increment(state.count))
        adam = optax.scale_by_adam(BETA_1, BETA_2, eps=EPSILON / correction)
        return adam.update(gradients, state, params)

    return optax.GradientTransformation(optax.scale_by_adam().init, update)


def _scale_by_nadam() -> optax.GradientTransformation:
    adam = optax.scale_by_adam(BETA_1, BETA_2)

    def start(params: Any) -> Any:
        return adam.init(params), jnp.ones((), jnp.float32)

    @promoting
    def update(gradients: Any, state: Any, params: Any = None) -> Any:
        _, moments = adam.update(gradients, state[0], params)
        # The momentum of this update and of the next; it grows from 0.47 to 0.9.
        mu, next_mu = (BETA_1 * (1 - 0.5 * 0.96 ** (moments.count + i)) for i in (0, 1))
        product = state[1] * mu  # of the momenta of all updates
        m_factor, g_factor = next_mu / (1 - product * next_mu), (1 - mu) / (1 - product)
        correction = 1 - BETA_2**moments.count
        updates = jax.tree.map(
            lambda m, v, g: (m_factor * m + g_factor * g) / (jnp.sqrt(v / correction) + EPSILON),
            moments.mu,
            moments.nu,
            gradients,
        )
        return updates, (moments, product)

    return optax.GradientTransformation(start, update)


def adam(
    learning_rate: Any, weight_decay: float = 0.0, nesterov: bool = False
) -> optax.GradientTransformation:
    """Returns Keras's Adam, AdamW (with ``weight_decay``) or Nadam (with ``nesterov``)."""
    return optax.chain(
        _scale_by_nadam() if nesterov else _scale_by_adam(),
        optax.add_decayed_weights(weight_decay) if weight_decay else optax.identity(),
        optax.scale_by_learning_rate(learning_rate),
    )


KERAS: Mapping[str, tuple[Callable[..., Any], float, Mapping[str, Any]]] = {
    "sgd": (optax.sgd, 0.01, {}),
    "rmsprop": (optax.rmsprop, 0.001, {"decay": 0.9, "eps": 1e-7, "eps_in_sqrt": True}),
    "adam": (adam, 0.001, {}),
    "adamw": (adam, 0.001, {"weight_decay": 0.004}),
    "adadelta": (optax.adadelta, 0.001, {"rho": 0.95, "eps": 1e-7}),
    "adagrad": (optax.adagrad, 0.001, {"initial_accumulator_value": 0.1, "eps": 1e-7}),
    "adamax": (optax.adamax, 0.001, {"eps": 1e-7}),
    "adafactor": (optax.adafactor, 0.001, {"min_dim_size_to_factor": 1}),
    "nadam": (adam, 0.001, {"nesterov": True}),
    "lion": (optax.lion, 0.001, {"b1": 0.9, "b2": 0.99, "weight_decay": 0.0}),
    "lamb": (optax.lamb, 0.001, {"eps": 1e-7}),
}
"""Keras's name → the function, Keras's learning rate, and Keras's other defaults that differ from optax's."""


def optimizer(identifier: Any) -> optax.GradientTransformation:
    """Returns the optax transformation of a Keras name, with Keras's defaults, or the one passed.

    Where possible the learning rate is part of the state, ``state.hyperparams["learning_rate"]``,
    so that it can be read and set between steps.

    Updates equal Keras's to rounding, with two exceptions: adamax, where optax adds epsilon to each
    gradient rather than to their maximum, which is visible below 1e-5; and adafactor, which factors the two
    longest dims of a weight rather than the last two, and whose rate does not fall after a million steps.
    """
    if isinstance(identifier, optax.GradientTransformation):
        return with_adjustable_rate(identifier)
    if isinstance(identifier, optax.MultiSteps):
        return identifier.gradient_transformation()
    if isinstance(identifier, str) and identifier.lower() in KERAS:
        make, learning_rate, options = KERAS[identifier.lower()]
        fixed = set(inspect.signature(make).parameters) - {"learning_rate"}
        adjustable = optax.inject_hyperparams(make, static_args=fixed)
        return adjustable(learning_rate=learning_rate, **options)
    if isinstance(identifier, str):
        raise ArgumentError(
            f"{not_a_name('an optimizer', identifier, KERAS)} Or pass an optax transformation, as "
            "optax.adam(1e-3)."
        )
    raise ArgumentError(
        "optimizer must be an optax transformation, as optax.adam(1e-3) with its parentheses, or one of "
        f"Keras's names, {', '.join(sorted(KERAS))}; got {brief(identifier)}."
    )


class MovingAverage(NamedTuple):
    count: Any
    moving_average: Any


def averaging(momentum: float, overwrite: int | None) -> optax.GradientTransformation:
    """Returns the last part of a chain, which keeps Keras's moving average of the weights.

    Every ``overwrite`` updates it replaces the weights by their average; otherwise updates pass unchanged.
    """

    def start(params: Any) -> Any:
        return MovingAverage(jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, params))

    @promoting
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        count = optax.safe_increment(state.count)
        decay = jnp.where(count == 1, 0, momentum)  # as Keras starts
        average = jax.tree.map(
            lambda mean, new: (decay * mean + (1 - decay) * new).astype(mean.dtype),
            state.moving_average,
            optax.apply_updates(params, updates),
        )
        if overwrite is not None:
            is_due = count % overwrite == 0
            updates = jax.tree.map(
                lambda mean, old, by: jnp.where(is_due, mean - old, by), average, params, updates
            )
        return updates, MovingAverage(count, average)

    return optax.GradientTransformation(start, update)


def swap_averages(module: nnx.Pytree, optimizer: nnx.Pytree, *, keep: bool = False) -> None:
    """Swaps the weights with their moving averages; with ``keep`` both become the averages."""
    weights, name = variables(module), "moving_average"
    for path, average in variables(optimizer).items():
        place = path.index(name) if name in path else 0
        # A layer may have this name, too: then another one, such as mu, is before it.
        if place and not any(isinstance(key, str) for key in path[1:place]):
            weight = weights[path[place + 1 :]]
            old, mean = weight.get_raw_value(), average.get_raw_value()
            weight.set_raw_value(put(jnp.copy(mean) if keep else mean, old.sharding))
            if not keep:
                average.set_raw_value(put(old, mean.sharding))


# An optax transformation is two functions whose closures hold its parts. A chain is rebuilt from its parts,
# except for the one that multiplies by the rate, which computes the same from state. If a closure does not
# look as expected, as with another version of optax, the transformation stays as it is.
_CHAIN = "chain.<locals>.update_fn"
_SCALE = "scale.<locals>.update_fn"
_DECAY = "add_decayed_weights.<locals>.update_fn"
_SCHEDULE = "scale_by_schedule.<locals>.update_fn"


def with_adjustable_rate(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns an equivalent transformation whose learning rate is part of its state.

    Exactly one part of the chain must multiply by a rate, as in ``optax.adam(1e-3)`` and in
    ``optax.chain(optax.clip(1.0), optax.adam(schedule))``. Any other transformation is returned unchanged.
    """
    parts = list(_parts(tx.init, tx.update))
    rates = [(i, rate) for i, part in enumerate(parts) if (rate := _adjustable(part.update))]
    # A factor of -1 beside another only turns the sign.
    rates = [one for one in rates if _step_size(parts[one[0]].update) not in (1, -1)] or rates[:1]
    if len(rates) != 1:
        return tx
    ((i, rate),) = rates
    if any(_name(part.update) == _DECAY for part in parts[i + 1 :]):
        return tx  # as in optax.fromage, where decay and update share one rate
    parts[i] = rate
    return optax.chain(*parts)


def _parts(init: Any, update: Any) -> Iterator[optax.GradientTransformationExtraArgs]:
    """Yields the parts of a chain, and of chains nested in it, in order."""
    nonlocals = _closure(update)
    if _name(update) != _CHAIN or "update_fns" not in nonlocals:
        yield optax.GradientTransformationExtraArgs(init, update)
        return
    inits = _closure(init).get("init_fns", ())
    for part_init, part_update in zip(inits, nonlocals["update_fns"], strict=True):
        yield from _parts(part_init, part_update)


def _adjustable(update: Any) -> optax.GradientTransformationExtraArgs | None:
    """Returns a part that multiplies by a number or schedule, with the rate as state; None for others."""
    update = _inner(update)
    schedule = _closure(update).get("step_size_fn")
    step, dtype = _step_size(update), jnp.result_type(float)
    if step is not None:
        make = optax.inject_hyperparams(
            lambda learning_rate: optax.scale(learning_rate if step > 0 else -learning_rate),
            hyperparam_dtype=dtype,
        )
        return make(learning_rate=abs(step))
    if _name(update) == _SCHEDULE and callable(schedule):
        make = optax.inject_hyperparams(
            lambda learning_rate, step: optax.scale(step), hyperparam_dtype=dtype
        )
        return make(learning_rate=lambda count: abs(schedule(count)), step=schedule)
    return None


def _step_size(update: Any) -> float | None:
    """Returns the number by which a part multiplies; None for other parts."""
    step = _closure(_inner(update)).get("step_size")
    return step if _name(update) == _SCALE and isinstance(step, (int, float)) else None


def _name(update: Any) -> str | None:
    return getattr(_inner(update), "__qualname__", None)


def _inner(update: Any) -> Any:
    """Returns the update function inside ``optax.with_extra_args_support``."""
    tx = _closure(update).get("tx")
    return tx.update if isinstance(tx, optax.GradientTransformation) else update


def _closure(function: Any) -> Mapping[str, Any]:
    return inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
