"""Hugging Face datasets, with the real package."""

import numpy as np
import pytest
from flax import nnx
from source_helpers import assert_same, assert_two_epochs, cut, epoch_of

import distribute_jax as dj
from distribute_jax.data.sources import find_source

datasets = pytest.importorskip("datasets", reason="needs datasets: dev.py test --sources has it")

N = np.arange(11)
COLUMNS = {"x": N, "v": np.stack([N, N / 2], axis=1), "b": N > 3}
TABLE = {**COLUMNS, "v": COLUMNS["v"].astype(np.float32)}


@pytest.fixture(autouse=True)
def _quiet():
    """No progress bars, which start threads."""
    datasets.disable_progress_bars()


def table(**more):
    return datasets.Dataset.from_dict({name: list(c) for name, c in {**COLUMNS, **more}.items()})


@pytest.mark.parametrize("form", [None, "numpy", "torch", "jax"])
def test_batches_of_a_table_keep_columns_order_and_values(strategy, form):
    """In every format the columns are arrays of all rows, the last batch partial, in two epochs."""
    if form == "torch":
        pytest.importorskip("torch", reason="needs PyTorch: dev.py test --sources has it")
    assert_two_epochs(strategy, table().with_format(form).batch(4), cut(TABLE, 4))


@pytest.mark.parametrize("form", [None, "numpy"])
def test_batches_of_a_stream_keep_columns_order_and_values(strategy, form):
    """An IterableDataset, as a table that is streamed."""
    stream = table().to_iterable_dataset()
    dataset = (stream.with_format(form) if form else stream).batch(4)
    assert_two_epochs(strategy, dataset, cut(TABLE, 4))
    source = find_source(dataset)
    assert not source.can_resume
    assert source.length is None


def test_a_shuffled_stream_has_a_new_order_after_set_epoch(s2):
    """``set_epoch`` of the user's dataset counts, also after it was distributed."""
    stream = table().to_iterable_dataset().shuffle(seed=0).batch(4)
    distributed = s2.distribute_dataset(stream)
    orders = []
    for epoch in (0, 1, 1):
        stream.set_epoch(epoch)
        orders.append([int(n) for batch in epoch_of(distributed) for n in batch["x"]])
    assert orders[0] != orders[1] == orders[2]
    assert [sorted(order) for order in orders] == [N.tolist()] * 3


def test_iter_gives_batches_through_a_function(strategy):
    """``iter`` is a generator, so a function creates it for each epoch."""
    formatted = table().with_format("numpy")
    assert_two_epochs(strategy, lambda: formatted.iter(4), cut(TABLE, 4))


def test_validation_on_a_table(s2):
    """A table has a ``shape``, as arrays have; it is a dataset of batches all the same."""
    with s2.scope():
        model = dj.Model(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    model.compile("sgd", "mse")
    keys = {"x_key": "v", "y_key": "v", "verbose": 0}
    history = model.fit(table().batch(4), validation_data=table().batch(8), **keys).history
    assert history["val_loss"] == pytest.approx([model.evaluate(table().batch(8), **keys)])


def test_a_table_resumes_anywhere():
    """open yields what an uninterrupted epoch yields from there."""
    source = find_source(table().batch(4))
    assert source.length == 3
    assert source.can_resume
    whole = [batch["x"].tolist() for batch in source.open()]
    for position in range(4):
        assert [b["x"].tolist() for b in source.open(1, position)] == whole[position:]


def test_the_users_choice_of_columns_and_transform_is_kept(s2):
    """Columns that the format leaves out, such as text, stay out; a transform is applied."""
    words = ["a"] * 11
    chosen = table(word=words).batch(4)
    chosen.set_format(columns=["x"])
    assert_same(epoch_of(s2.distribute_dataset(chosen)), cut({"x": N}, 4))
    double = table(word=words).batch(4).with_transform(lambda rows: {"y": np.array(rows["x"]) * 2})
    assert_same(epoch_of(s2.distribute_dataset(double)), cut({"y": N * 2}, 4))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: table(), r"batch\['x'\][\s\S]*Call \.batch\(256\) on this Hugging Face"),
        (lambda: table(word=["a"] * 11).batch(4), r"batch\['word'\][\s\S]*Encode strings"),
    ],
    ids=["unbatched", "text"],
)
def test_columns_that_devices_cannot_hold_are_refused(s2, make, message, streamed):
    """Single examples and text, in a table and in a stream."""
    dataset = make().to_iterable_dataset() if streamed else make()
    with pytest.raises(ValueError, match=message):
        next(iter(s2.distribute_dataset(dataset)))


@pytest.mark.parametrize("kind", ["DatasetDict", "IterableDatasetDict"])
def test_a_dictionary_of_splits_is_refused(s2, kind):
    """The message names the splits and shows the choice."""
    splits = getattr(datasets, kind)({"train": table(), "test": table()})
    with pytest.raises(ValueError, match=r"dataset\['train'\]\.batch\(256\)"):
        s2.distribute_dataset(splits)
