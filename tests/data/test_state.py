"""state() and restore(): training resumes at the next batch, on any number of replicas."""

import json
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
import pytest
from cases import long
from input_helpers import batches, distribute, examples_in

import distribute_jax as dj
from distribute_jax._errors import ArgumentError
from distribute_jax.data import DistributedDataset
from distribute_jax.data.sources import Source


def shuffled(n: int = 22, size: int = 4, seed: int = 0) -> dj.data.ArrayDataset:
    """R(n).batch(size), whose examples come in another order in each epoch, as the seed says."""
    return dj.data.from_arrays(np.arange(n)).shuffle(seed=seed).batch(size)


def create(
    source: Any, replicas: int = 2, partial: str = "mask", **more: Any
) -> DistributedDataset:
    return distribute(source, replicas, partial, **more)


def epoch_of(dataset: DistributedDataset) -> list[list[int]]:
    return [examples_in(element) for element in dataset]


@pytest.mark.parametrize("position", range(7))
@pytest.mark.parametrize("replicas", [1, 4, long(8)])
@pytest.mark.parametrize("policy", ["auto", "off"])
def test_training_resumes_at_the_very_next_batch(position: int, replicas: int, policy: str):
    """From any position of epoch 1, another program with other replicas continues, up to epoch 2."""
    options = {"auto_shard_policy": policy}
    whole = create(shuffled(42, 8), 2, **options)
    epochs = [epoch_of(whole) for _ in range(3)]
    first = create(shuffled(42, 8), 2, **options)
    list(first)
    iterator = iter(first)
    taken = [examples_in(next(iterator)) for _ in range(min(position, 6))]
    saved = json.loads(json.dumps(iterator.state()))

    again = create(shuffled(42, 8), replicas, **options)
    resumed = iter(again)
    resumed.restore(saved)
    assert taken + [examples_in(element) for element in resumed] == epochs[1]
    assert epoch_of(again) == epochs[2]


STATE = {"version": 1, "source": "dj.data.from_arrays(…)", "seed": 0, "examples": 22, "batches": 6}
STATE |= {"batch_size": 4, "first_batch": 4, "largest_batch": 4, "epoch": 0, "position": 2}


def test_a_state_is_a_small_dict_of_plain_values():
    """Numbers, a string and Nones, which JSON and every checkpoint can store."""
    iterator = iter(create(shuffled()))
    next(iterator)
    next(iterator)
    assert iterator.state() == STATE
    assert json.loads(json.dumps(iterator.state())) == STATE


def test_a_state_may_have_the_number_types_of_a_checkpoint():
    """Checkpoints return NumPy integers and 0-d arrays for Python integers."""
    state = iter(create(shuffled())).state()
    saved = {k: np.asarray(v) if isinstance(v, int) else v for k, v in state.items()}
    iterator = iter(create(shuffled()))
    iterator.restore(saved)
    assert len(list(iterator)) == 6


class Fixed(Source):
    """Batches of these sizes, in their order."""

    text = "batches"
    can_resume = True

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._batches = [np.full(n, i, np.int32) for i, n in enumerate(sizes)]

    @property
    def length(self) -> int:
        return len(self._batches)

    def open(self, epoch: int = 0, position: int = 0) -> Iterator[np.ndarray]:
        return iter(self._batches[position:])


@pytest.mark.parametrize(
    ("partial", "sizes", "taken"),
    [
        ("mask", (4, 0, 0, 4, 2), 2),
        ("mask", (4, 8, 4, 2), 2),
        ("drop", (4, 8, 2, 4, 4), 2),
        ("shrink", (8, 8, 3, 1), 2),
    ],
)
def test_a_resumed_epoch_has_the_shapes_of_an_uninterrupted_one(
    partial: str, sizes: tuple[int, ...], taken: int
):
    """Skipped batches count, and the state contains the size of a full batch."""

    def described(elements: Any) -> list:
        return [(e.part_shape, e.counts, examples_in(e)) for e in elements]

    whole = described(create(Fixed(sizes), 2, partial))
    iterator = iter(create(Fixed(sizes), 2, partial))
    for _ in range(taken):
        next(iterator)
    resumed = iter(create(Fixed(sizes), 2, partial))
    resumed.restore(iterator.state())
    assert described(resumed) == whole[taken:]


@pytest.mark.parametrize("partial", ["drop", "error"])
def test_a_first_batch_that_more_replicas_cannot_divide_is_refused_on_restore(partial: str):
    """As a new iterator refuses it; skipping every batch would be an empty epoch, or an endless one."""
    iterator = iter(create(Fixed((12, 12, 12)), 4, partial))
    next(iterator)
    resumed = iter(create(Fixed((12, 12, 12)), 8, partial))
    with pytest.raises(
        ArgumentError, match="The first batch of the restored epoch has 12 examples"
    ):
        resumed.restore(iterator.state())


def test_an_iterator_can_be_restored_at_any_time():
    """Also after its end, and on the iterator that returned the state."""
    iterator = iter(create(shuffled()))
    next(iterator)
    saved = iterator.state()
    rest = [examples_in(element) for element in iterator]
    iterator.restore(saved)
    assert [examples_in(element) for element in iterator] == rest
    assert iterator.state()["position"] == 6


