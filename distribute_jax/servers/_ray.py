"""Workers and servers that are actors of a Ray cluster, on one machine or several.

The cluster runs already, or the chief of a ``ClusterResolver`` starts it and tasks join. A message is one
buffer of bytes. Ray neither repeats calls nor restarts actors: the coordinator does, which knows what was
applied.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import jax

from distribute_jax._checks import check_int, importing
from distribute_jax._errors import ArgumentError, ClusterError
from distribute_jax._messages import error_text
from distribute_jax.cluster_resolver import ClusterSpec
from distribute_jax.cluster_resolver._base import CHIEF, with_port
from distribute_jax.servers._child import role_of
from distribute_jax.servers._wire import Message, WireError, unpacked

_ACTOR_OPTIONS: dict[str, Any] = {
    "num_cpus": 0,
    "max_concurrency": 1000,  # calls at once: one of each worker, and some of the coordinator
    "max_restarts": 0,
    "max_task_retries": 0,
    "scheduling_strategy": "SPREAD",
}
_TRIES = 3
"""How often a worker is started; why it ends then is the error of the run that it takes."""
_MACHINES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""On every system: with 0 Ray listens on the loopback address only, and nobody can join."""
_SETTINGS = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
_OF_TASKS = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",  # when the chief does not answer
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # an actor would never be done
}
_SECONDS_TO_JOIN, _SECONDS_TO_START, _POLL_SECONDS = 10.0, 60.0, 0.2
_JOBS = {"worker": "worker", "server": "ps"}
_JOIN = """
import os, shutil, signal, socket, sys, tempfile, threading, time
host, port, *options = sys.argv[1:]
folder = tempfile.mkdtemp(prefix="dj-")
if pid := os.fork():
    def follow():
        sys.stdin.read()
        os.kill(pid, signal.SIGTERM)  # with which Ray leaves its cluster
    threading.Thread(target=follow, daemon=True).start()
    os.waitpid(pid, 0)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)  # Ray's agents, which would look for the chief for minutes
while True:
    try:
        with socket.create_connection((host, int(port)), 5) as chief:
            ip = chief.getpeername()[0]
        break
    except OSError:
        time.sleep(1)
import ray._private.services, ray.scripts.scripts
if ip == "127.0.0.1":  # which Ray would replace by an address of the network
    ray._private.services.get_node_ip_address = lambda *_: ip
# Ray processes of one machine that start at once would use the same file names. Everybody may read Ray's
# folder, which is therefore inside a private one.
sys.argv[1:] = ["start", f"--address={ip}:{port}", "--block", f"--temp-dir={folder}/ray", *options]
ray.scripts.scripts.main()
"""
"""Waits until the chief listens, and becomes ``ray start``; its parent process ends all with ours."""
_LOG = logging.getLogger("distribute_jax")


class _Actor:
    """A process of the cluster that is a worker or a server."""

    def __init__(self, kind: str, platform: str, *, x64: bool) -> None:
        jax.config.update("jax_enable_x64", x64)
        if platform == "cpu":
            jax.config.update("jax_platforms", platform)
        self._role: Any = role_of(kind, _Calls)
        self._lock, self._turn, self._error = threading.Lock(), 0, Future[str]()
        self._early: dict[int, tuple[Message, Future[Message | None]]] = {}

    def do(self, turn: int, waits: bool, data: bytes, *ends: Any) -> bytes | None:
        """Does what the coordinator asks for, in order: Ray delivers calls in any order."""
        answer = Future[Message | None]()
        with self._lock:
            self._early[turn] = unpacked(data, ends), answer
            while (job := self._early.pop(self._turn, None)) is not None:
                self._turn += 1
                try:
                    job[1].set_result(self._role.do(job[0]))
                except BaseException as error:
                    self._error.set_result(f": {error_text(error)}")
                    time.sleep(_POLL_SECONDS)  # until it is sent
                    os._exit(1)
        return _bytes(answer.result()) if waits else None

    def answer(self, data: bytes) -> bytes | None:
        return _bytes(self._role.store.answer(unpacked(data)))

    def ready(self) -> None:
        pass

    def wait(self) -> str:
        return self._error.result()


class _Worker(_Actor):
    """Has the name that Ray shows for a worker."""


class _Server(_Actor):
    pass


def _bytes(message: Message | None) -> bytes | None:
    return None if message is None else b"".join(message.packed())


