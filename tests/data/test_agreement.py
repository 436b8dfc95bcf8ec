"""Processes, each a thread here, agree on the steps of an epoch."""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from input_helpers import batches

from distribute_jax import data
from distribute_jax._errors import ArgumentError
from distribute_jax._padding import padded_rows
from distribute_jax.data import InputContext, InputOptions, PartialPolicy
from distribute_jax.data._agreement import GlobalEpochEnd
from distribute_jax.data._element import HostElement
from distribute_jax.data._feed import Feed, GlobalBatches, PerReplicaFeed, sources_of
from distribute_jax.data._split import Worker
from distribute_jax.data.sources import find_source


class Rounds:
    """Rounds between threads."""

    def __init__(self, workers: int) -> None:
        self.count = 0
        self._texts: list[str] = [""] * workers
        self._barrier = threading.Barrier(workers, timeout=60)

    def of(self, worker: int) -> Callable[[str], Sequence[str]]:
        def exchange(text: str) -> Sequence[str]:
            self._texts[worker] = text
            self._barrier.wait()
            everyone = [*self._texts]
            self.count += worker == 0
            self._barrier.wait()
            return everyone

        return exchange


Feeds = Callable[[Worker], Feed]


@dataclass
class Result:
    """The elements of one process, and its error."""

    elements: list[HostElement] = field(default_factory=list)
    error: Exception | None = None


def drive(
    feeds: Feeds, workers: int, policy: str = "mask", *, common: bool = False
) -> tuple[list[Result], Rounds]:
    """Runs an epoch of each process in a thread."""
    rounds = Rounds(workers)
    results = [Result() for _ in range(workers)]

    def work(index: int) -> None:
        worker, result = Worker(workers, index), results[index]
        ends = GlobalEpochEnd(rounds.of(index), index, PartialPolicy(policy), common)
        try:
            feed = feeds(worker)
            result.elements.extend(ends.steps(feed.open(0), feed.cardinality))
        except (ArgumentError, OSError, threading.BrokenBarrierError) as error:
            result.error = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    return results, rounds


def agreed(feeds: Feeds, workers: int, policy: str = "mask") -> list[list[HostElement]]:
    """The elements of each process: as many, of one shape, with the counts of all."""
    return checked(drive(feeds, workers, policy)[0])


def checked(results: Sequence[Result]) -> list[list[HostElement]]:
    assert [result.error for result in results] == [None] * len(results)
    for elements in zip(*(result.elements for result in results), strict=True):
        assert len({element.share for element in elements}) == 1
        everyone = [count for element in elements for count in element.counts]
        assert all(list(element.all_counts or everyone) == everyone for element in elements)
    return [result.elements for result in results]


def refusals(
    feeds: Feeds, workers: int, policy: str = "mask", *, common: bool = False
) -> list[str]:
    """The error message of each process."""
    results, _ = drive(feeds, workers, policy, common=common)
    assert all(isinstance(result.error, ArgumentError) for result in results)
    return [str(result.error) for result in results]


def feeds_of(source: Any, replicas: int, **options: Any) -> Feeds:
    """The dataset as each process creates it."""

    def feed(worker: Worker) -> Feed:
        made = source(worker) if callable(source) else source
        return GlobalBatches(find_source(made), InputOptions(**options), replicas, worker)

    return feed


def real(element: HostElement) -> list[list[int]]:
    """The real rows of each replica of one process, out of the padded rows as they would be placed."""
    share, counts = element.share, element.counts
    rows = np.asarray(element.batch)[padded_rows(counts, share)].reshape(len(counts), share)
    return [row[:count].tolist() for row, count in zip(rows, counts, strict=True)]


def values(elements: Any) -> list[list[list[int]]]:
    return [real(element) for element in elements]


