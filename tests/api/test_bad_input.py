"""No wrong argument of any public function hangs, crashes, or fails inside JAX, NumPy, Flax or Python."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import bad_input
import pytest
from bad_input import World

import distribute_jax as dj
from distribute_jax import _checks


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Everything that cases share, with a folder for the files that some of them write."""
    folder: Path = tmp_path_factory.mktemp("bad")
    with contextlib.chdir(folder):
        yield World(folder)


def faults(world: World, count: int) -> list[str]:
    """Returns what is wrong with the answers to so many cases."""
    return [text for case in bad_input.cases(count) if (text := bad_input.fault(world, case))]


def test_wrong_arguments_are_refused_by_name(world: World) -> None:
    """200 of the cases, each of another parameter."""
    found = faults(world, 200)
    assert not found, "\n".join(found)


@pytest.mark.exhaustive
def test_every_parameter_is_given_several_wrong_values(world: World) -> None:
    """3,200 cases: every parameter of all that is public, four times and more."""
    found = faults(world, 3200)
    assert not found, f"{len(found)} of 3200:\n" + "\n".join(found)


def test_every_class_has_an_object_whose_methods_are_called(world: World) -> None:
    """Of a new class too, made from the types of its arguments, or named in the generator."""
    for target in bad_input.targets():
        if target.owner is not None:
            with contextlib.suppress(dj.ClusterError):  # of resolvers, without their cluster
                assert isinstance(bad_input.receiver(world, target), object)


def test_a_check_that_is_removed_is_found(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the one place that compares arguments with their annotations, errors are Python's."""
    monkeypatch.setattr(_checks, "_is_one", lambda value, types: True)
    found = faults(world, 80)
    assert any("TypeError" in line for line in found)
