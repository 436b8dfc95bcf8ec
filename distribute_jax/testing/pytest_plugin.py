"""A pytest plugin: the fixture ``strategy`` runs a test under every strategy of the library.

Put ``pytest_plugins = ["distribute_jax.testing.pytest_plugin"]`` into the conftest.py at the root of
your tests. Each test that takes ``strategy`` is then shown once for each strategy and number of replicas
for which there are devices, as ``test_loss[mirrored-4]``. To choose among them, decorate a test with
``dj.testing.strategy_combinations``, which needs no plugin.
"""

from __future__ import annotations

import pytest

from distribute_jax.strategies import Strategy
from distribute_jax.testing._combinations import Combinations
from distribute_jax.testing._factories import Combination

_PARAMETER = "_strategy_combination"


@pytest.fixture
def _strategy_combination(request: pytest.FixtureRequest) -> Combination:
    """The strategy and the number of replicas of this test."""
    combination: Combination = request.param
    return combination


@pytest.fixture
def strategy(_strategy_combination: Combination) -> Strategy:
    """A new strategy, of each kind and number of replicas in turn."""
    return _strategy_combination.made()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs tests that take the fixture above once for each combination.

    The devices are counted only here, after every conftest.py could choose them.
    """
    if _PARAMETER in metafunc.fixturenames:
        metafunc.parametrize(_PARAMETER, list(Combinations()), ids=str, indirect=True)
