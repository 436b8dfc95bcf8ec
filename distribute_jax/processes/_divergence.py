"""Detects processes of a job that diverged, by comparing logs of what each has done.

Each process logs what must be the same on all: the steps that it runs, the host values that it passes,
what it writes into variables between steps, where it waits for the others. The log is a hash chain, of which
the watchdogs regularly compare the latest entries. So no process waits for another, and processes that
diverge, or wait for each other in two places, are detected within seconds, with the first difference in the
message.
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

_FOLDER = "news/actions/"
_MAX_ACTIONS = 2048
"""Actions in a log, from which the first one that differs is found."""
_PUBLISHED_ACTIONS = 16
"""Latest actions that process 0 publishes."""
_MAX_PENDING = 16
"""Publications that a process keeps until it has done as many actions."""
_POLL_SECONDS = 0.05
_FINISH_SECONDS = 5.0
_RAISE_SECONDS = 3.0
"""How long the main thread has to raise the error before the watchdog ends the process."""

_PREFIX = "distribute_jax/"
_DEADLINE, _EXISTS = "DEADLINE_EXCEEDED", "ALREADY_EXISTS"
_IMMEDIATE_MS = 1000
"""Timeout for getting a text that exists, in milliseconds."""

_DIVERGED = """\
The processes diverged: they are no longer executing the same steps.
{lines}
Every process runs the same steps and calls the same methods (fit, save, reduce) in the same order, passes \
the same host values, and writes the same values into variables between steps. Look for what depends on the \
process: its number, a seed, the time, local data, a branch on dj.is_chief(). Values that may differ go into \
a PerReplica: strategy.experimental_distribute_values_from_function."""


class KeyValueStore:
    """The key-value store of ``jax.distributed`` on process 0; it works even while a step hangs."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, key: str, text: str) -> None:
        """Stores a text, in place of an older one."""
        self._client.key_value_set(_PREFIX + key, text, allow_overwrite=True)

    def put_if_absent(self, key: str, text: str) -> str:
        """Stores a text if the key is new; returns the stored text."""
        try:
            self._client.key_value_set(_PREFIX + key, text)
        except jax.errors.JaxRuntimeError as error:
            if _EXISTS not in str(error):
                raise
            return str(self._client.blocking_key_value_get(_PREFIX + key, _IMMEDIATE_MS))
        return text

    def get(self, key: str, seconds: float) -> str | None:
        """Waits for a text; returns None after the timeout."""
        try:
            milliseconds = max(int(seconds * 1000), 1)
            return str(self._client.blocking_key_value_get(_PREFIX + key, milliseconds))
        except jax.errors.JaxRuntimeError as error:
            if _DEADLINE not in str(error):
                raise
            return None

    def under(self, folder: str) -> dict[str, str]:
        """Returns all texts below a folder, a key that ends with a slash, by the rest of their keys."""
        start = len(_PREFIX + folder)
        entries = self._client.key_value_dir_get(_PREFIX + folder)
        return {key[start:]: text for key, text in entries}

    def remove(self, folder: str) -> None:
        self._client.key_value_delete(_PREFIX + folder)


@dataclass(frozen=True)
class Action:
    """An entry of the log."""

    number: int
    """Counts from 1."""
    chain: str
    """The digest of all actions up to this one."""
    text: str


