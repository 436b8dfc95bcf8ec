"""Metrics that are exact for any number of replicas, to the last example of a partial batch.

They have the names and the methods of ``flax.nnx.metrics``, or those of Keras. ``_terms`` decides what
counts, ``_confusion`` counts answers, each other file is one metric.
"""

from typing import TYPE_CHECKING

from distribute_jax._instead import answering_module
from distribute_jax._public import publish
from distribute_jax.metrics._accuracy import Accuracy as Accuracy
from distribute_jax.metrics._auc import AUC as AUC
from distribute_jax.metrics._average import Average as Average
from distribute_jax.metrics._metric import Metric as Metric
from distribute_jax.metrics._multi_metric import MultiMetric as MultiMetric
from distribute_jax.metrics._precision import Precision as Precision, Recall as Recall
from distribute_jax.metrics._welford import Welford as Welford

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
    __getattr__ = answering_module("distribute_jax.metrics")
