"""``ClusterCoordinator`` with workers that are threads: numbers, order, errors, and what comes back."""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import long
from flax import nnx
from leaves import assert_same_bits, numbers

import distribute_jax as dj
from distribute_jax.coordinator import (
    ClusterCoordinator,
    PerWorkerValue,
    experimental_get_current_worker_index,
)
from distribute_jax.servers import _coordinator as queue, _engines, _runner
from distribute_jax.servers._halves_cache import BoundHalves
from distribute_jax.servers._wire import WireError
from distribute_jax.strategies import _parameter_server

SECONDS = 60


class Scalar(nnx.Module):
    """One weight that starts at 0."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(()))


def scalar_step(strategy: dj.Strategy) -> tuple[Scalar, Callable[[Any], jax.Array]]:
    """A step that goes half the way from the weight to x."""
    with strategy.scope():
        model = Scalar()
        optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)

    def step(x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda model: (model.w[...] - x) ** 2 / 2)(model)
        optimizer.update(model, dj.get_replica_context().all_reduce("sum", grads))
        return loss

    return model, step


def of_servers(workers: int = 1, staleness: float = 0, servers: int = 1) -> tuple[Any, Any]:
    """A strategy and its coordinator."""
    strategy = dj.ParameterServerStrategy(workers=workers, servers=servers, max_staleness=staleness)
    return strategy, ClusterCoordinator(strategy)


@pytest.mark.parametrize("workers", [1, 3])
def test_without_staleness_the_numbers_are_those_of_one_device(workers: int) -> None:
    """However many workers there are: 0.5, 1.25, 2.125 after x = 1, 2, 3."""
    strategy, coordinator = of_servers(workers)
    model, step = scalar_step(strategy)
    losses = [coordinator.schedule(step, args=(float(x),)) for x in (1, 2, 3)]
    coordinator.join(SECONDS)
    assert float(model.w[...]) == 2.125
    assert coordinator.fetch(losses) == [0.5, 1.125, 1.53125]
    stats = coordinator.stats
    assert (stats.version, stats.staleness, sum(stats.applied)) == (3, {0: 3}, 3)


def test_a_stale_step_is_computed_from_what_it_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps from w = 0, with x = 1 and 2, then one with 3: 1.5, 2.25; staleness 0, 1, 0."""
    strategy, coordinator = of_servers(2, staleness=1)
    model, step = scalar_step(strategy)
    both, computed = threading.Barrier(2), _engines.run

    def when_both_have_read(program: Any, order: Any, *args: Any) -> Any:
        if order.run <= 2:
            both.wait(SECONDS)
        return computed(program, order, *args)

    monkeypatch.setattr(_engines, "run", when_both_have_read)
    for x in (1.0, 2.0):
        coordinator.schedule(step, args=(x,))
    coordinator.join(SECONDS)
    assert float(model.w[...]) == 1.5
    coordinator.schedule(step, args=(3.0,))
    coordinator.join(SECONDS)
    assert float(model.w[...]) == 2.25
    assert coordinator.stats.staleness == {0: 2, 1: 1}


def test_run_and_closures_continue_from_each_others_state() -> None:
    """``strategy.run`` and ``fit`` wait for closures, and closures start from what they have left."""
    strategy, coordinator = of_servers(2)
    model, step = scalar_step(strategy)
    coordinator.schedule(step, args=(1.0,))
    assert float(strategy.run(step, args=(2.0,))) == 1.125
    coordinator.schedule(step, args=(3.0,))
    coordinator.join(SECONDS)
    assert float(model.w[...]) == 2.125


