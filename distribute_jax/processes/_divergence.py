"""Detects processes of a job that diverged, by digests of what each has done.

Each process logs what has to be the same on all: the steps that it runs, the host values that it passes,
what it writes into variables between steps. The log is a chain of digests, of which the watchdogs compare
one from time to time. So no process waits for another, and processes that diverge are detected within
moments, with the place in the message.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from distribute_jax._errors import ProcessesDifferError

_FOLDER = "course/"
_KEPT = 2048
"""Notes that are kept to say where two processes parted."""

_HEARD = 16
"""Notes of process 0 that are kept until this process has come as far."""

_LOOK_SECONDS = 0.05
_SETTLE_SECONDS = 5.0
_UNHEARD_SECONDS = 3.0
"""How long the main thread has to raise the error itself."""


@dataclass(frozen=True)
class Note:
    """One thing that this process has done."""

    number: int
    """How many it has done with this one."""
    chain: str
    """A digest of all of them."""
    text: str
    """What it was."""


class Course:
    """The notes of this process, and what their comparison has shown.

    Process 0 publishes its latest note. Each of the others looks whether its own note of the same number
    has the same chain; where it has not, both tell their last notes and process 0 says where they parted.

    Args:
        index: which process this is.
        count: how many there are.
        store: where they talk.
    """

    def __init__(self, index: int, count: int, store: Store) -> None:
        self._index, self._count, self._store = index, count, store
        self._chain = b""
        self._number = 0
        self._notes: deque[Note] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()
        """Held while the notes change, or are copied by the watchdog's thread."""
        self._words: str | None = None
        self._found = 0.0
        self._has_told = False
        self._heard: deque[tuple[int, str]] = deque(maxlen=_HEARD)

    def note(self, text: str, value: bytes = b"") -> None:
        """Notes what this process does now.

        Args:
            text: what it is, as an error would say it.
            value: what else has to be the same.

        Raises:
            ProcessesDifferError: the processes diverged before.
        """
        if self._words is not None:
            raise ProcessesDifferError(self._words)
        said = text.encode() + b"\0" + value
        with self._lock:
            self._chain = hashlib.blake2b(self._chain + said, digest_size=8).digest()
            self._number += 1
            self._notes.append(Note(self._number, self._chain.hex(), text))

    def look(self) -> str | None:
        """Compares with the others; called by the watchdog, now and then.

        Returns:
            Where the processes parted, once that has been known for so long that the main thread would
            have raised it if it could.
        """
        said = self._store.under(_FOLDER)
        if self._index == 0:
            self._publish()
            self._judge(said)
        else:
            self._compare(said)
        if "verdict" in said and self._words is None:
            self._words, self._found = said["verdict"], time.monotonic()
        if self._words is not None and time.monotonic() - self._found > _UNHEARD_SECONDS:
            return self._words
        return None

    def settle(self) -> str | None:
        """Compares for the last time, when every process has come to its end.

        Returns:
            Where the processes parted; None where they did not.
        """
        limit = time.monotonic() + _SETTLE_SECONDS
        if self._index:
            self.settle_own()
            while self._has_told and self._words is None and time.monotonic() < limit:
                time.sleep(_LOOK_SECONDS)
                self._words = self._store.under(_FOLDER).get("verdict")
            return self._words
        said = self._store.under(_FOLDER)
        while not self._all_settled(said) and time.monotonic() < limit:
            time.sleep(_LOOK_SECONDS)
            said = self._store.under(_FOLDER)
        self._judge(said)
        return self._words

    def settle_own(self) -> None:
        """Compares the end of this process with that of process 0, which has published it."""
        self._compare(self._store.under(_FOLDER), is_last=True)
        self._store.put(f"{_FOLDER}settled/{self._index}", "")

    def _all_settled(self, said: dict[str, str]) -> bool:
        return sum(key.startswith("settled/") for key in said) == self._count - 1

    def publish(self) -> None:
        """Tells the others the last note of process 0."""
        if self._index == 0:
            self._publish()

    def _own(self) -> list[Note]:
        with self._lock:
            return list(self._notes)

    def _publish(self) -> None:
        if notes := self._own():
            last = notes[-1]
            self._store.put(f"{_FOLDER}latest", json.dumps([last.number, last.chain]))

    def _compare(self, said: dict[str, str], *, is_last: bool = False) -> None:
        if "latest" in said:
            number, chain = json.loads(said["latest"])
            self._heard.append((number, chain))
        notes = self._own()
        mine = {note.number: note.chain for note in notes}
        is_other = any(mine.get(number, chain) != chain for number, chain in self._heard)
        # At the end, one of them may have done more than the other.
        last = self._heard[-1][0] if self._heard else 0
        is_longer = is_last and last != (notes[-1].number if notes else 0)
        if (is_other or is_longer) and not self._has_told:
            self._has_told = True
            self._store.put(f"{_FOLDER}notes/{self._index}", _as_text(notes))

    def _judge(self, said: dict[str, str]) -> None:
        """Says, as process 0, where a process has parted from it."""
        told = [key for key in said if key.startswith("notes/")]
        if not told or self._words is not None:
            return
        other = int(min(told, key=_process_of).removeprefix("notes/"))
        theirs = [Note(*note) for note in json.loads(said[f"notes/{other}"])]
        words = _DIFFER.format(lines="\n".join(_parting(self._own(), theirs, other)))
        self._store.put(f"{_FOLDER}verdict", words)
        self._words, self._found = words, time.monotonic()


