"""Deprecated names of TensorFlow work, and warn with the name that replaced them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import distribute_jax as dj

BATCHES = [np.arange(4, dtype=np.float32), np.arange(2, dtype=np.float32)]


def parts(element: Any) -> list[list[float]]:
    return [np.asarray(value).tolist() for value in element.values]


def test_unwrap_is_local_results(s2: dj.MirroredStrategy):
    """The warning points at the user's line."""
    value = next(iter(s2.distribute_dataset(BATCHES)))
    with pytest.warns(DeprecationWarning, match=r"experimental_local_results\(value\)") as caught:
        unwrapped = s2.unwrap(value)
    assert [np.asarray(part).tolist() for part in unwrapped] == [[0, 1], [2, 3]]
    assert caught[0].filename == __file__


def test_experimental_distribute_datasets_from_function(s2: dj.MirroredStrategy):
    options = dj.InputOptions(experimental_replication_mode="per_replica")
    with pytest.warns(DeprecationWarning, match=r"strategy\.distribute_datasets_from_function"):
        dataset = s2.experimental_distribute_datasets_from_function(
            lambda context: [np.full(1, context.input_pipeline_id)], options
        )
    assert [parts(element) for element in dataset] == [[[0], [1]]]


def test_experimental_make_numpy_dataset_yields_single_examples(s2: dj.MirroredStrategy):
    """Lists of arrays are stacked first."""
    nest = {"x": np.arange(3), "y": [np.zeros(2), np.ones(2), np.full(2, 2)]}
    with pytest.warns(DeprecationWarning, match=r"dj\.data\.from_arrays\(x\)\.batch"):
        dataset = s2.experimental_make_numpy_dataset(nest, session=None)
    elements = list(s2.distribute_dataset(dataset.batch(2)))
    assert [parts(element["x"]) for element in elements] == [[[0], [1]], [[2], []]]
    assert [parts(element["y"]) for element in elements] == [[[[0, 0]], [[1, 1]]], [[[2, 2]], []]]


@pytest.mark.filterwarnings("ignore:strategy.experimental_make_numpy_dataset:DeprecationWarning")
def test_a_list_that_does_not_stack_shows_its_shapes(s2: dj.MirroredStrategy):
    with pytest.raises(dj.ArgumentError, match=r"must have one shape; got \(2,\), \(3,\)"):
        s2.experimental_make_numpy_dataset([np.zeros(2), np.zeros(3)])


def test_make_dataset_iterator(s2: dj.MirroredStrategy):
    """The first call starts an epoch, and ``initialize`` the next."""
    with pytest.warns(DeprecationWarning, match=r"strategy\.distribute_dataset\(ds\)"):
        iterator = s2.make_dataset_iterator(BATCHES)
    assert parts(iterator.get_next()) == [[0, 1], [2, 3]]
    assert parts(next(iterator)) == [[0], [1]]
    with pytest.raises(StopIteration):
        iterator.get_next()
    assert iterator.initialize() == []
    assert [parts(element) for element in iterator] == [[[0, 1], [2, 3]], [[0], [1]]]


def test_make_input_fn_iterator(s2: dj.MirroredStrategy):
    seen = []

    def input_fn(context: dj.InputContext) -> Iterator[np.ndarray]:
        seen.append(context)
        return iter(BATCHES)

    with pytest.warns(DeprecationWarning, match=r"distribute_datasets_from_function\(fn\)"):
        iterator = s2.make_input_fn_iterator(input_fn)
    assert parts(iterator.get_next()) == [[0, 1, 2, 3], [0, 1]]
    with pytest.warns(DeprecationWarning, match="make_input_fn_iterator"):
        iterator = s2.make_input_fn_iterator(input_fn, dj.InputReplicationMode.PER_REPLICA)
    assert parts(iterator.get_next()) == [[0, 1, 2, 3]] * 2
    assert seen == [dj.InputContext(1, 0, 2), *(dj.InputContext(2, i, 2) for i in range(2))]


def test_experimental_run(s2: dj.MirroredStrategy):
    """The element is the only argument; without an iterator there is none."""
    iterator = iter(s2.distribute_dataset([(batch, batch) for batch in BATCHES]))
    with pytest.warns(DeprecationWarning, match=r"strategy\.run\(fn"):
        result = s2.experimental_run(lambda pair: pair[0] + pair[1], iterator)
    assert parts(result) == [[0, 2], [4, 6]]
    with pytest.warns(DeprecationWarning, match=r"strategy\.run\(fn"):
        assert float(s2.experimental_run(lambda: 1.0)) == 1


def test_update_config_proto(s2: dj.MirroredStrategy):
    config = object()
    with pytest.warns(DeprecationWarning, match="update_config_proto"):
        assert s2.update_config_proto(config) is config
