"""HTTP requests to Google Cloud's APIs and metadata server, with requests and google-auth."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from distribute_jax._errors import (
    ArgumentTypeError,
    ClusterError,
    MissingPackageError,
    ServiceError,
)

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
        """Returns the JSON object of the answer."""
        response = self._ask(path, body)
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ClusterError(
                f"{self.name}: {self.root}{path} answered {response.text!r:.200}, which is not a JSON "
                f"object. {self.hint}"
            )
        return answer

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
    try:
        from requests import RequestException, Session
    except ImportError as error:
        raise _missing("requests") from error
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
    try:
        import google.auth
        from google.auth.credentials import AnonymousCredentials, Credentials
        from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
        from google.auth.transport.requests import AuthorizedSession
        from google.oauth2.credentials import Credentials as Token
        from requests import RequestException
    except ImportError as error:
        raise _missing("google-auth and requests") from error
    if isinstance(credentials, str) and credentials == "default":
        try:
            credentials, _ = google.auth.default(scopes=[_SCOPE])
        except DefaultCredentialsError as error:
            raise ClusterError(f"{name}: this machine has no credentials: {error}") from None
    elif credentials is None:
        credentials = AnonymousCredentials()
    elif isinstance(credentials, str):
        credentials = Token(credentials)
    elif not isinstance(credentials, Credentials):
        raise ArgumentTypeError(
            "credentials must be 'default', None, a token or google-auth credentials; got "
            f"{type(credentials).__name__}."
        )
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


def _missing(packages: str) -> MissingPackageError:
    return MissingPackageError(
        f"Requests to Google Cloud need {packages}: pip install 'distribute-jax[gcp]'."
    )
