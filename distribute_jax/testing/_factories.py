"""The strategies that a suite runs through: each has a name, and is made anew for some devices."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from distribute_jax._errors import ArgumentError
from distribute_jax.strategies import (
    CentralStorageStrategy,
    MirroredStrategy,
    OneDeviceStrategy,
    Strategy,
)
from distribute_jax.testing._devices import REPLICAS, first_devices

StrategyFactory = Callable[[list[jax.Device]], Strategy]
"""Makes a strategy with one replica on each of the devices."""

LIBRARY: tuple[Any, ...] = (OneDeviceStrategy, MirroredStrategy, CentralStorageStrategy)


@dataclass(frozen=True)
class Combination:
    """A strategy that is not made yet, and its number of replicas."""

    name: str
    factory: Any
    replicas: int
    caller: str
    """The public function that makes it, for messages."""

    def __str__(self) -> str:
        """Gives the id of a test that runs with it, as ``"mirrored-4"``."""
        return f"{self.name}-{self.replicas}"

    def made(self) -> Strategy:
        """Makes the strategy on this process's first devices."""
        devices = first_devices(self.replicas)
        strategy = _from_devices(self.factory)(devices)
        if not isinstance(strategy, Strategy):
            raise ArgumentError(
                f"{self.caller}: the factory {self.name} returned {strategy!r:.80} for "
                f"{self.replicas} device(s), which is no dj.Strategy. Return the strategy that it made."
            )
        found = strategy.num_replicas_in_sync
        if found != self.replicas:
            raise ArgumentError(
                f"{self.caller}: the factory {self.name} was given {self.replicas} device(s) and made "
                f"{strategy!r} with {found} replica(s). Make one replica for each device it is given, or "
                "say with replicas=[1] how many there can be."
            )
        return strategy


def possible_counts(factory: Any) -> tuple[int, ...]:
    """Gives the numbers of replicas that a factory can make: OneDeviceStrategy makes one only."""
    return (1,) if factory is OneDeviceStrategy else REPLICAS


def checked_factory(factory: Any, caller: str) -> Any:
    """Refuses what cannot be called, such as a strategy that was made already."""
    if callable(factory):
        return factory
    raise ArgumentError(
        f"{caller}: {factory!r:.80} is no factory. A factory is a function that makes a strategy from a "
        "list of devices, since each number of replicas needs its own: pass dj.MirroredStrategy, or "
        "lambda devices: dj.MirroredStrategy(devices, cross_device_ops=MyOps())."
    )


def named_factories(strategies: Any, caller: str) -> dict[str, Any]:
    """Gives factories by name; a list gets the names of its classes and functions.

    Raises:
        ValueError: it is neither list nor dict, holds what is no factory, or a name is missing or used
            twice.
    """
    if isinstance(strategies, Mapping):
        pairs = [(name, factory) for name, factory in strategies.items()]
    elif isinstance(strategies, Sequence) and not isinstance(strategies, str):
        pairs = [(factory_name(checked_factory(f, caller)), f) for f in strategies]
    else:
        pairs = []
    names = [name for name, _ in pairs]
    fit = all(isinstance(name, str) and name not in {"", "<lambda>"} for name in names)
    if not pairs or not fit or len(set(names)) < len(names):
        raise ArgumentError(
            f"{caller}(strategies={strategies!r:.200}): a list of factories whose names differ, or, for "
            "lambdas, a dict from names to factories, such as "
            '{"ring": lambda devices: dj.MirroredStrategy(devices, dj.RingAllReduce())}.'
        )
    return {name: checked_factory(factory, caller) for name, factory in pairs}


def factory_name(factory: Any) -> str:
    """Gives ``"central_storage"`` for ``CentralStorageStrategy``, and a function's own name."""
    name = getattr(factory, "__name__", type(factory).__name__)
    if not isinstance(factory, type):
        return str(name)
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removesuffix("Strategy") or name)
    return words.lower()


def _from_devices(factory: Any) -> StrategyFactory:
    if factory is OneDeviceStrategy:
        return lambda devices: OneDeviceStrategy(devices[0])
    made: StrategyFactory = factory
    return made
