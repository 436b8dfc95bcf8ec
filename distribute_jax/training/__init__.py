"""What a training step computes: losses over the global batch."""

from distribute_jax.training._loss import (
    compute_average_loss as compute_average_loss,
    scale_regularization_loss as scale_regularization_loss,
)

__all__ = ["compute_average_loss", "scale_regularization_loss"]
