"""Checks that a step does not depend on the padding of a partial batch.

What the padding proof shows costs nothing more. Where it does not decide, the step is run with other
padding, and with more of it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from distribute_jax._errors import PaddingLeakError
from distribute_jax._mesh import num_replicas, outside_mesh, split_sharding
from distribute_jax._messages import error_text, listed
from distribute_jax._padding import other_paddings
from distribute_jax._values import Layout, PerReplica
from distribute_jax.program._call import BoundProgram
from distribute_jax.program._compare import (
    copied,
    equal_to_rounding,
    exactly_equal,
    is_rounding,
    largest,
    nudged_outcomes,
    on_host,
)
from distribute_jax.program._failures import padding_not_counted
from distribute_jax.program._options import RunOptions
from distribute_jax.program._padding_proof import seen_padding
from distribute_jax.program._program import Program, build
from distribute_jax.program._result_rows import (
    Cause,
    Unknown,
    per_example_results,
    shares,
    traced_larger,
)
from distribute_jax.program._state_placement import Replicas
from distribute_jax.program._trace import Call, Traced, batch_share

REMEDIES = """\
Leave the padding out: dj.compute_average_loss(per_example_loss), or jnp.where(mask, value, 0) with \
mask = dj.get_replica_context().batch_mask, and count examples with \
dj.get_replica_context().real_examples. What compute_average_loss returns, and its gradients, are combined \
with all_reduce("sum", ...); all_reduce("mean", ...) goes with a mean over the replica's examples, as of a \
full batch only; dj.Optimizer sums the gradients by itself. \
Or feed no partial batches: InputOptions(partial="drop")."""

_LEAK = f"""\
The padding of a partial batch changes what the step computes:
{{lines}}
The batch has {{real}} real examples of {{rows}} rows; the rest is padding, which must not be seen. The \
step was run on copies of the state with {{how}}; the state is as before the call.
{REMEDIES}"""

_PROVED = f"""\
The padding of a partial batch reaches what the step computes:
{{lines}}
The batch has {{real}} real examples of {{rows}} rows; the rest is padding, which must not be seen. This was \
read off the step as it was traced, before it ran: the state is as before the call.
{REMEDIES}"""


CURE = (
    'Feed no partial batches to a step that trains: InputOptions(partial="drop"); or normalise by the '
    "running statistics: model.eval(), or BatchNorm(..., use_running_average=True)."
)


_NORMS = f"""
The step also updates the statistics of a batch norm, which sees the padding unless it is called with mask=:
{{lines}}
{CURE}"""

_RUNNING = (
    "%s met a partial batch, and it is not proved that the padding cannot reach what it computes: %s. So "
    "run compares the step with other padding, and with more of it, on copies of the state: at this "
    "partial batch, which compiles the step once more, and at the 2nd, 4th, 8th and so on. "
    'InputOptions(partial="drop") feeds no partial batches.'
)

Finding = tuple[str, str]

_log = logging.getLogger("distribute_jax")


@dataclass(eq=False)
class PaddingCheck:
    """What is known of a program and the padding of its batches."""

    unproved: str
    """Why it is not proved that no padding is seen; empty if it is."""
    batches: int = 0
    """Partial batches so far."""
    longer: Program | None = None
    """The step with more padding, once it is compiled."""
    leaked: bool = False
    """Whether the last comparison saw padding: then it is repeated until one does not."""

    def is_due(self) -> bool:
        """Counts a partial batch, and returns whether the step is compared at this one."""
        self.batches += 1
        power_of_two = self.batches & (self.batches - 1) == 0
        return bool(self.unproved) and (power_of_two or self.leaked)


def run_checked_for_leaks(
    call: Call, entry: BoundProgram, values: Sequence[Any], flat: list[Any]
) -> list[Any]:
    """Runs a program on a padded batch, if padding is proved not to be seen, or is not seen to be."""
    program = entry.program
    check_batch_norms(entry, call.arguments.counts or ())
    if program.padding is None:
        larger = traced_larger(call)
        program.per_example = per_example_results(call, entry, larger)
        _check_mirrored_rows(call, entry)
        program.padding = PaddingCheck(_why_unproved(call, entry, larger))
    check: PaddingCheck = program.padding
    if not check.is_due():
        return entry.execute(flat)
    if check.batches == 1:
        _log.warning(_RUNNING, entry.step, check.unproved)
    entry.check_readable(flat)
    outs = entry.execute(copied(flat))
    check.leaked = True
    _check_other_padding(call, entry, flat, outs)
    _check_more_padding(call, entry, values, flat, outs)
    check.leaked = False
    return outs


