"""Which source is selected, and what each of them must do."""

import importlib.abc
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from source_helpers import Pair, assert_two_epochs, cut

import distribute_jax as dj
from distribute_jax.data.sources import find_source
from distribute_jax.data.sources._base import Stream

X = np.arange(5, dtype=np.int32)


def test_plain_iterables_keep_structure_order_and_values(strategy):
    """A list of batches with a dict, a tuple, a dataclass and None, the last one partial."""
    table = {"a": (X, X / np.float32(2)), "b": Pair(X > 2, None)}
    assert_two_epochs(strategy, cut(table, 4), cut(table, 4))


def test_finding_a_source_imports_nothing(monkeypatch):
    """No package is imported to find the source."""
    asked = []

    class Recorder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            asked.append(name)

    for name in ("grain", "tensorflow", "torch", "datasets"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Recorder(), *sys.meta_path])
    assert [batch.tolist() for batch in find_source([X]).open()] == [X.tolist()]
    assert asked == []
    with pytest.raises(ModuleNotFoundError):
        import not_a_module  # noqa: F401
    assert asked == ["not_a_module"]


def test_messages_name_the_method_that_was_called():
    """Other methods than distribute_dataset use the function too."""
    with pytest.raises(dj.ArgumentError, match=r"^strategy\.predict got int 5"):
        find_source(5, "strategy.predict")
    with pytest.raises(dj.ArgumentError, match=r"given to strategy\.predict returned int 5"):
        find_source(lambda: 5, "strategy.predict").open()


class _Counted(Stream):
    """A stream that counts its starts, and optionally fails at one batch."""

    text = "a counted stream"
    starts = 0
    error: BaseException | None = None

    def start(self) -> Iterator[Any]:
        self.starts += 1
        yield 10 * self.starts
        if self.error is not None:
            raise self.error
        yield 10 * self.starts + 1


def test_a_preview_is_the_beginning_of_the_next_epoch():
    """Two previews start the stream once; the next epoch, and only that one, begins with what they read."""
    stream = _Counted(None, "a test")
    assert next(stream.preview()) == 10
    assert list(stream.preview()) == [10, 11]
    assert list(stream.open()) == [10, 11]
    assert list(stream.open()) == [20, 21]
    assert stream.starts == 2


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_preview_that_fails_is_forgotten(error):
    """An error in a preview passes through, and the next epoch starts again."""
    stream = _Counted(None, "a test")
    stream.error = error()
    with pytest.raises(error):
        list(stream.preview())
    stream.error = None
    assert list(stream.open()) == [20, 21]


def test_after_an_error_a_generator_cannot_be_iterated_again(s2):
    """The error passes through; the next epoch is not a silent empty one."""

    def generate():
        yield X[:2]
        raise OSError("disk")

    dataset = s2.distribute_dataset(generate())
    with pytest.raises(OSError, match="disk"):
        list(dataset)
    with pytest.raises(dj.ArgumentError, match=r"lambda: make_batches\(\)"):
        iter(dataset)


@pytest.mark.parametrize("kind", ["generator", "list iterator", "factory of one generator", "both"])
def test_one_iterator_is_not_given_to_two_datasets(kind):
    """Each would get only some of the batches; the message names the iterator and asks for a factory."""
    iterator = iter([X, X]) if kind == "list iterator" else (x for x in [X, X])
    first = iterator if kind != "factory of one generator" else lambda: iterator
    second = first if kind != "both" else lambda: iterator
    used = find_source(first)
    batches = used.open()
    with pytest.raises(ValueError, match=r"two distributed datasets[\s\S]*a function that returns"):
        find_source(second).open()
    assert len(list(batches)) == 2


@pytest.mark.parametrize("kind", [iter, lambda batches: (x for x in batches)])
def test_an_iterator_belongs_to_the_dataset_that_read_it_also_after_that_was_freed(kind, s2):
    """Which has read ahead; a dataset that was not started, and the id of a freed iterator, do not count."""
    iterator = kind([X, X + 1, X + 2])
    s2.distribute_dataset(iterator)
    batches = find_source(iterator).open()
    next(batches)
    del batches
    with pytest.raises(ValueError, match="two distributed datasets"):
        s2.distribute_dataset(iterator)
    sources = [find_source(lambda: kind([X])) for _ in range(50)]
    assert [len(list(source.open())) for source in sources] == [1] * 50


def test_replicas_do_not_share_one_iterator(s2):
    """A function that is called for each replica must return separate batches."""
    shared = (x for x in [X, X])
    options = dj.InputOptions(experimental_replication_mode="per_replica")
    with pytest.raises(ValueError, match="two distributed datasets"):
        s2.distribute_datasets_from_function(lambda context: shared, options)
