"""Processes that diverge after their steps were compared exit with the first difference."""

from __future__ import annotations

import time
import warnings

import jax
import numpy as np
import pytest
from fault_functions import make_strategy
from flax import nnx

import distribute_jax as dj
from distribute_jax.processes._divergence import ActionLog
from distribute_jax.testing import LocalCluster

STEPS = 400
"""Enough for a comparison; the loop ends with the error before."""


def prepared():
    """Returns a strategy, and steps that add to a variable with a factor, both compared before."""
    strategy = make_strategy(step_seconds=20)
    with strategy.scope():
        total = nnx.Param(np.zeros(3, np.float32))
        factor = nnx.Param(np.float32(1))

    def add(rate):
        total[...] = total[...] + rate * factor[...]

    def take(rate):
        total[...] = total[...] - 2 * rate * factor[...]

    for step in (add, take):
        strategy.run(step, args=(0.5,))
    return strategy, add, take, total, factor


def on_process_1():
    """Returns whether this is the process that diverges."""
    return jax.process_index() == 1


def passes_another_number():
    """Process 1 passes another number than process 0."""
    strategy, add, *_ = prepared()
    for _ in range(STEPS):
        strategy.run(add, args=(0.25 if on_process_1() else 0.125,))
        time.sleep(0.01)


def passes_another_key():
    """Process 1 passes another random key than process 0, after the first step."""
    strategy = make_strategy(step_seconds=20)
    key = jax.random.key(0)
    for _ in range(STEPS):
        strategy.run(jax.random.normal, args=(key,))
        key = jax.random.key(2 if on_process_1() else 1)
        time.sleep(0.01)


def writes_another_value():
    """Process 1 writes another value between two steps."""
    strategy, add, _, _, factor = prepared()
    factor[...] = np.float32(7 if on_process_1() else 6)
    for _ in range(STEPS):
        strategy.run(add, args=(0.5,))
        time.sleep(0.01)


def runs_another_step():
    """Both steps were compared; then process 1 runs the one, and process 0 the other."""
    strategy, add, take, *_ = prepared()
    for _ in range(STEPS):
        strategy.run(take if on_process_1() else add, args=(0.5,))
        time.sleep(0.01)


def differs_at_the_end():
    """A program that has ended before the logs were compared."""
    strategy, add, *_ = prepared()
    strategy.run(add, args=(0.25 if on_process_1() else 0.125,))


def stays_together():
    """All that may change equally on all: numbers, writes, snapshots, alternating steps, reductions.

    Variables get Python's own numbers too, and one step draws random numbers.
    """
    strategy, add, take, total, factor = prepared()
    with strategy.scope():
        dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    ones = np.ones(4, np.float32)
    for number in range(40):
        factor.set_value(float(number) if number % 2 else np.float32(number))
        strategy.run(dropout, args=(ones,))
        kept = dj.snapshot(total)
        strategy.run(add, args=(number / 8,))
        strategy.run(take, args=(np.float32(1),))
        total[...] = kept[...]
        own = strategy.experimental_distribute_values_from_function(
            lambda context: np.float32(context.replica_id_in_sync_group)
        )
        assert float(strategy.reduce("sum", own, axis=None)) == 1
        time.sleep(0.03)
    return np.asarray(total.get_raw_value().addressable_data(0)).tolist()


def shuffles_otherwise():
    """Each process shuffles with another seed."""
    strategy = make_strategy()
    x = np.random.default_rng(jax.process_index()).permutation(16).astype(np.float32)[:, None]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in strategy.distribute_dataset(dj.data.from_arrays(x).batch(4)):
            pass
    return [str(one.message) for one in caught if "first batches" in str(one.message)]


def ended(function):
    """Runs two processes that should fail, and returns the stderr of process 0."""
    results = LocalCluster(2, 1, timeout=90, grace=None).run(function, check=False)
    for result in results:
        assert result.exit_code not in (0, None), result.stderr
        assert "The processes diverged" in result.stderr
    return results[0].stderr


class Board(dict):
    """A key-value store in memory."""

    def put(self, key, text):
        """Stores a text."""
        self[key] = text

    def under(self, folder):
        """Returns what is stored below a folder."""
        return {key[len(folder) :]: text for key, text in self.items() if key.startswith(folder)}


def two_logs():
    """Returns the logs of two processes that are equal so far."""
    board = Board()
    logs = [ActionLog(index, 2, board) for index in range(2)]
    for log in logs:
        log.record("runs step", b"program")
    return logs


def compare(logs):
    """Lets both watchdogs compare twice; returns the results."""
    return [log.compare(log._store.under("news/actions/")) for log in (*logs, *logs)]


def test_equal_logs_are_not_reported():
    """Also where one is ahead of the other while they are compared."""
    first, second = two_logs()
    first.record("runs step with x = 1.0")
    assert compare((first, second)) == [None] * 4
    second.record("runs step with x = 1.0")
    assert compare((first, second)) == [None] * 4
    first.publish()
    second.compare_last()
    assert (first.finish(), second.finish()) == (None, None)


