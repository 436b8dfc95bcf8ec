"""The workers of a strategy: threads, or processes of this machine; a lost one is replaced.

The coordinator starts a process with one end of a socket pair, and sends a worker and a server the two ends
of another: there is no port and no file. They hold none of the user's code, only exported programs. All are
forked from one process that has imported JAX already, so that a lost one is replaced quickly.
"""

from __future__ import annotations

import functools
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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np

from distribute_jax._errors import ContextError, StepFailedError, UnsupportedError
from distribute_jax._interrupts import interrupts_held_back
from distribute_jax._messages import as_numbers, error_text, from_numbers, is_runtime_failure
from distribute_jax.servers._coordinator import Coordinator
from distribute_jax.servers._device_program import export_program
from distribute_jax.servers._halves import Halves
from distribute_jax.servers._state import Program
from distribute_jax.servers._updates import Key
from distribute_jax.servers._wire import Connection, Message, WireError
from distribute_jax.servers._worker import Order, run

_SECONDS_TO_END = 10.0


Worker = Callable[[Program, Order, list[Any]], list[Any]]
"""Returns the results of a run; raises WorkerLostError, or WireError if it must be repeated."""


class WorkerLostError(Exception):
    """A worker has ended, or cannot be reached; ``has_work`` if the work it was sent may be to blame."""

    def __init__(self, reason: str, *, has_work: bool = True) -> None:
        super().__init__(reason)
        self.has_work = has_work


