"""The roles of ``TF_CONFIG``: a chief that makes the strategy, and tasks that are a ``dj.Server``."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from test_processes import LOOPBACK, NEEDS_RAY, sockets_that_listen, state_and_parent

import distribute_jax as dj
from distribute_jax.cluster_resolver import ClusterSpec, SimpleClusterResolver
from distribute_jax.servers import Cluster, _ray

CLUSTER: dict[str, Any] = {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"], "ps": ["d:2222"]}
SECONDS = 300
LOCAL = LOOPBACK + "|/session_"
"""Also files of tasks, in folders that nobody else may read."""

WRONG: list[tuple[dict[str, Any], str | None, dict[str, Any], str]] = [
    (CLUSTER, "foobar", {}, "Unrecognized task_type: foobar"),
    (CLUSTER | {"foobar": ["e:2222"]}, "chief", {}, "Disallowed task type found"),
    (CLUSTER | {"chief": ["a:2222", "e:2222"]}, "chief", {}, "at most one 'chief'"),
    (CLUSTER | {"chief": []}, None, {}, "needs a 'chief'"),
    (CLUSTER | {"ps": []}, "chief", {}, "at least one ps"),
    (CLUSTER | {"worker": []}, "chief", {}, "at least one worker"),
    (CLUSTER | {"worker": {1: "b:2222"}}, "chief", {}, "without gaps"),
    ({}, None, {}, "must not be empty"),
    (CLUSTER, "worker", {}, "Task worker 0 makes no strategy"),
    (CLUSTER, "chief", {"workers": 3}, "workers=3 contradicts the cluster, which has 2"),
    (CLUSTER, "chief", {"servers": 2}, "servers=2 contradicts the cluster, which has 1"),
    (CLUSTER, "chief", {"engine": "threads"}, "engine='threads' contradicts"),
]


@pytest.mark.parametrize(("cluster", "task", "others", "words"), WRONG)
def test_an_invalid_cluster_is_refused_in_one_line(
    cluster: dict[str, Any], task: str | None, others: dict[str, Any], words: str
) -> None:
    """Roles as in TensorFlow, and arguments that contradict them, before Ray is asked for."""
    resolver = SimpleClusterResolver(ClusterSpec(cluster), task_type=task, task_id=0)
    with pytest.raises(dj.ArgumentError, match=words) as caught:
        dj.ParameterServerStrategy(resolver, **others)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("chief", 0), "job_name must be 'worker' or 'ps'; got 'chief'"),
        ((None, 0), "job_name must be 'worker' or 'ps'; got None"),
        (("worker", 2), "No task with index 2"),
        (("worker", None), "task_index must be an integer"),
    ],
)
def test_a_server_is_a_worker_or_a_ps_of_its_cluster(arguments: Any, words: str) -> None:
    """Other tasks are refused; what it is without Ray is known without Ray."""
    with pytest.raises(dj.ArgumentError, match=words):
        dj.Server(CLUSTER, *arguments)
    assert dj.Server(CLUSTER, "ps", 0, start=False).target == "grpc://d:2222"
    with pytest.raises(dj.ArgumentTypeError, match="cluster_resolver must be None or"):
        dj.ParameterServerStrategy(CLUSTER)  # type: ignore[arg-type]


def test_a_task_with_another_jax_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it joins; both versions are named. A machine that is gone is not asked."""
    nodes = [
        {"Alive": True, "Resources": {"worker-1:JAX-0.0.1": 1.0, "worker-10:JAX-0.0.2": 1.0}},
        {"Alive": False, "Resources": {f"worker-1:JAX-{jax.__version__}": 1.0}},
    ]
    ray = SimpleNamespace(is_initialized=lambda: True, nodes=lambda: nodes)
    monkeypatch.setitem(sys.modules, "ray", ray)
    words = rf"worker-1:JAX-0\.0\.1, and the chief has JAX {re.escape(jax.__version__)}"
    with pytest.raises(dj.ClusterError, match=words):
        Cluster("127.0.0.1:2222").child("worker", 1)