def _why_unproved(call: Call, entry: BoundProgram, larger: Traced | str) -> str:
    """Raises where padding surely reaches an output; else returns why that is not excluded, or ""."""
    seen = seen_padding(call, entry, larger)
    certain = [name for name, why in seen if why.certain]
    if certain:
        lines = [
            f"{name} {'depends' if why.certain else 'may depend'} on it: {why.where} "
            f"{'takes in all rows of a share' if why.certain else 'is not proved to leave it out'}"
            for name, why in sorted(seen, key=lambda item: not item[1].certain)
        ]
        raise _error(call, entry, _PROVED, lines)
    return ", ".join(
        f"{name} depends on {why.where}" if name else why.where for name, why in seen[:1]
    )


def _check_mirrored_rows(call: Call, entry: BoundProgram) -> None:
    """Refuses an array of all replicas' rows, as from all_gather: nobody could cut its padding."""
    program = entry.program
    names = program.results.names
    results = zip(names, program.plan.mirrored, program.per_example or (), strict=True)
    found = [
        (
            name,
            f"{name} holds rows of all replicas; return them per replica, and use strategy.gather",
        )
        for name, mirrored, rows in results
        if mirrored and isinstance(rows, Unknown) and rows.cause is Cause.RESIZED
    ]
    _refuse(call, entry, found, "another batch size, where the result has another shape")


def _check_other_padding(call: Call, entry: BoundProgram, flat: list[Any], outs: list[Any]) -> None:
    """Runs the program with other padding rows: no number may change by more than rounding."""
    batch = [v for v in call.arguments.data if _is_padded(v)]
    for changed in other_paddings(batch):
        other = iter(changed)
        data = [next(other) if _is_padded(v) else v for v in call.arguments.data]
        again = entry.with_data(flat, call.arguments.with_data(data))
        found = _differing(call, entry, flat, outs, entry.execute(copied(again)))
        _refuse(call, entry, found, "two different paddings")


def _differing(
    call: Call, entry: BoundProgram, flat: list[Any], outs: list[Any], others: list[Any]
) -> list[Finding]:
    """Names what differs by more than rounding, and more than from run to run."""
    before = dict(enumerate(map(on_host, flat[: entry.state_size])))
    found = _apart(
        call, entry, outs, others, lambda k, a, b: equal_to_rounding(b, a, before.get(k, 0.0))
    )
    if not found:
        return found
    again = entry.execute(copied(flat))
    noisy = dict(_apart(call, entry, outs, again, lambda _, a, b: exactly_equal(a, b)))
    return [finding for finding in found if finding[0] not in noisy]


def _check_more_padding(
    call: Call, entry: BoundProgram, values: Sequence[Any], flat: list[Any], outs: list[Any]
) -> None:
    """Runs the step with twice the rows: who counts rows, rather than examples, sees it."""
    data = [_doubled_batch(v) if _is_padded(v) else v for v in call.arguments.data]
    longer = replace(call, arguments=call.arguments.with_data(data))
    check: PaddingCheck = entry.program.padding
    first = check.batches == 1
    options = RunOptions(check_sync=False, donate_state=False)
    if check.longer is None and first:
        try:
            check.longer = build(longer, options, Replicas(call.mesh))
        except Exception as error:  # the user's code may not work at another size
            why = f"{type(error).__name__}: {error_text(error)}"
            padding_not_counted(entry.step, f"it could not be traced with more rows ({why})")
    program = check.longer
    if program is None:
        return
    if _drawn(program.traced.jaxpr.jaxpr) != _drawn(entry.program.traced.jaxpr.jaxpr):
        if first:
            padding_not_counted(entry.step, "with more rows it draws other random numbers")
        return
    twin = BoundProgram(program, call.binding, entry.step)
    others = twin.execute(twin.flat_inputs(values, longer.arguments))
    found = _differing(call, entry, flat, outs, others)
    found = _without_rounding(call, entry, flat, (outs, others), found)
    _refuse(call, entry, found, "more padding, which gave another result")


def _without_rounding(
    call: Call,
    entry: BoundProgram,
    flat: list[Any],
    two: tuple[Sequence[Any], Sequence[Any]],
    found: list[Finding],
) -> list[Finding]:
    """Leaves out what is nothing but rounding errors."""
    if not found:
        return found
    nudged = nudged_outcomes(entry, flat)
    rounding = set()
    for index, name in enumerate(entry.output_names()):
        left, right, *near = (_real(call, entry, index, outs[index]) for outs in (*two, *nudged))
        if left is not None and left.shape == right.shape and is_rounding(left, right, near):
            rounding.add(name)
    return [finding for finding in found if finding[0] not in rounding]


