"""Partial batches: padding that must not be seen, and results cut to the real examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._errors import PaddingLeakError
from distribute_jax._padding import other_padding
from distribute_jax._tree import listed
from distribute_jax._values import Layout, PerReplica, mark_mirrored
from distribute_jax.program._arguments import Arguments
from distribute_jax.program._program import Entry
from distribute_jax.program._results import rebuild
from distribute_jax.program._trace import Call, batch_share, trace

_LEAK = """\
The padding of a partial batch changes what the step computes:
{lines}
The batch has {real} real examples of {rows} rows; the rest is padding, which must not be seen. The \
step was run twice on copies of the state with two different paddings; the state is as before the call.
Leave the padding out: dj.compute_average_loss(per_example_loss), or jnp.where(mask, value, 0) with \
mask = dj.get_replica_context().batch_mask. Or feed no partial batches: InputOptions(partial="drop")."""


def run_checked_for_leaks(call: Call, entry: Entry, flat: list[Any]) -> list[Any]:
    """Runs a program on a padded batch; the first time with two paddings, on copies of the state."""
    program = entry.program
    if program.per_example is None:
        program.per_example = per_example_results(call, entry)
    if program.padding_checked:
        return entry.execute(flat)
    outs = entry.execute(copied(flat))
    again = Arguments.with_data(call.arguments, _other_data(call.arguments))
    others = entry.execute(copied(entry.with_data(flat, again)))
    suspects = _different(call, entry, outs, others)
    if suspects:
        # A program that is not deterministic differs from itself; that is no leak.
        repeated = entry.execute(copied(flat))
        noisy = {name for name, _ in _different(call, entry, outs, repeated)}
        suspects = [(name, line) for name, line in suspects if name not in noisy]
    if suspects:
        counts = call.arguments.counts or ()
        rows = batch_share(call.arguments, _shares(call)) * len(counts)
        lines = listed([line for _, line in suspects])
        raise PaddingLeakError(_LEAK.format(lines=lines, real=sum(counts), rows=rows))
    program.padding_checked = True
    return outs


def copied(flat: Sequence[Any]) -> list[Any]:
    """Copies the arrays among flat inputs, so that donating them loses nothing."""
    return [jnp.copy(x) if isinstance(x, jax.Array) else x for x in flat]


def _other_data(arguments: Arguments) -> list[Any]:
    batch = [v for v in arguments.data if isinstance(v, PerReplica) and v.counts is not None]
    padded = iter(other_padding(batch))
    return [
        next(padded) if isinstance(v, PerReplica) and v.counts is not None else v
        for v in arguments.data
    ]


def _different(
    call: Call, entry: Entry, one: Sequence[Any], other: Sequence[Any]
) -> list[tuple[str, str]]:
    """Names the outputs whose real part differs, with the largest difference."""
    found = []
    names = entry.output_names()
    for index, (a, b) in enumerate(zip(one, other, strict=True)):
        left, right = _real(call, entry, index, a), _real(call, entry, index, b)
        if left is not None and not np.array_equal(left, right, equal_nan=_has_nan(left)):
            found.append((names[index], f"{names[index]} {_by_how_much(left, right)}"))
    return found


def _has_nan(array: np.ndarray[Any, Any]) -> bool:
    return bool(np.issubdtype(array.dtype, np.inexact))


def _by_how_much(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> str:
    return f"differs by up to {np.max(np.abs(a.astype(np.float64) - b.astype(np.float64))):.3g}"


def _real(call: Call, entry: Entry, index: int, array: jax.Array) -> Any:
    """Gives the real part of an output on the host; None where it is not known."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    host = np.asarray(array)
    host = host.astype(np.float32) if host.dtype.kind == "V" else host
    result = index - entry.state_size
    if result < 0:
        return host
    rows = (entry.program.per_example or ())[result]
    if isinstance(rows, str):
        return None
    if rows is False:
        return host
    if entry.program.plan.mirrored[result]:
        return host[: sum(call.arguments.counts or ())]
    counts = call.arguments.counts or ()
    return np.concatenate([part[:count] for part, count in zip(host, counts, strict=True)])


def per_example_results(call: Call, entry: Entry) -> tuple[Any, ...]:
    """Finds out which results have one row for each example, by tracing at another batch size.

    Returns:
        For each array of the result: True, False, or a message that says why it is not known.
    """
    results = entry.program.results
    shapes = _result_shapes(entry.program.traced, entry.state_size)
    share = batch_share(call.arguments, _shares(call))
    try:
        larger = trace(call, _longer_shares(call))
        others: Any = _result_shapes(larger, sum(larger.written_sizes))
        reason = ""
    except Exception as error:
        others, reason = [None] * len(shapes), f"{type(error).__name__}: {error}".splitlines()[0]
    return tuple(
        True if k in results.declared else _is_per_example(results.names[k], a, b, share, reason)
        for k, (a, b) in enumerate(zip(shapes, others, strict=True))
    )


def _is_per_example(name: str, shape: Any, other: Any, share: int, reason: str) -> Any:
    if not shape or shape == other:
        return False
    if other is not None and shape[1:] == other[1:] and (shape[0], other[0]) == (share, share + 1):
        return True
    why = reason or f"its shape {shape} becomes {other} when each share has one example more"
    return (
        f"It is not known which rows of {name} are real examples of the partial batch: {why}. "
        "Declare it with dj.per_example(value) if it has one row for each example, or feed no "
        'partial batches: strategy.distribute_dataset(ds, dj.InputOptions(partial="drop")).'
    )


def _result_shapes(traced: Any, state: int) -> list[tuple[int, ...]]:
    return [tuple(var.aval.shape) for var in traced.jaxpr.jaxpr.outvars[state:]]


def _shares(call: Call) -> list[Any]:
    return [call.share_of(value) for value in call.arguments.data]


def _longer_shares(call: Call) -> list[Any]:
    def longer(value: Any) -> Any:
        share = call.share_of(value)
        if isinstance(value, PerReplica) and value.layout is Layout.JOINED:
            return jax.ShapeDtypeStruct((share.shape[0] + 1, *share.shape[1:]), share.dtype)
        return share

    return [longer(value) for value in call.arguments.data]


def wrap_partial(call: Call, entry: Entry, arrays: Sequence[Any]) -> Any:
    """Turns the result's arrays into the result that the user sees, without the padding."""
    program, counts = entry.program, call.arguments.counts or ()
    wrapped: list[Any] = []
    for array, mirrored, rows in zip(
        arrays, program.plan.mirrored, program.per_example or (), strict=True
    ):
        if mirrored:
            wrapped.append(mark_mirrored(array[: counts[0]] if _is_one(call, rows) else array))
        else:
            known = counts if rows is True else None
            why = rows if isinstance(rows, str) else None
            wrapped.append(PerReplica(array, program.mesh, counts=known, ambiguous=why))
    return rebuild(program.results, wrapped, entry.binding)


def _is_one(call: Call, rows: Any) -> bool:
    return rows is True and len(call.arguments.counts or ()) == 1
