"""How often the proof of sync errs on random programs: false proofs, of which there must be none, and alarms.

    python -m benchmarks.proof             400 programs, and prints JSON lines
    python -m benchmarks.proof --report    also writes a dated report to benchmarks/reports/
    python -m benchmarks.proof --quick     a minute's look: few programs

Each program is proved, run on four replicas, and its outputs are compared bit by bit. A *false proof* is
an output that is proved equal and differs. A *false alarm* is one that is not proved although it is equal:
harmless, but a user would have to write ``dj.assume_mirrored``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec as P

import distribute_jax as dj
from benchmarks._benchmark import Benchmark, Row, main
from benchmarks._harness import Log, counted, table
from benchmarks._programs import N, Statement, Values, outputs_of, programs
from benchmarks._random_programs import FULL, QUICK, Options, count_verdicts
from distribute_jax.program._replication import prove

W = np.array([0.5, -1.25, 2.0, 1.5], np.float32)
X = np.array([[1, 2, 3, 4], [-2, 5, 1, 7], [3, -1, 2, 9], [-4, 2, 8, 1]], np.float32) / 3


class Judged(NamedTuple):
    """A program that was proved and run."""

    jaxpr: Any
    marks: list[frozenset[str]]
    """For each output why it may differ; empty if it is proved equal."""
    equal: list[bool]
    """For each output whether it is bitwise equal on all replicas."""

    @property
    def false_proofs(self) -> int:
        """Outputs that are proved equal and differ."""
        return sum(not mark and not same for mark, same in zip(self.marks, self.equal, strict=True))

    @property
    def false_alarms(self) -> list[frozenset[str]]:
        """The marks of the outputs that are not proved, and are equal."""
        return [mark for mark, same in zip(self.marks, self.equal, strict=True) if mark and same]


def judge(statements: list[Statement]) -> Judged | None:
    """Proves a program and runs it; None if JAX itself refuses it.

    Raises:
        DeadlockError: the proof refuses the program, since it may hang.
    """
    mesh = Mesh(np.array(jax.devices()[:N]), ("data",), axis_types=(AxisType.Auto,))
    manual = mesh.abstract_mesh.update(axis_types=(AxisType.Manual,))
    program = outputs_of(statements)
    with jax.sharding.use_abstract_mesh(manual):
        try:
            jaxpr = jax.make_jaxpr(program, axis_env=[("data", N)])(W, X[0])
        except NotImplementedError:  # JAX cannot differentiate pmax, and batch some refs
            return None
    marks = prove(jaxpr, [frozenset(), frozenset({"x"})], axis_size=N).marks
    return Judged(jaxpr, marks, _replicas_agree(program, mesh))


def _replicas_agree(program: Callable[[Any, Any], Values], mesh: Mesh) -> list[bool]:
    def stacked(w: Any, x: Any) -> Values:
        return [jnp.asarray(out)[None] for out in program(w, x[0])]

    inputs: Any = (P(), P("data"))
    mapped = jax.shard_map(
        stacked, mesh=mesh, in_specs=inputs, out_specs=P("data"), check_vma=False
    )
    outs = [np.asarray(out) for out in jax.jit(mapped)(W, X)]
    return [len({replica.tobytes() for replica in out}) == 1 for out in outs]


def count(judged: Judged, figures: Counter[str], causes: Counter[str]) -> None:
    """Adds a program to the figures, and what its false alarms were marked with to the causes."""
    figures["programs"] += 1
    figures["outputs"] += len(judged.marks)
    figures["proved"] += sum(not mark for mark in judged.marks)
    figures["equal"] += sum(judged.equal)
    figures["false_proofs"] += judged.false_proofs
    figures["false_alarms"] += len(judged.false_alarms)
    for mark in judged.false_alarms:
        causes.update({_cause(source) for source in mark})


def _cause(source: str) -> str:
    """Removes the line: ``ppermute at …`` becomes ``ppermute``."""
    name = re.sub(r" at \S+$", "", source)
    return "the per-replica argument" if name == "x" else name


def judge_and_count(
    statements: list[Statement], figures: Counter[str], causes: Counter[str]
) -> bool:
    """Proves and runs a program, and counts; False where it cannot run."""
    try:
        judged = judge(statements)
    except dj.DeadlockError:
        figures["refused"] += 1
        return True
    if judged is not None:
        count(judged, figures, causes)
    return judged is not None


def measure(options: Options) -> Log:
    """Counts verdicts on random programs from fixed seeds."""
    return count_verdicts("proof", programs, judge_and_count, options)


def report(log: Log) -> str:
    """Writes the records as a page."""
    (figures,), (causes,) = log.of("proof"), log.of("causes")
    unproved = figures["outputs"] - figures["proved"]
    share = 100 * figures["false_alarms"] / max(figures["equal"], 1)
    rows = [
        ["programs run", figures["programs"]],
        ["programs refused, since they may hang", figures.get("refused", 0)],
        ["outputs", figures["outputs"]],
        ["proved equal on all replicas", figures["proved"]],
        ["**false proofs** (proved equal, and differ)", f"**{figures['false_proofs']}**"],
        ["not proved", unproved],
        ["false alarms (not proved, and equal to the last bit)", figures["false_alarms"]],
        ["share of the equal outputs that are false alarms", f"{share:.1f} %"],
    ]
    sources = [[name, number] for name, number in causes.items() if name != "kind"]
    parts = [
        "# The proof of sync on random programs",
        "Programs of up to some thirty operations are drawn at random: collectives with and without "
        "groups, refs, callbacks, random bits, linear solves, custom derivatives, branches, loops, "
        "jit, recomputation, vmap and gradients. Each is proved, run on four replicas, and its outputs "
        "are compared bit by bit. Some outputs are equal by chance, as after a comparison, and cannot be "
        "proved, so not every false alarm is a weakness of the proof.",
        table(["what", "number"], rows),
        "## Sources of the false alarms",
        table(["source", "outputs"], sources),
    ]
    return "\n\n".join(parts) + "\n"


def headline(log: Log) -> list[Row]:
    """Returns the false proofs, of which there must be none."""
    (figures,) = log.of("proof")
    question = f"false proofs, {figures['programs']} random programs"
    return [Row(question, "proved equal, and differ", counted(figures["false_proofs"]), 0.0)]


BENCHMARK = Benchmark(
    name="proof",
    question="How often the proof of sync errs on random programs.",
    quick=QUICK,
    full=FULL,
    minutes=(0.5, 5),
    measure=measure,
    report=report,
    headline=headline,
)

if __name__ == "__main__":
    main(BENCHMARK)
