"""The outputs that ``verify`` compares, those derived from others, copies of them, and their warnings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from distribute_jax._errors import ClusterError, DeadlineExceededError, OutOfSyncError, log_once
from distribute_jax._jax_private import read_raw, write_raw
from distribute_jax._mesh import DATA, num_replicas
from distribute_jax._messages import listed
from distribute_jax._values import PerReplica
from distribute_jax.collectives._check_in_sync import out_of_sync
from distribute_jax.collectives._markers import mirrored_p
from distribute_jax.program._aggregation import Combine, keeps_own_values
from distribute_jax.program._binding import Binding, captured_numbers, swapped_by_one
from distribute_jax.program._call import BoundProgram
from distribute_jax.program._compare import on_host
from distribute_jax.program._jaxprs import (
    equations,
    has_effects,
    is_literal,
    line,
    needed_only,
)
from distribute_jax.program._lowerings import returned_arguments
from distribute_jax.program._notices import may_be_compared
from distribute_jax.program._program import Program
from distribute_jax.program._skipped_steps import StepCounts
from distribute_jax.program._trace import Call, Traced
from distribute_jax.program._verify_runs import with_fixed_draws
from distribute_jax.variables import Variable, VariableAggregation, aggregated, on_replicas


def compared_outputs(call: Call, entry: BoundProgram) -> list[int]:
    """Returns the outputs that ``verify="auto"`` compares; none for a step that it does not compare.

    These are the state for the next step. Other results, and metrics, may be meant for each replica.
    """
    program, plan = entry.program, entry.program.plan
    rules = zip(plan.combine, _written(entry), strict=True)
    state = [k for k, (rule, v) in enumerate(rules) if _equals_one_device(rule, v)]
    returned = [k for k in next_values(call, program) if k not in state]
    kinds = nnx.Param, nnx.OptState
    trained = any(isinstance(v, kinds) or _is_optimizer_state(v) for v in entry.outputs)
    if not (trained or returned or _reads_batch(call, program.traced, state)):
        return []
    jaxpr = with_fixed_draws(call, program.traced).jaxpr
    comparable = not has_effects(jaxpr) and may_be_compared(call, program.traced, jaxpr)
    return [*state, *returned] if comparable else []


def keeps_statistics(entry: BoundProgram) -> bool:
    """True if a step may compute statistics of each replica's share, as an unsynchronised batch norm does."""
    is_averaged = not {Combine.MEAN, Combine.FIRST}.isdisjoint(entry.program.plan.combine)
    return is_averaged or any("batch_stats" in name for name in entry.output_names())


def next_values(call: Call, program: Program) -> dict[int, int]:
    """Returns the outputs that are the new values of arguments, each with the input that has the old one.

    Other arrays than those of a result with the structure of an argument are such if they are equal on all
    replicas, and computed from the batch and from an array of the same shape and dtype.
    """
    traced, start = program.traced, sum(program.traced.sizes[:2])
    pairs = dict(returned_arguments(call, traced))
    ins, outs = traced.jaxpr.jaxpr.invars, traced.jaxpr.jaxpr.outvars
    batch, end = _batch_inputs(call, traced), start + len(call.arguments.data)
    old = [i for i in range(traced.sizes[0], end) if i not in batch]
    for k, mirrored in enumerate(program.plan.mirrored, len(traced.old_inputs)):
        is_new = mirrored and k not in pairs and outs[k].aval.shape
        same = [i for i in old if is_new and _aval(ins[i]) == _aval(outs[k])]
        reads = needed_only(traced.jaxpr.jaxpr, [k])[1] if same else set()
        free = (i for i in same if i in reads and i not in pairs.values())
        if (i := next(free, None)) is not None and not batch.isdisjoint(reads):
            pairs[k] = i
    return pairs


def _aval(var: Any) -> tuple[Any, Any]:
    return var.aval.shape, var.aval.dtype


def _batch_inputs(call: Call, traced: Traced) -> set[int]:
    """Returns the inputs that are distributed batches."""
    data = enumerate(call.arguments.data, sum(traced.sizes[:2]))
    return {i for i, value in data if isinstance(value, PerReplica)}


def _reads_batch(call: Call, traced: Traced, outputs: Sequence[int]) -> bool:
    """True if an output is computed from a distributed batch."""
    return not _batch_inputs(call, traced).isdisjoint(needed_only(traced.jaxpr.jaxpr, outputs)[1])


