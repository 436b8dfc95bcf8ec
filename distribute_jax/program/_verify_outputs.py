"""What ``verify`` compares: which steps and outputs, what follows from those, copies, ON_READ variables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import jax
import jax.extend.core as jex_core
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from distribute_jax._errors import OutOfSyncError
from distribute_jax._jax_private import read_raw, write_raw
from distribute_jax._mesh import DATA, is_local, num_replicas
from distribute_jax._messages import listed
from distribute_jax._values import Layout, PerReplica
from distribute_jax.collectives._check_in_sync import out_of_sync
from distribute_jax.collectives._markers import mirrored_p
from distribute_jax.program._aggregation import Combine, keeps_own_values
from distribute_jax.program._binding import Binding
from distribute_jax.program._call import BoundProgram
from distribute_jax.program._capture import captures
from distribute_jax.program._jaxprs import equations, has_effects, line
from distribute_jax.program._plan import model_shaped
from distribute_jax.program._trace import Call, Traced
from distribute_jax.program._undo import StepCounts
from distribute_jax.variables import Variable, VariableAggregation, aggregated, on_replicas

_MOST_BYTES = 256 * 2**20
"""State of this size and more is not compared unasked."""

_DRAWS = ("random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform")
_ACTS = ("callback", "debug_print")
"""Parts of the names of primitives that draw random numbers, and of those that must not be run twice."""


def compared_outputs(call: Call, entry: BoundProgram, flat: list[Any]) -> list[int]:
    """Returns the outputs of a step that one device must leave as well; none for a step of another kind.

    They are what the step leaves behind for the next one. What it returns besides, and what metrics
    count, may be meant for each replica.
    """
    program = entry.program
    trained = [_is_trained(v) for v in entry.outputs]
    returned = [k for one in model_shaped(call, program.traced) for k in one.results]
    if not any(trained) and not returned:
        return []
    batches = [v for v in call.arguments.data if isinstance(v, PerReplica)]
    if not is_local(call.mesh) or any(v.layout is Layout.STACKED for v in batches):
        return []
    rules = set(program.plan.combine)
    statistics = any("batch_stats" in name for name in entry.output_names())
    if statistics or rules & {Combine.MEAN, Combine.FIRST}:
        return []
    if not _repeatable(entry):
        return []
    split = {id(v.global_array) for v in batches}
    if (
        sum(x.nbytes for x in flat if isinstance(x, jax.Array) and id(x) not in split)
        >= _MOST_BYTES
    ):
        return []
    rules_of = zip(program.plan.combine, _written(entry), strict=True)
    state = [k for k, (rule, v) in enumerate(rules_of) if _leaves_behind(rule, v)]
    return [*state, *(entry.state_size + k for k in returned)]


def every_output(entry: BoundProgram) -> list[int]:
    """Returns all outputs but the counts of a guard, which name the replica that was to blame."""
    written = _written(entry)
    counts = {k for k, v in enumerate(written) if isinstance(v, StepCounts)}
    return [k for k in range(len(entry.output_names())) if k not in counts]


def _is_trained(variable: nnx.Variable[Any]) -> bool:
    """Whether a variable belongs to a model or its optimizer."""
    return isinstance(variable, (nnx.Param, nnx.OptState)) or _is_optimizer_state(variable)


def _is_optimizer_state(variable: nnx.Variable[Any]) -> bool:
    # A dj.Variable hands unknown attributes on to its value, its class does not.
    return bool(getattr(type(variable), "is_optimizer_state", False))


def _leaves_behind(rule: Combine, variable: nnx.Variable[Any]) -> bool:
    """Whether a variable ends with the value that it would have on one device."""
    if _is_optimizer_state(variable):
        return True
    if isinstance(variable, Variable):
        # By another aggregation each replica's write counts, as of a number of replicas.
        return variable.aggregation is VariableAggregation.NONE and rule is Combine.MIRRORED
    counts = isinstance(variable, (nnx.metrics.MetricState, StepCounts))
    return not counts and rule is Combine.MIRRORED


def _repeatable(entry: BoundProgram) -> bool:
    acts = has_effects(entry.program.traced.jaxpr) or _has_primitive(entry, _ACTS)
    return not acts and not draws_random_numbers(entry)


def draws_random_numbers(entry: BoundProgram) -> bool:
    """Returns whether a step draws, not only advances a stream, as that of a layer without dropout does."""
    return _has_primitive(entry, _DRAWS)


def _has_primitive(entry: BoundProgram, parts: Sequence[str]) -> bool:
    names = {eqn.primitive.name for eqn in equations(entry.program.traced.jaxpr.jaxpr)}
    return any(part in name for name in names for part in parts)


def scales_by_number(call: Call, many: BoundProgram, one: BoundProgram) -> bool:
    """Returns whether a step holds the number of replicas as a Python number, and scales by it.

    On one device it divides by that number too, so the comparison shows nothing.
    """
    replicas = num_replicas(call.mesh)
    scales = (float(replicas), 1 / replicas)
    reached = [*captures(call.fn).values, *call.arguments.leaves]
    if not any(_is_one_of(value, scales) for value in reached):
        return False
    used = [{v for v in _literals(entry) if _is_one_of(v, scales)} for entry in (many, one)]
    return bool(used[0] & used[1])


def _is_one_of(value: Any, scales: tuple[float, ...]) -> bool:
    number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    return number and any(abs(float(value) - scale) < 1e-6 for scale in scales)


def _literals(entry: BoundProgram) -> Iterator[float]:
    """Returns the floating scalars among a program's constants."""
    eqns = equations(entry.program.traced.jaxpr.jaxpr)
    literals: Any = (v for eqn in eqns for v in eqn.invars if isinstance(v, jex_core.Literal))
    return (float(v.val) for v in literals if not v.aval.shape and v.aval.dtype.kind == "f")


