"""The pods of a Kubernetes Job or JobSet, or those that labels select.

The pods of a Job ``train`` whose template has the subdomain ``pods`` have the names ``train-0.pods``,
``train-1.pods``, …; those of a JobSet ``big`` with the replicated job ``slice`` ``big-slice-0-0.big``,
where the first number is the Job's and the second the pod's. JOB_COMPLETION_INDEX is the number of this pod.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from distribute_jax._checks import as_member, importing
from distribute_jax._errors import ClusterError, ServiceError
from distribute_jax.cluster_resolver._base import WORKER, ClusterResolver, ClusterSpec, host_port
from distribute_jax.cluster_resolver._gce import retry_policy

INDEX = "JOB_COMPLETION_INDEX"
NUM_PROCESSES = "NUM_PROCESSES"
COORDINATOR = "COORDINATOR_ADDRESS"
NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

_LABELS = {WORKER: ["job-name=tensorflow"]}
_JOB_SET = "jobset.sigs.k8s.io/"
_SECONDS = 10.0
_RIGHTS = (
    "The service account of the pod needs a Role with the verbs get and list on pods and jobs."
)


class KubernetesExecutableLocation(enum.Enum):
    """Whether the program runs in a pod or outside the cluster.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/KubernetesClusterResolver
    """

    WITHIN_CLUSTER = 0
    """In a pod: the API is asked with the pod's service account."""
    OFF_CLUSTER = 1
    """Elsewhere: the API is asked as the kubeconfig file says."""


