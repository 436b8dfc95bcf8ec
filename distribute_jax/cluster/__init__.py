"""How many processes there are, which one this is, and where they meet: one file for each kind of cluster.

``_resolver`` holds the questions, ``_spec`` the answer to most of them, ``_detect`` the order in which the
surroundings are looked at; ``_http`` asks remote services. Users find the names in ``dj.cluster_resolver``.
"""

from typing import TYPE_CHECKING

from distribute_jax._later import load_later
from distribute_jax.cluster._status import report_step as report_step

# What looks for a cluster, and the requests of remote services with it, is loaded when it is asked for.
if TYPE_CHECKING:
    from distribute_jax.cluster._detect import detect as detect
    from distribute_jax.cluster._gce import GCEClusterResolver as GCEClusterResolver
    from distribute_jax.cluster._kubernetes import (
        KubernetesClusterResolver as KubernetesClusterResolver,
        KubernetesExecutableLocation as KubernetesExecutableLocation,
    )
    from distribute_jax.cluster._kubernetes_client import KubernetesClient as KubernetesClient
    from distribute_jax.cluster._launched import (
        LaunchedClusterResolver as LaunchedClusterResolver,
    )
    from distribute_jax.cluster._open_mpi import OpenMPIClusterResolver as OpenMPIClusterResolver
    from distribute_jax.cluster._resolver import ClusterResolver as ClusterResolver
    from distribute_jax.cluster._sage_maker import (
        SageMakerClusterResolver as SageMakerClusterResolver,
    )
    from distribute_jax.cluster._simple import SimpleClusterResolver as SimpleClusterResolver
    from distribute_jax.cluster._slurm import SlurmClusterResolver as SlurmClusterResolver
    from distribute_jax.cluster._spec import ClusterSpec as ClusterSpec
    from distribute_jax.cluster._tf_config import TFConfigClusterResolver as TFConfigClusterResolver
    from distribute_jax.cluster._torchrun import TorchrunClusterResolver as TorchrunClusterResolver
    from distribute_jax.cluster._tpu import (
        TPUClusterResolver as TPUClusterResolver,
        TPUSystemMetadata as TPUSystemMetadata,
    )
    from distribute_jax.cluster._union import UnionResolver as UnionResolver
else:
    __getattr__ = load_later(
        globals(),
        {
            "_detect": ("detect",),
            "_gce": ("GCEClusterResolver",),
            "_kubernetes": (
                "KubernetesClusterResolver",
                "KubernetesExecutableLocation",
            ),
            "_kubernetes_client": ("KubernetesClient",),
            "_launched": ("LaunchedClusterResolver",),
            "_open_mpi": ("OpenMPIClusterResolver",),
            "_resolver": ("ClusterResolver",),
            "_sage_maker": ("SageMakerClusterResolver",),
            "_simple": ("SimpleClusterResolver",),
            "_slurm": ("SlurmClusterResolver",),
            "_spec": ("ClusterSpec",),
            "_tf_config": ("TFConfigClusterResolver",),
            "_torchrun": ("TorchrunClusterResolver",),
            "_tpu": (
                "TPUClusterResolver",
                "TPUSystemMetadata",
            ),
            "_union": ("UnionResolver",),
        },
        public="distribute_jax.cluster_resolver",
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
    "report_step",
]
