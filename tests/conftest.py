"""Eight simulated CPU devices for every test, made before JAX starts."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "16")
# Tests count traces and compilations, and train in wrong ways on purpose. Those of verify ask for it.
os.environ.setdefault("DISTRIBUTE_JAX_VERIFY", "off")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()
# Most of the suite's time was LLVM's; the programs of tests are too small to optimise or to compile in parts.
# `TESTS_AS_USERS=1` leaves XLA as users have it.
if not os.environ.get("TESTS_AS_USERS"):
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] += " --xla_llvm_disable_expensive_passes=true"
    os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"
    if version("jaxlib").startswith("0.10."):  # Later ones have no others.
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

import pytest

import distribute_jax as dj
from distribute_jax import _frames

TESTS = Path(__file__).parent

pytest_plugins = ["distribute_jax.testing.pytest_plugin"]


ONE_REPLICA = "program/test_run"
"""Where one replica is looked at by default too; elsewhere it is exhaustive, as are 2 and 8."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds what CI runs on the oldest Python."""
    text = "of a test with parameters, run only the first case"
    parser.addoption("--first-case", action="store_true", help=text)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """Marks other numbers of replicas as exhaustive, before tests are deselected."""
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        where = item.path.relative_to(TESTS).as_posix()
        replicas = parameters.get("strategy")
        if replicas in (2, 8) or (replicas == 1 and not where.startswith(ONE_REPLICA)):
            item.add_marker(pytest.mark.exhaustive)
    yield
    if config.getoption("--first-case"):
        first: dict[str, pytest.Item] = {}
        for item in items:
            first.setdefault(item.nodeid.partition("[")[0], item)
        items[:] = first.values()


def pytest_collection_finish() -> None:
    """Excludes what was imported from garbage collection, which took a twentieth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.fixture
def default_sigterm() -> Iterator[None]:
    """The default handler of SIGTERM, whatever another test has installed."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(params=[1, 2, 4, 8])
def strategy(request: pytest.FixtureRequest) -> dj.Strategy:
    """A mirrored strategy of 4 replicas; in exhaustive tests, and partly in others, of 1, 2 and 8 too."""
    return dj.MirroredStrategy(list(range(request.param)))


@pytest.fixture
def s2() -> dj.MirroredStrategy:
    """A mirrored strategy of two replicas."""
    return dj.MirroredStrategy([0, 1])


@pytest.fixture
def s4() -> dj.MirroredStrategy:
    """A mirrored strategy of four replicas."""
    return dj.MirroredStrategy([0, 1, 2, 3])


@pytest.fixture(autouse=True)
def _no_strategy_left_behind() -> None:
    """Fails a test that leaves a strategy current."""
    yield
    left_open = _frames.depth()
    _frames.leave_to(0)
    assert not left_open, "a scope was left open"
