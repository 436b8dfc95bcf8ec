"""Processes that are workers and servers, and the one that they are forked from."""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import traceback
from typing import NoReturn

from distribute_jax._messages import error_text
from distribute_jax.servers._roles import role_of
from distribute_jax.servers._wire import Connection, Message, WireError


def main(descriptor: int) -> None:
    """Forks a process for each end that comes, or ends one of them; with its parent it ends them all.

    What takes seconds, to import JAX, is done once and before. It has one thread, and has started no backend.
    """
    control, running = Connection(socket.socket(fileno=descriptor)), set[int]()
    try:
        while True:
            message = control.receive()
            for pid in list(running):
                if os.waitpid(pid, os.WNOHANG)[0]:  # its number may be another's now
                    running.remove(pid)
            if message.name == "end":
                for pid in running.intersection(message.plain):
                    os.kill(pid, signal.SIGKILL)
                continue
            (end,) = message.ends
            if (pid := os.fork()) == 0:
                control.close()
                _be(message.name, end)
            os.close(end)
            running.add(pid)
            control.send(Message("pid", [pid]))
    except WireError:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)


def _be(kind: str, descriptor: int) -> NoReturn:
    """Is a worker or a server, which does what messages say."""
    control = Connection(socket.socket(fileno=descriptor))
    messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(control, messages), daemon=True).start()
    try:
        role = role_of(kind, lambda end: Connection(socket.socket(fileno=end)))
        while True:
            if (answer := role.do(messages.get())) is not None:
                control.send(answer)
    except WireError:  # the parent is gone
        os._exit(0)
    except BaseException as error:
        traceback.print_exc()
        control.send(Message("ended", [error_text(error)]))
    finally:
        os._exit(1)


def _receive(control: Connection, messages: queue.SimpleQueue[Message]) -> None:
    """Ends the process with its parent, whatever it computes."""
    try:
        while True:
            messages.put(control.receive())
    except WireError:
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
