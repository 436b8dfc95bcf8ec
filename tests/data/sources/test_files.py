"""``dj.data.from_files``: examples of files in batches, shuffled, sharded, resumed."""

import functools
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from source_helpers import Pair, assert_same, assert_two_epochs, cut, epoch_of

import distribute_jax as dj
from distribute_jax.data.sources import find_source


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """Acceptance 99: three files of four records, 0-3, 10-13 and 20-23."""
    paths = [tmp_path / f"{i}.npy" for i in range(3)]
    for i, path in enumerate(paths):
        np.save(path, np.arange(10 * i, 10 * i + 4, dtype=np.int32))
    return paths


def rows(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def as_generator(path: Path) -> Any:
    for value in np.load(path):
        yield {"x": value, "pair": Pair(value / np.float32(2), None)}


def as_arrays(path: Path) -> Any:
    values = np.load(path)
    return {"x": values, "pair": Pair(values / np.float32(2), None)}


@pytest.mark.parametrize("read", [as_generator, as_arrays])
def test_examples_become_batches_across_files(strategy, three, read):
    """A generator of examples and a dict of arrays give the same batches, the last one partial."""
    x = np.concatenate([np.load(path) for path in three])
    expected = cut({"x": x, "pair": Pair(x / np.float32(2), None)}, 5)
    assert_two_epochs(strategy, dj.data.from_files(three, read).batch(5), expected)
    dropped = dj.data.from_files(three, read).batch(5, drop_remainder=True)
    assert_same(epoch_of(strategy.distribute_dataset(dropped)), expected[:2])


def test_files_are_assigned_to_workers_in_turn(three):
    """Acceptance 99: of two workers the first reads files 1 and 3, the second file 2."""
    source = find_source(dj.data.from_files(three, np.load).batch(4))
    assert source.num_files == 3
    first, second = (source.shard_files(2, worker) for worker in range(2))
    assert rows(first.open()) == [[0, 1, 2, 3], [20, 21, 22, 23]]
    assert rows(second.open()) == [[10, 11, 12, 13]]
    assert (first.num_files, second.num_files) == (2, 1)


@pytest.mark.parametrize("buffer_size", [1, 5, 100])
def test_shuffling_is_complete_differs_between_epochs_and_resumes(three, buffer_size):
    """Each epoch has every example once, in an order that depends on seed and epoch, from any position."""
    dataset = dj.data.from_files(three, np.load).shuffle(buffer_size, seed=4).batch(5)
    source = find_source(dataset)
    epochs = [rows(source.open(epoch)) for epoch in range(3)]
    for epoch in epochs:
        assert sorted(chain.from_iterable(epoch)) == [*range(4), *range(10, 14), *range(20, 24)]
    assert epochs[0] != epochs[1] or epochs[1] != epochs[2]
    again = find_source(dataset)
    assert again.can_resume
    assert again.seed == 4
    assert rows(again.open(1, 2)) == epochs[1][2:]
    assert rows(again.open(2)) == epochs[2]


def test_a_buffer_mixes_examples_of_one_file():
    """A buffer of one shuffles only files; a larger one shuffles examples."""
    dataset = dj.data.from_files(["a"], lambda path: range(50))
    assert rows(dataset.shuffle(1).batch(50)) == [list(range(50))]
    (mixed,) = rows(dataset.shuffle(8).batch(50))
    assert mixed != list(range(50))
    assert sorted(mixed) == list(range(50))


def test_a_file_is_opened_when_its_examples_are_needed(three):
    """Reading the first batch opens one file, not all."""
    opened = []

    def read(path):
        opened.append(path)
        return np.load(path)

    next(iter(dj.data.from_files(three, read).batch(2)))
    assert opened == three[:1]


from_a = functools.partial(dj.data.from_files, ["a"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dj.data.from_files([], np.load), "at least one str or pathlib.Path"),
        (lambda: dj.data.from_files("data.npy", np.load), "str 'data.npy'"),
        (lambda: dj.data.from_files([3], np.load), r"at least one str or .* got list \[3\]"),
        (lambda: dj.data.from_files(["a"], None), "read must be a function"),
        (lambda: list(dj.data.from_files(["a"], lambda p: 3)), r"read\('a'\) returned int 3"),
        (lambda: list(from_a(lambda p: (np.ones(2), np.ones(3)))), "arrays of different length"),
        (lambda: list(from_a(lambda p: [np.ones(1), np.ones(2)]).batch(2)), "64.1. and float64.2."),
        (lambda: from_a(np.load).batch(0), r"batch\(size\) must be .* got 0"),
        (lambda: from_a(np.load).shuffle(0), r"shuffle\(buffer_size\) must be .* got 0"),
        (lambda: from_a(np.load).batch(2).shuffle(), "already batched"),
        (lambda: from_a(np.load).batch(2).batch(2), "already batched"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    """Each ValueError shows what was received and what is accepted."""
    with pytest.raises(ValueError, match=message):
        call()
