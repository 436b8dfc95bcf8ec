"""Adam, AdamW and Nadam as Keras computes them, where optax's formulas are others.

Keras adds epsilon to the root of the second moment before its bias is corrected, optax after; with
gradients of 1e-3 that is 3% in the first steps. Keras's Nadam has Dozat's schedule of the momentum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from distribute_jax._fitting import promoting

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
