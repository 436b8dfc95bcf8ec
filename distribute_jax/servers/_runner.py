"""``run`` and ``schedule`` with parameter servers: a function is traced where it is scheduled."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._errors import ArgumentError, ArgumentTypeError
from distribute_jax._jax_private import trace_settings
from distribute_jax._messages import leaf_text
from distribute_jax._values import NotAnArray, PerReplica
from distribute_jax.program import Replicas, Runner
from distribute_jax.program._arguments import check_call, is_one_leaf
from distribute_jax.program._binding import step_lock
from distribute_jax.program._cache import Request
from distribute_jax.program._compare import copied
from distribute_jax.program._options import UNVERIFIED, checked_run_options
from distribute_jax.program._padding_check import run_checked_for_leaks
from distribute_jax.program._result_rows import Unknown
from distribute_jax.program._skipped_steps import StepCounts, check_counts
from distribute_jax.program._trace_errors import step_name
from distribute_jax.servers._coordinator import Coordinator
from distribute_jax.servers._engines import Engine
from distribute_jax.servers._halves import of_replica
from distribute_jax.servers._halves_cache import BoundHalves, HalvesCache
from distribute_jax.servers._input import (
    MoreElementsError,
    PerWorkerIterator,
    PerWorkerValue,
    TracedIterator,
    check_not_on_worker,
    experimental_get_current_worker_index,
    in_closure,
    on_worker,
)

_MAX_ELEMENTS = 64


class ServersRunner(Runner):
    """Schedules functions on workers; what is not scheduled runs here, after all closures."""

    def __init__(
        self,
        strategy: Any,
        replicas: Replicas,
        coordinator: Coordinator,
        engine: Engine,
        **options: Any,
    ) -> None:
        """Takes the strategy's ``partitioner`` and ``sparse`` as options."""
        super().__init__(strategy, replicas, steps_in_flight=None)
        self._coordinator, self._engine = coordinator, engine
        self._shares = strategy.num_replicas_in_sync
        servers = len(coordinator.stores)
        self._halves = HalvesCache(strategy, servers, coordinator, **options)
        self._guarded: dict[int, tuple[StepCounts, int]] = {}
        self._element_counts: dict[Any, list[int]] = {}
        """How many elements of each of its arguments a function took when it was last traced."""
        self._options: Any = None
        """Those given for the function that was scheduled last, or for ``run`` in it."""
        self._last: tuple[Any, ...] = ()
        """The last function without other arguments, with what it depends on, its halves and data."""

    def __call__(self, fn: Callable[..., Any], args: Any, kwargs: Any, options: Any) -> Any:
        """Runs a step here, after all closures; in a scheduled function, as a part of it."""
        if in_closure():
            check_call(args, kwargs)
            self._options = options or self._options
            with on_worker(experimental_get_current_worker_index()):
                return fn(*args, **(kwargs or {}))
        self._coordinator.join()
        return super().__call__(fn, args, kwargs, options)

    def steps(self, *args: Any) -> Any:
        self._coordinator.join()
        return super().steps(*args)

    def check_skipped_steps(self, delay: int = 0) -> None:
        """Also checks the closures since the last call, which have finished."""
        super().check_skipped_steps(delay)
        if not delay:
            guarded, self._guarded = self._guarded, {}
            for guard, closures in guarded.values():
                check_counts(guard, guard.get_raw_value(), closures)

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Any,
        kwargs: Any,
        most: int | None = None,
        options: Any = None,
    ) -> Any:
        """Queues a function for any worker, once fewer than ``most`` are open; returns remote values."""
        check_not_on_worker()
        flags = getattr(getattr(fn, "__code__", None), "co_flags", 0)
        if not callable(fn) or flags & (inspect.CO_COROUTINE | inspect.CO_GENERATOR):
            raise ArgumentTypeError(
                f"coordinator.schedule(fn={leaf_text(fn)}): fn must be a function that is not async "
                "and not a generator."
            )
        check_call(args, kwargs, "coordinator.schedule(fn")
        leaves, tree = jax.tree.flatten((tuple(args), kwargs or {}), is_leaf=_is_leaf)
        self._options = options
        bound, data, counts = self._traced(fn, leaves, tree)
        mirrored, rows = bound.halves.plan.mirrored, bound.rows or ()
        self._engine.start()
        self._engine.check(bound.halves)
        closure = self._coordinator.schedule(bound, data, most, self._shares)
        for guard in bound.skip_counts:
            _, closures = self._guarded.get(id(guard), (guard, 0))
            self._guarded[id(guard)] = guard, closures + 1

        def value(k: int) -> Any:
            array = self._coordinator.result(closure)[k]
            real = counts if counts is not None and rows[k] else None
            if self._shares > 1 and not mirrored[k]:
                return PerReplica(array, self._strategy.mesh, counts=real)
            return array[: real[0]] if real else array

        remote = [RemoteValue(functools.partial(value, k)) for k in range(len(mirrored))]
        return bound.result(remote)

    def _traced(
        self, fn: Callable[..., Any], arguments: list[Any], tree: Any
    ) -> tuple[BoundHalves, Callable[..., Any], tuple[int, ...] | None]:
        """Returns the halves of a function, what reads a worker's data, and how many rows are real."""
        kinds = [type(x) if isinstance(x, _OF_WORKERS) else None for x in arguments]
        plain = [x for x, kind in zip(arguments, kinds, strict=True) if kind is None]
        last, known = None, self._last  # which another thread may replace
        if not plain and isinstance(fn, FunctionType):
            settings = self._coordinator.workers, trace_settings()
            last = weakref.ref(fn), (tree, *arguments, *settings)
            if last == known[:2] and known[2].fits_function(fn):
                return *known[2:], None
        key = getattr(fn, "__code__", type(fn))
        counts = self._element_counts.get(key, [])
        counts = [*counts, *[0] * len(arguments)][: len(arguments)]
        while True:
            traced_counts = list(counts)
            of_worker = functools.partial(
                _of_worker, arguments, traced_counts, self._coordinator.workers
            )
            leaves, inputs = jax.tree.flatten(of_worker(None))
            _check_arrays(leaves)
            step = _Closure(fn, kinds, tree, inputs, counts)
            every = (*plain, *leaves, _first_worker())
            try:
                bound, parsed = self._halves.bound(step, every, len(leaves) + 1)
                break
            except MoreElementsError:
                if max(counts) > _MAX_ELEMENTS:
                    raise ArgumentError(_TOO_MANY.format(most=_MAX_ELEMENTS)) from None
        self._element_counts[key] = traced_counts
        self._compare(Request(step, parsed, checked_run_options(self._options)), bound)
        if parsed.counts is not None and bound.rows is None:
            bound.rows = self._checked_rows(Request(step, parsed, UNVERIFIED), bound)
        fixed = bound.halves.data(bound.binding, parsed)
        # A worker reads them later, when the user may have changed them in place.
        fixed = [x.copy() if isinstance(x, np.ndarray) else x for x in fixed]
        end = len(fixed) - (parsed.counts is not None)
        before, after = fixed[: end - len(leaves) - 1], fixed[end:]
        types = [*map(_type, leaves)]
        shares = self._shares  # workers hold `read`, which must not hold the strategy

        def read(worker: int, share: int) -> list[Any]:
            flat: Any = jax.tree.flatten(of_worker(worker)) if types else ([], inputs)
            leaves, structure = flat
            if structure != inputs or [*map(_type, leaves)] != types:
                got, wanted = _shown(map(_type, leaves)), _shown(types)
                raise ArgumentError(_OTHER_SHAPE.format(worker=worker, got=got, wanted=wanted))
            return of_replica([*before, *leaves, np.int32(worker), *after], share, shares)

        if last is not None and not (parsed.bound or bound.halves.arrays):
            self._last = *last, bound, read
        return bound, read, parsed.counts

    def _compare(self, request: Request, bound: BoundHalves) -> None:
        """Compares the first update of several workers with one device, and logs likely mistakes."""
        if self._shares == 1 or bound.is_compared:
            return
        with step_lock:
            entry = self.entry(request)
            if request.options.verify not in entry.program.verified:
                self._verify(request, entry)
        bound.is_compared = True

    def _checked_rows(self, request: Request, bound: BoundHalves) -> list[bool]:
        """Returns which results have a row for each example; refuses a step that sees padding, as ``run``."""
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


