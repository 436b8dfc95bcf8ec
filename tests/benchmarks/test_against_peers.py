"""The peers of the benchmarks: what they say, what they import, and that none can hold the others up."""

from __future__ import annotations

import ast
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import against_peers
from benchmarks._peer_process import PeerError, PeerProcess
from benchmarks.against_peers import (
    ALL,
    OURS,
    Options,
    loss_difference,
    marked_lines,
    measure,
    report,
)
from benchmarks.peers import distribute_jax, nnx_jit, pmap, shard_map, sharded_jit
from benchmarks.peers._models import MLP
from benchmarks.peers._protocol import Start, write_start

ROOT = Path(against_peers.__file__).parents[1]
TINY = replace(
    MLP,
    name="tiny",
    shapes={
        "layers.0.kernel": (784, 4), "layers.0.bias": (4,),
        "layers.1.kernel": (4, 10), "layers.1.bias": (10,),
    },
    batch=8,
    calls=2,
)  # fmt: skip

# Speaks the protocol, and does in a turn what its first argument says.
FAKE = """
import os, subprocess, sys, time
sys.path.insert(0, {root!r})
import numpy
from benchmarks.peers._protocol import serve
how = sys.argv.pop(1)

class Fake:
    def __init__(self, start):
        print("a framework says hello")
        self.loss = start.replicas * float(start.weights["layers.0.bias"].sum())
    def losses(self, steps):
        return [self.loss + (how == "differs")] * steps
    def run(self, steps):
        if how == "dies":
            sys.exit("out of memory")
        if how == "hangs":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            print(child.pid, file=open({pid!r}, "w"), flush=True)
            time.sleep(600)
        time.sleep(0.001 * steps)

serve(Fake, numpy)
"""