class ActionLog:
    """The actions of this process, and their comparison with those of the others.

    Process 0 publishes its latest actions. Each of the others compares their chains with its own; if one
    differs, it publishes its log, and process 0 publishes a verdict with the first difference.
    """

    def __init__(self, index: int, count: int, store: KeyValueStore) -> None:
        self._index, self._count, self._store = index, count, store
        self._chain = b""
        self._number = 0
        self._actions: deque[Action] = deque(maxlen=_MAX_ACTIONS)
        self._lock = threading.Lock()
        """Protects the actions, which the watchdog's thread copies."""
        self._message: str | None = None
        self._detected = 0.0
        self._is_published = False
        self._pending: deque[list[tuple[int, str]]] = deque(maxlen=_MAX_PENDING)

    def record(self, text: str, value: bytes = b"") -> None:
        """Adds an action: the text that an error shows, and the bytes of values that must be equal."""
        if self._message is not None:
            raise ProcessesDifferError(self._message)
        content = text.encode() + b"\0" + value
        with self._lock:
            self._chain = hashlib.blake2b(self._chain + content, digest_size=8).digest()
            self._number += 1
            self._actions.append(Action(self._number, self._chain.hex(), text))

    def compare(self, entries: dict[str, str]) -> str | None:
        """Compares with the others; returns a difference that the main thread has not raised in time."""
        if self._index == 0:
            self.publish()
            self._judge(entries)
        else:
            self._compare(entries)
        if "verdict" in entries and self._message is None:
            self._message, self._detected = entries["verdict"], time.monotonic()
        if self._message is not None and time.monotonic() - self._detected > _RAISE_SECONDS:
            return self._message
        return None

    def finish(self) -> str | None:
        """Compares for the last time, when the programs of all have ended; returns the difference."""
        limit = time.monotonic() + _FINISH_SECONDS
        if self._index:
            self.compare_last()
            while self._is_published and self._message is None and time.monotonic() < limit:
                time.sleep(_POLL_SECONDS)
                self._message = self._store.under(_FOLDER).get("verdict")
            return self._message
        entries = self._store.under(_FOLDER)
        others = [f"finished/{process}" for process in range(1, self._count)]
        while not entries.keys() >= {*others} and time.monotonic() < limit:
            time.sleep(_POLL_SECONDS)
            entries = self._store.under(_FOLDER)
        self._judge(entries)
        return self._message

    def compare_last(self) -> None:
        self._compare(self._store.under(_FOLDER), is_last=True)
        self._store.put(f"{_FOLDER}finished/{self._index}", "")

    def publish(self) -> None:
        if self._index == 0 and (actions := self._copy()):
            # Not only the last: a process that waits elsewhere may never get as far.
            latest = [[action.number, action.chain] for action in actions[-_PUBLISHED_ACTIONS:]]
            self._store.put(f"{_FOLDER}latest", json.dumps(latest))

    def _copy(self) -> list[Action]:
        with self._lock:
            return list(self._actions)

    def _compare(self, entries: dict[str, str], *, is_last: bool = False) -> None:
        if "latest" in entries:
            self._pending.append(json.loads(entries["latest"]))
        actions = self._copy()
        chains = {action.number: action.chain for action in actions}
        differs = any(
            chains.get(number, chain) != chain
            for latest in self._pending
            for number, chain in latest
        )
        # At the end, one log may be longer than the other.
        last = self._pending[-1][-1][0] if self._pending else 0
        is_longer = is_last and last != (actions[-1].number if actions else 0)
        if (differs or is_longer) and not self._is_published:
            self._is_published = True
            log = [[action.number, action.chain, action.text] for action in actions]
            self._store.put(f"{_FOLDER}logs/{self._index}", json.dumps(log))

    def _judge(self, entries: dict[str, str]) -> None:
        """Publishes, on process 0, the first difference from a process that has published its log."""
        others = [int(key.removeprefix("logs/")) for key in entries if key.startswith("logs/")]
        if not others or self._message is not None:
            return
        other = min(others)
        log = [Action(*action) for action in json.loads(entries[f"logs/{other}"])]
        message = _DIVERGED.format(lines="\n".join(_first_difference(self._copy(), log, other)))
        self._store.put(f"{_FOLDER}verdict", message)
        self._message, self._detected = message, time.monotonic()


def _first_difference(first: Sequence[Action], second: Sequence[Action], other: int) -> list[str]:
    logs = [{action.number: action for action in log} for log in (first, second)]
    start = max(min(log) for log in logs if log)
    for number in itertools.count(min(start, max(max(log, default=0) for log in logs))):
        a, b = (log.get(number) for log in logs)
        if a is None or b is None or a.chain != b.chain:
            break
    return [
        f"  process 0: {'nothing more' if a is None else a.text}",
        f"  process {other}: {'nothing more' if b is None else b.text}",
    ]
