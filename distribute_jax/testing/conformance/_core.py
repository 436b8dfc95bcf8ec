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
from distribute_jax._messages import error_text, path_text
from distribute_jax.program import RunOptions
from distribute_jax.strategies import Strategy, get_replica_context

ROUNDING = 1e-5
"""Relative to the largest number of an array: float32 sums in another order differ by less."""


_ARRAYS = (np.ndarray, np.generic, jax.Array)


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
        received, expected = self.received, self.expected
        if isinstance(expected, float):
            return self._are_close(np.asarray(received), np.asarray(expected))
        if not isinstance(expected, _ARRAYS):
            return type(received) is type(expected) and bool(received == expected)
        array = np.asarray(received)
        is_array = isinstance(received, _ARRAYS) and array.dtype == expected.dtype
        return is_array and self._are_close(array, np.asarray(expected))

    def _are_close(self, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
        if a.shape != b.shape:
            return False
        if not jnp.issubdtype(a.dtype, jnp.floating):
            return bool(np.array_equal(a, b))
        if self.rtol == 0:
            return a.tobytes() == b.astype(a.dtype).tobytes()
        a, b = a.astype(np.float64), b.astype(np.float64)
        return np.allclose(a, b, rtol=0, atol=self.rtol * np.abs(b).max(initial=1e-30))


def same(what: str, received: Any, expected: Any, rtol: float = ROUNDING) -> Iterator[Fact]:
    """Compares two pytrees leaf by leaf; where their structures differ, these."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(received)
    wanted, wanted_structure = jax.tree_util.tree_flatten_with_path(expected)
    if str(structure) != str(wanted_structure):
        yield Fact(f"the structure of {what}", str(structure), str(wanted_structure))
        return
    for (path, leaf), (_, wanted_leaf) in zip(leaves, wanted, strict=True):
        name = f"{what}, leaf {path_text(path)}" if path else what
        yield Fact(name, leaf, wanted_leaf, rtol)


def on_each(
    what: str, parts: Sequence[Any], expected: Sequence[Any], rtol: float = ROUNDING
) -> Iterator[Fact]:
    """Compares what every replica has with what it should have."""
    yield Fact(f"the number of replicas that have {what}", len(parts), len(expected))
    for i, (part, wanted) in enumerate(zip(parts, expected, strict=False)):
        yield from same(f"{what} on replica {i}", part, wanted, rtol)


def on_all(
    what: str, parts: Sequence[Any], expected: Any, rtol: float = ROUNDING
) -> Iterator[Fact]:
    """Compares what every replica has with one and the same pytree."""
    return on_each(what, parts, [expected] * len(parts), rtol)


def refuses(what: str, call: Callable[[], Any], kind: type[Exception]) -> Fact:
    """Expects a call to raise an error of a kind."""
    return Fact(what, outcome(call, kind), kind.__name__)


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
    return f"{type(error).__name__}: {error_text(error)}"


@dataclass(frozen=True)
class Subject:
    """A strategy that is being checked."""

    strategy: Strategy
    devices: tuple[jax.Device, ...]
    """Where its replicas should be, in order."""
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
        """Runs a step; returns what each replica itself has of the result, as NumPy arrays."""

        @functools.wraps(step)  # so that run finds the state that the step captures
        def with_results_apart(*args: Any) -> Any:
            return apart(step(*args))

        return self.parts(self.run(with_results_apart, *args))

    def parts(self, value: Any) -> list[Any]:
        """Returns each replica's part of a value, as NumPy arrays."""
        parts = self.strategy.experimental_local_results(value)
        return [jax.tree.map(np.asarray, part) for part in parts]

    def per_replica(self, values: Sequence[Any]) -> Any:
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
