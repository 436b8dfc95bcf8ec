"""Saving and loading on all processes of a job: it succeeds on all of them or fails on all.

Functions of the training loop are called by all processes in the same order. While a checkpoint is written
in the background, the threads of the processes communicate through the key-value store alone: the chief
opens a draft, the others write into it and report it, and the chief commits when all have.
"""

from __future__ import annotations

import functools
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
from distribute_jax._jax_private import before_exit
from distribute_jax._messages import error_text
from distribute_jax.checkpoint._storage import Directory
from distribute_jax.processes import Job, current_job, is_chief

T = TypeVar("T")

PATIENCE = 10
"""Times ``step_seconds`` that a checkpoint may take to be written; compiling has as long."""

SEEN_SECONDS = 5.0
"""For how long a file may be new before a network file system shows it to other hosts."""

_PATIENCE = 60.0
"""Seconds to wait for a save without a word."""
_SLOW = "Waiting for a checkpoint that is still being written. Does the file system still answer?"
_LOG = logging.getLogger("distribute_jax")

_POLLS = 4
"""How often in ``step_seconds`` the processes exchange who still writes, so that none looks stuck."""


@dataclass(frozen=True)
class Announcement:
    """What one process announces to the others: its error, or plain data."""

    method: str
    """What the user called."""
    error: str = ""
    """The class of what went wrong; empty where nothing did."""
    text: str = ""
    value: Any = None


def all_values(method: str, value: Any) -> list[Any]:
    """Returns what every process passes, plain data, in their order."""
    return [announced.value for announced in _exchange(Announcement(method, value=value))]


def on_all(method: str, do: Callable[[], T]) -> T:
    """Calls a function on every process; an error of one is raised on all."""
    result: T
    result, error = _attempt(do)
    _raise_first(method, error)
    return result


def by_chief(method: str, do: Callable[[], T]) -> T:
    """Calls a function on the chief; its result, plain data, or error is that of every process."""
    result, error = _attempt(do) if is_chief() else (None, None)
    value: T = _raise_first(method, error, result)[0].value
    return value


def _attempt(do: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return do(), None
    except Exception as error:  # whatever it is, the others have to hear of it
        return None, error


def await_written(method: str, background: Background) -> None:
    """Returns on every process when no thread writes any more; raises on all where one does for ever."""
    job = current_job()
    if job.is_alone:
        background.join()
        return
    seconds = job.options.step_seconds
    for _ in range(_POLLS * PATIENCE):
        are_done = all_values(method, background.join(seconds / _POLLS))
        if all(are_done):
            return
    late = ", ".join(job.name_of(i) for i, is_done in enumerate(are_done) if not is_done)
    raise _errors.DeadlineExceededError(
        f"{method}: the save before this one has been written for {seconds * PATIENCE:g} s, still by "
        f"{late}. Look whether the file system still answers there; where writing takes so long, give it "
        "more time: dj.ClusterOptions(step_seconds=...)."
    )


def pop_error(method: str, background: Background) -> CheckpointError | None:
    """Waits for the save at work, and returns the error of the first process that failed, once."""
    await_written(method, background)
    local = background.pop_error()
    error = _first_error(_exchange(_announcement(method, local)), local)
    return error if isinstance(error, CheckpointError | None) else CheckpointError(str(error))


def write(method: str, do: Callable[[], None]) -> None:
    """Calls a function that writes on every process, and returns when all have; an error is raised on all."""
    if current_job().is_alone:
        do()
        return
    background = Background()
    background.start(do)
    error = pop_error(method, background)
    if error is not None:
        raise error


def check_shared(method: str, directory: Directory) -> None:
    """Raises on every process where they do not all see one directory, which the chief makes."""
    job = current_job()
    if job.is_alone:
        return
    name = by_chief(method, lambda: _write_probe(directory))
    try:
        answers = all_values(method, [_sees_probe(directory, name), str(directory)])
    finally:
        if is_chief():
            directory.remove_file(name)
    lines = [
        f"  {job.name_of(i)} does not see it in {where}"
        for i, (sees, where) in enumerate(answers)
        if not sees
    ]
    if lines:
        raise CheckpointFileError(
            f"{method}: {job.name_of(0)} wrote a file into {answers[0][1]}, and not every process "
            "finds it:\n"
            + "\n".join(lines[:8])
            + "\nThe processes of a job save into one directory that "
            "all of them see. Give all the same path, on a network file system or in a bucket."
        )


def _write_probe(directory: Directory) -> str:
    name = f".{secrets.token_hex(8)}.shared"
    try:
        directory.write(name, b"")
    except OSError as error:
        raise CheckpointFileError(
            f"Nothing can be written into {directory}: {error}. Save to another directory."
        ) from error
    return name


def _sees_probe(directory: Directory, name: str) -> bool:
    deadline = time.monotonic() + SEEN_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError):  # not visible yet, or never
            directory.read(name)
            return True
        time.sleep(0.1)
    return False


