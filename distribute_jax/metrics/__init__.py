"""Metrics that are exact for any number of replicas and for partial batches.

They have the names and methods of ``flax.nnx.metrics``, or those of Keras. ``_metric`` applies masks,
weights and padding; ``_means`` has averages of values, ``_keras`` averages of functions of labels and
predictions, and ``_confusion`` metrics from counts of true and false predictions.
"""

from distribute_jax._lazy import public_names, publish
from distribute_jax.metrics._confusion import (
    AUC as AUC,
    FalseNegatives as FalseNegatives,
    FalsePositives as FalsePositives,
    Precision as Precision,
    Recall as Recall,
    TrueNegatives as TrueNegatives,
    TruePositives as TruePositives,
)
from distribute_jax.metrics._keras import (
    BinaryAccuracy as BinaryAccuracy,
    BinaryCrossentropy as BinaryCrossentropy,
    CategoricalAccuracy as CategoricalAccuracy,
    CategoricalCrossentropy as CategoricalCrossentropy,
    CategoricalHinge as CategoricalHinge,
    CosineSimilarity as CosineSimilarity,
    Hinge as Hinge,
    KLDivergence as KLDivergence,
    LogCoshError as LogCoshError,
    Mean as Mean,
    MeanAbsoluteError as MeanAbsoluteError,
    MeanAbsolutePercentageError as MeanAbsolutePercentageError,
    MeanMetricWrapper as MeanMetricWrapper,
    MeanSquaredError as MeanSquaredError,
    MeanSquaredLogarithmicError as MeanSquaredLogarithmicError,
    Poisson as Poisson,
    RootMeanSquaredError as RootMeanSquaredError,
    SparseCategoricalAccuracy as SparseCategoricalAccuracy,
    SparseCategoricalCrossentropy as SparseCategoricalCrossentropy,
    SparseTopKCategoricalAccuracy as SparseTopKCategoricalAccuracy,
    SquaredHinge as SquaredHinge,
    Sum as Sum,
    TopKCategoricalAccuracy as TopKCategoricalAccuracy,
)
from distribute_jax.metrics._means import (
    Accuracy as Accuracy,
    Average as Average,
    MultiMetric as MultiMetric,
    Welford as Welford,
)
from distribute_jax.metrics._metric import Metric as Metric

__all__ = public_names(globals())

publish(globals(), __all__, "distribute_jax.metrics")
