"""Which resolver fits the environment of this process."""

from __future__ import annotations

import os

from distribute_jax._errors import NoClusterError
from distribute_jax.cluster_resolver._base import ClusterResolver
from distribute_jax.cluster_resolver._kubernetes import KubernetesClusterResolver
from distribute_jax.cluster_resolver._launched import LaunchedClusterResolver
from distribute_jax.cluster_resolver._open_mpi import OpenMPIClusterResolver
from distribute_jax.cluster_resolver._sage_maker import SageMakerClusterResolver
from distribute_jax.cluster_resolver._slurm import SlurmClusterResolver
from distribute_jax.cluster_resolver._tf_config import TFConfigClusterResolver
from distribute_jax.cluster_resolver._torchrun import TorchrunClusterResolver
from distribute_jax.cluster_resolver._tpu import TPUClusterResolver

# Our own launcher comes first, since it takes TF_CONFIG away from its processes: one that is there describes
# another job. Then what the user wrote, then the launcher that started this process, then the platform under
# it: mpirun and torchrun run inside Slurm steps, and Google's TPU pods inside Kubernetes Jobs.
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
"""Where it is something else than the variables of a resolver."""


def detect() -> ClusterResolver:
    """Returns the resolver of the cluster that this process was started in.

    Looked for are, in this order: ``distribute-jax launch``, ``TF_CONFIG``, torchrun, Open MPI, Slurm,
    SageMaker, a TPU, and an Indexed Job of Kubernetes; the first that is there is taken. What the user wrote
    comes before the launcher, and the launcher before the platform it runs on. No network is used to find
    out. A cluster that is there and described wrongly is an error, never passed over.

    JAX detects Open MPI, Slurm, TPUs and Kubernetes as well, but only inside ``jax.distributed.initialize``,
    without TF_CONFIG and torchrun, and without a list of what it looked for. It is asked the one question
    that it answers better: where rank 0 is under Open MPI 5 (``detection_method``). The ports for Slurm,
    Open MPI and TPUs are those that it would take.

    Returns:
        A resolver made without arguments.

    Raises:
        NoClusterError: none is there; the message lists what was looked for. A ``RuntimeError``.

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
        "No cluster was found around this process. Looked for, in this order:\n"
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
