"""``run`` and ``schedule`` with parameter servers: a function is traced where it is scheduled."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._errors import ArgumentError, ArgumentTypeError, ContextError
from distribute_jax._jax_private import trace_settings
from distribute_jax._messages import leaf_text
from distribute_jax._values import PerReplica
from distribute_jax.program import Replicas, Runner, RunOptions
from distribute_jax.program._arguments import check_call, is_one_leaf
from distribute_jax.program._binding import step_lock
from distribute_jax.program._cache import Request
from distribute_jax.program._compare import copied
from distribute_jax.program._halves import of_replica
from distribute_jax.program._halves_cache import BoundHalves, HalvesCache
from distribute_jax.program._options import UNVERIFIED, checked_run_options
from distribute_jax.program._padding_check import run_checked_for_leaks
from distribute_jax.program._result_rows import Unknown
from distribute_jax.program._results import rebuild
from distribute_jax.program._trace_errors import step_name
from distribute_jax.program._undo import StepCounts, check_counts
from distribute_jax.servers._coordinator import MOST_WAITING, Coordinator, Data, Recording
from distribute_jax.servers._engine import Engine
from distribute_jax.servers._input import (
    MoreElementsError,
    PerWorkerIterator,
    PerWorkerValue,
    TracedIterator,
    check_not_on_worker,
    experimental_get_current_worker_index,
    in_closure,
    is_of_workers,
    on_worker,
)
from distribute_jax.servers._replay import run_again

_MOST_ELEMENTS = 64


class ServersRunner(Runner):
    """Schedules functions on workers; what is not scheduled runs here, after all closures."""

    def __init__(
        self,
        strategy: Any,
        replicas: Replicas,
        coordinator: Coordinator,
        start: Callable[[], Engine],
        partitioner: Callable[..., Any] | None = None,
        sparse: str | None = None,
    ) -> None:
        """Starts workers with the first closure."""
        super().__init__(strategy, replicas, steps_in_flight=None)
        self._strategy, self.coordinator = strategy, coordinator
        self._shares, self._start = strategy.num_replicas_in_sync, start
        self._engine: Engine | None = None
        self._starting = threading.Lock()
        self._halves = HalvesCache(
            strategy, strategy.mesh, coordinator.servers, coordinator, partitioner, sparse
        )
        self._guarded: dict[int, tuple[StepCounts, int]] = {}
        self._taken: dict[Any, list[int]] = {}
        """How many elements of each of its iterators a function took when it was last traced."""
        self._last: tuple[Any, ...] = ()
        """The last function without other arguments, with what it depends on, its halves and data."""

    def for_strategy(self, strategy: Any) -> Runner:
        """Refuses: the copy would have the same servers."""
        raise ContextError(f"{self._strategy!r} cannot be copied. Make a new strategy.")

    def __call__(
        self,
        fn: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any] | None,
        options: RunOptions | None,
    ) -> Any:
        """Runs a step here, after all closures; in a scheduled function, as a part of it."""
        if in_closure():
            check_call(args, kwargs)
            with on_worker(experimental_get_current_worker_index()):
                return fn(*args, **(kwargs or {}))
        self.coordinator.join()
        return super().__call__(fn, args, kwargs, options)

    def steps(
        self,
        fn: Callable[..., Any],
        iterator: Iterator[Any],
        steps: int,
        options: RunOptions | None,
    ) -> Any:
        """Runs several steps here, after all closures."""
        self.coordinator.join()
        return super().steps(fn, iterator, steps, options)

    def check_skipped_steps(self, delay: int = 0) -> None:
        """Also looks at the closures since the last time, which are over."""
        super().check_skipped_steps(delay)
        if delay:
            return
        guarded, self._guarded = self._guarded, {}
        for guard, closures in guarded.values():
            check_counts(guard, guard.get_raw_value(), closures)

    def kill(self, kind: str, number: int) -> None:
        """Ends the process of a worker or a server."""
        if self._engine is None:
            raise ContextError("dj.testing.kill: workers and servers start with the first closure.")
        self._engine.kill(kind, number)

    def run_again(self, recording: Recording) -> list[str]:
        """Does recorded updates again on one device; returns what has other bits."""
        self.coordinator.join()
        return list(run_again(recording, self.coordinator.state, self.coordinator.device))

    def resize(self, workers: int) -> None:
        """Starts workers that have joined; waits for those that leave."""
        if self._engine is not None:
            self._engine.resize(workers)

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Any,
        kwargs: Any,
        most: int = MOST_WAITING,
    ) -> Any:
        """Queues a function for whichever worker is free; returns its results to come.

        Waits while ``most`` closures are not over.
        """
        check_not_on_worker()
        if not callable(fn) or getattr(getattr(fn, "__code__", None), "co_flags", 0) & (
            inspect.CO_COROUTINE | inspect.CO_GENERATOR
        ):
            raise ArgumentTypeError(
                f"coordinator.schedule(fn={leaf_text(fn)}): fn is not a function, or an async one or a "
                "generator."
            )
        check_call(args, kwargs, "coordinator.schedule(fn")
        given, tree = jax.tree.flatten((tuple(args), kwargs or {}), is_leaf=_is_leaf)
        _check_fetched(given)
        given = [x.copy() if isinstance(x, np.ndarray) else x for x in given]
        bound, data, counts = self._traced(fn, given, tree)
        results, mirrored = bound.halves.results, bound.halves.plan.mirrored
        with self._starting:  # two threads may schedule
            if self._engine is None:
                self._engine = self._start()
        self._engine.check(bound.halves)
        closure = self.coordinator.schedule(bound, data, most, self._shares)
        for guard in bound.skip_counts:
            _, closures = self._guarded.get(id(guard), (guard, 0))
            self._guarded[id(guard)] = guard, closures + 1

        def remote(k: int) -> RemoteValue:
            real = counts if counts is not None and (bound.rows or ())[k] else None
            if self._shares > 1 and not mirrored[k]:
                mesh = self._strategy.mesh
                return RemoteValue(
                    lambda: PerReplica(self.coordinator.result(closure)[k], mesh, counts=real)
                )
            rows = slice(real[0]) if real else ...
            return RemoteValue(lambda: self.coordinator.result(closure)[k][rows])

        return rebuild(results, [remote(k) for k in range(len(mirrored))], bound.binding)

    def _traced(
        self, fn: Callable[..., Any], given: list[Any], tree: Any
    ) -> tuple[BoundHalves, Data, tuple[int, ...] | None]:
        """Returns the halves of a scheduled function, the data of a worker, and how many rows are real."""
        key, kinds = getattr(fn, "__code__", type(fn)), [*map(_kind, given)]
        plain = [x for x, kind in zip(given, kinds, strict=True) if kind == "plain"]
        last = None
        if not plain and isinstance(fn, FunctionType):
            settings = self.coordinator.workers, trace_settings(), checked_run_options(None)
            last = weakref.ref(fn), (tree, *given, *settings)
            if last == self._last[:2] and self._last[2].fits_function(fn):
                return *self._last[2:], None
        taken = self._taken.get(key, [])
        taken = [*taken, *[0] * (len(given) - len(taken))][: len(given)]
        while True:
            now = list(taken)
            of_workers = functools.partial(_of_worker, given, now, self.coordinator.workers)
            leaves, inputs = jax.tree.flatten(of_workers(0, peek=True))
            _check_arrays(leaves)
            shapes = [*map(_type, leaves)]
            step = _Closure(fn, kinds, tree, inputs, taken)
            every = (*plain, *leaves, _first_worker())
            try:
                bound, arguments = self._halves.bound(step, every, {}, None, len(leaves) + 1)
                break
            except MoreElementsError:
                if max(taken) > _MOST_ELEMENTS:
                    raise ArgumentError(_TOO_MANY.format(most=_MOST_ELEMENTS)) from None
        self._taken[key] = now
        if arguments.counts is not None and bound.rows is None:
            bound.rows = self._checked_rows(Request(step, arguments, UNVERIFIED), bound)
        fixed = bound.halves.data(bound.binding, arguments)
        shares = self._shares  # what workers hold must not hold the strategy
        end = len(fixed) - (arguments.counts is not None)
        first = end - len(shapes) - 1

        def data(worker: int, share: int) -> list[Any]:
            found: Any = jax.tree.flatten(of_workers(worker)) if shapes else ([], inputs)
            leaves, structure = found
            if structure != inputs or [*map(_type, leaves)] != shapes:
                got, wanted = _shown(map(_type, leaves)), _shown(shapes)
                raise ArgumentError(_OTHER_SHAPE.format(worker=worker, got=got, wanted=wanted))
            given = [*fixed[:first], *leaves, np.int32(worker), *fixed[end:]]
            return of_replica(given, share, shares)

        if last is not None and not (arguments.bound or bound.halves.arrays):
            self._last = *last, bound, data
        return bound, data, arguments.counts

    def _checked_rows(self, request: Request, bound: BoundHalves) -> list[bool]:
        """Returns which results of a partial batch have one row for each example.

        Refuses, as ``run``, a step that sees the padding, by running it on a copy of the state.
        """
        with step_lock:
            entry = self.entry(request)
            flat = copied(entry.flat_inputs(request.roots, request.arguments))
            with self.cache.tracing(request, entry):
                call = self.cache.call(request, entry.binding)
                run_checked_for_leaks(call, entry, request.roots, flat)
        rows = entry.program.per_example or ()
        for unknown in (x for x in rows if isinstance(x, Unknown)):
            raise ArgumentError(f"{bound.step}: {unknown.text}")
        return [row is True for row in rows]


class RemoteValue:
    """An array that a worker computes, or has computed.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/coordinator/RemoteValue
    """

    def __init__(self, wait: Callable[[], Any]) -> None:
        """Takes what waits for the array, and returns it or raises the worker's error."""
        self._wait = wait

    def get(self) -> Any:
        """Waits for the value and returns it as ``strategy.run`` does, or raises the error of its closure."""
        return self._wait()

    def fetch(self) -> Any:
        """Waits for the value and returns it as a NumPy array, or raises the error of its closure.

        Where several workers make an update and differ in the value, it is a tuple of arrays.
        """
        value = self._wait()
        several = isinstance(value, PerReplica)
        return tuple(map(_fetched, value.values)) if several else _fetched(value)


