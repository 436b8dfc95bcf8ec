"""Errors of steps that fail on the devices, and notices about steps that differ from one device."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from flax import nnx

from distribute_jax._errors import DeadlineExceededError, StepFailedError
from distribute_jax._messages import error_text
from distribute_jax.processes import describe_processes
from distribute_jax.program._aggregation import Combine
from distribute_jax.program._binding import Binding
from distribute_jax.program._jaxprs import needed_only
from distribute_jax.program._program import Program
from distribute_jax.program._remarks import Notice
from distribute_jax.program._replica_context import draws_per_replica

_INTACT = """\
The compiled step failed while it ran; the state is as before the call.
The reason: {reason}"""

_NOT_FINITE = """\
{step} computed a {kind}, which jax.debug_nans or jax.debug_infs forbids. {state}
To find the line, call the function itself on the batch of one replica, without strategy.run: there JAX \
stops at the first operation that computes one."""


def step_failure(step: str, program: Program, error: Exception, *, lost: bool) -> Exception:
    """Returns the error of a step that failed while it ran; ``lost`` if its state was donated."""
    what = str(program.failure(error)) if lost else _INTACT.format(reason=error_text(error))
    text = str(error)
    if "Timed out" in text or "DEADLINE_EXCEEDED" in text:
        return DeadlineExceededError(f"{step}: {what}{describe_processes()}")
    if kind := non_finite_kind(error):
        state = what.split("\nThe reason:")[0] if lost else "The state is as before the call."
        return FloatingPointError(_NOT_FINITE.format(step=step, kind=kind, state=state))
    return StepFailedError(f"{step}: {what}{describe_processes()}")


def non_finite_kind(error: Exception) -> str | None:
    """Returns ``nan`` or ``inf`` for an error that JAX raises because of its debugging flags."""
    config: Any = jax.config
    if not (config.jax_debug_nans or config.jax_debug_infs) or len(error.args) != 2:
        return None
    return error.args[1] if error.args[1] in ("nan", "inf") else None


@contextmanager
def naming_step(step: str, program: Program) -> Iterator[None]:
    """Names the step in failures of the checks, which run it on copies of the state."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise step_failure(step, program, error, lost=False) from error


_log = logging.getLogger("distribute_jax")

_STATISTICS = (
    "%s (%s) uses the statistics of each replica's share of the batch and averages its running "
    "statistics, so this step is not exactly that of one device. For statistics of the whole batch make "
    'it with axis_name="data".'
)
_MEAN = (
    "%s (%s) ends a step as the mean of the replicas' values, each computed from its share of the batch, so "
    "this step is not exactly that of one device. For the value of the whole batch, combine in the step "
    'what it is computed from: dj.get_replica_context().all_reduce("mean", statistics).'
)
_RANDOM = (
    "%s (%s) draws different random numbers on each replica, so this step is not exactly that of one "
    "device. To compare runs, turn randomness off with model.eval(), or let the stream draw the same "
    "numbers on all replicas with dj.same_on_all_replicas(stream)."
)


class Notices:
    """Logs each notice once."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, Any]] = set()

    def log(self, binding: Binding, program: Program, *, expects_random: bool) -> None:
        """Logs why a newly compiled step differs from one device; random numbers as info if expected."""
        for notice in _notices(binding, program):
            if notice.key not in self._logged:
                self._logged.add(notice.key)
                is_expected = expects_random and notice.text is _RANDOM
                level = logging.INFO if is_expected else logging.WARNING
                _log.log(level, notice.text, *notice.named)


def _notices(binding: Binding, program: Program) -> Iterator[Notice]:
    rules = iter(program.plan.combine)
    nodes = dict(zip(binding.node_names, binding.nodes, strict=True))
    traced = program.traced
    jaxpr = traced.jaxpr.jaxpr
    _, needed = needed_only(jaxpr, range(len(jaxpr.outvars)))
    starts = zip(binding.variables, traced.input_starts, strict=False)
    # Keys that are drawn and not used, as an RNN's for its first carry, which is zeros.
    ignored = {id(v) for v, start in starts if isinstance(v, nnx.RngKey) and start not in needed}
    for index, size in zip(program.written, traced.written_sizes, strict=True):
        rule = list(itertools.islice(rules, size))
        variable, name = binding.variables[index], binding.names[index]
        owner = name.rpartition(".")[0]
        node = nodes[owner]() if owner in nodes else None
        # A variable may be captured by itself.
        path, about = (owner, node) if node is not None else (name, variable)
        named = (path, type(about).__name__)
        if Combine.MEAN in rule:
            yield Notice(_STATISTICS if hasattr(node, "axis_name") else _MEAN, named, about)
        is_ignored = id(getattr(node, "key", None)) in ignored
        if (
            isinstance(variable, nnx.RngCount)
            and draws_per_replica(variable, node)
            and not is_ignored
        ):
            yield Notice(_RANDOM, named, about)
    yield from program.plan.notices
