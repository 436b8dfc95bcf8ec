"""``distribute-jax doctor``: checks the installation, the network and the cluster of a job."""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from distribute_jax._errors import ArgumentError, ClusterError, NoClusterError
from distribute_jax.cluster_resolver import detect
from distribute_jax.cluster_resolver._base import with_port
from distribute_jax.launch import cache_folder

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
_PLUGINS = tuple(f"jax-cuda{n}-{part}" for n in (12, 13) for part in ("plugin", "pjrt"))
_START = 120.0
_CONNECT = 5.0
_PROBE = "import jax, json; d = jax.devices(); print(json.dumps([len(d), d[0].platform, d[0].device_kind]))"
_GPU = Path("/proc/driver/nvidia/version")
"""Exists if the driver of an NVIDIA GPU is loaded."""


@dataclass(frozen=True)
class Finding:
    """One line of output."""

    subject: str
    state: str
    fix: str = ""
    """What to do; empty if nothing is wrong."""

    def __str__(self) -> str:
        mark = "FIX" if self.fix else "ok "
        return f"{mark} {self.subject}: {self.state}" + (f" -> {self.fix}" if self.fix else "")


HELP = "find what prevents a job from starting; the exit code is 1 if something must be fixed"


def add_options(command: argparse.ArgumentParser) -> None:
    text = "address of process 0; default: detected"
    command.add_argument("--coordinator", metavar="HOST:PORT", help=text)
    command.add_argument("--markdown", action="store_true", help="a block to paste into an issue")


def run(options: argparse.Namespace) -> int:
    failed, fence = False, ["```"] * options.markdown
    print(*fence, sep="\n", end="\n" * options.markdown)
    for finding in findings(options.coordinator):
        print(finding, flush=True)
        failed = failed or bool(finding.fix)
    print(*fence, sep="\n", end="\n" * options.markdown)
    return int(failed)


def findings(address: str | None) -> Iterator[Finding]:
    """Checks everything, cheap and likely problems first; by default for the detected cluster."""
    yield from versions()
    yield devices()
    process = None
    try:
        resolver = detect()
        name, count = type(resolver).__name__, resolver.num_processes
        yield Finding("cluster", f"{name}, process {resolver.process_id} of {count}")
        if address is None and count > 1:
            address, process = resolver.coordinator_address, resolver.process_id
    except NoClusterError:
        yield Finding("cluster", "none; this process is alone")
    except (ClusterError, ArgumentError) as error:
        yield Finding("cluster", _first_line(error), "describe it as the message says")
    if address is None:
        yield host_name(several_machines=False)
        return
    try:
        host, _, port = with_port(address, "the coordinator").rpartition(":")
    except (ClusterError, ArgumentError) as error:
        yield Finding("coordinator", _first_line(error), "write it as host:port")
        return
    host = host.strip("[]")
    yield host_name(several_machines=not is_loopback(host))
    yield from coordinator(host, int(port), process)


def versions() -> Iterator[Finding]:
    """Checks versions, and the folder of compiled programs."""
    installed = {name: _version(name) for name in _PACKAGES}
    text = ", ".join(f"{name} {number}" for name, number in installed.items())
    yield Finding("versions", f"Python {platform.python_version()}, {text}")
    missing = [name for name, number in installed.items() if number == "missing"]
    if missing:
        needed = [r for r in requires("distribute-jax") or () if r.startswith(tuple(missing))]
        fix = f"pip install {' '.join(needed)}"
        yield Finding("packages", f"missing: {', '.join(missing)}", fix)
    for name in _PLUGINS:
        if (number := _version(name)) not in ("missing", installed["jaxlib"]):
            same = " ".join(f"{one}=={installed['jaxlib']}" for one in (name, "jax", "jaxlib"))
            text = f"{name} {number} beside jaxlib {installed['jaxlib']}: JAX may see no GPU"
            yield Finding("plugin", text, f"pip install {same}")
    try:
        yield Finding("compiled programs", f"kept in {cache_folder(os.environ) or 'no folder'}")
    except ClusterError as error:
        yield Finding("compiled programs", str(error), "choose another folder")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def devices() -> Finding:
    """Starts JAX in a separate process, since it may hang if another process holds the accelerators."""
    command = [sys.executable, "-c", _PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_START, check=False)
    except subprocess.TimeoutExpired:
        fix = "end the processes that hold the accelerators, or set JAX_PLATFORMS=cpu to do without"
        return Finding("devices", f"JAX does not start within {_START:g} s", fix)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        fix = "see `python -c 'import jax; jax.devices()'`"
        return Finding("devices", f"JAX does not start: {last}", fix)
    count, kind, name = json.loads(done.stdout.splitlines()[-1])
    text = f"{count} × {kind} ({name})"
    if kind == "cpu" and _GPU.exists() and not os.environ.get("JAX_PLATFORMS"):
        text += ", and a GPU that JAX does not use"
        return Finding("devices", text, "pip install 'jax[cuda13]'")
    return Finding("devices", text)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def host_name(several_machines: bool) -> Finding:
    """Checks the address of this machine's name, which JAX's CPU collectives announce to the others."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        fix = f"add {name} to /etc/hosts or to the DNS"
        return Finding("host name", f"{name} does not resolve: {error}", fix)
    fix = f"give {name} an address in /etc/hosts that the other machines can reach"
    is_wrong = several_machines and is_loopback(address)
    return Finding("host name", f"{name} is {address}", fix if is_wrong else "")


def is_loopback(host: str) -> bool:
    """True if a name or an address never leaves this machine."""
    try:
        address = socket.getaddrinfo(host, None)[0][4][0]  # gethostbyname knows no IPv6
        return ipaddress.ip_address(address).is_loopback
    except OSError:
        return False


def coordinator(host: str, port: int, process: int | None) -> Iterator[Finding]:
    """Checks that this process can listen at the address, if it is process 0's, or else can connect to it."""
    where = f"{host}:{port}"
    try:
        family, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        fix = "write its address, or add it to the DNS"
        yield Finding("coordinator", f"{host} does not resolve: {error}", fix)
        return
    address = str(target[0])
    yield Finding("coordinator", f"{host} is {address}")
    is_here = _can_listen(family, address, 0)
    if process if process is not None else not is_here:
        try:
            socket.create_connection((address, port), timeout=_CONNECT).close()
        except OSError as error:
            fix = "start process 0, and open the port in its firewall"
            yield Finding("port", f"{where} cannot be reached: {error}", fix)
        else:
            yield Finding("port", f"{where} can be reached")
    elif not is_here:
        fix = "name the address of process 0's machine, or start process 0 there"
        yield Finding("port", f"{address} is not this machine", fix)
    elif _can_listen(family, address, port):
        yield Finding("port", f"{where} is free")
    else:
        fix = "choose another port, or end what listens there"
        yield Finding("port", f"{where} is in use", fix)


def _can_listen(family: int, address: str, port: int) -> bool:
    try:
        socket.create_server((address, port), family=family, reuse_port=False).close()
    except OSError:
        return False
    return True