class Engine:
    """The workers of one strategy, here threads; a lost worker is replaced by one of the same number."""

    def __init__(self, coordinator: Coordinator, devices: Sequence[jax.Device] = ()) -> None:
        self._coordinator, self._devices = coordinator, devices
        self._stores: Sequence[Any] = coordinator.stores
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()

    def start(self) -> None:
        """Starts the workers, if they have not been started."""
        with self._starting:  # two threads may schedule
            if not self.has_started:
                try:
                    self._start_servers()
                    with interrupts_held_back():
                        self._start_threads()
                except BaseException:
                    self._close()
                    raise

    def _start_servers(self) -> None:
        """Starts servers that are not objects of this process."""

    def _start_threads(self) -> None:
        for index in range(len(self._threads), self._coordinator.workers):
            name = f"worker {index} of parameter servers"
            thread = threading.Thread(target=self._drive, args=(index,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    @property
    def has_started(self) -> bool:
        return bool(self._threads)

    def resize(self, workers: int) -> None:
        """Changes the number of workers; waits for those that leave to finish what they run."""
        with self._starting:  # another thread may schedule first, or change their number too
            self._coordinator.resize(workers)
            leaving = self._threads[workers:]
            del self._threads[workers:]  # also if the wait for them is interrupted
            for thread in leaving:
                thread.join()
            if self.has_started:
                self._start_threads()

    def kill(self, kind: str, number: int) -> None:
        raise UnsupportedError(
            f'dj.testing.kill: {kind} {number} is a thread of this process. Use engine="processes".'
        )

    def check(self, halves: Halves) -> None:
        """Refuses a step that these workers cannot run."""

    def stop(self) -> None:
        """Waits until the workers have finished what they run: none may compute while Python ends."""
        self._coordinator.stop()
        end = time.monotonic() + _SECONDS_TO_END
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(end - time.monotonic(), 0.0))
        self._close()

    def _worker(self, index: int) -> Worker:
        """Starts a worker, here one that computes in the thread that calls it."""
        devices = self._devices[index % len(self._devices)], self._coordinator.device
        links = [store.request for store in self._stores]
        return lambda program, order, data: run(program.worker, order, data, links, devices)

    def _end(self, worker: Worker | None) -> None:
        """Ends a worker, if there is one."""

    def _close(self) -> None:
        """Ends the servers."""

    def _drive(self, index: int) -> None:
        worker: Worker | None = None
        try:
            while True:
                worker = worker or self._worker(index)  # others may take the work while it starts
                if (work := self._coordinator.take(index)) is None:
                    break
                attempt, order = work
                closure = attempt.closure
                try:
                    data = closure.data_of(index, attempt.share)
                    results = worker(closure.program, order, data)
                except WireError:
                    self._coordinator.give_up(attempt)
                except WorkerLostError as error:
                    self._end(worker)
                    worker = None
                    self._coordinator.give_up(attempt, error if error.has_work else None)
                except BaseException as error:
                    self._coordinator.fail(closure, _explained(closure.program.bound.step, error))
                else:
                    self._coordinator.hand_over(attempt, results)
        except BaseException as error:
            # Others would wait for a worker that ended silently.
            self._coordinator.fail_for_good(error)
        finally:
            self._end(worker)


def _explained(step: str, error: BaseException) -> BaseException:
    if not is_runtime_failure(error):
        return error
    explained = StepFailedError(f"{step} failed on a worker: {error_text(error)}")
    explained.__cause__ = error
    return explained


_SERVER_PLATFORM = "cpu"
_SECONDS_TO_BEGIN, _POLL_SECONDS, _STOPPED_POLL_SECONDS = 60.0, 0.01, 10.0
_LOG = logging.getLogger("distribute_jax")
_NO_FORKS = """\
The process that workers and servers are forked from ended twice before it could start one, with exit code \
{code}. Its output is above; -9 usually means that memory is short."""
_STOPPED = "Waiting for %s: process %d is stopped. Resume it with kill -CONT %d, or kill it."


class _Child(Connection):
    """The connection to a process that is a worker or a server."""

    def __init__(self, fork_server: _ForkServer, pid: int, end: socket.socket) -> None:
        super().__init__(end)
        self._fork_server, self._pid = fork_server, pid

    def wait(self) -> str:
        poll = select.poll()
        with suppress(OSError, ValueError):  # this end is closed already
            # It wakes up when the other end is closed, and for nothing else.
            poll.register(self._socket, 0)
            poll.poll()
        with suppress(WireError):
            self.receive()
        return self.error

    def stopped(self) -> int | None:
        """Returns its pid if it is stopped, as by SIGSTOP."""
        with suppress(OSError):  # it has just ended, or this system has no /proc
            state = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()[0]
            return self._pid if state in "Tt" else None
        return None

    def connect(self, number: int, server: _Child) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            with suppress(WireError):
                server.send(Message("link", ends=[theirs.fileno()]))
            self.send(Message("link", [number], ends=[ours.fileno()]))

    def kill(self) -> None:
        """Kills it, which is noticed as if something else had done so."""
        self._fork_server.kill(self._pid)

    def end(self) -> None:
        self.kill()
        self.close()


class _ForkServer:
    """The connection to the process that the others are forked from."""

    def __init__(self, platform: str) -> None:
        self._platform, self._lock, self._is_closed = platform, threading.Lock(), False
        self._control = self._started()

    def _started(self) -> Connection:
        here, there = socket.socketpair()
        path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "JAX_ENABLE_X64": str(int(_x64())),
            "OPENBLAS_NUM_THREADS": "1",  # a process with several threads cannot be forked
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        if self._platform == _SERVER_PLATFORM:
            environment["JAX_PLATFORMS"] = self._platform
        main = f"from distribute_jax.servers._child import main; main({there.fileno()})"
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", main],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                start_new_session=True,  # Ctrl-C is for the coordinator
            )
        threading.Thread(target=self._process.wait, daemon=True).start()
        return Connection(here)

    def child(self, kind: str, number: int) -> _Child:
        """Returns a new worker or server; its number does not matter on this machine."""
        here, there = socket.socketpair()
        with self._lock, there:
            message = Message(kind, ends=[there.fileno()])
            try:
                (pid,) = self._control.ask(message).plain
            except WireError:  # it was killed
                if self._is_closed:  # nobody would end another one
                    here.close()
                    raise
                self._control.close()
                self._control = self._started()
                try:
                    (pid,) = self._control.ask(message).plain
                except WireError:
                    here.close()
                    raise StepFailedError(_NO_FORKS.format(code=self._process.wait())) from None
        return _Child(self, pid, here)

    def kill(self, pid: int) -> None:
        with self._lock, suppress(WireError):
            self._control.send(Message("end", [pid]))

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._control.close()


