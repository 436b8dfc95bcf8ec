"""The hosts of a TPU, from the environment, the metadata server or the Cloud TPU API.

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
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import jax

from distribute_jax._errors import ArgumentError, ClusterError, ServiceError
from distribute_jax.cluster_resolver._base import ClusterResolver, ClusterSpec
from distribute_jax.cluster_resolver._gce import google_service, metadata_server

WORKER_ID = "TPU_WORKER_ID"
WORKER_HOSTNAMES = "TPU_WORKER_HOSTNAMES"
COORDINATOR = "MEGASCALE_COORDINATOR_ADDRESS"
NUM_SLICES = "MEGASCALE_NUM_SLICES"
SLICE_ID = "MEGASCALE_SLICE_ID"
API_ROOT = "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU"
"""gcloud's variable for the endpoint of the Cloud TPU API."""

_API = "https://tpu.googleapis.com/"
_ATTRIBUTES = "/instance/attributes/"
_CHIPS = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
"""The device files of TPU chips; other devices have such names too, so libtpu is looked for as well."""
_LOCAL = ("", "local")
_LAYER = "grpc://"
_PORT = 8470
"""TensorFlow's port on each host."""
_COORDINATOR_PORT = 8482
"""As in JAX's own detection; libtpu and TensorFlow use ports below."""


@dataclass(frozen=True)
class TPUSystemMetadata:
    """The numbers of cores and hosts of a TPU, as JAX sees them.

    Source: https://www.tensorflow.org/api_docs/python/tf/tpu/experimental/TPUSystemMetadata
    """

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    topology: object
    """Always None: the coordinates of a device are its attribute ``coords``."""
    devices: tuple[jax.Device, ...]


class TPUClusterResolver(ClusterResolver):
    """The hosts of a TPU: one process on each, in the order of their numbers.

    - ``tpu=None``: the TPU that this machine belongs to, from the environment (Google Kubernetes Engine) or
      the metadata server (TPU VMs). With several slices, processes are numbered slice by slice, and the
      addresses of other slices are empty.
    - ``tpu="name"``: the hosts that the Cloud TPU API lists; the machine knows which of them it is.
    - ``tpu="grpc://10.0.0.2:8470"``, or several separated by commas: these hosts.
    - ``tpu="local"`` or ``""``: this process only, with its devices, simulated ones included.

    Process 0 listens on port 8482, as with JAX's own detection, which reads the same metadata. Every request
    has a timeout, and errors name the address that did not answer.

    Args:
        tpu: as above.
        zone: the zone of a named TPU; this machine's if None.
        project: the project of a named TPU; this machine's if None.
        job_name: the job of the hosts.
        coordinator_name: the name of another job, with one task that does not train.
        coordinator_address: the address of that task.
        credentials: ``"default"`` for those of this machine, None, a token, or credentials of google.auth.
        service: the Cloud TPU API as googleapiclient returns it; asked through google-auth if None.
        discovery_url: the API is called at the scheme and host of this URL.
        timeout: seconds to wait for each answer.

    Raises:
        ArgumentError: only one of ``coordinator_name`` and ``coordinator_address`` is given.
        ClusterError: at a call: a service does not answer, or the TPU is not ready; a ``RuntimeError``.
        MissingPackageError: at a call: requests is not installed, or google-auth for a named TPU.

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
            raise ArgumentError("coordinator_name and coordinator_address: give both or neither.")
        self._tpu = tpu
        self._zone = zone
        self._project = project
        self._credentials = credentials
        self._service = service
        self._discovery_url = discovery_url
        self._job_name = self._task_type = job_name
        self._training_jobs = (job_name,)
        self._other_jobs = (
            {coordinator_name: [coordinator_address or ""]} if coordinator_name else {}
        )
        self._timeout = timeout
        self._rpc_layer = "grpc"

    @classmethod
    def is_present(cls) -> bool:
        """True if the environment names the hosts of a TPU, or if there are chips and libtpu."""
        if _is_in_environment():
            return True
        may_ask = "TPU_SKIP_MDS_QUERY" not in os.environ and find_spec("libtpu") is not None
        return may_ask and any(glob.glob(pattern) for pattern in _CHIPS)

    @staticmethod
    def connect(
        tpu: str | None = None, zone: str | None = None, project: str | None = None
    ) -> TPUClusterResolver:
        """Returns a resolver whose TPU exists, or raises; the strategy connects the processes."""
        resolver = TPUClusterResolver(tpu, zone, project)
        resolver.cluster_spec()
        return resolver

    def cluster_spec(self) -> ClusterSpec:
        """Returns the hosts; an empty cluster for ``"local"``."""
        if self._tpu in _LOCAL:
            return ClusterSpec({})
        return ClusterSpec({self._job_name: self._addresses(), **self._other_jobs})

    def get_master(self) -> str:
        """Returns ``master()``: the address of the first host, or an empty string."""
        return self.master()

    def get_job_name(self) -> str:
        """Returns the ``job_name`` of the constructor."""
        return self._job_name

    def get_coordination_service_leader(self) -> str:
        """Returns the task that all processes connect to, the first host, in TensorFlow's form."""
        return f"/job:{self._job_name}/replica:0/task:0"

    def get_tpu_system_metadata(self) -> TPUSystemMetadata:
        """Counts cores and hosts. This starts the backend: call it after the strategy was made."""
        devices = tuple(jax.devices())
        return TPUSystemMetadata(
            len(devices), jax.process_count(), jax.local_device_count(), None, devices
        )

    @property
    def coordinator_address(self) -> str | None:
        """The first host of the first slice, with JAX's port."""
        address = super().coordinator_address
        return address and f"{address.rpartition(':')[0]}:{_COORDINATOR_PORT}"

    def _accelerators(self, task_type: str | None, task_id: int | None) -> Mapping[str, int]:
        return {"TPU": jax.local_device_count()}  # those of one host, simulated ones included

    def _default_task(self) -> tuple[str | None, int | None]:
        return (None, None) if self._tpu in _LOCAL else (self._job_name, 0)

    @cached_property
    def _slice(self) -> _Slice:
        if _is_in_environment():
            hosts = tuple(name.strip() for name in os.environ[WORKER_HOSTNAMES].split(","))
            return _slice(hosts, os.environ[WORKER_ID], os.environ)
        return _slice_of_metadata(self._timeout)

    def _detected_task(self) -> tuple[str | None, int | None]:
        if self._tpu in _LOCAL:
            return self._job_name, 0
        # A named TPU, or one whose addresses are passed, is one slice.
        first_host = self._slice.first_host if self._tpu is None else 0
        return self._job_name, first_host + self._slice.host_id

    def _addresses(self) -> list[str]:
        if self._tpu is None:
            return self._slice.addresses
        if self._tpu.startswith(_LAYER):
            return [address.strip().removeprefix(_LAYER) for address in self._tpu.split(",")]
        node = self._node()
        endpoints = node.get("networkEndpoints") or []
        addresses = [
            f"{e['ipAddress']}:{e.get('port') or _PORT}" for e in endpoints if e.get("ipAddress")
        ]
        state, health = node.get("state", "READY"), node.get("health") or "HEALTHY"
        if state != "READY" or health not in {"HEALTHY", "HEALTH_UNSPECIFIED"}:
            why = node.get("healthDescription", "")
            raise ClusterError(
                f"TPUClusterResolver: the TPU {self._tpu!r} cannot be used: its state is {state} and "
                f"its health {health}{f' ({why})' if why else ''}. Wait until it is READY, or create it "
                "again if it was PREEMPTED."
            )
        return addresses

    def _node(self) -> dict[str, Any]:
        """Returns the Cloud TPU API's description of the TPU."""
        project, zone = self._project, self._zone
        if project is None or zone is None:
            server = metadata_server(self._timeout)
            project = project or server.text("/project/project-id")
            # The zone is answered as projects/123456/zones/us-central2-b.
            zone = zone or server.text("/instance/zone").rpartition("/")[2]
        path = f"projects/{quote(project)}/locations/{quote(zone)}/nodes/{quote(self._tpu or '')}"
        if self._service is not None:
            return dict(self._service.projects().locations().nodes().get(name=path).execute())
        root = os.environ.get(API_ROOT, _API)
        if self._discovery_url is not None:
            url = urlsplit(self._discovery_url)
            root = f"{url.scheme}://{url.netloc}"
        api = google_service("The Cloud TPU API", root, self._credentials, self._timeout)
        return api.json(f"/v2/{path}")


