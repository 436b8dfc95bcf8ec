"""From the proof of padding to outputs: which state and which results may show the padding."""

from __future__ import annotations

from distribute_jax._mesh import num_replicas
from distribute_jax._values import Layout, PerReplica
from distribute_jax.program._entry import Entry
from distribute_jax.program.checks._rows import Unknown, share_sizes
from distribute_jax.program.proof._padding import GaveUpError, prove_padding
from distribute_jax.program.proof._padding_marks import CLEAN, Leak, Mark, Rows
from distribute_jax.program.tracing._trace import Call, Traced

Seen = tuple[str, Leak]


def seen_padding(call: Call, entry: Entry, larger: Traced | str) -> list[Seen]:
    """Finds the outputs in which padding may be seen.

    Args:
        call: a call with a partial batch.
        entry: its program.
        larger: the step traced with larger shares, or why it could not be.

    Returns:
        The name of each, and where the padding comes in; an empty name where it is the whole step. None
        at all if it is proved that no padding is seen.
    """
    if isinstance(larger, str):
        return [("", Leak(f"it could not be traced with more rows ({larger})", False))]
    traced = entry.program.traced
    alike = traced.written == larger.written and traced.sizes == larger.sizes
    if not alike or traced.written_sizes != larger.written_sizes:
        return [("", Leak("with more rows it writes other variables", False))]
    try:
        marks = prove_padding(
            traced.jaxpr, larger.jaxpr, share_sizes(call), _input_marks(call, traced)
        )
    except GaveUpError as error:
        return [("", Leak(str(error), False))]
    names = entry.output_names()
    found = ((names[k], _leak_of(call, entry, k, mark)) for k, mark in enumerate(marks))
    return [(name, leak) for name, leak in found if leak is not None]


def _input_marks(call: Call, traced: Traced) -> list[Mark]:
    variables, arrays, _, counts = traced.sizes
    data = [
        Mark((Rows(0),)) if isinstance(v, PerReplica) and v.layout is Layout.JOINED else CLEAN
        for v in call.arguments.data
    ]
    return [CLEAN] * (variables + arrays) + data + [CLEAN] * counts


def _leak_of(call: Call, entry: Entry, output: int, mark: Mark) -> Leak | None:
    """Returns why padding may be seen in an output, None where it is not."""
    result = output - entry.state_size
    rows = False if result < 0 else (entry.program.per_example or ())[result]
    if isinstance(rows, Unknown):
        return None  # nobody can read it
    if mark.leak is not None:
        return mark.leak
    if mark.amount:
        return Leak(f"the number of rows of a share, at {mark.amount}", False)
    if not mark.rows:
        return None
    if rows is False or [r.dim for r in mark.rows] != [0]:
        return Leak("all rows of a share", False)
    [along] = mark.rows
    cut = along.is_uniform or (along.outer, along.inner) == (1, 1)
    mirrored = entry.program.plan.mirrored[result] and num_replicas(call.mesh) > 1
    return None if cut and not (mirrored and along.data) else Leak("all rows of a share", False)