_DRAWING = {
    "random_bits", "random_split", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform",
}  # fmt: skip


def _drawn(jaxpr: jex_core.Jaxpr) -> list[Any]:
    """Returns the shapes of the random numbers of a program: where they stay, the numbers do."""
    own = [
        (eqn.primitive.name, *(str(v.aval) for v in eqn.outvars))
        for eqn in jaxpr.eqns
        if eqn.primitive.name in _DRAWING
    ]
    return own + [one for inner in jex_core.subjaxprs(jaxpr) for one in _drawn(inner)]


def _is_padded(value: Any) -> bool:
    return isinstance(value, PerReplica) and value.counts is not None


def _doubled_batch(value: PerReplica) -> PerReplica:
    with outside_mesh():
        array = _doubling(value.mesh)(value.global_array)
    return PerReplica(array, value.mesh, layout=Layout.JOINED, counts=value.counts)


@functools.lru_cache(maxsize=16)
def _doubling(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    def double(array: jax.Array) -> jax.Array:
        parts = array.reshape(num_replicas(mesh), -1, *array.shape[1:])
        return jnp.concatenate([parts, parts], axis=1).reshape(-1, *array.shape[1:])

    return jax.jit(double, out_shardings=split_sharding(mesh))


def _apart(
    call: Call,
    entry: BoundProgram,
    one: Sequence[Any],
    other: Sequence[Any],
    equal: Callable[[int, Any, Any], bool],
) -> list[Finding]:
    """Names the outputs of which the real numbers are not equal."""
    found = []
    for index, name in enumerate(entry.output_names()):
        left, right = (_real(call, entry, index, outs[index]) for outs in (one, other))
        if left is not None and left.shape == right.shape and not equal(index, left, right):
            found.append((name, f"{name} differs by up to {largest(left - right):.3g}"))
    return found


def _real(call: Call, entry: BoundProgram, index: int, array: jax.Array) -> Any:
    """Returns the real part of an output on the host; None where it is not known."""
    host = on_host(array)
    result = index - entry.state_size
    if result < 0:
        return host
    rows = (entry.program.per_example or ())[result]
    if isinstance(rows, Unknown):
        return None
    counts = call.arguments.counts or ()
    if rows is False:
        return host
    if entry.program.plan.mirrored[result]:
        return host[: sum(counts)]
    return np.concatenate([part[:count] for part, count in zip(host, counts, strict=True)])


def _refuse(call: Call, entry: BoundProgram, found: Sequence[Finding], how: str) -> None:
    if found:
        raise _error(call, entry, _LEAK, [line for _, line in found], how)


def _error(
    call: Call, entry: BoundProgram, text: str, lines: list[str], how: str = ""
) -> PaddingLeakError:
    counts = call.arguments.counts or ()
    rows = batch_share(call.arguments, shares(call)) * len(counts)
    norms = written_batch_norms(entry)
    more = _NORMS.format(lines=listed(norms)) if norms else ""
    return PaddingLeakError(
        text.format(lines=listed(lines), real=sum(counts), rows=rows, how=how) + more
    )


_UNEVEN = """\
The step updates the statistics of a batch norm from a partial batch whose replicas have {counts} real \
examples:
{lines}
nnx.BatchNorm averages the replicas as if each had the same number, also with mask=, and gives NaN where one \
has none, so the statistics would not be those of one device. The state is as before the call.
{cure}"""


def check_batch_norms(entry: BoundProgram, counts: Sequence[int]) -> None:
    """Refuses to update statistics from shares of different length.

    Raises:
        PaddingLeakError: names each ``nnx.BatchNorm`` whose statistics the step writes.
    """
    if len(set(counts)) == 1:
        return
    lines = written_batch_norms(entry)
    if lines:
        raise PaddingLeakError(_UNEVEN.format(counts=list(counts), lines=listed(lines), cure=CURE))


def written_batch_norms(entry: BoundProgram) -> list[str]:
    """Names the batch norms whose statistics a step writes, and these statistics."""
    written = {id(variable) for variable in entry.outputs if isinstance(variable, nnx.BatchStat)}
    if not written:
        return []
    names = dict(zip(map(id, entry.binding.variables), entry.binding.names, strict=True))
    found = []
    for path, ref in zip(entry.binding.node_names, entry.binding.nodes, strict=True):
        node = ref()
        parts = [v for v in vars(node).values() if id(v) in written] if _is_norm(node) else []
        if parts:
            statistics = ", ".join(names[id(part)] for part in parts)
            found.append(f"{path} (BatchNorm): {statistics}")
    return found


def _is_norm(node: object) -> bool:
    return isinstance(node, nnx.BatchNorm)