@pytest.mark.exhaustive
def test_rows_of_a_partial_batch_are_cut_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come without those of padding; what is made of all rows is refused by name, once looked at."""
    checks, check = [], _runner.run_checked_for_leaks
    monkeypatch.setattr(_runner, "run_checked_for_leaks", lambda *x: checks.append(check(*x)))
    strategy, coordinator = of_servers(1)
    *_, last = strategy.distribute_dataset(dj.data.from_arrays(np.arange(7.0)).batch(4))
    with strategy.scope():
        total = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)

    def add(x: jax.Array) -> None:
        total.assign_add(dj.compute_average_loss(x))

    for _ in range(2):
        coordinator.schedule(add, args=(last,))
    assert len(checks) == 1
    rows = coordinator.schedule(lambda x: dj.per_example(2 * x), args=(last,))
    assert rows.fetch().tolist() == [8, 10, 12]
    assert coordinator.schedule(dj.compute_average_loss, args=(last,)).fetch() == 5
    assert coordinator.schedule(lambda x: 2 * x, args=(last,)).fetch().tolist() == [8, 10, 12]
    with pytest.raises(ValueError, match="rows of all replicas"):
        coordinator.schedule(lambda x: jnp.concatenate([x, x]), args=(last,))
    with pytest.raises(dj.PaddingLeakError, match="reaches"):
        coordinator.schedule(lambda x: x.mean(), args=(last,))


def network() -> nnx.Sequential:
    """A layer with batch norm and dropout."""
    rngs = nnx.Rngs(0)
    norm, dropout = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
    return nnx.Sequential(norm, nnx.relu, dropout, nnx.Linear(8, 1, rngs=rngs))


ROWS = np.random.default_rng(0).normal(size=(12, 16, 8)).astype(np.float32)


def trained(strategy: dj.Strategy) -> tuple[list[float], list[Any]]:
    """The losses of a step on each batch of a distributed dataset, and all numbers after it."""
    with strategy.scope():
        model = network()
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        seen = dj.Variable(0, aggregation=dj.VariableAggregation.SUM)
        metric = nnx.metrics.Average("loss")

    def step(x: jax.Array) -> jax.Array:
        def loss_of(model: nnx.Sequential) -> Any:
            losses = (model(x) - x.sum(1, keepdims=True))[:, 0] ** 2
            return dj.compute_average_loss(losses), losses

        (loss, losses), grads = nnx.value_and_grad(loss_of, has_aux=True)(model)
        loss, grads = dj.get_replica_context().all_reduce("sum", (loss, grads))
        optimizer.update(model, grads)
        metric.update(loss=losses)
        seen.assign_add(1)
        return loss

    batches = strategy.distribute_dataset(dj.data.from_arrays(ROWS.reshape(-1, 8)).batch(16))
    if isinstance(strategy, dj.ParameterServerStrategy):
        coordinator = ClusterCoordinator(strategy)
        losses = coordinator.fetch([coordinator.schedule(step, args=(batch,)) for batch in batches])
        coordinator.join(SECONDS)
    else:
        losses = [strategy.run(step, args=(batch,)) for batch in batches]
    state = nnx.state((model, optimizer, seen, metric))
    return list(map(float, losses)), numbers(state)


@pytest.mark.parametrize("servers", [3, long(1)])
def test_scheduled_steps_have_the_bits_of_one_device(servers: int) -> None:
    """Batch norm, dropout, Adam, a counter and a metric, with the state on one server or three."""
    strategy, _ = of_servers(2, servers=servers)
    losses, state = trained(strategy)
    expected, of_one = trained(dj.OneDeviceStrategy("cpu:0"))
    assert losses == expected
    assert_same_bits(state, of_one)


@pytest.mark.parametrize("bound", [0, long(1), 4])
def test_every_update_keeps_the_bound_and_none_is_lost(bound: int) -> None:
    """100 increments by four workers are 100, each at most so many updates late."""
    strategy, coordinator = of_servers(4, staleness=bound)
    with strategy.scope():
        total = dj.Variable(0, aggregation=dj.VariableAggregation.SUM)
    for _ in range(100):
        coordinator.schedule(lambda: total.assign_add(1))
    coordinator.join(SECONDS)
    assert int(total[...]) == 100
    assert max(coordinator.stats.staleness) <= bound
    assert sum(coordinator.stats.staleness.values()) == 100


def test_each_worker_has_its_values_and_its_dataset() -> None:
    """A closure gets value, element and number of the worker that runs it."""
    _, coordinator = of_servers(2, staleness=1)
    made = []

    def dataset() -> Iterator[np.ndarray[Any, Any]]:
        made.append(worker := experimental_get_current_worker_index())
        return (np.full(2, 10 * worker + i) for i in range(100))

    def closure(iterator: Any, value: jax.Array) -> Any:
        worker = experimental_get_current_worker_index()
        return {"worker": worker, "value": value, "element": next(iterator), "none": None}

    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    values = PerWorkerValue([np.int32(20), np.int32(21)])
    results = [coordinator.schedule(closure, args=(iterator, values)) for _ in range(6)]
    seen: dict[int, list[int]] = {0: [], 1: []}
    for result in coordinator.fetch(results):
        worker = int(result["worker"])
        assert (int(result["value"]), result["none"]) == (20 + worker, None)
        seen[worker].append(int(result["element"][0]))
    for worker, elements in seen.items():
        assert sorted(elements) == [10 * worker + i for i in range(len(elements))]
    assert set(made) <= {0, 1}
    assert coordinator.stats.version == 0, "nothing was written"


def test_a_worker_may_make_a_distributed_dataset() -> None:
    """As in TensorFlow's tutorial; not where a batch is divided among several workers."""
    for shares in (1, 2):
        strategy = dj.ParameterServerStrategy(workers=2, workers_per_update=shares)
        coordinator = dj.coordinator.ClusterCoordinator(strategy)
        dataset = strategy.distribute_datasets_from_function(lambda _: [np.arange(4.0)])
        iterator = iter(coordinator.create_per_worker_dataset(dataset))
        refused = pytest.raises(ValueError, match="workers_per_update=2")
        with contextlib.nullcontext() if shares == 1 else refused:
            result = coordinator.schedule(lambda elements: next(elements).sum(), args=(iterator,))
            assert float(result.fetch()) == 6.0


def test_a_function_takes_only_the_elements_that_it_uses() -> None:
    """Two of one iterator and one of another; then, of the same code, one and none, in a reused buffer."""
    _, coordinator = of_servers(1)

    def filled() -> Iterator[Any]:
        buffer = np.zeros((), np.int32)
        for buffer[...] in range(100):
            yield buffer

    first, second = (iter(coordinator.create_per_worker_dataset(filled)) for _ in range(2))

    def taking(two: bool) -> Callable[[Any, Any], Any]:
        return lambda a, b: (next(a), next(a), next(b)) if two else (next(a),)

    results = [
        coordinator.schedule(taking(two), args=(first, second))
        for two in (True, False, True, False)
    ]
    assert coordinator.fetch(results) == [(0, 1, 0), (2,), (3, 4, 1), (5,)]


def test_run_inside_a_scheduled_function_is_traced_with_it() -> None:
    """``strategy.run`` and ``strategy.reduce`` in a closure are traced with it, as in TF's tutorial."""
    strategy, coordinator = of_servers(1)
    model, step = scalar_step(strategy)

    def closure(x: jax.Array) -> jax.Array:
        return strategy.reduce("sum", strategy.run(step, args=(x,)), axis=None)

    assert coordinator.schedule(closure, args=(1.0,)).fetch() == 0.5
    coordinator.join(SECONDS)
    assert float(model.w[...]) == 0.5


