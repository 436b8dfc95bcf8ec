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

Look = Callable[[Any, Counter[str], Counter[str]], bool]
"""Judges a program, and adds to figures and causes; False if the program cannot run."""


def measured(kind: str, programs: SearchStrategy[Any], look: Look, options: Options) -> Log:
    """Returns the figures and causes of programs from fixed seeds."""
    log, figures, causes = Log(), Counter[str](), Counter[str]()
    log.start()
    start = options.start
    while figures["programs"] < options.programs:
        _draw(options.programs - figures["programs"], start, programs, look, figures, causes)
        start += 1
    log.add(kind, **figures)
    log.add("causes", **dict(causes.most_common(12)))
    return log


def _draw(
    number: int,
    start: int,
    programs: SearchStrategy[Any],
    look: Look,
    figures: Counter[str],
    causes: Counter[str],
) -> None:
    @seed(start)
    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs)
    def draw(statements: Any) -> None:
        if not look(statements, figures, causes):
            reject()

    draw()


def searched(examples: int, programs: SearchStrategy[Any], look: Look, never: str) -> Counter[str]:
    """Returns the figures of random programs; fails, with the smallest one, if any counts as ``never``."""
    figures: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        derandomize=examples < 100,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs)
    def search(statements: Any) -> None:
        new: Counter[str] = Counter()
        runs = look(statements, new, Counter())
        assert not new[never], never
        figures.update(new)
        if not runs:
            reject()

    search()
    print(dict(figures))
    return figures