def _fetched(value: Any) -> Any:
    """Returns an array of NumPy, which has no random keys: those stay as they are."""
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return value if is_key else np.asarray(value)


class _Closure:
    """A scheduled function as a step: its own arguments, and what the worker adds to them."""

    def __init__(
        self, fn: Callable[..., Any], kinds: Sequence[str], tree: Any, inputs: Any, taken: list[int]
    ) -> None:
        """Traces a function that takes so many elements of its iterators; ``taken`` is corrected."""
        self.__wrapped__, self.__qualname__ = fn, step_name(fn)
        self._kinds, self._tree, self._inputs, self._taken = kinds, tree, inputs, taken
        self.__captures_key__ = _Closure, tree, inputs, *kinds

    def __call__(self, *flat: Any) -> Any:
        """Runs the function where ``strategy.run`` is a part of it."""
        number = self._kinds.count("plain")
        *of_workers, worker = flat[number:]
        mine, theirs = iter(flat[:number]), jax.tree.unflatten(self._inputs, of_workers)
        leaves = [
            next(mine) if kind == "plain" else TracedIterator(x) if kind == "iterator" else x
            for kind, x in zip(self._kinds, theirs, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(self._tree, leaves)
        try:
            with on_worker(worker, in_closure=True):
                result = self.__wrapped__(*args, **kwargs)
        finally:
            before = list(self._taken)
            self._taken[:] = [x.taken if isinstance(x, TracedIterator) else 0 for x in leaves]
        if self._taken != before:
            raise MoreElementsError  # it would take elements that it does not use
        return result


@functools.cache
def _first_worker() -> jax.Array:
    return jnp.zeros((), jnp.int32)


def _kind(value: Any) -> str:
    if not is_of_workers(value):
        return "plain"
    return "iterator" if isinstance(value, PerWorkerIterator) else "value"


def _is_leaf(value: Any) -> bool:
    """Returns whether an argument is taken as it is, although it may be a pytree."""
    return is_of_workers(value) or is_one_leaf(value)


def _of_worker(
    given: Sequence[Any], taken: Sequence[int], workers: int, worker: int, *, peek: bool = False
) -> list[Any]:
    """Returns what takes the place of each argument on a worker; None where that is the argument itself."""
    found: list[Any] = [None] * len(given)
    for i, (value, count) in enumerate(zip(given, taken, strict=True)):
        if isinstance(value, PerWorkerIterator):
            found[i] = value.first(count) if peek else value.take(worker, count)
        elif isinstance(value, PerWorkerValue):
            found[i] = value.of(worker, workers)
    return found


def _type(value: Any) -> tuple[Any, ...]:
    return np.shape(value), getattr(value, "dtype", type(value))


def _shown(types: Iterable[Any]) -> str:
    return ", ".join(leaf_text(jax.ShapeDtypeStruct(*of)) for of in types)


def _check_arrays(leaves: Sequence[Any]) -> None:
    for leaf in leaves:
        if np.asarray(leaf).dtype.kind in "OSUM":
            raise ArgumentTypeError(
                f"A worker's value or element of its dataset has {leaf_text(leaf)} in it. Devices hold bools "
                "and numbers: encode other values as integers."
            )


def _check_fetched(given: Sequence[Any]) -> None:
    if any(isinstance(x, RemoteValue) for x in given):
        raise ArgumentError(
            "coordinator.schedule got a RemoteValue among its arguments: fetch it first, with "
            "coordinator.fetch(value)."
        )


_TOO_MANY = "A scheduled function takes more than {most} elements of its per-worker iterators."
_OTHER_SHAPE = """\
The dataset of worker {worker} has elements of another shape or dtype than those that the function was \
scheduled for: {got}, where {wanted} were expected. Give all batches one shape, as with \
drop_remainder=True."""
