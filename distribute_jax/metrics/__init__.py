"""Metrics that are exact for any number of replicas, to the last example of a partial batch.

They have the names and the methods of ``flax.nnx.metrics``, or those of Keras. ``_metric`` decides what
counts, ``_confusion`` counts answers, ``_means`` averages, ``_keras`` averages functions of labels and
predictions.
"""

from distribute_jax._lazy import publish
from distribute_jax.metrics._confusion import (
    AUC,
    FalseNegatives,
    FalsePositives,
    Precision,
    Recall,
    TrueNegatives,
    TruePositives,
)
from distribute_jax.metrics._keras import (
    BinaryAccuracy,
    BinaryCrossentropy,
    CategoricalAccuracy,
    CategoricalCrossentropy,
    CategoricalHinge,
    CosineSimilarity,
    Hinge,
    KLDivergence,
    LogCoshError,
    Mean,
    MeanAbsoluteError,
    MeanAbsolutePercentageError,
    MeanMetricWrapper,
    MeanSquaredError,
    MeanSquaredLogarithmicError,
    Poisson,
    RootMeanSquaredError,
    SparseCategoricalAccuracy,
    SparseCategoricalCrossentropy,
    SparseTopKCategoricalAccuracy,
    SquaredHinge,
    Sum,
    TopKCategoricalAccuracy,
)
from distribute_jax.metrics._means import Accuracy, Average, MultiMetric, Welford
from distribute_jax.metrics._metric import Metric

__all__ = [
    "AUC",
    "Accuracy",
    "Average",
    "BinaryAccuracy",
    "BinaryCrossentropy",
    "CategoricalAccuracy",
    "CategoricalCrossentropy",
    "CategoricalHinge",
    "CosineSimilarity",
    "FalseNegatives",
    "FalsePositives",
    "Hinge",
    "KLDivergence",
    "LogCoshError",
    "Mean",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanMetricWrapper",
    "MeanSquaredError",
    "MeanSquaredLogarithmicError",
    "Metric",
    "MultiMetric",
    "Poisson",
    "Precision",
    "Recall",
    "RootMeanSquaredError",
    "SparseCategoricalAccuracy",
    "SparseCategoricalCrossentropy",
    "SparseTopKCategoricalAccuracy",
    "SquaredHinge",
    "Sum",
    "TopKCategoricalAccuracy",
    "TrueNegatives",
    "TruePositives",
    "Welford",
]

publish(globals(), __all__, "distribute_jax.metrics")
