"""Workers and servers that are actors of a Ray cluster: what ``_processes`` has on one machine, on several.

Only bytes travel, one buffer for each message. Ray neither repeats a call nor starts an actor again: that is
for the coordinator, which knows what was applied.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import jax

from distribute_jax._errors import MissingPackageError
from distribute_jax.servers._roles import role_of
from distribute_jax.servers._wire import Message, WireError, unpacked

_CALLS = 1000
"""How many calls an actor has at once at most: one of each worker, and some of the coordinator."""
_TRIES = 3
"""How often a worker is started; why it ends then is the error of the run that it takes."""
_LOCAL = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # for Ray: listen on the loopback address only
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class _Actor:
    """A process of the cluster that is a worker or a server."""

    def __init__(self, kind: str, platform: str, *, x64: bool) -> None:
        jax.config.update("jax_enable_x64", x64)
        if platform == "cpu":
            jax.config.update("jax_platforms", platform)
        self._role: Any = role_of(kind, _Calls)
        self._lock, self._turn = threading.Lock(), 0
        self._early: dict[int, tuple[Message, Future[Message | None]]] = {}

    def do(self, turn: int, waits: bool, data: bytes, *ends: Any) -> bytes | None:
        """Does what the coordinator asks for, when it has done all before: calls come in any order."""
        answer = Future[Message | None]()
        with self._lock:
            self._early[turn] = unpacked(data, ends), answer
            while (job := self._early.pop(self._turn, None)) is not None:
                self._turn += 1
                try:
                    job[1].set_result(self._role.do(job[0]))
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
        return _bytes(answer.result()) if waits else None

    def answer(self, data: bytes) -> bytes | None:
        """Does what a worker asks a server for."""
        return _bytes(self._role.answer(unpacked(data)))

    def ready(self) -> None:
        """Returns when it has started."""

    def wait(self) -> None:
        """Returns never."""
        threading.Event().wait()


class _Worker(_Actor):
    """Has a name by which it is known among the actors of a cluster."""


class _Server(_Actor):
    """As a worker."""


def _bytes(message: Message | None) -> bytes | None:
    return None if message is None else b"".join(message.packed())


class _Calls:
    """A connection, as of ``_wire``, which is calls of an actor: of a worker to a server."""

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


class _Control(_Calls):
    """The connection of the coordinator."""

    def __init__(self, actor: Any) -> None:
        super().__init__(actor)
        self._sends, self._turn = threading.Lock(), 0

    def send(self, message: Message) -> None:
        self._do(message, False)

    def _do(self, message: Message, waits: bool) -> Any:
        with self._sends:
            answer = self._actor.do.remote(self._turn, waits, _bytes(message), *message.ends)
            self._turn += 1
        return answer

    def ask(self, message: Message) -> Message:
        return self._got(self._do(message, True))

    def limit(self, seconds: float | None) -> None:
        self._seconds = seconds


class _Child:
    """An actor that is a worker or a server, as the coordinator has it."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor
        self.control = _Control(actor)

    def has_started(self) -> bool:
        """Waits until it has started, and returns False if it has ended instead."""
        with suppress(self._ray.exceptions.RayError):
            self._ray.get(self._actor.ready.remote())
            return True
        return False

    def wait(self) -> None:
        """Waits until it has ended."""
        with suppress(self._ray.exceptions.RayError):
            self._ray.get(self._actor.wait.remote())

    def connect(self, number: int, server: _Child) -> None:
        """Lets it, a worker, reach the server of a number."""
        self.control.send(Message("link", [number], ends=[server._actor]))

    def kill(self) -> None:
        """Ends it, as if something else had done so."""
        self.end()

    def end(self) -> None:
        """Ends it, and does not wait."""
        if self._ray.is_initialized():
            self._ray.kill(self._actor)


class Cluster:
    """Starts actors: in the cluster that is connected, or that of ``RAY_ADDRESS``, or one of this machine."""

    def __init__(self) -> None:
        """Raises: MissingPackageError."""
        if "RAY_ADDRESS" not in os.environ:
            for name, value in _LOCAL.items():  # Ray reads them when it is imported
                os.environ.setdefault(name, value)
        try:
            import ray
        except ImportError as error:
            raise MissingPackageError(
                "engine='ray' needs Ray, which is not installed: pip install 'distribute-jax[ray]'."
            ) from error
        self._ray = ray

    def _connect(self) -> None:
        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if "RAY_ADDRESS" not in os.environ:
            options.update(address="local", include_dashboard=False, _node_ip_address="127.0.0.1")
        handler, mask = signal.getsignal(signal.SIGTERM), os.umask(0o077)  # for the token's file
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # it starts programs
                self._ray.init(**options)
        finally:
            os.umask(mask)
            with suppress(ValueError):  # not the main thread
                signal.signal(signal.SIGTERM, handler)

    def child(self, kind: str) -> _Child:
        """Returns a new actor, which is a worker or a server."""
        if not self._ray.is_initialized():
            self._connect()
        platform = jax.default_backend() if kind == "worker" else "cpu"
        actor = self._ray.remote(_Worker if kind == "worker" else _Server).options(
            num_cpus=0,
            num_gpus=int(platform == "gpu"),
            max_concurrency=_CALLS,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        )
        x64 = jax.dtypes.canonicalize_dtype("float64") == "float64"
        for _ in range(_TRIES):
            child = _Child(self._ray, actor.remote(kind, platform, x64=x64))
            if kind != "worker" or child.has_started():
                break
        return child

    def close(self) -> None:
        """Leaves the cluster as it is: others may use it."""
