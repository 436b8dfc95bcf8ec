"""Checks that a step does not depend on the padding of a partial batch.

A step for which this is proved runs unchanged. If the proof cannot decide, results are compared with
those for other padding, and for more of it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx

from distribute_jax._errors import PaddingLeakError
from distribute_jax._mesh import explicit_transfers, program_input
from distribute_jax._messages import error_line, error_text, listed
from distribute_jax._padding import other_paddings, with_rows
from distribute_jax._values import PerReplica
from distribute_jax.program._arguments import Arguments
from distribute_jax.program._call import BoundProgram
from distribute_jax.program._compare import (
    NUDGES,
    OTHER_ORDER,
    Verdict,
    coarsest,
    compared,
    copied,
    exactly_equal,
    finite,
    largest,
    noise_of,
    nudged_outcome,
    on_host,
    real_rows,
)
from distribute_jax.program._jaxprs import RANDOM, equations, needed_only
from distribute_jax.program._options import RunOptions
from distribute_jax.program._padding_proof import padding_leaks
from distribute_jax.program._placement import Replicas
from distribute_jax.program._program import Program, build
from distribute_jax.program._result_rows import (
    Unknown,
    per_example_results,
    share_sizes,
    traced_larger,
)
from distribute_jax.program._trace import Call, Traced, state_outputs

_LEAK = """\
The padding of a partial batch {does} what the step computes:
{lines}
The batch has {real} real examples of {rows} rows; the rest is padding, which the step must ignore. {how} \
the state is as before the call.
Exclude the padding with dj.compute_average_loss(per_example_loss), or with jnp.where(mask, value, 0) where \
mask = dj.get_replica_context().batch_mask; count examples with dj.get_replica_context().real_examples. \
The result of compute_average_loss and its gradients go with all_reduce("sum", ...), and dj.Optimizer sums \
the gradients by itself; all_reduce("mean", ...) goes with a mean over the replica's rows, which is right \
for full batches only. Or feed {instead}."""

_WITHOUT_PADDING = (
    "it without padding, which is possible where all replicas have as many examples, as here: "
    'InputOptions(partial="shrink")'
)
_NO_PARTIAL = 'no partial batches: InputOptions(partial="drop")'

_PROVED = "This follows from the traced step, which has not run:"
_COMPARED = "The step was run on copies of the state with {};"

_TRACED_AGAIN = (
    "more padding and with none, for which it was traced again, and had another result (as has a step that "
    "counts its calls in Python: keep such a number in a variable)"
)

_OF_ZEROS = (
    "perhaps by a norm, sqrt, log or ratio of zeros in the padding, whose derivatives are not finite; set "
    "the padding to 1 with jnp.where(mask, value, 1) before, or exclude it only afterwards"
)

_CURE = (
    'Feed no partial batches to a step that trains: InputOptions(partial="drop"); or normalise with the '
    "running statistics: model.eval(), or BatchNorm(..., use_running_average=True)."
)

_UNCHECKED = (
    "%s met a partial batch. Two different paddings gave the same result, but run could not check that the "
    "step counts no padding: %s. To check it, run it once without randomness, after model.eval(); "
    'InputOptions(partial="drop") feeds no partial batches.'
)

_NORMS = f"""
The step also updates the statistics of a batch norm, which include padding unless it is called with mask=:
{{lines}}
{_CURE}"""

_RUNNING = (
    "%s met a partial batch, and it is not proved that padding cannot change its results: %s. It is compared "
    "with other padding now and at the 2nd, 4th, 8th, ... partial batch, which compiles it once more."
)

_ALL_ROWS = (
    "%s trains a batch norm on a batch of %s examples, which %s replicas cannot share equally: each computes "
    "on the whole batch. That is exact, in the time and memory of one device. With a batch size that divides "
    "by the number of replicas, only the last batch of an epoch is such."
)

_log = logging.getLogger("distribute_jax")


