"""Before JAX connects, every process learns which one is missing, belongs to another job or differs."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import distribute_jax as dj
from distribute_jax import _supervision
from distribute_jax.processes import _rendezvous
from distribute_jax.processes._rendezvous import (
    Handshake,
    join_rendezvous,
    listen,
    serve_rendezvous,
)

SAME = {"number of processes": "3", "version of jax": "0.10.2"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Makes the calls in threads, and returns what each returned or raised."""
    results: list[Any] = [None] * len(calls)

    def make(number: int) -> None:
        try:
            results[number] = calls[number]()
        except Exception as error:  # the tests look at it
            results[number] = error

    threads = [threading.Thread(target=make, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive(), "a process hangs in the rendezvous"
    return results


def chief(address: str, count: int = 3, seconds: float = 15.0, facts: Any = SAME, job: str = "a"):
    def call() -> Any:
        listener, _ = listen(address)
        return serve_rendezvous(listener, Handshake(0, facts, job), count, seconds)

    return call


def other(
    address: str,
    process: int,
    count: int = 3,
    seconds: float = 15.0,
    facts: Any = SAME,
    job: str = "a",
):
    return lambda: join_rendezvous(address, Handshake(process, facts, job), count, seconds)


def late(address: str, process: int, seconds: float = 0.6) -> Callable[[], Any]:
    def call() -> Any:
        time.sleep(seconds)
        return other(address, process)()

    return call


def test_all_continue_together_and_know_each_other():
    """Process 0 may be the last; every process gets host and pid of all, in order."""
    address = f"127.0.0.1:{free_port()}"

    def late() -> Any:
        time.sleep(0.3)
        return chief(address)()

    members = together(late, other(address, 2), other(address, 1))
    assert members[0] == members[1] == members[2]
    assert len(members[0]) == 3


def test_missing_processes_are_named_on_all_that_connected(monkeypatch: pytest.MonkeyPatch):
    """A Python exception within the timeout, not an abort from C++."""
    monkeypatch.setattr(_rendezvous, "_LINGER_SECONDS", 0.0)
    address = f"127.0.0.1:{free_port()}"
    start = time.monotonic()
    errors = together(chief(address, 4, 0.6), other(address, 2, 4, 0.6))
    assert time.monotonic() - start < 10
    for error in errors:
        assert isinstance(error, dj.DeadlineExceededError)
        assert "2 of 4 processes did not connect" in str(error)
        assert "process 1, 3" in str(error)
    assert str(errors[0]) == str(errors[1])


def test_a_process_that_has_ended_is_not_awaited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Nor are processes of the launch awaited that are not of this job."""
    monkeypatch.setattr(_rendezvous, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(_rendezvous, "_LINGER_SECONDS", 0.5)
    monkeypatch.setenv(_supervision.STATUS, str(tmp_path / "status-1-0"))
    (tmp_path / "status-1-2.ended").touch()
    for own, limit, how in (("0", 60.0, "and process 2 has ended"), ("1", 1.0, "within 1 s")):
        monkeypatch.setenv(_supervision.PROCESS_ID, own)
        address = f"127.0.0.1:{free_port()}"
        for error in together(chief(address, 3, limit), other(address, 1, 3, limit)):
            assert f" of 3 processes did not connect {how}: process " in str(error)
    (tmp_path / "status-1-0.ended").touch()
    (error,) = together(other(f"127.0.0.1:{free_port()}", 1, seconds=60.0))
    assert "it has ended" in str(error)


def test_nobody_at_the_address_of_process_0_is_reported_with_host_and_port():
    """The error comes after the timeout, and names the address."""
    port = free_port()
    (error,) = together(other(f"127.0.0.1:{port}", 1, seconds=0.4))
    assert isinstance(error, dj.DeadlineExceededError)
    assert f"127.0.0.1:{port}" in str(error)
    assert "Connection refused" in str(error)


def test_processes_that_disagree_get_an_error_with_key_and_both_values():
    """On every process, including late ones."""
    address = f"127.0.0.1:{free_port()}"
    facts = {**SAME, "version of jax": "0.12.0"}
    start = time.monotonic()
    errors = together(chief(address), other(address, 1, facts=facts), late(address, 2))
    assert time.monotonic() - start < 10
    for error in errors:
        assert isinstance(error, dj.ProcessesDifferError)
        assert "version of jax: 0.10.2 on process 0, 0.12.0 on process 1" in str(error)


def test_other_jobs_and_duplicates_are_refused_and_the_job_continues():
    """A process of another launch, and a second process 1, cannot end a job, as they can in plain JAX."""
    address = f"127.0.0.1:{free_port()}"
    double, last = late(address, 1), late(address, 2, 1.0)
    results = together(chief(address), other(address, 1), other(address, 2, job="b"), double, last)
    assert "belong to different launches" in str(results[2])
    assert "Two processes claim to be process 1" in str(results[3])
    assert isinstance(results[0], list)
    assert results[0] == results[1] == results[4]


def test_a_process_that_died_while_waiting_can_be_restarted():
    """It takes the place of its predecessor."""
    address = f"127.0.0.1:{free_port()}"

    def dies_and_comes_again() -> Any:
        time.sleep(0.2)
        host, port = address.split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.recv(100)
            connection.sendall(Handshake(1, SAME, "a").line())
            time.sleep(0.2)
        return other(address, 1)()

    results = together(chief(address), dies_and_comes_again, late(address, 2, 1.0))
    assert results[0] == results[1] == results[2]


def test_a_port_in_use_is_named_at_once_on_all(monkeypatch: pytest.MonkeyPatch):
    """A silent listener, also one that would share its port as gRPC does."""
    monkeypatch.setattr(_rendezvous, "_GREETING_SECONDS", 0.3)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        start = time.monotonic()
        taken, silent = together(chief(address), other(address, 1))
    assert time.monotonic() - start < 10
    assert isinstance(taken, dj.ClusterError)
    assert "or a second process 0" in str(taken).partition("already in use")[2]
    assert isinstance(silent, dj.ClusterError)
    assert "something else" in str(silent)
    assert address in str(taken)
    assert address in str(silent)


def test_noise_on_the_port_does_not_disturb_the_rendezvous():
    """Clients that send garbage, too much, or nothing are ignored."""
    address = f"127.0.0.1:{free_port()}"
    host, port = address.split(":")

    def noise() -> Any:
        time.sleep(0.2)
        for sent in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"[1, 2]\n",
            b'[Infinity, {}, "", "h", 1]\n',
            b'[1, {}, "", "h", 1e999]\n',
            b'[1.5, {}, "a", "h", 1]\n',
            b"[" * 60_000 + b"\n",
            b"x" * 200_000,
            b"\xff\xfe\n",
            b"",
        ):
            whole = contextlib.suppress(OSError)  # it hangs up on such
            with whole, socket.create_connection((host, int(port))) as connection:
                connection.sendall(sent)
        return "done"

    results = together(chief(address), noise, late(address, 1), late(address, 2))
    assert results[0] == results[2] == results[3]


def test_a_host_name_that_does_not_resolve_is_named():
    """Process 0 cannot listen at a host that does not exist, or that is another machine."""
    for address in ("no-such-host.invalid:4000", "192.0.2.1:4000"):
        with pytest.raises(dj.ClusterError, match=address.split(":")[0]):
            listen(address)


def test_idle_connections_do_not_block_the_rendezvous(monkeypatch: pytest.MonkeyPatch):
    """Process 0, without a free descriptor, closes the oldest connections without a message."""
    address = f"127.0.0.1:{free_port()}"
    host, port = address.split(":")
    accept, refusals = socket.socket.accept, [1, 2, 3]

    def accept_or_refuse(self: socket.socket) -> Any:
        if len(connections) == 5 and refusals:
            raise OSError(errno.EMFILE, f"Too many open files ({refusals.pop()})")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", accept_or_refuse)
    connections: list[socket.socket] = []

    def silent() -> Any:
        time.sleep(0.3)
        for _ in range(5):
            connections.append(socket.create_connection((host, int(port))))
            assert connections[-1].recv(100)
        time.sleep(0.5)
        return [connection.recv(1) for connection in connections[:3]]

    results = together(chief(address), silent, late(address, 1), late(address, 2))
    assert results[0] == results[2] == results[3]
    assert results[1] == [b"", b"", b""]
    for connection in connections:
        connection.close()