def _process_of(key: str) -> int:
    return int(key.removeprefix("notes/"))


def _as_text(notes: Sequence[Note]) -> str:
    return json.dumps([[note.number, note.chain, note.text] for note in notes])


def _parting(mine: Sequence[Note], theirs: Sequence[Note], other: int) -> list[str]:
    """Describes the first notes that differ."""
    by_number: dict[int, list[Any]] = {}
    for side, notes in enumerate((mine, theirs)):
        for note in notes:
            by_number.setdefault(note.number, [None, None])[side] = note
    first = min(max(notes[0].number for notes in (mine, theirs) if notes), max(by_number))
    for number in itertools.count(first):
        here, there = by_number.get(number, (None, None))
        if here is None or there is None or here.chain != there.chain:
            break
    return [
        f"  process 0: {'nothing more' if here is None else here.text}",
        f"  process {other}: {'nothing more' if there is None else there.text}",
    ]


_DIFFER = """\
The processes diverged: they are no longer executing the same steps.
{lines}
Every process runs the same steps in the same order, passes the same host values, and writes the same into \
variables between steps. Look for what depends on the process: its number, a seed, the time, data of its \
own, a branch on dj.is_chief(). Values that may differ go into a PerReplica: \
strategy.experimental_distribute_values_from_function."""


_PREFIX = "distribute_jax/"
_DEADLINE, _EXISTS = "DEADLINE_EXCEEDED", "ALREADY_EXISTS"
_AT_ONCE = 1000
"""Milliseconds for a text that is there."""


class Store:
    """The key-value store that ``jax.distributed`` keeps on process 0.

    No device takes part in it, so it works while a step hangs, and before the first one.
    """

    def __init__(self, client: Any) -> None:
        """Wraps the client of a process."""
        self._client = client

    def put(self, key: str, text: str) -> None:
        """Stores a text, over an older one."""
        self._client.key_value_set(_PREFIX + key, text, allow_overwrite=True)

    def put_first(self, key: str, text: str) -> str:
        """Stores a text where there is none yet; gives the one that stands."""
        try:
            self._client.key_value_set(_PREFIX + key, text)
        except jax.errors.JaxRuntimeError as error:
            if _EXISTS not in str(error):
                raise
            return str(self._client.blocking_key_value_get(_PREFIX + key, _AT_ONCE))
        return text

    def get(self, key: str, seconds: float) -> str | None:
        """Waits for a text; None where it has not come in time."""
        try:
            milliseconds = max(int(seconds * 1000), 1)
            found: str = self._client.blocking_key_value_get(_PREFIX + key, milliseconds)
        except jax.errors.JaxRuntimeError as error:
            if _DEADLINE not in str(error):
                raise
            return None
        return found

    def under(self, folder: str) -> dict[str, str]:
        """Gives all that is stored under a key that ends with a slash, by the rest of the key."""
        start = len(_PREFIX + folder)
        found = self._client.key_value_dir_get(_PREFIX + folder)
        return {key[start:]: text for key, text in found}

    def remove(self, folder: str) -> None:
        """Forgets all that is stored under a key that ends with a slash."""
        self._client.key_value_delete(_PREFIX + folder)
