"""Metrics that are exact for any number of replicas, to the last example of a partial batch.

They have the names and the methods of ``flax.nnx.metrics``, or those of Keras. ``_metric`` decides what
counts, ``_confusion`` counts answers, ``_means`` averages.
"""

from typing import TYPE_CHECKING

from distribute_jax._lazy import lazy_exports, publish
from distribute_jax.metrics._confusion import AUC, Precision, Recall
from distribute_jax.metrics._means import Accuracy, Average, MultiMetric, Welford
from distribute_jax.metrics._metric import Metric

__all__ = [
    "AUC",
    "Accuracy",
    "Average",
    "Metric",
    "MultiMetric",
    "Precision",
    "Recall",
    "Welford",
]

publish(globals(), __all__, "distribute_jax.metrics")

if not TYPE_CHECKING:
    __getattr__ = lazy_exports(globals(), {})
