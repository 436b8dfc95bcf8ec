"""The share of predictions that are right."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from distribute_jax._errors import ArgumentError
from distribute_jax.metrics._average import Average
from distribute_jax.metrics._terms import as_array, check_real


class Accuracy(Average):
    """The share of examples whose class was predicted, since the last reset, over all replicas.

    Args:
        threshold: None for several classes, where the largest logit predicts. A number for two
            classes: a logit that reaches it predicts a positive label.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> metric = dj.metrics.Accuracy()
        >>> metric.update(logits=jnp.array([[2.0, 1.0], [0.0, 3.0]]), labels=jnp.array([0, 0]))
        >>> float(metric.compute())
        0.5

    Source: https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/training/metrics.html
    """

    def __init__(self, threshold: float | None = None) -> None:
        """Starts with nothing; see the class for the argument."""
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float, type(None))):
            raise ArgumentError(
                f"Accuracy(threshold={threshold!r}): the threshold is a number that a positive logit "
                "reaches, as 0.5 for probabilities, or None for several classes."
            )
        super().__init__("values")
        self.threshold = threshold

    def update(  # type: ignore[override]  # the values are made of two arguments
        self,
        *,
        logits: Any,
        labels: Any,
        mask: Any = None,
        sample_weight: Any = None,
        **_: Any,
    ) -> None:
        """Adds predictions, inside ``run`` this replica's.

        Args:
            logits: shape (batch, ..., classes); with a threshold that of the labels.
            labels: the right classes, integers or bools, shape (batch, ...).
            mask: bools, True where an example counts; dims match those of the labels from the left.
            sample_weight: how much each example counts; dims match from the left.
            _: keywords for other metrics.

        Raises:
            ValueError: shapes or dtypes that do not match.
        """
        logits = as_array(self, "logits", logits)
        labels = as_array(self, "labels", labels)
        check_real(self, "logits", logits)
        self._check(logits, labels)
        if self.threshold is not None:
            right = (logits >= self.threshold) == (labels > 0)
        else:
            right = jnp.argmax(logits, axis=-1) == labels
        self._add("labels", right, mask, sample_weight)

    def _check(self, logits: jax.Array, labels: jax.Array) -> None:
        classes = 0 if self.threshold is not None else 1
        if logits.shape[: logits.ndim - classes] != labels.shape or logits.ndim < classes:
            wanted = "the shape of the labels" if not classes else "one more dim, the classes"
            raise ArgumentError(
                f"Accuracy.update got logits of shape {logits.shape} for labels of shape "
                f"{labels.shape}. With threshold={self.threshold} the logits have {wanted}; labels are "
                "class numbers, not one-hot: pass jnp.argmax(labels, axis=-1)."
            )
        if not (jnp.issubdtype(labels.dtype, jnp.integer) or labels.dtype == bool):
            raise ArgumentError(
                f"Accuracy.update got labels of dtype {labels.dtype}. Labels are class numbers: pass "
                "labels.astype(jnp.int32)."
            )
