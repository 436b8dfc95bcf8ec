"""What a supervisor asks of those on other machines, and the connection to them."""

from __future__ import annotations

import queue
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from distribute_jax._errors import ClusterError
from distribute_jax.cluster_resolver._launched import write_whole
from distribute_jax.launch._hub import SILENCE, Hub, Message, Wire, WireError, job_of, key_of
from distribute_jax.launch._process import Inbox, PeerFailed, PeerLost
from distribute_jax.launch._verdict import Outcome


class Machines(Protocol):
    """All machines of a job, as the supervisor of one of them sees it."""

    nonce: str
    """A number in hex that no other job has."""

    def begin(self, attempt: int, coordinator: Path, told: int | None) -> int | None:
        """Waits until every machine is ready for an attempt.

        Args:
            attempt: its number.
            coordinator: the file in which process 0 says where it listens: read where process 0 runs,
                and written on the others.
            told: the signal by which this supervisor was told to end, if it was.

        Returns:
            The signal by which one of the supervisors was told to end; None to go on.
        """

    def failed(self, attempt: int) -> None:
        """Has the processes of the other machines ended, since one here has failed."""

    def agree(self, attempt: int, outcome: Outcome) -> Sequence[Outcome]:
        """Gives how the attempt ended on every machine, in the order of their ranks."""

    def close(self) -> None:
        """Takes leave of the others."""


class OneMachine:
    """There is no other machine."""

    def __init__(self) -> None:
        """Makes a job."""
        self.nonce = secrets.token_hex(8)

    def begin(self, attempt: int, coordinator: Path, told: int | None) -> int | None:
        """Waits for nobody."""
        return told

    def failed(self, attempt: int) -> None:
        """There is nobody to tell."""

    def agree(self, attempt: int, outcome: Outcome) -> Sequence[Outcome]:
        """Gives the only outcome."""
        return [outcome]

    def close(self) -> None:
        """Takes leave of nobody."""


_BEAT = 1.0
_GREETING = 2.0
"""Whoever listens and says nothing for so many seconds is no supervisor."""
_RETRY = 0.1
_POLL = 0.02


