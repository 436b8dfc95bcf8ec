"""No test here meets the prefetch thread of an earlier one."""

from __future__ import annotations

import pytest

from distribute_jax.data import _prefetch


@pytest.fixture(autouse=True)
def _no_earlier_threads() -> None:
    """Ends threads that a test left, as ``fit`` does when it fails amid an iterator: it can go on there."""
    _prefetch._end_threads()
