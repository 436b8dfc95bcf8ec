"""``detect()``: the resolver that fits the environment of this process."""

from __future__ import annotations

import os

from distribute_jax._errors import NoClusterError
from distribute_jax.cluster_resolver._base import ClusterResolver
from distribute_jax.cluster_resolver._kubernetes import KubernetesClusterResolver
from distribute_jax.cluster_resolver._launchers import (
    LaunchedClusterResolver,
    OpenMPIClusterResolver,
    TorchrunClusterResolver,
)
from distribute_jax.cluster_resolver._sage_maker import SageMakerClusterResolver
from distribute_jax.cluster_resolver._slurm import SlurmClusterResolver
from distribute_jax.cluster_resolver._tf_config import TFConfigClusterResolver
from distribute_jax.cluster_resolver._tpu import TPUClusterResolver

# Our launcher comes first: it removes TF_CONFIG from its processes, so one that is set describes another job.
# Then what the user wrote, then the launcher that started this process, then the platform below it: mpirun
# and torchrun run inside Slurm steps, and Google's TPU pods inside Kubernetes Jobs.
ORDER: tuple[type[ClusterResolver], ...] = (
    LaunchedClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
    OpenMPIClusterResolver,
    SlurmClusterResolver,
    SageMakerClusterResolver,
    TPUClusterResolver,
    KubernetesClusterResolver,
)

_LOOKS_FOR = {
    LaunchedClusterResolver: "the variables DISTRIBUTE_JAX_… of distribute-jax launch",
    TFConfigClusterResolver: "TF_CONFIG with a cluster",
    TPUClusterResolver: "TPU_WORKER_HOSTNAMES and TPU_WORKER_ID, or the chips of a TPU VM and libtpu",
}
"""What resolvers look for, if it is not just their ``variables``."""


def detect() -> ClusterResolver:
    """Returns the resolver of the cluster that this process was started in.

    The first of these that is present is used: ``distribute-jax launch``, ``TF_CONFIG``, torchrun, Open MPI,
    Slurm, SageMaker, a TPU, an Indexed Job of Kubernetes. What the user wrote comes before the launcher, and
    the launcher before the platform it runs on. No request is made. A malformed description is an error; it
    is not skipped.

    JAX detects Open MPI, Slurm, TPUs and Kubernetes too, but only inside ``jax.distributed.initialize``, and
    neither TF_CONFIG nor torchrun. Ports for Slurm, Open MPI and TPUs are the same as JAX's; under Open MPI 5
    JAX finds rank 0 (``detection_method``).

    Raises:
        NoClusterError: no cluster is present; the message lists what was looked for. A ``RuntimeError``.

    Example:
        >>> import distribute_jax as dj
        >>> try:
        ...     resolver = dj.cluster_resolver.detect()
        ... except dj.NoClusterError:
        ...     resolver = None  # this process is alone
    """
    for resolver in ORDER:
        if resolver.is_present():
            return resolver()
    raise NoClusterError(
        "No cluster was detected. Looked for, in this order:\n"
        + "\n".join(f"  {resolver.__name__}: {_looked_for(resolver)}" for resolver in ORDER)
        + "\nStart the program with one of these, or describe the cluster: dj.cluster_resolver."
        "SimpleClusterResolver(dj.cluster_resolver.ClusterSpec({'worker': ['host0:2222', 'host1:2222']}), "
        "task_type='worker', task_id=0)."
    )


def _looked_for(resolver: type[ClusterResolver]) -> str:
    if resolver in _LOOKS_FOR:
        return _LOOKS_FOR[resolver]
    present = [name for name in resolver.variables if name in os.environ]
    missing = [name for name in resolver.variables if name not in os.environ]
    text = " and ".join(resolver.variables)
    return f"{text} (found {', '.join(present)}; missing {', '.join(missing)})" if present else text
