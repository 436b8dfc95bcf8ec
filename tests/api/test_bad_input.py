"""Wrong arguments of public functions are refused: none hangs, or fails inside JAX, NumPy, Flax or Python."""

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
    """The objects that cases share, and a folder for files."""
    folder: Path = tmp_path_factory.mktemp("bad")
    with contextlib.chdir(folder):
        yield World(folder)


def faults(world: World, count: int) -> list[str]:
    """Runs this many cases, and returns what is wrong with their errors."""
    return [text for case in bad_input.cases(count) if (text := bad_input.fault(world, case))]


def test_wrong_arguments_are_refused_by_name(world: World) -> None:
    """100 cases, each of another parameter."""
    found = faults(world, 100)
    assert not found, "\n".join(found)


@pytest.mark.exhaustive
def test_every_parameter_is_given_several_wrong_values(world: World) -> None:
    """3,200 cases: every parameter of the public API, at least four times."""
    found = faults(world, 3200)
    assert not found, f"{len(found)} of 3200:\n" + "\n".join(found)


def test_every_class_has_a_receiver(world: World) -> None:
    for target in bad_input.targets():
        if target.owner is not None:
            with contextlib.suppress(dj.ClusterError):  # of resolvers, without their cluster
                assert isinstance(bad_input.receiver(world, target), object)


def test_faults_are_found_without_the_checks_of_types(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_checks, "_has_type", lambda value, types: True)
    found = (bad_input.fault(world, case) for case in bad_input.cases(80))
    assert any("TypeError" in text for text in found if text)
