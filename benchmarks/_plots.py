"""Small pictures of records: lines with intervals, and bars made of parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._harness import Ratio

WIDTH, HEIGHT, DPI = 4.0, 3.2, 80
"""Inches of one panel, and dots in one."""
LOGARITHMIC = 4.0
"""A panel with larger ratios has a logarithmic axis."""


@dataclass(frozen=True)
class Line:
    """A point of a line: one panel for each title, one line for each label."""

    title: str
    label: str
    x: int
    ratio: Ratio


@dataclass(frozen=True)
class Bar:
    """A bar made of parts: one panel for each title."""

    title: str
    label: str
    parts: Mapping[str, float]


def draw_lines(points: list[Line], path: Path, *, x: str, y: str) -> None:
    """Draws ratios with their intervals, by numbers that double."""
    figure, panels = _panels([p.title for p in points])
    for title, panel in panels.items():
        for label in dict.fromkeys(p.label for p in points):
            line = [p for p in points if (p.title, p.label) == (title, label)]
            at, middle = [p.x for p in line], [p.ratio.median for p in line]
            below = [p.ratio.median - p.ratio.low for p in line]
            above = [p.ratio.high - p.ratio.median for p in line]
            panel.errorbar(at, middle, [below, above], marker="o", capsize=2, label=label)
        ticks = sorted({p.x for p in points if p.title == title})
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, map(str, ticks))
        if max(p.ratio.high for p in points if p.title == title) > LOGARITHMIC:
            panel.set_yscale("log", base=2)
        panel.yaxis.set_major_formatter("{x:g}")
        panel.axhline(1, color="gray", linewidth=0.5)
        panel.set(xlabel=x, ylabel=y)
    _save(figure, panels, path)


def draw_bars(bars: list[Bar], path: Path, *, y: str) -> None:
    """Draws the parts of each bar on top of each other."""
    figure, panels = _panels([bar.title for bar in bars])
    for title, panel in panels.items():
        here = [bar for bar in bars if bar.title == title]
        bottom = [0.0] * len(here)
        for part in dict.fromkeys(name for bar in bars for name in bar.parts):
            heights = [bar.parts.get(part, 0.0) for bar in here]
            panel.bar(range(len(here)), heights, bottom=bottom, label=part)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        labels = [bar.label.replace(" ", "\n") for bar in here]
        panel.set_xticks(range(len(here)), labels, fontsize=7)
        panel.set(ylabel=y)
    _save(figure, panels, path)


def _panels(titles: list[str]) -> tuple[Any, dict[str, Any]]:
    """Makes a figure with a panel for each title; no global state and no display are needed."""
    from matplotlib.figure import Figure

    unique = list(dict.fromkeys(titles))
    figure = Figure(figsize=(WIDTH * len(unique), HEIGHT), dpi=DPI, layout="constrained")
    axes = figure.subplots(1, len(unique), squeeze=False)[0]
    for title, panel in zip(unique, axes, strict=True):
        panel.set_title(title, fontsize=9)
    return figure, dict(zip(unique, axes, strict=True))


def _save(figure: Any, panels: Mapping[str, Any], path: Path) -> None:
    handles, labels = next(iter(panels.values())).get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
