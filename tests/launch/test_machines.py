"""Supervisors on several machines: one job, one end, one next attempt; and no other job's."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import distribute_jax as dj
from distribute_jax.launch import SECRET, Inbox, Link, Wire
from distribute_jax.launch._process import PeerFailed, PeerLost
from distribute_jax.launch._verdict import Death, Outcome


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


LAYOUT = {"--nodes": 2, "program": ["train.py"]}


def link(port, node, nodes=2, layout=LAYOUT, seconds=5.0):
    inbox = Inbox()
    address = ("127.0.0.1", port)
    made = Link(address, node, nodes, layout=layout, inbox=inbox, seconds=seconds)
    return made, inbox


def together(*calls):
    """Calls each in a thread of its own and gives what they returned or raised."""
    results = [None] * len(calls)

    def call(i):
        try:
            results[i] = calls[i]()
        except dj.ClusterError as error:
            results[i] = error

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


DEATH = Death(process=1, pid=7, host="a", code=-9, error="ValueError: é", step=3, phase="compiling")


def test_machines_begin_fail_and_agree_together(port, tmp_path):
    """The address of process 0 reaches all, and each hears how the attempt ended on every machine."""
    (a, a_inbox), (b, b_inbox) = together(lambda: link(port, 0), lambda: link(port, 1))
    assert a.nonce == b.nonce
    files = [tmp_path / "a", tmp_path / "b"]
    begun = together(
        lambda: a.begin(0, files[0], None), lambda: b.begin(0, files[1], signal.SIGTERM)
    )
    assert begun == [signal.SIGTERM, signal.SIGTERM], "who was told to end tells all"
    together(lambda: a.begin(1, files[0], None), lambda: b.begin(1, files[1], None))
    files[0].write_text("127.0.0.1:4242")
    _until(lambda: files[1].exists())
    assert files[1].read_text() == "127.0.0.1:4242"
    b.failed(1)
    assert a_inbox.get(5) == PeerFailed(1)
    outcomes = [Outcome(best=3), Outcome(death=DEATH, best=None, any_saved=True)]
    agreed = together(lambda: a.agree(1, outcomes[0]), lambda: b.agree(1, outcomes[1]))
    assert agreed == [outcomes, outcomes]
    together(a.close, b.close)
    assert a_inbox.get(0.1) is None, "taking leave is no loss"
    assert b_inbox.get(0) is None
    with socket.create_server(("127.0.0.1", port)):
        pass  # and the port is free again


def test_a_connection_closed_by_another_thread_has_no_next_message():
    """Wherever the thread that listens stands at that moment: also between two messages."""
    here, there = (Wire(each) for each in socket.socketpair())
    waiting = []
    listener = threading.Thread(target=lambda: waiting.append(here.receive()))
    listener.start()
    here.close()
    listener.join(5)
    assert waiting == [None]
    assert here.receive() is None
    there.close()


def test_a_machine_that_is_lost_is_named_to_all(port):
    """Instead of a wait without end."""
    (a, a_inbox), (b, _), (c, c_inbox) = together(*(lambda i=i: link(port, i, 3) for i in range(3)))
    b._wire.close()
    for each in (a_inbox, c_inbox):
        event = each.get(5)
        assert isinstance(event, PeerLost)
        assert event.text.startswith("the supervisor of node 1 is gone")
    with pytest.raises(dj.ClusterError, match="node 1 is gone"):
        c.agree(0, Outcome())
    together(a.close, c.close)


def test_another_job_at_the_port_is_refused_and_the_running_one_goes_on(port):
    """Its first machine cannot listen, its second is told which command runs there."""
    (a, a_inbox), (b, _) = together(lambda: link(port, 0), lambda: link(port, 1))
    began = time.monotonic()
    for node, layout, text in (
        (0, LAYOUT, "The port is in use by another job"),
        (1, LAYOUT, "two machines were started with --node-rank 1"),
        (1, {**LAYOUT, "program": ["b.py"]}, r"\['train.py'\] on node 0, \['b.py'\] on node 1"),
    ):
        with pytest.raises(dj.ClusterError, match=text) as error:
            link(port, node, layout=layout)
        assert f"127.0.0.1:{port}" in str(error.value)
        assert "in use by another job" in str(error.value)
    assert time.monotonic() - began < 2
    assert together(lambda: a.agree(0, Outcome()), lambda: b.agree(0, Outcome()))[0]
    assert a_inbox.get(0) is None
    together(a.close, b.close)


def test_a_program_that_says_nothing_at_the_port_is_named(port):
    """On the first machine at once, on the others after two seconds."""
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(dj.ClusterError, match=f"--coordinator 127.0.0.1:{port}"):
            link(port, 0)
        began = time.monotonic()
        with pytest.raises(dj.ClusterError, match="no supervisor answers there"):
            link(port, 1)
        assert time.monotonic() - began < 3


def test_machines_that_do_not_come_are_named(port):
    """The supervisor of node 0, or the others."""
    with pytest.raises(dj.ClusterError, match=r"could not be reached within 0\.2 s"):
        link(port, 1, seconds=0.2)
    alone, _ = link(port, 0, 3, seconds=1.5)
    with pytest.raises(dj.ClusterError, match="missing: node 1, node 2"):
        alone.begin(0, Path("unused"), None)
    alone.close()


def test_only_who_knows_the_secret_is_let_in(port, monkeypatch):
    """Else a stranger could end the job."""
    monkeypatch.setenv(SECRET, "ours")
    a, a_inbox = link(port, 0)
    monkeypatch.setenv(SECRET, "theirs")
    with pytest.raises(dj.ClusterError, match="have different secrets"):
        link(port, 1)
    stranger = Wire(socket.create_connection(("127.0.0.1", port)))
    stranger.receive()
    stranger.send({"kind": "shout", "what": "failed", "attempt": 0})
    stranger._connection.sendall(b"x" * 100_000)
    assert a_inbox.get(0.1) is None
    stranger.close()
    monkeypatch.setenv(SECRET, "ours")
    b, _ = link(port, 1)
    together(a.close, b.close)


def _until(condition):
    limit = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.mark.slow
def test_one_death_ends_all_and_all_begin_the_next_attempt_together(port, launch, tmp_path):
    """Two supervisors, two processes each: four processes with one coordinator, twice."""
    program = (
        "def where():\n"
        "    file = os.path.join(os.environ['DISTRIBUTE_JAX_MEETING'], f'coordinator-{attempt}')\n"
        "    if process == 0:\n"
        "        open(file + 'x', 'w').write(f'127.0.0.1:{5000 + attempt}')\n"
        "        os.rename(file + 'x', file)\n"
        "    while not os.path.exists(file): time.sleep(0.005)\n"
        "    return open(file).read()\n"
        "said = [str(attempt), os.environ['DISTRIBUTE_JAX_NUM_PROCESSES'],"
        " os.environ['DISTRIBUTE_JAX_LOCAL_PROCESS_ID'], os.environ['DISTRIBUTE_JAX_JOB'], where()]\n"
        # In one piece, since a process of the first attempt may be ended at any moment.
        "os.write(1, (' '.join(said) + '\\n').encode())\n"
        "if attempt == 0:\n"
        "    if process == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    time.sleep(60)\n"
    )
    options = ["--processes=2", "--nodes=2", f"--coordinator=127.0.0.1:{port}"]
    (tmp_path / "program.py").touch()
    command = [sys.executable, "-m", "distribute_jax", "launch", *options, "--node-rank=1"]
    root = str(Path(__file__).parents[2])
    other = subprocess.Popen(
        [*command, str(tmp_path / "program.py"), "--flag", "argument"],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        launched = launch(program, *options)
        out, err = other.communicate(timeout=20)
    finally:
        other.kill()
        other.wait()
    assert (launched.code, other.returncode) == (0, 0), err
    nonces = {line.split()[4] for line in [*launched.out, *out.splitlines()]}
    assert len(nonces) == 1
    for lines, first in ((launched.out, 0), (out.splitlines(), 2)):
        expected = [
            [f"[{first + i}] {a} 4 {i} job 127.0.0.1:{5000 + a}" for i in (0, 1)] for a in (0, 1)
        ]
        found = {line.replace(*nonces, "job") for line in lines}
        assert found >= set(expected[1]), "the second attempt, whole"
        assert found <= set(expected[0] + expected[1]), "and of the first what was printed by then"
    said = [line for line in err.splitlines() if line.startswith("distribute-jax: ")]
    assert launched.said == said, "all supervisors say the same"
    assert "process 3 " in said[0]
    assert "was ended by SIGKILL before it reported a step; " in said[0]
