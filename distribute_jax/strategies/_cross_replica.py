"""``reduce``, ``gather`` and local results of per-replica values, outside ``run``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from distribute_jax import _context, _frames
from distribute_jax._checks import converting
from distribute_jax._errors import ArgumentError, log_once
from distribute_jax._jax_private import uncommitted
from distribute_jax._mesh import (
    is_local,
    local_replicas,
    mirrored_sharding,
    num_replicas,
    outside_mesh,
    replicated,
    wait_on_cpu,
)
from distribute_jax._messages import check_int_range, is_key, leaf_text, on_bits, promoting
from distribute_jax._values import (
    DistributedValues,
    Layout,
    Mirrored,
    PerReplica,
    UnevenPerReplica,
    copied_here,
    reading,
    step_of,
)
from distribute_jax.collectives._all_reduce import checked_dim, stacked_over_replicas
from distribute_jax.collectives._reduction import (
    ReduceOp,
    as_dtype,
    check_summable,
    mean_dtype,
    sum_dtype,
    wide,
)
from distribute_jax.processes import job_of, naming_other_processes
from distribute_jax.program import MergedValues
from distribute_jax.strategies._input import stacked_value
from distribute_jax.variables import Variable, mesh_of_components, on_replicas, readable_raw

_SUM_OF_EQUAL = (
    "strategy.reduce('sum', ...) got a result of %s that is equal on every replica, and adds it up for each "
    "of the %d replicas: %d times the value, as in TensorFlow. What the step has reduced already is used as "
    "it is, such as float(loss)."
)
_MEAN_OF_PARTS = (
    "strategy.reduce('mean', ...) got what compute_average_loss returned in %s: parts of which the sum "
    "is the loss of the batch. Their mean is %d times too small: write strategy.reduce('sum', loss)."
)
_SUM_OF_MEANS = (
    "strategy.reduce('sum', ...) adds up what %s returned, a mean over the examples of each replica: the sum "
    "is %d times the mean over the batch, which is strategy.reduce('mean', value)."
)
_NONLINEAR = (
    "strategy.reduce combines what %s computed on each of %d replicas from its examples by more than a sum, "
    "as a root, a ratio or a maximum, and so is not the value for the batch. Return sums or means from the "
    "step, reduce them and compute then; or compute it from strategy.gather(values, axis=0)."
)
_NOTICES = {
    (ReduceOp.MEAN, "part"): _MEAN_OF_PARTS,
    (ReduceOp.SUM, "mean"): _SUM_OF_MEANS,
    (ReduceOp.SUM, "nonlinear"): _NONLINEAR,
    (ReduceOp.MEAN, "nonlinear"): _NONLINEAR,
}

Axes = tuple[int, ...] | None


def reduce_values(op: ReduceOp, values: Sequence[Any], axis: Any, mesh: Mesh) -> list[jax.Array]:
    """Reduces leaves over the replicas, and over the dims that ``axis`` names.

    All leaves that are one array over all replicas, such as gradients, are reduced by one program.
    """
    axes = _as_axes(axis)
    pairs = [_unwrap(value, mesh) for value in values]
    leaves, equal = [_summable(op, value, mesh) for value, _ in pairs], [e for _, e in pairs]
    results: dict[int, jax.Array] = {}
    by_mesh: dict[Mesh, list[int]] = {}
    with naming_other_processes("strategy.reduce", is_local(mesh)), ExitStack() as stack:
        for i, leaf in enumerate(leaves):
            stack.enter_context(reading(leaf))
            if _is_one_array(leaf):
                by_mesh.setdefault(leaf.mesh, []).append(i)
            else:
                results[i] = _reduce(op, leaf, axes, num_replicas(mesh), equal[i])
        for indices in by_mesh.values():
            totals = _reduce_global(op, [leaves[i] for i in indices], axes)
            results.update(zip(indices, totals, strict=True))
    return [results[i] for i in range(len(leaves))]


def _summable(op: ReduceOp, value: Any, mesh: Mesh) -> Any:
    """Returns a leaf that can be reduced, with the other processes' values; logs if it seems reduced."""
    value = check_int_range(value, "strategy.reduce")
    if is_key(getattr(value, "global_array", value)):
        raise ArgumentError(
            "strategy.reduce got random keys, which have no sum and no mean. Get each replica's with "
            "strategy.experimental_local_results(keys), or join them with strategy.gather(keys, axis=0)."
        )
    if _is_one_array(value):
        arrays: Sequence[Any] = [jax.ShapeDtypeStruct(value.part_shape, value.dtype)]
    else:
        arrays = value.values if isinstance(value, DistributedValues) else [value]
    check_summable((("the value", array) for array in arrays), "strategy.reduce")
    replicas, step, mirrored = num_replicas(mesh), step_of(value), isinstance(value, Mirrored)
    if mirrored and op is ReduceOp.SUM:
        # Integers are mostly counts, which are meant to be added up; floats were often reduced in the step.
        if step and replicas > 1 and jnp.issubdtype(value.dtype, jnp.inexact):
            log_once(_SUM_OF_EQUAL, step, replicas, replicas, about=step)
    elif isinstance(value, PerReplica) and (text := _NOTICES.get((op, value.share))):
        log_once(text, value.step, replicas, about=value.step)
    is_whole = isinstance(value, (DistributedValues, jax.core.Tracer)) or is_local(mesh)
    if is_whole or not getattr(value, "is_fully_addressable", True):
        return value
    values = [value] * len(local_replicas(mesh))  # with several, it is unknown how often it counts
    return value if op is ReduceOp.SUM and len(values) > 1 else stacked_value(values, mesh)


