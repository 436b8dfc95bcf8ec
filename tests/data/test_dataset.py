"""The distributed dataset as a user iterates it: the reference's cases and the errors."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from input_helpers import all_values, batches, distribute, values

from distribute_jax._errors import ArgumentError, ContextError

RULE_A, RULE_B = ["auto", "data"], ["off", "file"]
BOTH = RULE_A + RULE_B
FULL = [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("replicas", "source", "expected", "policies"),
    [
        (2, batches(9, 2), [[[0], [1]], [[2], [3]], [[4], [5]], [[6], [7]], [[8], []]], BOTH),
        (2, batches(9, 4), [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], []]], BOTH),
        (2, batches(9, 4, drop_remainder=True), [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], BOTH),
        (2, batches(10, 4), [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]], RULE_A),
        (2, batches(11, 5), [[[0, 1, 2], [3, 4]], [[5, 6, 7], [8, 9]], [[10], []]], BOTH),
        (4, batches(10, 8), [FULL, [[8], [9], [], []]], RULE_A),
        (4, batches(10, 8), [FULL, [[8, 9], [], [], []]], RULE_B),
        (4, batches(6, 6), [[[0, 1], [2, 3], [4, 5], []]], RULE_A),
        (4, batches(6, 6), [[[0, 1], [2, 3], [4], [5]]], RULE_B),
        (1, batches(5, 4), [[[0, 1, 2, 3]], [[4]]], BOTH),
        (2, batches(0, 4), [], BOTH),
    ],
    ids=[
        *("83", "84", "84 drop", "85", "85 odd", "87", "87 off", "rule A", "rule B", "one device"),
        "90",
    ],
)
@pytest.mark.parametrize("partial", ["mask", "shrink"])
def test_examples_are_divided_as_in_tensorflow(
    replicas: int, source: Any, expected: Any, policies: list[str], partial: str
):
    """Acceptance 83-90: each replica's real examples are those of tf.distribute, by each policy."""
    for policy in policies:
        dataset = distribute(source, replicas, partial, auto_shard_policy=policy)
        assert all_values(dataset) == expected


def test_an_empty_share_keeps_shape_and_dtype():
    """Acceptance 90: a replica without data has shape (0, …) and the right dtype."""
    element = list(distribute([np.ones((2, 3), np.float16), np.ones((1, 3), np.float16)], 2))[1]
    assert element.values[1].shape == (0, 3)
    assert element.values[1].dtype == jnp.float16


@pytest.mark.parametrize(
    ("replicas", "size", "share"), [(2, 4, 2), (2, 5, 3), (1, 4, 4), (4, 8, 2), (4, 10, 3)]
)
def test_element_spec_is_one_padded_share(replicas: int, size: int, share: int):
    """Acceptance 92: the spec has one replica's share, padding included."""
    dataset = distribute([(b, {"y": b[:, None] / 2}) for b in batches(11, size)], replicas)
    x, y = dataset.element_spec[0], dataset.element_spec[1]["y"]
    assert x == jax.ShapeDtypeStruct((share,), jnp.int32)
    assert y == jax.ShapeDtypeStruct((share, 1), jnp.float32)
    assert iter(dataset).element_spec[0] == x
    assert next(iter(dataset))[0].part_shape == x.shape


def test_element_spec_consumes_nothing():
    """Reading the spec twice consumes nothing of a one-shot source, even if it starts with an empty batch."""
    dataset = distribute(iter([np.zeros(0, np.int32), *batches(5, 4)]), 2)
    assert dataset.element_spec.shape == (2,)
    assert dataset.element_spec.shape == (2,)
    assert all_values(dataset) == [[[0, 1], [2, 3]], [[4], []]]
    assert dataset.element_spec.shape == (2,)


def test_element_spec_can_be_read_again_after_a_bad_first_batch():
    """A bad batch in a one-shot source gives the same error again, not an empty dataset."""
    dataset = distribute(iter([3, np.ones(2)]), 2)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="Batch the source first"):
            _ = dataset.element_spec


