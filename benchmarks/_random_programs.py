"""Random programs for the benchmarks and the property tests of a proof."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, reject, seed, settings
from hypothesis.strategies import SearchStrategy

from benchmarks._harness import Log


@dataclass(frozen=True, kw_only=True)
class Options:
    """How many programs are judged."""

    programs: int = 400
    """Programs that JAX accepts."""
    start: int = 0
    """The first seed."""

    def __post_init__(self) -> None:
        """Refuses a count of nothing."""
        if self.programs < 1:
            raise ValueError(f"{self}: at least one program.")


FULL = Options()
QUICK = Options(programs=60)

Judge = Callable[[Any, Counter[str], Counter[str]], bool]
"""Judges a program, and adds to figures and causes; False if the program cannot run."""


_SETTINGS = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


def count_verdicts(kind: str, programs: SearchStrategy[Any], judge: Judge, options: Options) -> Log:
    """Returns the figures and causes of programs from fixed seeds."""
    log, figures, causes = Log(), Counter[str](), Counter[str]()
    log.start()
    start = options.start
    while figures["programs"] < options.programs:

        @seed(start)
        @settings(
            _SETTINGS,
            max_examples=options.programs - figures["programs"],
            phases=[Phase.generate],
        )
        @given(programs)
        def draw(statements: Any) -> None:
            if not judge(statements, figures, causes):
                reject()

        draw()
        start += 1
    log.add(kind, **figures)
    log.add("causes", **dict(causes.most_common(12)))
    return log


def check_random_programs(
    examples: int, programs: SearchStrategy[Any], judge: Judge, never: str
) -> Counter[str]:
    """Returns the figures of random programs; fails, with the smallest one, if any counts as ``never``."""
    figures: Counter[str] = Counter()

    @settings(_SETTINGS, max_examples=examples, derandomize=examples < 100)
    @given(programs)
    def search(statements: Any) -> None:
        new: Counter[str] = Counter()
        runs = judge(statements, new, Counter())
        assert not new[never], never
        figures.update(new)
        if not runs:
            reject()

    search()
    print(dict(figures))
    return figures
