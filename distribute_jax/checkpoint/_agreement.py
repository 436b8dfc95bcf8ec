"""Saving and loading with all processes of a job: it succeeds on all of them or fails on all.

Functions of the training loop are called by all processes in the same order; in a process that is alone
they only call what they get. While a checkpoint is written in the background, the threads of the processes
communicate through the key-value store alone: the chief opens a draft, the others write into it and report
it, and the chief commits when all have.
"""

from __future__ import annotations

import functools
import json
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

_TOPIC = "a checkpoint"
_LOOKS = 4
"""How often in ``step_seconds`` they tell each other who still writes, and so that they are not stuck."""


@dataclass(frozen=True)
class _Said:
    """What one process tells the others."""

    method: str
    """What the user called."""
    kind: str = ""
    """The class of what went wrong; empty where nothing did."""
    text: str = ""
    value: Any = None
    """Plain data for the others."""


def all_values(method: str, value: Any) -> list[Any]:
    """Gives what every process passes, plain data, in their order."""
    job = current_job()
    return (
        [value] if job.is_alone else [said.value for said in _told(job, _Said(method, value=value))]
    )


def on_all(method: str, do: Callable[[], T]) -> T:
    """Does something on every process.

    Raises:
        DistributeError: it failed on one of them: the error of the first, on all.
    """
    job = current_job()
    if job.is_alone:
        return do()
    failure: Exception | None = None
    try:
        result = do()
    except Exception as error:  # whatever it is, the others have to hear of it
        failure = error
    _raise_first(job, _told(job, _said(method, failure)), failure)
    return result


def by_chief(method: str, do: Callable[[], T]) -> T:
    """Does something on the chief alone, and gives every process what came of it, plain data.

    Raises:
        DistributeError: it failed; on all.
    """
    job = current_job()
    if job.is_alone:
        return do()
    failure, result = None, None
    try:
        result = do() if is_chief() else None
    except Exception as error:  # as above
        failure = error
    told = _told(job, _said(method, failure, result))
    _raise_first(job, told, failure)
    value: T = told[0].value
    return value


def await_written(method: str, background: Background) -> None:
    """Returns on every process when no thread has a save at work any more.

    Raises:
        DeadlineExceededError: one writes for ever; on all.
    """
    job = current_job()
    if job.is_alone:
        background.join()
        return
    step_seconds = job.options.step_seconds
    for _ in range(_LOOKS * PATIENCE):
        are_done = all_values(method, background.has_ended_within(step_seconds / _LOOKS))
        if all(are_done):
            return
    late = ", ".join(job.name_of(i) for i, is_done in enumerate(are_done) if not is_done)
    raise _errors.DeadlineExceededError(
        f"{method}: the save before this one has been written for {step_seconds * PATIENCE:g} s, still by "
        f"{late}. Look whether the file system still answers there; where writing takes so long, give it "
        "more time: dj.ClusterOptions(step_seconds=...)."
    )


def taken_error(method: str, background: Background) -> CheckpointError | None:
    """Waits for the save at work, and gives every process the error of the first that failed, once."""
    job = current_job()
    if job.is_alone:
        return background.taken_error()
    await_written(method, background)
    own = background.taken_error()
    told = _told(job, _said(method, own))
    first = next((i for i, said in enumerate(told) if said.kind), None)
    if first is None:
        return None
    failed = own if own is not None and first == job.index else _copied(job, first, told[first])
    return failed if isinstance(failed, CheckpointError) else CheckpointError(str(failed))


def write(method: str, do: Callable[[], None]) -> None:
    """Has every process write, and returns on all when it is on the disk.

    Raises:
        CheckpointError: it could not be written; on all.
    """
    if current_job().is_alone:
        do()
        return
    background = Background()
    background.start(do)
    error = taken_error(method, background)
    if error is not None:
        raise error