class _Calls:
    """A worker's connection to an actor that is a server; like ``Connection``, but by calls of Ray."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._seconds: float | None = None

    def request(self, message: Message) -> Callable[[], Message]:
        return functools.partial(self._got, self._actor.answer.remote(_bytes(message)))

    def _got(self, answer: Any) -> Message:
        import ray

        try:
            data = ray.get(answer, timeout=self._seconds)
        except ray.exceptions.RayError as error:
            raise WireError(f"the actor cannot be reached: {error}") from error
        return unpacked(data)

    def close(self) -> None:
        pass


class _Child(_Calls):
    """The coordinator's connection to an actor that is a worker or a server."""

    def __init__(self, ray: Any, actor: Any) -> None:
        super().__init__(actor)
        self._ray, self._sends, self._turn = ray, threading.Lock(), 0

    def send(self, message: Message, *, waits: bool = False) -> Any:
        with self._sends:
            answer = self._actor.do.remote(self._turn, waits, _bytes(message), *message.ends)
            self._turn += 1
        return answer

    def request(self, message: Message) -> Callable[[], Message]:
        return functools.partial(self._got, self.send(message, waits=True))

    def limit(self, seconds: float | None) -> None:
        self._seconds = seconds

    def has_started(self) -> bool:
        ready = self._actor.ready.remote()
        with suppress(self._ray.exceptions.RayError):
            if not self._ray.wait([ready], timeout=_SECONDS_TO_START)[0]:
                _LOG.warning(
                    "Waiting for a worker that Ray does not start: is there a GPU for each?"
                )
            self._ray.get(ready)
            return True
        return False

    def wait(self) -> str:
        with suppress(self._ray.exceptions.RayError):
            return str(self._ray.get(self._actor.wait.remote()))
        return ""

    def connect(self, number: int, server: _Child) -> None:
        self.send(Message("link", [number], ends=[server._actor]))

    def end(self) -> None:
        if self._ray.is_initialized():
            self._ray.kill(self._actor)

    kill = end


def _imported() -> Any:
    with importing("engine='ray' needs Ray", "ray"):
        import ray
    return ray


def _resource(task: str) -> str:
    # Only the machine of a task has it. Ray ends a name at a comma.
    return f"{task}:JAX-{jax.__version__}"


class Cluster:
    """Starts actors: in the connected cluster, in that of ``RAY_ADDRESS``, or in a new one on this machine.

    With a head, the address of the chief, Ray starts there, and each actor on the machine of its task.
    """

    def __init__(self, head: str | None = None) -> None:
        self._is_of_tasks, self._ip, self._port = head is not None, "127.0.0.1", "0"
        if head is not None:
            host, _, self._port = with_port(head, "The chief").rpartition(":")
            self._ip = socket.gethostbyname(host)
        self._is_new = self._is_of_tasks or "RAY_ADDRESS" not in os.environ
        if self._is_new:  # Ray reads its settings when it is imported first
            for name, value in {_MACHINES: str(int(self._ip != "127.0.0.1")), **_SETTINGS}.items():
                os.environ.setdefault(name, value)
        self._ray = _imported()
        if self._ip == "127.0.1.1":  # Debian's address for the name of this machine
            self._ip = self._ray.util.get_node_ip_address()

    def _connect(self) -> None:
        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if self._is_new:
            folder = tempfile.mkdtemp(prefix="dj-")  # everybody may write to Ray's default
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            atexit.register(self._ray.shutdown)  # which comes first
            options.update(address="local", include_dashboard=False)
            options.update(_node_ip_address=self._ip, _temp_dir=f"{folder}/ray")
        handler, mask = signal.getsignal(signal.SIGTERM), os.umask(0o077)  # for the token's file
        os.environ["RAY_GCS_SERVER_PORT"] = self._port
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # it starts programs
                self._ray.init(**options)
        finally:
            del os.environ["RAY_GCS_SERVER_PORT"]
            os.umask(mask)
            with suppress(ValueError):  # not the main thread
                signal.signal(signal.SIGTERM, handler)

    def _joined(self, task: str) -> dict[str, int]:
        """Waits until a task has joined; returns the resource that only its machine has."""
        wanted, patience = _resource(task), time.monotonic() + _SECONDS_TO_JOIN
        while self._ray.is_initialized():
            alive = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
            offered = [name for names in alive for name in names if name.startswith(f"{task}:")]
            if wanted in offered:
                return {wanted: 1}
            if offered:
                raise ClusterError(
                    f"A process joined as {offered[0]}, and the chief has JAX {jax.__version__}. Install one "
                    "version on both."
                )
            if time.monotonic() > patience:
                _LOG.warning("Waiting for task %s, which has not joined: dj.Server(…).join()", task)
                patience = float("inf")
            time.sleep(_POLL_SECONDS)
        raise ClusterError(f"Ray was shut down before task {task} joined.")

    def child(self, kind: str, number: int) -> _Child:
        if not self._ray.is_initialized():
            self._connect()
        resources = self._joined(f"{_JOBS[kind]}-{number}") if self._is_of_tasks else {}
        platform = jax.default_backend() if kind == "worker" else "cpu"
        actor = self._ray.remote(_Worker if kind == "worker" else _Server).options(
            **_ACTOR_OPTIONS, num_gpus=int(platform == "gpu"), resources=resources
        )
        x64 = jax.dtypes.canonicalize_dtype("float64") == "float64"
        for _ in range(_TRIES):
            child = _Child(self._ray, actor.remote(kind, platform, x64=x64))
            if kind != "worker" or child.has_started():
                break
        return child

    def close(self) -> None:
        pass  # others may use the cluster