class RemoteStore:
    """A server in another process, with the methods of ``Store`` that the coordinator calls.

    A thread sends the requests, in order, so that nobody waits for a process that computes or is stopped.
    """

    def __init__(self, device: jax.Device) -> None:
        self._device = device
        self.child: Any = None
        self._loads: dict[str, Message] = {}
        self._types: dict[Key, Any] = {}
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        weakref.finalize(self, self._requests.put, None)

    def attach(self, child: Any) -> None:
        if self.child is None:
            threading.Thread(target=_do_requests, args=(self._requests,), daemon=True).start()
        self.child = child
        for message in list(self._loads.values()):  # more may be loaded meanwhile
            self._send(message)

    def _send(self, message: Message) -> None:
        if self.child is not None:
            self._requests.put((Future(), _send, self.child, message))

    def _command(self, name: str, *plain: Any, arrays: Sequence[Any] = ()) -> None:
        """Sends a request to the method of ``Store`` of this name."""
        self._send(Message(name, plain, list(map(as_numbers, arrays))))

    prepare = functools.partialmethod(_command, "prepare")
    commit = functools.partialmethod(_command, "commit")
    restore = functools.partialmethod(_command, "restore")

    def load(self, name: str, reads: Sequence[Key], writes: Sequence[Key], apply: Any) -> None:
        data = np.frombuffer(export_program(apply, [_SERVER_PLATFORM]), np.uint8)
        self._loads[name] = Message("load", [name, reads, writes], [data])
        self._send(self._loads[name])

    def assign(self, keys: Sequence[Key], arrays: Sequence[Any]) -> None:
        self._types.update(zip(keys, map(jax.typeof, arrays), strict=True))
        self._command("assign", keys, arrays=arrays)

    def forget(self, keys: Sequence[Key], programs: Sequence[str] = ()) -> None:
        for name in programs:
            self._loads.pop(name, None)
        self._command("forget", keys, programs)

    def pull(self, keys: Sequence[Key]) -> Future[list[Any]] | list[Any]:
        """Returns arrays as they are once all earlier requests are done."""
        if not keys:
            return []
        values, types = Future[list[Any]](), [self._types[key] for key in keys]
        self._requests.put((values, self._pulled, self.child, keys, types))
        return values

    def _pulled(self, child: Any, keys: Sequence[Key], types: Sequence[Any]) -> list[Any]:
        if child is None:
            raise WireError("it was not started")
        answer = child.request(Message("pull", [list(keys)]))()
        return list(map(from_numbers, jax.device_put(answer.arrays, self._device), types))


def _send(child: Any, message: Message) -> None:
    """Sends a message; kills a process that would go on without it, as when memory is short."""
    try:
        child.send(message)
    except Exception:
        child.kill()
        raise


def _do_requests(requests: queue.SimpleQueue[Any]) -> None:
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
        self.child, self._stores = child, stores
        child.limit(seconds)
        self._loaded: dict[str, weakref.ref[Program]] = {}
        self._linked = [None] * len(stores)

    def __call__(self, program: Program, order: Order, data: list[Any]) -> list[Any]:
        halves, child, has_work = program.bound.halves, self.child, False
        try:
            for number, store in enumerate(self._stores):
                if (server := store.child) is not self._linked[number]:  # it is a new process
                    child.connect(number, server)
                    self._linked[number] = server
            if dead := [name for name, loaded in self._loaded.items() if loaded() is None]:
                child.send(Message("forget", dead))
                for name in dead:
                    del self._loaded[name]
            if program.name not in self._loaded:
                plain = [program.name, program.worker.takes, halves.results_at]
                plain += [] if halves.lookups is None else [halves.lookups[1:]]
                child.send(Message("load", plain, halves.exported))
                has_work = True
                self._loaded[program.name] = weakref.ref(program)
            arrays = [
                as_numbers(x) if isinstance(x, jax.Array) else np.asarray(x, like.dtype)
                for x, like in zip(data, halves.worker.values, strict=False)
            ]
            answer_of = child.request(Message("run", [program.name, *order], arrays))
            has_work = True
            answer = answer_of()
        except WireError as error:
            raise WorkerLostError(str(error), has_work=has_work) from error
        if answer.name == "void":  # it has left all servers
            self._linked = [None] * len(self._stores)
            raise WireError("the run was superseded")
        if answer.name == "failed":
            raise StepFailedError(f"{program.bound.step} failed on a worker: {answer.plain[0]}")
        types = [halves.worker.returns[i] for i in halves.results_at]
        return [from_numbers(x, like) for x, like in zip(answer.arrays, types, strict=True)]


