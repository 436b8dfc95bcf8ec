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
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from distribute_jax._errors import ArgumentError, ClusterError, NoClusterError
from distribute_jax.cluster_resolver import ClusterResolver, detect
from distribute_jax.cluster_resolver._base import with_port
from distribute_jax.launch import Wire, WireError, cache_folder, own_flags


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    text = "look for what keeps a job from starting; exit code 1 where something must be fixed"
    command = commands.add_parser("doctor", help=text, description=text, allow_abbrev=False)
    command.set_defaults(run=run, command=command)
    command.add_argument(
        "--coordinator", metavar="HOST:PORT", help="try this one; else that of the cluster found"
    )
    command.add_argument(
        "--node-rank",
        type=int,
        metavar="I",
        help="which machine this is: on 0 the port must be free, from the others it must be reached",
    )


def run(options: argparse.Namespace) -> int:
    """Prints what was found, a line each."""
    failed = False
    for finding in findings(options.coordinator, options.node_rank):
        print(finding, flush=True)
        failed = failed or bool(finding.fix)
    return int(failed)


def findings(address: str | None, rank: int | None) -> Iterator[Finding]:
    """Looks at everything, the cheap and likely first.

    Args:
        address: where the processes are to meet; that of the detected cluster if None.
        rank: 0 where the coordinator is to run on this machine; that of this process if None.
    """
    yield from versions()
    yield from devices()
    resolver, finding = _cluster()
    yield finding
    if resolver is not None and address is None:
        try:
            address = resolver.coordinator_address if resolver.num_processes > 1 else None
            rank = resolver.process_id if rank is None else rank
        except (ClusterError, ArgumentError) as error:
            yield Finding("coordinator", _first_line(error), "describe it as the message says")
    if address is None:
        yield own_name(meets_others=False)
        return
    try:
        host, _, port = with_port(address, "the coordinator").rpartition(":")
    except ClusterError as error:
        yield Finding("coordinator", _first_line(error), "write it as host:port")
        return
    host = host.strip("[]")
    yield own_name(meets_others=not is_loopback(host))
    yield from coordinator(host, int(port), rank)


def _cluster() -> tuple[ClusterResolver | None, Finding]:
    try:
        resolver = detect()
        known = (
            f"{type(resolver).__name__}, process {resolver.process_id} of {resolver.num_processes}"
        )
    except NoClusterError:
        return None, Finding("cluster", "none; this process is alone")
    except (ClusterError, ArgumentError) as error:
        return None, Finding("cluster", _first_line(error), "describe it as the message says")
    return resolver, Finding("cluster", known)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
_START = 120.0
_PROBE = (
    "import jax, json; d = jax.devices(); "
    "print(json.dumps([len(d), d[0].platform, d[0].device_kind]))"
)
_GPU = Path("/proc/driver/nvidia/version")
"""There where the driver of an NVIDIA GPU is loaded."""


def versions() -> Iterator[Finding]:
    """Says which versions there are, and whether JAX fits its own library."""
    found = {name: _version(name) for name in _PACKAGES}
    text = ", ".join(f"{name} {number}" for name, number in found.items())
    yield Finding("versions", f"Python {platform.python_version()}, {text}")
    missing = [name for name, number in found.items() if number == "missing"]
    if missing:
        needed = [r for r in requires("distribute-jax") or () if r.startswith(tuple(missing))]
        yield Finding(
            "packages", f"missing: {', '.join(missing)}", f"pip install {' '.join(needed)}"
        )
    try:
        yield Finding("compiled programs", f"kept in {cache_folder(os.environ) or 'no folder'}")
    except ClusterError as error:
        yield Finding("compiled programs", str(error), "choose another folder")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def devices() -> Iterator[Finding]:
    """Starts JAX in a process of its own, since that may take for ever where another one has the chips."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_START,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield Finding(
            "devices",
            f"JAX does not start within {_START:g} s",
            "end the processes that hold the accelerators, or set JAX_PLATFORMS=cpu to do without",
        )
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield Finding(
            "devices", f"JAX does not start: {last}", "see `python -c 'import jax; jax.devices()'`"
        )
        return
    count, kind, name = json.loads(done.stdout.splitlines()[-1])
    text = f"{count} × {kind} ({name})"
    if kind == "cpu" and _GPU.exists() and not os.environ.get("JAX_PLATFORMS"):
        yield Finding(
            "devices", f"{text}, and a GPU that JAX does not use", "pip install 'jax[cuda13]'"
        )
    else:
        yield Finding("devices", text)


_PATIENCE = 5.0
_GREETING = 2.0
_CLOCKS = 1.0
"""Clocks that differ by more seconds make logs and checkpoints of several machines hard to read."""


def own_name(meets_others: bool) -> Finding:
    """Says what the name of this machine means to itself.

    Args:
        meets_others: whether the job has other machines: collectives between CPUs tell them this address.
    """
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        fix = f"add {name} to /etc/hosts or to the DNS"
        return Finding("host name", f"{name} does not resolve: {error}", fix)
    fix = f"give {name} an address in /etc/hosts that the other machines can reach"
    return Finding(
        "host name", f"{name} is {address}", fix if meets_others and is_loopback(address) else ""
    )


def is_loopback(host: str) -> bool:
    """Tells whether a name or an address never leaves this machine."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:
        return False


