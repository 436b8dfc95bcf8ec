"""The doctor finds what keeps a job from starting, and says what to do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from distribute_jax.cli import _doctor, main
from distribute_jax.cli._doctor import Finding, coordinator, host_name, is_loopback


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def by_subject(findings):
    return {finding.subject: (finding.state, finding.fix) for finding in findings}


@pytest.mark.exhaustive
def test_a_sound_machine_has_nothing_to_fix(monkeypatch, capsys, port):
    """Versions, devices, cluster, names, the port: a line each, and the exit code is 0."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert main(["doctor", "--coordinator", f"127.0.0.1:{port}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("ok  ") for line in lines)
    text = "\n".join(lines)
    for part in ("versions: Python 3.", "devices: 8 × cpu", "cluster: none", "host name: "):
        assert part in text
    assert f"port: 127.0.0.1:{port} is free" in text


def test_a_plugin_of_another_version_is_reported(monkeypatch):
    """With one line for pip; pip itself does not tie the two together."""
    numbers = dict.fromkeys(("jax-cuda12-plugin", "jax-cuda12-pjrt"), "missing")
    numbers["jax-cuda13-plugin"] = "0.11.0"
    monkeypatch.setattr(_doctor, "_version", lambda name: numbers.get(name, "0.12.0"))
    state, fix = by_subject(_doctor.versions())["plugin"]
    assert state.startswith("jax-cuda13-plugin 0.11.0 beside jaxlib 0.12.0")
    assert fix == "pip install jax-cuda13-plugin==0.12.0 jax==0.12.0 jaxlib==0.12.0"


def test_the_findings_can_be_pasted_into_an_issue(monkeypatch, capsys):
    """As one block."""
    monkeypatch.setattr(_doctor, "findings", lambda address: [Finding("versions", "all")])
    assert main(["doctor", "--markdown"]) == 0
    assert capsys.readouterr().out == "```\nok  versions: all\n```\n"


def test_a_bare_call_shows_the_help_and_there_is_a_version(capsys):
    """The help names the commands."""
    assert main([]) == 2
    assert "launch" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("distribute-jax 0.")


def test_an_invalid_description_of_the_cluster_is_reported(monkeypatch, capsys):
    """With the resolver's message, and exit code 1."""
    monkeypatch.setattr(_doctor, "_PROBE", 'print(\'[1, "cpu", "cpu"]\')')
    monkeypatch.setenv("TF_CONFIG", "{")
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (wrong,) = [line for line in lines if line.startswith("FIX ")]
    assert wrong.startswith("FIX cluster: ")
    assert "TF_CONFIG" in wrong


def test_devices_that_do_not_start_are_reported_with_the_reason(monkeypatch):
    """Or with the timeout."""
    monkeypatch.setattr(_doctor, "_PROBE", "raise RuntimeError('no chips')")
    state, fix = by_subject([_doctor.devices()])["devices"]
    assert "RuntimeError: no chips" in state
    assert fix
    monkeypatch.setattr(_doctor, "_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(_doctor, "_START", 0.2)
    state, fix = by_subject([_doctor.devices()])["devices"]
    assert "does not start within 0.2 s" in state
    assert "JAX_PLATFORMS=cpu" in fix


def test_a_port_in_use_and_an_unreachable_port_are_reported(port):
    """The port where the coordinator should listen, and the one where it should be reached."""
    state, fix = by_subject(coordinator("127.0.0.1", port, 1))["port"]
    assert "cannot be reached" in state
    assert "start process 0" in fix
    with socket.create_server(("127.0.0.1", port)):
        state, fix = by_subject(coordinator("127.0.0.1", port, 0))["port"]
        assert f"127.0.0.1:{port} is in use" in state
        assert "choose another port" in fix
        findings = by_subject(coordinator("127.0.0.1", port, 1))
        assert findings["port"] == (f"127.0.0.1:{port} can be reached", "")
    assert "not this machine" in by_subject(coordinator("192.0.2.1", port, 0))["port"][0]
    assert (
        "does not resolve"
        in by_subject(coordinator("no.such.host.invalid", port, 1))["coordinator"][0]
    )


def test_a_host_name_that_resolves_to_loopback_is_reported(monkeypatch):
    """CPU collectives announce it to the others; on one machine it is correct."""
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert host_name(several_machines=False) == Finding("host name", "localhost is 127.0.0.1")
    assert "/etc/hosts" in host_name(several_machines=True).fix
    monkeypatch.setattr(socket, "gethostname", lambda: "no.such.host.invalid")
    assert "does not resolve" in host_name(several_machines=False).state
    assert is_loopback("::1") > is_loopback("2001:db8::1")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "before", [[], ["launch", "--processes=2", "--devices-per-process=2", "-m"]]
)
def test_the_demo_trains_from_the_command_line(before, tmp_path):
    """Alone, and in two processes; ``python -m distribute_jax`` is the command."""
    command = [sys.executable, "-m", "distribute_jax", *before]
    command += ["distribute_jax", "demo"] if before else ["demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "4 replicas" in done.stdout
    if not before:
        assert float(done.stdout.split()[-1]) < 1e-5


def test_a_terminal_without_unicode_gets_question_marks():
    """``launch -h`` ended with a UnicodeEncodeError where the locale is ASCII or Latin-1."""
    command = [sys.executable, "-m", "distribute_jax", "launch", "-h"]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=ascii_only, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "usage: distribute-jax launch" in done.stdout
