"""``check_strategy`` with parameter servers, and with a strategy whose every step is a closure."""

from __future__ import annotations

from typing import Any

import pytest

import distribute_jax as dj
from distribute_jax.coordinator import ClusterCoordinator

DIFFERENT = {
    "context_refusals": "a scheduled function may combine what run returned",
    "mixed_strategies_refused": "the coordinator's strategy is that of the closure",
    "results": "results are fetched as NumPy arrays",
    "all_reduce_is_proved": "results are fetched as NumPy arrays",
    "variables_on_write": "the check reads a new value in the step, which a worker does not have",
    "variables_on_read": "workers have no values that last",
    "donation": "servers keep the state",
}
"""Checks of what closures do otherwise."""


class Scheduled(dj.ParameterServerStrategy):
    """Runs each step as a closure."""

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Schedules the step and fetches its results."""
        coordinator = ClusterCoordinator(self)
        results = coordinator.schedule(fn, args=args, kwargs=kwargs)
        coordinator.join(60)
        return coordinator.fetch(results)


@pytest.mark.exhaustive
def test_parameter_servers_do_what_every_strategy_does() -> None:
    """``run`` passes all checks, and as a closure all but those of what is documented to differ."""
    checks = dj.testing.check_strategy(
        lambda devices: dj.ParameterServerStrategy(workers=2, servers=2, max_staleness=0), [1]
    ).checks
    only = [name for name in checks if name not in DIFFERENT]
    assert len(only) + len(DIFFERENT) == len(checks)
    dj.testing.check_strategy(
        lambda devices: Scheduled(workers=2, servers=2, max_staleness=0), [1], only=only
    )