def test_a_resumed_partial_batch_does_not_determine_the_spec():
    """The last batch of an epoch causes no warning of a small batch size, and is not used for the spec."""
    iterator = iter(create(Fixed((4, 1)), 4, "shrink"))
    next(iterator)
    dataset = create(Fixed((4, 1)), 4, "shrink")
    resumed = iter(dataset)
    resumed.restore(iterator.state())
    assert [examples_in(element) for element in resumed] == [[1]]
    assert resumed.element_spec.shape == (1,)
    wider = create(Fixed((8, 1)), 4, "shrink")
    resumed = iter(wider)
    resumed.restore(iterator.state() | {"first_batch": 8, "largest_batch": 8})
    next(resumed)
    assert resumed.element_spec.shape == (2,)


def test_a_failed_restore_changes_nothing():
    """The iterator keeps its position."""
    iterator = iter(create(shuffled()))
    next(iterator)
    before = iterator.state()
    with pytest.raises(ArgumentError):
        iterator.restore(before | {"epoch": -1})
    assert iterator.state() == before
    assert len(list(iterator)) == 5


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "got None"),
        ({}, r"got \{\}, which is not what"),
        (STATE | {"version": 2}, "a state with {'version': 2}"),
        ({k: v for k, v in STATE.items() if k != "seed"}, "not what .*KeyError: 'seed'"),
        (STATE | {"source": "files"}, "'files'}, but this dataset has {'source': 'dj"),
        (STATE | {"seed": 5}, "'seed': 5}, but this dataset has {'seed': 0}.*with the same seed"),
        (STATE | {"batches": 12}, "12}, but this dataset has {'batches': 6}.*global batches"),
        (STATE | {"examples": 21}, "'examples': 21}, but this dataset has {'examples': 22}"),
        (STATE | {"batch_size": 5}, "'batch_size': 5}, but this dataset has {'batch_size': 4}"),
        (STATE | {"position": 7}, "position must be an integer >= 0 and < 7; got 7"),
        (STATE | {"position": -1}, "position must be an integer >= 0; got -1"),
        (STATE | {"epoch": 1.5}, "epoch must be an integer >= 0; got 1.5"),
        (STATE | {"epoch": "one"}, "epoch must be an integer >= 0; got 'one'"),
    ],
)
def test_a_state_of_another_dataset_is_refused(state: Any, message: str):
    """Each message says what is wrong with it, what this dataset has, and what to do."""
    iterator = iter(create(shuffled()))
    with pytest.raises(ArgumentError, match=message):
        iterator.restore(state)


@pytest.mark.parametrize("kind", ["endless", "known", "unknown"])
@pytest.mark.parametrize("size", [3, 5])
def test_another_batch_size_is_detected(size: int, kind: str):
    """So that resuming never yields other examples silently, also with as many batches as before."""

    def made(size: int) -> Any:
        source = dj.data.from_arrays(np.arange(6))
        if kind == "endless":
            return create(source.repeat().batch(size))
        return create(source.batch(size) if kind == "known" else Fixed((size, 6 - size)))

    iterator = iter(made(4))
    next(iterator)
    saved = iterator.state()
    name = "first_batch" if kind == "unknown" else "batch_size"
    with pytest.raises(
        ArgumentError, match=f"'{name}': 4}}, but this dataset has {{'{name}': {size}"
    ):
        iter(made(size)).restore(saved)
    same = iter(made(4))
    same.restore(saved)
    assert examples_in(next(same)) == examples_in(next(iterator))


@pytest.mark.parametrize(
    "source", [batches(6, 2), lambda: batches(6, 2), iter(batches(6, 2))], ids=type
)
def test_sources_that_cannot_seek_say_so(source: Any):
    """state and restore name the source and what to use instead; the pass itself continues."""
    iterator = iter(distribute(source, 2))
    next(iterator)
    with pytest.raises(ArgumentError, match=r"iterator\.state .*from_arrays"):
        iterator.state()
    with pytest.raises(ArgumentError, match=r"iterator\.restore .*from_arrays"):
        iterator.restore(STATE)
    assert len(list(iterator)) == 2


def test_reduce_over_endless_data_is_refused():
    """It would never return."""
    with pytest.raises(ArgumentError, match="repeated without end"):
        create(dj.data.from_arrays(np.arange(4)).repeat().batch(4)).reduce(
            0, lambda state, element: state
        )


REAL = {
    "arrays": lambda n: dj.data.from_arrays(np.arange(n)).shuffle(seed=3).batch(8),
    "endless arrays": lambda n: dj.data.from_arrays(np.arange(n)).shuffle(seed=3).repeat().batch(8),
    "grain map": lambda n: grain.MapDataset.source(np.arange(n)).shuffle(seed=3).batch(8),
    "grain iter": lambda n: grain.MapDataset.source(np.arange(n)).to_iter_dataset().batch(8),
}


@pytest.mark.parametrize("kind", REAL)
def test_real_sources_resume_on_other_replicas(kind: str):
    """Arrays and Grain: epoch 1, left after two batches, continues elsewhere with the third."""
    first = distribute(REAL[kind](36), 2)
    if not first._feed.is_infinite:
        list(first)
    iterator = iter(first)
    for _ in range(2):
        next(iterator)
    saved = json.loads(json.dumps(iterator.state()))
    resumed = iter(distribute(REAL[kind](36), 4))
    resumed.restore(saved)
    assert [examples_in(next(resumed)) for _ in range(3)] == [
        examples_in(next(iterator)) for _ in range(3)
    ]