def check_shared(method: str, directory: Directory) -> None:
    """Raises on every process where they do not all see one directory, which the chief makes.

    Raises:
        CheckpointFileError: naming who does not see what the chief wrote; or it could not write.
    """
    job = current_job()
    if job.is_alone:
        return
    name, text = by_chief(method, lambda: _written_probe(directory))
    try:
        sees = _sees(directory, name, text)
        said = all_values(method, [sees, str(directory)])
    finally:
        if is_chief():
            directory.remove_probe(name)
    blind = [i for i, (sees, _) in enumerate(said) if not sees]
    if blind:
        lines = "\n".join(f"  {job.name_of(i)} does not see it in {said[i][1]}" for i in blind[:8])
        raise CheckpointFileError(
            f"{method}: {job.name_of(0)} wrote a file into {said[0][1]}, and not every process finds it:\n"
            f"{lines}\nThe processes of a job save into one directory that all of them see. Give all the "
            "same path, on a network file system or in a bucket."
        )


def _written_probe(directory: Directory) -> list[str]:
    name, text = f".{secrets.token_hex(8)}.shared", secrets.token_hex(8)
    try:
        directory.write_probe(name, text)
    except OSError as error:
        raise CheckpointFileError(
            f"Nothing can be written into {directory}: {error}. Save to another directory."
        ) from error
    return [name, text]


def _sees(directory: Directory, name: str, text: str) -> bool:
    deadline = time.monotonic() + SEEN_SECONDS
    while directory.read_probe(name) != text:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _said(method: str, failure: Exception | None, value: Any = None) -> _Said:
    if failure is None:
        return _Said(method, value=value)
    return _Said(method, type(failure).__name__, error_text(failure))


def _told(job: Job, own: _Said) -> list[_Said]:
    said = job.exchange(_TOPIC, json.dumps(vars(own)), place=f"a checkpoint's {own.method!r}")
    told = [_Said(**json.loads(text)) for text in said]
    if len({said.method for said in told}) > 1:
        calls = ", ".join(f"{said.method} on process {i}" for i, said in enumerate(told[:8]))
        raise ProcessesDifferError(
            f"The processes called different things at the same time: {calls}. All processes of a job save "
            "and load together, in the same order, not the chief alone."
        )
    return told


def _raise_first(job: Job, told: list[_Said], own: Exception | None) -> None:
    """Raises what the first process raises that failed, so that it is of one class on all."""
    first = next((i for i, said in enumerate(told) if said.kind), None)
    if first is None:
        return
    if own is not None and type(own).__name__ == told[first].kind:
        raise own
    raise _copied(job, first, told[first]) from own


def _copied(job: Job, process: int, said: _Said) -> Exception:
    """Gives an error of another process as one of this library's."""
    kind = getattr(_errors, said.kind, None)
    text = f"{said.method} failed on {job.name_of(process)}: {said.text}"
    if isinstance(kind, type) and issubclass(kind, DistributeError):
        return kind(text)
    return CheckpointError(f"{text} ({said.kind})")


PATIENCE = 10
"""Times ``step_seconds`` that a checkpoint may take to be written; compiling has as long."""

SEEN_SECONDS = 5.0
"""For how long a file may be new before a network file system shows it to other hosts."""

_OPEN, _CALLED_OFF = "open", "called off"


