"""tf.data.Dataset, with the real TensorFlow."""

from collections import namedtuple
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from source_helpers import assert_same, assert_two_epochs, cut, epoch_of

import distribute_jax as dj
from distribute_jax.data.sources import find_source

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow: dev.py test --sources has it")

Named = namedtuple("Named", "a b")
N = np.arange(11, dtype=np.int32)
TABLE = {"x": Named(N, N / np.float32(2)), "y": (N > 3, {"z": N.astype(np.uint8)})}


def sliced(tree: Any) -> Any:
    return tf.data.Dataset.from_tensor_slices(tree).batch(2)


def numbers(n: int = 11, size: int = 4) -> Any:
    return tf.data.Dataset.range(n, output_type=tf.int32).batch(size)


def rows(batches: Any) -> list[list[int]]:
    return [np.asarray(batch).tolist() for batch in batches]


def test_batches_keep_structure_order_and_values(strategy):
    """A dict, a named tuple, a tuple, None, four dtypes, the last batch partial, in two epochs."""
    dataset = tf.data.Dataset.from_tensor_slices(TABLE).map(lambda row: (row, None)).batch(4)
    assert_two_epochs(strategy, dataset, cut((TABLE, None), 4))


def test_bfloat16_keeps_its_dtype(s2):
    """TensorFlow and JAX have the same bfloat16."""
    dataset = numbers(4).map(lambda x: tf.cast(x, tf.bfloat16))
    assert_same(epoch_of(s2.distribute_dataset(dataset)), [jnp.arange(4, dtype=jnp.bfloat16)])


def test_cardinality_is_that_of_the_dataset():
    """Known, infinite, unknown."""
    assert find_source(numbers()).length == 3
    endless = find_source(numbers().repeat())
    assert endless.is_infinite
    unknown = find_source(numbers().filter(lambda batch: True))
    assert not unknown.is_infinite
    assert endless.length is unknown.length is None


def test_eager_tensors_in_any_iterable_become_arrays(s2):
    """A list of batches of tensors, and the iterator of a dataset."""
    batches = [{"x": tf.range(4)}, {"x": tf.range(3)}]
    expected = [{"x": np.arange(4, dtype=np.int32)}, {"x": np.arange(3, dtype=np.int32)}]
    assert_same(epoch_of(s2.distribute_dataset(batches)), expected)
    assert_same(epoch_of(s2.distribute_dataset(iter(numbers(5)))), cut(N[:5], 4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: numbers(8).unbatch(), r"Call \.batch\(256\) on this tf\.data\.Dataset"),
        (lambda: sliced({"x": N, "name": ["a"] * 11}), r"batch\['name'\][\s\S]*Encode strings"),
        (lambda: sliced({"r": tf.ragged.constant([[1], []])}), r"batch\['r'\][\s\S]*to_tensor"),
        (
            lambda: tf.data.Dataset.from_tensors({"s": tf.sparse.eye(2)}).batch(2),
            r"batch\['s'\][\s\S]*to_dense",
        ),
    ],
    ids=["unbatched", "strings", "ragged", "sparse"],
)
def test_leaves_that_devices_cannot_hold_are_refused(s2, make, message):
    """Single examples, strings, ragged and sparse tensors, each with what to call on the dataset."""
    with pytest.raises(ValueError, match=message):
        next(iter(s2.distribute_dataset(make())))


