"""``strategy_combinations``: one pytest item per combination, one report of all elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path
from typing import Any

import jax
import pytest

import distribute_jax as dj

ROOT = Path(__file__).parents[2]
LIBRARY = ["one_device-1"] + [
    f"{n}-{i}" for n in ("mirrored", "central_storage") for i in (1, 2, 4)
]


def named_factory(devices: list[jax.Device]) -> dj.Strategy:
    return dj.MirroredStrategy(devices)


def strategies_tried(**options: Any) -> list[tuple[str, int]]:
    """Calls a decorated function by hand; returns the strategies that it got."""
    seen = []

    @dj.testing.strategy_combinations(**options)
    def test(strategy: dj.Strategy) -> None:
        seen.append((type(strategy).__name__, strategy.num_replicas_in_sync))

    test()
    return seen


@dj.testing.strategy_combinations(replicas=[1, 4])
def test_a_decorated_test_is_collected_by_pytest(strategy: dj.Strategy):
    total = strategy.run(lambda: dj.get_replica_context().all_reduce("sum", 1.0))
    assert float(total) == strategy.num_replicas_in_sync


def test_called_by_hand_it_runs_under_all_strategies():
    several = ("MirroredStrategy", "CentralStorageStrategy")
    counts = (1, 2, 4, 8)
    assert strategies_tried() == [
        ("OneDeviceStrategy", 1),
        *((s, n) for s in several for n in counts),
    ]


def test_strategies_and_numbers_of_replicas_can_be_chosen():
    assert strategies_tried(replicas=[2]) == [
        ("MirroredStrategy", 2),
        ("CentralStorageStrategy", 2),
    ]
    chosen = [dj.OneDeviceStrategy, named_factory]
    assert strategies_tried(strategies=chosen, replicas=[1, 4]) == [
        ("OneDeviceStrategy", 1),
        *(("MirroredStrategy", 1), ("MirroredStrategy", 4)),
    ]


def test_only_as_many_replicas_as_there_are_devices_are_tried(monkeypatch: pytest.MonkeyPatch):
    devices = jax.local_devices()[:2]
    monkeypatch.setattr(jax, "local_devices", lambda **_: devices)
    assert {n for _, n in strategies_tried()} == {1, 2}
    with pytest.raises(ValueError, match=r"has 2 device\(s\). Call dj.simulate\(4\)"):
        strategies_tried(replicas=[4])


def test_a_strategy_that_is_passed_is_the_only_one():
    seen = []

    @dj.testing.strategy_combinations
    def test(x: int, strategy: dj.Strategy) -> None:
        seen.append((x, strategy))

    mine = dj.MirroredStrategy([3])
    test(1, mine)
    test(2, strategy=mine)
    assert seen == [(1, mine), (2, mine)]


def test_failures_under_several_combinations_are_reported_together():
    @dj.testing.strategy_combinations(replicas=[1, 2, 4])
    def test_few(strategy: dj.Strategy) -> None:
        assert strategy.num_replicas_in_sync < 3, "too many"
        if isinstance(strategy, dj.OneDeviceStrategy):
            raise TypeError("not alone")

    with pytest.raises(ExceptionGroup) as caught:
        test_few()
    wanted = (
        "test_few failed under 3 of 7 combinations: one_device-1, mirrored-4, central_storage-4"
    )
    assert wanted in str(caught.value)
    text = "".join(traceback.format_exception(caught.value))
    assert re.search(r"TypeError: not alone\n.*under one_device-1", text)
    assert len(re.findall(r"AssertionError: too many[^\x00]*?under \w+-4", text)) == 2
    assert text.count("in test_few\n") == 3


async def async_test(strategy: dj.Strategy) -> None:
    """A coroutine, none of whose code runs when it is called."""


WRONG = {
    "no argument": (lambda: dj.testing.strategy_combinations(lambda: None), "argument `strategy`"),
    "options by place": (
        lambda: dj.testing.strategy_combinations([dj.MirroredStrategy]),
        "test must be None or a function",
    ),
    "async": (
        lambda: dj.testing.strategy_combinations(async_test),
        "decorates async_test, which is not a plain",
    ),
    "made already": (
        lambda: strategies_tried(strategies=[dj.MirroredStrategy([0])]),
        "a list of factories",
    ),
    "one class": (lambda: strategies_tried(strategies=dj.MirroredStrategy), "a list of factories"),
    "lambda": (
        lambda: strategies_tried(strategies=[lambda d: named_factory(d)]),
        "for lambdas, a dict from names",
    ),
    "a name twice": (
        lambda: strategies_tried(strategies=[named_factory, named_factory]),
        "whose names differ",
    ),
    "three": (lambda: strategies_tried(replicas=[3]), "some of 1, 2, 4, 8"),
    "a number": (lambda: strategies_tried(replicas=4), "some of 1, 2, 4, 8"),
    "nothing left": (
        lambda: strategies_tried(strategies=[dj.OneDeviceStrategy], replicas=[2]),
        "replicas must include 1",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused(case: str):
    call, wanted = WRONG[case]
    with pytest.raises(dj.ArgumentError, match=wanted):
        call()


def test_a_factory_that_makes_something_else_fails_its_combination():
    with pytest.raises(ExceptionGroup) as caught:
        strategies_tried(strategies={"all": lambda _: dj.MirroredStrategy([0, 1])}, replicas=[1, 2])
    (error,) = caught.value.exceptions
    assert "failed under 1 of 2 combinations: all-1" in str(caught.value)
    assert "one replica on each of 1 device(s); got MirroredStrategy" in str(error)


CONFTEST = """
    import distribute_jax as dj

    dj.simulate(4)
    pytest_plugins = ["distribute_jax.testing.pytest_plugin"]
