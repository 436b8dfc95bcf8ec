"""Resolves the hosts of a TPU slice or node, from the environment and the metadata server.

Samples of what the metadata server answers::

    agent-worker-number        2
    worker-network-endpoints   t1v-n-0,t1v-n-1                   names or addresses, or in an older form
                               unknown:8470:10.0.0.2,unknown:8470:10.0.0.3
    tpu-env                    MEGASCALE_NUM_SLICES: '2'         one variable on each line
                               MEGASCALE_SLICE_ID: '0'
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any
from urllib.parse import quote, urlsplit

import jax

from distribute_jax._errors import ArgumentError, ClusterError, ServiceError
from distribute_jax.cluster_resolver._base import ClusterResolver, number_of, with_layer
from distribute_jax.cluster_resolver._http import (
    Service,
    google_service,
    metadata_server,
    project_and_zone,
)
from distribute_jax.cluster_resolver._spec import ClusterSpec

LOCAL = ("", "local")
_LAYER = "grpc://"
_PORT = 8470
"""Where TensorFlow serves on each host."""
_COORDINATOR_PORT = 8482
"""Where JAX's own detection meets; libtpu and TensorFlow use ports below."""


@dataclass(frozen=True)
class TPUSystemMetadata:
    """How many cores and hosts a TPU has, as JAX sees them.

    Source: https://www.tensorflow.org/api_docs/python/tf/tpu/experimental/TPUSystemMetadata
    """

    num_cores: int
    """The devices of all processes."""
    num_hosts: int
    """The processes."""
    num_of_cores_per_host: int
    """The devices of this process."""
    topology: object
    """Always None: the coordinates of a device are its own attribute ``coords``."""
    devices: tuple[jax.Device, ...]
    """The devices."""


class TPUClusterResolver(ClusterResolver):
    """The hosts of a TPU: one process on each, in the order of their numbers.

    - ``tpu=None``: the TPU that this machine is a host of, by the environment (Google Kubernetes Engine) or
      the metadata server (TPU VMs). Of several slices the processes are numbered slice by slice; only the
      addresses of the own slice are known, the others are empty.
    - ``tpu="name"``: asks the Cloud TPU API for the hosts; which of them this is says the machine.
    - ``tpu="grpc://10.0.0.2:8470"``, several with commas: these hosts.
    - ``tpu="local"`` or ``""``: this process alone with the devices it has, also simulated ones.

    Process 0 is met at port 8482, as in JAX's own detection, which reads the same metadata; this resolver
    adds bounded waits, and errors that name the address that did not answer.

    Args:
        tpu: as above.
        zone: the zone of a TPU known by name; that of this machine if None.
        project: its project; that of this machine if None.
        job_name: the name of the job of the hosts.
        coordinator_name: the name of a job to add, of one task that does not train.
        coordinator_address: the address of that task.
        credentials: ``"default"`` for those of this machine, None, a token, or an object that has one.
        service: the Cloud TPU API as googleapiclient gives it; asked directly if None.
        discovery_url: its scheme and host are taken as those of the API.
        timeout: seconds within which each answer must have come.

    Raises:
        ArgumentError: only one of ``coordinator_name`` and ``coordinator_address`` is given.
        ClusterError: at a call: a service does not answer, or the TPU is not ready; a ``RuntimeError``.

    Example:
        >>> import distribute_jax as dj
        >>> resolver = dj.cluster_resolver.TPUClusterResolver("local")
        >>> resolver.num_processes, resolver.process_id, resolver.master()
        (1, 0, '')

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/TPUClusterResolver
    """

    def __init__(
        self,
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: Any = "default",
        service: Any = None,
        discovery_url: str | None = None,
        *,
        timeout: float = 10.0,
    ) -> None:
        if (coordinator_name is None) != (coordinator_address is None):
            raise ArgumentError(
                f"TPUClusterResolver(coordinator_name={coordinator_name!r}, coordinator_address="
                f"{coordinator_address!r}): give both or neither."
            )
        self._tpu = tpu
        self._node = Node(tpu or "", zone, project, credentials, service, discovery_url, timeout)
        self._job_name = job_name
        self._training_jobs = (job_name,)
        self._other_jobs = (
            {coordinator_name: [coordinator_address or ""]} if coordinator_name else {}
        )
        self._timeout = timeout
        self._rpc_layer = "grpc"

    @classmethod
    def is_present(cls) -> bool:
        """Tells whether this machine is a host of a TPU; asks no network.

        Returns:
            True where the environment names the hosts, or chips, libtpu and a metadata server are there.
        """
        return has_environment() or has_chips()

    @staticmethod
    def connect(
        tpu: str | None = None, zone: str | None = None, project: str | None = None
    ) -> TPUClusterResolver:
        """Makes a resolver and asks it once, so that a TPU that is not there is an error here.

        The processes are connected when the strategy is made.

        Args:
            tpu: see the class.
            zone: see the class.
            project: see the class.

        Returns:
            The resolver.
        """
        resolver = TPUClusterResolver(tpu, zone, project)
        resolver.cluster_spec()
        return resolver

    def cluster_spec(self) -> ClusterSpec:
        """See ``ClusterResolver.cluster_spec``: empty for ``"local"``."""
        if self._tpu in LOCAL:
            return ClusterSpec({})
        return ClusterSpec({self._job_name: self._addresses(), **self._other_jobs})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """See ``ClusterResolver.master``: of the first host if none is named; empty for a local one."""
        spec = self.cluster_spec()
        if not spec:
            return ""
        if task_type is None or task_id is None:
            task_type, task_id = self._job_name, 0
        return with_layer(spec.task_address(task_type, task_id), rpc_layer or self.rpc_layer)

    def get_master(self) -> str:
        """Gives what ``master()`` gives.

        Returns:
            The address of the first host, or an empty string.
        """
        return self.master()

    def get_job_name(self) -> str:
        """Gives the name of the job of the hosts.

        Returns:
            The ``job_name`` of the constructor.
        """
        return self._job_name

    def get_coordination_service_leader(self) -> str:
        """Gives the task at which all meet: the first host.

        Returns:
            Its name in TensorFlow's form.
        """
        return f"/job:{self._job_name}/replica:0/task:0"

    def get_tpu_system_metadata(self) -> TPUSystemMetadata:
        """Counts cores and hosts. This starts the backend: call it after the strategy was made.

        Returns:
            The numbers that JAX sees.
        """
        devices = tuple(jax.devices())
        return TPUSystemMetadata(
            len(devices), jax.process_count(), jax.local_device_count(), None, devices
        )

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> Mapping[str, int]:
        """See ``ClusterResolver.num_accelerators``: the devices of one host, simulated ones included."""
        return {"TPU": jax.local_device_count()}

    @property
    def coordinator_address(self) -> str | None:
        """See ``ClusterResolver``: the first host of the first slice, at JAX's port."""
        address = super().coordinator_address
        return address and f"{address.rpartition(':')[0]}:{_COORDINATOR_PORT}"

    @cached_property
    def _slice(self) -> Slice:
        return read_slice(self._timeout)

    def _found_task_type(self) -> str | None:
        return self._job_name

    def _found_task_id(self) -> int | None:
        if self._tpu in LOCAL:
            return 0
        own = self._slice
        # A TPU known by its name, or by its addresses, is one slice.
        return own.own + (own.slice_id * len(own.hosts) if self._tpu is None else 0)

    def _addresses(self) -> list[str]:
        if self._tpu is None:
            return _all_slices(self._slice)
        if self._tpu.startswith(_LAYER):
            return [address.strip().removeprefix(_LAYER) for address in self._tpu.split(",")]
        return self._node.addresses()