DATA = [
    # Acceptance 93, 95 and 96
    (16, 4, 2, [[[0, 1], [4, 5], [8, 9], [12, 13]], [[2, 3], [6, 7], [10, 11], [14, 15]]]),
    (5, 2, 1, [[[0], [2], [4]], [[1], [3], []]]),
    (6, 3, 1, [[[0, 1], [3, 4]], [[2], [5]]]),
]
OFF = [
    (16, 4, 2, [[[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]] * 2),
    (6, 3, 1, [[[0, 1], [2], [3, 4], [5]], [[0], [1, 2], [3], [4, 5]]]),
]


@pytest.mark.parametrize(
    ("policy", "common", "case"),
    [
        *(("data", common, case) for case in DATA for common in (False, True)),
        *(("off", False, case) for case in OFF),
    ],
)
def test_processes_read_the_examples_that_tensorflow_assigns(policy: str, common: bool, case: Any):
    """Each worker sees the examples that it sees in TensorFlow; one round suffices if the length is known."""
    n, size, replicas, expected = case
    feeds = feeds_of(batches(n, size), replicas, auto_shard_policy=policy)
    results, rounds = drive(feeds, 2, common=common)
    of_process = [values(elements) for elements in checked(results)]
    seen = [[[row for part in step for row in part] for step in steps] for steps in of_process]
    assert seen == expected
    assert (rounds.count == 1) is common


def files_of(*lengths: int, size: int = 4) -> Any:
    """One file for each length, whose records say which file and which record they are."""
    contents = {str(i): 100 * i + np.arange(length) for i, length in enumerate(lengths)}
    return data.from_files(sorted(contents), contents.__getitem__).batch(size)


def test_files_of_different_length_end_together():
    """Acceptance 99: worker 0 has files 0 and 2, worker 1 only file 1, after which it pads."""
    results = agreed(feeds_of(files_of(4, 4, 4), 1, auto_shard_policy="file"), 2)
    assert values(results[0]) == [[[0, 1]], [[2, 3]], [[200, 201]], [[202, 203]]]
    assert values(results[1]) == [[[100, 101]], [[102, 103]], [[]], [[]]]
    assert set(np.asarray(results[1][-1].batch).tolist()) <= set(range(100, 104))


@pytest.mark.parametrize(
    ("policy", "steps"),
    [("mask", 4), ("shrink", 4), ("drop", 2), ("error", "process 1 has ended before")],
)
def test_the_policy_decides_what_a_process_does_after_its_data(policy: str, steps: Any):
    """mask and shrink pad; drop ends the epoch; error raises on all processes."""
    feeds = feeds_of(files_of(4, 4, 4), 1, auto_shard_policy="file", partial=policy)
    if policy == "error":
        assert all(steps in text for text in refusals(feeds, 2, policy))
        return
    results = agreed(feeds, 2, policy)
    assert [len(elements) for elements in results] == [steps, steps]
    if policy == "drop":
        assert all(set(element.all_counts) == {element.share} for element in results[0])


def test_all_processes_keep_one_shape_if_one_has_only_a_partial_batch():
    """Under mask all processes use the longest share, up to the end."""
    results = agreed(feeds_of(files_of(8, 2, size=8), 2, auto_shard_policy="file"), 2)
    assert values(results[0]) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    # It takes its only batch for a full one, whose schedule gives worker 1 the larger sizes last.
    assert values(results[1]) == [[[], []], [[100], [101]]]
    assert {element.share for element in results[1]} == {2}


def test_the_shape_stays_after_the_end_of_the_process_with_the_largest_batches():
    """Its end causes no recompilation; under shrink shares are never longer than needed."""
    sources = [[np.arange(8)], [np.arange(4)] * 3]

    def shares(policy: str) -> list[int]:
        feeds = feeds_of(lambda worker: sources[worker.index], 1, partial=policy)
        return [element.share for element in agreed(feeds, 2, policy)[0]]

    assert shares("mask") == [4, 4, 4]
    assert shares("shrink") == [4, 2, 2]


@pytest.mark.filterwarnings("ignore:All processes should read the same")
def test_a_step_for_which_no_process_has_an_example_is_left_out():
    """Two rows are for the replicas of process 0, whose data ends: process 1 has no part of what it reads."""
    results, _ = drive(
        feeds_of(lambda worker: iter(batches(4 + 2 * worker.index, 2)), 2), 2, common=True
    )
    assert values(checked(results)[0]) == [[[0], [1]], [[2], [3]]]


def test_batches_of_a_function_end_together():
    """Acceptance 107: the user shards by the context; no process waits for the other."""

    def dataset_fn(context: InputContext) -> list[np.ndarray]:
        size = context.get_per_replica_batch_size(8)
        return batches(14, size)[context.input_pipeline_id :: context.num_input_pipelines]

    def feed(worker: Worker) -> Feed:
        sources = sources_of(dataset_fn, InputOptions(), 1, worker)
        return PerReplicaFeed(sources, InputOptions(), 1)

    results = agreed(feed, 2)
    assert [[list(e.counts) for e in one] for one in results] == [[[4], [4]], [[4], [2]]]
    assert [e.batch.tolist() for e in results[1]] == [[4, 5, 6, 7], [12, 13]]


def test_the_contexts_of_several_processes():
    """One pipeline for each process or for each replica, numbered over all processes."""
    seen: list[InputContext] = []
    for mode in ("per_worker", "per_replica"):
        options = InputOptions(experimental_replication_mode=mode)
        sources_of(lambda context: seen.append(context) or [], options, 2, Worker(3, 1))
    assert seen == [InputContext(3, 1, 6), InputContext(6, 2, 6), InputContext(6, 3, 6)]


def test_processes_do_not_communicate_at_every_step():
    """Processes agree on several fast steps at a time."""
    results, rounds = drive(feeds_of(lambda _: iter(batches(200, 2)), 1), 2)
    assert len(checked(results)[0]) == 100
    assert rounds.count < 30


@pytest.mark.parametrize("after", [0, 1, 20])
def test_an_error_of_one_process_is_raised_by_all_at_the_same_step(after: int):
    """All take the steps before it; then that process raises its error, and the others name the process."""

    def source(worker: Worker) -> Callable[[], Iterator[np.ndarray]]:
        def read() -> Iterator[np.ndarray]:
            for number in range(40):
                if worker.index == 1 and number == after:
                    raise OSError("disk")
                yield np.arange(2)

        return read

    (other, failing), _ = drive(feeds_of(source, 1, auto_shard_policy="off"), 2)
    assert isinstance(failing.error, OSError)
    assert "The input of process 1 failed" in str(other.error)
    assert "OSError: disk" in str(other.error)
    assert len(other.elements) == len(failing.elements) == 2 * after


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([[np.ones((2, 3))], [np.ones((2, 4))]], r"process 0: .*\[3\].*\n.*process 1: .*\[4\]"),
        ([[np.ones(2)], [np.ones(2, np.int32)]], r"process 0: .*float32.*\n.*process 1: .*int32"),
        ([[{"a": np.ones(2)}], [{"b": np.ones(2)}]], r"process 0: .*'a'.*\n.*process 1: .*'b'"),
        ([[np.ones(2)], []], "Process 1 has no batches"),
    ],
)
@pytest.mark.parametrize("policy", ["mask", "drop"])
def test_batches_that_do_not_fit_one_step_are_refused_by_all(
    sources: Any, message: str, policy: str
):
    """Every process raises the same error, so that none waits for the others."""
    feeds = feeds_of(lambda worker: sources[worker.index], 1, partial=policy)
    for text in refusals(feeds, 2, policy):
        assert re.search(message, text)