def test_element_spec_of_an_empty_dataset_is_an_error():
    """There is no batch to read it from."""
    with pytest.raises(ArgumentError, match="no batch with examples"):
        _ = distribute([np.zeros((0, 2))], 2).element_spec


def test_cardinality_is_the_number_of_elements():
    """Acceptance 105: 3 for five examples in batches of two; None if unknown."""
    assert distribute(batches(5, 2), 2).cardinality == 3
    assert distribute(lambda: iter(batches(5, 2)), 2).cardinality is None
    assert distribute(iter(batches(5, 2)), 2).cardinality is None
    assert distribute(batches(5, 2), 2, "drop").cardinality is None


def test_reduce_folds_over_the_elements():
    """Acceptance 105: the sum over five examples is 10; an empty dataset gives the start."""

    def add(state: float, element: Any) -> float:
        return state + sum(float(value.sum()) for value in element.values)

    assert distribute(batches(5, 2), 2).reduce(0, add) == 10
    assert distribute([], 2).reduce("start", add) == "start"


def test_there_is_no_map_and_a_length_if_the_source_has_one():
    """No map, as in TensorFlow; len, for Keras programs. A dataset is true also without elements."""
    dataset = distribute(batches(5, 2), 2)
    assert not hasattr(dataset, "map")
    assert len(dataset) == len(list(dataset)) == 3
    assert distribute([], 2)
    endless = distribute(iter(batches(5, 2)), 2)
    with pytest.raises(TypeError, match="not known before its end"):
        len(endless)
    assert len(list(endless)) == 3


def test_every_way_to_advance_an_iterator():
    """next, get_next and get_next_as_optional share one position, and each shows the end."""
    iterator = iter(distribute(batches(6, 2), 2))
    assert iter(iterator) is iterator
    assert values(next(iterator)) == [[0], [1]]
    assert values(iterator.get_next()) == [[2], [3]]
    optional = iterator.get_next_as_optional()
    assert optional.has_value()
    assert values(optional.get_value()) == [[4], [5]]
    ended = iterator.get_next_as_optional()
    assert not ended.has_value()
    with pytest.raises(ArgumentError, match="the dataset has ended"):
        ended.get_value()
    with pytest.raises(StopIteration):
        iterator.get_next()
    with pytest.raises(StopIteration):
        next(iterator)


# Sources


@pytest.mark.parametrize("kind", ["list", "function", "generator function", "sequence"])
def test_iterating_again_starts_from_the_first_batch(kind: str):
    """Lists, functions, generator functions and old-style sequences give the same epoch twice."""

    def generate():
        yield from batches(5, 4)

    class Sequence:
        def __getitem__(self, i: int) -> Any:
            return batches(5, 4)[i]

    source = {
        "list": batches(5, 4),
        "function": lambda: batches(5, 4),
        "generator function": generate,
        "sequence": Sequence(),
    }[kind]
    dataset = distribute(source, 2)
    assert dataset.element_spec.shape == (2,)
    assert all_values(dataset) == all_values(dataset) == [[[0, 1], [2, 3]], [[4], []]]


@pytest.mark.parametrize("wrapped", [lambda once: once, lambda once: lambda: once])
@pytest.mark.parametrize("make", [iter, lambda b: (x for x in b), lambda b: map(np.asarray, b)])
def test_a_one_shot_source_runs_once(make: Callable[[list], Any], wrapped: Callable[[Any], Any]):
    """A second epoch of an iterator is an error that says to pass a function, not an empty one."""
    dataset = distribute(wrapped(make(batches(5, 4))), 2)
    assert len(list(dataset)) == 2
    with pytest.raises(ArgumentError, match=r"same iterator a second.*lambda: make_batches\(\)"):
        iter(dataset)


@pytest.mark.parametrize(
    "source", [5, None, {"x": np.ones(4)}, object()], ids=["int", "None", "dict", "object"]
)
def test_sources_that_cannot_be_iterated_are_refused_at_once(source: Any):
    """The error names the source and shows how to batch."""
    with pytest.raises(ArgumentError, match="not an iterable of global batches"):
        distribute(source, 2)