def _all_slices(own: Slice) -> list[str]:
    """Gives the addresses of the hosts of all slices; empty where the own slice does not know them."""
    addresses = [""] * (own.slices * len(own.hosts))
    if own.coordinator:
        addresses[0] = f"{own.coordinator}:{_PORT}"
    first = own.slice_id * len(own.hosts)
    for number, host in enumerate(own.hosts, first):
        addresses[number] = addresses[number] or f"{host}:{_PORT}"
    return addresses


WORKER_ID = "TPU_WORKER_ID"
WORKER_HOSTNAMES = "TPU_WORKER_HOSTNAMES"
SKIP_METADATA = "TPU_SKIP_MDS_QUERY"
COORDINATOR = "MEGASCALE_COORDINATOR_ADDRESS"
NUM_SLICES = "MEGASCALE_NUM_SLICES"
SLICE_ID = "MEGASCALE_SLICE_ID"

CHIPS = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
"""Where the chips of a TPU VM stand, among other devices; hence libtpu is asked for too."""
_HINT = "It is set on TPU VMs of Google Kubernetes Engine; on others leave TPU_WORKER_HOSTNAMES unset too."
_ATTRIBUTES = "/instance/attributes/"


@dataclass(frozen=True)
class Slice:
    """The hosts of a TPU slice as one of them sees it."""

    hosts: tuple[str, ...]
    """Their names or addresses, in the order of their numbers."""
    own: int
    """The number of this host."""
    slices: int = 1
    """How many slices train together."""
    slice_id: int = 0
    """Which of them this is."""
    coordinator: str = ""
    """The host of process 0; empty for the first of the hosts."""


def has_environment() -> bool:
    """Tells whether the environment names the hosts."""
    return WORKER_HOSTNAMES in os.environ and WORKER_ID in os.environ


def has_chips() -> bool:
    """Tells whether this machine is a TPU VM whose metadata server may be asked, without asking it."""
    asked = SKIP_METADATA not in os.environ and find_spec("libtpu") is not None
    return asked and any(glob.glob(pattern) for pattern in CHIPS)


def read_slice(timeout: float) -> Slice:
    """Asks the environment, or else the metadata server."""
    return _from_environment() if has_environment() else _from_metadata(metadata_server(timeout))


