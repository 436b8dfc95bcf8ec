"""Cluster resolvers: which processes a job has, which one this is, and how they reach each other.

One file for each kind of cluster, as in ``tf.distribute.cluster_resolver``, and ``_launchers`` for torchrun,
Open MPI and our own launcher. ``_base`` has the base class, ``_spec`` the jobs and addresses of a cluster,
``_detect`` the order of detection, ``_http`` the requests to Google's services.
"""

from distribute_jax._lazy import public_names, publish
from distribute_jax.cluster_resolver._base import ClusterResolver as ClusterResolver
from distribute_jax.cluster_resolver._detect import detect as detect
from distribute_jax.cluster_resolver._gce import GCEClusterResolver as GCEClusterResolver
from distribute_jax.cluster_resolver._kubernetes import (
    KubernetesClusterResolver as KubernetesClusterResolver,
    KubernetesExecutableLocation as KubernetesExecutableLocation,
)
from distribute_jax.cluster_resolver._launchers import (
    LaunchedClusterResolver as LaunchedClusterResolver,
    OpenMPIClusterResolver as OpenMPIClusterResolver,
    TorchrunClusterResolver as TorchrunClusterResolver,
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
from distribute_jax.cluster_resolver._tpu import (
    TPUClusterResolver as TPUClusterResolver,
    TPUSystemMetadata as TPUSystemMetadata,
)

__all__ = public_names(globals())

publish(globals(), __all__, "distribute_jax.cluster_resolver")
