"""Cluster resolvers: which processes a job has, which one this is, and how they reach each other.

One file for each kind of cluster, as in ``tf.distribute.cluster_resolver``, and ``_launchers`` for those
that JAX users have. ``_base`` holds the base class, ``_spec`` the jobs and addresses of a cluster,
``_detect`` the order in which ``detect()`` tries the resolvers, ``_http`` the requests to Google's services.
"""

from distribute_jax._lazy import publish
from distribute_jax.cluster_resolver._base import ClusterResolver
from distribute_jax.cluster_resolver._detect import detect
from distribute_jax.cluster_resolver._gce import GCEClusterResolver
from distribute_jax.cluster_resolver._kubernetes import (
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
)
from distribute_jax.cluster_resolver._launchers import (
    LaunchedClusterResolver,
    OpenMPIClusterResolver,
    TorchrunClusterResolver,
)
from distribute_jax.cluster_resolver._sage_maker import SageMakerClusterResolver
from distribute_jax.cluster_resolver._simple import SimpleClusterResolver, UnionResolver
from distribute_jax.cluster_resolver._slurm import SlurmClusterResolver
from distribute_jax.cluster_resolver._spec import ClusterSpec
from distribute_jax.cluster_resolver._tf_config import TFConfigClusterResolver
from distribute_jax.cluster_resolver._tpu import TPUClusterResolver, TPUSystemMetadata

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "GCEClusterResolver",
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

publish(globals(), __all__, "distribute_jax.cluster_resolver")
