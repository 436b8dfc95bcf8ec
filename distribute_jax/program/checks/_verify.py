"""Equal by check: the step on all replicas against the step on one device with the whole batch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from flax import nnx

from distribute_jax._errors import ArgumentError, NotEqualError
from distribute_jax._internals import read_raw
from distribute_jax._mesh import (
    first_replica,
    num_replicas,
    outside_mesh,
    split_sharding,
    whole_here,
)
from distribute_jax._tree import listed
from distribute_jax._values import Layout, PerReplica
from distribute_jax.program._entry import Entry
from distribute_jax.program._options import RunOptions
from distribute_jax.program._program import build
from distribute_jax.program.binding._arguments import Arguments
from distribute_jax.program.checks._compare import (
    Array,
    Verdict,
    compared,
    largest,
    on_host,
    spacing_of,
)
from distribute_jax.program.checks._compare_replicas import difference
from distribute_jax.program.checks._copies import check_copies
from distribute_jax.program.checks._leak import copied
from distribute_jax.program.checks._own_values import as_read, components_on
from distribute_jax.program.checks._rounding import is_rounding, nudged_outcomes
from distribute_jax.program.checks._rows import per_example_results
from distribute_jax.program.tracing._trace import Call

_UNEQUAL = """\
The step on {replicas} replicas is not the step on one device with the whole batch:
{lines}
A distributed step must give what one device gives, to rounding.{hint} The state is as before the call."""

_RANDOM = (
    " The step draws random numbers, which differ on each replica, so it cannot be equal: check it "
    "with the dropout off (model.eval())."
)


_TOO_SMALL = (
    "%s changes these variables by hardly more than their rounding, so verify cannot tell whether the "
    "change is that of one device:\n%s\nTo check them, run the step once with a larger learning rate, or in "
    'float64 with jax.config.update("jax_enable_x64", True).'
)

_log = logging.getLogger("distribute_jax")


class _OneReplica:
    """Stands in for a strategy while its step runs on one device."""

    num_replicas_in_sync = 1

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)


def verify(call: Call, entry: Entry, values: Sequence[Any]) -> None:
    """Runs the step both ways from copies of the state, and raises where they differ."""
    replicas = num_replicas(call.mesh)
    if replicas > 1:
        flat = entry.flat_inputs(values, call.arguments)
        entry.check_readable(flat)
        before = as_read(entry, _state_leaves(entry))
        outs = entry.execute(copied(flat))
        check_copies(entry, outs)
        many = as_read(entry, outs)
        # A scope's mesh has all replicas, and JAX refuses another beside it.
        with outside_mesh(), components_on(entry.binding, first_replica(call.mesh)):
            single_call, single = _on_one_device(call, entry)
            placed = single.placed(single.flat_inputs(values, single_call.arguments))
            one = as_read(entry, single.execute(placed))
        if entry.program.per_example is None and call.arguments.has_batch:
            entry.program.per_example = per_example_results(call, entry)
        lines, small = _differences(call, entry, before, many, one)
        if lines:
            near = [as_read(entry, outs) for outs in nudged_outcomes(entry, flat)]
            lines, small = _differences(call, entry, before, many, one, near)
        if lines:
            random = any(isinstance(v, nnx.RngCount) for v in entry.outputs)
            raise NotEqualError(
                _UNEQUAL.format(
                    replicas=replicas, lines=listed(lines), hint=_RANDOM if random else ""
                )
            )
        if small and not entry.program.verified:
            _log.warning(_TOO_SMALL, entry.step, listed(small))
    entry.program.verified = True


def _state_leaves(entry: Entry) -> list[Any]:
    return jax.tree.leaves(read_raw(entry.outputs))


def _on_one_device(call: Call, entry: Entry) -> tuple[Call, Entry]:
    mesh = first_replica(call.mesh)
    whole = [_whole(value, mesh) for value in call.arguments.data]
    arguments = Arguments.with_data(call.arguments, whole)
    single = replace(call, arguments=arguments, mesh=mesh, strategy=_OneReplica(call.strategy))
    shapes = tuple(np.shape(getattr(v, "global_array", v)) for v in whole)
    programs = entry.program.on_one_device
    if shapes not in programs:
        programs[shapes] = build(single, RunOptions(check_sync=False, donate_state=False))
    return single, Entry(programs[shapes], call.binding, entry.step)


def _whole(value: Any, mesh: Any) -> Any:
    """Gives the whole batch, real examples only, as the share of a single replica."""
    if not isinstance(value, PerReplica):
        return value
    if value.layout is Layout.STACKED:
        raise ArgumentError(
            "verify cannot run this step on one device: an argument holds a value for each replica "
            f"({value!r}), which one device has no place for. Pass a distributed batch instead."
        )
    every = np.asarray(whole_here(value.global_array))
    parts = np.split(every, num_replicas(value.mesh))
    real = [
        part[:count] for part, count in zip(parts, value.counts or map(len, parts), strict=True)
    ]
    batch = jax.device_put(np.concatenate(real), split_sharding(mesh))
    return PerReplica(batch, mesh, layout=Layout.JOINED)


def _differences(
    call: Call,
    entry: Entry,
    before: Sequence[Any],
    many: Sequence[Any],
    one: Sequence[Any],
    nudged: Sequence[Sequence[Any]] = (),
) -> tuple[list[str], list[str]]:
    """Gives a line for each output that differs, and for each that changed too little to tell.

    With ``nudged``, outcomes of slightly other inputs, a difference that is only rounding is of the latter.
    """
    unequal: list[str] = []
    small: list[str] = []
    for index, (name, a, b) in enumerate(zip(entry.output_names(), many, one, strict=True)):
        if a is None:  # an ON_READ variable without aggregation has no value to compare
            continue
        left, right, eps = on_host(a), on_host(b), spacing_of(a)
        result = index - entry.state_size
        if result >= 0 and not entry.program.plan.mirrored[result]:
            rows, counts = _rows_of(entry, result), call.arguments.counts
            line = difference(left, right, rows=rows, counts=counts, eps=eps)
            unequal += [f"{name}: {line}"] if line else []
        elif left.shape != right.shape:
            unequal.append(
                f"{name}: shape {left.shape} on the replicas, {right.shape} on one device"
            )
        else:
            old = on_host(before[index]) if result < 0 else 0.0
            verdict = compared(left, right, old, eps=eps)
            near = [on_host(outs[index]) for outs in nudged]
            if verdict is Verdict.UNEQUAL and near and is_rounding(left, right, near):
                verdict = Verdict.TOO_SMALL
            if verdict is Verdict.UNEQUAL:
                unequal.append(f"{name}: {_apart(left, right, old, call)}")
            elif verdict is Verdict.TOO_SMALL:
                small.append(f"{name}: {_changes(left, right, old)}")
    return unequal, small


def _rows_of(entry: Entry, result: int) -> Any:
    """Tells whether a result has one row for each example, as far as it is known."""
    known = entry.program.per_example
    return known[result] if known else result in entry.program.results.declared


def _changes(left: Array, right: Array, old: Array | float) -> str:
    many, one = largest(left - old), largest(right - old)
    return f"changed by up to {many:.3g}, on one device by {one:.3g}, at values up to {largest(right):.3g}"


def _apart(left: Array, right: Array, old: Array | float, call: Call) -> str:
    """Says how what the step added differs (or the values, where nothing was there before)."""
    apart = f"differs by up to {largest(left - right):.3g}"
    return f"{apart}{_ratio(left - old, right - old, num_replicas(call.mesh))}"


def _ratio(left: Array, right: Array, replicas: int) -> str:
    """Names the common ratio, where there is one, and its likely cause."""
    large = np.abs(right) > 1e-3 * largest(right)
    if not large.any() or not np.issubdtype(right.dtype, np.floating):
        return ""
    ratio = float(np.median(left[large] / right[large]))
    return f"; the change is {ratio:.3f} times that on one device{_cause(ratio, replicas)}"


def _cause(ratio: float, replicas: int) -> str:
    def near(value: float) -> bool:
        return abs(ratio - value) <= 0.01 * abs(value)

    if near(replicas):
        return f" ({ratio:.3f} = number of replicas: gradients of a mean were summed)"
    if near(1 / replicas):
        return f" ({ratio:.3f} = 1 / number of replicas: the gradient of a sum was averaged)"
    if near(replicas**2):
        return (
            f" ({ratio:.3f} = number of replicas squared: a square of summed gradients of a mean)"
        )
    return ""