@dataclass(eq=False)
class PaddingCheck:
    """The state of the check of one program."""

    unproved: str
    """Why the step is not proved to ignore padding; empty if it is."""
    is_certain: bool = False
    """Whether padding certainly reaches a result: a batch with padding is refused."""
    batches: int = 0
    """Partial batches so far."""
    longer: Program | None = None
    """The step with more padding; None if there is none, or it is not compiled yet."""
    tried_longer: bool = False
    is_proved_but_for_norms: bool | None = None
    """Whether padding reaches results only through batch norms; None if this is not known yet."""
    has_failed: bool = False
    """Whether a comparison failed, or was interrupted: then every partial batch is compared."""

    def is_due(self) -> bool:
        """Counts a partial batch; True if the step is compared at this one."""
        self.batches += 1
        power_of_two = self.batches & (self.batches - 1) == 0
        return bool(self.unproved) and (power_of_two or self.has_failed)


def run_checked_for_leaks(
    call: Call, entry: BoundProgram, values: Sequence[Any], flat: list[Any]
) -> list[Any]:
    """Runs a program on a padded batch.

    Raises:
        PaddingLeakError: padding certainly reaches a result, or changes one.
    """
    program = entry.program
    counts = call.arguments.counts or ()
    # Statistics are not updated from shares of different lengths.
    if len(set(counts)) > 1 and (lines := _written_batch_norms(entry)):
        raise PaddingLeakError(_UNEVEN.format(counts=list(counts), lines=listed([*lines.values()])))
    if program.padding is None or program.padding.is_certain:
        program.padding = _proof(call, entry)
    check: PaddingCheck = program.padding
    if not check.is_due():
        return entry.execute(flat)
    # JAX leaves out operations for a single row, so the reason would not be one of the step.
    if check.batches == 1 and share_sizes(call)[0] > 1:
        _log.warning(_RUNNING, entry.step, check.unproved)
    with explicit_transfers():
        entry.check_readable(flat)
        outs = entry.execute(copied(flat))
        failed_before, check.has_failed = check.has_failed, True
        for changed in other_paddings([v for v in call.arguments.data if _is_padded(v)]):
            others = entry.execute(copied(entry.with_data(flat, _with_batch(call, changed))))
            _refuse_differing(call, entry, flat, outs, others, "two different paddings")
        # A number that is written into the padding is the same in every padded batch, so the padded batch
        # is compared with one without any: all rows as real ones.
        rows = np.full_like(counts, share_sizes(call)[0], np.int32)
        all_real = [*flat[:-1], program_input(rows, call.mesh)]
        _refuse_nan(call, entry, all_real, outs)
        if (longer := _with_more_padding(call, entry, values)) is not None:
            without = entry.execute(copied(all_real))
            _refuse_differing(call, entry, all_real, without, longer, _TRACED_AGAIN, nudged=True)
    check.has_failed = failed_before
    return outs


def is_proved(call: Call, entry: BoundProgram) -> bool:
    """True if it follows from the traced step that padding reaches no result."""
    if entry.program.padding is None:
        try:
            entry.program.padding = _proof(call, entry)
        except PaddingLeakError as error:
            entry.program.padding = PaddingCheck(error_text(error), is_certain=True)
    return not entry.program.padding.unproved


def is_proved_but_for_norms(call: Call, entry: BoundProgram) -> bool:
    """True if padding reaches results only through batch norms, whose statistics are of all rows.

    Then the step is exact if the padding of each replica is the real rows of the others, as in ``call``.
    """
    check: PaddingCheck = entry.program.padding
    if check.is_proved_but_for_norms is None:
        check.is_proved_but_for_norms = _is_proved_but_for_norms(call, entry)
        if check.is_proved_but_for_norms:
            counts = call.arguments.counts or ()
            _log.warning(_ALL_ROWS, entry.step, sum(counts), len(counts))
    return check.is_proved_but_for_norms


def _is_proved_but_for_norms(call: Call, entry: BoundProgram) -> bool:
    norms = [norm for norm in _written_batch_norms(entry) if norm.use_running_average is False]
    traced = entry.program.traced
    state = enumerate(state_outputs(call, traced))
    stats = [k for k, (variable, *_) in state if isinstance(variable, nnx.BatchStat)]
    has_mask = max(needed_only(traced.jaxpr.jaxpr, stats)[1], default=0) >= sum(traced.sizes[:3])
    if not norms or has_mask:
        return False
    options = RunOptions(check_sync=False, donate_state=False)
    try:
        for norm in norms:
            norm.use_running_average = True
        program = build(call, options, Replicas(call.mesh))
        return is_proved(call, BoundProgram(program, call.binding, entry.step))
    except Exception:  # the step may not accept all rows
        return False
    finally:
        for norm in norms:
            norm.use_running_average = False


