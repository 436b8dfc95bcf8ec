"""How often the padding proof errs on random programs: false proofs, of which there must be none, and alarms.

    python -m benchmarks.padding_proof             400 programs, and prints JSON lines
    python -m benchmarks.padding_proof --report    also writes a dated report to benchmarks/reports/
    python -m benchmarks.padding_proof --quick     a minute's look: few programs

Each program is proved, and run on two replicas with padding that repeats real rows, with other padding, and
with three times the rows. A *false proof* is an output that is proved clean and changes. A *false alarm* is
one that is refused as a leak and changes in no run. The other outputs that are not proved are undecided.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks._benchmark import Benchmark, Row, main
from benchmarks._harness import Log, counted, table
from benchmarks._random_programs import FULL, QUICK, Options, count_verdicts
from benchmarks._row_programs import WIDTH, Setting, Statement, outputs_of, row_programs
from distribute_jax._padding import padded_rows
from distribute_jax.collectives._markers import real_rows
from distribute_jax.program._padding_marks import CLEAN, Mark, Rows, UndecidedError, leaking
from distribute_jax.program._padding_proof import prove_padding

REPLICAS = 2
SHARE, LARGER = 4, 12
COUNTS = ([4, 2], [3, 0], [1, 4])
"""Real rows of each replica; the second share of the second is empty."""

PROVED, REFUSED, UNDECIDED = "proved", "refused", "undecided"


class Judged(NamedTuple):
    """A program that was proved and run."""

    verdicts: list[str]
    """For each output the verdict of the proof."""
    where: list[str]
    """For each output the reason why it is not proved."""
    same: list[bool]
    """For each output whether no padding changed it."""

    def number(self, verdict: str, *, same: bool) -> int:
        """Counts outputs."""
        return sum((v, s) == (verdict, same) for v, s in zip(self.verdicts, self.same, strict=True))

    @property
    def false_proofs(self) -> int:
        """Outputs that are proved clean and change with the padding."""
        return self.number(PROVED, same=False)

    @property
    def false_alarms(self) -> int:
        """Outputs that are refused and change with no padding."""
        return self.number(REFUSED, same=True)


def judge(statements: list[Statement]) -> Judged | None:
    """Proves a program and runs it; None if JAX itself refuses it."""
    with jax.enable_x64(True):
        try:
            marks, rows_from = _marks(statements)
        except (NotImplementedError, TypeError):  # such as a derivative that JAX does not have
            return None
        same = _unchanged(statements, rows_from, len(marks))
    verdicts, where = zip(
        *(_verdict(mark, is_row=k >= rows_from) for k, mark in enumerate(marks)), strict=True
    )
    return Judged(list(verdicts), list(where), same)


def _program(statements: list[Statement], share: int) -> Any:
    def program(vector: Any, rows: Any, classes: Any, counts: Any) -> Any:
        mask = real_rows(jnp.arange(share) < counts[lax.axis_index("data")])
        return outputs_of(statements, vector, rows, Setting(mask, counts, classes))

    return program


def _marks(statements: list[Statement]) -> tuple[list[Mark], int]:
    """Returns the marks of the outputs, and how many outputs have no rows."""
    jaxprs = []
    for share in (SHARE, LARGER):
        inputs = [
            jax.ShapeDtypeStruct(shape, dtype)
            for shape, dtype in (
                ((WIDTH,), float), ((share, WIDTH), float), ((share,), int), ((REPLICAS,), np.int32)
            )
        ]  # fmt: skip
        make = jax.make_jaxpr(
            _program(statements, share), axis_env=[("data", REPLICAS)], return_shape=True
        )
        jaxpr, (clean, _) = make(*inputs)
        jaxprs.append(jaxpr)
    rows = Mark((Rows(0),))
    try:
        marks = prove_padding(jaxprs[0], jaxprs[1], (SHARE, LARGER), [CLEAN, rows, rows, CLEAN])
    except UndecidedError as error:
        marks = [leaking(str(error))] * len(jaxprs[0].jaxpr.outvars)
    return marks, len(clean)


def _verdict(mark: Mark, *, is_row: bool) -> tuple[str, str]:
    if mark.leak:
        return (REFUSED if mark.leak.certain else UNDECIDED), mark.leak.where
    if mark.row_count_at:
        return UNDECIDED, f"the number of rows at {mark.row_count_at}"
    along = mark.rows[0] if mark.rows else None
    fits = along is None or (is_row and (along.is_uniform or along.outer == along.inner == 1))
    return (PROVED, "") if fits else (UNDECIDED, "rows")


def _unchanged(statements: list[Statement], rows_from: int, outputs: int) -> list[bool]:
    same = [True] * outputs
    short, long = (
        jax.jit(jax.vmap(_program(statements, share), (None, 0, 0, None), axis_name="data"))
        for share in (SHARE, LARGER)
    )
    for k, counts in enumerate(COUNTS):
        rng = np.random.default_rng(k)
        vector = rng.normal(size=WIDTH)
        real = rng.normal(size=(sum(counts), WIDTH)), rng.integers(0, WIDTH, sum(counts))
        first, other = (_outs(short, vector, real, counts, SHARE, noise) for noise in (None, rng))
        longer = _outs(long, vector, real, counts, LARGER, None)
        for i in range(outputs):
            is_row = i >= rows_from
            at = [_seen(outs[i], counts, is_row) for outs in (first, other, longer)]
            same[i] &= np.array_equal(at[0], at[1], equal_nan=True)
            same[i] &= np.allclose(at[0], at[2], rtol=1e-7, atol=1e-9, equal_nan=True)
    return same


def _outs(
    run: Any, vector: Any, real: Any, counts: Sequence[int], share: int, noise: Any
) -> list[Any]:
    """Runs a program with shares padded by real rows, or by noise."""
    filled = padded_rows(counts, share).reshape(REPLICAS, share)
    rows, classes = (part[filled] for part in real)
    if noise is not None:
        padding = np.arange(share) >= np.asarray(counts)[:, None]
        rows[padding] = 3 * noise.normal(size=rows[padding].shape)
        classes[padding] = noise.integers(0, WIDTH, classes[padding].shape)
    return list(
        map(np.asarray, jax.tree.leaves(run(vector, rows, classes, np.asarray(counts, np.int32))))
    )


def _seen(out: Any, counts: Sequence[int], is_row: bool) -> Any:
    """Returns the part of an output that must not depend on padding."""
    if not is_row:
        return out
    return np.concatenate([part[:count] for part, count in zip(out, counts, strict=True)])


def count(judged: Judged, figures: Counter[str], causes: Counter[str]) -> None:
    """Adds a program to the figures, and to the causes why unchanged outputs were not proved."""
    figures["programs"] += 1
    figures["outputs"] += len(judged.verdicts)
    figures["unchanged"] += sum(judged.same)
    for verdict in (PROVED, REFUSED, UNDECIDED):
        for same in (True, False):
            name = f"{verdict}_{'unchanged' if same else 'changed'}"
            figures[name] += judged.number(verdict, same=same)
    for verdict, where, same in zip(*judged, strict=True):
        if verdict != PROVED and same:
            causes[re.sub(r" at \S+$", "", where)] += 1


def judge_and_count(
    statements: list[Statement], figures: Counter[str], causes: Counter[str]
) -> bool:
    """Proves and runs a program, and counts; False where it cannot run."""
    judged = judge(statements)
    if judged is not None:
        count(judged, figures, causes)
    return judged is not None


def measure(options: Options) -> Log:
    """Counts verdicts on random programs from fixed seeds."""
    return count_verdicts("padding", row_programs, judge_and_count, options)


def report(log: Log) -> str:
    """Writes the records as a page."""
    (figures,), (causes,) = log.of("padding"), log.of("causes")
    unchanged = max(figures["unchanged"], 1)
    rows = [
        ["programs run", figures["programs"]],
        ["outputs", figures["outputs"]],
        ["outputs that no padding changed", figures["unchanged"]],
        ["proved clean", figures["proved_unchanged"] + figures["proved_changed"]],
        ["**false proofs** (proved clean, and changed)", f"**{figures['proved_changed']}**"],
        ["refused as a leak, and changed", figures["refused_changed"]],
        ["false alarms (refused as a leak, and unchanged)", figures["refused_unchanged"]],
        ["undecided, and changed", figures["undecided_changed"]],
        ["undecided, and unchanged", figures["undecided_unchanged"]],
        [
            "share of the unchanged outputs that are proved",
            f"{100 * figures['proved_unchanged'] / unchanged:.1f} %",
        ],
    ]
    reasons = [[name, number] for name, number in causes.items() if name != "kind"]
    parts = [
        "# The padding proof on random programs",
        "Programs of up to ten operations on the rows of a share are drawn at random: with the mask and "
        "without, reductions, sorting, gathering and scattering, products, gradients, branches, loops, "
        "`jit` and recomputation. Each is proved, and run on two replicas with padding that repeats real "
        "rows, with other padding, and with three times the rows, for three ways to fill the shares. Some "
        "outputs are leaks that these numbers do not show, as a count that is zero by chance, so not every "
        "false alarm is an error of the proof.",
        table(["what", "number"], rows),
        "## Where outputs that no padding changed were not proved",
        table(["what stopped the proof", "outputs"], reasons),
    ]
    return "\n\n".join(parts) + "\n"


def headline(log: Log) -> list[Row]:
    """Returns the false proofs, of which there must be none."""
    (figures,) = log.of("padding")
    question = f"false proofs of padding, {figures['programs']} random programs"
    return [Row(question, "proved clean, and changed", counted(figures["proved_changed"]), 0.0)]


BENCHMARK = Benchmark(
    name="padding_proof",
    question="How often the padding proof errs on random programs.",
    quick=QUICK,
    full=FULL,
    minutes=(1, 5),
    measure=measure,
    report=report,
    headline=headline,
)

if __name__ == "__main__":
    main(BENCHMARK)
