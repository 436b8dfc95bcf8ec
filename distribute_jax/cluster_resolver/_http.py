"""HTTP requests to services: the Kubernetes API, Google Cloud's, and its metadata server."""

from __future__ import annotations

import json
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

from distribute_jax._errors import ArgumentTypeError, ClusterError, ServiceError

_PAUSES = (0.2, 0.4)
"""Seconds before the second attempt and before the third."""
_CHUNK = 1 << 16
_PASSING = frozenset({429, 500, 502, 503, 504})
"""The answers of a service that is busy or starting."""


@dataclass(frozen=True)
class Service:
    """How to ask one service, and what to tell the user when it does not answer."""

    name: str
    """What it is, for messages."""
    root: str
    """What every address of it begins with, such as ``http://host:port``."""
    hint: str
    """Where it is to be found, or what to do where it is not."""
    timeout: float = 10.0
    """Seconds within which an answer must have come, all attempts together."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with every request; they may hold a token, so no message shows them."""
    proxies: bool = False
    """Whether the proxies of the environment are used; never for a service inside the cluster."""
    certificates: str | None = None
    """A file with the certificates to trust; those of the machine if None."""

    def text(self, path: str, body: Any = None) -> str:
        """Asks for a path, by POST where there is a body; gives the text of the answer."""
        end = time.monotonic() + self.timeout
        for pause in _PAUSES:
            try:
                return self._attempt(path, body, end)
            except ServiceError as error:
                final = error.status is not None and error.status not in _PASSING
                if final or time.monotonic() + pause >= end:
                    raise
            time.sleep(pause)
        return self._attempt(path, body, end)

    def json(self, path: str, body: Any = None) -> dict[str, Any]:
        """Asks for a path; gives the JSON object of the answer."""
        text = self.text(path, body)
        try:
            answer = json.loads(text)
        except json.JSONDecodeError:
            answer = None
        if not isinstance(answer, dict):
            raise ClusterError(
                f"{self.name}: {self.root}{path} answered {text!r:.200}, which is no JSON object. "
                f"{self.hint}"
            )
        return answer

    def _attempt(self, path: str, body: Any, end: float) -> str:
        request = urllib.request.Request(
            self.root + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                **self.headers,
                **({} if body is None else {"Content-Type": "application/json"}),
            },
        )
        try:
            with self._opener().open(request, timeout=max(end - time.monotonic(), 0.01)) as answer:
                return _read(answer, end)
        except urllib.error.HTTPError as refused:
            raise ServiceError(
                f"{self.name}: {self.root}{path} answered {refused.code} {refused.reason}: "
                f"{_said(refused)!r}. {self.hint}",
                refused.code,
            ) from None
        except (OSError, HTTPException, ValueError) as reason:
            raise self._no_answer(path, reason) from None

    def _opener(self) -> urllib.request.OpenerDirector:
        handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
        if not self.proxies:
            handlers.append(urllib.request.ProxyHandler({}))
        if self.root.startswith("https:"):
            context = ssl.create_default_context(cafile=self.certificates)
            handlers.append(urllib.request.HTTPSHandler(context=context))
        return urllib.request.build_opener(*handlers)

    def _no_answer(self, path: str, reason: Exception) -> ServiceError:
        cause = getattr(reason, "reason", reason)  # a URLError wraps what the socket said
        return ServiceError(
            f"{self.name}: no answer from {self.root}{path} within {self.timeout:g} s "
            f"({type(cause).__name__}: {cause}). {self.hint}"
        )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows nobody to another host, to whom the token would be shown too."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _said(refused: urllib.error.HTTPError) -> str:
    """Gives the beginning of what a refusal says, as far as it comes."""
    try:
        with refused:
            return refused.read(300).decode(errors="replace").strip()
    except (OSError, HTTPException):
        return ""


def _read(answer: Any, end: float) -> str:
    """Reads an answer piece by piece, since the timeout of a socket is for each piece alone."""
    pieces = []
    while piece := answer.read1(_CHUNK):
        pieces.append(piece)
        if time.monotonic() > end:
            raise TimeoutError("the answer was still coming")
    return b"".join(pieces).decode(errors="replace")