def _proof(call: Call, entry: BoundProgram) -> PaddingCheck:
    """Traces a step with more rows, and returns what is proved; raises if padding reaches a result."""
    larger = traced_larger(call)
    entry.program.per_example = per_example_results(call, entry, larger)
    _check_mirrored_rows(call, entry)
    return PaddingCheck(_why_unproved(call, entry, larger))


def _why_unproved(call: Call, entry: BoundProgram, larger: Traced | str) -> str:
    """Raises if padding certainly reaches an output; else returns why it may, or ""."""
    leaks = padding_leaks(call, entry, larger)
    if any(leak.certain for _, leak in leaks):
        lines = [
            f"{name} {'depends' if leak.certain else 'may depend'} on it: {leak.where} "
            f"{'uses all rows of a share' if leak.certain else 'is not proved to exclude it'}"
            for name, leak in sorted(leaks, key=lambda item: not item[1].certain)
        ]
        raise _error(call, entry, "reaches", lines, _PROVED)
    texts = (f"{name} depends on {leak.where}" if name else leak.where for name, leak in leaks)
    return next(texts, "")


def _check_mirrored_rows(call: Call, entry: BoundProgram) -> None:
    """Refuses an array of all replicas' rows, as from all_gather: its padding cannot be cut."""
    program = entry.program
    named = zip(
        program.results.names, program.plan.mirrored, program.per_example or (), strict=True
    )
    lines = [
        f"{name} has rows of all replicas, or not in dim 0; return this replica's, and use strategy.gather"
        for name, mirrored, rows in named
        if mirrored and isinstance(rows, Unknown) and rows.is_resized
    ]
    if lines:
        how = _COMPARED.format("another batch size, where the result has another shape")
        raise _error(call, entry, "changes", lines, how)


def _refuse_differing(
    call: Call,
    entry: BoundProgram,
    flat: list[Any],
    outs: list[Any],
    others: list[Any],
    how: str,
    *,
    nudged: bool = False,
) -> None:
    """Raises if results without padding differ by more than rounding, and more than from run to run."""
    names = entry.output_names()

    def numbers(arrays: Sequence[Any]) -> list[Any]:
        return [_real(call, entry, k, arrays[k]) for k in range(len(names))]

    one, other = numbers(outs), numbers(others)
    before = dict(enumerate(map(on_host, flat[: entry.state_size])))

    def differ(k: int, near: Sequence[Any] = ()) -> bool:
        noise = noise_of(one[k], [n[k] for n in near])
        old = before.get(k, 0.0)
        verdict = compared(other[k], one[k], old, relative=OTHER_ORDER, noise=noise)
        return verdict is Verdict.UNEQUAL

    known = [k for k, x in enumerate(one) if x is not None and x.shape == other[k].shape]
    differing = list(filter(differ, known))
    if differing:
        again = numbers(entry.execute(copied(flat)))
        differing = [k for k in differing if exactly_equal(one[k], again[k])]
    near: list[list[Any]] = []
    spacing, old = coarsest(entry.program.traced.jaxpr.jaxpr), range(entry.state_size)
    for times in NUDGES if differing and nudged else ():
        near.append(numbers(nudged_outcome(entry.execute, flat, times * spacing, old)))
        if not (differing := [k for k in differing if differ(k, near)]):
            break
    if differing:
        sizes = {k: largest(finite(one[k]) - finite(other[k])) for k in differing}
        lines = [f"{names[k]} differs by up to {size:.3g}" for k, size in sizes.items()]
        raise _error(call, entry, "changes", lines, _COMPARED.format(how))


def _refuse_nan(call: Call, entry: BoundProgram, all_real: list[Any], outs: list[Any]) -> None:
    """Raises if state or a mirrored result is NaN, but not if all rows, as padding repeats them, are real."""
    is_mirrored = [True] * entry.state_size + list(entry.program.plan.mirrored)

    def nans(arrays: list[Any]) -> set[int]:
        real = ((k, _real(call, entry, k, x)) for k, x in enumerate(arrays) if is_mirrored[k])
        return {k for k, x in real if x is not None and np.isnan(x).any()}

    if bad := nans(outs):
        bad -= nans(entry.execute(copied(all_real)))
    if bad:
        lines = [f"{entry.output_names()[k]} is NaN: {_OF_ZEROS}" for k in sorted(bad)]
        raise _error(call, entry, "changes", lines, _COMPARED.format("all rows real, without NaN"))