def every_output(entry: BoundProgram) -> list[int]:
    """Returns all outputs except the counts of a ``Guard``, which name one replica."""
    counts = {k for k, v in enumerate(_written(entry)) if isinstance(v, StepCounts)}
    return [k for k in range(len(entry.output_names())) if k not in counts]


def _is_optimizer_state(variable: nnx.Variable[Any]) -> bool:
    # A dj.Variable forwards unknown attributes to its value; its class does not.
    return bool(getattr(type(variable), "is_optimizer_state", False))


def _equals_one_device(rule: Combine, variable: nnx.Variable[Any]) -> bool:
    """True if a variable must end with the value that it would have on one device."""
    if _is_optimizer_state(variable):
        return True
    if isinstance(variable, Variable):
        # With another aggregation the value depends on the number of replicas.
        return variable.aggregation is VariableAggregation.NONE and rule is Combine.MIRRORED
    counts = isinstance(variable, (nnx.metrics.MetricState, StepCounts))
    return not counts and rule is Combine.MIRRORED


def scales_by_number(call: Call, entry: BoundProgram, compared_again: Callable[[], Any]) -> bool:
    """True if a step may scale by the number of replicas as a Python number that it captures.

    Then the step on one device is equal once that number is 1 there.
    """
    replicas = num_replicas(call.mesh)

    def is_scale(value: Any) -> bool:
        number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
        return number and any(abs(float(value) - s) < 1e-6 for s in (replicas, 1 / replicas))

    found = captured_numbers(call.fn, is_scale)
    for ones in [*([one] for one in found[:4]), *[found] * (len(found) > 1)]:
        programs = entry.program.compared
        programs.clear()  # the step is traced for one device again
        try:
            with swapped_by_one([place for _, place in ones]):
                lines, _ = compared_again().differences()
            if not lines:
                names = " and ".join(name for name, _ in ones)
                log_once(_NUMBER, entry.step, names, replicas, about=(entry.step, names))
                return True
        except (ClusterError, DeadlineExceededError):
            raise
        except Exception as error:  # as if the number is a size
            logging.getLogger("distribute_jax").debug("%s is not compared: %r", entry.step, error)
        finally:
            programs.clear()
    return False


_NUMBER = (
    "%s equals one device only if %s is the number of replicas, %s. Read that number from "
    "dj.get_replica_context().num_replicas_in_sync, so that the step can be compared."
)


def derived(call: Call, many: Traced, one: Traced, equal: Sequence[int]) -> list[int]:
    """Returns the outputs that both traces compute from ``equal`` outputs by the same equations.

    To compare the equal ones, mirrored outputs that agree up to rounding, is enough. Adam divides a gradient
    by its size, which turns mere rounding into steps of full size; but its moments are outputs as well.
    """
    if (many.sizes, many.written) != (one.sizes, one.written):
        return []
    starts, data = many.input_starts, sum(many.sizes[:2])
    # Variables with components, and batches, differ between a replica and one device.
    variables = [k for k, v in enumerate(call.binding.variables) if not keeps_own_values(v)]
    same = [k for i in variables for k in range(starts[i], starts[i + 1])]
    same += range(starts[-1], data)
    same += [data + k for k, v in enumerate(call.arguments.data) if not isinstance(v, PerReplica)]
    numbers: dict[Any, int] = {}
    pairs = zip(*(_numbered(traced, same, equal, numbers) for traced in (many, one)), strict=True)
    return [k for k, (left, right) in enumerate(pairs) if left is not None and left == right]


def _numbered(
    traced: Traced, same: list[int], equal: Sequence[int], numbers: dict[Any, int]
) -> list[Any]:
    """Numbers the outputs by the expression that computes them; None if it has other inputs.

    Equal expressions get equal numbers, also in several traces that share ``numbers``.
    """
    jaxpr = traced.jaxpr.jaxpr
    known: dict[Any, Any] = {jaxpr.invars[k]: ("input", k) for k in same}
    outputs = {v: ("output", k) for k in equal if not is_literal(v := jaxpr.outvars[k])}

    def read(var: Any) -> Any:
        if is_literal(var):
            return str(var.aval), np.asarray(var.val).tobytes()
        return known.get(var)

    for eqn in jaxpr.eqns:
        operands = tuple(map(read, eqn.invars))
        closed = any(getattr(value, "consts", ()) for value in eqn.params.values())
        text = DATA if None in operands or eqn.effects or closed else str(eqn.params)
        if DATA not in text:  # no collective, which would name the axis
            number = numbers.setdefault((eqn.primitive, text, operands), len(numbers))
            known |= {var: (number, at) for at, var in enumerate(eqn.outvars)}
        known |= {var: outputs[var] for var in eqn.outvars if var in outputs}
    return list(map(read, jaxpr.outvars))


