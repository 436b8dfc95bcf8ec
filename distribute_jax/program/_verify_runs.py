"""The two runs that ``verify`` compares, on all replicas and on one device, made comparable.

What a replica draws can equal no draw of one device. So both run the step with fixed numbers in place of
every draw. What is drawn for a mask of dropout matters only to the mask, which is then the same for all rows.
For other draws, as of noise, and for statistics of a share, as those of batch norm, every replica gets the
same examples, and equal rows get equal numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from math import prod
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import (
    DATA,
    first_replica,
    local_copy_of_replicated,
    num_replicas,
    put,
    split_sharding,
)
from distribute_jax._values import Layout, PerReplica
from distribute_jax.program._arguments import Arguments
from distribute_jax.program._call import BoundProgram
from distribute_jax.program._compare import real_rows
from distribute_jax.program._jaxprs import RANDOM, RenamedAxis, equations, with_inner
from distribute_jax.program._options import RunOptions
from distribute_jax.program._placement import Replicas
from distribute_jax.program._program import build
from distribute_jax.program._trace import PRINTS, Call, StandIn, Traced, trace
from distribute_jax.program._walk import COMPARISONS, STRUCTURE, Marks, Walk


def with_fixed(
    traced: Traced, call: Call, entry: BoundProgram, flat: list[Any], options: RunOptions
) -> tuple[BoundProgram, list[Any]]:
    """Returns a step with fixed numbers in place of its draws, and its inputs."""
    programs = entry.program.compared
    if traced is entry.program.traced:
        return entry, flat
    if None not in programs:
        options = replace(options, donate_state=False, donate_args=False, verify="off")
        once = replace(call, runs_once=True)
        programs[None] = build(once, options, Replicas(call.mesh), traced=traced)
    entry = BoundProgram(programs[None], call.binding, entry.step)
    return entry, entry.placed(flat)


def with_equal_shares(arguments: Arguments) -> Arguments:
    """Returns arguments with the examples of the first replica on every replica.

    The statistics of a share are then those of the whole batch.

    Raises:
        ValueError: its share has padding.
    """
    return arguments.with_data(list(map(_repeated, arguments.data)))


def _repeated(value: Any) -> Any:
    if not isinstance(value, PerReplica):
        return value
    replicas, counts, [rows, *_] = num_replicas(value.mesh), value.counts, value.part_shape
    if counts and counts[0] < rows:
        raise ValueError(f"the share of the first replica has {counts[0]} examples")
    array = value.global_array
    every = np.concatenate([np.asarray(local_copy_of_replicated(array))[:rows]] * replicas)
    array = put(every, array.sharding)
    counts = counts and (rows,) * replicas
    return PerReplica(array, value.mesh, layout=Layout.JOINED, counts=counts)


def global_batches(call: Call) -> list[Any]:
    """Returns the data of a call with the examples of all replicas as the share of a single replica."""
    mesh = first_replica(call.mesh)
    return [_global_batch(value, mesh) for value in call.arguments.data]


def on_one_device(
    call: Call, entry: BoundProgram, batches: Sequence[Any]
) -> tuple[Call, BoundProgram]:
    """Returns the call on one device with the examples of all replicas, and its step."""
    mesh = first_replica(call.mesh)
    arguments = call.arguments.with_data(list(batches))
    strategy = StandIn(call.strategy, 1)
    single = replace(call, arguments=arguments, mesh=mesh, strategy=strategy, runs_once=True)
    drawn, programs = entry.program.traced.drawn, entry.program.compared
    key = drawn, tuple(np.shape(getattr(v, "global_array", v)) for v in batches)
    if key not in programs:
        options = RunOptions(check_sync=False, donate_state=False, verify="off")
        traced = without_prints(trace(single))
        if drawn is not None:
            traced = with_equal_draws(single, traced, drawn) if drawn else with_equal_masks(traced)
        programs[key] = build(single, options, Replicas(mesh), traced=traced)
    return single, BoundProgram(programs[key], call.binding, entry.step)


def _global_batch(value: Any, mesh: Any) -> Any:
    if not isinstance(value, PerReplica):
        return value
    if value.layout is Layout.STACKED:
        raise ArgumentError(
            "verify cannot run this step on one device: an argument holds a value for each replica "
            f"({value!r}), which has no equivalent there. Pass a distributed batch instead."
        )
    every = np.asarray(local_copy_of_replicated(value.global_array))
    real = real_rows(np.stack(np.split(every, num_replicas(value.mesh))), value.counts)
    return PerReplica(jax.device_put(real, split_sharding(mesh)), mesh, layout=Layout.JOINED)


def with_fixed_draws(call: Call, traced: Traced) -> Traced:
    """Returns a step with equal masks, or else with equal draws, that prints nothing."""
    traced = without_prints(traced)
    masks = with_equal_masks(traced)
    return with_equal_draws(call, traced) if draws(masks.jaxpr.jaxpr) else masks


def without_prints(traced: Traced) -> Traced:
    """Returns a step without ``jax.debug.print`` and its like; the same step if there are none."""
    if PRINTS.isdisjoint(eqn.primitive.name for eqn in equations(traced.jaxpr.jaxpr)):
        return traced
    return replace(traced, jaxpr=_WithoutPrints(DATA, DATA).body(traced.jaxpr))


def with_equal_masks(traced: Traced) -> Traced:
    """Returns a step with equal masks; the same step if it draws nothing, or other than for masks."""
    closed, walk = traced.jaxpr, _DrawWalk()
    if not draws(closed.jaxpr):
        return traced
    outs = walk.run(closed, [_DATA] * len(closed.jaxpr.invars))
    if not walk.only_masks or any(mark & _DRAWN for mark in outs):
        return traced
    return replace(traced, jaxpr=_FixedDraws(_mask).body(closed), drawn=())


def with_equal_draws(call: Call, traced: Traced, like: tuple[Any, ...] | None = None) -> Traced:
    """Returns a step whose draws are equal for equal rows; the same step if it draws otherwise.

    ``like`` are the draws on a replica, for the step on one device with all rows.

    Raises:
        ValueError: the draws cannot be paired, or one has as many rows on one device as on a replica, and
            may differ between the replicas.
    """
    closed, walk = traced.jaxpr, _DrawWalk()
    data = sum(traced.sizes[:2])
    batch = {data + k for k, v in enumerate(call.arguments.data) if isinstance(v, PerReplica)}
    walk.run(closed, [_DATA | _BATCH * (k in batch) for k in range(len(closed.jaxpr.invars))])
    drawn = [eqn for eqn in equations(closed.jaxpr) if eqn.primitive.name == "random_bits"]
    shapes = tuple((eqn.outvars[0].aval.shape, id(eqn) in walk.differing) for eqn in drawn)
    # Latents of a number that the step has for each replica are not those of N times as many rows.
    of_both = zip(shapes, like or (), strict=False)
    has_others = any(a == b and a[:1] > (1,) and differs for (a, _), (b, differs) in of_both)
    if like and (has_others or not walk.only_bits):
        raise ValueError(f"the draws of shapes {shapes} are not those of the rows of all replicas")
    if not walk.only_bits:
        return traced
    pairs = zip(drawn, like or shapes, strict=True)
    known = {id(eqn): (number, shape) for number, (eqn, (shape, _)) in enumerate(pairs)}
    jaxpr = _FixedDraws(lambda eqn: _of_rows(*known[id(eqn)], eqn.outvars[0].aval)).body(closed)
    return replace(traced, jaxpr=jaxpr, drawn=shapes)


def draws(jaxpr: Any) -> bool:
    """True if a program draws random numbers, rather than only advances a stream."""
    return any(eqn.primitive.name in RANDOM for eqn in equations(jaxpr))


_DATA, _DRAWN, _BATCH, _REPLICA = 1, 2, 4, 8
"""The bits of a mark: what a value is computed from. Constants have none."""

_ORDERS = frozenset({"approx_top_k", "sort", "top_k"})
_READS = frozenset({"dynamic_slice", "gather"})


class _DrawWalk(Walk):
    """Finds out what drawn numbers are used for."""

    only_masks = True
    """They meet data only in comparisons, which make masks."""
    only_bits = True
    """All are drawn by a primitive that can be replaced, and none orders or selects rows."""

    def __init__(self) -> None:
        super().__init__()
        self.differing: set[int] = set()
        """The ids of draws whose key may differ between the replicas."""

    def constant(self, value: Any) -> int:
        return 0

    def decided(self, eqn: Any, by: int, outs: Marks) -> Marks:
        return [self._met(out | by) for out in outs]

    def apply(self, eqn: Any, marks: Marks) -> Marks:
        name = eqn.primitive.name
        if name == "axis_index":
            return [_REPLICA]
        if name == "random_bits":
            self.differing |= {id(eqn)} if marks[0] & (_BATCH | _REPLICA) else set()
            return [_DRAWN]
        # With equal numbers a loop that draws until they fit would never end.
        draws = any(inner.primitive.name in RANDOM for inner in with_inner(eqn))
        if name in STRUCTURE and not (draws and name == "while"):
            outs = self.by_rule(STRUCTURE[name], eqn, marks)
            if outs is not None:
                return outs
        mark = reduce(or_, marks, 0)
        selects = name in _READS and marks[0] & _BATCH and reduce(or_, marks[1:], 0) & _DRAWN
        self.only_bits &= not (draws or selects or (name in _ORDERS and mark & _DRAWN))
        self.only_masks &= not draws
        if mark and name in COMPARISONS:
            return [_DATA | mark & (_BATCH | _REPLICA)] * len(eqn.outvars)
        return [self._met(mark)] * len(eqn.outvars)

    def _met(self, mark: int) -> int:
        self.only_masks &= mark & (_DATA | _DRAWN) != _DATA | _DRAWN
        return mark


class _WithoutPrints(RenamedAxis):
    """Removes what only looks at values."""

    def equation(self, eqn: Any) -> Any:
        return None if eqn.primitive.name in PRINTS else super().equation(eqn)

    def effects(self, of: Any) -> Any:
        return {e for e in of.effects if not type(e).__name__.endswith("DebugEffect")}


class _FixedDraws(RenamedAxis):
    """Replaces the bits of every draw."""

    def __init__(self, bits_of: Callable[[Any], jax.Array]) -> None:
        super().__init__(DATA, DATA)
        self._bits_of = bits_of

    def equation(self, eqn: Any) -> Any:
        if eqn.primitive.name != "random_bits":
            return super().equation(eqn)
        [keys], [bits] = eqn.invars, eqn.outvars
        aval = bits.aval

        @jax.jit
        def fixed(keys: jax.Array) -> jax.Array:
            # What is drawn still depends on the key, and so may differ between the replicas.
            zero = jax.random.key_data(keys).min() & 0
            return self._bits_of(eqn).astype(aval.dtype) | zero.astype(aval.dtype)

        traced = jax.make_jaxpr(fixed)(jax.ShapeDtypeStruct(keys.aval.shape, keys.aval.dtype))
        [call] = traced.eqns
        return call.replace(invars=[keys], outvars=[bits], source_info=eqn.source_info)


_UNIFORM = 0.45
"""What every mask compares: dropout keeps all with rates up to 0.5, also if it draws what to drop."""


def _mask(eqn: Any) -> jax.Array:
    aval = eqn.outvars[0].aval
    return jnp.full(aval.shape, int(_UNIFORM * 2 ** (8 * aval.dtype.itemsize)), aval.dtype)


def _of_rows(number: int, shape: tuple[int, ...], aval: Any) -> jax.Array:
    """Returns the bits of a draw, which repeat those of ``shape``, as rows of the batch repeat a share."""
    bits = jnp.arange(prod(shape), dtype=jnp.uint32) + jnp.uint32(number % 256 << 24)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):  # every bit depends on all
        bits = (bits ^ bits >> shift) * jnp.uint32(factor)
    if aval.dtype.itemsize == 8:
        bits = bits.astype(aval.dtype) * aval.dtype.type(2**32 + 1)
    times = [size // part for size, part in zip(aval.shape, shape, strict=True)]
    return jnp.tile(bits.reshape(shape), times)
