"""Resolves the pods of a Kubernetes job.

The pods of a Job ``train`` whose template has the subdomain ``pods`` are met at ``train-0.pods``,
``train-1.pods``, …; those of a JobSet ``big`` with the replicated job ``slice`` at
``big-slice-0-0.big``, where the first number is the Job's and the second the pod's. Each knows its own
number by JOB_COMPLETION_INDEX.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from distribute_jax._errors import ArgumentError, ClusterError, MissingPackageError
from distribute_jax.cluster_resolver._base import (
    WORKER,
    ClusterResolver,
    Ranks,
    check_rank,
    number_of,
    value_of,
    with_layer,
)
from distribute_jax.cluster_resolver._http import SERVICE_HOST, KubernetesClient
from distribute_jax.cluster_resolver._spec import ClusterSpec

_LABELS = {WORKER: ["job-name=tensorflow"]}


class KubernetesExecutableLocation(enum.Enum):
    """Where the program runs that asks for the pods.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/KubernetesClusterResolver
    """

    WITHIN_CLUSTER = 0
    """In a pod: the API is asked with the pod's service account."""
    OFF_CLUSTER = 1
    """Elsewhere: the API is asked as the kubeconfig file says, through the package ``kubernetes``."""


INDEX = "JOB_COMPLETION_INDEX"


class KubernetesClusterResolver(ClusterResolver):
    """The pods of a Kubernetes job.

    In a pod of an Indexed Job or of a JobSet, and without ``job_to_label_mapping``, the pods are those of the
    Job, numbered as Kubernetes numbers them, slice by slice. If the manifest sets ``NUM_PROCESSES`` and
    ``COORDINATOR_ADDRESS`` nothing is asked (and only the first address is known); otherwise the API is asked
    once for the Job.

    Otherwise the pods are found by their labels, sorted by name, at their own addresses; all must be running.
    A pod finds its own task by its name; elsewhere set ``task_type`` and ``task_id``.

    Args:
        job_to_label_mapping: the label selectors of the pods of each job;
            ``{"worker": ["job-name=tensorflow"]}`` if None.
        tf_server_port: the port of every task.
        rpc_layer: put in front of addresses.
        override_client: a ``KubernetesClient``, or an object with ``list_pod_for_all_namespaces`` such as
            ``kubernetes.client.CoreV1Api()``.
        executable_location: a ``KubernetesExecutableLocation``.

    Raises:
        ArgumentError: a client is given and the location says to make another.
        ClusterError: at a call: the API does not answer, or a pod does not run; a ``RuntimeError``.
        MissingPackageError: at a call: off the cluster, without the package ``kubernetes``.

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
        >>> for name in pod:
        ...     del os.environ[name]

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/KubernetesClusterResolver
    """

    variables: ClassVar[tuple[str, ...]] = (SERVICE_HOST, INDEX)

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation = KubernetesExecutableLocation.WITHIN_CLUSTER,
    ) -> None:
        if not isinstance(executable_location, KubernetesExecutableLocation):
            raise ArgumentError(
                f"KubernetesClusterResolver(executable_location={executable_location!r}): pass "
                "KubernetesExecutableLocation.WITHIN_CLUSTER or OFF_CLUSTER."
            )
        self._mapping = job_to_label_mapping
        self._port = tf_server_port
        self._rpc_layer = rpc_layer
        self._given_client = override_client
        self._location = executable_location

    def cluster_spec(self) -> ClusterSpec:
        """See ``ClusterResolver.cluster_spec``: the pods as they are now."""
        if not self._is_indexed():
            return ClusterSpec({job: [a for _, a in self._pods(job)] for job in self._selectors()})
        ranks = from_environment(self._port)
        return ranks.spec() if ranks else ClusterSpec({WORKER: self._indexed()[0]})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """See ``ClusterResolver.master``: empty where no task is named."""
        if task_type is None or task_id is None:
            return ""
        address = self.cluster_spec().task_address(task_type, task_id)
        return with_layer(address, rpc_layer or self._rpc_layer)

    def _is_indexed(self) -> bool:
        own = self._given_client is None or isinstance(self._given_client, KubernetesClient)
        within = self._location is KubernetesExecutableLocation.WITHIN_CLUSTER
        return not self._mapping and own and within and INDEX in os.environ

    def _indexed(self) -> tuple[list[str], int]:
        return from_api(self._given_client or KubernetesClient(), self._port)

    def _found_task_type(self) -> str | None:
        return self._found_task()[0]

    def _found_task_id(self) -> int | None:
        return self._found_task()[1]

    def _found_task(self) -> tuple[str | None, int | None]:
        """Finds this pod among those of the job, or by its name among those with the labels."""
        if self._is_indexed():
            ranks = from_environment(self._port)
            return WORKER, ranks.rank if ranks else self._indexed()[1]
        own = os.environ.get(HOSTNAME)
        for job in self._selectors() if own else {}:
            names = [name for name, _ in self._pods(job)]
            if own in names:
                return job, names.index(own)
        return None, None

    def _selectors(self) -> Mapping[str, Sequence[str]]:
        return self._mapping or _LABELS

    def _pods(self, job: str) -> list[tuple[str, str]]:
        """Gives name and address of each pod of a job, sorted by name."""
        client = self._client()
        found = {}
        for selector in self._selectors()[job]:
            for pod in client.list_pod_for_all_namespaces(label_selector=selector).items:
                found[pod.metadata.name] = f"{_running_ip(pod)}:{self._port}"
        if not found:
            raise ClusterError(
                f"KubernetesClusterResolver: no pod of the job {job!r} has the labels "
                f"{list(self._selectors()[job])}. Pass job_to_label_mapping={{{job!r}: ['job-name=…']}}."
            )
        return sorted(found.items())

    def _client(self) -> Any:
        if self._given_client is not None:
            return self._given_client
        if self._location is KubernetesExecutableLocation.WITHIN_CLUSTER:
            return KubernetesClient()
        try:
            from kubernetes import client, config
        except ImportError as error:
            raise MissingPackageError(
                "KubernetesClusterResolver(executable_location=OFF_CLUSTER) reads the kubeconfig "
                "file through the package kubernetes: pip install kubernetes. Or run `kubectl proxy` "
                "and pass "
                "override_client=dj.cluster_resolver.KubernetesClient('http://127.0.0.1:8001', "
                "namespace='default')."
            ) from error
        config.load_kube_config()
        return client.CoreV1Api()


