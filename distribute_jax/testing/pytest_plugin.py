"""A pytest plugin with the fixtures ``strategy`` and ``local_cluster``.

Put ``pytest_plugins = ["distribute_jax.testing.pytest_plugin"]`` into the conftest.py at the root of
your tests. Each test that takes ``strategy`` then runs once for each strategy and number of replicas
for which there are devices, such as ``test_loss[mirrored-4]``. To choose among them, decorate a test with
``dj.testing.strategy_combinations``, which needs no plugin.

A test that takes ``local_cluster`` gets a ``dj.testing.LocalCluster`` of two processes with two devices each,
or, marked with ``@pytest.mark.local_cluster(4, 1, timeout=60)``, one with these arguments.
"""

from __future__ import annotations

import pytest

from distribute_jax.strategies import Strategy
from distribute_jax.testing._local_cluster import LocalCluster
from distribute_jax.testing._strategies import Combination, Combinations

_PARAMETER = "_strategy_combination"


@pytest.fixture
def _strategy_combination(request: pytest.FixtureRequest) -> Combination:
    """The strategy and the number of replicas of this test."""
    return request.param


@pytest.fixture
def strategy(_strategy_combination: Combination) -> Strategy:
    """A new strategy, of each kind and number of replicas in turn."""
    return _strategy_combination.create()


@pytest.fixture
def local_cluster(request: pytest.FixtureRequest) -> LocalCluster:
    """Real processes: two with two devices each, or as the marker of the same name says."""
    mark = request.node.get_closest_marker("local_cluster")
    return LocalCluster(2, 2) if mark is None else LocalCluster(*mark.args, **mark.kwargs)


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker."""
    config.addinivalue_line(
        "markers",
        "local_cluster(processes, devices_per_process, **options): arguments of the fixture's LocalCluster",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrizes tests that take ``strategy``.

    The devices are counted only here, after every conftest.py could choose them.
    """
    if _PARAMETER in metafunc.fixturenames:
        metafunc.parametrize(_PARAMETER, list(Combinations()), ids=str, indirect=True)