def _is_one_array(value: Any) -> bool:
    """True for a per-replica value that is one global array."""
    return isinstance(value, PerReplica) and not isinstance(value, UnevenPerReplica)


def gather_value(value: Any, axis: int, mesh: Mesh) -> jax.Array:
    """Concatenates one leaf of all replicas along a dim."""
    value, is_equal = _unwrap(value, mesh)
    value = check_int_range(value, "strategy.gather")
    with naming_other_processes("strategy.gather", is_local(mesh)), reading(value):
        if _is_one_array(value):
            return _gather_global(value, axis)
        if isinstance(value, DistributedValues):
            return _gather_parts(value.values, axis)
        with converting("strategy.gather: value", value):
            array = jnp.asarray(value)
        times = num_replicas(mesh) if is_equal else 1
        return on_host_device(_gather_parts([array] * times, axis))


def local_values(value: Any, mesh: Mesh) -> list[Any] | None:
    """Returns this process's parts of one leaf, or None if it is not distributed."""
    value, is_equal = _unwrap(value, mesh)
    if isinstance(value, DistributedValues):
        if not _frames.in_replica_context():
            _context.require_untraced("strategy.experimental_local_results")
        with reading(value):
            first = next(d for d in mesh.devices.flat if d.process_index == jax.process_index())
            return [
                part
                if isinstance(part, jax.core.Tracer)
                else uncommitted(jax.device_put(part, first))
                for part in value.values
            ]
    if is_equal or _is_partly_remote(value):
        local = len(local_replicas(mesh))
        with reading(value):
            return [on_host_device(value)] * local
    return None


def _unwrap(value: Any, mesh: Mesh) -> tuple[Any, bool]:
    """Returns a value, or the value of a variable, and whether it is known to be equal on all replicas."""
    if not isinstance(value, nnx.Variable):
        return value, isinstance(value, Mirrored)
    if _context.in_merge_call():
        return _of_traced_variable(value), False
    if isinstance(value, Variable) and value.is_on_read:
        mesh = mesh_of_components(value) or mesh
        return PerReplica(on_replicas(value, mesh), mesh), False
    raw = readable_raw(value)
    if not isinstance(raw, jax.Array) or isinstance(raw, jax.core.Tracer):
        return raw, False
    return copied_here(raw), True  # a view of it would be deleted by the next step


def _is_partly_remote(value: Any) -> bool:
    """True for an array that is sharded over processes, such as a parameter of a ``TrainState``."""
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return False
    return not (value.is_fully_addressable or value.is_fully_replicated)


def _of_traced_variable(variable: nnx.Variable[Any]) -> Any:
    """Returns all replicas' values of a variable in ``merge_call``, where the raw value is one replica's."""
    raw = variable.get_raw_value()
    if not isinstance(raw, jax.Array):
        return raw
    replicas = _frames.current().strategy.num_replicas_in_sync
    # Mirrored variables were aggregated when they were written.
    differs = not isinstance(variable, Variable) or variable.is_on_read
    return MergedValues(
        stacked_over_replicas(raw) if differs else jnp.stack([raw] * replicas), replicas
    )


def _as_axes(axis: Any) -> Axes:
    if axis is None:
        return None
    axes = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    if not all(isinstance(a, (int, np.integer)) and not isinstance(a, bool) for a in axes):
        raise ArgumentError(
            f"strategy.reduce: axis must be None, an int, or a tuple or list of ints; got {axis!r}."
        )
    return axes


