"""Intervals, ratios of pairs, turns, and what counts as met; the workloads are what they are called."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks import scaling
from benchmarks._benchmark import Row
from benchmarks._harness import Ratio, calls_within, counted, in_turns, median_interval, ratio
from benchmarks._workloads import (
    CNN,
    DEEP,
    MLP,
    RESNET50,
    TRANSFORMER,
    Workload,
    forward_of,
    initial_weights,
)


@pytest.mark.parametrize(
    ("n", "rank"),
    # From tables of the sign test at 95%: the interval is the rank-th smallest and largest value.
    [(5, 1), (6, 1), (9, 2), (12, 3), (20, 6), (30, 10), (40, 14), (100, 40)],
)
def test_the_interval_of_a_median_has_the_ranks_of_the_sign_test(n: int, rank: int) -> None:
    assert median_interval(range(1, n + 1)) == (rank, n + 1 - rank)


def test_a_ratio_is_of_pairs() -> None:
    # The machine was twice as slow in the second round, for both.
    assert ratio([2.0, 4.0, 2.0], [1.0, 2.0, 1.0]) == Ratio(2.0, 2.0, 2.0, 3)


def test_each_column_takes_one_turn_in_each_round_in_changing_order() -> None:
    taken: list[str] = []
    columns = {name: lambda name=name: float(taken.append(name) or len(taken)) for name in "abc"}
    timings = in_turns(columns, 8)
    rounds = ["".join(taken[i : i + 3]) for i in range(0, 24, 3)]
    assert {"".join(sorted(r)) for r in rounds} == {"abc"}
    assert len(set(rounds)) > 1
    assert [sorted(turn) for turn in zip(*timings.values(), strict=True)] == [
        [3 * i + 1, 3 * i + 2, 3 * i + 3] for i in range(8)
    ]


@pytest.mark.parametrize(("seconds", "calls"), [(0.0, 2), (1e9, 7)])
def test_a_turn_has_as_many_steps_as_fit_between_two_bounds(seconds: float, calls: int) -> None:
    assert calls_within(seconds, lambda: None, most=7, least=2) == calls


@pytest.mark.parametrize(
    ("found", "target", "met"),
    [
        (Ratio(1.2, 1.04, 1.3, 30), 1.05, True),  # the lower end decides
        (Ratio(1.2, 1.06, 1.3, 30), 1.05, False),
        (Ratio(0.9, 0.8, 1.0, 29), 1.05, None),  # too few rounds
        (Ratio(1.0, 1.0, 1.0, 40), None, None),  # no target
        (counted(1.0), 1.0, True),
        (counted(1.1), 1.0, False),
    ],
)
def test_a_target_is_met_by_the_lower_end_of_enough_rounds(
    found: Ratio, target: float | None, met: bool | None
) -> None:
    row = Row("question", "column", found, target)
    assert row.met is met
    assert (
        row.cells[-1] == {True: "met", False: "not met", None: "only 29 rounds" * bool(target)}[met]
    )


def test_what_is_counted_has_no_interval() -> None:
    assert str(counted(1.0)) == "1.00"
    assert str(Ratio(1.0, 0.9, 1.1, 30)) == "1.00 [0.90, 1.10]"


def test_figures_of_scaling_follow_from_the_seconds() -> None:
    """A step of 2 s by hand of which 1.5 s stay without its all-reduce, and 2.2 s under run."""
    seconds = {scaling.RUN: [2.2] * 3, scaling.BY_HAND: [2.0] * 3, scaling.ALONE: [1.5] * 3}
    found = scaling.figures(seconds, 11)
    assert found["examples_per_s"] == pytest.approx(5.0)
    assert found["collective"] == pytest.approx(0.25)
    assert found["ratio"].median == pytest.approx(1.1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("work", [MLP, CNN, TRANSFORMER, DEEP], ids=lambda work: work.name)
def test_the_pure_function_with_the_exported_weights_is_the_model(work: Workload) -> None:
    """Names and order of the weights are right, or the logits would differ."""
    weights, (x, _) = initial_weights(work), work.data(2)
    assert all(type(value) is np.ndarray for value in weights.values())
    expected = work.model(nnx.Rngs(0))(x)
    np.testing.assert_allclose(forward_of(work)(weights, x), expected, rtol=1e-5, atol=1e-5)


def test_the_names_are_those_of_the_attributes() -> None:
    shapes = {name: value.shape for name, value in initial_weights(MLP).items()}
    assert shapes == {
        "layers.0.kernel": (784, 512),
        "layers.0.bias": (512,),
        "layers.1.kernel": (512, 10),
        "layers.1.bias": (10,),
    }


def test_the_data_is_the_same_each_time_and_a_batch_is_its_beginning_in_shape() -> None:
    (x, y), (again, _) = TRANSFORMER.first_batch(), TRANSFORMER.first_batch()
    np.testing.assert_array_equal(x, again)
    np.testing.assert_array_equal(x[:, 1:], y[:, :-1])  # the labels are the next characters
    assert x.shape == (16, 128)


@pytest.mark.exhaustive
def test_resnet_has_the_weights_of_resnet_50() -> None:
    """25,557,032 numbers in the published network, its norms included, and 161 arrays."""
    shapes = jax.eval_shape(lambda: nnx.state(RESNET50.model(nnx.Rngs(0)), nnx.Param))
    leaves = jax.tree.leaves(shapes)
    assert sum(leaf.size for leaf in leaves) == 25_557_032
    assert len(leaves) == 161
