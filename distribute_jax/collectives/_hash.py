"""A hash of an array's bits and their positions, computed where the array lies."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# The finaliser of MurmurHash3 by Austin Appleby, in the public domain: every bit of the word moves
# every bit of the result, and no two words give the same.
_STEPS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))
_SEEDS = (0x9E3779B9, 0x7F4A7C15)
"""Two independent lanes of 32 bits, since JAX has no 64-bit integers by default."""


def bit_hash(array: jax.Array) -> jax.Array:
    """Hashes the bits of an array: 0.0 and -0.0 differ, and so do two NaNs.

    One changed element always changes the hash, since each is mixed one to one with its position
    before all are added; other changes go unseen once in 2⁶⁴.

    Args:
        array: numbers or bools of any dtype and shape, but no keys.

    Returns:
        uint32 of shape (2,).
    """
    words = _words(array)
    position = jax.lax.iota(jnp.uint32, math.prod(words.shape)).reshape(words.shape)
    lanes = [_mixed(words ^ _mixed(position + np.uint32(seed))) for seed in _SEEDS]
    return jnp.stack([jnp.sum(lane, dtype=jnp.uint32) for lane in lanes])


def _mixed(word: jax.Array) -> jax.Array:
    for shift, factor in _STEPS:
        word = (word ^ (word >> shift)) * np.uint32(factor)
    return word ^ (word >> 16)


def _words(array: jax.Array) -> jax.Array:
    """Gives the bits as uint32, one word or two for each element."""
    dtype = array.dtype
    if jnp.issubdtype(dtype, np.bool_):
        return array.astype(jnp.uint32)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.stack([_words(jnp.real(array)), _words(jnp.imag(array))])
    info: Any = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo
    bits = info(dtype).bits  # of a 4-bit type 4, while its itemsize is a byte
    if bits == 64:
        return jax.lax.bitcast_convert_type(array, jnp.uint32)
    return jax.lax.bitcast_convert_type(array, f"uint{bits}").astype(jnp.uint32)
