"""An environment without a cluster, and a small HTTP server that stands in for remote services."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from distribute_jax.cluster_resolver import _slurm

PREFIXES = (
    "SLURM",
    "OMPI_",
    "TPU_",
    "MEGASCALE_",
    "KUBERNETES_",
    "TORCHELASTIC_",
    "SM_",
    "CLOUDSDK_",
    "DISTRIBUTE_JAX_",
)
NAMES = (
    *("TF_CONFIG", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("JOB_COMPLETION_INDEX", "NUM_PROCESSES", "PROCESS_ID", "COORDINATOR_ADDRESS"),
    *("GCE_METADATA_HOST", "CUDA_VISIBLE_DEVICES", "HOSTNAME"),
)


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hides the cluster in which the tests may run, and resets the GPUs that resolvers have divided."""
    import os

    for name in list(os.environ):
        if name in NAMES or name.startswith(PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    divided = dict(_slurm._gpus_before)
    yield
    _slurm._gpus_before.clear()
    _slurm._gpus_before.update(divided)


class Server(ThreadingHTTPServer):
    """Answers each path as ``answers`` says: with a text, a status, or the next item of a list."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, str | int | list[str | int]] = {}
        self.asked: list[tuple[str, str, dict[str, str], str]] = []
        self.released = threading.Event()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    @property
    def url(self) -> str:
        return f"http://{self.host}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer("GET", "")

    def do_POST(self) -> None:
        self._answer("POST", self.rfile.read(int(self.headers["Content-Length"])).decode())

    def _answer(self, method: str, body: str) -> None:
        self.server.asked.append(
            (method, self.path, {k.lower(): v for k, v in self.headers.items()}, body)
        )
        answer = self.server.answers.get(self.path, 404)
        if isinstance(answer, list):
            answer = answer.pop(0)
        if answer == "silence":
            self.server.released.wait(20)
            return
        self.send_response(answer if isinstance(answer, int) else 200)
        self.end_headers()
        if isinstance(answer, str):
            self.wfile.write(answer.encode())

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    """An HTTP server on loopback, for one test."""
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    thread.join()
    server.server_close()