class Link:
    """All machines of a job, as ``Machines`` describes them; made by the supervisor of each.

    Args:
        address: where the supervisor of node 0 listens.
        node: the rank of this machine.
        nodes: how many there are.
        layout: what all of them must have in common.
        inbox: where events of the others go.
        seconds: how long to wait for the others at the start.

    Raises:
        ClusterError: node 0 cannot listen, cannot be reached, or has refused this machine.
    """

    def __init__(
        self,
        address: tuple[str, int],
        node: int,
        nodes: int,
        *,
        layout: Message,
        inbox: Inbox,
        seconds: float,
    ) -> None:
        self._node, self._nodes = node, nodes
        self._inbox = inbox
        self._seconds = seconds
        self._where = f"{address[0]}:{address[1]}"
        self._gathered: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._here: Sequence[int] = ()
        self._attempt = -1
        self._coordinator: Path | None = None
        self._lost = ""
        self._closed = threading.Event()
        self._hub = Hub(address, layout, nodes) if node == 0 else None
        self._wire = self._connected(address)
        try:
            self._join(layout)
        except ClusterError:
            self.close()
            raise
        for work in (self._listen, self._beat):
            threading.Thread(target=work, daemon=True).start()

    def begin(self, attempt: int, coordinator: Path, told: int | None) -> int | None:
        """See ``Machines``; the address of process 0 goes on its way as soon as it is there."""
        self._attempt, self._coordinator = attempt, coordinator
        signals = self._gather(f"begin {attempt}", told, self._seconds)
        if self._node == 0:
            threading.Thread(
                target=self._announce, args=(attempt, coordinator), daemon=True
            ).start()
        return next((number for number in signals if number is not None), None)

    def failed(self, attempt: int) -> None:
        """See ``Machines``."""
        self._send({"kind": "shout", "what": "failed", "attempt": attempt})

    def agree(self, attempt: int, outcome: Outcome) -> Sequence[Outcome]:
        """See ``Machines``."""
        values = self._gather(f"outcome {attempt}", outcome.as_data(), None)
        return [Outcome.from_data(value) for value in values]

    def close(self) -> None:
        """See ``Machines``."""
        self._closed.set()
        self._send({"kind": "goodbye"})
        if self._hub is not None:
            self._hub.close()
        self._wire.close()

    def _connected(self, address: tuple[str, int]) -> Wire:
        limit = time.monotonic() + self._seconds
        while True:
            try:
                return Wire(socket.create_connection(address, timeout=_BEAT))
            except OSError as error:
                if time.monotonic() > limit:
                    raise ClusterError(
                        f"--coordinator {self._where}: the supervisor of node 0 could not be reached within "
                        f"{self._seconds:g} s: {error}. Start --node-rank 0 there, and let this machine "
                        "connect to the port; `distribute-jax doctor --coordinator` tries it."
                    ) from error
                time.sleep(_RETRY)

    def _join(self, layout: Message) -> None:
        try:
            self.nonce = job_of(self._wire.receive(_GREETING))
            self._wire.key = key_of(self.nonce)
            self._wire.send({"kind": "join", "node": self._node, "layout": layout})
            answer = self._wire.receive()
            if answer is None:
                raise WireError("the connection was closed")
        except (OSError, WireError) as error:
            raise ClusterError(
                f"--coordinator {self._where}: no supervisor answers there ({error}). Another program "
                "uses the port, or the machines have different secrets: choose another port on all machines."
            ) from error
        if answer["kind"] != "welcome":
            raise ClusterError(
                f"--coordinator {self._where} has refused node {self._node}: {answer['reason']}. Choose "
                "another port for this job on all its machines, or start all with the same command."
            )

    def _gather(self, name: str, value: Any, seconds: float | None) -> list[Any]:
        """Gives the values of all machines, in the order of their ranks."""
        self._send({"kind": "gather", "name": name, "value": value})
        limit = float("inf") if seconds is None else time.monotonic() + seconds
        told = self._inbox.told
        while True:
            with suppress(queue.Empty):
                message = self._gathered.get(timeout=_RETRY)
                if message["name"] == name:
                    values: list[Any] = message["values"]
                    return values
            if self._inbox.told != told:
                raise ClusterError(
                    f"node {self._node} was told to end while it waited for the others."
                )
            if self._lost:
                raise ClusterError(self._lost)
            if time.monotonic() > limit:
                missing = [i for i in range(self._nodes) if i not in self._here]
                raise ClusterError(
                    f"node {self._node} has waited {seconds:g} s for all {self._nodes} machines; "
                    f"missing: {', '.join(f'node {i}' for i in missing)}. Start each with its --node-rank "
                    f"and --coordinator {self._where}."
                )

    def _send(self, message: Message) -> None:
        with suppress(OSError):  # the thread that listens finds out
            self._wire.send(message)

    def _announce(self, attempt: int, coordinator: Path) -> None:
        """Tells the others where process 0 listens, once it has said so."""
        while self._attempt == attempt and not self._closed.is_set():
            if coordinator.exists():
                text = coordinator.read_text()
                self._send(
                    {"kind": "shout", "what": "coordinator", "attempt": attempt, "address": text}
                )
                return
            time.sleep(_POLL)

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT):
            self._send({"kind": "alive"})

    def _listen(self) -> None:
        why = "its connection was closed"
        try:
            while (message := self._wire.receive()) is not None:
                self._take(message)
        except TimeoutError:
            why = f"nothing was heard of it for {SILENCE:g} s"
        except (OSError, WireError) as error:
            why = str(error)
        self._lose(0, why)

    def _take(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "gathered":
            self._gathered.put(message)
        elif kind == "alive":
            self._here = message["here"]
        elif kind == "lost":
            self._lose(message["node"], "its connection was closed")
        elif message["what"] == "failed":
            self._inbox.put(PeerFailed(message["attempt"]))
        elif message["attempt"] == self._attempt and self._coordinator is not None:
            write_whole(self._coordinator, message["address"])

    def _lose(self, node: int, why: str) -> None:
        if self._closed.is_set():
            return
        self._lost = self._lost or (
            f"the supervisor of node {node} is gone ({why}), and the job cannot go on without it. Look at "
            "its output, and start the job again on all machines."
        )
        self._inbox.put(PeerLost(self._lost))