class RemoteValue(NotAnArray):
    """An array that a worker computes, or has computed.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/coordinator/RemoteValue
    """

    def __init__(self, wait: Callable[[], Any]) -> None:
        self._wait = wait

    def get(self) -> Any:
        """Waits for the value and returns it as ``strategy.run`` does, or raises the function's error."""
        return self._wait()

    def fetch(self) -> Any:
        """Waits for the value and returns it as a NumPy array, or raises the function's error.

        If several workers compute an update together and their values differ, it is a tuple of arrays.
        """
        value = self._wait()
        if isinstance(value, PerReplica):
            return tuple(map(_as_numpy, value.values))
        return _as_numpy(value)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"RemoteValue has no {name!r}. {self._conversion_error(None)}")

    def _conversion_error(self, caller: str | None) -> Exception:
        return ArgumentTypeError(
            "A RemoteValue is not an array, but what a worker computes: wait for it and get the array with "
            "coordinator.fetch(value), or value.fetch()."
        )


def _as_numpy(value: Any) -> Any:
    # NumPy has no random keys.
    return value if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else np.asarray(value)


class _Closure:
    """A scheduled function as a step, whose last arguments are those of a worker."""

    def __init__(
        self, fn: Any, kinds: list[Any], tree: Any, inputs: Any, counts: list[int]
    ) -> None:
        """Takes the structure of a worker's arguments; calls set ``counts`` to the elements taken."""
        self.__wrapped__, self.__qualname__ = fn, step_name(fn)
        self._kinds, self._tree, self._inputs, self._counts = kinds, tree, inputs, counts
        self.__captures_key__ = _Closure, tree, inputs, *kinds

    def __call__(self, *flat: Any) -> Any:
        """Calls the function so that ``strategy.run`` in it is a part of it."""
        number = self._kinds.count(None)
        *of_worker, worker = flat[number:]
        plain, others = iter(flat[:number]), jax.tree.unflatten(self._inputs, of_worker)
        leaves = [
            next(plain) if kind is None else TracedIterator(x) if kind is PerWorkerIterator else x
            for kind, x in zip(self._kinds, others, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(self._tree, leaves)
        before = list(self._counts)
        try:
            with on_worker(worker, in_closure=True):
                result = self.__wrapped__(*args, **kwargs)
        finally:
            self._counts[:] = [x.taken if isinstance(x, TracedIterator) else 0 for x in leaves]
        if self._counts != before:
            raise MoreElementsError  # it would take elements that it does not use
        return result


_OF_WORKERS = (PerWorkerValue, PerWorkerIterator)


@functools.cache
def _first_worker() -> jax.Array:
    return jnp.zeros((), jnp.int32)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, _OF_WORKERS) or is_one_leaf(value)


def _of_worker(
    arguments: Sequence[Any], counts: Sequence[int], workers: int, worker: int | None
) -> list[Any]:
    return [
        x.of_worker(worker, workers, count) if isinstance(x, _OF_WORKERS) else None
        for x, count in zip(arguments, counts, strict=True)
    ]


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


_TOO_MANY = "A scheduled function takes more than {most} elements of its per-worker iterators."
_OTHER_SHAPE = """\
The dataset of worker {worker} has elements of another shape or dtype than those that the function was \
scheduled for: {got}, where {wanted} were expected. Give all batches one shape, as with \
drop_remainder=True."""