def failing(coordinator: Any) -> tuple[list[Any], Callable[[], None]]:
    """Remote values of a closure that works, one whose data fails and three that wait; their ``join``."""
    go = threading.Event()

    def dataset() -> Iterator[np.ndarray[Any, Any]]:
        yield np.ones(2)
        go.wait(SECONDS)
        raise KeyError("element 1 is broken")

    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    results = [coordinator.schedule(lambda i: next(i).sum(), args=(iterator,)) for _ in range(5)]
    go.set()
    return results, lambda: coordinator.join(SECONDS)


def test_a_callback_that_raises_fails_its_closure_with_the_name_of_the_step() -> None:
    """As under ``run``, not with an error of JAX."""
    _, coordinator = of_servers()

    def load(x: Any) -> Any:
        return jax.pure_callback(lambda _: open("/none"), jax.ShapeDtypeStruct((), x.dtype), x)

    coordinator.schedule(load, args=(jnp.float32(1),))
    with pytest.raises(dj.StepFailedError, match=r"load failed on a worker: .*No such file"):
        coordinator.join(SECONDS)


def test_join_raises_a_worker_error_and_cancels_waiting_closures() -> None:
    """``join`` raises it once; what had not begun is cancelled; then closures run again."""
    _, coordinator = of_servers(1)
    (first, broken, *waiting), join = failing(coordinator)
    with pytest.raises(KeyError, match="element 1 is broken"):
        join()
    join()
    assert first.fetch() == 2
    with pytest.raises(KeyError, match="element 1 is broken"):
        broken.fetch()
    for value in waiting:
        with pytest.raises(dj.CancelledError, match=r"cancelled\. Please reschedule"):
            value.fetch()
    assert coordinator.done()
    assert coordinator.schedule(lambda x: x + 1, args=(1,)).fetch() == 2


def test_join_raises_the_error_of_a_closure_that_runs_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was over before its servers were lost; its error comes at join all the same."""
    going_back = functools.partial(queue.Coordinator, snapshot_every=60.0)
    monkeypatch.setattr(_parameter_server, "Coordinator", going_back)
    strategy, coordinator = of_servers()
    _, step = scalar_step(strategy)
    assert coordinator.schedule(step, args=(1.0,)).fetch() == 0.5

    def failing(*_: Any) -> None:
        raise FloatingPointError("the second time")

    monkeypatch.setattr(_engines, "run", failing)
    strategy._coordinator.lose_server(0, "")
    strategy._coordinator.go_back()
    with pytest.raises(FloatingPointError, match="the second time"):
        coordinator.join(SECONDS)


def written_to(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Any, Any, Callable[[Any], None]]:
    """A strategy whose servers can go back, two variables, and a step that adds the first to the second."""
    going_back = functools.partial(queue.Coordinator, snapshot_every=60.0)
    monkeypatch.setattr(_parameter_server, "Coordinator", going_back)
    strategy, coordinator = of_servers()
    with strategy.scope():
        total = dj.Variable(1.0, aggregation=dj.VariableAggregation.SUM)
        summed = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)

    def step(x: Any) -> None:
        summed.assign_add(x * total[...])
        total.assign_add(0.0 * x)

    for _ in range(3):
        coordinator.schedule(step, args=(1.0,))
    return strategy, coordinator, total, summed, step


def lost_once(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> list[WireError]:
    """Lets the first server fail when it is asked for state next; the list is empty after that."""
    store, errors = strategy._coordinator.stores[0], [WireError("it is gone")]
    pull = store.pull

    def pull_once_more(keys: Any) -> Any:
        if errors:
            raise errors.pop()
        return pull(keys)

    monkeypatch.setattr(store, "pull", pull_once_more)
    return errors


def test_state_is_moved_while_a_server_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What workers only read goes to the server that updates it, when this can be reached again."""
    strategy, coordinator = of_servers(servers=2)
    with strategy.scope():
        kind = dj.VariableAggregation.SUM
        first, second = dj.Variable(1.0, aggregation=kind), dj.Variable(2.0, aggregation=kind)
    assert coordinator.schedule(lambda: 1 * second[...]).fetch() == 2.0
    errors = lost_once(strategy, monkeypatch)

    def step() -> None:
        first.assign_add(1.0)
        second.assign_add(1.0)

    coordinator.schedule(step)
    coordinator.join(SECONDS)
    assert (float(first[...]), float(second[...]), errors) == (2.0, 3.0, [])


