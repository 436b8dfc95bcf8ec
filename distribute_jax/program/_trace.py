"""Traces a step of one replica into a jaxpr, in the context in which ``shard_map`` will run it.

If a step creates variables and keeps them, the first trace returns their first values instead of the step's
results. They are computed on the replicas and stored, and the step is traced again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate, count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from distribute_jax import _frames
from distribute_jax._errors import ArgumentError, StaleCaptureError, UnsupportedError, log_once
from distribute_jax._jax_private import adopt, read_raw, write_raw
from distribute_jax._mesh import DATA, inside_replica, is_local, num_replicas
from distribute_jax._messages import is_key, leaf_text, listed
from distribute_jax._values import Layout, PerReplica
from distribute_jax.program._aggregation import is_unchanged, keeps_own_values
from distribute_jax.program._arguments import Arguments, is_one_leaf
from distribute_jax.program._binding import Binding, Rebuilt, swapped_arrays, swapped_state
from distribute_jax.program._jaxprs import ClosedJaxpr, RenamedAxis, bodies, open_jaxpr
from distribute_jax.program._replica_context import ReplicaContext, per_replica_keys
from distribute_jax.program._results import Results, flatten_results
from distribute_jax.program._trace_errors import explain_errors, step_name
from distribute_jax.variables import record_created

_RESIZED = """\
The step changes the number of arrays of the variable {name} from {old} to {new}, and a compiled step keeps \
it. Give the variable all its arrays before the first step, as zeros, or return them from the step."""


class InputSizes(NamedTuple):
    """Numbers of the flat inputs of a step, which come in this order."""

    state: int
    """Arrays of variables."""
    arrays: int
    """Captured arrays."""
    data: int
    counts: int
    """1 if a batch is padded."""

    @property
    def first_data(self) -> int:
        """The index of the first input that is data."""
        return self.state + self.arrays


@dataclass(frozen=True, eq=False)
class Traced:
    """A step as a jaxpr over flat arrays, and the meaning of its inputs and outputs."""

    jaxpr: ClosedJaxpr
    """Its inputs are the raw values of the variables, captured arrays, data, and maybe the counts."""
    written: tuple[int, ...]
    """Indices of the variables that the step changed; their new values are the first outputs.

    A new value has as many arrays as the old one, of which shapes and dtypes may differ.
    """
    results: Results
    """What the function returned; its arrays are the remaining outputs."""
    input_names: tuple[str, ...]
    """The origin of each flat input, in the user's words."""
    sizes: InputSizes
    written_trees: tuple[Any, ...]
    """Structure of the new value of each written variable."""
    constant_arrays: frozenset[int]
    """Captured arrays that became constants of the jaxpr, since their place cannot be assigned."""
    input_starts: tuple[int, ...]
    """Index of the first flat input of each variable, and one past the last."""
    drawn: tuple[tuple[tuple[int, ...], bool], ...] | None = None
    """For ``verify``: () if every mask of dropout is fixed; if their numbers are, the shape of each draw, and
    whether it may differ between the replicas."""
    created: tuple[nnx.Variable[Any], ...] = ()
    """Variables that the step created and kept; the results are then only their first values."""

    def inputs_of(self, variable: int) -> range:
        """Returns the flat inputs of a variable, by its index."""
        return range(self.input_starts[variable], self.input_starts[variable + 1])

    @property
    def old_inputs(self) -> list[int]:
        """For each state output the flat input with the old value."""
        return [k for i in self.written for k in self.inputs_of(i)]

    def keeps_types(self) -> bool:
        """True if the new state has the shapes and dtypes of the old."""
        body = self.jaxpr.jaxpr
        return all(
            (body.invars[old].aval.shape, body.invars[old].aval.dtype)
            == (new.aval.shape, new.aval.dtype)
            for old, new in zip(self.old_inputs, body.outvars, strict=False)
        )


@dataclass(frozen=True, eq=False)
class Call:
    """A function to trace, with its binding and its arguments."""

    fn: Callable[..., Any]
    binding: Binding
    arguments: Arguments
    strategy: Any
    mesh: Mesh
    runs_once: bool = False
    """True if the program runs only once, to be compared with, so that compile time counts."""

    def share_of(self, value: Any) -> Any:
        """Returns the abstract value of a data leaf as one replica sees it."""
        if isinstance(value, PerReplica):
            return jax.ShapeDtypeStruct(value.part_shape, value.dtype)
        return abstract(value)


class StandIn:
    """Stands in for a strategy while its step is traced for another number of replicas."""

    def __init__(self, strategy: Any, replicas: int) -> None:
        self.stands_for = strategy
        self.num_replicas_in_sync = replicas

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stands_for, name)


