"""Training on as many nodes of a Ray cluster as there are, while nodes are lost and join.

    pip install 'distribute-jax[examples,ray]'
    python examples/elastic_ray.py                     2 to 4 processes of this machine
    python examples/elastic_ray.py --address auto --gpus 1 --directory /shared/digits      on a cluster

The training is that of examples/digits_job.py, in one actor for each CPU, or for each --gpus GPUs. When an
actor ends, all are started again with as many as there is room for, from the newest checkpoint; when there
is room for more, they save and are started again too. Every node has this folder, and the directory of the
checkpoints, at the same path.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Sequence

import digits_job
import ray
from resume import digest

import distribute_jax as dj

POLL_SECONDS = 1.0


class Notice:
    """An actor that tells the others whether to save and exit."""

    def __init__(self) -> None:
        self._is_requested = False

    def request(self) -> None:
        """Asks them to save and exit."""
        self._is_requested = True

    def is_requested(self) -> bool:
        """Returns whether to save and exit."""
        return self._is_requested


class Worker:
    """An actor that is one process of the job."""

    def address(self) -> tuple[str, int]:
        """Returns an address of this node with a free port, for process 0 to listen on."""
        host = ray.util.get_node_ip_address()
        with socket.create_server((host, 0)) as probe:
            return host, probe.getsockname()[1]

    def train(
        self,
        variables: dict[str, str],
        notice: ray.actor.ActorHandle,
        options: argparse.Namespace,
    ) -> str:
        """Trains as one process of a job; returns a hash of the weights, or None if it was stopped."""
        os.environ.update(variables)  # as torchrun sets them
        strategy = dj.MultiWorkerMirroredStrategy()
        try:
            model = digits_job.train(
                strategy, options, lambda: ray.get(notice.is_requested.remote(), timeout=10)
            )
        except SystemExit:  # saved
            return ""
        return digest(model)


def room(options: argparse.Namespace) -> int:
    """Returns how many workers fit on the nodes, up to the largest number."""
    name, each = ("GPU", options.gpus) if options.gpus else ("CPU", 1)
    alive = [node["Resources"].get(name, 0) for node in ray.nodes() if node["Alive"]]
    return min(sum(int(resources // each) for resources in alive), options.max_workers)


def attempt(count: int, options: argparse.Namespace) -> str:
    """Trains with this many workers; returns a hash of the weights, or None if all should start again."""
    notice = ray.remote(Notice).options(num_cpus=0).remote()
    actor = ray.remote(Worker).options(num_cpus=1, num_gpus=options.gpus)
    workers = [actor.remote() for _ in range(count)]
    try:
        addresses = [worker.address.remote() for worker in workers]
        while len(ray.wait(addresses, num_returns=count, timeout=POLL_SECONDS)[0]) < count:
            if room(options) < count:  # Ray has only now noticed that a node is gone
                return ""
        host, port = ray.get(addresses)[0]
        address = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
        calls = [
            worker.train.remote({**address, "RANK": str(i), "LOCAL_RANK": "0"}, notice, options)
            for i, worker in enumerate(workers)
        ]
        while not ray.wait(calls, timeout=POLL_SECONDS)[0]:
            if room(options) > count:
                notice.request.remote()
        return ray.get(calls)[0]
    except ray.exceptions.RayError as error:
        print(f"A worker was lost: {str(error).splitlines()[0]}", flush=True)
        return ""
    finally:
        for one in [*workers, notice]:
            ray.kill(one)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains until the last step, however often it has to be started again."""
    parser = digits_job.parser()
    parser.description = __doc__
    parser.add_argument("--address", default="local", help="of a Ray cluster (this machine)")
    parser.add_argument("--min-workers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--max-workers", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--gpus", type=int, default=0, help="of each worker (%(default)s)")
    options = parser.parse_args(arguments)
    options.directory = os.path.abspath(options.directory)
    platform = {} if options.gpus else {"JAX_PLATFORMS": "cpu"}
    path = {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    ray.init(options.address, runtime_env={"env_vars": {**path, **platform}})
    weights = ""
    while not weights:
        count = room(options)
        if count < options.min_workers:
            time.sleep(POLL_SECONDS)
            continue
        print(f"Training with {count} workers.", flush=True)
        weights = attempt(count, options)
    print(f"Weights after step {options.steps}: {weights}")


if __name__ == "__main__":
    main()
