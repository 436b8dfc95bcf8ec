"""Cluster resolvers: which processes a job has, which one this is, and how they reach each other.

One file for each kind of cluster, as in ``tf.distribute.cluster_resolver``, with the launchers that
JAX users have. ``_base`` holds the base class, ``_spec`` the jobs and addresses of a cluster,
``_detect`` the order in which ``detect()`` tries the resolvers, ``_http`` the requests to services.
"""

from typing import TYPE_CHECKING

from distribute_jax._lazy import lazy_exports

# What looks for a cluster, and the requests of remote services with it, is loaded when it is asked for.
if TYPE_CHECKING:
    from distribute_jax.cluster_resolver._base import ClusterResolver as ClusterResolver
    from distribute_jax.cluster_resolver._detect import detect as detect
    from distribute_jax.cluster_resolver._gce import GCEClusterResolver as GCEClusterResolver
    from distribute_jax.cluster_resolver._http import KubernetesClient as KubernetesClient
    from distribute_jax.cluster_resolver._kubernetes import (
        KubernetesClusterResolver as KubernetesClusterResolver,
        KubernetesExecutableLocation as KubernetesExecutableLocation,
    )
    from distribute_jax.cluster_resolver._launched import (
        LaunchedClusterResolver as LaunchedClusterResolver,
    )
    from distribute_jax.cluster_resolver._open_mpi import (
        OpenMPIClusterResolver as OpenMPIClusterResolver,
    )
    from distribute_jax.cluster_resolver._sage_maker import (
        SageMakerClusterResolver as SageMakerClusterResolver,
    )
    from distribute_jax.cluster_resolver._simple import (
        SimpleClusterResolver as SimpleClusterResolver,
        UnionResolver as UnionResolver,
    )
    from distribute_jax.cluster_resolver._slurm import SlurmClusterResolver as SlurmClusterResolver
    from distribute_jax.cluster_resolver._spec import ClusterSpec as ClusterSpec
    from distribute_jax.cluster_resolver._tf_config import (
        TFConfigClusterResolver as TFConfigClusterResolver,
    )
    from distribute_jax.cluster_resolver._torchrun import (
        TorchrunClusterResolver as TorchrunClusterResolver,
    )
    from distribute_jax.cluster_resolver._tpu import (
        TPUClusterResolver as TPUClusterResolver,
        TPUSystemMetadata as TPUSystemMetadata,
    )
else:
    __getattr__ = lazy_exports(
        globals(),
        {
            "_detect": ("detect",),
            "_gce": ("GCEClusterResolver",),
            "_kubernetes": ("KubernetesClusterResolver", "KubernetesExecutableLocation"),
            "_http": ("KubernetesClient",),
            "_launched": ("LaunchedClusterResolver",),
            "_open_mpi": ("OpenMPIClusterResolver",),
            "_base": ("ClusterResolver",),
            "_sage_maker": ("SageMakerClusterResolver",),
            "_simple": ("SimpleClusterResolver", "UnionResolver"),
            "_slurm": ("SlurmClusterResolver",),
            "_spec": ("ClusterSpec",),
            "_tf_config": ("TFConfigClusterResolver",),
            "_torchrun": ("TorchrunClusterResolver",),
            "_tpu": ("TPUClusterResolver", "TPUSystemMetadata"),
        },
    )

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "GCEClusterResolver",
    "KubernetesClient",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "LaunchedClusterResolver",
    "OpenMPIClusterResolver",
    "SageMakerClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "TPUSystemMetadata",
    "TorchrunClusterResolver",
    "UnionResolver",
    "detect",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