@pytest.mark.parametrize("name", ["AUTO", "OFF", "FILE", "DATA", "HINT"])
def test_the_option_of_the_dataset_is_reported(name):
    """AUTO is the default, so it counts as not set."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[name]
    source = find_source(numbers().with_options(options))
    assert source.auto_shard_policy == (None if name == "AUTO" else name)


# Resuming


def double(x: Any) -> Any:
    return 2 * x


def noise(x: Any) -> Any:
    return x + tf.random.uniform([], maxval=9, dtype=tf.int32)


def in_python(x: Any) -> Any:
    return tf.py_function(double, [x], tf.int32)


def changed(**more: Any) -> Any:
    options = tf.data.Options()
    for name, value in more.items():
        setattr(options, name, value)
    return numbers().with_options(options)


THE_SAME_IN_EACH_PASS = {
    "in order": lambda: numbers(22),
    "of unknown length": lambda: numbers(22).filter(lambda batch: batch[0] != 4),
    "of parallel calls": lambda: numbers(22).map(double, num_parallel_calls=2).prefetch(1),
    "shuffled once": lambda: (
        tf.data.Dataset.range(22, output_type=tf.int32)
        .shuffle(22, seed=1, reshuffle_each_iteration=False)
        .repeat(2)
        .batch(4)
    ),
}


@pytest.mark.parametrize("name", THE_SAME_IN_EACH_PASS)
def test_another_dataset_continues_at_the_next_batch(s2, name):
    """As a restarted program creates it: from any batch of the second epoch to its end."""
    first = s2.distribute_dataset(THE_SAME_IN_EACH_PASS[name]())
    expected = epoch_of(first)
    iterator = iter(first)
    for position in range(len(expected)):
        resumed = iter(s2.distribute_dataset(THE_SAME_IN_EACH_PASS[name]()))
        resumed.restore(iterator.state())
        assert_same(epoch_of(resumed), expected[position:])
        next(iterator)


VARIABLE = tf.Variable(1)
NOT_THE_SAME = {
    "reshuffled": lambda: numbers().shuffle(3, seed=1),
    "without a seed": lambda: numbers().shuffle(3, reshuffle_each_iteration=False),
    "shuffled inside": lambda: numbers().flat_map(
        lambda x: tf.data.Dataset.from_tensors(x).shuffle(3, reshuffle_each_iteration=False)
    ),
    "random numbers": lambda: numbers().map(noise),
    "random choices": lambda: tf.data.Dataset.sample_from_datasets([numbers(), numbers()]),
    "Python": lambda: numbers().map(in_python),
    "a variable": lambda: numbers().map(lambda x: x + VARIABLE),
    "the time": lambda: numbers().map(lambda x: x + tf.cast(tf.timestamp(), tf.int32)),
    "generator": lambda: tf.data.Dataset.from_generator(
        lambda: iter([N]), output_signature=tf.TensorSpec([None], tf.int32)
    ),
    "as it comes": lambda: numbers().map(double, num_parallel_calls=2, deterministic=False),
    "as it comes, by option": lambda: changed(deterministic=False),
}


@pytest.mark.parametrize("name", NOT_THE_SAME)
def test_datasets_whose_passes_may_differ_are_not_resumed(s2, name):
    """state and restore say what is missing, and the pass itself continues."""
    tf.random.set_seed(None)
    iterator = iter(s2.distribute_dataset(NOT_THE_SAME[name]()))
    for call in (iterator.state, lambda: iterator.restore({})):
        with pytest.raises(dj.ArgumentError, match="reshuffle_each_iteration=False"):
            call()
    assert epoch_of(iterator)


# Files


@pytest.fixture
def three(tmp_path: Path) -> list[str]:
    """Acceptance 99: three files of four records, 0-3, 10-13 and 20-23."""
    paths = [str(tmp_path / f"{i}.txt") for i in range(3)]
    for i, path in enumerate(paths):
        Path(path).write_text("".join(f"{10 * i + j:02d}\n" for j in range(4)))
    return paths


def parse(line: Any) -> Any:
    return tf.strings.to_number(line, tf.int32)


OFFSET = tf.Variable(0)
PIPELINES = {
    "text": lambda paths: tf.data.TextLineDataset(paths).map(parse),
    "fixed length": lambda paths: tf.data.FixedLengthRecordDataset(paths, 3).map(
        lambda record: parse(tf.strings.substr(record, 0, 2))
    ),
    "interleave": lambda paths: tf.data.Dataset.from_tensor_slices(paths).interleave(
        lambda path: tf.data.TextLineDataset(path).map(parse), cycle_length=1
    ),
    "list_files": lambda paths: (
        tf.data.Dataset.list_files(str(Path(paths[0]).parent / "*.txt"), shuffle=False)
        .flat_map(tf.data.TextLineDataset)
        .map(lambda line: parse(line) + OFFSET)
    ),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_file_readers_are_found_and_sharded_by_file(three, name):
    """Acceptance 99: of two workers the first reads files 1 and 3, the second file 2."""
    source = find_source(PIPELINES[name](three).batch(4).prefetch(1))
    assert source.num_files == 3
    first, second = (source.shard_files(2, worker) for worker in range(2))
    assert rows(first.open()) == [[0, 1, 2, 3], [20, 21, 22, 23]]
    assert rows(second.open()) == [[10, 11, 12, 13]]
    assert rows(second.open()) == [[10, 11, 12, 13]]


def test_records_are_sharded_too(tmp_path):
    """TFRecordDataset, the most common reader; the number of files after a shard by the user."""
    paths = [str(tmp_path / f"{i}.tfrecord") for i in range(3)]
    for i, path in enumerate(paths):
        with tf.io.TFRecordWriter(path) as writer:
            writer.write(str(i).encode())
    names = tf.data.Dataset.from_tensor_slices(paths).filter(lambda path: True)
    source = find_source(tf.data.TFRecordDataset(names).map(parse).batch(4))
    assert source.num_files == 3
    assert rows(source.shard_files(3, 1).open()) == [[1]]
    mine = find_source(tf.data.TFRecordDataset(names.shard(2, 0)).map(parse).batch(4))
    assert mine.num_files == 2


def test_data_in_memory_reads_no_files():
    """Without a reader there are no files; the graph of a generator does not show what it reads."""
    generated = tf.data.Dataset.from_generator(
        lambda: iter([1]), output_signature=tf.TensorSpec([], tf.int32)
    )
    for dataset in (numbers(), generated.batch(2)):
        assert find_source(dataset).num_files is None
