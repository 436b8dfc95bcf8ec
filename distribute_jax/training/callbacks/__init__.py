"""Keras's callbacks, which users import from ``distribute_jax.callbacks``."""
