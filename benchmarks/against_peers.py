"""A training step beside those of the peers: hand-written JAX, Flax, Keras, TensorFlow and PyTorch.

    python -m benchmarks.against_peers             measures, and prints JSON lines
    python -m benchmarks.against_peers --report    also writes a dated report to benchmarks/reports/
    python -m benchmarks.against_peers --quick     a look: few rounds, only 4 replicas
    python -m benchmarks.against_peers --divided   a model that 8 devices divide
    python -m benchmarks.against_peers --servers   parameter servers with 1 and 2 workers

Every peer is a separate process (``benchmarks/peers/``), and may be of another environment:
``--python tensorflow=/path/to/python``. The processes on one and on N replicas of a workload live at once
(16, in 2 to 10 GB); they take turns in a random order, round after round, and sleep in between. A peer that
is missing, dies or hangs is a row that says so.

Two figures are told apart. *Time to ours* compares frameworks, and with them their kernels. *N over one*
is what is left of a framework's own examples/s when its replicas share this machine: the cost of
distributing.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import os
import random
import re
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._benchmark import Row
from benchmarks._harness import (
    Log,
    environment,
    interval_text,
    ratio,
    surroundings,
    table,
    usable_cores,
    write_report,
)
from benchmarks._peer_process import PeerError, PeerProcess, end_all
from benchmarks.peers._models import CNN, MLP, TRANSFORMER, WIDE, Work
from benchmarks.peers._protocol import write_start

OURS = "distribute_jax"
PEERS: Mapping[str, tuple[str, str]] = {
    OURS: ("distribute_jax, `strategy.run`", "jax"),
    "shard_map": ("hand-written `jit(shard_map)`", "jax"),
    "sharded_jit": ("hand-written sharded `jit`", "jax"),
    "pmap": ("`jax.pmap`", "jax"),
    "nnx_jit": ("`nnx.jit`", "jax"),
    "keras_jax": ("Keras 3 on JAX, DataParallel, `fit`", "keras"),
    "tensorflow_mirrored": ("TensorFlow MirroredStrategy", "tensorflow"),
    "pytorch_ddp": ("PyTorch DDP, gloo", "torch"),
}
"""For each module of ``benchmarks/peers/`` what it is, and the package that it needs."""
DIVIDED: Mapping[str, tuple[str, str]] = {
    "fully_sharded": ("distribute_jax, `FullyShardedStrategy`", "jax"),
    "flax_guide": ("Flax's guide, `nnx.jit`", "jax"),
    "pytorch_fully_shard": ("PyTorch `fully_shard`, gloo", "torch"),
    "model_parallel": ("distribute_jax, `ModelParallelStrategy`, pairs of devices", "jax"),
    "keras_model_parallel": ("Keras 3 on JAX, ModelParallel, `fit`, pairs of devices", "keras"),
}
"""Those that divide the model: among all devices, or among those of each pair."""
SERVERS: Mapping[str, tuple[str, str]] = {
    "servers": ("distribute_jax, `ParameterServerStrategy`", "jax"),
    "tensorflow_servers": ("TensorFlow ParameterServerStrategy", "tensorflow"),
}
"""Those with parameter servers: a replica is a worker, and takes whole batches."""
ALL = {**PEERS, **DIVIDED, **SERVERS}
MARK = "  # many\n"
"""Ends the lines of a peer that a user adds or changes to get from one device to several."""

Key = tuple[str, int]
"""A peer and its number of replicas."""
LOSS_STEPS, LOSS_TOLERANCE = 20, 1e-3
"""Frameworks add up in other orders. Adam divides by a gradient's size, so that weights with a gradient
near zero amplify this rounding: after 20 steps the losses agree to about 1e-4, and a wrong mean,
learning rate or weight shows as 1e-2 or more."""
BATCHES = 8
"""Different batches, taken in turn."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured, and how often."""

    works: tuple[Work, ...] = (MLP, CNN, TRANSFORMER)
    replicas: tuple[int, ...] = (2, 4, 8)
    """Each is measured together with one replica."""
    divided: bool = False
    """Whether the peers divide the model: not on one replica, and its bytes are counted."""
    peers: tuple[str, ...] = tuple(PEERS)
    """The first is the one that all are compared with."""
    pythons: Mapping[str, str] = field(default_factory=dict)
    """The interpreter for a package of ``PEERS``; without one, this interpreter where it has it."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Why there is no interpreter for a package."""
    rounds: int = 30
    """Paired rounds; at least 30 for an interval worth stating."""
    ready_within: float = 300.0
    """Seconds in which all peers of a workload, which start at once, must be ready."""
    answer_within: float = 120.0
    """Seconds in which a peer must answer."""


