"""Eight simulated CPU devices for every test, made before JAX starts."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "16")
# Tests count traces and compilations, and train in wrong ways on purpose. Those of verify ask for it.
os.environ.setdefault("DISTRIBUTE_JAX_VERIFY", "off")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()
if version("jaxlib").startswith("0.10."):
    # Most of the suite's time is LLVM's. This XLA can be told to take half as much and optimise less; a
    # later one cannot, so that on another Python the suite runs with everything as users have it.
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] += " --xla_llvm_disable_expensive_passes=true"
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
    # A program in one piece instead of one for each core: the programs of tests are too small to share out.
    os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"

import pytest

import distribute_jax as dj
from distribute_jax import _context

TESTS = Path(__file__).parent

pytest_plugins = ["distribute_jax.testing.pytest_plugin"]


EIGHT_AND_TWO = (
    "program/test_equivalence",
    "program/test_partial",
    "program/test_random",
    "strategies",
    "training/test_fit_numbers",
    "training/test_optimizer",
    "variables/test_on_read",
    "variables/test_on_write",
)
"""Where 2 and 8 replicas are part of CI; elsewhere they are exhaustive."""

ONCE = (
    *(
        "api",
        "benchmarks",
        "cli",
        "cluster_resolver",
        "data",
        "docs",
        "examples",
        "guards",
        "launch",
        "losses",
    ),
    *("summary", "test_dev", "test_messages", "training/callbacks"),
)
"""What tells nothing new on another version of JAX."""

NOT_ONCE = ("benchmarks/test_compiled_program",)
"""What does all the same: what XLA makes of a step is that version's own."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks by folder, before any are left out."""
    for item in items:
        where = item.path.relative_to(TESTS).as_posix()
        if item.get_closest_marker("wide") and not where.startswith(EIGHT_AND_TWO):
            item.add_marker(pytest.mark.exhaustive)
        if where.startswith(ONCE) and not where.startswith(NOT_ONCE):
            item.add_marker(pytest.mark.once)


@pytest.fixture(
    params=[
        1,
        pytest.param(2, marks=pytest.mark.exhaustive),
        4,
        pytest.param(8, marks=pytest.mark.wide),
    ]
)
def strategy(request: pytest.FixtureRequest) -> dj.Strategy:
    """A mirrored strategy of 1 and 4 replicas; 8 under the mark ``wide``, 2 under ``exhaustive``."""
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
    """Fails a test that leaves a strategy current for the next one."""
    yield
    assert _context.entered() is None, "a scope was left open"
