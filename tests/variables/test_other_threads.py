"""Reading variables in another thread while steps run, to which they are donated."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import distribute_jax as dj
from distribute_jax import _context
from distribute_jax.variables import _access

SUM = dj.VariableAggregation.SUM
ON_READ = dj.VariableSynchronization.ON_READ

READERS: dict[str, Callable[[dj.Variable], Any]] = {
    "numpy": lambda v: v.numpy(),
    "read_value": lambda v: v.read_value() * 1,
    "values": lambda v: np.stack(v.values),
    "repr": lambda v: re.search(r"Array\(\[(\d+)\.", repr(v))[1],
    "array": np.asarray,
}


@pytest.fixture(autouse=True)
def _threads_of_earlier_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_context, "_step_threads", set())


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    """One more thread."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def in_another_thread(read: Callable[[], Any]) -> Any:
    """Reads in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(read).result(30)


@pytest.mark.exhaustive
def test_a_read_while_steps_run_returns_the_value_after_some_step(s4: dj.Strategy) -> None:
    """Every reader sees the value after one step, and never a donated array."""
    with s4.scope():
        written = dj.Variable(jnp.zeros(64))
        own = dj.Variable(jnp.zeros(64), synchronization=ON_READ, aggregation=SUM)
        weight = nnx.Param(jnp.zeros(64))

    def step() -> None:
        written.assign_add(jnp.ones(64))
        own.assign_add(jnp.ones(64))
        weight[...] += 1

    ended, seen = threading.Event(), {}

    def reading(name: str, read: Callable[[], Any]) -> None:
        seen[name] = [np.asarray(read(), np.float32)]
        all_read.wait()
        while not ended.is_set():
            seen[name].append(np.asarray(read(), np.float32))
        seen[name].append(np.asarray(read(), np.float32))

    jobs = {
        f"{kind} {name}": (lambda read=read, v=v: read(v))
        for kind, v in (("ON_WRITE", written), ("ON_READ", own))
        for name, read in READERS.items()
        if (kind, name) != ("ON_READ", "values")
    }
    jobs["snapshot"] = lambda: np.stack([x[...] for x in dj.snapshot((written, weight))])
    s4.run(step)
    all_read = threading.Barrier(len(jobs) + 1, timeout=120)
    with ThreadPoolExecutor(len(jobs)) as pool:
        running = [pool.submit(reading, *job) for job in jobs.items()]
        all_read.wait()
        for _ in range(300):
            s4.run(step)
        ended.set()
    assert [job.result() for job in running] == [None] * len(jobs)
    for name, values in seen.items():
        firsts = [value.ravel()[0] for value in values]
        assert firsts == sorted(firsts), f"{name} went back in time"
        assert all((value == value.ravel()[0]).all() for value in values), f"{name} was torn"
    assert all(values[-1].ravel()[0] > values[0].ravel()[0] for values in seen.values())
    assert written.numpy()[0] == 301
    assert own.numpy()[0] == 4 * 301


def test_a_read_while_a_step_is_traced_returns_the_value_before_it(s4: dj.Strategy) -> None:
    """Tracers stay in the thread that traces."""
    with s4.scope():
        written = dj.Variable(5.0)
        own = dj.Variable(7.0, synchronization=ON_READ, aggregation=SUM)

    def step() -> None:
        written.assign(1.0)
        own.assign(2.0)
        found.extend(in_another_thread(lambda: [float(written.numpy()), float(own.numpy())]))

    found: list[float] = []
    s4.run(step)
    assert found == [5.0, 7.0]
    assert (written.numpy(), own.numpy()) == (1.0, 8.0)


@pytest.mark.parametrize("synchronization", [dj.VariableSynchronization.ON_WRITE, ON_READ])
def test_a_read_between_donation_and_write_waits_for_the_new_value(
    s4: dj.Strategy, other: ThreadPoolExecutor, synchronization: dj.VariableSynchronization
) -> None:
    """The step has the memory and has not written the new value yet."""
    with s4.scope():
        v = dj.Variable(5.0, synchronization=synchronization, aggregation=SUM)
    s4.run(lambda: v.assign_add(1.0))
    new = dj.snapshot(v).get_raw_value()
    v.get_raw_value().delete()
    reading = other.submit(v.numpy)
    with pytest.raises(TimeoutError):
        reading.result(0.1)
    v.set_raw_value(new)
    assert reading.result(30) == 9.0


def test_without_a_new_value_a_read_is_a_donated_error(
    s4: dj.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once in the thread of the steps, after a timeout in others."""
    monkeypatch.setattr(_access, "_TIMEOUT", 0.05)
    with s4.scope():
        v = dj.Variable(5.0, name="total")
    s4.run(lambda: v.assign_add(1.0))
    v.get_raw_value().delete()
    for read in (
        lambda: in_another_thread(v.numpy),
        v.numpy,
        v.read_value,
        lambda: v.values,
        lambda: repr(v),
    ):
        with pytest.raises(dj.DonatedError, match=r"Variable 'total' cannot be read.*dj\.snapshot"):
            read()


def test_a_thread_that_ran_steps_and_has_ended_copies_no_reads(s4: dj.Strategy) -> None:
    """It runs no step any more, to which a variable could be donated meanwhile."""
    with s4.scope():
        v = dj.Variable(5.0)
    in_another_thread(lambda: s4.run(lambda: v.assign_add(1.0)))
    assert v[...] is v.get_raw_value()


def test_a_source_in_the_prefetch_thread_may_not_take_a_snapshot() -> None:
    """It would wait for the loop, which waits for the source."""
    with _context.prefetching(), pytest.raises(RuntimeError, match="thread that reads ahead"):
        dj.snapshot(jnp.ones(2))
