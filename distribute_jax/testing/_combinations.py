"""``strategy_combinations``: one test of the user's, under every strategy and number of replicas."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, overload

from distribute_jax._errors import ArgumentError
from distribute_jax.testing._devices import check_replicas, replica_counts
from distribute_jax.testing._factories import (
    LIBRARY,
    Combination,
    StrategyFactory,
    named_factories,
    possible_counts,
)

Test = Callable[..., Any]
_CALLER = "strategy_combinations"
_ARGUMENT = "strategy"


class Combinations(Collection[Combination]):
    """Strategies and their numbers of replicas; JAX starts when they are looked at, not before."""

    def __init__(self, strategies: Any = None, replicas: Any = None) -> None:
        """Checks what was asked for, but for the number of devices."""
        if replicas is not None:
            check_replicas(replicas, _CALLER)
        chosen = LIBRARY if strategies is None else strategies
        self._factories, self._replicas = named_factories(chosen, _CALLER), replicas

    def __iter__(self) -> Iterator[Combination]:
        """Gives those for which there are devices."""
        counts = replica_counts(self._replicas, _CALLER)
        found = [
            Combination(name, factory, count, _CALLER)
            for name, factory in self._factories.items()
            for count in counts
            if count in possible_counts(factory)
        ]
        if not found:
            raise ArgumentError(
                f"{_CALLER}(strategies={list(self._factories)}, replicas={self._replicas}): there is "
                "no such combination, since OneDeviceStrategy has one replica. Add 1 to replicas, or "
                "dj.MirroredStrategy to strategies."
            )
        return iter(found)

    def __len__(self) -> int:
        """Tells how many there are."""
        return len(list(iter(self)))

    def __contains__(self, combination: object) -> bool:
        """Tells whether a combination is one of them."""
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
    test: Test | None = None,
    /,
    *,
    strategies: Any = None,
    replicas: Sequence[int] | None = None,
) -> Any:
    """Runs a test of your own under every strategy and number of replicas.

    It decorates a function with an argument ``strategy``. pytest shows one test for each combination,
    as ``test_loss[mirrored-4]``. Called without ``strategy``, by another runner or by hand, the function
    runs under all combinations, and those that failed are reported together. Each run gets a strategy
    that was made for it.

    For a pytest fixture ``strategy`` instead, which runs each test that takes it under all
    combinations of the library, put ``pytest_plugins = ["distribute_jax.testing.pytest_plugin"]``
    into your conftest.py.

    Args:
        test: the function, where the decorator stands without arguments.
        strategies: what to run under: a list of functions or classes that make a strategy from a list
            of ``jax.Device``, or a dict that gives each a name; None means ``OneDeviceStrategy``,
            ``MirroredStrategy`` and ``CentralStorageStrategy``.
        replicas: the numbers of replicas; None means those of 1, 2, 4 and 8 for which there are
            devices. ``OneDeviceStrategy`` runs with 1 only.

    Returns:
        The test, or a decorator that makes it.

    Raises:
        ValueError: the function takes no ``strategy``, or an argument is wrong; when the tests are
            collected or run: there are too few devices.
        ExceptionGroup: the function was called without ``strategy`` and failed under some
            combinations; it holds the errors of all, each with a note that names its combination.

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
        given = signature.bind_partial(*args, **kwargs).arguments
        if _ARGUMENT not in given:
            return _under_all(test, combinations, args, kwargs)
        if isinstance(given[_ARGUMENT], Combination):
            kwargs[_ARGUMENT] = given[_ARGUMENT].made()
        return test(*args, **kwargs)

    return _parametrized(under_combinations, combinations)


def _check_takes_strategy(test: Any) -> None:
    is_plain = inspect.isfunction(test) and not (
        # Calling these runs none of their code, so that they would pass whatever they say.
        inspect.iscoroutinefunction(test) or inspect.isgeneratorfunction(test)
    )
    if not is_plain or _ARGUMENT not in inspect.signature(test).parameters:
        raise ArgumentError(
            f"strategy_combinations decorates {getattr(test, '__qualname__', repr(test)):.80}, which is "
            "no plain function with an argument `strategy`. Write `def test_something(strategy):`, and "
            "give options by name: "
            "@dj.testing.strategy_combinations(strategies=[dj.MirroredStrategy], replicas=[1, 4])."
        )


def _under_all(
    test: Test, combinations: Combinations, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    failed: dict[str, Exception] = {}
    for combination in combinations:
        try:
            test(*args, **kwargs, strategy=combination.made())
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
    """Lets pytest make one test of each combination; it is not imported where it does not run."""
    pytest: Any = sys.modules.get("pytest")
    if pytest is None:
        return test
    marked: Test = pytest.mark.parametrize(_ARGUMENT, combinations, ids=str)(test)
    return marked