def _with_more_padding(call: Call, entry: BoundProgram, values: Sequence[Any]) -> list[Any] | None:
    """Runs the step on all rows as real ones, and as many rows of padding."""
    rows = share_sizes(call)[0]
    counts = (rows,) * len(call.arguments.counts or ())
    twice = [*range(rows)] * 2
    data = [with_rows(v, twice, counts) for v in call.arguments.data if _is_padded(v)]
    longer = replace(call, arguments=_with_batch(call, data))
    check: PaddingCheck = entry.program.padding
    if not check.tried_longer:
        options = RunOptions(check_sync=False, donate_state=False)
        try:
            check.longer = build(longer, options, Replicas(call.mesh))
        except Exception as error:  # the step may not accept another size
            why = error_line(error)
            _log.warning(_UNCHECKED, entry.step, f"it could not be traced with more rows ({why})")
        if check.longer is not None and _drawn(check.longer) != _drawn(entry.program):
            check.longer = None
            _log.warning(_UNCHECKED, entry.step, "with more rows it draws other random numbers")
        check.tried_longer = True
    if check.longer is None:
        return None
    twin = BoundProgram(check.longer, call.binding, entry.step)
    return twin.execute(twin.flat_inputs(values, longer.arguments))


def _with_batch(call: Call, batch: Sequence[PerReplica]) -> Arguments:
    """Returns the arguments of a call with other padded batches."""
    others = iter(batch)
    data = [next(others) if _is_padded(v) else v for v in call.arguments.data]
    return call.arguments.with_data(data)


def _drawn(program: Program) -> list[Any]:
    """Returns the shapes of the random numbers of a program, which decide their values."""
    return [
        (eqn.primitive.name, *(str(v.aval) for v in eqn.outvars))
        for eqn in equations(program.traced.jaxpr.jaxpr)
        if eqn.primitive.name in (*RANDOM, "random_split")
    ]


def _is_padded(value: Any) -> bool:
    return isinstance(value, PerReplica) and value.counts is not None


def _real(call: Call, entry: BoundProgram, index: int, array: jax.Array) -> Any:
    """Returns an output without padding, on the host; None if it is not known which rows are real."""
    host, result = on_host(array), index - entry.state_size
    rows = result >= 0 and (entry.program.per_example or ())[result]
    if isinstance(rows, Unknown) or rows is False:
        return None if rows else host
    counts = call.arguments.counts or ()
    return host[: sum(counts)] if entry.program.plan.mirrored[result] else real_rows(host, counts)


def _error(
    call: Call, entry: BoundProgram, does: str, lines: list[str], how: str
) -> PaddingLeakError:
    counts = call.arguments.counts or ()
    rows = share_sizes(call)[0] * len(counts)
    norms = _written_batch_norms(entry)
    more = _NORMS.format(lines=listed([*norms.values()])) if norms else ""
    instead = _NO_PARTIAL if len(set(counts)) > 1 else _WITHOUT_PADDING
    text = _LEAK.format(
        does=does, lines=listed(lines), real=sum(counts), rows=rows, how=how, instead=instead
    )
    return PaddingLeakError(text + more)


_UNEVEN = f"""\
The step updates the statistics of a batch norm from a partial batch whose replicas have {{counts}} real \
examples:
{{lines}}
nnx.BatchNorm weighs all replicas equally, also with mask=, and a replica without examples makes NaN, so the \
statistics would not be those of one device. The state is as before the call.
{_CURE}"""


def _written_batch_norms(entry: BoundProgram) -> dict[nnx.BatchNorm, str]:
    """Returns the batch norms whose statistics a step writes, with their names and these statistics."""
    written = {id(variable) for variable in entry.outputs if isinstance(variable, nnx.BatchStat)}
    names = dict(zip(map(id, entry.binding.variables), entry.binding.names, strict=True))
    lines = {}
    for path, ref in zip(entry.binding.node_names, entry.binding.nodes, strict=True):
        if isinstance(node := ref(), nnx.BatchNorm):
            parts = [names[id(v)] for v in vars(node).values() if id(v) in written]
            if parts:
                lines[node] = f"{path} (BatchNorm): {', '.join(parts)}"
    return lines
