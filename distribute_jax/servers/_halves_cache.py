"""Cache of the halves of steps for parameter servers, by function, arguments and captured values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx

from distribute_jax._jax_private import read_raw
from distribute_jax.program._arguments import Arguments, check_function, flatten_arguments
from distribute_jax.program._binding import (
    Binding,
    check_leaked_tracers,
    contents_restored_on_error,
    copy_contents,
    step_lock,
)
from distribute_jax.program._cache import Recompilations, Request
from distribute_jax.program._capture import captures
from distribute_jax.program._options import default_run_options
from distribute_jax.program._results import rebuild
from distribute_jax.program._skipped_steps import StepCounts
from distribute_jax.program._trace import Call
from distribute_jax.program._trace_errors import explain_compile_errors, step_name
from distribute_jax.servers._halves import Halves, build_halves

_MAX_ENTRIES = 64


@dataclass(eq=False)
class BoundHalves:
    """The halves of a step, bound to the objects that it reaches."""

    step: str
    """The function's name."""
    halves: Halves
    binding: Binding
    is_compared: bool = False
    """True once an update by several workers was compared with one device."""
    rows: Sequence[bool] | None = None
    """Which results have one row for each example; None until a partial batch needs to know."""
    leaves: list[Any] = field(init=False)
    """The values of the variables at the last lookup, in the numbering of the halves."""

    skip_counts: list[StepCounts] = field(init=False)

    def __post_init__(self) -> None:
        written = map(self.binding.variables.__getitem__, self.halves.written)
        self.skip_counts = [v for v in written if isinstance(v, StepCounts)]
        self.leaves = jax.tree.leaves(read_raw(self.binding.variables))

    def result(self, arrays: list[Any]) -> Any:
        """Returns what the step returned, with these arrays."""
        return rebuild(self.halves.results, arrays, self.binding)

    def fits_function(self, fn: Callable[..., Any]) -> bool:
        """True if a function that takes no arguments captures what this step was traced with."""
        with step_lock:
            return self.binding.matches(captures(fn).values) and self.fits()

    def fits(self) -> bool:
        """True if the variables have the shapes and dtypes that the step was traced with."""
        raws, before = read_raw(self.binding.variables), self.leaves
        if len(raws) == len(before) and all(map(operator.is_, raws, before)):
            return True  # the same arrays
        now = jax.tree.leaves(raws)
        same = len(before) == len(now) and all(
            x is y or (x.shape, x.dtype) == (y.shape, y.dtype)
            for x, y in zip(before, now, strict=True)
        )
        self.leaves = now if same else before
        return same


def places(binding: Binding) -> list[tuple[nnx.Variable[Any], int]]:
    """Returns for each leaf of state its variable, and its index in it."""
    pairs = zip(binding.variables, read_raw(binding.variables), strict=True)
    return [(variable, i) for variable, raw in pairs for i in range(len(jax.tree.leaves(raw)))]


@dataclass(eq=False)
class HalvesCache:
    """The halves of the steps of one strategy."""

    strategy: Any
    servers: int
    stored: Any
    """The ``Coordinator``, whose servers store the state of the steps."""
    partitioner: Callable[..., Any] | None
    sparse: str | None
    _bound: dict[Any, list[BoundHalves]] = field(default_factory=dict)
    _recompilations: Recompilations = field(default_factory=Recompilations)

    def bound(
        self, fn: Callable[..., Any], args: tuple[Any, ...], of_workers: int = 0
    ) -> tuple[BoundHalves, Arguments]:
        """Returns the halves of a step, from the cache or new ones, and its flat arguments.

        The last ``of_workers`` arguments differ between workers.
        """
        with step_lock:
            arguments = flatten_arguments(args, {}, self.strategy.mesh)
            request = Request(fn, arguments, default_run_options())
            for entry in self._bound.get(request.lookup_key, ()):
                if entry.binding.matches(request.roots) and entry.fits():
                    return entry, arguments
            entry = self._built(fn, arguments, of_workers)
            alive = {key: [e for e in of if e.binding.alive] for key, of in self._bound.items()}
            self._bound = {key: entries for key, entries in alive.items() if entries}
            entries = [entry, *self._bound.get(request.lookup_key, ())]
            self._bound[request.lookup_key] = entries[:_MAX_ENTRIES]
            return entry, arguments

    def _built(self, fn: Any, arguments: Arguments, of_workers: int) -> BoundHalves:
        check_function(fn)
        name, binding = step_name(fn), Binding(fn, arguments)
        check_leaked_tracers(binding)
        contents = copy_contents(binding.guard.containers)
        with contents_restored_on_error(contents), explain_compile_errors(name):
            call = Call(fn, binding, arguments, self.strategy, self.strategy.mesh)
            how = self.stored.known(binding), self.partitioner, of_workers, self.sparse
            halves = build_halves(call, self.servers, *how)
        self._recompilations.note(fn, binding, arguments)
        bound = BoundHalves(name, halves, Binding(fn, arguments))
        self.stored.load(bound)
        return bound
