"""``distribute-jax doctor``: why a job does not start, and what to do about it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from distribute_jax._errors import ArgumentError, ClusterError, NoClusterError
from distribute_jax.cli._finding import Finding
from distribute_jax.cli._installation import devices, versions
from distribute_jax.cli._network import coordinator, is_loopback, own_name
from distribute_jax.cluster import ClusterResolver, detect
from distribute_jax.cluster._resolver import with_port


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