@pytest.fixture
def fake(tmp_path: Path) -> list[str]:
    """What starts a fake peer, less how it behaves."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE.format(root=str(ROOT), pid=str(tmp_path / "child.pid")))
    return [sys.executable, str(script)]


def start_file(folder: Path) -> str:
    path = str(folder / "start.npz")
    write_start(path, TINY.weights(), *TINY.batches(2))
    return path


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not asked for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


def ended(pid: int) -> bool:
    for _ in range(100):
        if not is_alive(pid):
            return True
        time.sleep(0.05)
    return False


def test_a_peer_answers_and_ends_when_nobody_asks_any_more(fake: list[str], tmp_path: Path):
    """Versions, losses and seconds come as lines of JSON; what a framework prints does not disturb."""
    peer = PeerProcess([*fake, "ok", "mlp", "3", start_file(tmp_path)], dict(os.environ))
    try:
        assert set(peer.ready(30)) == {"python", "numpy"}
        assert peer.ask({"losses": 2}, 30) == {"losses": [0.0, 0.0]}
        assert 0.001 <= peer.ask({"turn": 3}, 30)["seconds"] < 10
        peer._process.stdin.close()
        assert peer._process.wait(10) == 0
        with pytest.raises(PeerError, match="ended with status 0: a framework says hello"):
            peer.ask({"turn": 1}, 30)
    finally:
        peer.end()


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes in /proc")
def test_peers_that_are_missing_die_hang_or_train_differently_are_rows_that_say_so(
    fake: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The others are measured all the same, within a bound, and no process is left."""
    behaviour = {"keras_jax": "dies", "nnx_jit": "hangs", "pmap": "differs"}

    def command(_, key, work, path):
        return [*fake, behaviour.get(key[0], "ok"), work.model, str(key[1]), path]

    monkeypatch.setattr(against_peers, "peer_command", command)
    started = time.monotonic()
    options = Options(
        works=(TINY,),
        replicas=(4,),
        peers=(OURS, "shard_map", "pmap", "nnx_jit", "keras_jax", "tensorflow_mirrored", "pytorch_ddp"),
        pythons={"keras": sys.executable},
        absent={"torch": "no CPU build", "tensorflow": "no network"},
        rounds=3,
        answer_within=1.0,
    )  # fmt: skip
    log = measure(options)
    assert time.monotonic() - started < 60
    why = {record["peer"]: record["why"] for record in log.of("absent") if record["replicas"] == 4}
    assert why == {
        "nnx_jit": "no answer within 1 s",
        "keras_jax": "ended with status 1: out of memory",
        "tensorflow_mirrored": "no network",
        "pytorch_ddp": "no CPU build",
    }
    speeds = [(record["peer"], record["replicas"]) for record in log.of("speed")]
    assert speeds == [(name, n) for n in (1, 4) for name in (OURS, "shard_map", "pmap")]
    assert ended(int((tmp_path / "child.pid").read_text()))
    page = report(log)
    assert "| PyTorch DDP, gloo | no CPU build |" in page
    assert "| `jax.pmap` | loss of step 1 is 1.0000 instead of 0.0000 |" in page
    (row,) = against_peers.headline(log)
    assert row.column == "hand-written `jit(shard_map)` ÷ ours"
    assert 0.1 < row.ratio.median < 10


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes in /proc")
def test_an_interrupt_ends_every_peer(
    fake: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Ctrl-C does not reach the peers, which have groups of their own: the benchmark ends them."""

    def interrupted(session: against_peers._Session) -> None:
        pids.extend(peer._process.pid for peer in session.alive.values())
        assert all(map(is_alive, pids))
        raise KeyboardInterrupt

    pids: list[int] = []
    monkeypatch.setattr(against_peers._Session, "_turns", interrupted)
    command = lambda _, key, work, path: [*fake, "ok", work.model, str(key[1]), path]  # noqa: E731
    monkeypatch.setattr(against_peers, "peer_command", command)
    with pytest.raises(KeyboardInterrupt):
        measure(Options(works=(TINY,), replicas=(1,), peers=(OURS, "pmap")))
    assert len(pids) == 2
    assert all(map(ended, pids))


def test_losses_are_compared_step_by_step():
    """Rounding passes; one loss that differs, or is not a number, is named."""
    assert loss_difference([2.0, 1.0], [2.0, 1.0005]) == ""
    assert loss_difference([2.0, 1.0], [2.0, 1.01]) == "loss of step 2 is 1.0000 instead of 1.0100"
    assert loss_difference([float("nan")], [2.0]) == "loss of step 1 is nan instead of 2.0000"
    assert loss_difference([2.0], None) == "ours has none"


def test_a_package_that_is_not_installed_has_no_python(monkeypatch: pytest.MonkeyPatch):
    """Without a named interpreter this one is looked at, and the row says what to type."""
    monkeypatch.setattr(
        against_peers.importlib.util, "find_spec", lambda name: name == "jax" or None
    )
    assert against_peers.python_for("jax", Options()) == sys.executable
    assert against_peers.python_for("torch", Options()) is None
    assert "python3 dev.py bench --peers" in against_peers.why_absent("torch", Options())


@pytest.mark.exhaustive
def test_the_peers_on_jax_train_alike():
    """Four replicas of each way to write the step give the same losses from the same weights."""
    start = Start("mlp", 4, TINY.weights(), *TINY.batches(2))
    losses = {}
    for peer in (distribute_jax, shard_map, sharded_jit, pmap, nnx_jit):
        trainer = peer.build(start)
        losses[peer.__name__] = trainer.losses(3)
        trainer.run(4)
    first = losses.pop(distribute_jax.__name__)
    assert first[0] > first[2] > 0  # the third step sees the first batch again
    for name, others in losses.items():
        assert others == pytest.approx(first, rel=1e-5), name


@pytest.mark.exhaustive
def test_processes_on_jax_are_measured():
    """Ours and the hand-written step, in processes of their own."""
    log = measure(Options(works=(TINY,), replicas=(2,), peers=(OURS, "shard_map"), rounds=2))
    assert not list(log.of("absent"))
    assert {record["differs"] for record in log.of("losses")} == {""}
    kept = [record for record in log.of("speed") if "kept" in record]
    assert {(r["peer"], r["replicas"]) for r in kept} == {(OURS, 2), ("shard_map", 2)}


@pytest.mark.exhaustive
def test_peers_that_divide_the_model_have_its_bytes_and_lines():
    """Of a kernel of 784 × 4 each of two devices has a half, with Adam's two moments, and all of the rest."""
    peers = ("fully_sharded", "flax_guide")
    log = measure(Options(works=(TINY,), replicas=(2,), peers=peers, rounds=2, divided=True))
    small = 4 + 4 * 10 + 10
    for record in log.of("bytes"):
        assert 0 <= record["state"] - 3 * 4 * (784 * 4 // 2 + small) <= 8  # two counts of steps
        assert record["resident"] > 50 * 2**20
    assert {record["differs"] for record in log.of("losses")} == {""}
    assert report(log).count(f"| {marked_lines('fully_sharded')} |") == 1
    assert [marked_lines(name) for name in ("fully_sharded", "pmap")] == [7, 0]


FLAX = {"jax", "flax", "optax"}
USERS = (OURS, "fully_sharded", "model_parallel", "servers")
ALLOWED = {
    **{name: FLAX | {"distribute_jax"} for name in USERS},
    **dict.fromkeys(("shard_map", "sharded_jit", "pmap", "nnx_jit", "flax_guide"), FLAX),
    "keras_jax": {"jax", "keras"},
    "tensorflow_mirrored": {"keras", "tensorflow"},
    "pytorch_ddp": {"torch"},
    "keras_model_parallel": {"jax", "keras"},
    "pytorch_fully_shard": {"torch"},
    "tensorflow_servers": {"tensorflow"},
}
FRAMEWORKS = set().union(*ALLOWED.values())


def imports_of(path: Path) -> set[str]:
    """The packages that a peer imports, itself or through the files that peers share."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if name.startswith("benchmarks."):
                found |= imports_of(ROOT.joinpath(*name.split(".")).with_suffix(".py"))
            else:
                found.add(name.partition(".")[0])
    return found


@pytest.mark.parametrize("name", ALL)
def test_a_peer_imports_no_framework_but_the_one_it_measures(name: str):
    """Another one would start threads, and would have to be installed beside it."""
    path = ROOT / "benchmarks" / "peers" / f"{name}.py"
    assert imports_of(path) & FRAMEWORKS == ALLOWED[name]
