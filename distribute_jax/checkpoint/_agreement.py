"""Makes saving and loading collective: they succeed on all processes of a job, or fail on all.

All processes call the functions of this file from their main threads in the same order. A checkpoint that is
being written in the background is coordinated through the key-value store alone, by ``WriteCoordinator``: the
chief opens a draft, the others write into it and report, and the chief commits when all have reported.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from distribute_jax import _errors
from distribute_jax._errors import (
    CheckpointError,
    CheckpointFileError,
    DistributeError,
    ProcessesDifferError,
)
from distribute_jax._interrupts import interrupts_held_back
from distribute_jax._jax_private import before_exit
from distribute_jax._messages import error_text
from distribute_jax.checkpoint._storage import Directory
from distribute_jax.processes import Job, current_job, is_chief

T = TypeVar("T")

TIMEOUT_FACTOR = 10
"""A checkpoint may take this many times ``step_seconds`` to be written, as compiling may."""

VISIBILITY_SECONDS = 5.0
"""How long a network file system may take to show a new file to other hosts."""

_WARN_AFTER_SECONDS = 60.0
_STILL_WRITING = (
    "Waiting for a checkpoint that is still being written. Does the file system still respond?"
)
_LOG = logging.getLogger("distribute_jax")

_POLLS_PER_TIMEOUT = 4
"""Exchanges in ``step_seconds`` while processes wait for a save, so that no watchdog sees a stuck process."""


@dataclass(frozen=True)
class Announcement:
    """An error, or JSON data, that one process sends to the others."""

    method: str
    error: str = ""
    """The class of the error; empty without one."""
    text: str = ""
    value: Any = None


def all_values(method: str, value: Any) -> list[Any]:
    """Exchanges JSON data; returns the value of every process, in their order."""
    return [announced.value for announced in _exchange(Announcement(method, value=value))]


def on_all(method: str, do: Callable[[], T]) -> T:
    """Calls a function on every process; an error of one is raised on all."""
    result: T
    result, error = _try(do)
    _raise_first(method, error)
    return result


def by_chief(method: str, do: Callable[[], T]) -> T:
    """Calls a function on the chief, and returns its result (JSON data) or raises its error on all."""
    result, error = _try(do) if is_chief() else (None, None)
    return _raise_first(method, error, result)[0].value


def _try(do: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return do(), None
    except Exception as error:  # of any kind: the others must be told
        return None, error


def wait_until_written(method: str, background: Background) -> None:
    """Waits until no process writes any more; raises on all if one does not finish in time."""
    job = current_job()
    if job.is_alone:
        background.join()
        return
    seconds = job.options.step_seconds
    for _ in range(_POLLS_PER_TIMEOUT * TIMEOUT_FACTOR):
        are_done = all_values(method, background.join(seconds / _POLLS_PER_TIMEOUT))
        if all(are_done):
            return
    late = ", ".join(job.name_of(i) for i, is_done in enumerate(are_done) if not is_done)
    raise _errors.DeadlineExceededError(
        f"{method}: the save before this one has been written for {seconds * TIMEOUT_FACTOR:g} s, still by "
        f"{late}. Check whether the file system still responds there; if writing takes so long, give it "
        "more time: dj.ClusterOptions(step_seconds=...)."
    )


def pop_error(method: str, background: Background) -> CheckpointError | None:
    """Waits for the current save; returns, once, the error of the first process that failed."""
    wait_until_written(method, background)
    local = background.pop_error()
    error = _first_error(_exchange(_announcement(method, local)), local)
    return error if isinstance(error, CheckpointError | None) else CheckpointError(str(error))


def write(method: str, do: Callable[[], None]) -> None:
    """Runs a function that writes on every process, and waits for all; an error is raised on all."""
    if current_job().is_alone:
        do()
        return
    background = Background()
    background.start(do)
    error = pop_error(method, background)
    if error is not None:
        raise error


def check_shared(method: str, directory: Directory) -> None:
    """Raises on every process unless all of them see the same directory, which the chief creates."""
    job = current_job()
    if job.is_alone:
        return
    name = by_chief(method, lambda: write_probe(directory))
    try:
        found = await_file(directory, name, hashlib.sha256(b"").hexdigest())
        answers = all_values(method, found is not None)
    finally:
        if is_chief():
            directory.remove_file(name)
    blind = [job.name_of(i) for i, sees in enumerate(answers) if not sees]
    if blind:
        raise CheckpointFileError(
            f"{method}: {job.name_of(0)} wrote a file into its directory, and {', '.join(blind[:8])} cannot "
            f"find it; that of this process is {directory}. Give all processes of a job the same path, on a "
            "network file system or in a bucket."
        )


def write_probe(directory: Directory) -> str:
    name = f".{secrets.token_hex(8)}.shared"
    try:
        directory.write(name, b"")
    except OSError as error:
        raise CheckpointFileError(
            f"Nothing can be written into {directory}: {error}. Save to another directory."
        ) from error
    return name


def await_file(directory: Directory, path: str, sha256: str) -> bytes | None:
    """Reads a file of another process once this host sees it; None if it does not in time."""
    deadline = time.monotonic() + VISIBILITY_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError):  # not visible yet, or never
            if hashlib.sha256(text := directory.read(path)).hexdigest() == sha256:
                return text
        time.sleep(0.05)
    return None


def _announcement(method: str, failure: Exception | None, value: Any = None) -> Announcement:
    if failure is None:
        return Announcement(method, value=value)
    text = str(failure) if isinstance(failure, DistributeError) else error_text(failure)
    return Announcement(method, type(failure).__name__, text)


def _exchange(local: Announcement) -> list[Announcement]:
    job = current_job()
    if job.is_alone:
        return [local]
    place = f"a checkpoint's {local.method!r}"
    texts = job.exchange("a checkpoint", json.dumps(vars(local)), place=place)
    announcements = [Announcement(**json.loads(text)) for text in texts]
    if len({announced.method for announced in announcements}) > 1:
        calls = ", ".join(f"{a.method} on process {i}" for i, a in enumerate(announcements[:8]))
        raise ProcessesDifferError(
            f"The processes called different things at the same time: {calls}. All processes of a job save "
            "and load together, in the same order, not the chief alone."
        )
    return announcements


def _raise_first(method: str, local: Exception | None, value: Any = None) -> list[Announcement]:
    """Exchanges errors and values; raises the error of the first process that failed."""
    announcements = _exchange(_announcement(method, local, value))
    error = _first_error(announcements, local)
    if error is None:
        return announcements
    if error is local:
        raise error
    raise error from local


def _first_error(announcements: list[Announcement], local: Exception | None) -> Exception | None:
    """Returns the error of the first process that failed, with the same class and text on all."""
    failed = [(i, announced) for i, announced in enumerate(announcements) if announced.error]
    if not failed:
        return None
    process, first = failed[0]
    if local is not None and _announcement(first.method, local) == first:
        return local
    text = f"{first.method} failed on {current_job().name_of(process)}: {first.text}"
    kind = getattr(_errors, first.error, None)
    if isinstance(kind, type) and issubclass(kind, DistributeError):
        return kind(text)
    return CheckpointError(f"{text} ({first.error})")


_OPEN, _CANCELLED = "open", "cancelled"


class WriteCoordinator:
    """Coordinates the processes that write one checkpoint; each has one, with the checkpoint's token."""

    def __init__(self, job: Job, token: str) -> None:
        self._job = job
        self._folder = f"saving/{token}/"
        self._seconds = job.options.step_seconds * TIMEOUT_FACTOR
        self._deadline = time.monotonic() + self._seconds

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Surrounds the work of the chief; if it fails, the others do not wait for it."""
        try:
            yield
        except BaseException:
            self._put("state", _CANCELLED)
            raise
        if not self._job.is_alone:
            self._job.store.remove(self._folder)  # all have reported

    def open(self) -> None:
        self._put("state", _OPEN)

    def await_open(self) -> bool:
        """Waits until this process may write; False if the chief has given up."""
        state = self._get("state")
        if state is None:
            raise CheckpointFileError(f"{self._job.name_of(0)} has not begun to write in time.")
        return state == _OPEN

    def report(self, *, sha256: str = "", error: str = "") -> None:
        """Reports the digest of this process's note, or why it could not write."""
        self._put(str(self._job.index), json.dumps({"sha256": sha256, "error": error}))

    def await_reports(self) -> dict[int, str | None]:
        """Waits until no other process writes; returns the report of each, None if it is late."""
        return {i: self._get(str(i)) for i in range(1, self._job.count)}

    def collect(self, where: str) -> dict[int, str]:
        """Waits for the others, and returns the digest of each one's note; raises if one failed."""
        name_of, reports = self._job.name_of, self.await_reports()
        late = [i for i, report in reports.items() if report is None]
        if late:  # a message of one line, since the other processes show it too
            names = "; ".join(f"{name_of(i)}{self._job.last_seen(i)}" for i in late[:8])
            raise CheckpointFileError(
                f"The checkpoint {where} could not be written: {self._seconds:g} s have passed, and not "
                f"every process has written its part. Missing: {names}. Look whether the file system still "
                "answers there; where writing takes so long, give it more time: "
                "dj.ClusterOptions(step_seconds=...)."
            )
        contents = {i: json.loads(report or "") for i, report in reports.items()}
        for i, content in contents.items():
            if content["error"]:
                raise CheckpointFileError(
                    f"The checkpoint {where} could not be written, because {name_of(i)} failed: "
                    f"{content['error']}"
                )
        return {i: content["sha256"] for i, content in contents.items()}

    def _put(self, key: str, text: str) -> None:
        if not self._job.is_alone:
            self._job.store.put(self._folder + key, text)

    def _get(self, key: str) -> str | None:
        left = max(self._deadline - time.monotonic(), 0.001)
        return self._job.store.get(self._folder + key, left)


