"""Keras's losses, exact over the global batch for any number of replicas.

``Loss`` reduces one loss for each example to this replica's part of one number. ``_regression`` and
``_crossentropy`` contain Keras's formulas and their classes. ``get`` returns a loss for a name or a
function.
"""

from distribute_jax._lazy import public_names, publish
from distribute_jax.losses._crossentropy import (
    BinaryCrossentropy as BinaryCrossentropy,
    BinaryFocalCrossentropy as BinaryFocalCrossentropy,
    CategoricalCrossentropy as CategoricalCrossentropy,
    CategoricalFocalCrossentropy as CategoricalFocalCrossentropy,
    SparseCategoricalCrossentropy as SparseCategoricalCrossentropy,
    binary_crossentropy as binary_crossentropy,
    binary_focal_crossentropy as binary_focal_crossentropy,
    categorical_crossentropy as categorical_crossentropy,
    categorical_focal_crossentropy as categorical_focal_crossentropy,
    sparse_categorical_crossentropy as sparse_categorical_crossentropy,
)
from distribute_jax.losses._get import get as get
from distribute_jax.losses._loss import (
    Loss as Loss,
    compute_average_loss as compute_average_loss,
    scale_regularization_loss as scale_regularization_loss,
)
from distribute_jax.losses._regression import (
    CategoricalHinge as CategoricalHinge,
    CosineSimilarity as CosineSimilarity,
    Hinge as Hinge,
    Huber as Huber,
    KLDivergence as KLDivergence,
    LogCosh as LogCosh,
    MeanAbsoluteError as MeanAbsoluteError,
    MeanAbsolutePercentageError as MeanAbsolutePercentageError,
    MeanSquaredError as MeanSquaredError,
    MeanSquaredLogarithmicError as MeanSquaredLogarithmicError,
    Poisson as Poisson,
    SquaredHinge as SquaredHinge,
    categorical_hinge as categorical_hinge,
    cosine_similarity as cosine_similarity,
    hinge as hinge,
    huber as huber,
    kl_divergence as kl_divergence,
    log_cosh as log_cosh,
    mean_absolute_error as mean_absolute_error,
    mean_absolute_percentage_error as mean_absolute_percentage_error,
    mean_squared_error as mean_squared_error,
    mean_squared_logarithmic_error as mean_squared_logarithmic_error,
    poisson as poisson,
    squared_hinge as squared_hinge,
)

__all__ = public_names(globals())

publish(globals(), __all__, "distribute_jax.losses")
