"""Ctrl-C at any moment leaves the state as before the step or as after it, never a mixture."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import long
from flax import nnx

import distribute_jax as dj
from distribute_jax._interrupts import interrupts_held_back


class Model(nnx.Module):
    """Three variables in the ratio 1 : 2 : 3."""

    def __init__(self) -> None:
        self.ones = nnx.Variable(jnp.zeros(4))
        self.twos = nnx.Variable(jnp.zeros(4))
        self.threes = nnx.Variable({"nested": jnp.zeros(4)})

    def add(self, x: jax.Array) -> jax.Array:
        one = jnp.mean(x)
        self.ones[...] += one
        self.twos[...] += 2 * one
        self.threes.set_value({"nested": self.threes.get_value()["nested"] + 3 * one})
        return one

    def steps(self) -> float:
        """Returns the number of steps, and checks that all variables agree on it."""
        ones, twos, threes = self.ones[...], self.twos[...], self.threes.get_value()["nested"]
        steps = float(ones[0])
        np.testing.assert_array_equal(twos, 2 * steps)
        np.testing.assert_array_equal(threes, 3 * steps)
        return steps


PACKAGE = dj.__path__[0]


class Interrupter:
    """A trace function that raises before the n-th instruction of the library, or of some functions of it."""

    def __init__(
        self, at: int, functions: frozenset[str] | None, error: type[BaseException]
    ) -> None:
        self.remaining, self.functions, self.error = at, functions, error

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if self.functions and frame.f_code.co_name not in self.functions:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.remaining -= 1
            if self.remaining == 0:
                raise self.error
        return self


def interrupted(
    call: Callable[[], Any],
    at: int,
    functions: frozenset[str] | None = None,
    error: type[BaseException] = KeyboardInterrupt,
) -> bool:
    """Calls a function and interrupts it before the n-th instruction; False if it ended before."""
    before = sys.gettrace()
    sys.settrace(Interrupter(at, functions, error))
    try:
        call()
    except error:
        return True
    finally:
        sys.settrace(before)
    return False


def calls(strategy: dj.Strategy, model: Model) -> dict[str, tuple[Callable[[], Any], int]]:
    """Returns the calls to interrupt, with the number of steps of each."""
    batches = [np.ones((16, 2), np.float32)] * 3
    first, second, _ = strategy.distribute_dataset(batches)
    (padded,) = strategy.distribute_dataset([np.ones((11, 2), np.float32)])

    def step(x: jax.Array) -> jax.Array:
        return model.add(jnp.ones_like(x))

    def padded_step(x: jax.Array) -> jax.Array:
        del x
        return model.add(jnp.ones(()))

    return {
        "run": (lambda: strategy.run(step, args=(first,)), 1),
        "run_steps": (lambda: strategy.run_steps(step, iter([first, second]), 2), 2),
        "partial batch": (lambda: strategy.run(padded_step, args=(padded,)), 1),
        "not donated": (lambda: strategy.run(step, args=(first,), options=NOT_DONATED), 1),
    }


KINDS = ("run", "run_steps", "partial batch", "not donated")
NOT_DONATED = dj.RunOptions(donate_state=False)


AROUND_THE_PROGRAM = frozenset({
    "_advance", "execute", "_dispatch", "_take_token", "store", "_store_nests", "write_raw",
    "_note_dispatched", "pop_token", "_placements", "call_in_c", "last_settings",
})  # fmt: skip


def check_interrupted_everywhere(
    strategy: dj.Strategy,
    kind: str,
    functions: frozenset[str] | None = None,
    error: type[BaseException] = KeyboardInterrupt,
) -> int:
    """Interrupts one call after the other, each an instruction later, and checks the state."""
    with strategy.scope():
        model = Model()
    call, more = calls(strategy, model)[kind]
    for _ in range(3):
        call()
    done, outcomes, at = model.steps(), set(), 1
    while interrupted(call, at, functions, error):
        now = model.steps()
        assert now - done in (0, more), f"instruction {at}: {now - done} steps"
        outcomes.add(now - done)
        done = now
        at += 1
    assert outcomes == {0, more}, "interrupts before the program runs, and after it"
    assert model.steps() == done + more
    return at


@pytest.mark.parametrize("kind", [k if k == "run" else long(k) for k in KINDS])
def test_an_interrupt_around_the_program_leaves_the_state_as_before_or_after(
    s2: dj.Strategy, kind: str
):
    assert check_interrupted_everywhere(s2, kind, AROUND_THE_PROGRAM) > 100


@pytest.mark.parametrize("kind", [k if k == "run" else long(k) for k in KINDS])
def test_the_error_of_a_signal_handler_is_not_taken_for_one_of_the_program(
    s2: dj.Strategy, kind: str
):
    """As that of a timeout, which is an Exception: it comes out, and the new state is stored."""
    check_interrupted_everywhere(s2, kind, AROUND_THE_PROGRAM, TimeoutError)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_at_every_instruction_leaves_the_state_as_before_or_after(
    strategy: dj.Strategy, kind: str
):
    assert check_interrupted_everywhere(strategy, kind) > 500


def test_an_interrupt_stores_no_state_of_a_padding_check(s2: dj.Strategy):
    """The last program that a check runs counts the padding as real rows."""
    with s2.scope():
        count = nnx.Variable({"nested": jnp.zeros(())})
    (padded,) = s2.distribute_dataset([np.ones((11, 2), np.float32)])

    def step(x: jax.Array) -> None:
        del x
        real = jnp.sort(dj.get_replica_context().batch_mask.astype(float)).sum()  # not proved
        rows = dj.get_replica_context().all_reduce("sum", real)
        count.set_value({"nested": count.get_value()["nested"] + rows})

    def again() -> None:
        for program in s2._runner.cache.programs.values():
            program.padding.batches = 1  # the second is checked
        s2.run(step, args=(padded,))

    s2.run(step, args=(padded,))
    done, outcomes, at = 11.0, set(), 1
    while interrupted(again, at, frozenset({"store", "_store_nests"})):
        now = float(count.get_value()["nested"])
        outcomes.add(now - done)
        done, at = now, at + 1
    assert outcomes == {0.0, 11.0}


@contextlib.contextmanager
def alarms(raises: Callable[[int, Any], None]) -> Iterator[None]:
    """Sets the handler of SIGALRM for a block."""
    before = signal.signal(signal.SIGALRM, raises)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupt(number: int, frame: Any) -> None:
    del number, frame
    raise KeyboardInterrupt


@pytest.mark.parametrize("times", [1, 2])
def test_a_signal_waits_for_the_end_of_the_block_and_a_second_one_does_not(times: int):
    after = []

    def raised() -> None:
        with interrupts_held_back():
            for i in range(times):
                signal.raise_signal(signal.SIGALRM)
                after.append(i)

    with alarms(interrupt), pytest.raises(KeyboardInterrupt):
        raised()
    assert after == [0]


def test_handlers_are_as_before_after_the_block():
    def note(number: int, frame: Any) -> None:
        del frame
        came.append(number)

    came: list[int] = []
    with alarms(note):
        old = signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGINT)
        with interrupts_held_back():
            signal.raise_signal(signal.SIGALRM)
            assert came == []
        assert came == [signal.SIGALRM]
        assert (signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGINT)) == old


def test_handlers_are_as_before_though_one_that_is_back_already_raises(
    monkeypatch: pytest.MonkeyPatch,
):
    def all_handlers() -> list[Any]:
        return [signal.getsignal(number) for number in signal.valid_signals()]

    set_handler = signal.signal
    raised = []

    def signal_once_it_is_back(number: int, handler: Any) -> Any:
        result = set_handler(number, handler)
        if handler is interrupt and not raised:
            raised.append(number)
            signal.raise_signal(number)
        return result

    old = signal.signal(signal.SIGUSR1, interrupt)
    with alarms(interrupt):
        before = all_handlers()
        monkeypatch.setattr(signal, "signal", signal_once_it_is_back)
        with pytest.raises(KeyboardInterrupt), interrupts_held_back():
            pass
        monkeypatch.undo()
        assert all_handlers() == before
    signal.signal(signal.SIGUSR1, old)
    assert raised


@pytest.mark.exhaustive
def test_an_interrupt_where_a_scope_begins_or_ends_leaves_none_open_behind_fit(s2: dj.Strategy):
    with s2.scope():
        model = dj.Model(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
        model.compile(optimizer="sgd", loss="mse")
    x = np.ones((4, 2), np.float32)

    def fit() -> None:
        model.fit(x, x, batch_size=4, verbose=0)

    fit()
    at = 1
    while interrupted(fit, at, frozenset({"__enter__", "__exit__"})):
        assert not dj.has_strategy(), f"instruction {at}"
        assert jax.sharding.get_mesh().empty, f"instruction {at}"
        at += 1
    assert at > 50


def test_an_interrupt_while_fit_resets_its_metrics_waits_until_all_are_reset(
    s2: dj.Strategy, monkeypatch: pytest.MonkeyPatch
):
    with s2.scope():
        model = dj.Model(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    model.compile(optimizer="sgd", loss="mse", metrics=["mae", "mse"])
    x, reset = np.ones((4, 2), np.float32), list[dj.metrics.Metric]()

    def reset_and_interrupt(metric: dj.metrics.Metric) -> None:
        if not reset:
            signal.raise_signal(signal.SIGALRM)
        reset.append(metric)

    model.fit(x, x, verbose=0)
    monkeypatch.setattr(dj.metrics.Metric, "reset", reset_and_interrupt)
    with alarms(interrupt), pytest.raises(KeyboardInterrupt):
        model.fit(x, x, verbose=0)
    assert len(reset) == 3


def test_a_variable_may_hold_a_nest_of_a_single_array(strategy: dj.Strategy):
    with strategy.scope():
        nest = nnx.Variable({"nested": jnp.zeros(3)})

    def step() -> None:
        nest.set_value({"nested": nest.get_value()["nested"] + 1})

    for _ in range(3):
        strategy.run(step)
    np.testing.assert_array_equal(nest.get_value()["nested"], 3.0)


def count_lost(times: int, loop: Callable[[], None], is_lost: Callable[[], bool]) -> int:
    """Interrupts a loop at random moments, and counts after how many of them the state is lost."""
    moments, lost = random.Random(0), 0
    came: list[int] = []

    def note(number: int, frame: Any) -> None:
        came.append(number)
        interrupt(number, frame)

    def repeat() -> None:
        # A function: an interrupt at the jump of a `while` is outside of a `with` block on Python 3.13.
        while not came:  # Python drops what is raised in a finalizer
            loop()

    for _ in range(times):
        came.clear()
        with contextlib.suppress(KeyboardInterrupt), alarms(note):
            signal.setitimer(signal.ITIMER_REAL, moments.uniform(0.01, 0.08))
            repeat()
        lost += is_lost()
    return lost


# An interrupt within a finalizer does not reach the program: Python prints it and goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["run", "run_steps", "fit"])
def test_three_hundred_interrupts_at_random_moments_lose_nothing(s4: dj.Strategy, kind: str):
    with s4.scope():
        module = nnx.Sequential(*[nnx.Linear(64, 64, rngs=nnx.Rngs(i)) for i in range(4)])
        optimizer = dj.Optimizer(module, optax.adam(1e-3))
        model = dj.Model(module)
        model.compile(optimizer="adam", loss="mse")
    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    (batch,) = s4.distribute_dataset([x])

    def step(x: jax.Array) -> None:
        optimizer.update(
            module,
            nnx.grad(lambda module: dj.compute_average_loss((module(x) ** 2).sum(1)))(module),
        )

    loops = {
        "run": lambda: s4.run(step, args=(batch,)),
        "run_steps": lambda: s4.run_steps(step, iter([batch] * 4), 4),
        "fit": lambda: model.fit(x, x, batch_size=16, epochs=1, verbose=0),
    }

    def is_lost() -> bool:
        states = nnx.state((module, optimizer, model.optimizer))
        lost = any(leaf.is_deleted() for leaf in jax.tree.leaves(states))
        loops[kind]()
        return lost

    loops[kind]()
    assert count_lost(300, loops[kind], is_lost) == 0
