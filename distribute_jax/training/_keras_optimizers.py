"""Keras's optimizers by name, as optax transformations with Keras's defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import optax

from distribute_jax._errors import ArgumentError
from distribute_jax.training import _keras_adam
from distribute_jax.training._adjustable import with_adjustable_rate

_Options = Mapping[str, Any]

KERAS: Mapping[str, tuple[Callable[..., optax.GradientTransformation], float, _Options]] = {
    "sgd": (optax.sgd, 0.01, {}),
    "rmsprop": (optax.rmsprop, 0.001, {"decay": 0.9, "eps": 1e-7, "eps_in_sqrt": True}),
    "adam": (_keras_adam.adam, 0.001, {}),
    "adamw": (_keras_adam.adamw, 0.001, {"weight_decay": 0.004}),
    "adadelta": (optax.adadelta, 0.001, {"rho": 0.95, "eps": 1e-7}),
    "adagrad": (optax.adagrad, 0.001, {"initial_accumulator_value": 0.1, "eps": 1e-7}),
    "adamax": (optax.adamax, 0.001, {"eps": 1e-7}),
    "adafactor": (optax.adafactor, 0.001, {"min_dim_size_to_factor": 1}),
    "nadam": (_keras_adam.nadam, 0.001, {}),
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