def _announcement(method: str, failure: Exception | None, value: Any = None) -> Announcement:
    if failure is None:
        return Announcement(method, value=value)
    return Announcement(method, type(failure).__name__, error_text(failure))


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
    """Returns the error of the first process that failed, of one class and text on all."""
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
    """How the processes of a job write one checkpoint, known by its token, as seen by one of them."""

    def __init__(self, job: Job, token: str) -> None:
        self._job = job
        self._folder = f"saving/{token}/"
        self._deadline = time.monotonic() + self._seconds

    @property
    def _seconds(self) -> float:
        return self._job.options.step_seconds * PATIENCE

    @contextmanager
    def leading(self) -> Iterator[None]:
        """In the process that makes the draft: the others do not wait for it where that fails."""
        try:
            yield
        except BaseException:
            self._put("state", _CANCELLED)
            raise
        if not self._job.is_alone:
            self._job.store.remove(self._folder)  # all have reported

    def open(self) -> None:
        """Lets the others write."""
        self._put("state", _OPEN)

    def await_open(self) -> bool:
        """Waits until this process may write; False where the chief has given up."""
        state = self._get("state")
        if state is None:
            raise CheckpointFileError(f"{self._job.name_of(0)} has not begun to write in time.")
        return state == _OPEN

    def report(self, *, sha256: str = "", error: str = "") -> None:
        """Reports the digest of what this process handed in, or why it could not write."""
        self._put(str(self._job.index), json.dumps({"sha256": sha256, "error": error}))

    def await_reports(self) -> dict[int, str | None]:
        """Returns when no other process writes any more, with each one's report; None where it is late."""
        return {i: self._get(str(i)) for i in range(1, self._job.count)}

    def collect(self, where: str) -> dict[int, str]:
        """Waits for the others, and returns the digest of what each has handed in; raises if one failed."""
        name_of, reports = self._job.name_of, self.await_reports()
        late = [i for i, report in reports.items() if report is None]
        if late:  # one line, which other processes show too
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
                    f"The checkpoint {where} could not be written, for {name_of(i)} failed: "
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
"""Those that run, or whose error nobody has seen yet."""


class Background:
    """Runs one call at a time beside the training; its error waits until somebody asks."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None

    def start(self, call: Callable[[], None]) -> None:
        """Waits for the call before, and starts this one."""
        self.join()
        _finish_at_exit()
        _unfinished.add(self)
        self._thread = threading.Thread(target=self._run, args=(call,), name="checkpoint")
        self._thread.start()

    def _run(self, call: Callable[[], None]) -> None:
        try:
            call()
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # lost otherwise: nobody sees what a thread raises
            self._error = CheckpointError(f"A checkpoint could not be written: {error!r}")
            self._error.__cause__ = error

    def join(self, seconds: float | None = None) -> bool:
        """Waits, for so long at most, and returns whether no call runs."""
        if self._thread is not None:
            self._thread.join(_PATIENCE if seconds is None else seconds)
        if seconds is None and self._thread is not None and self.is_running:
            _LOG.warning(_SLOW)
            self._thread.join()
        return not self.is_running

    @property
    def is_running(self) -> bool:
        """Whether a call is at work."""
        return self._thread is not None and self._thread.is_alive()

    def pop_error(self) -> CheckpointError | None:
        """Waits, and returns the error of the last call, once."""
        self.join()
        _unfinished.discard(self)
        error, self._error = self._error, None
        return error


@functools.cache
def _finish_at_exit() -> None:
    """Lets the program wait for its last save, and warn if that failed."""
    before_exit(_finish)


def _finish() -> None:
    for background in list(_unfinished):
        error = background.pop_error()
        if error is not None:
            warnings.warn(str(error), RuntimeWarning, stacklevel=1)
