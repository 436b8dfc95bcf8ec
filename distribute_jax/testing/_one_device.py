"""Compares a distributed step with one device, and simulates devices on the CPU."""

from __future__ import annotations

import os
from typing import Any

import jax

from distribute_jax._checks import check_int
from distribute_jax._errors import BackendStartedError
from distribute_jax._messages import StepFunction
from distribute_jax._supervision import pool_threads
from distribute_jax._values import DistributedValues
from distribute_jax.program import RunOptions
from distribute_jax.strategies import Strategy
from distribute_jax.training import Model


def check_equals_one_device(strategy: Strategy, step: StepFunction, batch: Any) -> Any:
    """Runs a step on all replicas and, from a copy of the state, on one device with the global batch.

    State and mirrored results must agree to rounding, and so must each row of a result with one row per
    example. Of other values that differ between replicas, the sum or the mean must be the value on one
    device: the parts of ``compute_average_loss`` sum to it, means over equal shares average to it (pass
    the right reduction to ``strategy.reduce``). Anything else cannot be compared and raises. A logged
    warning names state that the step changes by hardly more than rounding, where a wrong scale would not
    show.

    Steps that draw random numbers, other than masks of dropout, which are made equal, or use the statistics
    of each replica's share differ by design: turn noise off, synchronise batch norm.

    Args:
        strategy: the strategy that runs the step.
        step: the function passed to ``strategy.run``.
        batch: an element of ``strategy.distribute_dataset``, or a pytree of arrays whose dim 0 is the
            examples of the global batch, which is then distributed. A tuple becomes several arguments.

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
    return strategy.run(step, args=_args(strategy, batch), options=RunOptions(verify="always"))


def replay_step(model: Model, checkpoint: Any, batch: Any, times: int = 2) -> dict[str, Any]:
    """Computes the gradients of one batch several times, from a checkpoint, and compares their bits.

    Use it to examine a step that went wrong. If nothing differs, compare the hashes with those of other
    devices or another machine, to find a device that always computes wrongly.

    Args:
        model: a compiled model; the checkpoint is loaded into it, and it is not trained.
        checkpoint: written by ``model.save`` or ``ModelCheckpoint`` before the step.
        batch: the global batch of the step, as for ``check_equals_one_device``.
        times: how often to compute the gradients.

    Returns:
        For each trained variable the hashes of its gradient's bits, one row per replica.

    Raises:
        NotEqualError: a replica's gradients differ between the times; names replicas and variables.

    Example:
        >>> import distribute_jax as dj, numpy as np, tempfile
        >>> from flax import nnx
        >>> model = dj.Model(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
        >>> model.compile("sgd", loss="mse")
        >>> folder = tempfile.mkdtemp() + "/before"
        >>> model.save(folder)
        >>> sorted(dj.testing.replay_step(model, folder, (np.ones((8, 1)), np.ones((8, 1)))))
        ['bias', 'kernel']
    """
    check_int("times", times, 2)
    model.load(checkpoint)
    return model.trainer.replay_gradients(_args(model.strategy, batch), times)


def _args(strategy: Strategy, batch: Any) -> tuple[Any, ...]:
    leaves = jax.tree.leaves(batch, is_leaf=lambda leaf: isinstance(leaf, DistributedValues))
    if not any(isinstance(leaf, DistributedValues) for leaf in leaves):
        batch = next(iter(strategy.distribute_dataset([batch])))
    return batch if isinstance(batch, tuple) else (batch,)


_STARTED = """\
dj.simulate({n}) came too late: JAX has already started with {count} {kind} device(s). The number of \
devices is fixed at the first use of one. Call dj.simulate({n}) right after the imports, before any array, \
nnx.Rngs or jax.devices() (in a notebook: restart the kernel first), or start Python with
  XLA_FLAGS=--xla_force_host_platform_device_count={n}"""


def simulate(n: int) -> None:
    """Configures n virtual CPU devices for this process, also on a machine with a GPU.

    Call it before JAX starts: right after the imports. The devices share the CPU cores, so they show that
    a program is correct, not how fast it is on n real devices. It does not start JAX: in a job of several
    processes each gets n devices, and connects to the others when its ``MultiWorkerMirroredStrategy`` is
    made. Setting ``XLA_FLAGS=--xla_force_host_platform_device_count=n`` before Python starts works as well.

    Args:
        n: the number of devices, at least 1.

    Raises:
        ValueError: n is not an int from 1 to 65535.
        RuntimeError: JAX has already started with other devices; the message says what to do.

    Example:
        >>> import distribute_jax as dj
        >>> dj.simulate(8)  # doctest: +SKIP
    """
    n = check_int("n", n, below=1 << 16)
    os.environ["NPROC"] = pool_threads(n, os.environ)
    try:
        jax.config.update("jax_num_cpu_devices", n)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:  # JAX has started
        devices = jax.devices()
        kind = devices[0].platform
        if (len(devices), kind) != (n, "cpu"):
            text = _STARTED.format(n=n, count=len(devices), kind=kind.upper())
            raise BackendStartedError(text) from None
