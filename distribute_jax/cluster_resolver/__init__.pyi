"""The public names; ``__init__.py`` reads here from which part to import each on first access."""

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

def detect() -> ClusterResolver: ...