QUICK = Options(replicas=(4,), rounds=10)
MODELS = Options(
    works=(WIDE,), replicas=(8,), divided=True, peers=tuple(DIVIDED), answer_within=600.0
)
WORKERS = Options(works=(MLP,), replicas=(2,), peers=tuple(SERVERS))


def measure(options: Options) -> Log:
    """Measures every workload."""
    log = Log()
    log.add(**{**environment(), "devices": max(options.replicas)})
    for work in options.works:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "start.npz")
            write_start(path, work.weights(), *work.batches(BATCHES))
            for replicas in options.replicas:
                _Session(log, options, work, replicas, path).run()
    return log


class _Session:
    """The processes of a workload on one and on N replicas, and what they said."""

    def __init__(self, log: Log, options: Options, work: Work, replicas: int, path: str) -> None:
        self.log, self.options, self.work, self.path = log, options, work, path
        self.replicas = (replicas,) if options.divided else tuple(dict.fromkeys((1, replicas)))
        self.alive: dict[Key, PeerProcess] = {}

    def run(self) -> None:
        """Starts the peers, compares their losses, lets them take turns, and ends them."""
        try:
            self._start()
            self._compare_losses()
            self._record(self._turns())
            if self.options.divided:
                self._count_bytes()
        finally:
            end_all(self.alive.values())

    def _start(self) -> None:
        for key in [(name, n) for n in self.replicas for name in self.options.peers]:
            package = ALL[key[0]][1]
            python = python_for(package, self.options)
            if python is None:
                self._absent(key, why_absent(package, self.options))
            else:
                command = peer_command(python, key, self.work, self.path)
                self.alive[key] = PeerProcess(command, peer_environment(key[1]))
        for key, versions in self._each(lambda peer: peer.ready(self.options.ready_within)):
            self._add("ready", key, versions=versions)

    def _compare_losses(self) -> None:
        losses = dict(self._asked({"losses": LOSS_STEPS}))
        for key, answer in losses.items():
            ours = losses.get((self.options.peers[0], key[1]), {"losses": None})["losses"]
            text = loss_difference(answer["losses"], ours)
            self._add("losses", key, losses=answer["losses"], differs=text)

    def _turns(self) -> dict[Key, list[float]]:
        times: dict[Key, list[float]] = {key: [] for key in self.alive}
        draw = random.Random(0)
        for _ in range(1 + self.options.rounds):
            order = draw.sample(list(self.alive), len(self.alive))
            for key, answer in self._asked({"turn": self.work.calls}, order):
                times[key].append(answer["seconds"])
        return {key: times[key][1:] for key in self.alive}  # the first round warms up

    def _record(self, times: Mapping[Key, list[float]]) -> None:
        for (name, replicas), own in times.items():
            ours, one = times.get((self.options.peers[0], replicas)), times.get((name, 1))
            facts: dict[str, Any] = {}
            if ours is not None:
                facts["time"] = ratio(own, ours)
            if one is not None and replicas > 1:
                facts["kept"] = ratio(one, own)
                facts["kept_each"] = [a / b for a, b in zip(one, own, strict=True)]
            speed = self.work.batch / statistics.median(own)
            self._add("speed", (name, replicas), examples_per_s=speed, **facts)

    def _count_bytes(self) -> None:
        for key, answer in self._asked({"state": True}):
            resident = self.alive[key].most_resident()
            self._add("bytes", key, resident=resident, lines=marked_lines(key[0]), **answer)

    def _asked(
        self, question: Mapping[str, Any], keys: Sequence[Key] | None = None
    ) -> Iterator[tuple[Key, dict[str, Any]]]:
        return self._each(lambda peer: peer.ask(question, self.options.answer_within), keys)

    def _each(self, wait: Any, keys: Sequence[Key] | None = None) -> Iterator[Any]:
        """Returns each peer's answer; one that fails is ended, and its row says why."""
        for key in list(self.alive) if keys is None else keys:
            try:
                yield key, wait(self.alive[key])
            except PeerError as problem:
                self.alive.pop(key).end(within=0)
                self._absent(key, str(problem))

    def _absent(self, key: Key, why: str) -> None:
        self._add("absent", key, why=why)

    def _add(self, kind: str, key: Key, **fields: Any) -> None:
        self.log.add(
            kind,
            workload=self.work.name,
            replicas=key[1],
            beside=self.replicas[-1],
            peer=key[0],
            **fields,
        )


