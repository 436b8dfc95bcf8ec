"""The resolver for processes that ``distribute-jax launch`` has started."""

from __future__ import annotations

import distribute_jax as dj
from distribute_jax import _supervision


def test_all_processes_get_the_address_that_the_launcher_picked(monkeypatch):
    for process in range(3):
        for name, value in {
            _supervision.NUM_PROCESSES: "3",
            _supervision.PROCESS_ID: str(process),
            _supervision.LOCAL_PROCESS_ID: str(process),
            _supervision.ADDRESS: "127.0.0.1:4242",
        }.items():
            monkeypatch.setenv(name, value)
        resolver = dj.cluster_resolver.LaunchedClusterResolver()
        assert (resolver.num_processes, resolver.process_id) == (3, process)
        assert resolver.local_process_id == process
        assert resolver.coordinator_address == resolver.master() == "127.0.0.1:4242"
        assert dj.cluster_resolver.detect().coordinator_address == "127.0.0.1:4242"