def test_waiting_for_another_machine_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A task for a chief that does not listen, and a worker that Ray has no place for."""
    server, waits = dj.Server(CLUSTER, "worker", 0, start=False), []

    def wait(seconds: float | None = None) -> None:
        waits.append(seconds)
        if seconds is not None:
            raise subprocess.TimeoutExpired("ray start", seconds)

    server._process, server._output = SimpleNamespace(wait=wait), io.BytesIO()  # type: ignore[assignment]
    monkeypatch.setattr(server, "_chief_listens", lambda: False)
    server.join()
    assert waits[1:] == [None]
    assert "Waiting for the chief, which does not answer at a:2222" in caplog.text
    ready = SimpleNamespace(remote=lambda: "ready")
    errors = SimpleNamespace(RayError=OSError)
    ray = SimpleNamespace(wait=lambda x, timeout: ([], x), get=lambda _: None, exceptions=errors)
    assert _ray._Child(ray, SimpleNamespace(ready=ready)).has_started()
    assert "Waiting for a worker that Ray does not start" in caplog.text


PROGRAM = """
import sys
import jax, numpy as np
import distribute_jax as dj, test_processes as of

resolver = dj.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    dj.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
    sys.exit()
strategy = dj.ParameterServerStrategy(resolver, max_staleness=0)
coordinator = dj.coordinator.ClusterCoordinator(strategy)
state, step = of.build(strategy)
inputs, losses = of.batches(60), []
while len(losses) < len(inputs):
    some = inputs[len(losses):][:20]
    losses += [coordinator.schedule(step, args=(x,)) for x in some]
    coordinator.join(of.SECONDS)
    print("joined", flush=True)
    sys.stdin.readline()
expected, of_one = of.trained(dj.OneDeviceStrategy(jax.devices()[0]), inputs)
assert [float(x) for x in coordinator.fetch(losses)] == of_one
for got, want in zip(of.leaves(state), expected, strict=True):
    np.testing.assert_array_equal(got, want)
"""
"""Every task of the cluster, as in TensorFlow's tutorial."""


def descendants(process: subprocess.Popen[str]) -> list[int]:
    """The processes that a process has started, and those have, and itself."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            parents[int(folder.name)] = int(state_and_parent(folder.name)[1])
    found = [process.pid]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def runs(pid: int) -> bool:
    """Whether a process has not ended."""
    with suppress(OSError, ValueError):
        return state_and_parent(str(pid))[0] not in "ZX"
    return False


@pytest.mark.exhaustive
@NEEDS_RAY
def test_the_tasks_of_tf_config_have_the_bits_of_one_device() -> None:
    """A chief, two workers and a server; a worker and the server are killed, and others take their places.

    All listen on the loopback address only, and end with the chief: no process and no folder is left.
    """
    folder = tempfile.TemporaryDirectory()  # with a short name, for Ray's sockets
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    addresses = [f"localhost:{at.getsockname()[1]}" for at in listening]
    for at in listening:
        at.close()
    cluster = {"chief": addresses[:1], "worker": addresses[1:3], "ps": addresses[3:]}
    path = [str(Path(__file__).parent), *filter(None, sys.path)]

    def start(job: str, index: int = 0) -> subprocess.Popen[str]:
        config = {"cluster": cluster, "task": {"type": job, "index": index}}
        environment = os.environ | {"TF_CONFIG": json.dumps(config), "TMPDIR": folder.name}
        environment["PYTHONPATH"] = os.pathsep.join(path)
        pipe = subprocess.PIPE if job == "chief" else None
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM], env=environment, stdin=pipe, stdout=pipe, text=True
        )

    tasks = {key: start(*key) for key in [("worker", 0), ("worker", 1), ("ps", 0), ("chief", 0)]}
    chief = tasks["chief", 0]
    assert chief.stdin
    assert chief.stdout
    limit = threading.Timer(SECONDS, chief.kill)
    limit.start()
    try:
        for key in [("worker", 0), ("ps", 0), None]:
            while (line := chief.stdout.readline()) != "joined\n":  # Ray writes there too
                assert line
            pids = [pid for task in tasks.values() for pid in descendants(task)]
            if key:
                gone = descendants(tasks[key])
                assert [x for x in sockets_that_listen(pids) if not re.search(LOCAL, x)] == []
                os.kill(tasks[key].pid, signal.SIGKILL)
                tasks[key].wait()
                while any(runs(pid) for pid in gone):
                    time.sleep(0.1)
                tasks[key] = start(*key)
            chief.stdin.write("\n")
            chief.stdin.flush()
        assert [task.wait(SECONDS) for task in tasks.values()] == [0, 0, 0, 0]
        end = time.monotonic() + SECONDS / 10
        while any(runs(pid) for pid in pids):
            assert time.monotonic() < end
            time.sleep(0.1)
        assert os.listdir(folder.name) == []
    finally:
        limit.cancel()
        for task in tasks.values():
            task.kill()
            task.communicate()
        folder.cleanup()
