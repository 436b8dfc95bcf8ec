"""``check_strategy``: does a strategy, or a cross-device operation, do what the library promises?"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import jax

from distribute_jax._errors import ArgumentError, NotEqualError
from distribute_jax._tree import leaf_text
from distribute_jax.program import RunOptions
from distribute_jax.strategies import Strategy
from distribute_jax.testing._checks import CHECKS, Subject, error_line
from distribute_jax.testing._devices import first_devices, replica_counts

_LOWERINGS = ("shard_map", "vmap", "pmap")
_SHOWN = 8
"""Wrong facts of one check that are listed."""

_FAILED = """\
check_strategy: {failed} of {total} checks failed.
{lines}
What a check does is said in its docstring, in distribute_jax/testing/_checks. Repeat the first alone \
with
  dj.testing.check_strategy(factory, [{replicas}], lowerings=[{lowering!r}], only=[{name!r}])"""


@dataclass(frozen=True, kw_only=True)
class StrategyReport:
    """What ``check_strategy`` has checked; where a check fails it raises instead.

    Example:
        >>> import distribute_jax as dj
        >>> dj.testing.check_strategy(dj.MirroredStrategy, [2], only=["gather"])
        StrategyReport(checks=('gather',), replicas=(2,), lowerings=('shard_map',))
    """

    checks: tuple[str, ...]
    """The names of the checks that passed, for each number of replicas and each lowering."""
    replicas: tuple[int, ...]
    """The numbers of replicas."""
    lowerings: tuple[str, ...]
    """The lowerings of ``RunOptions``."""


@dataclass(frozen=True)
class _Failure:
    check: str
    replicas: int
    lowering: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        where = f"  {self.check}, {self.replicas} replicas, {self.lowering}:"
        return "\n".join([where, *self.lines])


def check_strategy(
    factory: Callable[[list[jax.Device]], Strategy],
    replicas: Sequence[int] | None = None,
    *,
    lowerings: Sequence[str] = ("shard_map",),
    only: Sequence[str] | None = None,
) -> StrategyReport:
    """Runs the library's conformance suite on a strategy of your own, or on one with your operation.

    Contexts, values, reductions and their gradients, variables, training against one device, partial
    batches, metrics, batch norm, random numbers and refused mistakes are checked on simulated or real
    devices of this process. Every check runs, and all that failed are reported together.

    Args:
        factory: makes the strategy, anew for each number of replicas, from a list of ``jax.Device``:
            replica i is to lie on device i. A class such as ``dj.MirroredStrategy`` is one; for an
            operation, pass
            ``lambda devices: dj.MirroredStrategy(devices, cross_device_ops=MyOps())``.
        replicas: the numbers of replicas; None means those of 1, 2, 4 and 8 for which there are
            devices. A divisor of 8.
        lowerings: the values of ``RunOptions.lowering`` to run the steps with.
        only: names of checks, to run these alone; None means all.

    Returns:
        What was checked: names, numbers of replicas, lowerings.

    Raises:
        ValueError: a check failed (``NotEqualError``): names the check, what it looked at, what was
            expected and what was received. Or an argument is wrong: there are too few devices, the
            factory makes no strategy or one of another size, there is no check of that name.

    Example:
        >>> import distribute_jax as dj, jax
        >>> class ForgetsReplica0(dj.CrossDeviceOps):
        ...     def all_reduce_sum(self, value, axis_name):
        ...         return jax.lax.all_gather(value, axis_name)[1:].sum(0)
        >>> def factory(devices):
        ...     return dj.MirroredStrategy(devices, cross_device_ops=ForgetsReplica0())
        >>> dj.testing.check_strategy(factory, [2], only=["all_reduce_mean"])
        Traceback (most recent call last):
        distribute_jax.NotEqualError: check_strategy: 1 of 1 checks failed.
          all_reduce_mean, 2 replicas, shard_map:
        ...
    """
    names = _checked_names(only)
    counts = replica_counts(replicas, "check_strategy")
    _check_lowerings(lowerings)
    failures = [
        failure
        for count in counts
        for lowering in lowerings
        for failure in _failures(_subject(factory, count, lowering), names)
    ]
    if failures:
        raise _all_of(failures, len(names) * len(counts) * len(lowerings))
    return StrategyReport(checks=names, replicas=counts, lowerings=tuple(lowerings))


def _checked_names(only: Sequence[str] | None) -> tuple[str, ...]:
    if only is None:
        return tuple(CHECKS)
    unknown = [name for name in only if name not in CHECKS]
    if unknown or isinstance(only, str) or not only:
        raise ArgumentError(
            f"check_strategy(only={only!r}): `only` is a list of names of checks. There are: "
            f"{', '.join(CHECKS)}."
        )
    return tuple(only)


def _check_lowerings(lowerings: Sequence[str]) -> None:
    if isinstance(lowerings, str) or not lowerings or not set(lowerings) <= set(_LOWERINGS):
        raise ArgumentError(
            f"check_strategy(lowerings={lowerings!r}): a list of some of "
            f"{', '.join(map(repr, _LOWERINGS))}."
        )


def _subject(factory: Any, count: int, lowering: str) -> Subject:
    devices = first_devices(count)
    if not callable(factory):
        raise ArgumentError(
            f"check_strategy({factory!r:.80}): `factory` must be a function that makes a strategy from a "
            "list of devices, since each number of replicas needs its own: pass dj.MirroredStrategy, or "
            "lambda devices: dj.MirroredStrategy(devices, cross_device_ops=MyOps())."
        )
    strategy = factory(devices)
    if not isinstance(strategy, Strategy):
        raise ArgumentError(
            f"check_strategy: the factory returned {strategy!r:.80} for {count} device(s), which is no "
            "dj.Strategy. Return the strategy that it made."
        )
    found = strategy.num_replicas_in_sync
    if found != count:
        raise ArgumentError(
            f"check_strategy: the factory was given {count} device(s) and made {strategy!r} with {found} "
            "replica(s). Make one replica for each device it is given, or say with replicas=[1] how "
            "many there can be."
        )
    return Subject(strategy, tuple(devices), RunOptions(lowering=cast("Any", lowering)))


def _failures(subject: Subject, names: Sequence[str]) -> Iterator[_Failure]:
    for name in names:
        lines = tuple(_wrong(subject, name))
        if lines:
            yield _Failure(name, subject.n, subject.options.lowering, lines)


def _wrong(subject: Subject, name: str) -> Iterator[str]:
    """Says what a check found wrong; an error that it did not expect ends it."""
    wrong = 0
    with _quiet():
        try:
            for fact in CHECKS[name](subject):
                wrong += not fact.holds()
                if not fact.holds() and wrong <= _SHOWN:
                    yield f"    {fact.what}:\n      expected {_shown(fact.expected)}"
                    yield f"      received {_shown(fact.received)}"
        except Exception as error:
            yield f"    expected no error\n      received {error_line(error)}"
    if wrong > _SHOWN:
        yield f"    and {wrong - _SHOWN} more"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps back what the library says about batches and layers as unusual as those of the checks."""
    log = logging.getLogger("distribute_jax")
    silent = logging.Filter("distribute_jax.nothing")
    log.addFilter(silent)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.removeFilter(silent)


def _shown(value: Any) -> str:
    text = str(value) if not hasattr(value, "shape") or value.size <= 12 else leaf_text(value)
    return " ".join(text.split())


def _all_of(failures: Sequence[_Failure], total: int) -> NotEqualError:
    first = failures[0]
    return NotEqualError(
        _FAILED.format(
            failed=len(failures),
            total=total,
            lines="\n".join(map(str, failures)),
            replicas=first.replicas,
            lowering=first.lowering,
            name=first.check,
        )
    )
