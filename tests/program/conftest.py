"""Fixtures of tests of steps."""

from collections.abc import Callable
from typing import Any

import pytest

from distribute_jax.program import _cache, _program


@pytest.fixture
def trace_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Returns a function that calls another until its step is traced, checked and logged."""

    def trace(call: Callable[[], Any]) -> None:
        with pytest.raises(InterruptedError):
            call()

    def stop(*_: Any) -> None:
        raise InterruptedError

    monkeypatch.setitem(_program.COMPILERS, "shard_map", lambda step: None)
    monkeypatch.setattr(_cache, "check_same_program", stop)
    return trace
