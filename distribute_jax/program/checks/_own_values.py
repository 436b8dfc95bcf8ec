"""ON_READ variables beside one device: their components laid elsewhere, and read as one value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import jax
from jax.sharding import Mesh

from distribute_jax._internals import read_raw, write_raw
from distribute_jax.program._entry import Entry
from distribute_jax.program.binding._aggregation import keeps_own_values
from distribute_jax.program.binding._bind import Binding
from distribute_jax.variables import Variable, aggregated, on_replicas


@contextmanager
def components_on(binding: Binding, mesh: Mesh) -> Iterator[None]:
    """Lets ON_READ variables have one component for each replica of another mesh, for a block."""
    own = [cast("Variable", v) for v in binding.variables if keeps_own_values(v)]
    before = read_raw(own)
    write_raw(own, [on_replicas(variable, mesh) for variable in own])
    try:
        yield
    finally:
        write_raw(own, before)


def as_read(entry: Entry, outs: Sequence[jax.Array]) -> list[Any]:
    """Gives the outputs of a step with ON_READ variables as they read; None where they do not."""
    sizes = entry.program.traced.written_sizes
    variables = [v for v, size in zip(entry.outputs, sizes, strict=True) for _ in range(size)]
    state = [
        aggregated(cast("Variable", variable), out) if keeps_own_values(variable) else out
        for variable, out in zip(variables, outs, strict=False)
    ]
    return [*state, *outs[len(state) :]]