def parse_endpoints(text: str) -> tuple[str, ...]:
    """Gives the hosts of ``worker-network-endpoints``."""
    hosts = []
    for endpoint in text.strip().split(","):
        parts = endpoint.split(":")
        if len(parts) not in {1, 3} or not parts[-1]:
            raise ClusterError(
                f"The metadata server names the hosts of this TPU as {text!r:.200}, which is neither "
                "a list of names nor of name:port:address."
            )
        hosts.append(parts[-1])
    return tuple(hosts)


def parse_variables(text: str) -> dict[str, str]:
    """Gives the variables of ``tpu-env``."""
    pairs = [line.partition(":") for line in text.splitlines() if ":" in line]
    return {name.strip(): value.strip().strip("'") for name, _, value in pairs}


def _from_environment() -> Slice:
    hosts = tuple(name.strip() for name in os.environ[WORKER_HOSTNAMES].split(","))
    return _slice(hosts, number_of(WORKER_ID, "TPUClusterResolver", _HINT), dict(os.environ))


def _from_metadata(server: Service) -> Slice:
    own = server.text(f"{_ATTRIBUTES}agent-worker-number").strip()
    if not own.isdigit():
        raise ClusterError(f"The metadata server gives this TPU host the number {own!r:.100}.")
    hosts = parse_endpoints(server.text(f"{_ATTRIBUTES}worker-network-endpoints"))
    return _slice(hosts, int(own), {**_tpu_env(server), **os.environ})


def _tpu_env(server: Service) -> dict[str, str]:
    try:
        return parse_variables(server.text(f"{_ATTRIBUTES}tpu-env"))
    except ServiceError as refused:
        if refused.status == 404:  # not every TPU VM has it
            return {}
        raise


def _slice(hosts: tuple[str, ...], own: int, variables: dict[str, str]) -> Slice:
    slices = _number(variables, NUM_SLICES, 1)
    slice_id = _number(variables, SLICE_ID, 0)
    if own >= len(hosts) or slice_id >= max(slices, 1):
        raise ClusterError(
            f"TPUClusterResolver: this is host {own} of {len(hosts)} in slice {slice_id} of {slices}, "
            f"which cannot be: numbers count from 0. Check {WORKER_ID}, {WORKER_HOSTNAMES}, "
            f"{SLICE_ID} and {NUM_SLICES}."
        )
    coordinator = variables.get(COORDINATOR, "").partition(":")[0]
    return Slice(hosts, own, max(slices, 1), slice_id, coordinator)


def _number(variables: dict[str, str], name: str, otherwise: int) -> int:
    text = variables.get(name) or str(otherwise)
    if not text.isdigit():
        raise ClusterError(f"TPUClusterResolver: {name}={text!r} must be a number, 0 or more.")
    return int(text)


API_ROOT = "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU"
"""Where gcloud, too, is told to find another Cloud TPU API."""
_API = "https://tpu.googleapis.com/"

_HEALTHY = frozenset({"HEALTHY", "HEALTH_UNSPECIFIED", ""})


@dataclass(frozen=True)
class Node:
    """One TPU and how to ask for it."""

    name: str
    zone: str | None
    project: str | None
    credentials: Any
    service: Any
    """The API as googleapiclient gives it; asked directly if None."""
    discovery_url: str | None
    """Its host and scheme are those of the API."""
    timeout: float

    def addresses(self) -> list[str]:
        """Gives the hosts as ``ip:port``, in the order of their numbers."""
        answer = self._asked()
        self._check(answer)
        endpoints = answer.get("networkEndpoints") or []
        found = [
            f"{e['ipAddress']}:{e.get('port') or 8470}" for e in endpoints if e.get("ipAddress")
        ]
        if not found:
            raise ClusterError(
                f"TPUClusterResolver: the TPU {self.name!r} has no addresses: {answer!r:.300}."
            )
        return found

    def _asked(self) -> dict[str, Any]:
        path = f"projects/{quote(self._project)}/locations/{quote(self._zone)}/nodes/{quote(self.name)}"
        if self.service is not None:
            nodes = self.service.projects().locations().nodes()
            return dict(nodes.get(name=path).execute())
        api = google_service("The Cloud TPU API", self._root, self.credentials, self.timeout)
        return api.json(f"/v2/{path}")

    def _check(self, answer: dict[str, Any]) -> None:
        state, health = answer.get("state", "READY"), answer.get("health", "")
        if state != "READY" or health not in _HEALTHY:
            why = answer.get("healthDescription", "")
            raise ClusterError(
                f"TPUClusterResolver: the TPU {self.name!r} cannot be used: its state is {state} and "
                f"its health {health or 'not said'}{f' ({why})' if why else ''}. Wait until it is "
                "READY, or make it anew if it was PREEMPTED."
            )

    @property
    def _project(self) -> str:
        return project_and_zone(self.timeout)[0] if self.project is None else self.project

    @property
    def _zone(self) -> str:
        return project_and_zone(self.timeout)[1] if self.zone is None else self.zone

    @property
    def _root(self) -> str:
        if self.discovery_url is None:
            return os.environ.get(API_ROOT, _API)
        parts = urlsplit(self.discovery_url)
        return f"{parts.scheme}://{parts.netloc}"
