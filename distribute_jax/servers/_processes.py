"""Workers and servers that are processes of this machine, and are replaced when they end.

The coordinator starts them with one end of a pair of sockets each, and gives a worker and a server the two
ends of another one: there is no port and no file. They hold none of the user's code, only exported programs.
All are forked from one process that has imported JAX, so that a lost one is soon replaced.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np

from distribute_jax._errors import ContextError, StepFailedError
from distribute_jax._interrupts import interrupts_held_back
from distribute_jax.program._halves import Halves
from distribute_jax.program._part import as_key, as_numbers, export_part
from distribute_jax.servers._coordinator import Coordinator, Work
from distribute_jax.servers._engine import Engine, WorkerLostError
from distribute_jax.servers._state import Program
from distribute_jax.servers._store import Key, ServerProgram, Snapshot
from distribute_jax.servers._wire import Connection, Message, WireError, pair

_PLATFORM_OF_SERVERS = "cpu"
_SECONDS_TO_BEGIN, _MOMENT, _PATIENCE = 60.0, 0.01, 10.0
_LOG = logging.getLogger("distribute_jax")
_STOPPED = "Waiting for %s: process %d is stopped. Let it go on with kill -CONT %d, or kill it."


class _Child:
    """A process that is a worker or a server."""

    def __init__(self, nursery: _Nursery, pid: int, end: socket.socket) -> None:
        self._nursery, self._pid, self._end = nursery, pid, end
        self.control = Connection(end)

    def wait(self) -> str:
        """Waits until it has ended; returns its error, if it said so."""
        poll = select.poll()
        with suppress(OSError, ValueError):  # this end is closed already
            # It wakes up when the other end is closed, and for nothing else.
            poll.register(self._end, 0)
            poll.poll()
        with suppress(WireError):
            self.control.receive()
        return self.control.error

    def stopped(self) -> int | None:
        """Returns its number if something like SIGSTOP has stopped it."""
        with suppress(OSError):  # it has just ended, or this system does not tell
            state = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()[0]
            return self._pid if state in "Tt" else None
        return None

    def connect(self, number: int, server: _Child) -> None:
        """Lets it, a worker, reach the server of a number."""
        mine, theirs = pair()
        with mine, theirs:
            with suppress(WireError):
                server.control.send(Message("link", ends=[theirs.fileno()]))
            self.control.send(Message("link", [number], ends=[mine.fileno()]))

    def kill(self) -> None:
        """Ends it, as if something else had done so."""
        self._nursery.end(self._pid)

    def end(self) -> None:
        """Ends it, and does not wait."""
        self.kill()
        self.control.close()


class _Nursery:
    """The process that the others are forked from."""

    def __init__(self, platform: str) -> None:
        self._platform, self._lock, self._is_closed = platform, threading.Lock(), False
        self._control = self._started()

    def _started(self) -> Connection:
        here, there = pair()
        path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "JAX_ENABLE_X64": str(int(_float_bits() == 64)),
            "OPENBLAS_NUM_THREADS": "1",  # a process with several threads cannot be forked
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        if self._platform == _PLATFORM_OF_SERVERS:
            environment["JAX_PLATFORMS"] = self._platform
        with there:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "distribute_jax.servers._child", str(there.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                start_new_session=True,  # Ctrl-C is for the coordinator
            )
        threading.Thread(target=process.wait, daemon=True).start()
        return Connection(here)

    def child(self, kind: str, number: int) -> _Child:
        """Returns a new process, which is a worker or a server; its number does not matter."""
        here, there = pair()
        with self._lock, there:
            message = Message(kind, ends=[there.fileno()])
            try:
                (pid,) = self._control.ask(message).plain
            except WireError:  # it was killed, and all that came from it
                if self._is_closed:  # nobody would end another one
                    here.close()
                    raise
                self._control.close()
                self._control = self._started()
                (pid,) = self._control.ask(message).plain
        return _Child(self, pid, here)

    def end(self, pid: int) -> None:
        """Ends a process, if it is one of these."""
        with self._lock, suppress(WireError):
            self._control.send(Message("end", [pid]))

    def close(self) -> None:
        """Ends all."""
        with self._lock:
            self._is_closed = True
            self._control.close()


class RemoteStore:
    """A server in another process, as the coordinator reaches it; what it is told before it runs is kept.

    Requests of the coordinator arrive in their order; a thread sends them, so that nobody waits for a process
    that computes or is stopped. While the process is gone they are dropped: the servers will go back to a
    snapshot.
    """

    def __init__(self, device: jax.Device) -> None:
        """Starts with no process; arrays that are pulled are put on a device."""
        self._device = device
        self.child: Any = None
        """The process; None before it is started."""
        self._loads: dict[str, Message] = {}
        self._types: dict[Key, Any] = {}
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        weakref.finalize(self, self._requests.put, None)

    def attach(self, child: Any) -> None:
        """Lets a process be this server."""
        if self.child is None:
            threading.Thread(target=_do_all, args=(self._requests,), daemon=True).start()
        self.child = child
        for message in list(self._loads.values()):  # more may be loaded meanwhile
            self._tell(message)

    def _tell(self, message: Message) -> None:
        if self.child is not None:
            self._requests.put((Future(), _send, self.child, message))

    def load(self, name: str, program: ServerProgram) -> None:
        """As of ``Store``, as all that follow."""
        data = export_part(program.apply, [_PLATFORM_OF_SERVERS])
        plain = [name, program.reads, program.writes]
        self._loads[name] = Message("load", plain, [np.frombuffer(data, np.uint8)])
        self._tell(self._loads[name])

    def assign(self, values: dict[Key, Any]) -> None:
        self._types.update({key: jax.typeof(value) for key, value in values.items()})
        self._tell(Message("assign", list(values), list(map(as_numbers, values.values()))))

    def prepare(self, run: int, keys: Iterable[Key]) -> None:
        self._tell(Message("prepare", [run, list(keys)]))

    def commit(self, epoch: int, number: int, runs: Sequence[int], oldest: int) -> None:
        self._tell(Message("commit", [epoch, number, runs, oldest]))

    def drop(self, run: int) -> None:
        self._tell(Message("drop", [run]))

    def forget(self, keys: Iterable[Key], programs: Sequence[str] = ()) -> None:
        for name in programs:
            self._loads.pop(name, None)
        self._tell(Message("forget", [list(keys), programs]))

    def restore(self, epoch: int, snapshot: Snapshot) -> None:
        arrays = list(map(as_numbers, snapshot.state.values()))
        self._tell(Message("restore", [epoch, snapshot.version, list(snapshot.state)], arrays))

    def pull(self, keys: Sequence[Key]) -> Future[list[Any]] | list[Any]:
        """Returns arrays as they will be when all that was asked before is done."""
        if not keys:
            return []
        values, types = Future[list[Any]](), [self._types[key] for key in keys]
        self._requests.put((values, self._pulled, self.child, keys, types))
        return values

    def _pulled(self, child: Any, keys: Sequence[Key], types: Sequence[Any]) -> list[Any]:
        if child is None:
            raise WireError("it was not started")
        answer = child.control.request(Message("pull", list(keys)))()
        arrays = jax.device_put(answer.arrays, self._device)
        return list(map(as_key, arrays, types))


def _send(child: Any, message: Message) -> None:
    """Sends a message; ends a process that would go on without it, as where memory is short."""
    try:
        child.control.send(message)
    except Exception:
        child.kill()
        raise


def _do_all(requests: queue.SimpleQueue[Any]) -> None:
    """Does one request after the other."""
    while (request := requests.get()) is not None:
        answer, do, *args = request
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(do(*args))
            except Exception as error:
                answer.set_exception(error)
        del request, answer, do, args  # while it waits for the next


class _Worker:
    """A worker in another process."""

    def __init__(self, child: Any, stores: Sequence[RemoteStore], seconds: float | None) -> None:
        """Takes the process; a run that takes more than so many seconds counts as lost."""
        self._child, self._stores = child, stores
        child.control.limit(seconds)
        self._loaded: dict[str, weakref.ref[Program]] = {}
        self._linked = [None] * len(stores)

    def run(self, work: Work, data: list[Any]) -> list[Any]:
        program, control = work.closure.program, self._child.control
        half, has_work = program.bound.halves.worker, False
        try:
            self._link()
            if gone := [name for name, of in self._loaded.items() if of() is None]:
                control.send(Message("forget", gone))
                for name in gone:
                    del self._loaded[name]
            if program.name not in self._loaded:
                halves = program.bound.halves
                facts = [program.name, program.worker.takes, halves.results_at]
                facts += [] if halves.lookups is None else [halves.lookups[1:]]
                parts = [np.frombuffer(data, np.uint8) for data in _exported(halves)]
                control.send(Message("load", facts, parts))
                has_work = True
                self._loaded[program.name] = weakref.ref(program)
            plain: list[Any] = [program.name, *work.order]
            message = Message("run", plain, _as_sent(data, half.values[: len(data)]))
            answer_of = control.request(message)
            has_work = True
            answer = answer_of()
        except WireError as error:
            self.stop()
            raise WorkerLostError(str(error), has_work=has_work) from error
        if answer.name == "void":  # it has left all servers
            self._linked = [None] * len(self._stores)
            raise WireError("the run counts no more")
        if answer.name == "failed":
            raise StepFailedError(f"{program.bound.step} failed on a worker: {answer.plain[0]}")
        types = [half.returns[i] for i in program.bound.halves.results_at]
        return [as_key(x, like) for x, like in zip(answer.arrays, types, strict=True)]

    def _link(self) -> None:
        """Connects the worker with each server that is another process than before."""
        for number, store in enumerate(self._stores):
            if (child := store.child) is not self._linked[number]:
                self._child.connect(number, child)
                self._linked[number] = child

    def stop(self) -> None:
        self._child.end()


def _as_sent(data: Sequence[Any], types: Sequence[Any]) -> list[Any]:
    """Returns what a program takes, as arrays of its types."""
    return [
        as_numbers(x) if isinstance(x, jax.Array) else np.asarray(x, like.dtype)
        for x, like in zip(data, types, strict=True)
    ]


_workers: weakref.WeakKeyDictionary[Halves, list[bytes]] = weakref.WeakKeyDictionary()


def _exported(halves: Halves) -> list[bytes]:
    """Returns the worker's half as bytes, and what computes the indices of its lookups."""
    if (data := _workers.get(halves)) is None:
        parts = [halves.worker, *([halves.lookups.compute] if halves.lookups else [])]
        data = [export_part(part, [jax.default_backend()]) for part in parts]
        _workers[halves] = data
    return data


