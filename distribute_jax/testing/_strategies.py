"""``strategy_combinations``: runs a test under several strategies and numbers of replicas."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import jax

from distribute_jax._checks import converting, is_choice, refuse
from distribute_jax._errors import ArgumentError
from distribute_jax.strategies import (
    CentralStorageStrategy,
    MirroredStrategy,
    OneDeviceStrategy,
    Strategy,
)

StrategyFactory = Callable[[list[jax.Device]], Strategy]
"""Makes a strategy with one replica on each device."""

_DEFAULT_FACTORIES: tuple[Any, ...] = (OneDeviceStrategy, MirroredStrategy, CentralStorageStrategy)


@dataclass(frozen=True)
class Combination:
    name: str
    factory: Any
    replicas: int

    def __str__(self) -> str:
        """Returns the id of its test, such as ``"mirrored-4"``."""
        return f"{self.name}-{self.replicas}"

    def create(self) -> Strategy:
        devices = jax.local_devices()[: self.replicas]
        strategy: Strategy = self.factory(
            devices[0] if self.factory is OneDeviceStrategy else devices
        )
        count = strategy.num_replicas_in_sync if isinstance(strategy, Strategy) else 0
        if count != self.replicas:
            raise ArgumentError(
                f"the factory {self.name} must make a dj.Strategy with one replica on each of "
                f"{self.replicas} device(s); got {strategy!r:.80} with {count} replica(s)."
            )
        return strategy


def possible_counts(factory: Any) -> tuple[int, ...]:
    """Returns the numbers of replicas that a factory supports: OneDeviceStrategy only one."""
    return (1,) if factory is OneDeviceStrategy else REPLICA_COUNTS


_FACTORIES = (
    "a list of factories whose names differ, or, for lambdas, a dict from names to factories"
)


def named_factories(strategies: Any) -> dict[str, Any]:
    """Returns factories by name; those of a list have the names of their classes and functions."""
    with converting("strategies", strategies, _FACTORIES):
        is_dict = isinstance(strategies, Mapping)
        by_name = dict(strategies if is_dict else ((factory_name(f), f) for f in strategies))
        have_names = len(by_name) == len(strategies) > 0 and "<lambda>" not in by_name
    if not have_names or not all(map(callable, by_name.values())):
        refuse("strategies", _FACTORIES, strategies)
    return by_name


def factory_name(factory: Any) -> str:
    """Returns ``"central_storage"`` for ``CentralStorageStrategy``, and the name of a function."""
    name = str(getattr(factory, "__name__", type(factory).__name__))
    if not isinstance(factory, type):
        return name
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removesuffix("Strategy") or name).lower()


Test = Callable[..., Any]
_ARGUMENT = "strategy"


class Combinations(Collection[Combination]):
    """Strategies and their numbers of replicas; JAX starts when this is iterated over, not before."""

    def __init__(self, strategies: Any = None, replicas: Any = None) -> None:
        if replicas is not None:
            check_subset("replicas", replicas, REPLICA_COUNTS)
        chosen = _DEFAULT_FACTORIES if strategies is None else strategies
        self._factories, self._replicas = named_factories(chosen), replicas

    def __iter__(self) -> Iterator[Combination]:
        counts = replica_counts(self._replicas)
        combinations = [
            Combination(name, factory, count)
            for name, factory in self._factories.items()
            for count in counts
            if count in possible_counts(factory)
        ]
        if not combinations:
            raise ArgumentError(
                f"replicas must include 1 for OneDeviceStrategy alone; got {self._replicas}."
            )
        return iter(combinations)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, combination: object) -> bool:
        return combination in list(iter(self))


@overload
def strategy_combinations(test: Test, /) -> Test: ...


@overload
def strategy_combinations(
    *,
    strategies: Sequence[StrategyFactory] | Mapping[str, StrategyFactory] | None = None,
    replicas: Sequence[int] | None = None,
) -> Callable[[Test], Test]: ...


def strategy_combinations(
    test: Test | None = None, /, *, strategies: Any = None, replicas: Sequence[int] | None = None
) -> Any:
    """Runs a test under every strategy and number of replicas.

    It decorates a function with an argument ``strategy``. pytest shows one test for each combination,
    such as ``test_loss[mirrored-4]``. Called without ``strategy``, by another runner or by hand, the
    function runs under all combinations, and those that failed are reported together. Each run gets a new
    strategy.

    For a pytest fixture ``strategy`` instead, which runs each test that takes it under all
    combinations of the library, put ``pytest_plugins = ["distribute_jax.testing.pytest_plugin"]``
    into your conftest.py.

    Args:
        test: the function, if the decorator is used without arguments.
        strategies: a list of functions or classes that make a strategy from a list of ``jax.Device``, or
            a dict from names to such functions; None means ``OneDeviceStrategy``, ``MirroredStrategy``
            and ``CentralStorageStrategy``.
        replicas: the numbers of replicas; None means those of 1, 2, 4 and 8 for which there are
            devices. ``OneDeviceStrategy`` runs with 1 only.

    Returns:
        The test, or a decorator that makes it.

    Raises:
        ValueError: the function has no argument ``strategy``, or an argument is wrong; when the tests are
            collected or run: there are too few devices.
        ExceptionGroup: the function was called without ``strategy`` and failed under some
            combinations; it holds their errors, each with a note that names its combination.

    Example:
        >>> import distribute_jax as dj
        >>> @dj.testing.strategy_combinations(replicas=[1, 2])
        ... def test_sum_counts_the_replicas(strategy):
        ...     total = strategy.run(lambda: dj.get_replica_context().all_reduce("sum", 1.0))
        ...     assert float(total) == strategy.num_replicas_in_sync
        >>> test_sum_counts_the_replicas()  # as one_device-1, mirrored-1, …, central_storage-2
    """
    combinations = Combinations(strategies, replicas)
    if test is None:
        return functools.partial(_decorated, combinations=combinations)
    return _decorated(test, combinations)


def _decorated(test: Test, combinations: Combinations) -> Test:
    _check_takes_strategy(test)
    signature = inspect.signature(test)

    @functools.wraps(test)
    def under_combinations(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind_partial(*args, **kwargs).arguments
        if _ARGUMENT not in arguments:
            return _under_all(test, combinations, args, kwargs)
        if isinstance(arguments[_ARGUMENT], Combination):
            kwargs[_ARGUMENT] = arguments[_ARGUMENT].create()
        return test(*args, **kwargs)

    return _parametrized(under_combinations, combinations)


def _check_takes_strategy(test: Any) -> None:
    is_plain = inspect.isfunction(test) and not (
        # Calling these runs none of their code, so they would always pass.
        inspect.iscoroutinefunction(test) or inspect.isgeneratorfunction(test)
    )
    if not is_plain or _ARGUMENT not in inspect.signature(test).parameters:
        raise ArgumentError(
            f"strategy_combinations decorates {getattr(test, '__qualname__', repr(test)):.80}, which is "
            "not a plain function with an argument `strategy`; give options by name, as replicas=[1, 4]."
        )


def _under_all(
    test: Test, combinations: Combinations, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    failed: dict[str, Exception] = {}
    for combination in combinations:
        try:
            test(*args, **kwargs, strategy=combination.create())
        except Exception as error:
            error.add_note(f"under {combination}")
            failed[str(combination)] = error
    if failed:
        raise ExceptionGroup(
            f"{test.__qualname__} failed under {len(failed)} of {len(combinations)} combinations: "
            f"{', '.join(failed)}",
            list(failed.values()),
        )


def _parametrized(test: Test, combinations: Combinations) -> Test:
    """Makes pytest create one test per combination, if pytest is running."""
    pytest: Any = sys.modules.get("pytest")
    if pytest is None:
        return test
    return pytest.mark.parametrize(_ARGUMENT, combinations, ids=str)(test)


REPLICA_COUNTS = (1, 2, 4, 8)
"""The numbers of replicas to try; each divides the eight examples of a full batch."""


def replica_counts(
    requested: Sequence[int] | None, possible: Sequence[int] = REPLICA_COUNTS
) -> tuple[int, ...]:
    """Returns the numbers of replicas to try; None means all possible ones for which there are devices."""
    available = len(jax.local_devices())
    if requested is None:
        return tuple(count for count in possible if count <= available)
    check_subset("replicas", requested, REPLICA_COUNTS)
    if max(requested) > available:
        raise ArgumentError(
            f"replicas={list(requested)}: this process has {available} device(s). Call "
            f"dj.simulate({max(requested)}) before JAX starts, or ask for fewer."
        )
    return tuple(requested)


def check_subset(name: str, values: Any, allowed: Sequence[Any]) -> None:
    """Raises unless an argument is a list of some of the allowed values."""
    is_list = isinstance(values, (list, tuple)) and len(values) > 0
    if not is_list or not all(is_choice(value, allowed) for value in values):
        refuse(name, f"a list of some of {', '.join(map(repr, allowed))}", values)
