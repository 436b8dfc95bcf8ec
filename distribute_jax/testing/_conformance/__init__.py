"""The checks that every strategy passes: each public function of ``_values`` and ``_state`` is one.

A check takes a ``Subject``, which collects what is not as expected; it raises nothing itself, so that
everything wrong is reported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._errors import LoweringError
from distribute_jax._messages import error_line, is_array, path_text
from distribute_jax.program import RunOptions
from distribute_jax.strategies import Strategy, get_replica_context

ROUNDING = 1e-5
"""Relative to the largest number of an array: float32 sums in another order differ by less."""


class Fact(NamedTuple):
    what: str
    """What was compared, in words."""
    received: Any
    expected: Any


def _is_equal(received: Any, expected: Any, rtol: float) -> bool:
    if not is_array(expected) and not isinstance(expected, float):
        return type(received) is type(expected) and bool(received == expected)
    a, b = np.asarray(received), np.asarray(expected)
    is_comparable = is_array(received) and a.dtype == b.dtype
    if a.shape != b.shape or not (is_comparable or isinstance(expected, float)):
        return False
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return bool(np.array_equal(a, b))
    if rtol == 0:
        return a.tobytes() == b.astype(a.dtype).tobytes()
    a, b = a.astype(np.float64), b.astype(np.float64)
    return np.allclose(a, b, rtol=0, atol=rtol * np.abs(b).max(initial=1e-30))


def _outcome(call: Callable[[], Any], kind: type[Exception] | None = None) -> str:
    """Returns the error that a call raises as text: only its name if it is of the expected kind."""
    try:
        call()
    except LoweringError:  # ends the check: the lowering cannot run the step at all
        raise
    except Exception as error:
        if kind is not None and isinstance(error, kind):
            return kind.__name__
        return error_line(error)
    return "no error"


@dataclass(frozen=True, eq=False)
class Subject:
    """A strategy on known devices, of which a check says what it expects."""

    strategy: Strategy
    devices: tuple[jax.Device, ...]
    """The device of each replica, in order."""
    options: RunOptions
    """The options of every step: the lowering."""
    wrong: list[Fact] = field(default_factory=list)
    """What was not as expected."""

    @property
    def n(self) -> int:
        return len(self.devices)

    def expect(self, what: str, received: Any, expected: Any, rtol: float = ROUNDING) -> None:
        """Compares two pytrees of arrays leaf by leaf, or their structures if these differ.

        ``rtol`` is the tolerance of floating numbers, relative to the largest one; 0 for equal bits.
        """
        is_leaf = None if any(map(is_array, jax.tree.leaves(expected))) else lambda _: True
        leaves, structure = jax.tree_util.tree_flatten_with_path(received, is_leaf)
        expected_leaves, expected_structure = jax.tree.flatten(expected, is_leaf)
        if str(structure) != str(expected_structure):
            fact = Fact(f"the structure of {what}", str(structure), str(expected_structure))
            self.wrong.append(fact)
            return
        for (path, leaf), expected_leaf in zip(leaves, expected_leaves, strict=True):
            if not _is_equal(leaf, expected_leaf, rtol):
                name = f"{what}, leaf {path_text(path)}" if path else what
                self.wrong.append(Fact(name, leaf, expected_leaf))

    def expect_each(
        self, what: str, parts: Sequence[Any], expected: Sequence[Any], rtol: float = ROUNDING
    ) -> None:
        """Compares each replica's pytree with the one expected for it."""
        self.expect(f"the number of replicas that have {what}", len(parts), len(expected))
        for i, (part, expected_part) in enumerate(zip(parts, expected, strict=False)):
            self.expect(f"{what} on replica {i}", part, expected_part, rtol)

    def expect_all(
        self, what: str, parts: Sequence[Any], expected: Any, rtol: float = ROUNDING
    ) -> None:
        """Compares each replica's pytree with the same expected one."""
        self.expect_each(what, parts, [expected] * len(parts), rtol)

    def expect_error(self, what: str, call: Callable[[], Any], kind: type[Exception]) -> None:
        self.expect(what, _outcome(call, kind), kind.__name__)

    def expect_success(self, what: str, call: Callable[[], Any]) -> None:
        self.expect(what, _outcome(call), "no error")

    def create(self, make: Callable[[], Any]) -> Any:
        """Calls ``make`` in the strategy's scope."""
        with self.strategy.scope():
            return make()

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        return self.strategy.run(step, args=args, options=self.options)

    def run_per_replica(self, step: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs a step; returns each replica's own result, as NumPy arrays."""

        @functools.wraps(step)  # so that run finds the state that the step captures
        def with_per_replica_results(*args: Any) -> Any:
            return as_per_replica(step(*args))

        return self.parts(self.run(with_per_replica_results, *args))

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
        return list(self.strategy.distribute_dataset(data))


Check = Callable[[Subject], None]


def replica() -> Any:
    return get_replica_context()


def replica_number() -> jax.Array:
    """Returns 1.0 on replica 0, 2.0 on replica 1, and so on."""
    return jnp.asarray(replica().replica_id_in_sync_group, jnp.float32) + 1


def power_of_two() -> jax.Array:
    """Returns 1, 2, 4, … on the replicas: no two sets of replicas have the same sum."""
    return jnp.exp2(replica_number() - 1)


def as_per_replica(tree: Any) -> Any:
    """Makes arrays look different on each replica, so that ``run`` returns every copy."""
    always = replica_number() > 0  # not known to be equal on all replicas
    return jax.tree.map(lambda leaf: jnp.where(always, leaf, jnp.zeros_like(leaf)), tree)