class _Slice(NamedTuple):
    """The hosts of all slices, as a host of one slice knows them."""

    addresses: list[str]
    """The addresses of the hosts of all slices, slice by slice; empty where they are not known."""
    first_host: int
    """The number of the first host of this slice among those of all slices."""
    host_id: int
    """The number of this host in its slice."""


def _is_in_environment() -> bool:
    return WORKER_HOSTNAMES in os.environ and WORKER_ID in os.environ


def _slice_of_metadata(timeout: float) -> _Slice:
    server = metadata_server(timeout)
    number = server.text(f"{_ATTRIBUTES}agent-worker-number").strip()
    endpoints = server.text(f"{_ATTRIBUTES}worker-network-endpoints").strip().split(",")
    hosts = tuple(endpoint.rpartition(":")[2] for endpoint in endpoints)
    try:
        lines = server.text(f"{_ATTRIBUTES}tpu-env").splitlines()
        pairs = [line.partition(":") for line in lines if ":" in line]
    except ServiceError as error:
        if error.status != 404:  # not every TPU VM has it
            raise
        pairs = []
    variables = {name.strip(): value.strip().strip("'") for name, _, value in pairs}
    return _slice(hosts, number, {**variables, **os.environ})


def _slice(hosts: tuple[str, ...], host_id: str, variables: Mapping[str, str]) -> _Slice:
    texts = {
        WORKER_ID: host_id,
        NUM_SLICES: variables.get(NUM_SLICES) or "1",
        SLICE_ID: variables.get(SLICE_ID) or "0",
    }
    for name, text in texts.items():
        if not text.isdecimal():
            raise ClusterError(f"TPUClusterResolver: {name}={text!r} must be an int >= 0.")
    host, slices, slice_id = map(int, texts.values())
    if host >= len(hosts) or slice_id >= max(slices, 1):
        raise ClusterError(
            f"TPUClusterResolver: this is host {host} of {len(hosts)} in slice {slice_id} of {slices}, but "
            f"numbers count from 0. Check {WORKER_ID}, {WORKER_HOSTNAMES}, {SLICE_ID} and {NUM_SLICES}."
        )
    addresses, first = [""] * (max(slices, 1) * len(hosts)), slice_id * len(hosts)
    addresses[first : first + len(hosts)] = [f"{name}:{_PORT}" for name in hosts]
    if coordinator := variables.get(COORDINATOR, "").partition(":")[0]:
        addresses[0] = f"{coordinator}:{_PORT}"
    return _Slice(addresses, first, host)