def test_the_first_difference_is_reported_on_both():
    """The error names what each did, at the next thing that either does."""
    logs = two_logs()
    for number, log in enumerate(logs):
        log.record(f"runs step with x = {number}.5")
        log.record("runs step with x = 3.0")
    compare(logs)
    for log in logs:
        with pytest.raises(RuntimeError, match=r"process 0: .*x = 0.5\n  process 1: .*x = 1.5"):
            log.record("runs step with x = 4.0")


def test_a_process_that_waits_elsewhere_is_named_although_process_0_is_steps_ahead():
    """Process 0 dispatches further steps, which never end; process 1 does nothing more."""
    first, second = two_logs()
    for number in range(3):
        first.record(f"runs step {number}")
    second.record("waiting for all processes at 'barrier'")
    assert compare((first, second)) == [None] * 4
    with pytest.raises(RuntimeError, match=r"process 0: runs step 0\n  process 1: waiting for all"):
        first.record("runs step 3")


def test_a_difference_that_the_texts_do_not_show_is_detected():
    """Another program of the same name."""
    logs = two_logs()
    for number, log in enumerate(logs):
        log.record("runs step", b"program %d" % number)
    compare(logs)
    with pytest.raises(RuntimeError, match="diverged"):
        logs[1].record("runs step")


def test_one_more_step_is_detected_at_the_end():
    """Process 1 ends with a step that process 0 never ran."""
    first, second = two_logs()
    second.record("runs step with x = 9.0")
    first.publish()
    second.compare_last()
    assert "nothing more" in first.finish()


def fitted():
    """Returns a model that was trained on one batch, its strategy, and that batch."""
    strategy = make_strategy(step_seconds=60)
    with strategy.scope():
        model = dj.Model(nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
        model.compile(optimizer="sgd", loss="mse")
    x = np.ones((8, 2), np.float32)
    batch = {"x": x, "y": x[:, :1], "batch_size": 8, "verbose": 0}
    model.fit(**batch)
    return model, strategy, batch


def waits_on_the_chief_alone():
    """Process 0 waits for all, to save weights, which is a collective call; process 1 trains on."""
    model, strategy, batch = fitted()
    if dj.is_chief():
        strategy.barrier("saved")
    model.fit(**batch)


def trains_and_evaluates():
    """Process 0 evaluates a model, which compiles its step, while process 1 trains on."""
    model, _, batch = fitted()
    method = model.fit if on_process_1() else model.evaluate
    method(**batch)


def reads_alone():
    """Process 1 reads an ON_READ variable, whose components are on all processes; process 0 trains on."""
    model, strategy, batch = fitted()
    with strategy.scope():
        variable = dj.Variable(0.0, name="total", synchronization="on_read", aggregation="sum")
    if on_process_1():
        variable.numpy()
    model.fit(**batch)


def checks_alone():
    """Process 1 compares the copies of a model on all processes; process 0 trains on."""
    model, _, batch = fitted()
    if on_process_1():
        dj.check_in_sync(model.module)
    model.fit(**batch)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (passes_another_number, ["add with args[0] = 0.125", "= 0.25"]),
        (passes_another_key, ["normal with args[0] = uint32[2]"]),
        (writes_another_value, ["= 6.0, written between steps", "= 7.0"]),
        (runs_another_step, ["0: runs prepared.<locals>.add", "1: runs prepared.<locals>.take"]),
        (differs_at_the_end, ["= 0.125", "= 0.25"]),
        (
            waits_on_the_chief_alone,
            [
                "0: waiting for all processes at 'barrier saved'",
                "1: reading the batches of dataset 2",
            ],
        ),
        (
            trains_and_evaluates,
            ["0: waiting for all processes at 'the first", "1: runs train_step"],
        ),
        (reads_alone, ["process 1: reading the ON_READ variable 'total'"]),
        (checks_alone, ["process 1: dj.check_in_sync of"]),
    ],
)
def test_processes_that_diverge_name_the_first_difference(function, words):
    """What each passes, writes, runs or waits for, well before step_seconds are over."""
    start = time.monotonic()
    text = ended(function)
    assert time.monotonic() - start < 60
    assert [word for word in words if word not in text] == []


@pytest.mark.exhaustive
def test_processes_that_run_the_same_steps_exit_normally():
    """No false alarm for values, snapshots, steps and reductions that change in the same way."""
    results = LocalCluster(2, 1, timeout=90).run(stays_together)
    assert results[0].value == results[1].value


@pytest.mark.exhaustive
def test_different_batches_are_a_warning():
    """Under the default policy every process reads the same batches, or a warning says that it does not."""
    outcome = [r.value for r in LocalCluster(2, 1).run(shuffles_otherwise)]
    assert [len(of_process) for of_process in outcome] == [1, 0]
