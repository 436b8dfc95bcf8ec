"""Equal by check: the step on all replicas against the step on one device with the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from flax import nnx

from distribute_jax._errors import ArgumentError, NotEqualError
from distribute_jax._internals import read_raw
from distribute_jax._mesh import num_replicas, replica_mesh, split_sharding
from distribute_jax._tree import listed
from distribute_jax._values import Layout, PerReplica
from distribute_jax.program._arguments import Arguments
from distribute_jax.program._compare import Array, equal_to_rounding, largest, on_host
from distribute_jax.program._entry import Entry
from distribute_jax.program._leak import copied
from distribute_jax.program._options import RunOptions
from distribute_jax.program._program import build
from distribute_jax.program._trace import Call

_UNEQUAL = """\
The step on {replicas} replicas is not the step on one device with the whole batch:
{lines}
A distributed step must give what one device gives, to rounding.{hint} The state is as before the call."""

_RANDOM = (
    " The step draws random numbers, which differ on each replica, so it cannot be equal: check it "
    "with the dropout off (model.eval())."
)


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
        before = [on_host(x) for x in _state_leaves(entry)]
        many = entry.execute(copied(entry.flat_inputs(values, call.arguments)))
        single_call, single = _on_one_device(call, entry)
        flat = single.placed(single.flat_inputs(values, single_call.arguments))
        one = single.execute(flat)
        lines = list(_differences(call, entry, before, many, one))
        if lines:
            random = any(isinstance(v, nnx.RngCount) for v in entry.outputs)
            raise NotEqualError(
                _UNEQUAL.format(
                    replicas=replicas, lines=listed(lines), hint=_RANDOM if random else ""
                )
            )
    entry.program.verified = True


def _state_leaves(entry: Entry) -> list[Any]:
    return jax.tree.leaves(read_raw(entry.outputs))


def _on_one_device(call: Call, entry: Entry) -> tuple[Call, Entry]:
    mesh = replica_mesh([call.mesh.devices.flat[0]])
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
    parts = [np.asarray(part) for part in value.values]
    batch = jax.device_put(np.concatenate(parts), split_sharding(mesh))
    return PerReplica(batch, mesh, layout=Layout.JOINED)


def _differences(
    call: Call, entry: Entry, before: Sequence[Any], many: Sequence[Any], one: Sequence[Any]
) -> Any:
    """Gives a line for each output that differs by more than rounding."""
    names = entry.output_names()
    for index, (a, b) in enumerate(zip(many, one, strict=True)):
        is_state = index < entry.state_size
        if not is_state and not entry.program.plan.mirrored[index - entry.state_size]:
            continue  # a value of each replica has no counterpart on one device
        left, right = on_host(a), on_host(b)
        if left.shape != right.shape:
            yield f"{names[index]}: shape {left.shape} on the replicas, {right.shape} on one device"
        elif (line := _compared(left, right, before[index] if is_state else 0.0, call)) is not None:
            yield f"{names[index]}: {line}"


def _compared(left: Array, right: Array, old: Array | float, call: Call) -> str | None:
    """Compares what the step added (or the values, where nothing was there before)."""
    if equal_to_rounding(left, right, old):
        return None
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
