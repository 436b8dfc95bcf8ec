"""Results of a padded batch: which have one row for each example, and are cut to the real rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from distribute_jax._mesh import cores_per_replica
from distribute_jax._values import Layout, PerReplica, mark_mirrored
from distribute_jax.program._call import BoundProgram
from distribute_jax.program._results import rebuild
from distribute_jax.program._trace import Call, Traced, batch_share, trace


@dataclass(frozen=True)
class Unknown:
    """It is not known whether a result has one row for each example."""

    text: str
    """The message for code that reads the result."""
    is_resized: bool
    """True if its shape depends on the batch in another way; False if the step could not be traced again."""


def per_example_results(
    call: Call, entry: BoundProgram, larger: Traced | str | None = None
) -> tuple[Any, ...]:
    """Returns for each result whether it has one row for each example, as True, False or ``Unknown``.

    It is found by tracing the step at another batch size.
    """
    results = entry.program.results
    shapes = _result_shapes(entry.program.traced, entry.state_size)
    larger = traced_larger(call) if larger is None else larger
    if isinstance(larger, str):
        others: list[Any] = [larger] * len(shapes)
    else:
        others = _result_shapes(larger, len(larger.old_inputs))
    sizes = share_sizes(call)
    return tuple(
        k in results.declared or _is_per_example(results.names[k], a, b, sizes)
        for k, (a, b) in enumerate(zip(shapes, others, strict=True))
    )


def traced_larger(call: Call) -> Traced | str:
    """Traces a step with larger shares of the batch; returns the reason if that fails."""
    share, larger = share_sizes(call)

    def longer(value: Any) -> Any:
        part = call.share_of(value)
        if isinstance(value, PerReplica) and value.layout is Layout.JOINED:
            rows = part.shape[0] + larger - share
            return jax.ShapeDtypeStruct((rows, *part.shape[1:]), part.dtype)
        return part

    try:
        return trace(call, list(map(longer, call.arguments.data)))
    except Exception as error:  # the step may not accept another size
        return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")


def share_sizes(call: Call) -> tuple[int, int]:
    """Returns the length of a share, and the other one with which the step is traced.

    Three times the length can be divided where the length can, as into microbatches, and hardly any number
    that is computed from the length stays the same.
    """
    share = batch_share(call.arguments, [call.share_of(value) for value in call.arguments.data])
    return share, 3 * share if share else cores_per_replica(call.mesh)


def find_non_batched_results(call: Call, entry: BoundProgram) -> list[str]:
    """Names the results that certainly do not have one row for each example."""
    if entry.program.per_example is None:
        entry.program.per_example = per_example_results(call, entry)
    return [
        name
        for name, rows in zip(entry.program.results.names, entry.program.per_example, strict=True)
        if rows is False or (isinstance(rows, Unknown) and rows.is_resized)
    ]


def _is_per_example(name: str, shape: Any, other: Any, rows: tuple[int, int]) -> Any:
    """Compares two shapes of a result; ``other`` is a reason if there is no second one."""
    if not shape or shape == other:
        return False
    is_resized = not isinstance(other, str)
    why = other
    if is_resized:
        if shape[1:] == other[1:] and (shape[0], other[0]) == rows:
            return True
        why = f"its shape {shape} becomes {other} when a share has {rows[1]} rows, not {rows[0]}"
    return Unknown(
        f"It is not known which rows of {name} are real examples of the partial batch: {why}. "
        "Declare it with dj.per_example(value) if it has one row for each example, or feed no "
        'partial batches: strategy.distribute_dataset(ds, dj.InputOptions(partial="drop")).',
        is_resized,
    )


def _result_shapes(traced: Any, state: int) -> list[tuple[int, ...]]:
    return [tuple(var.aval.shape) for var in traced.jaxpr.jaxpr.outvars[state:]]


def wrap_partial(call: Call, entry: BoundProgram, arrays: Sequence[Any]) -> Any:
    """Returns the user's result from its arrays, without the padding."""
    program, counts = entry.program, call.arguments.counts or ()
    wrapped: list[Any] = []
    for array, mirrored, share, rows in zip(
        arrays, program.plan.mirrored, program.plan.shares, program.per_example or (), strict=True
    ):
        if mirrored:
            is_cut = rows is True and len(counts) == 1
            real = jax.lax.slice_in_dim(array, 0, counts[0]) if is_cut else array
            wrapped.append(mark_mirrored(real, entry.step))
        else:
            wrapped.append(
                PerReplica(
                    array,
                    program.mesh,
                    counts=counts if rows is True else None,
                    ambiguous=rows.text if isinstance(rows, Unknown) else None,
                    step=entry.step,
                    share=share,
                )
            )
    return rebuild(program.results, wrapped, entry.binding)
