"""The program of processes that are workers and servers, and of the process that they are forked from.

Actors of Ray run ``role_of`` too; messages come to them by calls of Ray.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import jax

from distribute_jax._messages import error_text
from distribute_jax.servers._device_program import load_program
from distribute_jax.servers._halves import LookupHalf
from distribute_jax.servers._rows import Lookup
from distribute_jax.servers._updates import Store
from distribute_jax.servers._wire import Connection, Message, WireError
from distribute_jax.servers._worker import Order, WorkerProgram, run


def role_of(kind: str, connect: Callable[[Any], Any]) -> Server | Worker:
    """Makes this process a worker or a server; ``connect`` makes a connection of an end that it is sent."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(f"dj {kind}")  # shown by ps and top
    return Server(connect) if kind == "server" else Worker(connect)


class Server:
    """Takes updates from the coordinator, and reads and parts of updates from workers."""

    def __init__(self, connect: Callable[[Any], Any]) -> None:
        jax.config.update("jax_platforms", "cpu")  # accelerators are for workers
        self.store, self._connect = Store(), connect

    def do(self, message: Message) -> Message | None:
        if message.name == "pull":
            return Message("values", arrays=self.store.pull(*message.plain))
        if message.name == "load":
            name, reads, writes = message.plain
            self.store.load(name, reads, writes, load_program(message.arrays[0].tobytes()))
        elif message.name == "link":
            worker = self._connect(*message.ends)
            threading.Thread(target=self._serve, args=(worker,), daemon=True).start()
        else:  # assign, commit, forget, prepare or restore
            arrays = [[*map(jax.device_put, message.arrays)]] if message.arrays else []
            getattr(self.store, message.name)(*message.plain, *arrays)
        return None

    def _serve(self, worker: Connection) -> None:
        try:
            while True:
                worker.send(self.store.answer(worker.receive()))
        except WireError:
            worker.close()
        except BaseException:  # the worker would ask again for ever
            traceback.print_exc()
            os._exit(1)


class Worker:
    """Runs closures; it answers each with results, or with why there are none."""

    def __init__(self, connect: Callable[[Any], Any]) -> None:
        self._connect = connect
        self._programs: dict[str, WorkerProgram] = {}
        self._links: dict[int, Connection] = {}
        self._device = jax.local_devices()[0]

    def do(self, message: Message) -> Message | None:
        if message.name == "run":
            return self._run(message)
        if message.name == "load":
            self._load(message)
        elif message.name == "forget":
            for name in message.plain:
                del self._programs[name]
        else:  # link
            (server,) = message.plain
            if server in self._links:
                self._links[server].close()
            self._links[server] = self._connect(*message.ends)
        return None

    def _load(self, message: Message) -> None:
        name, takes, results_at, *by_rows = message.plain
        part, *indices = [load_program(data.tobytes()) for data in message.arrays]
        lookups = None
        if by_rows:
            facts, *others = by_rows[0]
            lookups = LookupHalf(indices[0], [Lookup(*fact) for fact in facts], *others)
        self._programs[name] = WorkerProgram(name, part, takes, results_at, lookups)

    def _run(self, message: Message) -> Message:
        name, *order = message.plain
        links = [self._links[server].request for server in sorted(self._links)]
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


def main(descriptor: int) -> None:
    """Forks a process for each socket that it is sent; kills one on request, and all when its parent ends."""
    # JAX, whose import takes seconds, is imported already. There is one thread, and no backend yet.
    control, running = Connection(socket.socket(fileno=descriptor)), set[int]()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where a parent ignores it, waitpid fails
    try:
        while True:
            message = control.receive()
            # The number of a process that has ended may be another's later.
            running -= {pid for pid in running if os.waitpid(pid, os.WNOHANG)[0]}
            if message.name == "end":
                for pid in running.intersection(message.plain):
                    os.kill(pid, signal.SIGKILL)
                continue
            (end,) = message.ends
            if (pid := os.fork()) == 0:
                control.close()
                _serve_coordinator(message.name, end)
            os.close(end)
            running.add(pid)
            control.send(Message("pid", [pid]))
    except WireError:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)


def _serve_coordinator(kind: str, descriptor: int) -> NoReturn:
    control = Connection(socket.socket(fileno=descriptor))
    try:
        role = role_of(kind, lambda end: Connection(socket.socket(fileno=end)))
        while True:
            if (answer := role.do(control.receive())) is not None:
                control.send(answer)
    except WireError:  # the coordinator is gone
        os._exit(0)
    except BaseException as error:
        traceback.print_exc()
        control.send(Message("ended", [error_text(error)]))
    finally:
        os._exit(1)
