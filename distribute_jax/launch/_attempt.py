"""One attempt on this machine: the processes run until all have ended, or one has failed."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

from distribute_jax._errors import ClusterError
from distribute_jax.cluster._exit_codes import OTHER_FAILED, SAVED
from distribute_jax.cluster._status import read_status
from distribute_jax.launch._child import Child
from distribute_jax.launch._events import Event, Inbox, PeerFailed, PeerLost, Told
from distribute_jax.launch._group import Group
from distribute_jax.launch._outcome import Death, Outcome
from distribute_jax.launch._output import last_words

AFTER_A_DEATH = 1.0
"""How many seconds the others have to end by themselves: without the one that failed they cannot save."""

_LONG = 86400.0


class Attempt:
    """Waits for the processes of a group, and decides when the rest of them is ended.

    Args:
        number: which attempt it is.
        group: the processes.
        inbox: where they say that they have ended, and others what happened elsewhere.
        grace: how many seconds the processes have to save after a signal.
        on_failure: called when the first process here has failed.
        words: gives the last lines that a process wrote to its standard error.
    """

    def __init__(
        self,
        number: int,
        group: Group,
        inbox: Inbox,
        *,
        grace: float,
        on_failure: Callable[[], None],
        words: Callable[[int], Sequence[str]],
    ) -> None:
        self._number = number
        self._group = group
        self._inbox = inbox
        self._grace = grace
        self._on_failure = on_failure
        self._words = words
        self._deaths: list[Death] = []
        self._told: int | None = None
        self._lost = ""
        self._killed: list[int] = []
        self._limit = float("inf")

    def run(self) -> Outcome:
        """Waits until nothing of the group is left.

        Returns:
            How it ended.

        Raises:
            ClusterError: the supervisor of another machine is gone.
        """
        while self._group.running and (left := self._limit - time.monotonic()) > 0:
            self._take(self._inbox.get(min(left, _LONG)))
        while (event := self._inbox.get(0)) is not None:
            self._take(event)
        if self._told is not None:
            self._killed = [child.program.index for child in self._group.running]
        self._group.end(grace=AFTER_A_DEATH if self._told is None else 0)
        if self._lost:
            raise ClusterError(self._lost)
        return self._outcome()

    def _take(self, event: Event | None) -> None:
        match event:
            case Child() if event in self._group.children:  # and none of an earlier attempt
                self._take_end(event)
            case Told():
                self._take_signal(event.number)
            case PeerFailed() if event.attempt == self._number:
                self._end_within(0)
            case PeerLost():
                self._lost = event.text
                self._end_within(0)

    def _take_end(self, child: Child) -> None:
        if child.code == SAVED:
            self._end_within(self._grace)
        elif child.code and self._told is None:
            self._deaths.append(self._death(child, child.code))
            if len(self._deaths) == 1:
                self._on_failure()
            # Whoever ended because of another one may be seen before that one.
            self._end_within(AFTER_A_DEATH if child.code == OTHER_FAILED else 0)

    def _take_signal(self, number: int) -> None:
        if self._told is None:
            self._group.send(number)
        self._end_within(self._grace if self._told is None else 0)
        self._told = number

    def _end_within(self, seconds: float) -> None:
        self._limit = min(self._limit, time.monotonic() + seconds)

    def _death(self, child: Child, code: int) -> Death:
        program = child.program
        status = read_status(program.status)
        return Death(
            process=program.index,
            pid=child.pid,
            host=socket.gethostname(),
            code=code,
            error=status.error.partition("\n")[0] or last_words(self._words(program.index)),
            step=status.step,
            phase=status.phase,
        )

    def _outcome(self) -> Outcome:
        steps = [read_status(child.program.status).step for child in self._group.children]
        codes = [child.code for child in self._group.children]
        causes = [death for death in self._deaths if death.is_cause]
        return Outcome(
            death=next(iter(causes or self._deaths), None),
            best=max((step for step in steps if step is not None), default=None),
            all_saved=all(code == SAVED for code in codes),
            any_saved=SAVED in codes,
            told=self._told,
            killed=tuple(self._killed),
        )
