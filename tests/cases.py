"""Cases of a test beside the one that the default suite runs."""

from __future__ import annotations

from typing import Any

import pytest


def long(*values: Any, id: str | None = None) -> Any:
    """Returns a case of ``parametrize`` that only the exhaustive suite runs."""
    return pytest.param(*values, marks=pytest.mark.exhaustive, id=id)