class Server:
    """A worker or a server (``ps``) of a cluster: it joins the chief, and runs what the chief schedules.

    The chief makes ``ParameterServerStrategy(cluster_resolver)``. Only the chief has data, models and steps.

    Args:
        server_or_cluster_def: the cluster, a ``ClusterSpec`` or a dict, with a ``chief``.
        job_name: ``"worker"`` or ``"ps"``.
        task_index: the index of this process in its job.
        protocol: the prefix of :attr:`target`; the connection itself is Ray's.
        config: accepted for ported code; JAX has no sessions to configure.
        start: whether to join at once, in another process that ends with this one.

    Raises:
        ValueError: the cluster has no such task, or no chief.
        MissingPackageError: Ray is not installed.

    Example:
        >>> import distribute_jax as dj
        >>> cluster = {"chief": ["host0:2222"], "worker": ["host1:2222"], "ps": ["host2:2222"]}
        >>> dj.Server(cluster, job_name="worker", task_index=0, start=False).target
        'grpc://host1:2222'

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Server
    """

    def __init__(
        self,
        server_or_cluster_def: Any,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: object = None,
        start: bool = True,
    ) -> None:
        cluster = ClusterSpec(server_or_cluster_def)
        if job_name is None or job_name not in _JOBS.values():
            raise ArgumentError(
                f"Server: job_name must be 'worker' or 'ps'; got {job_name!r:.60}. The chief makes a "
                "ParameterServerStrategy(cluster_resolver) instead."
            )
        index = check_int("Server: task_index", task_index, at_least=0)
        self._task, self._address = f"{job_name}-{index}", cluster.task_address(job_name, index)
        self._chief = with_port(
            cluster.task_address(CHIEF, cluster.task_indices(CHIEF)[0]), "Server: the chief"
        )
        self._protocol = protocol or "grpc"
        self._process: subprocess.Popen[bytes] | None = None
        if start:
            self.start()

    @property
    def target(self) -> str:
        """The address of this task in the cluster."""
        return f"{self._protocol}://{self._address}"

    def start(self) -> None:
        """Joins the chief's cluster in another process, as soon as the chief listens."""
        if self._process is not None:
            return
        _imported()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        host, _, port = self._chief.rpartition(":")
        offered = json.dumps({_resource(self._task): 1})
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _JOIN, host, port, f"--resources={offered}"],
            env={**_SETTINGS, **_OF_TASKS, **os.environ, _MACHINES: "1"},
            stdin=subprocess.PIPE,  # closed when this process ends, however that does
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )

    def join(self) -> None:
        """Waits until the chief's cluster has ended.

        Raises:
            ClusterError: this task could not join the cluster.
        """
        self.start()
        process: Any = self._process
        try:
            process.wait(_SECONDS_TO_JOIN)
        except subprocess.TimeoutExpired:
            if not self._chief_listens():
                _LOG.warning("Waiting for the chief, which does not answer at %s.", self._chief)
            process.wait()
        self._output.seek(0)
        text = self._output.read().decode(errors="replace")
        if "Ray runtime started" not in text and self._chief_listens():
            raise ClusterError(f"Task {self._task} could not join {self._chief}:\n{text[-2000:]}")

    def _chief_listens(self) -> bool:
        host, _, port = self._chief.rpartition(":")
        with suppress(OSError), socket.create_connection((host, int(port)), _SECONDS_TO_JOIN):
            return True
        return False
