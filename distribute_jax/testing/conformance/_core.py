"""What checks are made of: a subject, which is a strategy on known devices, and facts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._errors import LoweringError
from distribute_jax._messages import path_text
from distribute_jax.program import RunOptions
from distribute_jax.strategies import Strategy, get_replica_context

ROUNDING = 1e-5
"""Relative to the largest number of an array: float32 sums in another order differ by less."""


@dataclass(frozen=True)
class Fact:
    """One comparison of a check."""

    what: str
    """What was looked at, in words."""
    received: Any
    expected: Any
    rtol: float = ROUNDING
    """How far floating numbers may be apart, relative to the largest; 0 for bitwise."""

    def holds(self) -> bool:
        """Returns whether what was received is what was expected."""
        if isinstance(self.expected, (np.ndarray, np.generic, jax.Array)):
            return _equal_arrays(self.received, np.asarray(self.expected), self.rtol)
        if isinstance(self.expected, float):
            return _equal_numbers(np.asarray(self.received), np.asarray(self.expected), self.rtol)
        return type(self.received) is type(self.expected) and self.received == self.expected


def _equal_arrays(received: Any, expected: np.ndarray[Any, Any], rtol: float) -> bool:
    if not isinstance(received, (np.ndarray, np.generic, jax.Array)):
        return False
    array = np.asarray(received)
    return array.dtype == expected.dtype and _equal_numbers(array, expected, rtol)


def _equal_numbers(
    received: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], rtol: float
) -> bool:
    if received.shape != expected.shape:
        return False
    if not jnp.issubdtype(received.dtype, jnp.floating):
        return bool(np.array_equal(received, expected))
    if rtol == 0:
        return received.tobytes() == expected.astype(received.dtype).tobytes()
    a, b = received.astype(np.float64), expected.astype(np.float64)
    return bool(np.allclose(a, b, rtol=0, atol=rtol * np.abs(b).max(initial=1e-30)))


def same(what: str, received: Any, expected: Any, rtol: float = ROUNDING) -> Iterator[Fact]:
    """Compares two nests leaf by leaf; where their structures differ, these."""
    found, wanted = (jax.tree_util.tree_flatten_with_path(nest) for nest in (received, expected))
    if str(found[1]) != str(wanted[1]):
        yield Fact(f"the structure of {what}", str(found[1]), str(wanted[1]))
        return
    for (path, leaf), (_, expectation) in zip(found[0], wanted[0], strict=True):
        name = f"{what}, leaf {path_text(path)}" if path else what
        yield Fact(name, leaf, expectation, rtol)


def on_all(
    what: str, parts: Sequence[Any], expected: Any, rtol: float = ROUNDING
) -> Iterator[Fact]:
    """Compares what every replica has with one and the same nest."""
    for i, part in enumerate(parts):
        yield from same(f"{what} on replica {i}", part, expected, rtol)


def on_each(what: str, parts: Sequence[Any], expected: Sequence[Any]) -> Iterator[Fact]:
    """Compares what every replica has with what it should have."""
    yield Fact(f"the number of replicas that have {what}", len(parts), len(expected))
    for i, (part, wanted) in enumerate(zip(parts, expected, strict=False)):
        yield from same(f"{what} on replica {i}", part, wanted)


def refuses(what: str, call: Callable[[], Any], kind: type[Exception]) -> Fact:
    """Expects a call to raise an error of a kind."""
    found = outcome(call, kind)
    return Fact(what, found, kind.__name__)


def succeeds(what: str, call: Callable[[], Any]) -> Fact:
    """Expects a call to raise nothing."""
    return Fact(what, outcome(call), "no error")


def outcome(call: Callable[[], Any], kind: type[Exception] | None = None) -> str:
    """Returns which error a call raises: the kind alone where it is the one that was asked for."""
    try:
        call()
    except LoweringError:  # ends the check: it says nothing about what was called
        raise
    except Exception as error:
        if kind is not None and isinstance(error, kind):
            return kind.__name__
        return error_line(error)
    return "no error"


def error_line(error: Exception) -> str:
    """Returns an error as one line."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


@dataclass(frozen=True)
class Subject:
    """A strategy that is being checked."""

    strategy: Strategy
    devices: tuple[jax.Device, ...]
    """Where its replicas should lie, in order."""
    options: RunOptions
    """What every step runs with: the lowering."""

    @property
    def n(self) -> int:
        """The number of replicas."""
        return len(self.devices)

    def made(self, make: Callable[[], Any]) -> Any:
        """Makes state under the strategy's scope."""
        with self.strategy.scope():
            return make()

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Runs a step on all replicas."""
        return self.strategy.run(step, args=args, options=self.options)

    def seen(self, step: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs a step; gives what each replica itself has of the result, as NumPy arrays."""

        @functools.wraps(step)  # so that run finds the state that the step captures
        def with_results_apart(*own: Any) -> Any:
            return apart(step(*own))

        return self.parts(self.run(with_results_apart, *args))

    def parts(self, value: Any) -> list[Any]:
        """Returns each replica's part of a value, as NumPy arrays."""
        parts = self.strategy.experimental_local_results(value)
        return [jax.tree.map(np.asarray, part) for part in parts]

    def own(self, values: Sequence[Any]) -> Any:
        """Distributes one value to each replica."""
        return self.strategy.experimental_distribute_values_from_function(
            lambda context: values[context.replica_id_in_sync_group]
        )

    def batches(self, data: Sequence[Any]) -> list[Any]:
        """Spreads global batches over the replicas."""
        return list(self.strategy.distribute_dataset(data))


Check = Callable[[Subject], Iterator[Fact]]


def replica() -> Any:
    """Returns the context of this replica."""
    return get_replica_context()


def number() -> jax.Array:
    """Returns 1.0 to replica 0, 2.0 to replica 1, and so on."""
    return jnp.asarray(replica().replica_id_in_sync_group, jnp.float32) + 1


def power() -> jax.Array:
    """Returns 1, 2, 4, … to the replicas: no two sets of replicas have the same sum."""
    return jnp.exp2(number() - 1)


def apart(tree: Any) -> Any:
    """Makes arrays per-replica values, so that all can be read even where they should be equal."""
    real = number() > 0
    return jax.tree.map(lambda leaf: jnp.where(real, leaf, jnp.zeros_like(leaf)), tree)
