"""A dataset reads ahead of its loop, bounded, and as if it read in the loop itself."""

from __future__ import annotations

import contextvars
import threading
import time
from typing import Any

import jax
import numpy as np
import pytest

import distribute_jax as dj
from distribute_jax.data import _prefetch


def test_batches_are_ready_before_they_are_requested(s2: dj.MirroredStrategy) -> None:
    """Besides the batch in the loop two more are read, and no fourth."""
    made: list[int] = []

    def source():
        for i in range(100):
            made.append(i)
            yield np.full(4, i, np.float32)

    iterator = iter(s2.distribute_dataset(source))
    assert made == []
    next(iterator)
    wait_until(lambda: len(made) == 3)
    time.sleep(0.05)
    assert made == [0, 1, 2]


@pytest.mark.parametrize(
    "options",
    [{"experimental_per_replica_buffer_size": 0}, {"experimental_fetch_to_device": False}],
)
def test_without_a_buffer_each_batch_is_read_when_it_is_requested(
    s2: dj.MirroredStrategy, options: dict[str, Any]
) -> None:
    """In the thread of the loop, so that a source may use the strategy."""
    made: list[Any] = []

    def source():
        for i in range(3):
            made.append(threading.current_thread())
            yield np.full(2, float(s2.run(lambda i=i: i + 1)), np.float32)

    for count, batch in enumerate(s2.distribute_dataset(source, dj.InputOptions(**options)), 1):
        assert made == [threading.current_thread()] * count
        np.testing.assert_array_equal(s2.gather(batch, axis=0), [count, count])


def test_a_source_that_runs_steps_in_the_prefetch_thread_is_refused(
    s2: dj.MirroredStrategy,
) -> None:
    """Two programs at once could deadlock."""

    def source():
        yield np.full(2, float(s2.run(lambda: 1.0)))

    with pytest.raises(RuntimeError, match="experimental_per_replica_buffer_size=0") as caught:
        next(iter(s2.distribute_dataset(source)))
    assert "strategy.run was called by a source of batches" in str(caught.value)


def test_a_source_sees_the_context_of_the_loop(s2: dj.MirroredStrategy) -> None:
    """Strategy, precision and the user's own context variables are those of the loop."""
    mine = contextvars.ContextVar("mine", default=0)
    seen: list[Any] = []

    def source():
        seen.append((dj.get_strategy(), dj.in_cross_replica_context(), mine.get()))
        yield np.asarray([1, 2**40])

    mine.set(7)
    with jax.enable_x64(True), s2.scope():
        (batch,) = list(s2.distribute_dataset(source))
        assert [int(part[0]) for part in batch.values] == [1, 2**40]
    assert seen == [(s2, True, 7)]


def test_user_code_runs_in_one_thread(
    s2: dj.MirroredStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays and lists are read in the loop while that is fast; functions may depend on their thread."""
    monkeypatch.setattr(_prefetch, "_MAX_DELAY", 3600.0)
    batches = [np.ones(2, np.float32)] * 5
    arrays = dj.data.from_arrays(np.ones(10, np.float32)).batch(2)
    readers: list[str] = []

    def noted(batch: Any) -> Any:
        readers.append(threading.current_thread().name)
        return batch

    for source in (batches, arrays):
        for _ in s2.distribute_dataset(source):
            assert "distribute_jax prefetch" not in {t.name for t in threading.enumerate()}
    for source in (arrays.map(noted), lambda: map(noted, batches)):
        assert len(list(s2.distribute_dataset(source))) == 5
    assert readers == ["distribute_jax prefetch"] * 10


def test_leaving_a_loop_over_a_dataset_ends_its_thread(s2: dj.MirroredStrategy) -> None:
    """By break, by an exception of the source, and by restoring a state."""
    closed: list[int] = []

    def source():
        try:
            for i in range(100):
                if i == 50:
                    raise ZeroDivisionError
                yield np.full(2, i, np.float32)
        finally:
            closed.append(1)

    dataset = s2.distribute_dataset(source)
    for _ in dataset:
        break
    wait_until(lambda: len(closed) == 1)
    with pytest.raises(ZeroDivisionError):
        list(dataset)
    assert len(list(zip(range(3), dataset, strict=False))) == 3
    wait_until(lambda: len(closed) == 3)
    wait_until(lambda: "distribute_jax prefetch" not in {t.name for t in threading.enumerate()})


def wait_until(true: Any) -> None:
    """Waits for another thread, but not without end."""
    end = time.monotonic() + 30
    while not true() and time.monotonic() < end:
        time.sleep(0.001)
    assert true()


def test_several_threads_share_the_batches_of_an_iterator_and_all_see_the_end(
    s2: dj.MirroredStrategy,
) -> None:
    """None of them waits forever for a batch after the last one."""
    iterator = iter(s2.distribute_dataset(lambda: (np.full(2, i) for i in range(50))))
    seen: list[int] = []

    def loop() -> None:
        seen.extend(int(s2.experimental_local_results(x)[0][0]) for x in iterator)

    threads = [threading.Thread(target=loop, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert sorted(seen) == list(range(50))
