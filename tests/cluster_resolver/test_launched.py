"""The resolver for processes that ``distribute-jax launch`` has started."""

from __future__ import annotations

import socket
import threading
import time

import pytest

import distribute_jax as dj
from distribute_jax import _supervision


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Makes this process one of three that were launched."""

    def become(process, **changes):
        around = {
            _supervision.NUM_PROCESSES: "3",
            _supervision.PROCESS_ID: str(process),
            _supervision.LOCAL_PROCESS_ID: str(process),
            _supervision.HOST: "127.0.0.1",
            _supervision.JOB_FOLDER: str(tmp_path),
            _supervision.ATTEMPT: "0",
            **changes,
        }
        for name, value in around.items():
            monkeypatch.setenv(name, value)
        return dj.cluster_resolver.LaunchedClusterResolver(timeout=5)

    return become


def test_all_processes_get_the_address_that_process_0_publishes(launched, tmp_path):
    """Process 0 picks a port for each attempt; the others wait for it."""
    resolver = launched(1)
    addresses = []
    waiting = threading.Thread(target=lambda: addresses.append(resolver.coordinator_address))
    waiting.start()
    time.sleep(0.05)
    assert (resolver.num_processes, resolver.process_id, resolver.local_process_id) == (3, 1, 1)
    (tmp_path / "coordinator-0").write_text("127.0.0.1:4242")
    waiting.join()
    assert addresses == ["127.0.0.1:4242"]

    first = launched(0, **{_supervision.ATTEMPT: "1"})
    address = first.coordinator_address
    assert address == first.coordinator_address == first.master()
    assert dj.cluster_resolver.detect().coordinator_address == address
    assert launched(2, **{_supervision.ATTEMPT: "1"}).coordinator_address == address
    host, port = address.split(":")
    with socket.create_server((host, int(port))):
        pass  # nobody has it


@pytest.mark.parametrize(
    ("has_ended", "timeout", "state"),
    [(False, 0.1, "write it within 0.1 s"), (True, 60, "has ended")],
)
def test_waiting_for_process_0_ends(launched, tmp_path, has_ended, timeout, state):
    """After the timeout, and at once if process 0 has ended."""
    launched(1, **{_supervision.STATUS: str(tmp_path / "status-0-1")})
    (tmp_path / f"status-0-{0 if has_ended else 2}.ended").touch()
    resolver = dj.cluster_resolver.LaunchedClusterResolver(timeout=timeout)
    missing = f"{tmp_path}/coordinator-0"
    with pytest.raises(dj.ClusterError, match=f"of process 0, which .*{state}: {missing}"):
        _ = resolver.coordinator_address


def test_process_0_must_be_able_to_listen_at_its_address(launched):
    resolver = launched(0, **{_supervision.HOST: "192.0.2.1"})
    with pytest.raises(dj.ClusterError, match=r"process 0 cannot listen on '192\.0\.2\.1'"):
        _ = resolver.coordinator_address


def test_a_folder_that_process_0_cannot_write_to_is_named(launched, tmp_path):
    """Temporary files may have been removed, or their disk may be full."""
    resolver = launched(0, **{_supervision.JOB_FOLDER: str(tmp_path / "gone")})
    with pytest.raises(
        dj.ClusterError, match=f"cannot write that to {tmp_path}/gone/.*No such file"
    ):
        _ = resolver.coordinator_address