class KubernetesClusterResolver(ClusterResolver):
    """The pods of a Kubernetes job.

    In a pod of an Indexed Job or JobSet, unless ``job_to_label_mapping`` or ``override_client`` is passed,
    the cluster is that Job's pods, with the indices that Kubernetes gives them, slice by slice. If the
    manifest sets ``NUM_PROCESSES`` and ``COORDINATOR_ADDRESS``, no request is made and only the first address
    is known; otherwise the Job is read from the API, through the package ``kubernetes``.

    Elsewhere pods are selected by label and sorted by name; all must be running. A pod finds its task by its
    name; outside the cluster set ``task_type`` and ``task_id``.

    Args:
        job_to_label_mapping: the label selectors of the pods of each job;
            ``{"worker": ["job-name=tensorflow"]}`` if None.
        tf_server_port: the port of every task.
        rpc_layer: put in front of addresses.
        override_client: an object with ``list_pod_for_all_namespaces`` such as
            ``kubernetes.client.CoreV1Api()``.
        executable_location: a ``KubernetesExecutableLocation``.

    Raises:
        ArgumentError: ``executable_location`` is not a ``KubernetesExecutableLocation``.
        ClusterError: at a call: the API does not answer, or a pod does not run; a ``RuntimeError``.
        MissingPackageError: at a call: the API is needed and the package ``kubernetes`` is not installed.

    Example:
        >>> import distribute_jax as dj, os
        >>> pod = {
        ...     "JOB_COMPLETION_INDEX": "3",
        ...     "NUM_PROCESSES": "4",
        ...     "COORDINATOR_ADDRESS": "train-0.pods:8476",
        ... }
        >>> os.environ.update(pod)
        >>> resolver = dj.cluster_resolver.KubernetesClusterResolver()
        >>> resolver.num_processes, resolver.process_id, resolver.coordinator_address
        (4, 3, 'train-0.pods:8476')

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/KubernetesClusterResolver
    """

    variables: ClassVar[tuple[str, ...]] = ("KUBERNETES_SERVICE_HOST", INDEX)
    _hint = "Kubernetes sets it in the pods of a Job with completionMode: Indexed."

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation = KubernetesExecutableLocation.WITHIN_CLUSTER,
    ) -> None:
        location = as_member(
            "executable_location", executable_location, KubernetesExecutableLocation
        )
        self._selectors = job_to_label_mapping or _LABELS
        self._port = tf_server_port
        self._rpc_layer = rpc_layer
        self._client = override_client
        self._is_off_cluster = location is KubernetesExecutableLocation.OFF_CLUSTER
        self._may_be_indexed = not (
            job_to_label_mapping or override_client is not None or self._is_off_cluster
        )

    def cluster_spec(self) -> ClusterSpec:
        """Returns the pods as they are now."""
        if self._is_indexed():
            return ClusterSpec({WORKER: self._indexed()[0]})
        return ClusterSpec({job: [ip for _, ip in self._pods(job)] for job in self._selectors})

    def _default_task(self) -> tuple[str | None, int | None]:
        return None, None

    def _detected_task(self) -> tuple[str | None, int | None]:
        if self._is_indexed():
            return WORKER, self._indexed()[1]
        name = os.environ.get("HOSTNAME")
        for job in self._selectors if name else ():
            names = [pod for pod, _ in self._pods(job)]
            if name in names:
                return job, names.index(name)
        return None, None

    def _is_indexed(self) -> bool:
        return self._may_be_indexed and INDEX in os.environ

    def _indexed(self) -> tuple[list[str], int]:
        """Returns the addresses of the pods of the Job, and the index of this pod."""
        if not {NUM_PROCESSES, COORDINATOR} <= os.environ.keys():
            return self._from_job()
        rank_name = "PROCESS_ID" if "PROCESS_ID" in os.environ else INDEX
        rank, size = self._rank_and_size(rank_name, NUM_PROCESSES)
        first = os.environ[COORDINATOR]
        first = first if ":" in first else f"{first}:{self._port}"
        return [first, *[""] * (size - 1)], rank

    def _from_job(self) -> tuple[list[str], int]:
        index, host = self._number(INDEX), self._variable("HOSTNAME")
        name = host.removesuffix(f"-{index}")
        if name == host:
            raise ClusterError(
                f"KubernetesClusterResolver: HOSTNAME={host!r} does not end in -{index}, the pod's number, "
                "so the name of its Job is not known. Do not set hostname in the template, or set "
                f"{NUM_PROCESSES} and {COORDINATOR} in it."
            )
        job = self._ask("BatchV1Api", "read_namespaced_job", name, _namespace() or "default")
        pods = job.spec.completions or job.spec.parallelism or 1
        subdomain = job.spec.template.spec.subdomain
        _check_job(name, pods, job.spec.parallelism or 1, subdomain)
        labels = job.metadata.labels or {}
        if f"{_JOB_SET}job-index" in labels:
            number = int(labels[f"{_JOB_SET}job-index"])
            jobs = int(labels.get(f"{_JOB_SET}replicatedjob-replicas", 1))
            stem = name.removesuffix(f"-{number}")
            hosts = [f"{stem}-{job}-{pod}" for job in range(jobs) for pod in range(pods)]
        else:
            number, hosts = 0, [f"{name}-{pod}" for pod in range(pods)]
        return [f"{host}.{subdomain}:{self._port}" for host in hosts], number * pods + index

    def _pods(self, job: str) -> list[tuple[str, str]]:
        """Returns name and address of each pod of a job, sorted by name."""
        pods = {}
        for selector in self._selectors[job]:
            for pod in self._list(selector).items:
                pods[pod.metadata.name] = host_port(_running_ip(pod), self._port)
        if not pods:
            raise ClusterError(
                f"KubernetesClusterResolver: no pod of the job {job!r} has the labels "
                f"{list(self._selectors[job])}. Pass job_to_label_mapping={{{job!r}: ['job-name=…']}}."
            )
        return sorted(pods.items())

    def _list(self, selector: str) -> Any:
        if self._client is not None:
            return self._client.list_pod_for_all_namespaces(label_selector=selector)
        namespace = "" if self._is_off_cluster else _namespace()
        if namespace:  # service accounts are seldom allowed to list the pods of all namespaces
            return self._ask("CoreV1Api", "list_namespaced_pod", namespace, label_selector=selector)
        return self._ask("CoreV1Api", "list_pod_for_all_namespaces", label_selector=selector)

    def _ask(self, api: str, method: str, *args: str, **options: str) -> Any:
        """Calls a method of the package ``kubernetes``, with the pod's account or the kubeconfig file."""
        needs = "For requests to the API KubernetesClusterResolver needs the package kubernetes"
        with importing(needs, "kubernetes", f", or set {NUM_PROCESSES} and {COORDINATOR}"):
            from kubernetes import client, config
            from urllib3.exceptions import HTTPError
        configuration = client.Configuration()
        try:
            if self._is_off_cluster:
                config.load_kube_config(client_configuration=configuration)
            else:
                config.load_incluster_config(configuration)
        except config.ConfigException as error:
            raise ClusterError(
                f"KubernetesClusterResolver: {error} Outside of a pod pass executable_location="
                "KubernetesExecutableLocation.OFF_CLUSTER, or an override_client."
            ) from None
        configuration.retries = retry_policy()
        service = getattr(client, api)(client.ApiClient(configuration))
        call: Callable[..., Any] = getattr(service, method)
        try:
            return call(*args, _request_timeout=_SECONDS, **options)
        except client.ApiException as error:
            raise ServiceError(
                f"The Kubernetes API: {method}{args} answered {error.status} {error.reason}. {_RIGHTS}",
                error.status,
            ) from None
        except HTTPError as error:
            raise ServiceError(
                f"The Kubernetes API: no answer from {configuration.host} within {_SECONDS:g} s "
                f"({type(error).__name__}: {error})."
            ) from None


def _namespace() -> str:
    return NAMESPACE.read_text(encoding="utf-8").strip() if NAMESPACE.is_file() else ""


def _running_ip(pod: Any) -> str:
    name, phase, ip = pod.metadata.name, pod.status.phase, pod.status.pod_ip
    if phase == "Running" and ip:
        return str(ip)
    raise ClusterError(
        f'KubernetesClusterResolver: Pod "{name}" is not running; phase: "{phase}", address: {ip}. All must '
        "run; wait for it (kubectl wait), or select the pods by labels that the finished ones lack."
    )


def _check_job(name: str, pods: int, parallelism: int, subdomain: str | None) -> None:
    text = f"KubernetesClusterResolver: the Job {name!r}"
    if pods != parallelism:
        raise ClusterError(
            f"{text} has {pods} completions and runs {parallelism} at a time, so its pods never all run at "
            "once. Set spec.parallelism to spec.completions."
        )
    if not subdomain:
        raise ClusterError(
            f"{text} does not give its pods names that the others can resolve. Add a headless Service "
            f"(clusterIP: None, selector job-name: {name}) and name it in spec.template.spec.subdomain; "
            "a JobSet does both by itself."
        )