def test_an_exception_of_the_source_passes_unchanged():
    """The user's exception is raised after the good batches; the next epoch is complete."""
    error = OSError("disk")
    fail = [True]

    def generate():
        yield from batches(4, 2)
        if fail[0]:
            raise error
        yield from batches(2, 2)

    dataset = distribute(generate, 2)
    seen = []
    with pytest.raises(OSError, match="disk") as caught:
        seen.extend(values(e) for e in dataset)  # extend keeps what came before the error
    assert caught.value is error
    assert seen == [[[0], [1]], [[2], [3]]]
    fail[0] = False
    assert len(list(dataset)) == 3


def test_a_bad_batch_in_the_middle_is_numbered_and_the_next_epoch_works():
    """The message names the batch; earlier batches and the next epoch are unaffected."""
    source = [np.ones(2, np.float32), "oops", np.ones(2, np.float32)]
    dataset = distribute(source, 2)
    iterator = iter(dataset)
    next(iterator)
    with pytest.raises(ArgumentError, match="Batch 1 of the dataset"):
        next(iterator)
    source[1] = np.ones(2, np.float32)
    assert len(list(dataset)) == 3


def test_a_changed_structure_shows_both():
    """A batch with other keys than the first is an error that shows both structures."""
    x = np.ones(2, np.float32)
    with pytest.raises(
        ArgumentError, match="Batch 1 of the dataset has another structure"
    ) as error:
        list(distribute([{"x": x}, {"x": x, "y": x}], 2))
    assert "{'x': *}" in str(error.value)
    assert "{'x': *, 'y': *}" in str(error.value)


@pytest.mark.parametrize(
    ("later", "line"),
    [
        (np.ones((2, 3), np.int32), r"batch\['x'\]: int32\[2,3\], in the first batch float32\["),
        (np.ones(2, np.float32), r"batch\['x'\]: float32\[2\], in the first batch float32\[2,3\]"),
    ],
)
def test_a_leaf_keeps_its_dtype_and_number_of_dims(later: np.ndarray, line: str):
    """Another dtype, or labels without their last dim, would silently change the computation."""
    dataset = distribute([{"x": np.ones((2, 3)), "y": later[:, ...]}, {"x": later, "y": later}], 2)
    with pytest.raises(
        ArgumentError, match=f"Batch 1 of the dataset differs from the first batch.*\n.*{line}"
    ) as error:
        list(dataset)
    assert "['y']" not in str(error.value)


def test_sizes_may_differ_from_batch_to_batch():
    """Sentences padded batch by batch differ in length; 64-bit leaves equal those of JAX; and an empty
    batch may have any dtype."""
    shapes = [np.ones((2, 3)), jnp.ones((2, 5)), np.ones((2, 4), np.float32), np.ones(0, np.int8)]
    assert [e.part_shape for e in distribute(shapes, 2)] == [(1, 3), (1, 5), (1, 4)]


def test_leaving_the_loop_closes_a_generator():
    """A generator left half-way is closed when the loop ends, so its files are too."""
    closed = []

    def generate():
        try:
            yield from batches(6, 2)
        finally:
            closed.append(True)

    dataset = distribute(generate, 2)
    for _ in dataset:
        break
    gc.collect()
    assert closed == [True]


def test_an_element_does_not_keep_its_batch_alive():
    """The host batch is freed once its element exists."""
    batch = np.ones((4, 2), np.float32)
    alive = weakref.ref(batch)
    iterator = iter(distribute(iter([batch]), 2))
    element = next(iterator)
    del batch
    assert list(iterator) == []
    gc.collect()
    assert alive() is None
    assert element.global_array.shape == (4, 2)


# Partial batches


def shapes(dataset: Any) -> list[tuple[int, tuple[int, ...] | None]]:
    return [(element.global_array.shape[0], element.counts) for element in dataset]


