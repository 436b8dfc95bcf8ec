"""What the processes do that are workers and servers, however the messages come to them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from distribute_jax._messages import error_text
from distribute_jax.program._halves import LookupHalf
from distribute_jax.program._part import load_part
from distribute_jax.program._rows import Lookup
from distribute_jax.servers._store import ServerProgram, Snapshot, Store
from distribute_jax.servers._wire import Connection, Message, WireError
from distribute_jax.servers._worker import Order, WorkerProgram, run


class Role:
    """What a process is."""

    REQUESTS: frozenset[str]

    def do(self, message: Message) -> Message | None:
        """Does what the coordinator asks for, and returns the answer to a question."""
        if message.name not in self.REQUESTS:
            raise WireError(f"{message.name!r:.80} is not a request to a {type(self).__name__}")
        answer: Message | None = getattr(self, message.name)(message)
        return answer


def role_of(kind: str, connect: Callable[[Any], Any]) -> Role:
    """Lets this process be a worker or a server, which makes its connections of the ends that it is sent."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(f"dj {kind}")  # for who looks at what runs
    return Server(connect) if kind == "server" else _Worker(connect)


class Server(Role):
    """Takes updates from the coordinator, and reads and parts of updates from workers."""

    REQUESTS = frozenset(["load", "assign", "pull", "restore", "link"])

    def __init__(self, connect: Callable[[Any], Connection]) -> None:
        """Starts with no state."""
        jax.config.update("jax_platforms", "cpu")  # accelerators are for workers
        self.store, self._connect = Store(), connect

    def do(self, message: Message) -> Message | None:
        if message.name not in ("prepare", "commit", "drop", "forget"):
            return super().do(message)
        getattr(self.store, message.name)(*message.plain)
        return None

    def load(self, message: Message) -> None:
        name, reads, writes = message.plain
        part = load_part(message.arrays[0].tobytes())
        self.store.load(name, ServerProgram(tuple(reads), tuple(writes), part))

    def assign(self, message: Message) -> None:
        self.store.assign(
            dict(zip(message.plain, map(jax.device_put, message.arrays), strict=True))
        )

    def pull(self, message: Message) -> Message:
        return Message("values", arrays=self.store.pull(message.plain))

    def restore(self, message: Message) -> None:
        epoch, version, keys = message.plain
        arrays = map(jax.device_put, message.arrays)
        self.store.restore(epoch, Snapshot(version, dict(zip(keys, arrays, strict=True))))

    def link(self, message: Message) -> None:
        (end,) = message.ends
        threading.Thread(target=self._serve, args=(self._connect(end),), daemon=True).start()

    def _serve(self, worker: Connection) -> None:
        try:
            while True:
                worker.send(self.store.answer(worker.receive()))
        except WireError:
            worker.close()


class _Worker(Role):
    """Does runs; it answers each with results, or with why there are none."""

    REQUESTS = frozenset(["load", "forget", "link", "run"])

    def __init__(self, connect: Callable[[Any], Connection]) -> None:
        self._connect = connect
        self._programs: dict[str, WorkerProgram] = {}
        self._links: dict[int, Connection] = {}
        self._device = jax.local_devices()[0]

    def load(self, message: Message) -> None:
        name, takes, results_at, *by_rows = message.plain
        part, *indices = [load_part(data.tobytes()) for data in message.arrays]
        lookups = None
        if by_rows:
            of, *others = by_rows[0]
            lookups = LookupHalf(indices[0], [Lookup(*facts) for facts in of], *others)
        self._programs[name] = WorkerProgram(name, part, takes, results_at, lookups)

    def forget(self, message: Message) -> None:
        for name in message.plain:
            del self._programs[name]

    def link(self, message: Message) -> None:
        (server,), (end,) = message.plain, message.ends
        if server in self._links:
            self._links[server].close()
        self._links[server] = self._connect(end)

    def run(self, message: Message) -> Message:
        name, *order = message.plain
        links = [self._links[server] for server in sorted(self._links)]
        devices = self._device, self._device
        try:
            results = run(self._programs[name], Order(*order), list(message.arrays), links, devices)
        except WireError:
            while self._links:  # answers may be on the way that nobody has read
                self._links.popitem()[1].close()
            return Message("void")
        except Exception as error:
            return Message("failed", [error_text(error)])
        return Message("results", arrays=results)