SERVICE_HOST = "KUBERNETES_SERVICE_HOST"
SERVICE_PORT = "KUBERNETES_SERVICE_PORT"

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where Kubernetes puts the token, the namespace and the certificates of a pod."""
_HINT = (
    "A pod may ask if its service account has a Role with the verbs get and list on pods and jobs; "
    "outside the cluster run `kubectl proxy` and pass KubernetesClient('http://127.0.0.1:8001', "
    "namespace='default')."
)


class KubernetesClient:
    """Asks the Kubernetes API for pods and jobs, by plain requests.

    In a pod it needs no arguments: it finds the API by the environment and shows the token of the pod's
    service account, read anew at each request, as Kubernetes changes it.

    Args:
        url: the root of the API, such as that of ``kubectl proxy``; that of the cluster if None.
        namespace: where to look; the pod's own if None, and everywhere if that is not known.
        account: the folder with the files ``token``, ``namespace`` and ``ca.crt``.
        timeout: seconds within which each answer must have come.

    Raises:
        ClusterError: at a call: the API does not answer or refuses; a ``RuntimeError``.

    Example:
        >>> import distribute_jax as dj
        >>> client = dj.cluster_resolver.KubernetesClient("http://127.0.0.1:8001", namespace="default")
        >>> resolver = dj.cluster_resolver.KubernetesClusterResolver(override_client=client)

    Source: https://kubernetes.io/docs/tasks/run-application/access-api-from-pod/
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        namespace: str | None = None,
        account: str = ACCOUNT,
        timeout: float = 10.0,
    ) -> None:
        self._url = url
        self._account = Path(account)
        self._namespace = namespace
        self._timeout = timeout

    def list_pod_for_all_namespaces(self, label_selector: str = "") -> SimpleNamespace:
        """Lists pods, by the name and in the form that the package ``kubernetes`` has for it.

        Args:
            label_selector: what labels they have, such as ``job-name=train``.

        Returns:
            Its ``items`` have ``metadata.name``, ``status.phase``, ``status.pod_ip``. They are those of the
            client's namespace, if it has one: a service account seldom may list all.
        """
        namespace = self._own_namespace()
        place = f"/api/v1/namespaces/{quote(namespace)}/pods" if namespace else "/api/v1/pods"
        items: list[SimpleNamespace] = []
        page = ""
        while True:
            path = f"{place}?labelSelector={quote(label_selector, safe='')}{page}"
            answer = self._service().json(path)
            items += [_pod(item) for item in answer.get("items", [])]
            follows = answer.get("metadata", {}).get("continue")
            if not follows:
                return SimpleNamespace(items=items)
            page = f"&continue={quote(follows, safe='')}"

    def read_job(self, name: str) -> dict[str, Any]:
        """Gives one Job of the client's namespace.

        Args:
            name: its name.

        Returns:
            The Job as the API describes it in JSON.
        """
        namespace = self._own_namespace() or "default"
        return self._service().json(
            f"/apis/batch/v1/namespaces/{quote(namespace)}/jobs/{quote(name)}"
        )

    def _service(self) -> Service:
        token = self._file("token")
        certificates = self._account / "ca.crt"
        return Service(
            name="The Kubernetes API",
            root=self._root(),
            hint=_HINT,
            timeout=self._timeout,
            headers={"Accept": "application/json"}
            | ({"Authorization": f"Bearer {token}"} if token else {}),
            certificates=str(certificates) if certificates.is_file() else None,
        )

    def _root(self) -> str:
        if self._url is not None:
            return self._url.rstrip("/")
        host, port = os.environ.get(SERVICE_HOST), os.environ.get(SERVICE_PORT, "443")
        if not host:
            raise ClusterError(
                f"The Kubernetes API: {SERVICE_HOST} not found in environment, so this is no pod. {_HINT}"
            )
        return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"

    def _own_namespace(self) -> str:
        return self._file("namespace") if self._namespace is None else self._namespace

    def _file(self, name: str) -> str:
        path = self._account / name
        return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


def _pod(item: dict[str, Any]) -> SimpleNamespace:
    status = item.get("status", {})
    return SimpleNamespace(
        metadata=SimpleNamespace(name=item["metadata"]["name"]),
        status=SimpleNamespace(phase=status.get("phase"), pod_ip=status.get("podIP")),
    )


METADATA_HOST = "GCE_METADATA_HOST"
METADATA_IP = "GCE_METADATA_IP"

_TOKEN = "/instance/service-accounts/default/token"


def metadata_server(timeout: float) -> Service:
    """Gives the metadata server of this machine, or the one that the environment names."""
    host = (
        os.environ.get(METADATA_HOST) or os.environ.get(METADATA_IP) or "metadata.google.internal"
    )
    return Service(
        name="The metadata server",
        root=f"http://{host}/computeMetadata/v1",
        hint="It answers on machines of Google Cloud only; elsewhere give what is asked for as an argument.",
        timeout=timeout,
        headers={"Metadata-Flavor": "Google"},
    )


def google_service(name: str, root: str, credentials: Any, timeout: float) -> Service:
    """Gives one of Google's services, with the token that it asks for.

    ``credentials`` are 'default' (those of this machine), None, a token, or an object with a ``token``.
    """
    return Service(
        name=name,
        root=root.rstrip("/"),
        hint="Check project, zone and name, and that the account of this machine may read them.",
        timeout=timeout,
        headers=_authorization(credentials, timeout),
        proxies=True,
    )


def project_and_zone(timeout: float) -> tuple[str, str]:
    """Gives the project and the zone of this machine."""
    server = metadata_server(timeout)
    # The zone is answered as projects/123456/zones/us-central2-b.
    return server.text("/project/project-id"), server.text("/instance/zone").rpartition("/")[2]


def _authorization(credentials: Any, timeout: float) -> dict[str, str]:
    if credentials is None:
        return {}
    if credentials == "default":
        token = metadata_server(timeout).json(_TOKEN).get("access_token")
        if not isinstance(token, str):
            raise ClusterError(f"The metadata server answered {_TOKEN} without an access token.")
    else:
        token = credentials if isinstance(credentials, str) else getattr(credentials, "token", None)
    if not isinstance(token, str):
        raise ArgumentTypeError(
            f"credentials of the type {type(credentials).__name__} hold no token. Pass 'default', "
            "None, a token, or google.auth credentials that were refreshed."
        )
    return {"Authorization": f"Bearer {token}"}
