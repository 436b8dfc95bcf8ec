"""Cluster resolvers: which processes a job has, which one this is, and how they reach each other.

One file for each kind of cluster, as in ``tf.distribute.cluster_resolver``, and ``_launchers`` for torchrun,
Open MPI, SageMaker and our own launcher. ``_base`` has the base class, and the jobs and addresses of a
cluster; ``_gce`` the requests to Google's services.
"""

import os

from distribute_jax import _errors
from distribute_jax._lazy import public_names, publish
from distribute_jax.cluster_resolver._base import (
    ClusterResolver as ClusterResolver,
    ClusterSpec as ClusterSpec,
)
from distribute_jax.cluster_resolver._gce import GCEClusterResolver as GCEClusterResolver
from distribute_jax.cluster_resolver._kubernetes import (
    KubernetesClusterResolver as KubernetesClusterResolver,
    KubernetesExecutableLocation as KubernetesExecutableLocation,
)
from distribute_jax.cluster_resolver._launchers import (
    LaunchedClusterResolver as LaunchedClusterResolver,
    OpenMPIClusterResolver as OpenMPIClusterResolver,
    SageMakerClusterResolver as SageMakerClusterResolver,
    TorchrunClusterResolver as TorchrunClusterResolver,
)
from distribute_jax.cluster_resolver._simple import (
    SimpleClusterResolver as SimpleClusterResolver,
    UnionResolver as UnionResolver,
)
from distribute_jax.cluster_resolver._slurm import SlurmClusterResolver as SlurmClusterResolver
from distribute_jax.cluster_resolver._tf_config import (
    TFConfigClusterResolver as TFConfigClusterResolver,
)
from distribute_jax.cluster_resolver._tpu import (
    TPUClusterResolver as TPUClusterResolver,
    TPUSystemMetadata as TPUSystemMetadata,
)

# Our launcher comes first: it removes TF_CONFIG from its processes, so one that is set describes another job.
# Then what the user wrote, then the launcher that started this process, then the platform below it: mpirun
# and torchrun run inside Slurm steps, and Google's TPU pods inside Kubernetes Jobs.
_ORDER: tuple[type[ClusterResolver], ...] = (
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
    for resolver in _ORDER:
        if resolver.is_present():
            return resolver()
    raise _errors.NoClusterError(
        "No cluster was detected. Looked for, in this order:\n"
        + "\n".join(f"  {resolver.__name__}: {_looked_for(resolver)}" for resolver in _ORDER)
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


__all__ = public_names(globals())

publish(globals(), __all__, "distribute_jax.cluster_resolver")
