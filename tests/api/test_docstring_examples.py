"""The examples in public docstrings run as they stand."""

from __future__ import annotations

import doctest
import os
from collections.abc import Callable
from unittest import mock

import pytest
from public_names import Public, public_objects

import distribute_jax as dj

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
EXAMPLES = [p for p in public_objects(dj) if ">>>" in (getattr(p.value, "__doc__", None) or "")]


def failures(public: Public) -> str:
    """Runs the example of one object in an empty namespace, and returns doctest's report of failures."""
    test = doctest.DocTestParser().get_doctest(public.value.__doc__, {}, public.name, None, None)
    said: list[str] = []
    with mock.patch.dict(os.environ):
        doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=said.append)
    return "".join(said)


@pytest.mark.exhaustive
@pytest.mark.parametrize("public", EXAMPLES, ids=lambda public: public.name)
def test_the_example_in_the_docstring_runs(public: Public) -> None:
    said = failures(public)
    assert not said, said


def _right() -> None:
    """Adds.

    Example:
        >>> 1 + 1
        2
    """


def _wrong() -> None:
    """Adds.

    Example:
        >>> 1 + 1
        3
    """


def _needs_what_it_does_not_import() -> None:
    """Adds.

    Example:
        >>> dj.get_strategy()
    """


@pytest.mark.parametrize("function", [_wrong, _needs_what_it_does_not_import])
def test_an_example_that_does_not_run_is_reported(function: Callable[[], None]) -> None:
    assert "Failed example" in failures(Public("f", function, "here"))
    assert not failures(Public("f", _right, "here"))