"""
DECORATED = """
    import pytest
    import distribute_jax as dj

    ring = {"ring": lambda devices: dj.MirroredStrategy(devices, dj.RingAllReduce())}

    @dj.testing.strategy_combinations
    def test_bare(strategy):
        assert strategy.num_replicas_in_sync < 4 or type(strategy) is dj.MirroredStrategy

    @pytest.mark.parametrize("x", [5, 6])
    @dj.testing.strategy_combinations(strategies=ring, replicas=[2])
    @pytest.mark.parametrize("y", [7])
    def test_mixed(x, strategy, y, tmp_path, seen):
        assert x in (5, 6) and y == 7 and tmp_path.exists()
        assert strategy.num_replicas_in_sync == seen == 2

    @pytest.fixture
    def seen():
        return 2

    class TestMethods:
        @dj.testing.strategy_combinations(replicas=[1])
        def test_method(self, strategy):
            assert isinstance(self, TestMethods) and isinstance(strategy, dj.Strategy)
"""
FIXTURE = """
    import distribute_jax as dj
    import pytest

    def test_plain(strategy):
        assert strategy.num_replicas_in_sync != 2
        assert isinstance(strategy, dj.Strategy)

    @pytest.fixture
    def doubled(strategy):
        return 2 * strategy.num_replicas_in_sync

    def test_through_another(doubled):
        assert doubled in (2, 4, 8)
"""
OWN = """
    import pytest

    @pytest.fixture
    def strategy():
        return "mine"

    def test_partitioners_of_the_user(strategy):
        assert strategy == "mine"

    def test_none():
        pass
"""


def outcomes_of(folder: Path, **files: str) -> dict[str, str]:
    """Runs pytest on some files; returns the outcome of each listed test."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    removed = {"XLA_FLAGS", "NPROC", "JAX_PLATFORMS", "PYTEST_ADDOPTS"}
    environment = {k: v for k, v in os.environ.items() if k not in removed}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-q", "-W", "error", "-p", "no:cacheprovider"],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found = re.findall(r"^(PASSED|FAILED|ERROR) \w+\.py::(\S+)", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    return {name: outcome for outcome, name in found}


@pytest.mark.exhaustive
def test_pytest_shows_one_test_for_each_combination(tmp_path: Path):
    """Of the decorator and of the fixture; a fixture of the user with the same name takes precedence."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    found = outcomes_of(tmp_path, conftest=CONFTEST, test_a=DECORATED, test_b=FIXTURE, test_c=OWN)
    wanted = {
        **{f"test_bare[{name}]": "PASSED" for name in LIBRARY},
        **{f"test_mixed[7-ring-2-{x}]": "PASSED" for x in (5, 6)},
        **{
            f"TestMethods::test_method[{name}-1]": "PASSED"
            for name in ("one_device", "mirrored", "central_storage")
        },
        **{f"test_plain[{name}]": "PASSED" for name in LIBRARY},
        **{f"test_through_another[{name}]": "PASSED" for name in LIBRARY},
        "test_partitioners_of_the_user": "PASSED",
        "test_none": "PASSED",
        "test_bare[central_storage-4]": "FAILED",
        "test_plain[mirrored-2]": "FAILED",
        "test_plain[central_storage-2]": "FAILED",
    }
    assert found == wanted