def _float_bits() -> int:
    return 8 * int(jax.dtypes.canonicalize_dtype("float64").itemsize)


class Processes(Engine):
    """The processes of one strategy."""

    def __init__(
        self,
        coordinator: Coordinator,
        stores: Sequence[RemoteStore],
        seconds: float | None = None,
        nursery: Any = None,
    ) -> None:
        """Starts them all; a run of more than so many seconds counts as lost.

        The nursery is where they come from, if that is not this machine.
        """
        self._stores, self._seconds, self._ended = stores, seconds, threading.Event()
        self._workers: dict[int, Any] = {}
        self._bits = _float_bits()
        self._nursery = nursery or _Nursery(coordinator.device.platform)
        try:
            for number in range(len(stores)):
                self._serve(number)
            with interrupts_held_back():  # no thread takes work for an engine that is not there
                super().__init__(coordinator, self._worker_of)
        except BaseException:
            self._close()
            raise
        if nursery is None:
            threading.Thread(target=self._name_stopped, daemon=True).start()

    def _name_stopped(self) -> None:
        """Says which processes are stopped, for whom everybody would wait in silence."""
        told = set[str]()
        while not self._ended.wait(_PATIENCE):
            every = {f"worker {i}": child for i, child in sorted(self._workers.items())}
            every |= {f"server {i}": store.child for i, store in enumerate(self._stores)}
            stopped = {of: pid for of, child in every.items() if (pid := child.stopped())}
            for of in stopped.keys() - told:
                _LOG.warning(_STOPPED, of, stopped[of], stopped[of])
            told = {*stopped}

    def _worker_of(self, number: int) -> _Worker:
        child = self._workers[number] = self._nursery.child("worker", number)
        return _Worker(child, self._stores, self._seconds)

    def _serve(self, number: int) -> None:
        child = self._nursery.child("server", number)
        self._stores[number].attach(child)
        threading.Thread(target=self._watch, args=(number, child), daemon=True).start()

    def _watch(self, number: int, child: Any) -> None:
        """Waits for the end of a server, and replaces it."""
        error = child.wait()
        if self._ended.is_set():
            return
        self._coordinator.lose_server(number, error)
        child.control.close()
        try:
            self._serve(number)
            self._coordinator.go_back()
        except BaseException as error:  # nobody replaces it, and all would wait for it
            self._coordinator.fail_for_good(error)

    def kill(self, kind: str, number: int) -> None:
        """Ends the process of a worker or a server; of a worker, once it has begun to work."""
        if kind == "server":
            self._stores[number].child.kill()
            return
        end = time.monotonic() + _SECONDS_TO_BEGIN
        while number not in self._workers:
            if time.monotonic() > end:
                raise ContextError(f"dj.testing.kill: worker {number} has had nothing to do yet.")
            time.sleep(_MOMENT)
        self._workers[number].kill()

    def check(self, halves: Halves) -> None:
        """Raises: LoweringError: the step cannot be sent to another process."""
        if _float_bits() != self._bits:
            raise ContextError(
                "jax_enable_x64 has changed since the workers started. Set it before the first function is "
                "scheduled, or make a new strategy."
            )
        _exported(halves)

    def stop(self) -> None:
        super().stop()
        self._close()

    def _close(self) -> None:
        self._ended.set()
        self._nursery.close()
        for store in self._stores:
            if store.child is not None:
                store.child.end()