def _x64() -> bool:
    return bool(jax.dtypes.canonicalize_dtype("float64") == "float64")


class Processes(Engine):
    """The processes of one strategy."""

    def __init__(self, coordinator: Coordinator, seconds: float | None, cluster: Any) -> None:
        """A worker is lost after ``seconds`` of a run; a cluster starts processes on other machines."""
        super().__init__(coordinator)
        self._seconds, self._cluster, self._launcher = seconds, cluster, cluster
        self._workers: dict[int, Any] = {}
        self._ended = threading.Event()

    def _start_servers(self) -> None:
        self._has_x64, self._ended = _x64(), threading.Event()
        self._launcher = self._cluster or _ForkServer(self._coordinator.device.platform)
        for number in range(len(self._stores)):
            self._start_server(number, self._ended)
        if self._cluster is None:
            threading.Thread(target=self._name_stopped, daemon=True).start()

    def _start_server(self, number: int, ended: threading.Event) -> None:
        child = self._launcher.child("server", number)
        self._stores[number].attach(child)
        threading.Thread(target=self._watch, args=(number, child, ended), daemon=True).start()

    def _watch(self, number: int, child: Any, ended: threading.Event) -> None:
        """Waits for the end of a server, and replaces it."""
        error = child.wait()
        if ended.is_set():
            return
        try:
            self._coordinator.lose_server(number, error)
            child.close()
            self._start_server(number, ended)
            self._coordinator.go_back()
        except BaseException as error:  # nobody replaces it, and all would wait for it
            self._coordinator.fail_for_good(error)

    def _name_stopped(self) -> None:
        """Logs which processes are stopped, for which everybody would wait silently."""
        named = set[str]()
        while not self._ended.wait(_STOPPED_POLL_SECONDS):
            every = {f"worker {i}": child for i, child in sorted(self._workers.items())}
            every |= {f"server {i}": store.child for i, store in enumerate(self._stores)}
            stopped = {name: pid for name, child in every.items() if (pid := child.stopped())}
            for name in stopped.keys() - named:
                _LOG.warning(_STOPPED, name, stopped[name], stopped[name])
            named = {*stopped}

    def _worker(self, index: int) -> Worker:
        child = self._workers[index] = self._launcher.child("worker", index)
        return _Worker(child, self._stores, self._seconds)

    def _end(self, worker: Any) -> None:
        if worker is not None:  # not by its index, at which a newer one may work
            worker.child.end()

    def kill(self, kind: str, number: int) -> None:
        if kind == "server":
            self._stores[number].child.kill()
            return
        end = time.monotonic() + _SECONDS_TO_BEGIN
        while number not in self._workers:  # it has not begun to work
            if time.monotonic() > end:
                raise ContextError(f"dj.testing.kill: worker {number} has not run a function yet.")
            time.sleep(_POLL_SECONDS)
        self._workers[number].kill()

    def check(self, halves: Halves) -> None:
        """Raises LoweringError if the step cannot be sent to another process."""
        if _x64() != self._has_x64:
            raise ContextError(
                "jax_enable_x64 has changed since the workers started. Set it before the first function is "
                "scheduled, or make a new strategy."
            )
        _ = halves.exported  # or why it cannot be

    def _close(self) -> None:
        self._ended.set()
        if self._launcher is not None:
            self._launcher.close()
        for store in self._stores:
            if store.child is not None:
                store.child.end()