def abstract(value: Any) -> Any:
    """Replaces the arrays of a pytree by their shape, dtype and weak type; keeps Python numbers."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, (bool, int, float, complex)):
            return leaf
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        dtype = leaf.dtype if is_key else jax.dtypes.canonicalize_dtype(leaf.dtype)
        weak = getattr(leaf, "weak_type", False)
        return jax.ShapeDtypeStruct(jnp.shape(leaf), dtype, weak_type=weak)

    return jax.tree.map(one, value)


def global_value(variable: nnx.Variable[Any], mesh: Mesh) -> Any:
    """Returns the abstract raw value of a variable on all replicas of a mesh."""
    raw = abstract(variable.get_raw_value())
    if not keeps_own_values(variable):
        return raw
    return jax.ShapeDtypeStruct((num_replicas(mesh), *raw.shape[1:]), raw.dtype)


def value_on_replica(variable: nnx.Variable[Any]) -> Any:
    """Returns the abstract raw value of a variable as one replica sees it."""
    raw = abstract(variable.get_raw_value())
    return jax.ShapeDtypeStruct(raw.shape[1:], raw.dtype) if keeps_own_values(variable) else raw


# JAX caches the trace of a function that a step calls, such as a jit. The replica context, which the function
# may read, is Python state, so each trace has a number in JAX's cache key: nothing is reused from another.
_trace_number = jax.make_user_context()
_trace_numbers = count()


def state_outputs(
    call: Call, traced: Traced
) -> Iterator[tuple[nnx.Variable[Any], str, int, range]]:
    """Yields for each state output its variable, its name, its old input and all inputs of the variable."""
    for index in traced.written:
        inputs = traced.inputs_of(index)
        for old in inputs:
            yield call.binding.variables[index], call.binding.names[index], old, inputs


SIDE_EFFECTS = ("callback", "debug_print")
"""Parts of the names of primitives that must not run twice."""

PRINTS = frozenset({"debug_callback", "debug_print"})
"""Those that only look at values: a step computes the same without them."""

_MAX_COMPARED_BYTES = 256 * 2**20


def is_comparable_size(call: Call, traced: Traced) -> bool:
    """False for a step too large for ``verify="auto"``: its state, or its batch on several processes."""
    is_batch = [isinstance(value, PerReplica) for value in call.arguments.data]
    start, state, batch = traced.sizes.first_data, 0, 0
    for k, aval in enumerate(traced.jaxpr.in_avals):
        size = math.prod(aval.shape) * aval.dtype.itemsize
        if 0 <= k - start < len(is_batch) and is_batch[k - start]:
            batch += size * num_replicas(call.mesh)
        else:
            state += size
    is_here = isinstance(call.mesh, AbstractMesh) or is_local(call.mesh)  # a plan is for no devices
    return max(state, 0 if is_here else batch) < _MAX_COMPARED_BYTES


def trace(call: Call, data: Sequence[Any] | None = None) -> Traced:
    """Traces a step for one replica of the mesh, with the shares of the call or other abstract ``data``."""
    binding, masked = call.binding, call.arguments.counts is not None
    raws = [value_on_replica(variable) for variable in binding.variables]
    arrays = binding.captured_arrays()
    shares = list(data) if data is not None else [call.share_of(v) for v in call.arguments.data]
    counts = [jax.ShapeDtypeStruct((num_replicas(call.mesh),), jnp.int32)] if masked else []
    recorder = _Recorder(call)
    # An array that is deleted meanwhile drops out: a new one may get its id.
    before = WeakValueDictionary((id(array), array) for array in jax.live_arrays())
    inside = jax.sharding.use_abstract_mesh(inside_replica(call.mesh))
    name = getattr(call.strategy, "axis_name", DATA)
    axes = [(axis, num_replicas(call.mesh)) for axis in dict.fromkeys((DATA, name))]
    with inside, explain_errors(call), _trace_number(next(_trace_numbers)):
        jaxpr = jax.make_jaxpr(recorder.step, axis_env=axes)(
            raws, [abstract(array) for array in arrays], shares, counts
        )
    if name != DATA:
        jaxpr = RenamedAxis(name, DATA).body(jaxpr)
    if recorder.rebuilt:
        jaxpr = recorder.without_rebuilt(jaxpr, len(jax.tree.leaves(raws)))
    _check_constants(jaxpr, arrays, before)
    return recorder.traced(jaxpr, (raws, arrays, shares, counts))


@dataclass(eq=False)
class _Recorder:
    """Runs the user's function under the trace, and records what it read, wrote and returned."""

    call: Call
    written: tuple[int, ...] = ()
    written_trees: tuple[Any, ...] = ()
    results: Results | None = None
    created: tuple[nnx.Variable[Any], ...] = ()
    rebuilt: list[Rebuilt] = field(default_factory=list)
    _array_at: dict[int, int] = field(default_factory=dict)

    def step(self, raws: list[Any], arrays: list[Any], data: list[Any], counts: list[Any]) -> Any:
        """The function that is traced: swaps tracers in, calls ``fn``, and returns new state and results."""
        call, binding = self.call, self.call.binding
        share = batch_share(call.arguments, data) if call.arguments.has_batch else None
        context = ReplicaContext(call.strategy, share=share, counts=counts[0] if counts else None)
        nodes = [node for ref in binding.nodes if (node := ref()) is not None]
        with ExitStack() as stack:
            stack.enter_context(swapped_arrays(binding, arrays))
            stack.enter_context(swapped_state(binding.variables, nodes, raws, self.rebuilt))
            stack.enter_context(_frames.frame(call.strategy, context))
            before = per_replica_keys(binding.variables, nodes, num_replicas(call.mesh))
            created = stack.enter_context(record_created())
            attributes = [set(vars(node)) for node in nodes]
            values, arguments = iter(data), call.arguments
            kinds = zip(arguments.leaves, arguments.kinds, strict=True)
            args, kwargs = arguments.unflatten(
                next(values) if kind == "data" else leaf for leaf, kind in kinds
            )
            result = call.fn(*args, **kwargs)
            self._log_lost_changes(data, (args, kwargs), result)
            if surviving := surviving_variables(call, created):
                return self._first_values(surviving)
            now = read_raw(binding.variables)
            removed = self._removed(nodes, attributes)
            self.written = tuple(
                i
                for i, (new, old) in enumerate(zip(now, before, strict=True))
                # An update under a cond makes the MaskedNode of optax, which has no arrays, again.
                if new is not old
                and i not in removed
                and (jax.tree.leaves((new, old)) or new != old)
            )
            new_values = [jax.tree.leaves(now[i]) for i in self.written]
            self.results, arrays_out = flatten_results(result, binding, nodes)
            self.written_trees = tuple(jax.tree.structure(now[i]) for i in self.written)
            for i, new in zip(self.written, new_values, strict=True):
                if len(new) != (old := len(jax.tree.leaves(before[i]))):
                    text = _RESIZED.format(name=binding.names[i], old=old, new=len(new))
                    raise UnsupportedError(text)
        self._array_at = {id(array): i for i, array in enumerate(arrays)}
        outs = [leaf for leaves in new_values for leaf in leaves] + arrays_out
        return outs + [array.new for array in self.rebuilt]

    def _removed(self, nodes: list[Any], attributes: list[set[str]]) -> set[int]:
        """Returns the variables that the step removed from their module, as nnx.pop does."""
        if all(had <= set(vars(node)) for node, had in zip(nodes, attributes, strict=True)):
            return set()
        reached = set(map(id, Binding(self.call.fn, self.call.arguments).variables))
        variables = self.call.binding.variables
        return {i for i, variable in enumerate(variables) if id(variable) not in reached}

    def _first_values(self, surviving: list[tuple[Any, Any]]) -> list[Any]:
        """Returns the first values of new variables, with which this trace ends."""
        self.created = tuple(variable for variable, _ in surviving)
        arrays = [raw for _, raw in surviving]
        # The user's objects must not keep tracers.
        write_raw(self.created, [abstract(raw) for raw in arrays])
        self.results, arrays = flatten_results(arrays, self.call.binding, [])
        return arrays

    def without_rebuilt(self, jaxpr: ClosedJaxpr, first_array: int) -> ClosedJaxpr:
        """Proves that the last outputs are unchanged captured arrays, and removes them."""
        body = jaxpr.jaxpr
        first = len(body.outvars) - len(self.rebuilt)
        for output, array in enumerate(self.rebuilt, first):
            at = self._array_at.get(id(array.old))
            if at is None or not is_unchanged(body, output, first_array + at):
                raise array.assigned_error()
        return ClosedJaxpr(body.replace(outvars=body.outvars[:first]), jaxpr.consts)

    def _log_lost_changes(self, data: list[Any], args: Any, result: Any) -> None:
        """Logs once which values the step stored in a container among its arguments and did not return."""
        arguments = self.call.arguments
        leaves, treedef = jax.tree.flatten(args, is_leaf=is_one_leaf)
        if treedef != arguments.treedef:
            return
        returned = set(map(id, jax.tree.leaves(result)))
        now = [leaf for leaf, kind in zip(leaves, arguments.kinds, strict=True) if kind == "data"]
        places = zip(arguments.names_of("data"), arguments.data, data, now, strict=True)
        lost = [
            name
            for name, argument, old, new in places
            if new is not old and id(new) not in returned and not isinstance(argument, PerReplica)
        ]
        if lost:
            step = step_name(self.call.fn)
            log_once(_LOST, step, ", ".join(lost[:4]), about=(step, *lost))

    def traced(self, jaxpr: ClosedJaxpr, inputs: tuple[list[Any], ...]) -> Traced:
        binding, arguments = self.call.binding, self.call.arguments
        assert self.results is not None
        raws, arrays, shares, counts = inputs
        constants = set(map(id, jaxpr.consts))
        variable_names = [
            name + jax.tree_util.keystr(path)
            for name, raw in zip(binding.names, raws, strict=True)
            for path, _ in jax.tree_util.tree_leaves_with_path(raw)
        ]
        names = [
            *variable_names,
            *(name for name, _, _ in binding.arrays),
            *arguments.names_of("data"),
        ]
        return Traced(
            jaxpr=jaxpr,
            written=self.written,
            results=self.results,
            input_names=(*names, *("the batch mask" for _ in counts)),
            sizes=InputSizes(len(variable_names), len(arrays), len(shares), len(counts)),
            written_trees=self.written_trees,
            constant_arrays=frozenset(i for i, a in enumerate(arrays) if id(a) in constants),
            input_starts=tuple(accumulate((len(jax.tree.leaves(raw)) for raw in raws), initial=0)),
            created=self.created,
        )