def test_mask_gives_every_element_one_shape():
    """Full batches have no counts; partial ones have the same shape."""
    source = [np.ones(n, np.float32) for n in (8, 8, 7, 1, 4)]
    counts = [None, None, (2, 2, 2, 1), (1, 0, 0, 0), (1, 1, 1, 1)]
    assert shapes(distribute(source, 4)) == [(8, each) for each in counts]


def test_mask_grows_with_a_larger_batch():
    """A batch larger than the first is not cut: later batches are padded to its share."""
    source = [np.ones(n, np.float32) for n in (4, 8, 4)]
    assert shapes(distribute(source, 2)) == [(4, None), (8, None), (8, (2, 2))]


def test_mask_starts_again_in_each_epoch():
    """The size of a full batch is not kept from an earlier epoch."""
    sizes = [8]
    dataset = distribute(lambda: [np.ones(sizes[0], np.float32)], 2)
    assert shapes(dataset) == [(8, None)]
    sizes[0] = 4
    assert shapes(dataset) == [(4, None)]


def test_shrink_pads_only_what_does_not_divide():
    """Shares shrink to ceil(n / N); counts appear only where that leaves padding."""
    source = [np.ones(n, np.float32) for n in (8, 4, 6, 1)]
    expected = [(8, None), (4, None), (8, (2, 2, 2, 0)), (4, (1, 0, 0, 0))]
    assert shapes(distribute(source, 4, "shrink")) == expected


# The warning of idle replicas, and the guard


def test_a_batch_smaller_than_the_replicas_warns_once():
    """One warning for the dataset, at the user's line, with both figures and a remedy."""
    dataset = distribute(batches(4, 2), 4)
    with pytest.warns(UserWarning, match="2 examples for 4 replicas") as caught:
        epochs = [[element.counts for element in dataset] for _ in range(2)]
    assert epochs == [[(1, 1, 0, 0)] * 2] * 2
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert "at least 4" in str(caught[0].message)


def test_the_guard_is_called_at_every_step():
    """If the strategy's guard raises, an iterator can neither start nor advance."""
    allowed = [True]

    def guard():
        if not allowed[0]:
            raise ContextError("not here")

    dataset = distribute(batches(6, 2), 2, guard=guard)
    iterator = iter(dataset)
    allowed[0] = False
    for forbidden in (
        lambda: next(iterator),
        iterator.get_next,
        iterator.get_next_as_optional,
        lambda: iter(dataset),
        lambda: dataset.reduce(0, max),
    ):
        with pytest.raises(ContextError, match="not here"):
            forbidden()
    allowed[0] = True
    assert values(next(iterator)) == [[0], [1]]


class Table:
    """As a tensor of PyTorch or a table of pandas."""

    shape = (16, 3)

    def __iter__(self) -> Iterator[Any]:
        return iter(np.ones(self.shape))


@pytest.mark.parametrize("one", [np.ones((8, 3)), jnp.ones((8, 3)), np.arange(4), Table()])
def test_one_array_is_refused(one: Any):
    """Its rows would become batches."""
    with pytest.raises(ArgumentError, match=r"one array.*single examples.*\[x\]"):
        distribute(one, 2)
    assert isinstance(one, Table) or len(list(distribute([one], 2))) == 1


def test_a_tuple_of_equally_long_arrays_is_refused():
    """``(x, y)`` would be two batches, x and then y; a list of arrays is a list of batches."""
    x, y = np.ones((16, 8)), jnp.ones((16, 1))
    for arrays in ((x, y), (Table(), Table())):
        with pytest.raises(
            ArgumentError, match=r"tuple of 2 arrays with 16 rows each.*from_arrays"
        ):
            distribute(arrays, 2)
    assert len(list(distribute([(x, y)], 2))) == 1
    assert len(list(distribute([x, x], 2))) == 2
    assert len(list(distribute((x, x[:8]), 2))) == 2
    assert len(list(distribute(((x, y), (x, y)), 2))) == 2
