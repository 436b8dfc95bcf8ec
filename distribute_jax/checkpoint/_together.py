"""What the processes of a job do together when they save or load: all of it succeeds on all, or fails on all.

Every function here is called by all processes in the same order, in the thread of the training loop. In a
process that is alone they only call what they are given.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from distribute_jax import _errors
from distribute_jax._errors import (
    CheckpointError,
    CheckpointFileError,
    DistributeError,
    ProcessesDifferError,
)
from distribute_jax._tree import error_text
from distribute_jax.checkpoint._background import Background
from distribute_jax.checkpoint._directory import Directory
from distribute_jax.checkpoint._relay import PATIENCE, SEEN_SECONDS
from distribute_jax.processes import Job, is_chief, job

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
    found = job()
    return (
        [value]
        if found is None
        else [said.value for said in _told(found, _Said(method, value=value))]
    )


def on_all(method: str, do: Callable[[], T]) -> T:
    """Does something on every process.

    Raises:
        DistributeError: it failed on one of them: the error of the first, on all.
    """
    found = job()
    if found is None:
        return do()
    failure: Exception | None = None
    try:
        result = do()
    except Exception as error:  # whatever it is, the others have to hear of it
        failure = error
    _raise_first(found, _told(found, _said(method, failure)), failure)
    return result


def by_chief(method: str, do: Callable[[], T]) -> T:
    """Does something on the chief alone, and gives every process what came of it, plain data.

    Raises:
        DistributeError: it failed; on all.
    """
    found = job()
    if found is None:
        return do()
    failure, result = None, None
    try:
        result = do() if is_chief() else None
    except Exception as error:  # as above
        failure = error
    told = _told(found, _said(method, failure, result))
    _raise_first(found, told, failure)
    value: T = told[0].value
    return value


def await_written(method: str, background: Background) -> None:
    """Returns on every process when no thread has a save at work any more.

    Raises:
        DeadlineExceededError: one writes for ever; on all.
    """
    found = job()
    if found is None:
        background.join()
        return
    step_seconds = found.options.step_seconds
    for _ in range(_LOOKS * PATIENCE):
        are_done = all_values(method, background.has_ended_within(step_seconds / _LOOKS))
        if all(are_done):
            return
    late = ", ".join(found.name_of(i) for i, is_done in enumerate(are_done) if not is_done)
    raise _errors.DeadlineExceededError(
        f"{method}: the save before this one has been written for {step_seconds * PATIENCE:g} s, still by "
        f"{late}. Look whether the file system still answers there; where writing takes so long, give it "
        "more time: dj.ClusterOptions(step_seconds=...)."
    )


def taken_error(method: str, background: Background) -> CheckpointError | None:
    """Waits for the save at work, and gives every process the error of the first that failed, once."""
    found = job()
    if found is None:
        return background.taken_error()
    await_written(method, background)
    own = background.taken_error()
    told = _told(found, _said(method, own))
    first = next((i for i, said in enumerate(told) if said.kind), None)
    if first is None:
        return None
    failed = own if own is not None and first == found.index else _copied(found, first, told[first])
    return failed if isinstance(failed, CheckpointError) else CheckpointError(str(failed))


def write(method: str, do: Callable[[], None]) -> None:
    """Has every process write, and returns on all when it is on the disk.

    Raises:
        CheckpointError: it could not be written; on all.
    """
    if job() is None:
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
    found = job()
    if found is None:
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
        lines = "\n".join(
            f"  {found.name_of(i)} does not see it in {said[i][1]}" for i in blind[:8]
        )
        raise CheckpointFileError(
            f"{method}: {found.name_of(0)} wrote a file into {said[0][1]}, and not every process finds it:\n"
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


def _told(found: Job, own: _Said) -> list[_Said]:
    said = found.exchange(_TOPIC, json.dumps(vars(own)), place=f"a checkpoint's {own.method!r}")
    told = [_Said(**json.loads(text)) for text in said]
    if len({said.method for said in told}) > 1:
        calls = ", ".join(f"{said.method} on process {i}" for i, said in enumerate(told[:8]))
        raise ProcessesDifferError(
            f"The processes called different things at the same time: {calls}. All processes of a job save "
            "and load together, in the same order, not the chief alone."
        )
    return told


def _raise_first(found: Job, told: list[_Said], own: Exception | None) -> None:
    """Raises what the first process raises that failed, so that it is of one class on all."""
    first = next((i for i, said in enumerate(told) if said.kind), None)
    if first is None:
        return
    if own is not None and type(own).__name__ == told[first].kind:
        raise own
    raise _copied(found, first, told[first]) from own


def _copied(found: Job, process: int, said: _Said) -> Exception:
    """Gives an error of another process as one of this library's."""
    kind = getattr(_errors, said.kind, None)
    text = f"{said.method} failed on {found.name_of(process)}: {said.text}"
    if isinstance(kind, type) and issubclass(kind, DistributeError):
        return kind(text)
    return CheckpointError(f"{text} ({said.kind})")
