"""Processes that are workers and servers, and the one that they are forked from."""

from __future__ import annotations

import operator
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import jax

from distribute_jax._messages import error_text
from distribute_jax.program._export import load_part
from distribute_jax.program._halves import LookupHalf
from distribute_jax.program._lookups import Lookup
from distribute_jax.servers._store import ServerProgram, Snapshot, Store
from distribute_jax.servers._wire import Connection, Message, WireError
from distribute_jax.servers._worker import Order, RunIsVoid, WorkerProgram, run


def main(descriptor: int) -> None:
    """Forks a process for each end that comes, or ends one of them; with its parent it ends them all.

    What takes seconds, to import JAX, is done once and before. It has one thread, and has started no backend.
    """
    control, running = Connection(socket.socket(fileno=descriptor)), set[int]()
    try:
        while True:
            message = control.receive()
            for pid in list(running):
                if os.waitpid(pid, os.WNOHANG)[0]:  # its number may be another's now
                    running.remove(pid)
            if message.name == "end":
                for pid in running.intersection(message.plain):
                    os.kill(pid, signal.SIGKILL)
                continue
            (end,) = message.ends
            if (pid := os.fork()) == 0:
                control.close()
                _be(message.name, end)
            os.close(end)
            running.add(pid)
            control.send(Message("pid", [pid]))
    except WireError:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)


def _be(kind: str, descriptor: int) -> NoReturn:
    """Is a worker or a server, which does what messages say."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(f"dj {kind}")  # for who looks at what runs
    control = Connection(socket.socket(fileno=descriptor))
    messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(control, messages), daemon=True).start()
    try:
        role = _Server() if kind == "server" else _Worker()
        while True:
            message = messages.get()
            if message.name not in role.REQUESTS:
                raise WireError(f"{message.name!r:.80} is not a request to a {kind}")
            if (answer := getattr(role, message.name)(message)) is not None:
                control.send(answer)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _receive(control: Connection, messages: queue.SimpleQueue[Message]) -> None:
    """Ends the process with its parent, whatever it computes."""
    try:
        while True:
            messages.put(control.receive())
    except WireError:
        os._exit(0)


class _Server:
    """Takes updates from the coordinator, and reads and parts of updates from workers."""

    REQUESTS = frozenset(
        ["load", "assign", "prepare", "commit", "drop", "forget", "pull", "restore", "link"]
    )

    def __init__(self) -> None:
        jax.config.update("jax_platforms", "cpu")  # accelerators are for workers
        self._store = Store()

    def load(self, message: Message) -> None:
        name, reads, writes = message.plain
        part = load_part(message.arrays[0].tobytes())
        self._store.load(name, ServerProgram(tuple(reads), tuple(writes), part, operator.add))

    def assign(self, message: Message) -> None:
        self._store.assign(
            dict(zip(message.plain, map(jax.device_put, message.arrays), strict=True))
        )

    def prepare(self, message: Message) -> None:
        self._store.prepare(*message.plain)

    def commit(self, message: Message) -> None:
        self._store.commit(*message.plain)

    def drop(self, message: Message) -> None:
        self._store.drop(*message.plain)

    def forget(self, message: Message) -> None:
        self._store.forget(message.plain)

    def pull(self, message: Message) -> Message:
        return Message("values", arrays=self._store.pull(message.plain))

    def restore(self, message: Message) -> None:
        epoch, version, keys = message.plain
        arrays = map(jax.device_put, message.arrays)
        self._store.restore(epoch, Snapshot(version, dict(zip(keys, arrays, strict=True))))

    def link(self, message: Message) -> None:
        (end,) = message.ends
        worker = Connection(socket.socket(fileno=end))
        threading.Thread(target=self._serve, args=(worker,), daemon=True).start()

    def _serve(self, worker: Connection) -> None:
        try:
            while True:
                message = worker.receive()
                if message.name == "fetch":
                    epoch, number, at = message.plain
                    values = self._store.fetch(epoch, number, at, list(message.arrays))
                    void = Message("void")
                    worker.send(void if values is None else Message("values", arrays=values))
                else:
                    epoch, number, program = message.plain
                    self._store.stage(epoch, number, program, list(message.arrays))
                    worker.send(Message("staged"))
        except WireError:
            worker.close()


class _Link:
    """A server, as a worker reaches it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def ask(self, request: str, *args: Any) -> Callable[[], Any]:
        *plain, last = args
        arrays = last if isinstance(last, list) else ()
        plain = plain if isinstance(last, list) else list(args)
        self._connection.send(Message(request, plain, arrays))
        return self._answer

    def _answer(self) -> Sequence[Any] | None:
        answer = self._connection.receive()
        return None if answer.name == "void" else answer.arrays

    def close(self) -> None:
        self._connection.close()


class _Worker:
    """Does runs; it answers each with results, or with why there are none."""

    REQUESTS = frozenset(["load", "link", "run"])

    def __init__(self) -> None:
        self._programs: dict[str, WorkerProgram] = {}
        self._links: dict[int, _Link] = {}
        self._device = jax.local_devices()[0]

    def load(self, message: Message) -> None:
        name, takes, results_at, *by_rows = message.plain
        part, *indices = [load_part(data.tobytes()) for data in message.arrays]
        lookups = None
        if by_rows:
            of, *others = by_rows[0]
            lookups = LookupHalf(indices[0], [Lookup(*facts) for facts in of], *others)
        self._programs[name] = WorkerProgram(name, part, takes, results_at, lookups)

    def link(self, message: Message) -> None:
        (server,), (end,) = message.plain, message.ends
        if server in self._links:
            self._links[server].close()
        self._links[server] = _Link(Connection(socket.socket(fileno=end)))

    def run(self, message: Message) -> Message:
        name, *order = message.plain
        links = [self._links[server] for server in sorted(self._links)]
        devices = self._device, self._device
        try:
            results = run(self._programs[name], Order(*order), list(message.arrays), links, devices)
        except RunIsVoid:
            return Message("void")
        except WireError:
            while self._links:  # answers may be on the way that nobody has read
                self._links.popitem()[1].close()
            return Message("unreachable")
        except Exception as error:
            return Message("failed", [error_text(error)])
        return Message("results", arrays=results)


if __name__ == "__main__":
    main(int(sys.argv[1]))
