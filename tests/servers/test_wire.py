"""Messages between processes of parameter servers: what comes is what was sent, or an error."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distribute_jax.servers._wire import Connection, Message, WireError, unpacked

SECONDS = 10


@pytest.mark.parametrize("size", [0, 3, 1 << 20])
def test_a_message_comes_as_it_was_sent(size: int) -> None:
    """Small ones in one piece and large ones in several, with all dtypes and a descriptor."""
    here, there = map(Connection, socket.socketpair())
    arrays = [
        np.arange(size, dtype=np.float32),
        jnp.full((), 3, jnp.int4),
        jnp.ones((2, 1), jnp.bfloat16),
        np.zeros((0, 4), bool),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    ]
    reading, writing = os.pipe()
    sender = threading.Thread(
        target=here.send, args=(Message("name", [1, ["a"], None], arrays, [writing]),)
    )
    sender.start()
    got = there.receive()
    sender.join()
    assert (got.name, got.plain) == ("name", [1, ["a"], None])
    for mine, theirs in zip(arrays, got.arrays, strict=True):
        assert (theirs.dtype, theirs.shape) == (mine.dtype, mine.shape)
        np.testing.assert_array_equal(np.asarray(mine), theirs)
    os.write(got.ends[0], b"x")
    assert os.read(reading, 1) == b"x"
    for descriptor in (reading, writing, got.ends[0]):
        os.close(descriptor)
    here.close()
    there.close()


@pytest.mark.parametrize("size", [1, 77, 1 << 18])
def test_a_received_array_is_used_without_a_copy(size: int) -> None:
    """JAX does not copy it to a CPU, which would take longer than the message."""
    array = np.arange(size, dtype=np.float32)
    got = unpacked(b"".join(Message("name", [], [array, array]).packed())).arrays[1]
    on_cpu = jax.device_put(got, jax.devices("cpu")[0])
    assert on_cpu.unsafe_buffer_pointer() == got.ctypes.data


class Interrupted:
    """A socket of which one call is interrupted before it does anything."""

    def __init__(self, end: socket.socket, call: str) -> None:
        self.end, self.call = end, call

    def __getattr__(self, name: str) -> Any:
        if name == self.call:
            raise KeyboardInterrupt
        return getattr(self.end, name)


@pytest.mark.parametrize("call", ["sendall", "recvmsg_into"])
def test_an_interrupt_within_a_message_ends_the_connection(call: str) -> None:
    """The other end would wait for the rest; the next question would get the answer to this one."""
    end, other = socket.socketpair()
    here, there = Connection(Interrupted(end, call)), Connection(other)  # type: ignore[arg-type]
    there.limit(SECONDS)
    there.send(Message("the answer"))
    with pytest.raises(KeyboardInterrupt):
        here.ask(Message("question", arrays=[np.zeros(1 << 13)]))
    with pytest.raises(WireError, match="closed the connection"):
        _ = [there.receive() for _ in range(2)]
    end.settimeout(SECONDS)
    with pytest.raises(WireError):
        Connection(end).ask(Message("the next question"))
    there.close()
    here.close()
