"""The table that ``Model.summary`` prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from distribute_jax._messages import is_array, is_key

COLUMNS = ("layer", "type", "parameters", "bytes", "dtype", "placement")
NUMBERS = {"parameters", "bytes"}


@dataclass
class Layer:
    """A module with arrays of its own."""

    path: str
    kind: str
    arrays: list[tuple[bool, Any]] = field(default_factory=list)
    """Whether it is trained, and the array."""

    def row(self) -> tuple[str, ...]:
        """Gives the texts of the columns."""
        arrays = [array for _, array in self.arrays]
        dtypes = _joined(str(array.dtype) for array in arrays)
        placement = _joined(map(_placement, arrays))
        return (
            self.path, self.kind, f"{sum(a.size for a in arrays):,}",
            f"{sum(map(_bytes, arrays)):,}", dtypes, placement,
        )  # fmt: skip


def print_summary(module: nnx.Module, print_fn: Callable[[str], Any] | None) -> None:
    """Prints the table, drawn where a terminal or notebook can show it, else as plain text."""
    layers = layers_of(module)
    rows = [layer.row() for layer in layers]
    totals = _totals([item for layer in layers for item in layer.arrays])
    if print_fn is not None:
        print_fn(_plain(rows, totals))
        return
    from rich.console import Console

    console = Console()
    if console.is_terminal or console.is_jupyter:
        console.print(_drawn(rows), *totals, sep="\n", highlight=False)
    else:
        print(_plain(rows, totals))


def layers_of(module: nnx.Module) -> list[Layer]:
    """Gives every module that has variables of its own, each variable once, in the module's order."""
    kinds: dict[tuple[Any, ...], str] = {}
    variables = []
    for path, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Variable):
            variables.append((tuple(path), node))
        elif isinstance(node, nnx.Module) and not isinstance(node, (nnx.List, nnx.Dict)):
            kinds[tuple(path)] = type(node).__name__
    found: dict[tuple[Any, ...], Layer] = {}
    for path, variable in sorted(variables, key=lambda item: list(map(str, item[0][:-1]))):
        owner = next(path[:n] for n in range(len(path) - 1, -1, -1) if path[:n] in kinds)
        layer = found.setdefault(owner, Layer(".".join(map(str, owner)) or "(model)", kinds[owner]))
        trained = isinstance(variable, nnx.Param)
        leaves = jax.tree.leaves(variable.get_raw_value())
        layer.arrays += [(trained, a if is_array(a) else np.asarray(a)) for a in leaves]
    return list(found.values())


def _totals(arrays: list[tuple[bool, Any]]) -> list[str]:
    parts = (
        ("Total", [array for _, array in arrays]),
        ("Trainable", [array for trained, array in arrays if trained]),
        ("Other", [array for trained, array in arrays if not trained]),
    )
    return [
        f"{name}: {sum(a.size for a in part):,} parameters, {sum(map(_bytes, part)):,} bytes"
        for name, part in parts
    ]


def _plain(rows: list[tuple[str, ...]], totals: list[str]) -> str:
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    lines = []
    for row in (COLUMNS, *rows):
        cells = zip(COLUMNS, row, widths, strict=True)
        lines.append("  ".join(t.rjust(w) if n in NUMBERS else t.ljust(w) for n, t, w in cells))
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(line.rstrip() for line in [*lines, "", *totals])


def _drawn(rows: list[tuple[str, ...]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in NUMBERS else "left")
    for row in rows:
        table.add_row(*(Text(text) for text in row))
    return table


def _bytes(array: Any) -> int:
    """Gives the bytes of one copy of an array."""
    return int(jax.random.key_data(array).nbytes if is_key(array) else array.nbytes)


def _placement(array: Any) -> str:
    if not isinstance(array, jax.Array):
        return "host"
    devices: list[Any] = list(array.sharding.device_set)
    platform = devices[0].platform
    if len(devices) == 1:
        return f"{platform}:{devices[0].id}"
    if array.sharding.is_fully_replicated:
        return f"on each of {len(devices)} {platform}"
    spec = array.sharding.spec if isinstance(array.sharding, NamedSharding) else array.sharding
    return f"{spec} over {len(devices)} {platform}"


def _joined(texts: Any) -> str:
    return ", ".join(dict.fromkeys(texts))
