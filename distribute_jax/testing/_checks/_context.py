"""Which strategy and which replica is current, where, as in TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from distribute_jax._errors import MixedStrategiesError
from distribute_jax.strategies import (
    OneDeviceStrategy,
    get_replica_context,
    get_strategy,
    in_cross_replica_context,
)
from distribute_jax.testing._checks._facts import Fact, refuses
from distribute_jax.testing._checks._subject import Subject, number, replica


def _current() -> tuple[Any, bool, bool]:
    """Gives the strategy, in_cross_replica_context, and whether there is a replica context."""
    return get_strategy(), in_cross_replica_context(), get_replica_context() is not None


def _enter(strategy: Any) -> None:
    with strategy.scope():
        pass


def context_of_scope(s: Subject) -> Iterator[Fact]:
    """In ``scope`` the strategy is current, also nested and again, and afterwards it is not."""
    before = _current()
    scope = s.strategy.scope()
    for _ in range(2):
        with scope as given, s.strategy.scope():
            yield Fact("scope() yields the strategy", given is s.strategy, True)
            yield Fact("what is current in scope()", _current(), (s.strategy, True, False))
        yield Fact("what is current after scope()", _current(), before)


def context_of_run(s: Subject) -> Iterator[Fact]:
    """In ``run`` there is a replica context, and in ``merge_call`` there is none."""
    found: dict[str, Any] = {}

    def merged(strategy: Any) -> None:
        found["merge_call"] = (_current(), strategy is get_strategy())

    def step() -> None:
        found["run"] = _current()
        found["count"] = replica().num_replicas_in_sync
        found["strategy"] = replica().strategy
        replica().merge_call(merged)

    s.run(step)
    yield Fact("what is current in run", found["run"], (s.strategy, False, True))
    yield Fact("num_replicas_in_sync in run", found["count"], s.n)
    yield Fact("the strategy of the replica context", found["strategy"], s.strategy)
    yield Fact(
        "what is current in merge_call", found["merge_call"], ((s.strategy, True, False), True)
    )


def context_refusals(s: Subject) -> Iterator[Fact]:
    """Methods of the strategy are refused inside ``run`` and under the user's own jit."""
    strategy = s.strategy
    calls = {
        "run": lambda: strategy.run(lambda: 1),
        "scope": lambda: _enter(strategy),
        "reduce": lambda: strategy.reduce("sum", jnp.ones(())),
        "gather": lambda: strategy.gather(jnp.ones(1), axis=0),
        "distribute_dataset": lambda: strategy.distribute_dataset([]),
    }
    for name, call in calls.items():
        yield refuses(f"{name} inside run", lambda call=call: s.run(call), RuntimeError)  # type: ignore[misc]
    yield refuses("run under jax.jit", jax.jit(lambda: s.run(number)), RuntimeError)


def mixed_strategies_refused(s: Subject) -> Iterator[Fact]:
    """Another strategy cannot be used inside this one's scope, nor this one inside another's."""
    other = OneDeviceStrategy(s.devices[0])
    for outer, inner in ((s.strategy, other), (other, s.strategy)):
        names = f"of {type(inner).__name__} in the scope of {type(outer).__name__}"
        with outer.scope():
            for name, call in (
                ("run", lambda inner=inner: inner.run(number)),
                ("scope", lambda inner=inner: _enter(inner)),
                ("reduce", lambda inner=inner: inner.reduce("mean", 1.0)),
            ):
                yield refuses(f"{name} {names}", call, MixedStrategiesError)


CHECKS = (context_of_scope, context_of_run, context_refusals, mixed_strategies_refused)
