"""Which part of the data a process reads: the choice of the policy, and its files."""

import warnings
from collections.abc import Iterator

import numpy as np
import pytest

from distribute_jax._errors import ArgumentError
from distribute_jax.data import AutoShardPolicy
from distribute_jax.data._split import choose_policy
from distribute_jax.data.sources import Source

OFF, AUTO, FILE, DATA = (AutoShardPolicy[name] for name in ("OFF", "AUTO", "FILE", "DATA"))


class Files(Source):
    """Batches of records read from files, as tf.data and from_files read them."""

    text = "a source of files"
    num_files: int | None = None
    auto_shard_policy: str | None = None

    def __init__(
        self, files: list[list[int]], size: int, auto_shard_policy: str | None = None
    ) -> None:
        self._files = files
        self._size = size
        self.num_files = len(files)
        self.auto_shard_policy = auto_shard_policy

    def open(self) -> Iterator[np.ndarray]:
        records = [record for file in self._files for record in file]
        for i in range(0, len(records), self._size):
            yield np.array(records[i : i + self._size])

    preview = open

    def shard_files(self, count: int, index: int) -> Source:
        return Files(self._files[index::count], self._size)


class Stream(Files):
    """A source that reads no files."""

    text = "a stream"

    def __init__(self) -> None:
        super().__init__([[0, 1, 2, 3]], 2)
        self.num_files = None


THREE = Files([[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]], 4)


@pytest.mark.parametrize(
    ("asked", "source", "workers", "expected"),
    [
        (None, THREE, 2, FILE),
        (AUTO, THREE, 2, FILE),
        (AUTO, THREE, 3, FILE),
        (AUTO, THREE, 1, DATA),  # nothing to shard: TensorFlow's rule A
        (FILE, THREE, 3, FILE),
        (FILE, Stream(), 1, FILE),  # nothing to shard, so no file is missed
        (DATA, THREE, 2, DATA),
        (OFF, THREE, 2, OFF),
        (OFF, Stream(), 1, OFF),
        (AUTO, Stream(), 2, DATA),
        (None, Files([[0]] * 3, 1, "off"), 2, OFF),
        (None, Files([[0]] * 3, 1, "DATA"), 2, DATA),
        (FILE, Files([[0]] * 3, 1, "off"), 2, FILE),  # the user's option comes first
    ],
)
def test_the_policy_that_holds(
    asked: AutoShardPolicy | None, source: Source, workers: int, expected: AutoShardPolicy
):
    """The user's option, then the source's own, then AUTO, which is FILE where files suffice."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_policy(asked, source, workers) is expected


def test_auto_with_too_few_files_falls_back_to_data_with_a_warning():
    """Acceptance 100: TensorFlow raises here; the warning has both figures and the remedy."""
    one = Files([[0, 1]], 2)
    with pytest.warns(UserWarning, match=r"reads 1 files for 2 processes.*auto_shard_policy"):
        assert choose_policy(AUTO, one, 2) is DATA


@pytest.mark.parametrize("source", [Files([[0, 1]], 2), Stream()], ids=["one file", "no file"])
def test_file_without_a_file_for_each_worker_is_an_error(source: Source):
    """Acceptance 100: FILE is obeyed or refused, and the message names the source and DATA."""
    with pytest.raises(ArgumentError, match=rf"{source.text}.*auto_shard_policy=\"data\""):
        choose_policy(FILE, source, 2)


@pytest.mark.parametrize("own", ["hint", "HINT"])
def test_a_hint_of_a_source_is_refused_by_name(own: str):
    """A tf.data option says HINT: nothing here could fill it."""
    with pytest.raises(ArgumentError, match=r"a source of files has the option .*HINT"):
        choose_policy(None, Files([[0]], 1, own), 1)
    assert choose_policy(OFF, Files([[0]], 1, own), 1) is OFF
