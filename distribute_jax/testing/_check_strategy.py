"""``check_strategy``: runs the conformance suite on a strategy or a cross-device operation."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import jax

from distribute_jax._errors import LoweringError, NotEqualError
from distribute_jax._messages import error_line, leaf_text
from distribute_jax.program import RunOptions
from distribute_jax.strategies import Strategy
from distribute_jax.testing._conformance import Check, Fact, Subject, _state, _values
from distribute_jax.testing._strategies import (
    Combination,
    check_subset,
    factory_name,
    possible_counts,
    replica_counts,
)

CHECKS: dict[str, Check] = {
    name: check
    for module in (_values, _state)
    for name, check in vars(module).items()
    if inspect.isfunction(check) and check.__module__ == module.__name__ and name[0] != "_"
}
"""The checks by name, in the order in which they run."""

_LOWERINGS = ("shard_map", "pmap")
_log = logging.getLogger("distribute_jax")
_MAX_LISTED = 8
"""How many wrong facts of one check are listed."""

_FAILED = """\
check_strategy: {failed} of {total} checks failed.
{lines}
The docstrings in distribute_jax/testing/_conformance say what each check does. Repeat the first one with
  dj.testing.check_strategy(factory, [{replicas}], lowerings=[{lowering!r}], only=[{check!r}])"""

_REFUSED = (
    "check_strategy: %d of %d checks were not run, see `refused` in the report; the first is %s"
)


@dataclass(frozen=True, kw_only=True)
class StrategyReport:
    """What ``check_strategy`` has checked; if a check fails it raises instead.

    Example:
        >>> import distribute_jax as dj
        >>> dj.testing.check_strategy(dj.MirroredStrategy, [2], only=["gather"])
        StrategyReport(checks=('gather',), replicas=(2,), lowerings=('shard_map',), refused=())
    """

    checks: tuple[str, ...]
    """The names of the checks that passed with each number of replicas and each lowering, except those
    in ``refused``."""
    replicas: tuple[int, ...]
    """The numbers of replicas."""
    lowerings: tuple[str, ...]
    """The lowerings of ``RunOptions``."""
    refused: tuple[str, ...]
    """The checks that a lowering could not run, as ``"training, 4 replicas, pmap: "`` and the reason:
    pmap supports neither replicas of several cores nor sharded optimizer state."""


@dataclass(frozen=True)
class _Outcome:
    check: str
    replicas: int
    lowering: str
    wrong: tuple[str, ...] = ()
    """Lines of the message that say what was wrong."""
    refused: str = ""
    """Why the lowering could not run the check, if so."""

    def __str__(self) -> str:
        return f"{self.check}, {self.replicas} replicas, {self.lowering}"


def check_strategy(
    factory: Callable[[list[jax.Device]], Strategy],
    replicas: Sequence[int] | None = None,
    *,
    lowerings: Sequence[str] = ("shard_map",),
    only: Sequence[str] | None = None,
) -> StrategyReport:
    """Runs the library's conformance suite on your own strategy, or on one with your own operation.

    Contexts, values, reductions and their gradients, variables, training against one device, partial
    batches, metrics, batch norm, random numbers and refused mistakes are checked on simulated or real
    devices of this process. All checks run, and all that failed are reported together.

    Args:
        factory: makes the strategy, once for each number of replicas, from a list of ``jax.Device``:
            replica i must be on device i, or several on each of the first devices. A class such as
            ``dj.MirroredStrategy`` is one; for an operation, pass
            ``lambda devices: dj.MirroredStrategy(devices, cross_device_ops=MyOps())``.
        replicas: the numbers of replicas, each of 1, 2, 4 and 8; None means all for which there are
            devices.
        lowerings: the values of ``RunOptions.lowering`` to run the steps with.
        only: the names of the checks to run; None means all.

    Returns:
        What was checked: names, numbers of replicas, lowerings, and what a lowering could not run,
        which is also logged.

    Raises:
        ValueError: a check failed (``NotEqualError``): names the check, what it compared, what was
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
    only = tuple(CHECKS) if only is None else only
    check_subset("only", only, tuple(CHECKS))
    check_subset("lowerings", lowerings, _LOWERINGS)
    counts = replica_counts(replicas, possible_counts(factory))
    outcomes = [
        _outcome(subject, name)
        for subject in _subjects(factory, counts, lowerings)
        for name in only
    ]
    failures = [outcome for outcome in outcomes if outcome.wrong]
    if failures:
        first = failures[0]
        lines = [line for failure in failures for line in (f"  {failure}:", *failure.wrong)]
        raise NotEqualError(
            _FAILED.format(
                failed=len(failures), total=len(outcomes), lines="\n".join(lines), **vars(first)
            )
        )
    refused = tuple(f"{outcome}: {outcome.refused}" for outcome in outcomes if outcome.refused)
    if refused:
        _log.warning(_REFUSED, len(refused), len(outcomes), refused[0])
    return StrategyReport(
        checks=tuple(only), replicas=counts, lowerings=tuple(lowerings), refused=refused
    )


def _subjects(factory: Any, counts: Sequence[int], lowerings: Sequence[str]) -> Iterator[Subject]:
    for count in counts:
        combination = Combination(factory_name(factory), factory, count)
        devices = tuple(jax.local_devices()[:count])
        for lowering in lowerings:
            options = RunOptions(lowering=cast("Any", lowering))
            yield Subject(combination.create(), devices, options)


def _outcome(subject: Subject, name: str) -> _Outcome:
    """Runs one check; an unexpected error ends it."""
    subject = replace(subject, wrong=[])
    refused = ""
    ended: list[str] = []
    with _silenced():
        try:
            CHECKS[name](subject)
        except Exception as error:
            if isinstance(error, LoweringError) and subject.options.lowering != "shard_map":
                refused = str(error).partition("\n")[0]
            else:
                ended = ["    expected no error", f"      received {error_line(error)}"]
    lines = (*_fact_lines(subject.wrong), *ended)
    return _Outcome(name, subject.n, subject.options.lowering, lines, refused)


def _fact_lines(wrong: Sequence[Fact]) -> Iterator[str]:
    for fact in wrong[:_MAX_LISTED]:
        yield f"    {fact.what}:"
        yield f"      expected {_format_value(fact.expected)}"
        yield f"      received {_format_value(fact.received)}"
    if len(wrong) > _MAX_LISTED:
        yield f"    and {len(wrong) - _MAX_LISTED} more"


@contextmanager
def _silenced() -> Iterator[None]:
    """Silences the library's warnings about the unusual batches and layers of the checks."""
    silent = logging.Filter("distribute_jax.nothing")
    _log.addFilter(silent)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _log.removeFilter(silent)


def _format_value(value: Any) -> str:
    text = str(value) if not hasattr(value, "shape") or value.size <= 12 else leaf_text(value)
    return " ".join(text.split())
