"""What a training step computes: losses over the global batch, and the update of the model."""

from distribute_jax.training._loss import (
    compute_average_loss as compute_average_loss,
    scale_regularization_loss as scale_regularization_loss,
)
from distribute_jax.training._optimizer import Optimizer as Optimizer

__all__ = ["Optimizer", "compute_average_loss", "scale_regularization_loss"]
