"""Cluster resolvers: which processes a job has, which one this is, and how they reach each other.

One file for each kind of cluster, as in ``tf.distribute.cluster_resolver``, and ``_launchers`` for torchrun,
Open MPI, SageMaker and our own launcher. ``_base`` has the base class, and the jobs and addresses of a
cluster; ``_gce`` the requests to Google's services.
"""

import os

from distribute_jax import _errors
from distribute_jax._lazy import lazy_exports, names_in_stub, publish
from distribute_jax.cluster_resolver._base import ClusterResolver as ClusterResolver

_names = names_in_stub(__file__)
__all__ = sorted(["detect", *(name for names in _names.values() for name in names)])

# A program without a cluster needs no resolver: each is imported on first access.
__getattr__ = lazy_exports(globals(), _names)

# Our launcher comes first: it removes TF_CONFIG from its processes, so one that is set describes another job.
# Then what the user wrote, then the launcher that started this process, then the platform below it: mpirun
# and torchrun run inside Slurm steps, and Google's TPU pods inside Kubernetes Jobs.
_ORDER = (
    "LaunchedClusterResolver",
    "TFConfigClusterResolver",
    "TorchrunClusterResolver",
    "OpenMPIClusterResolver",
    "SlurmClusterResolver",
    "SageMakerClusterResolver",
    "TPUClusterResolver",
    "KubernetesClusterResolver",
)

_LOOKS_FOR = {
    "LaunchedClusterResolver": "the variables DISTRIBUTE_JAX_… of distribute-jax launch",
    "TFConfigClusterResolver": "TF_CONFIG with a cluster",
    "TPUClusterResolver": "TPU_WORKER_HOSTNAMES and TPU_WORKER_ID, or the chips of a TPU VM and libtpu",
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
    resolvers = [__getattr__(name) for name in _ORDER]
    for resolver in resolvers:
        if resolver.is_present():
            return resolver()
    raise _errors.NoClusterError(
        "No cluster was detected. Looked for, in this order:\n"
        + "\n".join(f"  {resolver.__name__}: {_looked_for(resolver)}" for resolver in resolvers)
        + "\nStart the program with one of these, or describe the cluster: dj.cluster_resolver."
        "SimpleClusterResolver(dj.cluster_resolver.ClusterSpec({'worker': ['host0:2222', 'host1:2222']}), "
        "task_type='worker', task_id=0)."
    )


def _looked_for(resolver: type[ClusterResolver]) -> str:
    if resolver.__name__ in _LOOKS_FOR:
        return _LOOKS_FOR[resolver.__name__]
    present = [name for name in resolver.variables if name in os.environ]
    missing = [name for name in resolver.variables if name not in os.environ]
    text = " and ".join(resolver.variables)
    return f"{text} (found {', '.join(present)}; missing {', '.join(missing)})" if present else text


publish(globals(), ["ClusterResolver", "detect"], "distribute_jax.cluster_resolver")
