"""The check of the promise: a distributed step equals the step on one device."""

from __future__ import annotations

from typing import Any

import jax

from distribute_jax._tracebacks import frames_hidden
from distribute_jax._typing import StepFunction
from distribute_jax._values import DistributedValues
from distribute_jax.program import RunOptions
from distribute_jax.strategies import Strategy


@frames_hidden
def check_equals_one_device(strategy: Strategy, step: StepFunction, batch: Any) -> Any:
    """Runs a step on all replicas, and from a copy of the state on one device with the whole batch.

    State and mirrored results must agree to rounding, and so must each row of a result that has one
    for each example. Of other values that each replica has for itself, the sum or the mean must be the
    value on one device: the parts of ``compute_average_loss`` sum to it, means over equal shares
    average to it. Which of the two it is, ``strategy.reduce`` has to say. Anything else cannot be
    compared and raises. State that a step changes by hardly more than its rounding shows is named in
    a logged warning, since a wrong scale could not be seen.

    Steps that draw random numbers or use the statistics of each replica's share are not equal by
    nature: turn dropout off, synchronise batch norm.

    Args:
        strategy: whose replicas run the step.
        step: the function given to ``strategy.run``.
        batch: an element of ``strategy.distribute_dataset``, or a nest of arrays, dim 0 the examples
            of the global batch, which is distributed first. A tuple becomes several arguments.

    Returns:
        What ``strategy.run`` returned; the state has been updated by this one step.

    Raises:
        ValueError: they differ; names every variable, the ratio and its likely cause.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp, numpy as np
        >>> strategy = dj.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> def step(x):
        ...     return dj.get_replica_context().all_reduce("sum", jnp.sum(x))
        >>> float(dj.testing.check_equals_one_device(strategy, step, np.arange(4.0)))
        6.0
    """
    element = batch if _is_distributed(batch) else next(iter(strategy.distribute_dataset([batch])))
    args = element if isinstance(element, tuple) else (element,)
    return strategy.run(step, args=args, options=RunOptions(verify="always"))


def _is_distributed(batch: Any) -> bool:
    leaves = jax.tree.leaves(batch, is_leaf=lambda leaf: isinstance(leaf, DistributedValues))
    return any(isinstance(leaf, DistributedValues) for leaf in leaves)
