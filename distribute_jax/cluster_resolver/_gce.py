"""Google Compute Engine, and the requests to Google's services of all its clusters."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from distribute_jax._checks import importing
from distribute_jax._errors import ClusterError, ServiceError
from distribute_jax.cluster_resolver._base import ClusterResolver, ClusterSpec

_NEEDS = "A request to Google Cloud needs requests"
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"


@dataclass(frozen=True)
class Service:
    """The address, session and error hint of one HTTP service."""

    name: str
    root: str
    """The start of every URL, such as ``http://host:port``."""
    hint: str
    timeout: float
    session: Any
    """A ``requests.Session``, which adds the credentials."""
    errors: tuple[type[Exception], ...]
    """What the session raises if there is no answer."""

    def text(self, path: str, body: Any = None) -> str:
        """Returns the text of the answer to a GET or, with a body, a POST."""
        return str(self._ask(path, body).text)

    def json(self, path: str, body: Any = None) -> dict[str, Any]:
        response = self._ask(path, body)
        try:
            return dict(response.json())
        except (ValueError, TypeError):
            raise ClusterError(
                f"{self.name}: {self.root}{path} answered {response.text!r:.200}, which is not a JSON "
                f"object. {self.hint}"
            ) from None

    def _ask(self, path: str, body: Any) -> Any:
        method, url = ("GET" if body is None else "POST"), self.root + path
        try:
            response = self.session.request(method, url, json=body, timeout=self.timeout)
        except self.errors as error:
            raise ServiceError(
                f"{self.name}: no answer from {url} within {self.timeout:g} s "
                f"({type(error).__name__}: {error}). {self.hint}"
            ) from None
        if response.status_code >= 300:
            raise ServiceError(
                f"{self.name}: {url} answered {response.status_code} {response.reason}: "
                f"{response.text!r:.300}. {self.hint}",
                response.status_code,
            )
        return response


def retry_policy() -> Any:
    """Returns urllib3's policy to retry services that are busy, but not those that do not answer."""
    from urllib3 import Retry

    return Retry(
        2,
        read=0,
        backoff_factor=0.2,
        status_forcelist=(429, 500, 502, 503, 504),
        allowed_methods=None,
        raise_on_status=False,
    )


def metadata_server(timeout: float) -> Service:
    """Returns the metadata server, at the address that GCE_METADATA_HOST may override."""
    with importing(_NEEDS, "gcp"):
        from requests import RequestException, Session
    host = os.environ.get("GCE_METADATA_HOST") or "metadata.google.internal"
    session = Session()
    session.headers["Metadata-Flavor"] = "Google"
    session.trust_env = False  # no proxy: the server is link-local
    return Service(
        name="The metadata server",
        root=f"http://{host}/computeMetadata/v1",
        hint="It answers only on machines of Google Cloud; elsewhere pass the values as arguments.",
        timeout=timeout,
        session=_with_retries(session),
        errors=(RequestException,),
    )


def google_service(name: str, root: str, credentials: Any, timeout: float) -> Service:
    """Returns a Google API, authorized by 'default' credentials, none, a token or google-auth's."""
    with importing(f"{_NEEDS} and google-auth", "gcp"):
        import google.auth
        from google.auth.credentials import AnonymousCredentials
        from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
        from google.auth.transport.requests import AuthorizedSession
        from google.oauth2.credentials import Credentials as Token
        from requests import RequestException
    if isinstance(credentials, str) and credentials == "default":
        try:
            credentials, _ = google.auth.default(scopes=[_SCOPE])
        except DefaultCredentialsError as error:
            raise ClusterError(f"{name}: this machine has no credentials: {error}") from None
    elif credentials is None:
        credentials = AnonymousCredentials()
    elif isinstance(credentials, str):
        credentials = Token(credentials)
    return Service(
        name=name,
        root=root.rstrip("/"),
        hint="Check project, zone and name, and that the account of this machine may read them.",
        timeout=timeout,
        session=_with_retries(AuthorizedSession(credentials)),
        errors=(RequestException, GoogleAuthError),
    )


def _with_retries(session: Any) -> Any:
    from requests.adapters import HTTPAdapter

    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(max_retries=retry_policy()))
    return session