def python_for(package: str, options: Options) -> str | None:
    """Returns the interpreter for a package: the one that was named, or this one where it has it."""
    if package in options.pythons or package in options.absent:
        return options.pythons.get(package)
    return sys.executable if importlib.util.find_spec(package) else None


def why_absent(package: str, options: Options) -> str:
    """Returns why there is no interpreter for a package."""
    made = f"{package} is not installed: `python3 dev.py bench --peers` makes its environment"
    return options.absent.get(package, made)


def peer_command(python: str, key: Key, work: Work, path: str) -> list[str]:
    """Returns what starts a peer."""
    return [python, "-m", f"benchmarks.peers.{key[0]}", work.model, str(key[1]), path]


def marked_lines(name: str) -> int:
    """Counts the lines that only several devices need, in a peer and in those that it stands on."""
    text = (Path(__file__).parent / "peers" / f"{name}.py").read_text(encoding="utf-8")
    others = re.findall(r"^from benchmarks\.peers\.(\w+)", text, re.MULTILINE)
    return text.count(MARK) + sum(map(marked_lines, others))


def peer_environment(replicas: int) -> dict[str, str]:
    """Returns a peer's variables: so many simulated devices, and nothing else about devices."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "TF_CONFIG"))}
    kept["JAX_PLATFORMS"] = "cpu"
    kept["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={replicas}"
    # The threads of XLA's pool; with fewer than devices, collectives can wait for each other for ever.
    kept["NPROC"] = str(max(2 * replicas, usable_cores()))
    return kept


def loss_difference(losses: Sequence[float], expected: Sequence[float] | None) -> str:
    """Returns where a peer's losses leave ours, or nothing where they agree."""
    if expected is None:
        return "ours has none"
    for step, (own, ours) in enumerate(zip(losses, expected, strict=True), 1):
        if not math.isclose(own, ours, rel_tol=LOSS_TOLERANCE):
            return f"loss of step {step} is {own:.4f} instead of {ours:.4f}"
    return ""


HEADLINE_REPLICAS = 4
RIVALS = ("shard_map", "keras_jax", "tensorflow_mirrored", "pytorch_ddp")


def headline(log: Log) -> list[Row]:
    """Compares the cost of distributing: what a rival keeps divided by what we keep, at most 1."""
    kept = {
        (record["workload"], record["peer"]): record["kept_each"]
        for record in log.of("speed")
        if record["replicas"] == HEADLINE_REPLICAS and "kept_each" in record
    }
    return [
        Row(
            f"examples/s kept on {HEADLINE_REPLICAS} replicas, {workload}",
            f"{PEERS[rival][0]} ÷ ours",
            ratio(kept[workload, rival], kept[workload, OURS]),
            1.0,
        )
        for workload in dict.fromkeys(workload for workload, _ in kept)
        for rival in RIVALS
        if (workload, rival) in kept and (workload, OURS) in kept
    ]


