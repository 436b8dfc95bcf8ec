"""Whatever the sizes: every example exactly once, in order, and bad input never passes."""

import warnings
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from input_helpers import distribute, real_parts

from distribute_jax._errors import ArgumentError
from distribute_jax._padding import is_real

SIZES = st.integers(0, 9)
REPLICAS = st.sampled_from([1, 2, 3, 4, 8])
fast = settings(max_examples=60, deadline=None)


def examples(sizes: list[int]) -> list[dict[str, np.ndarray]]:
    """Batches of the given sizes whose examples are numbered through, and their squares."""
    ends = np.cumsum(sizes)
    rows = [np.arange(end - n, end, dtype=np.int32) for n, end in zip(sizes, ends, strict=True)]
    return [{"x": row, "y": np.stack([row, row**2], axis=1).astype(np.float32)} for row in rows]


def elements(source: Any, replicas: int, partial: str) -> list[dict]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return list(distribute(source, replicas, partial))


def found(elements: list[dict], name: str) -> np.ndarray:
    parts = [part for element in elements for part in real_parts(element[name])]
    return np.concatenate(parts) if parts else np.zeros(0)


@fast
@given(n=st.integers(0, 40), size=st.integers(1, 9), replicas=REPLICAS, shrink=st.booleans())
def test_an_epoch_has_each_example_once_and_in_order(
    n: int, size: int, replicas: int, shrink: bool
):
    """mask and shrink lose, repeat and reorder nothing; x and y stay together."""
    sizes = [min(size, n - i) for i in range(0, n, size)]
    epoch = elements(examples(sizes), replicas, "shrink" if shrink else "mask")
    assert found(epoch, "x").tolist() == list(range(n))
    assert found(epoch, "y").tolist() == [[i, i * i] for i in range(n)]


@fast
@given(sizes=st.lists(SIZES, max_size=6), replicas=REPLICAS)
def test_masked_sums_are_the_plain_sums(sizes: list[int], replicas: int):
    """The sum over the rows that the counts call real is the sum over the batches."""
    total = 0
    for element in elements(examples(sizes), replicas, "mask"):
        value = element["x"]
        share = value.part_shape[0]
        real = is_real(value.counts or [share] * replicas, share)
        total += (np.asarray(value.global_array) * real).sum()
    assert total == sum(range(sum(sizes)))


@fast
@given(sizes=st.lists(SIZES, max_size=6), replicas=REPLICAS)
def test_padding_is_made_of_real_examples_of_the_same_batch(sizes: list[int], replicas: int):
    """Padded rows hold an example of their own batch, the same one in every leaf."""
    batches = [batch for batch in examples(sizes) if len(batch["x"])]
    for batch, element in zip(batches, elements(batches, replicas, "mask"), strict=True):
        x, y = (np.asarray(element[name].global_array) for name in "xy")
        assert set(x.tolist()) == set(batch["x"].tolist())
        np.testing.assert_array_equal(y, np.stack([x, x**2], axis=1))
        assert element["x"].counts == element["y"].counts


@fast
@given(sizes=st.lists(SIZES, min_size=1, max_size=6), replicas=REPLICAS)
def test_drop_and_error_agree_on_what_is_whole(sizes: list[int], replicas: int):
    """drop keeps the whole batches, unpadded and in order; error raises if there is another."""
    numbered = examples(sizes)
    first = next((n for n in sizes if n), 0)
    whole = [n > 0 and n >= first and n % replicas == 0 for n in sizes]
    if first % replicas:
        with pytest.raises(ArgumentError, match="no batch would be left"):
            elements(numbered, replicas, "drop")
    else:
        epoch = elements(numbered, replicas, "drop")
        kept = [b["x"] for b, keep in zip(numbered, whole, strict=True) if keep]
        assert [e["x"].counts for e in epoch] == [None] * len(kept)
        assert found(epoch, "x").tolist() == np.concatenate([[], *kept]).tolist()
    if all(whole):
        assert len(elements(numbered, replicas, "error")) == len(sizes)
    else:
        with pytest.raises(ArgumentError, match="partial='error'"):
            elements(numbered, replicas, "error")


GOOD = {"x": np.ones((4, 2), np.float32), "y": np.zeros(4, np.int32)}
BAD_LEAVES = st.sampled_from(
    [
        np.ones(3, np.float32),
        np.array(1.0),
        np.array(["a", "b", "c", "d"]),
        np.array([None] * 4),
        np.array([[1], [2, 3], 4, 5], object),
        np.full(4, 2**40),
        7,
        "text",
        object(),
        [1, 2, 3, 4],
        jax.numpy.ones(()),
    ]
)


@fast
@given(leaf=BAD_LEAVES, name=st.sampled_from("xy"), position=st.integers(0, 2), nest=st.booleans())
def test_a_bad_leaf_is_named_and_the_next_epoch_works(
    leaf: Any, name: str, position: int, nest: bool
):
    """Every bad leaf, anywhere, is an ArgumentError with its path; good batches came before."""
    bad = {**GOOD, name: {"inner": leaf} if nest else leaf}
    source = [GOOD] * 3
    dataset = distribute(lambda: source, 2)
    source[position] = bad
    seen = []
    with pytest.raises(ArgumentError, match=f"Batch {position} of") as error:
        seen.extend(element for element in dataset)  # extend keeps what came before the error
    assert len(seen) == position
    assert f"['{name}']" in str(error.value)
    source[position] = GOOD
    assert len(list(dataset)) == 3