def test_a_closure_is_scheduled_while_a_server_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user writes waits for the server, which cannot be reached, and is not an error."""
    strategy, coordinator, total, summed, step = written_to(monkeypatch)
    errors = lost_once(strategy, monkeypatch)
    total.assign(10.0)
    coordinator.schedule(step, args=(1.0,))
    coordinator.join(SECONDS)
    assert (float(summed[...]), errors) == (13.0, [])


def test_closures_run_again_with_what_was_written_before_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the write after them was interrupted; it comes with the next closure all the same."""
    strategy, coordinator, total, summed, step = written_to(monkeypatch)
    (store,) = strategy._coordinator.stores
    total.assign(10.0)
    with monkeypatch.context() as patched:
        patched.setattr(store, "assign", raises(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            coordinator.schedule(step, args=(1.0,))
    strategy._coordinator.lose_server(0, "")
    strategy._coordinator.go_back()
    coordinator.schedule(step, args=(1.0,))
    coordinator.join(SECONDS)
    assert (float(summed[...]), float(total[...])) == (13.0, 10.0)


def raises(error: BaseException) -> Callable[..., Any]:
    """A function that raises an error."""

    def function(*_: Any) -> Any:
        raise error

    return function


class Signaller:
    """Sends an interrupt at the n-th place where Python may handle one, in what schedules and joins."""

    NAMES = ("schedule", "_send", "send", "add", "_load", "join", "write_back")
    BEFORE = ("CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD", "RESUME")

    def __init__(self, at: int) -> None:
        self.left, self.last = at, dict[FrameType, str]()

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        """Is what ``sys.settrace`` takes."""
        code = frame.f_code
        if code.co_name not in self.NAMES or "servers" not in code.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= self.last.get(frame) in self.BEFORE
            self.last[frame] = dis.opname[code.co_code[frame.f_lasti]]
            if self.left == 0:
                self.left = -1
                signal.raise_signal(signal.SIGINT)
        return self


@pytest.mark.exhaustive
def test_an_interrupt_at_any_instruction_loses_no_closure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it comes, what was written is there, and a join returns, with the closure or not."""
    _, coordinator, total, summed, step = written_to(monkeypatch)
    coordinator.join(SECONDS)
    is_over, at = False, 0

    def call() -> None:
        coordinator.schedule(step, args=(1.0,))
        coordinator.join(SECONDS)

    while not is_over:
        at += 1
        for variable, value in ((total, float(at)), (summed, 0.0)):
            variable.assign(value)
        trace = Signaller(at)
        sys.settrace(trace)
        with contextlib.suppress(KeyboardInterrupt):
            call()
        sys.settrace(None)
        is_over = trace.left > 0
        coordinator.join(SECONDS)
        before = float(summed[...])
        assert before in (0.0, at), f"place {at}"
        call()
        assert (float(summed[...]), float(total[...])) == (before + at, at), f"place {at}"
    assert at > 30


def test_an_interrupt_ends_the_wait_for_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a join whose servers do not answer; the next join updates the variables."""
    strategy, coordinator = of_servers()
    model, step = scalar_step(strategy)
    coordinator.schedule(step, args=(1.0,)).fetch()
    (store,) = strategy._coordinator.stores
    before, started = signal.signal(signal.SIGALRM, raises(KeyboardInterrupt())), time.monotonic()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(store, "pull", lambda _: Future())
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                coordinator.join(10.0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - started < 5
    assert float(model.w[...]) == 0
    coordinator.join(SECONDS)
    assert float(model.w[...]) == 0.5


def test_an_element_is_read_once_although_servers_go_back_meanwhile() -> None:
    """The first worker still reads it when another one has the closure too."""
    reads, release = threading.Event(), threading.Event()

    def data(worker: int, share: int) -> list[Any]:
        reads.set()
        release.wait(SECONDS)
        return [worker]

    closure = queue.Closure(None, data)  # type: ignore[arg-type]
    read: list[Any] = []
    first = threading.Thread(target=lambda: read.append(closure.data_of(0, 0)))
    second = threading.Thread(target=lambda: read.append(closure.data_of(1, 0)))
    first.start()
    reads.wait(SECONDS)
    second.start()
    second.join(0.05)
    release.set()
    first.join(SECONDS)
    second.join(SECONDS)
    assert read == [[0], [0]]


def test_a_dataset_is_read_by_one_thread_at_a_time() -> None:
    """A function that takes more elements is traced while worker 0 reads them for another one."""
    _, coordinator = of_servers()
    reads, release = threading.Event(), threading.Event()

    def data() -> Iterator[float]:
        yield 0.0
        reads.set()
        release.wait(SECONDS)
        yield from (1.0, 2.0, 3.0)

    elements = iter(coordinator.create_per_worker_dataset(data))
    ones = [coordinator.schedule(lambda i: next(i), args=(elements,)) for _ in range(2)]
    reads.wait(SECONDS)
    threading.Timer(0.1, release.set).start()
    two = coordinator.schedule(lambda i: next(i) + next(i), args=(elements,))
    assert coordinator.fetch([*ones, two]) == [0, 1, 5]


def test_the_end_of_a_workers_data_is_a_stop_iteration() -> None:
    """``join`` raises ``EndOfDataError``, which names the worker."""
    _, coordinator = of_servers(1)
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [np.ones(2)]))
    for _ in range(2):
        coordinator.schedule(lambda i: next(i), args=(iterator,))
    with pytest.raises(StopIteration, match="dataset of worker 0 has no more elements"):
        coordinator.join(SECONDS)


def test_elements_of_another_shape_are_refused_with_both_shapes() -> None:
    """An element of another shape than the closure was scheduled for fails with both shapes."""
    _, coordinator = of_servers(1)
    data = [np.ones(2, np.float32), np.ones(3, np.float32)]
    iterator = iter(coordinator.create_per_worker_dataset(lambda: data))
    for _ in range(2):
        coordinator.schedule(lambda i: next(i).sum(), args=(iterator,))
    text = r"of worker 0 has elements of another .* float32\[3\], where float32\[2\] were expected"
    with pytest.raises(ValueError, match=text):
        coordinator.join(SECONDS)


@pytest.mark.exhaustive
def test_join_timeout_reports_unfinished_closures() -> None:
    """A closure whose data does not come is named after the time, and nothing hangs."""
    _, coordinator = of_servers(1)
    go = threading.Event()

    def dataset() -> Iterator[np.ndarray[Any, Any]]:
        yield np.ones(1)
        go.wait(SECONDS)
        yield np.ones(1)

    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    for _ in range(2):
        coordinator.schedule(lambda i: next(i), args=(iterator,))
    with pytest.raises(TimeoutError, match=r"1 function\(s\) not finished after 3 seconds"):
        coordinator.join(3)
    assert not coordinator.done()
    go.set()
    coordinator.join(SECONDS)


def test_a_full_queue_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for four closures, the fifth is scheduled when one has ended."""
    monkeypatch.setattr(queue, "_MAX_CLOSURES", 4)
    strategy, coordinator = of_servers(1)
    results, open_closures = [], []
    for i in range(12):
        results.append(coordinator.schedule(lambda x: x * 2, args=(i,)))
        open_closures.append(len(strategy._coordinator._log.open))
    assert max(open_closures) <= 4
    assert coordinator.fetch(results) == list(range(0, 24, 2))


def test_a_remote_value_that_is_used_like_an_array_says_how_to_fetch_it() -> None:
    """Conversions, arithmetic and formats of numbers; its truth value does not depend on the array."""
    _, coordinator = of_servers()
    value = coordinator.schedule(lambda: jnp.zeros(()))
    for use in (float, np.asarray, jnp.asarray, bool, lambda x: 2 * x, lambda x: f"{x:.3f}"):
        with pytest.raises(TypeError, match=r"^A RemoteValue is not .*coordinator\.fetch\(value\)"):
            use(value)
    for function in (jnp.sum, lambda x: jnp.add(x, 1), jax.jit(lambda x: x)):
        with pytest.raises(TypeError, match=r"distribute_jax\.coordinator\.RemoteValue"):
            function(value)
    assert f"{value}" == str(value)
    with pytest.raises(AttributeError, match=r"no 'numpy'\. .*coordinator\.fetch\(value\)"):
        value.numpy()


def test_schedule_refuses_invalid_arguments() -> None:
    """Wrong functions, remote values and strategies are refused; errors of a step are raised here."""
    strategy, coordinator = of_servers(2)
    assert ClusterCoordinator(strategy) is coordinator
    assert coordinator.strategy is strategy
    with pytest.raises(ValueError, match="must be a ParameterServerStrategy"):
        ClusterCoordinator(dj.MirroredStrategy([0, 1]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"fn (is not|must be) a function"):
        coordinator.schedule(3)
    value = coordinator.schedule(lambda: 1.0 + jnp.ones(()))
    with pytest.raises(TypeError, match=r"coordinator\.fetch\(value\)"):
        coordinator.schedule(lambda x: 2 * x, args=(value,))
    with pytest.raises(ValueError, match="1 values was used with 2 workers"):
        coordinator.schedule(lambda x: x, args=(PerWorkerValue([1.0]),))
    with pytest.raises(NotImplementedError, match="AsyncDistributedIterator is not supported"):
        next(iter(coordinator.create_per_worker_dataset(lambda: [1.0])))
    with pytest.raises(RuntimeError, match="where there is no worker"):
        experimental_get_current_worker_index()
    model, _ = scalar_step(strategy)

    def forgets(x: jax.Array) -> None:
        model.w[...] = model.w[...] - x

    with pytest.raises(dj.OutOfSyncError, match=r"model\.w \(Param\) depends on args\[0\]"):
        coordinator.schedule(forgets, args=(1.0,))
    assert coordinator.fetch({"a": 5, "b": value}) == {"a": 5, "b": 2.0}


def test_a_write_while_closures_run_is_applied_after_them() -> None:
    """A value that is assigned after the last closure is neither lost at join nor for the next one."""
    strategy, coordinator = of_servers(2)
    model, step = scalar_step(strategy)
    coordinator.schedule(step, args=(1.0,))
    model.w[...] = jnp.float32(4)
    coordinator.join(SECONDS)
    assert float(model.w[...]) == 4
    assert coordinator.schedule(step, args=(4.0,)).fetch() == 0


def alternated(strategy: Any, schedule: Callable[..., Any]) -> list[Any]:
    """What a GAN's two steps in turn leave, of which both count dropout and change batch statistics."""
    with strategy.scope():
        rngs = nnx.Rngs(0)
        maker = nnx.Linear(4, 6, rngs=rngs)
        layers = nnx.Linear(6, 5, rngs=rngs), nnx.BatchNorm(5, rngs=rngs)
        critic = nnx.Sequential(*layers, nnx.Dropout(0.5, rngs=rngs), nnx.Linear(5, 1, rngs=rngs))
        optimizers = [
            nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param) for model in (critic, maker)
        ]

    def step_of(model: nnx.Module, other: nnx.Module, optimizer: nnx.Optimizer) -> Any:
        def loss_of(model: nnx.Module, other: nnx.Module, x: jax.Array) -> jax.Array:
            first, second = (model, other) if isinstance(model, nnx.Linear) else (other, model)
            return dj.compute_average_loss(jnp.square(second(first(x))[:, 0] - 1))

        def step(x: jax.Array) -> jax.Array:
            loss, grads = nnx.value_and_grad(loss_of)(model, other, x)
            optimizer.update(model, dj.get_replica_context().all_reduce("sum", grads))
            return loss

        return step

    steps = step_of(critic, maker, optimizers[0]), step_of(maker, critic, optimizers[1])
    rng = np.random.default_rng(0)
    for i in range(8):
        schedule(steps[i % 2], args=(rng.normal(size=(8, 4)).astype(np.float32),))
    if isinstance(strategy, dj.ParameterServerStrategy):
        ClusterCoordinator(strategy).join(SECONDS)
    return numbers(nnx.state((maker, critic, optimizers)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("servers", [2, 3])
def test_steps_that_share_state_use_the_same_servers(servers: int) -> None:
    """The weights, statistics, moments and counts of a GAN are bitwise those of one device."""
    of_one = dj.OneDeviceStrategy("cpu:0")
    wanted = alternated(of_one, of_one.run)
    strategy, coordinator = of_servers(2, servers=servers)
    assert_same_bits(wanted, alternated(strategy, coordinator.schedule))


@pytest.mark.exhaustive
def test_a_step_that_needs_changed_state_on_more_servers_is_refused() -> None:
    """A rate that one step changes, and that the updates of another step then read on two servers.

    What only a worker has read before may be anywhere.
    """
    strategy, coordinator = of_servers(servers=2)
    with strategy.scope():
        rate, model = nnx.Param(jnp.ones(())), nnx.Linear(20, 20, rngs=nnx.Rngs(0))

    def look() -> Any:
        return rate[...], model.kernel[...].sum()

    def shift() -> None:
        model.kernel[...] -= 1

    def halve() -> None:
        rate[...] /= 2

    def train() -> None:
        for weight in (model.bias, model.kernel):
            weight[...] -= rate[...]

    seen = [coordinator.schedule(look)]
    for step in (halve, shift):
        coordinator.schedule(step)
    seen.append(coordinator.schedule(look))
    with pytest.raises(NotImplementedError, match=r"train needs these variables[\s\S]*\n  rate\n"):
        coordinator.schedule(train)
    coordinator.join(SECONDS)
    before, after = np.array(coordinator.fetch(seen))
    np.testing.assert_allclose(before - after, [0.5, 400], rtol=1e-5)


def test_a_norm_over_variables_on_different_servers_is_refused() -> None:
    """An earlier step has put them on two servers; with the step that needs both first, it runs."""

    def errors(order: tuple[int, int]) -> list[str]:
        strategy, coordinator = of_servers(servers=2)
        with strategy.scope():
            model = nnx.Linear(20, 20, rngs=nnx.Rngs(0))

        def decay() -> None:
            for weight in (model.bias, model.kernel):
                weight[...] *= 0.5

        def shrink() -> None:
            norm = jnp.sqrt((model.kernel[...] ** 2).sum() + (model.bias[...] ** 2).sum())
            for weight in (model.bias, model.kernel):
                weight[...] /= norm

        raised = []
        for i in order:
            try:
                coordinator.schedule((decay, shrink)[i])
            except dj.LoweringError as error:
                raised.append(str(error))
        coordinator.join(SECONDS)
        return raised

    assert errors((1, 0)) == []
    (text,) = errors((0, 1))
    assert "reads model.kernel at test_coordinator.py:" in text
    assert "Schedule this step before others" in text


@pytest.mark.exhaustive
def test_a_model_is_trained_after_another_model_of_the_step_was_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The weight is written at join, and nothing of the deleted module is kept, nor the step's program."""
    going_back = functools.partial(queue.Coordinator, snapshot_every=60.0)
    monkeypatch.setattr(_parameter_server, "Coordinator", going_back)
    strategy, coordinator = of_servers()
    with strategy.scope():
        model = Scalar()

    def train() -> None:
        other = Scalar()

        def step() -> None:
            model.w[...] += 1
            other.w[...] += 1

        coordinator.schedule(step)

    for epoch in (1, 2):
        train()
        gc.collect()
        coordinator.join(SECONDS)
        assert float(model.w[...]) == epoch
    coordinates = strategy._coordinator
    assert not coordinates.state._keys
    assert not coordinates.state._saved
    assert not [store for store in coordinates.stores if store._programs]
    assert len(strategy._runner._halves._bound) == 1


def test_a_closure_returns_variables_and_modules_as_they_are() -> None:
    """As ``run`` does: the objects themselves, beside remote values."""
    strategy, coordinator = of_servers()
    model, _ = scalar_step(strategy)
    same, weight, value, text = coordinator.schedule(lambda: (model, model.w, model.w[...], "a"))
    assert same is model
    assert weight is model.w
    assert (value.fetch(), text) == (0, "a")


@pytest.mark.parametrize("call", ["schedule", "join", "done", "fetch"])
def test_a_worker_cannot_wait_for_itself(call: str) -> None:
    """Neither in a scheduled function nor in one that makes a dataset, where it would wait for ever."""
    _, coordinator = of_servers()
    value = coordinator.schedule(lambda: jnp.ones(()))
    args = {"schedule": (abs,), "fetch": (value,)}.get(call, ())

    def calls() -> Iterator[float]:
        yield 1.0
        getattr(coordinator, call)(*args)
        yield 2.0

    with pytest.raises(RuntimeError, match="cannot schedule functions"):
        coordinator.schedule(lambda: list(calls()))
    iterator = iter(coordinator.create_per_worker_dataset(calls))
    for _ in range(2):
        coordinator.schedule(next, args=(iterator,))
    with pytest.raises(RuntimeError, match="cannot schedule functions"):
        coordinator.join(SECONDS)


def test_arrays_that_a_closure_gets_are_as_when_scheduled() -> None:
    """One buffer that is filled again for each closure; a large one that it captures is an input."""
    _, coordinator = of_servers()
    host, values = np.zeros(20_000, np.int32), []
    captured = lambda: jnp.max(jnp.asarray(host))  # noqa: E731
    for host[:] in range(20):
        values.append((coordinator.schedule(jnp.max, args=(host,)), coordinator.schedule(captured)))
    assert coordinator.fetch(values) == [(i, i) for i in range(20)]


def test_the_same_leaves_in_another_structure_are_other_arguments() -> None:
    """Keywords in another order than the parameters, a tuple in another place."""
    _, coordinator = of_servers()
    minus, first = lambda b, a: b - a, lambda x, y: jnp.ones(()) * len(jax.tree.leaves(x))
    calls = [{"args": (1.0, 2.0)}, {"kwargs": {"b": 1.0, "a": 2.0}}]
    assert [coordinator.schedule(minus, **call).fetch() for call in calls] == [-1, -1]
    calls = [{"args": ((1.0, 2.0), 3.0)}, {"args": (1.0, (2.0, 3.0))}]
    assert [coordinator.schedule(first, **call).fetch() for call in calls] == [2, 1]


def test_rescheduling_a_function_skips_the_lookup_but_sees_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Python number, an array and a variable that it captures are as when it is scheduled."""
    strategy, coordinator = of_servers()
    calls, bound = [], strategy._runner._halves.bound
    monkeypatch.setattr(
        strategy._runner._halves, "bound", lambda *x: (calls.append(x), bound(*x))[1]
    )
    factor: Any = 2
    with strategy.scope():
        weight = dj.Variable(1.0, aggregation=dj.VariableAggregation.SUM)

    def step() -> jax.Array:
        return weight[...] * factor

    values = [coordinator.schedule(step) for _ in range(3)]
    assert len(calls) == 1
    weight[...] = 5.0
    values.append(coordinator.schedule(step))
    factor = 3
    values.append(coordinator.schedule(step))
    for number in (4, 6):
        factor = jnp.float32(number)
        values.append(coordinator.schedule(step))
    weight = dj.Variable(7.0, aggregation=dj.VariableAggregation.SUM)
    values.append(coordinator.schedule(step))
    assert coordinator.fetch(values) == [2, 2, 2, 10, 15, 20, 30, 42]


def test_a_function_that_is_compiled_again_and_again_is_reported() -> None:
    """As by ``run``: with the name of what changes."""
    _, coordinator = of_servers()
    with pytest.warns(
        UserWarning, match=r"compiled 5 times. What changed last: factor \(3 then 4\)"
    ):
        for factor in range(5):
            coordinator.schedule(lambda: jnp.ones(()) * factor)  # noqa: B023


def test_a_join_of_another_thread_while_a_function_is_scheduled_reverts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It updates the variables after the function was looked up with those of before."""
    strategy, coordinator = of_servers()
    model, step = scalar_step(strategy)
    coordinator.schedule(step, args=(1.0,))
    monkeypatch.setattr(strategy._engine, "check", lambda _: coordinator.join(SECONDS))
    coordinator.schedule(step, args=(1.0,))
    coordinator.join(SECONDS)
    assert float(model.w[...]) == 0.75


def test_a_function_of_another_thread_does_not_replace_one_that_is_scheduled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes while the function is recognised as the last one."""
    strategy, coordinator = of_servers()
    runner, fits = strategy._runner, BoundHalves.fits_function
    one, two = lambda: jnp.ones(()), lambda: 2 * jnp.ones(())
    coordinator.schedule(two)
    last = runner._last
    coordinator.schedule(one)

    def replaced(bound: BoundHalves, fn: Any) -> bool:
        runner._last = last
        return fits(bound, fn)

    monkeypatch.setattr(BoundHalves, "fits_function", replaced)
    assert coordinator.schedule(one).fetch() == 1


def test_wrong_arguments_are_named() -> None:
    """Timeouts, datasets, elements and functions that cannot be."""
    _, coordinator = of_servers()
    for timeout in ("a", -1, math.nan, True):
        with pytest.raises(ValueError, match=r"timeout must be (None or )?a number"):
            coordinator.join(timeout)

    async def later() -> None: ...

    with pytest.raises(TypeError, match="is not async"):
        coordinator.schedule(later)
    with pytest.raises(ValueError, match="dataset is an iterator"):
        coordinator.create_per_worker_dataset(iter([1.0]))
    for dataset, message in ((3, "must be an iterable"), (["a"], "str 'a' in it")):
        iterator = iter(coordinator.create_per_worker_dataset(dataset))
        with pytest.raises(TypeError, match=message):
            coordinator.schedule(next, args=(iterator,))

    def named(x: float) -> float:
        return float(x)

    with pytest.raises(dj.TracedValueError, match="named needs the value"):
        coordinator.schedule(named, args=(1.0,))


def test_a_variable_of_another_shape_is_traced_again() -> None:
    """The mean of 4 and then of 2 numbers, by one function; what a PerWorkerValue had is copied."""
    strategy, coordinator = of_servers()
    with strategy.scope():
        table = nnx.Param(jnp.arange(4.0))
    host = np.ones(())
    value = PerWorkerValue([host])
    host[...] = 5

    def mean(x: jax.Array) -> jax.Array:
        return table[...].mean() + x

    before = coordinator.schedule(mean, args=(value,))
    table.set_value(jnp.arange(2.0))
    assert coordinator.fetch([before, coordinator.schedule(mean, args=(value,))]) == [2.5, 1.5]
    coordinator.join(SECONDS)
    assert table.shape == (2,)


def test_a_value_with_more_arrays_is_kept() -> None:
    """A variable has a tuple of one array on the servers, and the user writes one of two."""
    strategy, coordinator = of_servers()
    with strategy.scope():
        pair = nnx.Variable((jnp.ones(3),))

    def step(x: jax.Array) -> Any:
        return sum(part.sum() for part in pair.get_raw_value()) * x

    assert coordinator.schedule(step, args=(1.0,)).fetch() == 3
    pair.set_raw_value((jnp.ones(2), jnp.ones(5)))
    coordinator.join(SECONDS)
    assert [part.shape for part in pair.get_raw_value()] == [(2,), (5,)]
    assert coordinator.schedule(step, args=(2.0,)).fetch() == 14


@pytest.mark.parametrize("staleness", [-1, 1.5, True, "4", np.zeros(2)])
def test_staleness_is_a_number_of_updates(staleness: Any) -> None:
    """It is an int from 0, or infinity."""
    with pytest.raises(ValueError, match="max_staleness"):
        dj.ParameterServerStrategy(max_staleness=staleness)
    dj.ParameterServerStrategy(max_staleness=math.inf)


def test_threads_that_schedule_first_start_the_workers_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four of them have the two workers of the strategy, and every increment."""
    strategy, coordinator = of_servers(2)
    with strategy.scope():
        total = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)

    def step() -> None:
        total.assign_add(1.0)

    begin, engine = threading.Barrier(4), strategy._engine
    monkeypatch.setattr(engine, "_start_servers", lambda: time.sleep(0.05))

    def schedule() -> None:
        begin.wait(SECONDS)
        for _ in range(5):
            coordinator.schedule(step)

    threads = [threading.Thread(target=schedule) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    coordinator.join(SECONDS)
    assert (float(total[...]), len(engine._threads)) == (20.0, 2)


def test_workers_that_are_added_while_the_first_start_start_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a removal would wait for ever for one of two workers of a number."""
    strategy, coordinator = of_servers(2)
    start, adding = threading.Thread.start, threading.Thread(target=strategy.add_workers, args=(1,))

    def add_before_the_second(thread: threading.Thread) -> None:
        if thread.name.startswith("worker 1") and adding.ident is None:
            start(adding)
            adding.join(0.2)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", add_before_the_second)
    coordinator.schedule(lambda: jnp.ones(())).fetch()
    adding.join(SECONDS)
    names = [thread.name for thread in strategy._engine._threads]
    assert len(set(names)) == len(names) == strategy.workers == 3


def test_random_keys_are_fetched_as_they_are() -> None:
    """NumPy has no arrays of them."""
    _, coordinator = of_servers(1)
    key = coordinator.fetch(coordinator.schedule(jax.random.key, args=(3,)))
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(3)))


def test_workers_can_join_after_an_interrupted_removal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have left do not count as there."""
    engine = _engines.Engine(queue.Coordinator(2, [], 0.0, jax.devices()[0]), jax.devices())
    engine.start()
    _, leaving = engine._threads
    with monkeypatch.context() as patched:
        patched.setattr(leaving, "join", raises(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            engine.resize(1)
    leaving.join(SECONDS)
    engine.resize(2)
    assert all(thread.is_alive() for thread in engine._threads)
    engine.stop()


def test_stop_has_one_deadline_for_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ends after so many seconds, not after as many for each of them."""
    monkeypatch.setattr(_engines, "_SECONDS_TO_END", 0.3)
    coordinator, release = queue.Coordinator(40, [], 0.0, jax.devices()[0]), threading.Event()
    engine = _engines.Engine(coordinator)
    monkeypatch.setattr(engine, "_worker", lambda _: release.wait(SECONDS) and None)
    engine.start()
    begin = time.monotonic()
    engine.stop()
    assert 0.3 <= time.monotonic() - begin < 8
    release.set()
    engine.stop()


def test_workers_end_with_their_strategy() -> None:
    """No thread is left when the strategy is gone."""
    before = set(threading.enumerate())
    strategy, coordinator = of_servers(2)
    coordinator.schedule(lambda: jnp.ones(())).fetch()
    first, second = set(threading.enumerate()) - before
    del strategy, coordinator
    gc.collect()
    for thread in (first, second):
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_a_checkpoint_has_the_state_after_one_update_while_closures_go_on(tmp_path: Path) -> None:
    """Saved while the third of three closures computes; with an iterator in the tree it is waited for."""
    strategy, coordinator = of_servers(1, servers=2)
    going = threading.Event()
    with strategy.scope():
        total = [dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM) for _ in range(2)]

    def dataset() -> Iterator[float]:
        yield from (1.0, 2.0)
        assert going.wait(SECONDS)
        yield 4.0

    def step(iterator: Any) -> jax.Array:
        x = next(iterator)
        for variable in total:
            variable.assign_add(x)
        return x

    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    *_, second, _ = [coordinator.schedule(step, args=(iterator,)) for _ in range(3)]
    assert second.fetch() == 2
    dj.checkpoint.save(tmp_path / "2", total)
    assert not coordinator.done()
    going.set()
    batches = iter(strategy.distribute_dataset(dj.data.from_arrays(np.ones(4)).batch(2)))
    dj.checkpoint.save(tmp_path / "3", {"total": total, "iterator": batches})
    assert [float(x[...]) for x in total] == [7, 7]
    with dj.OneDeviceStrategy("cpu:0").scope():
        other = [dj.Variable(0.0) for _ in range(2)]
    dj.checkpoint.load(tmp_path / "2", other)
    assert [float(x[...]) for x in other] == [3, 3]


def test_a_step_is_saved_with_all_functions_that_were_scheduled_before(tmp_path: Path) -> None:
    """A loop that saves step i after it has scheduled i functions resumes without losing any."""
    strategy, coordinator = of_servers(2)
    model, step = scalar_step(strategy)
    with dj.CheckpointManager(tmp_path) as manager:
        for i in range(1, 4):
            coordinator.schedule(step, args=(float(i),))
            manager.save(i, {"model": model})
    assert coordinator.stats.version == 3
    for i, w in ((1, 0.5), (2, 1.25), (3, 2.125)):
        manager.restore(i, {"model": model})
        assert float(model.w[...]) == w


def test_a_save_raises_the_error_only_of_closures_whose_state_it_saves(tmp_path: Path) -> None:
    """Of another strategy's, and of its servers, the users of that strategy learn."""
    strategy, coordinator = of_servers(1)
    model, step = scalar_step(strategy)
    coordinator.schedule(step, args=(1.0,))
    _, join = failing(coordinator)
    one = dj.OneDeviceStrategy("cpu:0")
    batches = iter(one.distribute_dataset(dj.data.from_arrays(np.ones(4)).batch(2)))
    tree = {"total": dj.Variable(0.0), "iterator": batches}
    with dj.CheckpointManager(tmp_path) as manager:
        manager.save(1, tree)
        with pytest.raises(KeyError, match="element 1 is broken"):
            manager.save(2, {**tree, "model": model})
        join()
        strategy._coordinator.fail_for_good(dj.ClusterError("gone"))
        manager.save(3, tree)
        with pytest.raises(dj.ClusterError, match="gone"):
            manager.save(4, {"model": model})
    assert manager.all_steps() == [1, 3]
