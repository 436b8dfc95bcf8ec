"""The checks that every strategy passes: each public function of ``_values`` and ``_state`` is one.

A check takes a ``Subject`` and yields ``Fact``s; it raises nothing itself, so that everything wrong is
reported.
"""

import inspect

from distribute_jax.testing.conformance import _state, _values
from distribute_jax.testing.conformance._core import Check, Fact, Subject, error_line

CHECKS: dict[str, Check] = {
    name: check
    for module in (_values, _state)
    for name, check in vars(module).items()
    if inspect.isfunction(check) and check.__module__ == module.__name__ and name[0] != "_"
}
"""The checks by name, in the order in which they run."""

__all__ = ["CHECKS", "Check", "Fact", "Subject", "error_line"]