def _running_ip(pod: Any) -> str:
    name, phase, ip = pod.metadata.name, pod.status.phase, pod.status.pod_ip
    if phase != "Running":
        raise ClusterError(
            f'KubernetesClusterResolver: Pod "{name}" is not running; phase: "{phase}". All must run; '
            "wait for it "
            "(kubectl wait), or select the pods by labels that the finished ones lack."
        )
    if not ip:
        raise ClusterError(
            f'KubernetesClusterResolver: Pod "{name}" is running and has no address yet.'
        )
    return str(ip)


HOSTNAME = "HOSTNAME"
NUM_PROCESSES = "NUM_PROCESSES"
PROCESS_ID = "PROCESS_ID"
COORDINATOR = "COORDINATOR_ADDRESS"

_NAME = "KubernetesClusterResolver"
_HINT = "Kubernetes sets it in the pods of a Job with completionMode: Indexed."
_LABEL = "jobset.sigs.k8s.io/"


def from_environment(port: int) -> Ranks | None:
    """Gives the pods if the manifest says how many there are and where the first is, otherwise None."""
    if not {NUM_PROCESSES, COORDINATOR} <= os.environ.keys():
        return None
    own = PROCESS_ID if PROCESS_ID in os.environ else INDEX
    rank, size = (number_of(name, _NAME, _HINT) for name in (own, NUM_PROCESSES))
    check_rank(rank, size, (own, NUM_PROCESSES), _NAME)
    address = os.environ[COORDINATOR]
    return Ranks(rank, size, address if ":" in address else f"{address}:{port}")


def from_api(client: KubernetesClient, port: int) -> tuple[list[str], int]:
    """Asks the API for the Job of this pod; gives the addresses of all pods, and the place of this one."""
    index = number_of(INDEX, _NAME, _HINT)
    host = value_of(HOSTNAME, _NAME, "Every container has it; do not unset it.")
    name = host.removesuffix(f"-{index}")
    if name == host:
        raise ClusterError(
            f"{_NAME}: {HOSTNAME}={host!r} does not end in -{index}, the pod's number, so the name of "
            f"its Job is not known. Do not set hostname in the template, or set {NUM_PROCESSES} and "
            f"{COORDINATOR} in it."
        )
    job = client.read_job(name)
    pods, subdomain = _pods(name, job), _subdomain(name, job)
    hosts, number = _hosts(name, job, pods)
    check_rank(index, pods, (INDEX, "completions"), _NAME)
    return [f"{host}.{subdomain}:{port}" for host in hosts], number * pods + index


def _hosts(name: str, job: dict[str, Any], pods: int) -> tuple[list[str], int]:
    """Gives the names of all pods, and the number of this Job among those of its JobSet."""
    labels = job.get("metadata", {}).get("labels") or {}
    if f"{_LABEL}job-index" not in labels:
        return [f"{name}-{pod}" for pod in range(pods)], 0
    number = int(labels[f"{_LABEL}job-index"])
    jobs = int(labels.get(f"{_LABEL}replicatedjob-replicas", 1))
    stem = name.removesuffix(f"-{number}")
    return [f"{stem}-{job}-{pod}" for job in range(jobs) for pod in range(pods)], number


def _pods(name: str, job: dict[str, Any]) -> int:
    spec = job.get("spec", {})
    parallelism = int(spec.get("parallelism") or 1)
    completions = int(spec.get("completions") or parallelism)
    if completions != parallelism:
        raise ClusterError(
            f"{_NAME}: the Job {name!r} has {completions} completions and runs {parallelism} at a "
            "time, so its pods could never meet. Set spec.parallelism to spec.completions."
        )
    return completions


def _subdomain(name: str, job: dict[str, Any]) -> str:
    subdomain = job.get("spec", {}).get("template", {}).get("spec", {}).get("subdomain")
    if not subdomain:
        raise ClusterError(
            f"{_NAME}: the pods of the Job {name!r} have no names by which the others find them. Add "
            f"a headless Service (clusterIP: None, selector job-name: {name}) and name it in "
            "spec.template.spec.subdomain; a JobSet does both by itself."
        )
    return str(subdomain)
