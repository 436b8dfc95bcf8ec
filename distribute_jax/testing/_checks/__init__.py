"""The table of checks that every strategy passes: one function each, in files by theme.

A check takes a ``Subject`` and yields ``Fact``s; it compares nothing itself, so that all that is
wrong is reported. ``_facts`` and ``_subject`` know no check, and no check knows another.
"""

from distribute_jax.testing._checks import (
    _collectives,
    _context,
    _state,
    _training,
    _values,
    _variables,
)
from distribute_jax.testing._checks._facts import Fact as Fact, error_line as error_line
from distribute_jax.testing._checks._subject import Check as Check, Subject as Subject

CHECKS: dict[str, Check] = {
    check.__name__: check
    for theme in (_context, _values, _collectives, _variables, _training, _state)
    for check in theme.CHECKS
}
"""Each check by its name, in the order in which they run."""

__all__ = ["CHECKS", "Check", "Fact", "Subject", "error_line"]