def report(log: Log) -> str:
    """Writes the records as a page."""
    parts = [
        "# A step beside its peers",
        surroundings(log.records[0]),
        "All peers start from the same weights, take the same batches in the same order, and train with "
        f"Adam in float32. *Losses* says whether those of the first {LOSS_STEPS} steps agree with ours to "
        f"{LOSS_TOLERANCE:g}. *Time to ours* is a step's time divided by ours: below 1 the peer is faster, "
        "by its kernels or by its way of distributing. *N over one* is a framework's examples/s on N "
        "replicas over its own on one: the cost of distributing, whatever the kernels. Medians over paired "
        "rounds with their 95% intervals. The batches are on the devices, but for Keras, whose `fit` takes "
        "them from the host. PyTorch has a process for each replica, with an equal share of the cores, at "
        "least one thread; the others have all cores for all replicas. With parameter servers a replica "
        "is a worker that takes whole batches: *N over one* is then what N workers gain on these cores.",
    ]
    cases: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    divided = any(log.of("bytes"))
    if divided:
        parts.append(
            "*State* is MiB of weights and optimizer on the device that has most of them; *resident* the "
            "most MiB in memory of all processes of a peer, with its libraries, which each process of "
            "PyTorch counts, its compiler and its batches. *Lines* are those of its program that a user "
            f"adds or changes to get from one device to several; they end with `{MARK.strip()}`."
        )
    head = ("state", "resident", "lines") if divided else ("N over one",)
    for kind in ("absent", "losses", "speed", "bytes"):
        for record in log.of(kind):
            case = cases.setdefault((record["workload"], record["replicas"]), {})
            case.setdefault(record["peer"], {}).update(record)
    for (workload, replicas), peers in cases.items():
        parts.append(f"## {workload}, {replicas} replica{'s' if replicas > 1 else ''}")
        rows = [_row(name, peers[name], len(head)) for name in ALL if name in peers]
        parts.append(table(["", "losses", "examples/s", "time to ours", *head], rows))
    parts += ["## Versions", "\n".join(_versions(log))]
    of_servers = any(record["peer"] in SERVERS for record in log.of("speed"))
    kind = " --divided" * divided + " --servers" * of_servers
    parts += ["## Command", f"    python3 dev.py bench --peers{kind}"]
    return "\n\n".join(parts) + "\n"


def _row(name: str, record: Mapping[str, Any], last: int) -> list[str]:
    label = ALL[name][0]
    if "examples_per_s" not in record:
        return [label, record["why"].replace("|", "¦"), *[""] * (2 + last)]
    ratios = [interval_text(record[k]) if k in record else "" for k in ("time", "kept")]
    if "lines" in record:
        sizes = [f"{record[k] / 2**20:.1f}" for k in ("state", "resident")]
        ratios = [ratios[0], *sizes, str(record["lines"])]
    return [label, record["differs"] or "equal", f"{record['examples_per_s']:,.1f}", *ratios]


def _versions(log: Log) -> Iterator[str]:
    told = {r["peer"]: r["versions"] for r in log.of("ready")}
    for name, versions in told.items():
        yield f"- {ALL[name][0]}: " + ", ".join(f"{k} {v}" for k, v in versions.items())


def _pairs(texts: Sequence[str]) -> dict[str, str]:
    return dict(text.split("=", 1) for text in texts)


def main(arguments: list[str] | None = None) -> int:
    """Measures, and writes a report where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds, for a look")
    parser.add_argument("--report", action="store_true", help="write benchmarks/reports/…md")
    chosen_set = parser.add_mutually_exclusive_group()
    chosen_set.add_argument("--divided", action="store_true", help="a model that 8 devices divide")
    chosen_set.add_argument("--servers", action="store_true", help="parameter servers")
    works = {work.model: work for work in Options.works}
    parser.add_argument("--only", nargs="+", choices=works, default=list(works), metavar="MODEL")
    parser.add_argument("--replicas", type=int, nargs="+", help="beside one replica")
    parser.add_argument("--rounds", type=int, help="paired rounds")
    for name, what in (("python", "PATH"), ("absent", "WHY")):
        parser.add_argument(f"--{name}", action="append", default=[], metavar=f"PACKAGE={what}")
    chosen = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    special = MODELS if chosen.divided else WORKERS if chosen.servers else None
    base = special or (QUICK if chosen.quick else Options())
    options = dataclasses.replace(
        base,
        works=base.works if special else tuple(works[name] for name in chosen.only),
        rounds=chosen.rounds or (QUICK if chosen.quick else base).rounds,
        replicas=tuple(chosen.replicas or base.replicas),
        pythons=_pairs(chosen.python),
        absent=_pairs(chosen.absent),
    )
    try:
        log = measure(options)
    except KeyboardInterrupt:
        return 130
    for row in headline(log):
        log.add("headline", **dataclasses.asdict(row))
    if chosen.report:
        kind = "divided_" if chosen.divided else "servers_" if chosen.servers else ""
        write_report(f"{kind}against_peers", log, report(log))
    return 0


if __name__ == "__main__":
    sys.exit(main())