class Relay:
    """The talk about one checkpoint, seen by one process; one that is alone talks to nobody."""

    def __init__(self, token: str) -> None:
        """Takes part.

        Args:
            token: a text that no other checkpoint has, the same on all processes.
        """
        self._job = current_job()
        self._folder = f"saving/{token}/"
        self._limit = time.monotonic() + self._seconds(self._job)

    @staticmethod
    def _seconds(job: Job) -> float:
        return job.options.step_seconds * PATIENCE

    @property
    def process(self) -> int:
        """Which process this is."""
        return self._job.index

    @contextmanager
    def led(self) -> Iterator[None]:
        """Has the others wait no longer for a draft, in the process that makes it, when that fails."""
        try:
            yield
        except BaseException:
            self._say(_OPEN, _CALLED_OFF)
            raise
        if not self._job.is_alone:
            self._job.store.remove(self._folder)  # all have said that they are through

    def open(self) -> None:
        """Says that the others may write now."""
        self._say(_OPEN, _OPEN)

    def is_open(self) -> bool:
        """Waits until this process may write; False where the chief has given up."""
        told = self._heard(_OPEN)
        if told is None and not self._job.is_alone:
            raise CheckpointFileError(f"{self._job.name_of(0)} has not begun to write in time.")
        return told == _OPEN

    def done(self, sha256: str) -> None:
        """Says that this process has written, and handed in a text with this digest."""
        self._say(str(self.process), json.dumps({"sha256": sha256}))

    def failed(self, error: Exception) -> None:
        """Says that this process could not write."""
        self._say(str(self.process), json.dumps({"error": str(error)}))

    def await_others(self) -> dict[int, str | None]:
        """Returns when no other process writes any more, with what each has said; None where it is late."""
        count = self._job.count
        return {i: self._heard(str(i)) for i in range(count) if i != self.process}

    def collected(self, where: str) -> dict[int, str]:
        """Waits for the others, and gives the digest of what each has handed in.

        Raises:
            CheckpointFileError: one could not write, or has not come in time.
        """
        said = self.await_others()
        late = [i for i, text in said.items() if text is None]
        if late:
            names = "; ".join(
                map(self._named, late[:8])
            )  # one line, which other processes show too
            raise CheckpointFileError(
                f"The checkpoint {where} could not be written: {self._seconds(self._job):g} s have passed, "
                f"and not every process has written its part. Missing: {names}. Look whether the file "
                "system still answers there; where writing takes so long, give it more time: "
                "dj.ClusterOptions(step_seconds=...)."
            )
        told = {i: json.loads(text or "") for i, text in said.items()}
        for i, answer in told.items():
            if "error" in answer:
                raise CheckpointFileError(
                    f"The checkpoint {where} could not be written, for {self.name_of(i)} failed: "
                    f"{answer['error']}"
                )
        return {i: answer["sha256"] for i, answer in told.items()}

    def name_of(self, process: int) -> str:
        """Names a process, its host and pid."""
        return self._job.name_of(process)

    def _named(self, process: int) -> str:
        where = self._job.last_seen(process)
        return f"{self.name_of(process)}{where}"

    def _say(self, key: str, text: str) -> None:
        if not self._job.is_alone:
            self._job.store.put(self._folder + key, text)

    def _heard(self, key: str) -> str | None:
        if self._job.is_alone:
            return None
        left = max(self._limit - time.monotonic(), 0.001)
        return self._job.store.get(self._folder + key, left)


_unfinished: set[Background] = set()
"""Those that run, or whose error nobody has seen yet."""


class Background:
    """Runs one job at a time beside the training; its error waits until somebody asks."""

    def __init__(self) -> None:
        """Starts nothing yet."""
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Waits for the job before, and starts this one."""
        self.join()
        _finish_at_exit()
        _unfinished.add(self)
        self._thread = threading.Thread(target=self._run, args=(job,), name="checkpoint")
        self._thread.start()

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # lost otherwise: nobody sees what a thread raises
            self._error = CheckpointError(f"A checkpoint could not be written: {error!r}")
            self._error.__cause__ = error

    @property
    def is_running(self) -> bool:
        """Whether a job is still at work."""
        return self._thread is not None and self._thread.is_alive()

    def has_ended_within(self, seconds: float) -> bool:
        """Waits for so long at most, and tells whether no job runs."""
        if self._thread is not None:
            self._thread.join(seconds)
        return not self.is_running

    def join(self) -> None:
        """Returns when no job runs."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def taken_error(self) -> CheckpointError | None:
        """Waits, and gives the error of the last job, once."""
        self.join()
        _unfinished.discard(self)
        error, self._error = self._error, None
        return error


@functools.cache
def _finish_at_exit() -> None:
    """Has the program wait for its last save, and say so if that failed."""
    before_exit(_finish)


def _finish() -> None:
    for background in list(_unfinished):
        error = background.taken_error()
        if error is not None:
            warnings.warn(str(error), RuntimeWarning, stacklevel=1)