def batch_share(arguments: Arguments, data: Sequence[Any]) -> int:
    """Returns the number of rows in one replica's share of the batch."""
    for value, leaf in zip(arguments.data, data, strict=True):
        if isinstance(value, PerReplica) and value.layout is Layout.JOINED:
            return int(leaf.shape[0])
    raise AssertionError("no batch among the arguments")


def surviving_variables(call: Call, created: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Returns the variables created in a step that outlive it, with their first values."""
    if not created:
        return []
    reached = {id(variable) for variable in Binding(call.fn, call.arguments).variables}
    return [(variable, raw) for variable, raw in created if id(variable) in reached]


def store_first_values(variables: Sequence[Any], values: Sequence[Any]) -> None:
    """Stores the first values of variables, as a program returned them."""
    adopt(variables)
    pairs = zip(variables, values, strict=True)
    write_raw(variables, [_raw(variable, value) for variable, value in pairs])


_CREATED_AGAIN = """\
The step creates the variables {names} each time that it is traced. A step may create variables in its \
first run only: create them once, as with `if self.v is None: self.v = dj.Variable(0.0)`, or before, under \
strategy.scope()."""


def created_again_error(created: Sequence[Any]) -> ArgumentError:
    """Returns the error of a step that creates variables in its second trace as well."""
    return ArgumentError(_CREATED_AGAIN.format(names=", ".join(str(v.name) for v in created)))


def _raw(variable: Any, value: Any) -> Any:
    if isinstance(value, PerReplica):
        return value.global_array
    return value[None] if keeps_own_values(variable) else value  # one replica's only component


def constants(jaxpr: ClosedJaxpr) -> Iterator[Any]:
    """Yields every constant of a program, at any depth."""
    yield from getattr(jaxpr, "consts", ())
    for eqn in open_jaxpr(jaxpr).eqns:
        for body in bodies(eqn.params.values()):
            yield from constants(body)
        for atom in eqn.invars:
            if isinstance(atom, jex_core.Literal):
                yield atom.val


_LOST = (
    "%s changes %s, which it got as an argument, and does not return it, so that the change is lost, as "
    "under jax.jit. Return the new value."
)


_OLD_TRACERS = """\
The step uses arrays that were made in an earlier trace of it, and have no numbers:
{arrays}
Something kept them, such as functools.cache of a function that makes arrays. Make them before run, or with \
NumPy."""


def _check_constants(
    jaxpr: ClosedJaxpr, inputs: Sequence[Any], before: Mapping[int, jax.Array]
) -> None:
    """Raises if an array from ``before`` the trace would become a constant of the program.

    Arrays that were created during the trace are true constants; the ``inputs`` are captured arrays.
    """
    if old := [leaf_text(value) for value in jaxpr.consts if isinstance(value, jax.core.Tracer)]:
        raise StaleCaptureError(_OLD_TRACERS.format(arrays=listed(old)))
    replaced = {id(constant) for constant in jaxpr.consts} & {id(array) for array in inputs}
    stale = [
        leaf_text(constant)
        for constant in constants(jaxpr)
        if isinstance(constant, jax.Array)
        and id(constant) not in replaced
        # jax.live_arrays lists no key arrays; a key made in the step is traced, so not a constant.
        and (id(constant) in before or is_key(constant))
    ]
    if stale:
        raise StaleCaptureError(
            "The step uses arrays that it neither got as arguments nor captured in a way that run "
            f"could see:\n{listed(stale)}\nAs constants of the program they would never change, and "
            "weights among them would never train. Pass the array, or the object that holds it, in "
            "args: strategy.run(step, args=(model, x))."
        )
