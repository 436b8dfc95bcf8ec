"""What the watchdogs and a barrier of 256 processes cost process 0, by the requests that they make."""

from __future__ import annotations

import io
import sys
import time

from distribute_jax.processes import ClusterOptions, Job, _liveness
from distribute_jax.processes._liveness import Watchdog, tick
from distribute_jax.processes._status import Activity

SECONDS_OF_A_REQUEST = 0.00025
"""Of a core of process 0, with 64 processes that make four every half a second."""


class Counted(dict):
    """A key-value store in memory that counts requests."""

    requests = 0

    def put(self, key, text):
        self.requests += 1
        self[key] = text

    put_if_absent = dict.setdefault

    def get(self, key, seconds):
        self.requests += 1
        return super().get(key)

    def under(self, folder):
        self.requests += 1
        return {key[len(folder) :]: text for key, text in self.items() if key.startswith(folder)}

    def remove(self, key):
        del self[key]


def job_of(index: int, count: int, store: Counted) -> Job:
    return Job(index, count, ClusterOptions(), store)


def test_256_watchdogs_take_at_most_5_percent_of_a_core():
    """Each makes two requests per tick, which is longer for more processes."""
    job = job_of(1, 256, Counted())
    watchdog = Watchdog(job, Activity())
    watchdog._send_heartbeat()
    watchdog._check()
    assert job.store.requests == 2
    assert 256 * 2 / tick(job) * SECONDS_OF_A_REQUEST <= 0.0525
    assert tick(job_of(1, 32, job.store)) == 0.5
    assert tick(job) < job.options.heartbeat_seconds / 3


def test_a_watchdog_runs_although_the_program_replaced_stderr(monkeypatch):
    """What copies it into a log may have no descriptor, without which faulthandler raises."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(_liveness, "_MIN_TICK_SECONDS", 0.01)
    monkeypatch.setattr("jax.distributed.is_initialized", lambda: True)
    store, end = Counted(), time.monotonic() + 10
    watchdog = Watchdog(job_of(1, 2, store), Activity())
    watchdog.start()
    while store.requests < 9 and time.monotonic() < end:
        time.sleep(0.01)
    watchdog.stop()
    assert store.requests >= 9


def test_process_0_reports_missed_heartbeats_and_withdraws_the_report(monkeypatch, capfd):
    """Waiting processes show it once; it needs no further request."""
    store, now = Counted(), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    jobs = [job_of(i, 3, store) for i in range(3)]
    dogs = [Watchdog(job, Activity(phase="waiting for all", since=0.0)) for job in jobs]
    for seconds in range(10):
        now[0] = float(seconds)
        for i in (0, 1) if seconds else (0, 1, 2):
            dogs[i]._send_heartbeat()
            dogs[i]._check()
    outcome = capfd.readouterr().err.splitlines()
    assert [line.partition(";")[0] for line in outcome] == [
        "distribute_jax: process 2 has sent no heartbeat for 5 s"
    ] * 2
    for i in (2, 0, 1):
        dogs[i]._send_heartbeat()
        dogs[i]._check()
    assert [key for key in store if "silent" in key] == []


def test_a_round_of_256_processes_takes_a_few_requests_of_process_0():
    """It does not request each text by itself."""
    store = Counted({f"round/barrier x/0/{i}": "" for i in range(1, 256)})
    job_of(0, 256, store).barrier("x")
    assert store.requests <= 3