def test_batches_of_different_sizes_need_masks():
    """With masks they are padded to one size; without, they are refused by all."""

    def feeds(policy: str) -> Feeds:
        return feeds_of(lambda worker: [np.arange(4 + 4 * worker.index)], 1, partial=policy)

    assert [element.all_counts for [element] in agreed(feeds("mask"), 2)] == [[2, 4], [2, 4]]
    assert all(
        "4 examples for each replica" in text for text in refusals(feeds("error"), 2, "error")
    )


@pytest.mark.parametrize("lengths", [(2, 3), (2, None)])
def test_different_lengths_are_refused_if_all_should_read_the_same(lengths: Any):
    """If all should read the same batches, their known lengths must be equal."""

    def source(worker: Worker) -> Any:
        length = lengths[worker.index]
        return batches(4 * length, 4) if length else iter(batches(4, 4))

    texts = refusals(feeds_of(source, 1), 2, common=True)
    assert all("process 0: 2 batches" in text for text in texts)


@pytest.mark.parametrize(("numbers", "seen"), [((2, 3), "more of them"), ((3, 3), None)])
def test_batches_without_a_length_that_only_some_processes_have_are_reported(
    numbers: Any, seen: str | None, recwarn: pytest.WarningsRecorder
):
    """All read the same batches, so the parts of the process that has ended are lost."""
    source = feeds_of(lambda worker: iter(batches(4 * numbers[worker.index], 4)), 1)
    assert [len(one) for one in checked(drive(source, 2, common=True)[0])] == [3, 3]
    texts = [str(one.message) for one in recwarn]
    assert all(seen is not None and seen in text for text in texts)
    assert bool(texts) == (seen is not None)


