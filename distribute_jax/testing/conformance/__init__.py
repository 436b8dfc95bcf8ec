"""The table of checks that every strategy passes: one function each, in files by theme.

A check takes a ``Subject`` and yields ``Fact``s; it compares nothing itself, so that all that is
wrong is reported. ``_core`` knows no check, and no check knows another.
"""

from distribute_jax.testing.conformance import _collectives, _training, _values, _variables
from distribute_jax.testing.conformance._core import Check, Fact, Subject, error_line

CHECKS: dict[str, Check] = {
    check.__name__: check
    for checks in (
        _values.CONTEXT_CHECKS,
        _values.CHECKS,
        _collectives.CHECKS,
        _variables.CHECKS,
        _training.CHECKS,
        _variables.STATE_CHECKS,
    )
    for check in checks
}
"""Each check by its name, in the order in which they run."""

__all__ = ["CHECKS", "Check", "Fact", "Subject", "error_line"]