_unfinished: set[Background] = set()
"""Those that are running, or whose error was not read yet."""


class Background:
    """Runs one call at a time in a thread, and keeps its error until ``pop_error``."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._starting = threading.RLock()  # a signal handler may save as well

    def start(self, call: Callable[[], None]) -> None:
        """Starts a call, once the previous one has ended, whichever thread started that."""
        with self._starting:
            self.join()
            _finish_at_exit()
            _unfinished.add(self)
            thread = threading.Thread(target=self._run, args=(call,), name="checkpoint")
            with interrupts_held_back():  # a thread that was not started cannot be joined
                thread.start()
                self._thread = thread

    def _run(self, call: Callable[[], None]) -> None:
        try:
            call()
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # a thread's error would be lost
            self._error = CheckpointError(f"A checkpoint could not be written: {error!r}")
            self._error.__cause__ = error

    def join(self, seconds: float | None = None) -> bool:
        """Waits for the current call, without a limit by default; returns True if none is running."""
        if self._thread is not None:
            self._thread.join(_WARN_AFTER_SECONDS if seconds is None else seconds)
        if seconds is None and self._thread is not None and self.is_running:
            _LOG.warning(_STILL_WRITING)
            self._thread.join()
        return not self.is_running

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def pop_error(self) -> CheckpointError | None:
        """Waits for the current call; returns its error, once."""
        self.join()
        _unfinished.discard(self)
        error, self._error = self._error, None
        return error


@functools.cache
def _finish_at_exit() -> None:
    """Makes the program wait for its last save before it exits, and warn if that failed."""
    before_exit(_finish)


def _finish() -> None:
    for background in list(_unfinished):
        error = background.pop_error()
        if error is not None:
            warnings.warn(str(error), RuntimeWarning, stacklevel=1)