@pytest.mark.parametrize(("length", "given"), [(1, "had more"), (3, "had 2")])
def test_a_wrong_length_is_refused(length: int, given: str):
    """The other processes rely on it."""

    class Liar(list):
        def __len__(self) -> int:
            return length

    texts = refusals(feeds_of(lambda _: Liar(batches(8, 4)), 1), 2, common=True)
    assert all(given in text for text in texts)


def test_empty_batches_count_in_the_length():
    """A source with batches of no rows, also at its end, has the length that it says."""
    source = [np.arange(0), *batches(8, 4), np.arange(0)]
    results, _ = drive(feeds_of(source, 1), 2, common=True)
    assert [len(one) for one in checked(results)] == [2, 2]


def test_a_process_that_divides_its_batches_alone_has_no_state():
    """One batch makes several steps, so a count of batches is not a position."""
    source = data.from_arrays(np.arange(8)).batch(4)
    feed = GlobalBatches(
        find_source(source), InputOptions(auto_shard_policy="off"), 1, Worker(2, 0)
    )
    assert feed.cardinality is None
    with pytest.raises(ArgumentError, match='auto_shard_policy="data"'):
        feed.state(0, next(feed.open(0)).progress)


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 40),
    size=st.integers(1, 9),
    workers=st.integers(1, 3),
    replicas=st.integers(1, 3),
    policy=st.sampled_from(["mask", "shrink"]),
    sharding=st.sampled_from(["data", "off", "file"]),
)
def test_every_example_appears_exactly_once(
    n: int, size: int, workers: int, replicas: int, policy: str, sharding: str
):
    """In all processes together, and in order in each; under OFF, in each process."""
    lengths = [n, *range(1, workers)]
    source = files_of(*lengths, size=size) if sharding == "file" else batches(n, size)
    feeds = feeds_of(source, replicas, auto_shard_policy=sharding, partial=policy)
    results = [values(one) for one in agreed(feeds, workers, policy)]
    seen = [[row for step in steps for part in step for row in part] for steps in results]
    if sharding == "off":
        assert seen == [list(range(n))] * workers
    elif sharding == "file":
        assert seen == [[100 * i + k for k in range(length)] for i, length in enumerate(lengths)]
    else:
        steps = zip(*results, strict=True)
        assert [row for step in steps for one in step for part in one for row in part] == list(
            range(n)
        )