def derived(call: Call, many: Traced, one: Traced, equal: Sequence[int]) -> list[int]:
    """Returns the outputs that follow from equal ones by the same equations in both traces.

    Then those are the comparison. Adam divides a gradient by its size, and so makes whole steps of what is
    nothing but rounding; but what it divides is state that the step leaves as well. ``equal`` are mirrored
    outputs that are equal to rounding.
    """
    if (many.sizes, many.written) != (one.sizes, one.written):
        return []
    starts, data = many.input_starts, sum(many.sizes[:2])
    # A variable of components, and a batch, are not on each replica what they are on one device.
    variables = [k for k, v in enumerate(call.binding.variables) if not keeps_own_values(v)]
    same = [k for i in variables for k in range(starts[i], starts[i + 1])]
    same += range(starts[-1], data)
    same += [data + k for k, v in enumerate(call.arguments.data) if not isinstance(v, PerReplica)]
    numbers: dict[Any, int] = {}
    outputs = [_numbered(traced, same, equal, numbers) for traced in (many, one)]
    pairs = enumerate(zip(*outputs, strict=True))
    return [k for k, (left, right) in pairs if left is not None and left == right]


def _numbered(
    traced: Traced, same: list[int], equal: Sequence[int], numbers: dict[Any, int]
) -> list[Any]:
    """Returns for each output the number of what computes it; None where it takes in something else."""
    jaxpr, literal = traced.jaxpr.jaxpr, jex_core.Literal
    known: dict[Any, Any] = {jaxpr.invars[k]: ("input", k) for k in same}
    outputs = {v: ("output", k) for k in equal if not isinstance(v := jaxpr.outvars[k], literal)}

    def meaning(var: Any) -> Any:
        if isinstance(var, literal):
            return str(var.aval), np.asarray(var.val).tobytes()
        return known.get(var)

    for eqn in jaxpr.eqns:
        operands = tuple(map(meaning, eqn.invars))
        closed = any(getattr(value, "consts", ()) for value in eqn.params.values())
        text = DATA if None in operands or eqn.effects or closed else str(eqn.params)
        if DATA not in text:  # What the replicas do together names their axis.
            number = numbers.setdefault((eqn.primitive, text, operands), len(numbers))
            known |= {var: (number, at) for at, var in enumerate(eqn.outvars)}
        known |= {var: outputs[var] for var in eqn.outvars if var in outputs}
    return list(map(meaning, jaxpr.outvars))


_DIFFER = """\
The step leaves these values, which are taken for the same on every replica, different:
{lines}
{why}
Make them the same with dj.get_replica_context().all_reduce(...), or leave them per replica. The state is \
as before the call."""

_ASSUMED = (
    "Where nothing is declared that is proved; here the step declares it, with dj.assume_mirrored at {at}, "
    "of a value that was not."
)

_UNPROVED = (
    "With RunOptions(check_sync=False) that is not proved. Otherwise the copies of the state differed before "
    "(dj.check_in_sync(model) tells), or a device is faulty."
)


def check_copies(entry: BoundProgram, outs: Sequence[jax.Array]) -> None:
    """Raises where the devices' copies of mirrored state, or of a mirrored result, differ in any bit."""
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
    """Lets ON_READ variables have one component for each replica of another mesh, for a block."""
    variables = [cast("Variable", v) for v in binding.variables if keeps_own_values(v)]
    before = read_raw(variables)
    write_raw(variables, [on_replicas(variable, mesh) for variable in variables])
    try:
        yield
    finally:
        write_raw(variables, before)


def as_read(entry: BoundProgram, outs: Sequence[jax.Array]) -> list[Any]:
    """Returns the outputs of a step with ON_READ variables as they read; None where they do not."""
    state = [
        aggregated(cast("Variable", variable), out) if keeps_own_values(variable) else out
        for variable, out in zip(_written(entry), outs, strict=False)
    ]
    return [*state, *outs[len(state) :]]


def _written(entry: BoundProgram) -> list[nnx.Variable[Any]]:
    """Returns the variable of each output that is state."""
    sizes = entry.program.traced.written_sizes
    return [v for v, size in zip(entry.outputs, sizes, strict=True) for _ in range(size)]
