"""Many steps in one dispatch: k batches scanned in one program, remainders exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp

from distribute_jax import _context
from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import outside_mesh
from distribute_jax._values import PerReplica, mark_mirrored, step_of
from distribute_jax.program._arguments import Arguments
from distribute_jax.program._call import BoundProgram
from distribute_jax.program._layout import input_avals
from distribute_jax.program._program import Program
from distribute_jax.program._trace import Call


def take_batches(
    iterator: Iterator[Any], steps: int
) -> tuple[list[tuple[Any, ...]], Exception | None]:
    """Takes up to ``steps`` elements, each as the positional arguments of the step.

    Returns:
        The elements, and what the iterator raised after the last of them, where it raised.

    Raises:
        StopIteration: there is no element left.
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ArgumentError(f"strategy.run_steps(steps={steps!r}): steps is an int of at least 1.")
    if not hasattr(iterator, "__next__"):
        raise ArgumentError(
            f"strategy.run_steps got {type(iterator).__name__}, which is not an iterator. Pass "
            "iter(dataset), and the same iterator to each call, so that no batch is seen twice."
        )
    batches: list[Any] = []
    error = None
    try:
        with _context.taking_several():
            # extend keeps what came before an error, which list(islice(…)) would lose.
            batches.extend(islice(iterator, steps))
    except Exception as raised:
        if not batches:
            raise
        error = raised
    if not batches:
        raise StopIteration
    return [batch if type(batch) is tuple else (batch,) for batch in batches], error


def can_scan(arguments: Sequence[Arguments], steps: int) -> bool:
    """Returns whether batches fit one scanned program: all there, all full, all of one signature."""
    first = arguments[0]
    return (
        1 < steps == len(arguments)
        and all(a.signature == first.signature and a.counts is None for a in arguments)
        and not any(a.bound for a in arguments)
    )


def scans(program: Program) -> bool:
    """Returns whether the state that a step leaves has the types it started from."""
    starts, outs = program.traced.input_starts, program.traced.jaxpr.jaxpr.outvars
    inputs = [
        program.traced.jaxpr.jaxpr.invars[k]
        for i in program.written
        for k in range(starts[i], starts[i + 1])
    ]
    state = sum(program.traced.written_sizes)
    return len(inputs) == state and all(
        (a.aval.shape, a.aval.dtype) == (b.aval.shape, b.aval.dtype)
        for a, b in zip(inputs, outs[:state], strict=True)
    )


def compiled_steps(call: Call, program: Program, steps: int) -> Callable[..., list[Any]]:
    """Compiles k steps of a program into one; kept with the program."""
    if steps not in program.scanned:
        program.scanned[steps] = _compile(call, program, steps)
    return program.scanned[steps]


def _compile(call: Call, program: Program, steps: int) -> Callable[..., list[Any]]:
    once = program.one_replica
    state = sum(program.traced.written_sizes)
    size = program.traced.sizes[2]
    fixed = len(program.order) - size
    shardings = program.ordered_shardings

    def many(*flat: jax.Array) -> list[jax.Array]:
        batches = [flat[fixed + k * size : fixed + (k + 1) * size] for k in range(steps)]
        stacked = tuple(jnp.stack(leaves) for leaves in zip(*batches, strict=True))

        def body(carry: Any, batch: Any) -> Any:
            outs = once(*carry, *flat[state:fixed], *batch)
            new = [o.astype(c.dtype) for o, c in zip(outs[:state], carry, strict=True)]
            return tuple(new), tuple(outs[state:])

        carry, results = jax.lax.scan(body, flat[:state], stacked, length=steps)
        per_replica = [not m for m in program.plan.mirrored]
        moved = [
            jnp.moveaxis(r, 1, 0) if split else r
            for r, split in zip(results, per_replica, strict=True)
        ]
        return [*carry, *moved]

    avals = input_avals(call, program.traced)
    ordered = [avals[i] for i in program.order]
    long_lies = replace(
        shardings,
        stacked=shardings.stacked[:fixed] + shardings.stacked[fixed:] * steps,
        split=shardings.split[:fixed] + shardings.split[fixed:] * steps,
    )
    inputs = [*ordered[:fixed], *(ordered[fixed:] * steps)]
    return program.compile(call, many, long_lies, inputs, range(program.donated))


def stacked_results(results: Sequence[Any]) -> Any:
    """Stacks the results of single steps as a scanned program would give them."""
    with outside_mesh():
        return jax.tree.map(
            lambda *leaves: _stacked(leaves),
            *results,
            is_leaf=lambda leaf: isinstance(leaf, PerReplica),
        )


def _stacked(leaves: Sequence[Any]) -> Any:
    first = leaves[0]
    if isinstance(first, PerReplica):
        if len({leaf.part_shape for leaf in leaves}) > 1:
            raise ArgumentError(
                "strategy.run_steps cannot stack results whose shapes differ from step to step, as "
                'with shrinking batches. Use InputOptions(partial="mask"), or strategy.run.'
            )
        arrays = jnp.stack([leaf.global_array for leaf in leaves], axis=1)
        why = _MIXED if any(leaf.counts is not None for leaf in leaves) else first.ambiguous
        return PerReplica(arrays, first.mesh, ambiguous=why, step=first.step)
    if isinstance(first, jax.Array):
        return mark_mirrored(jnp.stack(leaves), step_of(first))
    return first


_MIXED = (
    "These are the stacked results of several steps, one of them on a partial batch, so each step has "
    "another number of real rows. Reduce them inside the step, or use strategy.run for the last batch."
)


def run_scanned(
    call: Call, entry: BoundProgram, values: Sequence[Any], arguments: Sequence[Arguments]
) -> list[Any]:
    """Runs k steps in one program and gives its outputs."""
    compiled = compiled_steps(call, entry.program, len(arguments))
    flat = entry.flat_inputs(values, arguments[0])
    for more in arguments[1:]:
        flat += [v.global_array if isinstance(v, PerReplica) else v for v in more.data]
    return entry.execute(flat, compiled)
