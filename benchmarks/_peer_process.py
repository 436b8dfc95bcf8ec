"""A peer seen from the benchmark: a process that is asked, waited for within a bound, and ended."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
END_WAIT = 3.0
"""Seconds that a peer has to end by itself once it was told to."""


class PeerError(Exception):
    """A peer that cannot go on; the message says what happened."""


class PeerProcess:
    """One peer in its own process. Blocked on its input while nobody asks, it takes no time.

    Args:
        command: what starts it; it speaks the protocol of ``benchmarks/peers/_protocol.py``.
        environment: its environment variables.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        # Open as long as the process; closed in `end`.
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            # A process group, so that what the peer starts can be ended with it.
            start_new_session=True,
        )
        self._started = time.monotonic()
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ready(self, within: float) -> dict[str, str]:
        """Waits until the peer is ready, and gives the versions that it tells.

        Raises:
            PeerError: it ended, was not ready so many seconds after its start, or said something else.
        """
        left = max(0.0, self._started + within - time.monotonic())
        answer = self._answer(left, f"not ready within {within:.0f} s")
        versions: dict[str, str] = answer["ready"]
        return versions

    def ask(self, question: Mapping[str, Any], within: float) -> dict[str, Any]:
        """Asks, and waits for the answer.

        Raises:
            PeerError: the peer ended, was silent for ``within`` seconds, or said something else.
        """
        self._write(question)
        return self._answer(within, f"no answer within {within:.0f} s")

    def _answer(self, within: float, silent: str) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=within)
        except queue.Empty:
            raise PeerError(silent) from None
        if not line:
            raise PeerError(f"ended with status {self._status()}: {self._last_words()}")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise PeerError(f"said {line.strip()!r}, which is not an answer") from None
        return answer

    def most_resident(self) -> int:
        """Counts the most bytes that its processes had in memory, each with what they share; Linux only."""
        pids, total = [self._process.pid], 0
        for pid in pids:
            folder = Path(f"/proc/{pid}")
            (most,) = re.findall(r"VmHWM:\s+(\d+) kB", (folder / "status").read_text())
            total += 1024 * int(most)
            pids += map(int, (folder / f"task/{pid}/children").read_text().split())
        return total

    def dismiss(self) -> None:
        """Asks the peer to end, and does not wait for it."""
        self._write({"end": True})
        with suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]

    def end(self, within: float = END_WAIT) -> None:
        """Ends the process and all that it started, by force after so many seconds."""
        self.dismiss()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(within)
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._reader.join(END_WAIT)
        self._errors.close()

    def _status(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(END_WAIT)
        return None

    def _read(self) -> None:
        with self._process.stdout as lines:  # type: ignore[union-attr]
            for line in lines:
                self._lines.put(line)
        self._lines.put("")

    def _write(self, question: Mapping[str, Any]) -> None:
        # That a peer has gone is found out when its answer is read.
        with suppress(OSError, ValueError):
            print(json.dumps(question), file=self._process.stdin, flush=True)

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return lines[-1] if lines else "without a word"


def end_all(processes: Iterable[PeerProcess]) -> None:
    """Ends processes side by side: they have the same few seconds."""
    processes = list(processes)
    for process in processes:
        process.dismiss()
    deadline = time.monotonic() + END_WAIT
    for process in processes:
        process.end(max(0.0, deadline - time.monotonic()))