_DIFFER = """\
These values must be equal on all replicas, and differ after the step:
{lines}
{why}
Make them equal with dj.get_replica_context().all_reduce(...), or leave them per replica. The state is as \
before the call."""

_ASSUMED = "They are not proved to be equal: the step declares it, with dj.assume_mirrored at {at}."

_UNPROVED = (
    "RunOptions(check_sync=False) does not prove it. Without that option, the copies of the state differed "
    "before the step (see dj.check_in_sync(model)), or a device is faulty."
)


def check_copies(entry: BoundProgram, outs: Sequence[jax.Array]) -> None:
    """Raises if the devices' copies of mirrored state, or of a mirrored result, differ in any bit."""
    mirrored = entry.program.step.shardings.mirrored
    named = zip(entry.output_names(), outs, mirrored, strict=False)  # the token has no name
    lines = out_of_sync([(name, array) for name, array, same in named if same])
    if lines:
        eqns = equations(entry.program.traced.jaxpr.jaxpr)
        at = dict.fromkeys(line(eqn) for eqn in eqns if eqn.primitive is mirrored_p)
        why = _ASSUMED.format(at=" and ".join(at)) if at else _UNPROVED
        raise OutOfSyncError(_DIFFER.format(lines=listed(lines), why=why))


@contextmanager
def components_on(binding: Binding, mesh: Mesh) -> Iterator[None]:
    """Within the block, ON_READ variables have one component for each replica of another mesh."""
    variables = [cast("Variable", v) for v in binding.variables if keeps_own_values(v)]
    before = read_raw(variables)
    write_raw(variables, [on_replicas(variable, mesh) for variable in variables])
    try:
        yield
    finally:
        write_raw(variables, before)


def as_read(entry: BoundProgram, outs: Sequence[jax.Array]) -> list[Any]:
    """Returns the outputs with ON_READ variables aggregated; None for those without an aggregation."""
    state = [
        aggregated(cast("Variable", variable), out) if keeps_own_values(variable) else out
        for variable, out in zip(_written(entry), outs, strict=False)
    ]
    return [*state, *outs[len(state) :]]


def _written(entry: BoundProgram) -> list[nnx.Variable[Any]]:
    """Returns the variable of each output that is state."""
    traced, variables = entry.program.traced, entry.binding.variables
    return [variables[i] for i in traced.written for _ in traced.inputs_of(i)]


_MEAN = (
    "%s returned %s, a mean over the examples of each replica. The results of the replicas are summed, so "
    "it is reported %s times too large: return this replica's part, dj.compute_average_loss(values) of one "
    "value for each example."
)

_NO_PART = (
    "%s returned %s, which is reported as %.4g, the sum of what differs between replicas, and not as on one "
    "device, %.4g: return this replica's part of a mean, dj.compute_average_loss(values) of one value for "
    "each example, or a value that is equal on all replicas: a maximum is that of "
    "dj.get_replica_context().all_gather(values), a count of examples its real_examples."
)


def log_parts(entry: BoundProgram, many: Sequence[Any], one: Sequence[Any]) -> None:
    """Logs once each scalar result, of which ``fit`` takes the sum, that is a mean or another number."""
    replicas = num_replicas(entry.program.mesh)
    for k, name in enumerate(entry.output_names()):
        is_equal = not many[k].shape  # on all replicas, and reported as it is
        is_summed = many[k].shape[:1] == (replicas,)
        if k < entry.state_size or one[k].shape or not (is_equal or is_summed):
            continue
        each, alone = (np.asarray(on_host(value), np.float64) for value in (many[k], one[k]))
        step, total = entry.step, each.sum()
        if is_summed and alone and np.isclose(each.mean(), alone, 1e-3):
            log_once(_MEAN, step, name, replicas, about=(step, name))
        elif abs(total - alone) > 0.02 * abs(each).sum():  # more than the rounding of bfloat16
            log_once(_NO_PART, step, name, total, alone, about=(step, name))