API_ROOT = "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE"
"""gcloud's variable for the endpoint of the Compute Engine API."""
_API = "https://compute.googleapis.com/compute/v1/"


class GCEClusterResolver(ClusterResolver):
    """The running instances of an instance group on Google Compute Engine, sorted by address.

    Compute Engine does not number the instances of a group: pass a different ``task_id`` on each, or None
    on all, by which each finds its index from its address.

    Args:
        project: the name of the project.
        zone: the zone of the group.
        instance_group: its name.
        port: the port of every task.
        task_type: the job of all instances.
        task_id: the index of this process; if None, the metadata server is asked for its address.
        rpc_layer: put in front of addresses.
        credentials: ``"default"`` for those of this machine, None, a token, or credentials of google.auth.
        service: the Compute Engine API as ``googleapiclient.discovery.build("compute", "v1")`` returns it;
            asked through google-auth if None.
        timeout: seconds to wait for each answer.

    Raises:
        MissingPackageError: at a call: google-auth or requests is not installed.
        ClusterError: at a call: a service does not answer, or no instance runs; a ``RuntimeError``.

    Example:
        >>> import distribute_jax as dj
        >>> resolver = dj.cluster_resolver.GCEClusterResolver("project", "us-east1-d", "group", 8470)
        >>> resolver.task_type, resolver.task_id
        ('worker', 0)

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/GCEClusterResolver
    """

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int | None = 0,
        rpc_layer: str | None = "grpc",
        credentials: Any = "default",
        service: Any = None,
        *,
        timeout: float = 10.0,
    ) -> None:
        self._place = {"project": project, "zone": zone}
        self._group = instance_group
        self._port = port
        self._job = self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._credentials = credentials
        self._service = service
        self._timeout = timeout

    def cluster_spec(self) -> ClusterSpec:
        """Returns the instances that run now."""
        ips = [instance["networkInterfaces"][0]["networkIP"] for instance in self._instances()]
        addresses = sorted(f"{ip}:{self._port}" for ip in ips)
        if not addresses:
            raise ClusterError(
                f"GCEClusterResolver: no instance of the group {self._group!r} in {self._place} is "
                "running. Start the group, or check its name."
            )
        return ClusterSpec({self._job: addresses})

    def _detected_task(self) -> tuple[str | None, int | None]:
        ip = metadata_server(self._timeout).text("/instance/network-interfaces/0/ip").strip()
        addresses = self.cluster_spec().job_tasks(self._job)
        if f"{ip}:{self._port}" not in addresses:
            raise ClusterError(
                f"GCEClusterResolver: this instance, {ip}, is not in the group {self._group!r}: "
                f"{addresses}. Run the program on its instances, or pass task_id."
            )
        return self._job, addresses.index(f"{ip}:{self._port}")

    def _instances(self) -> Iterator[dict[str, Any]]:
        if self._service is not None:
            yield from self._instances_of_client()
            return
        root = os.environ.get(API_ROOT, _API)
        api = google_service("The Compute Engine API", root, self._credentials, self._timeout)
        zone = "/projects/{project}/zones/{zone}".format(**self._place)
        listing = f"{zone}/instanceGroups/{quote(self._group)}/listInstances"
        page = ""
        while True:
            answer = api.json(listing + page, body={"instanceState": "RUNNING"})
            for item in answer.get("items", []):
                yield api.json(f"{zone}/instances/{quote(_name(item))}")
            if not answer.get("nextPageToken"):
                return
            page = f"?pageToken={quote(answer['nextPageToken'], safe='')}"

    def _instances_of_client(self) -> Iterator[dict[str, Any]]:
        groups = self._service.instanceGroups()
        request = groups.listInstances(
            **self._place, instanceGroup=self._group, body={"instanceState": "RUNNING"}
        )
        while request is not None:
            answer = request.execute()
            for item in answer.get("items", []):
                yield self._service.instances().get(**self._place, instance=_name(item)).execute()
            request = groups.listInstances_next(previous_request=request, previous_response=answer)


def _name(item: dict[str, Any]) -> str:
    # An instance is listed as https://…/zones/us-east1-d/instances/name.
    return str(item["instance"]).rpartition("/")[2]
