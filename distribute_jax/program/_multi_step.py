"""Several steps in one program, which scans over k batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp

from distribute_jax import _context
from distribute_jax._checks import check_int
from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import outside_mesh
from distribute_jax._messages import is_number
from distribute_jax._values import PerReplica, mark_mirrored, step_of
from distribute_jax.program._arguments import Arguments
from distribute_jax.program._call import BoundProgram
from distribute_jax.program._lowerings import Compiled
from distribute_jax.program._program import Program, preparing


def take_batches(
    iterator: Iterator[Any], steps: int
) -> tuple[list[tuple[Any, ...]], Exception | None]:
    """Takes up to ``steps`` elements; returns them as positional arguments, and the error that came after.

    Raises ``StopIteration`` if there is no element.
    """
    check_int("strategy.run_steps(steps)", steps)
    if not hasattr(iterator, "__next__"):
        raise ArgumentError(
            f"strategy.run_steps got {type(iterator).__name__}, which is not an iterator. Pass "
            "iter(dataset), and the same iterator to each call, so that no batch is seen twice."
        )
    batches: list[Any] = []
    error = None
    try:
        with _context.one_dispatch():
            # extend keeps the elements before an error; list(islice(…)) would lose them.
            batches.extend(islice(iterator, steps))
    except Exception as raised:
        if not batches:
            raise
        error = raised
    if not batches:
        raise StopIteration
    return [batch if type(batch) is tuple else (batch,) for batch in batches], error


def can_scan(arguments: Sequence[Arguments], steps: int) -> bool:
    """True if one program can scan over the batches: all there, all full, all of one signature."""
    first = arguments[0]
    return (
        1 < steps == len(arguments)
        and all(a.signature == first.signature and a.counts is None for a in arguments)
        and not any(a.bound for a in arguments)
    )


def _compile(program: Program, steps: int) -> Compiled:
    """Compiles k steps of a program into one."""
    step, state = program.step, len(program.traced.old_inputs)
    size = program.traced.sizes.data
    fixed = len(program.order) - size

    def many(*flat: jax.Array) -> list[jax.Array]:
        batches = [flat[fixed + k * size : fixed + (k + 1) * size] for k in range(steps)]
        stacked = tuple(jnp.stack(leaves) for leaves in zip(*batches, strict=True))

        def body(carry: Any, batch: Any) -> Any:
            outs = step.function(*carry, *flat[state:fixed], *batch)
            new = [o.astype(c.dtype) for o, c in zip(outs[:state], carry, strict=True)]
            return tuple(new), tuple(outs[state:])

        carry, results = jax.lax.scan(body, flat[:state], stacked, length=steps)
        same = step.shardings.mirrored[state:]
        return [
            *carry,
            *(r if m else jnp.moveaxis(r, 1, 0) for r, m in zip(results, same, strict=True)),
        ]

    def repeated(per_input: Sequence[Any]) -> tuple[Any, ...]:
        return (*per_input[:fixed], *(tuple(per_input[fixed:]) * steps))

    shardings = replace(
        step.shardings,
        stacked=repeated(step.shardings.stacked),
        split=repeated(step.shardings.split),
    )
    avals, donated = repeated(step.avals), range(program.donated_state)
    return program.compile(
        replace(step, function=many, shardings=shardings, avals=avals, donated=donated)
    )


def stacked_results(results: Sequence[Any]) -> Any:
    """Stacks the results of single steps as a scanned program would."""
    with outside_mesh():
        return jax.tree.map(_stacked, *results, is_leaf=lambda leaf: isinstance(leaf, PerReplica))


def _stacked(first: Any, *others: Any) -> Any:
    leaves = (first, *others)
    shapes = {
        leaf.part_shape if isinstance(leaf, PerReplica) else jnp.shape(leaf) for leaf in leaves
    }
    if len(shapes) > 1 or len({isinstance(leaf, PerReplica) for leaf in leaves}) > 1:
        raise ArgumentError(
            "strategy.run_steps cannot stack results whose shapes differ from step to step, as the rows of a "
            'partial batch on one replica or with partial="shrink", or that only some of the steps have for '
            "each replica. Reduce them inside the step, or use strategy.run."
        )
    if isinstance(first, PerReplica):
        arrays = jnp.stack([leaf.global_array for leaf in leaves], axis=1)
        ambiguous = _MIXED if any(leaf.counts is not None for leaf in leaves) else first.ambiguous
        return PerReplica(arrays, first.mesh, ambiguous=ambiguous, step=first.step)
    computed = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    if computed or (is_number(first) and len(set(leaves)) > 1):  # ints of Python may differ, too
        steps = jnp.stack([jnp.asarray(leaf) for leaf in leaves])
        return mark_mirrored(steps, step_of(computed[0]) if computed else None)
    return first


_MIXED = (
    "These are the stacked results of several steps, one of them on a partial batch, so the steps have "
    "different numbers of real rows. Reduce them inside the step, or use strategy.run for the last batch."
)


def run_scanned(
    entry: BoundProgram, values: Sequence[Any], arguments: Sequence[Arguments]
) -> list[Any]:
    """Runs k steps in one program, which is compiled once, and returns its outputs."""
    program, steps = entry.program, len(arguments)
    if steps not in program.scanned:
        with preparing():
            program.scanned[steps] = _compile(program, steps)
    flat = entry.flat_inputs(values, arguments[0])
    for more in arguments[1:]:
        flat += more.arrays
    return entry.execute(flat, program.scanned[steps])