def coordinator(host: str, port: int, rank: int | None) -> Iterator[Finding]:
    """Says whether the coordinator can listen there, or be reached.

    Args:
        host: its name or address.
        port: its port.
        rank: 0 where it is to run on this machine; None where that is to be found out.
    """
    where = f"{host}:{port}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        yield Finding(
            "coordinator",
            f"{host} does not resolve: {error}",
            "write its address, or add it to the DNS",
        )
        return
    address = str(found[0][4][0])
    yield Finding("coordinator", f"{host} is {address}")
    here = _is_here(address) if rank is None else rank == 0
    if here:
        yield _free(where, address, port)
    else:
        yield from _reached(where, address, port)


def _is_here(address: str) -> bool:
    """Tells whether an address is this machine's: only then can it be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _free(where: str, address: str, port: int) -> Finding:
    if not _is_here(address):
        return Finding(
            "port",
            f"{address} is not this machine",
            "name node 0's own address, or start node 0 there",
        )
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.create_server((address, port), family=family, reuse_port=False).close()
    except OSError as error:
        return Finding(
            "port",
            f"{where} is in use ({error.strerror})",
            "choose another port, or end what listens there",
        )
    return Finding("port", f"{where} is free")


def _reached(where: str, address: str, port: int) -> Iterator[Finding]:
    try:
        connection = socket.create_connection((address, port), timeout=_PATIENCE)
    except OSError as error:
        fix = "start node 0, and open the port in its firewall"
        yield Finding("port", f"{where} cannot be reached: {error}", fix)
        return
    yield Finding("port", f"{where} can be reached")
    wire = Wire(connection)
    try:
        greeting = wire.receive(_GREETING)
    except (OSError, WireError):
        greeting = None
    wire.close()
    if greeting is None:
        yield Finding(
            "coordinator", "it is no `distribute-jax launch`; clocks and flags are not compared"
        )
    else:
        yield _clocks(float(greeting["clock"]) - time.time())
        yield _flags(set(greeting["flags"]), set(own_flags()))


def _clocks(ahead: float) -> Finding:
    text = f"node 0's clock is {abs(ahead):.1f} s {'ahead' if ahead > 0 else 'behind'}"
    return Finding("clock", text, "" if abs(ahead) < _CLOCKS else "set both by NTP")


def _flags(there: set[str], here: set[str]) -> Finding:
    if there == here:
        return Finding("XLA_FLAGS", "the same as on node 0")
    only = [("only on node 0", there - here), ("only here", here - there)]
    text = "; ".join(f"{name}: {' '.join(sorted(flags))}" for name, flags in only if flags)
    return Finding("XLA_FLAGS", text, "set the same XLA_FLAGS on all machines")


@dataclass(frozen=True)
class Finding:
    """One line of the doctor."""

    subject: str
    found: str
    fix: str = ""
    """What to do; empty where nothing is wrong."""

    def __str__(self) -> str:
        """Gives the line."""
        mark = "FIX" if self.fix else "ok "
        return f"{mark} {self.subject}: {self.found}" + (f" -> {self.fix}" if self.fix else "")
