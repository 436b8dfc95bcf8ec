"""What a training step computes, and Keras's compile and fit: the update of a model, and its loop."""

from distribute_jax.training._batches import unpack_x_y_sample_weight as unpack_x_y_sample_weight
from distribute_jax.training._compile import DTypePolicy as DTypePolicy
from distribute_jax.training._model import Model as Model
from distribute_jax.training._objective import AddedLoss as AddedLoss
from distribute_jax.training._optimizer import Optimizer as Optimizer
from distribute_jax.training._sidecar import SidecarEvaluator as SidecarEvaluator