def _dims(axes: Axes, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns sorted non-negative dims of one replica's value; raises if there is no such dim."""
    if axes is None:
        return ()
    ndim = len(shape)
    if any(not -ndim <= a < ndim for a in axes):
        raise ArgumentError(
            f"strategy.reduce(axis={axes if len(axes) > 1 else axes[0]}): each replica's value has "
            f"shape {shape}, which does not have that dim. Use axis=None to combine replicas only."
        )
    dims = tuple(sorted({a % ndim for a in axes}))
    if len(dims) != len(axes):
        raise ArgumentError(f"strategy.reduce(axis={axes}) names a dim twice for shape {shape}.")
    return dims


def _reduce_global(op: ReduceOp, values: Sequence[PerReplica], axes: Axes) -> list[jax.Array]:
    kinds: list[tuple[tuple[int, ...], Layout]] = []
    for value in values:
        counts, dims = value.counts, _dims(axes, value.part_shape)
        value.check_rows_known()
        if 0 not in dims and counts is not None and len(set(counts)) > 1:
            raise _uneven([(count, *value.part_shape[1:]) for count in counts], axes)
        _record_action(f"strategy.reduce({op.value!r}, axis={axes})", value)
        kinds.append((dims, value.layout))
    rows = [value.counts and np.asarray(value.counts, np.int32) for value in values]
    program = _compiled_reduce(op, tuple(kinds), values[0].mesh)
    with outside_mesh():
        totals = wait_on_cpu(program([value.global_array for value in values], rows))
    return [
        on_host_device(total if value.counts is None or 0 in dims else total[: value.counts[0]])
        for total, value, (dims, _) in zip(totals, values, kinds, strict=True)
    ]


def _uneven(shapes: Sequence[tuple[int, ...]], axes: Axes) -> ArgumentError:
    axis = axes if axes is None or len(axes) > 1 else axes[0]
    what = f"strategy.reduce(axis={axis}): the replicas' values have different shapes, {list(shapes)}, "
    if len(set(map(len, shapes))) > 1:
        return ArgumentError(
            f"{what}and not even as many dims, so they cannot be combined. Give every replica a value with "
            "the same number of dims."
        )
    ndim = len(shapes[0])
    differ = [d for d in range(ndim) if len({shape[d] for shape in shapes}) > 1]
    dims = tuple(sorted({a % ndim for a in axes or ()} | set(differ)))
    return ArgumentError(
        f"{what}so they cannot be combined element by element. Reduce the dim that differs too "
        f"(axis={dims if len(dims) > 1 else dims[0]}), or join the values with "
        f"strategy.gather(value, axis={differ[0]})."
    )


@functools.lru_cache(maxsize=256)
def _compiled_reduce(
    op: ReduceOp, kinds: tuple[tuple[tuple[int, ...], Layout], ...], mesh: Mesh
) -> Callable[..., list[jax.Array]]:
    replicas = num_replicas(mesh)

    def combine(
        array: jax.Array, counts: jax.Array | None, kind: tuple[tuple[int, ...], Layout]
    ) -> jax.Array:
        dims, layout = kind
        parts = _as_stacked(array, layout, replicas)
        number: Any = replicas * math.prod(parts.shape[1 + d] for d in dims)
        if counts is not None and 0 in dims:
            rows = jnp.arange(parts.shape[1])[None, :] < counts[:, None]
            parts = jnp.where(rows.reshape(rows.shape + (1,) * (parts.ndim - 2)), parts, 0)
            number = counts.sum() * math.prod(parts.shape[1 + d] for d in dims if d)
        return _total(op, parts, (0, *(1 + d for d in dims)), number)

    def combine_all(arrays: Any, rows: Any) -> list[jax.Array]:
        return list(map(combine, arrays, rows, kinds))

    return jax.jit(combine_all, out_shardings=mirrored_sharding(mesh))


@promoting
def _total(op: ReduceOp, parts: jax.Array, dims: tuple[int, ...], number: Any) -> jax.Array:
    # Wide, so that the sum of a mean of float16 does not overflow.
    total = as_dtype(parts, wide(_result_dtype(op, parts.dtype))).sum(dims)
    total = total if op is ReduceOp.SUM else jnp.divide(total, number)
    return as_dtype(total, _result_dtype(op, parts.dtype))


def _result_dtype(op: ReduceOp, dtype: Any) -> Any:
    return sum_dtype(dtype) if op is ReduceOp.SUM else mean_dtype(dtype)


def _as_stacked(array: jax.Array, layout: Layout, replicas: int) -> jax.Array:
    if layout is Layout.STACKED:
        return array
    return array.reshape(replicas, array.shape[0] // replicas, *array.shape[1:])


def _reduce_parts(op: ReduceOp, parts: Sequence[jax.Array], axes: Axes) -> jax.Array:
    dims = [_dims(axes, part.shape) for part in parts]
    dtype = jnp.result_type(*parts)
    wider = [as_dtype(part, wide(_result_dtype(op, dtype))) for part in parts]
    sums = [part.sum(d) if d else part for part, d in zip(wider, dims, strict=True)]
    if len({part.shape for part in sums}) > 1:
        raise _uneven([part.shape for part in parts], axes)
    total = functools.reduce(jnp.add, sums)
    if op is ReduceOp.MEAN:
        total /= sum(math.prod(p.shape[i] for i in d) for p, d in zip(parts, dims, strict=True))
    return as_dtype(total, _result_dtype(op, dtype))


def _reduce(op: ReduceOp, value: Any, axes: Axes, replicas: int, is_equal: bool) -> jax.Array:
    """Reduces a leaf that is not one array over all replicas."""
    if isinstance(value, DistributedValues):
        return _reduce_parts(op, value.values, axes)
    with converting("strategy.reduce: value", value):
        array = jnp.asarray(value)
    is_equal = replicas == 1 or is_equal
    is_zero = isinstance(value, (int, float, np.generic)) and value == 0
    if op is ReduceOp.SUM and not is_equal and not is_zero:
        raise ArgumentError(
            f"A non-DistributedValues value {leaf_text(value)} cannot be reduced with the given "
            "reduce op ReduceOp.SUM: no replica produced it, so it is not known how often it counts. "
            "Reduce what strategy.run returned, or use 'mean'."
        )
    array = _reduce_parts(op, [array], axes)
    if not is_equal:
        return array
    return on_host_device(array * replicas if op is ReduceOp.SUM and replicas > 1 else array)


def is_value(leaf: Any) -> bool:
    """True for a node of a pytree that is one leaf of ``reduce`` and ``gather``."""
    return isinstance(leaf, (DistributedValues, nnx.Variable))


def _record_action(what: str, value: PerReplica) -> None:
    """Records a collective in the log of actions by which diverged processes are detected."""
    job = job_of(value.mesh)
    if not job.is_alone:
        rows = "" if value.counts is None else f", of which {list(value.counts)} rows are examples"
        job.actions.record(f"{what} of {jax.typeof(value.global_array)}{rows}")


def _gather_global(value: PerReplica, axis: int) -> jax.Array:
    value.check_rows_known()
    part = jax.ShapeDtypeStruct(value.part_shape, value.dtype)
    dim = checked_dim(len(part.shape), axis, _part_text(part), "strategy.gather")
    counts = value.counts
    if counts is not None and dim != 0 and len(set(counts)) > 1:
        raise _unjoinable([(count, *value.part_shape[1:]) for count in counts], axis)
    _record_action(f"strategy.gather(axis={axis})", value)
    function = _compiled_gather(dim, value.layout, value.mesh, counts)
    with outside_mesh():
        return on_host_device(wait_on_cpu(on_bits(function, value.global_array)))


@functools.lru_cache(maxsize=256)
def _compiled_gather(
    dim: int, layout: Layout, mesh: Mesh, counts: tuple[int, ...] | None
) -> Callable[..., jax.Array]:
    replicas = num_replicas(mesh)

    def join(array: jax.Array) -> jax.Array:
        parts = list(_as_stacked(array, layout, replicas))
        if counts is not None:
            parts = [part[:count] for part, count in zip(parts, counts, strict=True)]
        return jnp.concatenate(parts, axis=dim)

    return jax.jit(join, out_shardings=mirrored_sharding(mesh))


def _gather_parts(parts: Sequence[jax.Array], axis: int) -> jax.Array:
    dim = checked_dim(parts[0].ndim, axis, _part_text(parts[0]), "strategy.gather")
    if len({part.shape[:dim] + part.shape[dim + 1 :] for part in parts}) > 1:
        raise _unjoinable([part.shape for part in parts], axis)
    return jnp.concatenate(parts, axis=dim)


def _part_text(part: Any) -> str:
    return f"the value of one replica, {leaf_text(part)},"


def _unjoinable(shapes: Sequence[tuple[int, ...]], axis: int) -> ArgumentError:
    return ArgumentError(
        f"strategy.gather(axis={axis}): the replicas' values have shapes {list(shapes)}. They may "
        f"differ only in dim {axis}; choose that dim, or bring the values to one shape first."
    )


def on_host_device(array: jax.Array) -> jax.Array:
    """Returns all of an array on this process's first device, uncommitted, so that it mixes with others."""
    if isinstance(array, jax.core.Tracer):
        return array
    return uncommitted(replicated(array).addressable_data(0))
