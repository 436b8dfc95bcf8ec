"""CommunicationOptions: TensorFlow's defaults, validation and merge."""

from __future__ import annotations

from typing import Any

import pytest

import distribute_jax as dj

Options = dj.experimental.CommunicationOptions
Implementation = dj.experimental.CommunicationImplementation


def test_the_defaults_and_the_order_of_arguments_are_those_of_tensorflow():
    assert Options() == Options(0, None, Implementation.AUTO)
    assert [i.value for i in Implementation] == ["AUTO", "RING", "NCCL"]
    assert dj.experimental.CollectiveCommunication is Implementation


@pytest.mark.parametrize("name", ["ring", "RING", "Ring", Implementation.RING])
def test_an_implementation_is_accepted_by_name_in_any_letter_case(name: Any):
    assert Options(implementation=name).implementation is Implementation.RING


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bytes_per_pack": -1}, r"bytes_per_pack\) must be an integer >= 0; got -1"),
        ({"timeout_seconds": -0.1}, r"timeout_seconds\) must be a number >= 0.*; got -0\.1"),
        ({"timeout_seconds": float("nan")}, r"timeout_seconds\) must be a number >= 0.*; got nan"),
        ({"timeout_seconds": "2"}, "timeout_seconds must be None or a number; got '2'"),
        ({"implementation": "gloo"}, r"implementation\).*'auto', 'ring', 'nccl'.*got 'gloo'"),
    ],
)
def test_values_out_of_range_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Options(**arguments)


def test_merge_overrides_by_values_that_are_not_the_default():
    base = Options(bytes_per_pack=8, timeout_seconds=5.0, implementation="ring")
    assert base.merge(None) == base
    assert base.merge(Options()) == base
    assert base.merge(Options(bytes_per_pack=2)) == Options(2, 5.0, "ring")
    assert base.merge(Options(timeout_seconds=0)) == Options(8, 0, "ring")
    assert base.merge(Options(implementation="nccl")) == Options(8, 5.0, "nccl")
    assert Options().merge(base) == base
    with pytest.raises(ValueError, match=r"merge: options must be .* got 3"):
        base.merge(3)
