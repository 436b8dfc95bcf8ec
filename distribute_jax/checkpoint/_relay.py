"""What the threads of the processes tell each other while they write one checkpoint.

The chief opens a draft, the others write into it and say so, and the chief commits when all have. They talk
through the key-value store alone: the training goes on meanwhile.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

from distribute_jax._errors import CheckpointFileError
from distribute_jax.processes import Job, job

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
        self._job = job()
        self._folder = f"saving/{token}/"
        self._limit = time.monotonic() + self._seconds(self._job)

    @staticmethod
    def _seconds(found: Job | None) -> float:
        return 0.0 if found is None else found.options.step_seconds * PATIENCE

    @property
    def process(self) -> int:
        """Which process this is."""
        return 0 if self._job is None else self._job.index

    @contextmanager
    def led(self) -> Iterator[None]:
        """Has the others wait no longer for a draft, in the process that makes it, when that fails."""
        try:
            yield
        except BaseException:
            self._say(_OPEN, _CALLED_OFF)
            raise
        if self._job is not None:
            self._job.store.remove(self._folder)  # all have said that they are through

    def open(self) -> None:
        """Says that the others may write now."""
        self._say(_OPEN, _OPEN)

    def is_open(self) -> bool:
        """Waits until this process may write; False where the chief has given up."""
        told = self._heard(_OPEN)
        if told is None and self._job is not None:
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
        count = 1 if self._job is None else self._job.count
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
        return f"process {process}" if self._job is None else self._job.name_of(process)

    def _named(self, process: int) -> str:
        where = "" if self._job is None else self._job.whereabouts(process)
        return f"{self.name_of(process)}{where}"

    def _say(self, key: str, text: str) -> None:
        if self._job is not None:
            self._job.store.put(self._folder + key, text)

    def _heard(self, key: str) -> str | None:
        if self._job is None:
            return None
        left = max(self._limit - time.monotonic(), 0.001)
        return self._job.store.get(self._folder + key, left)
