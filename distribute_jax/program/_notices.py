"""Steps that cannot equal one device by their nature say so, once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from flax import nnx

from distribute_jax.program._program import Program
from distribute_jax.program.binding._aggregation import Combine
from distribute_jax.program.binding._bind import Binding
from distribute_jax.program.tracing._random import draws_its_own

_log = logging.getLogger("distribute_jax")

_STATISTICS = (
    "%s (%s) uses the statistics of each replica's share of the batch and averages its running "
    "statistics, so this step is not exactly that of one device. For statistics of the whole batch make "
    'it with axis_name="data".'
)
_RANDOM = (
    "%s (%s) draws other random numbers on each replica, so this step is not exactly that of one device. "
    "To compare runs, turn randomness off with model.eval(), or let the stream draw the same numbers "
    "everywhere with dj.same_on_all_replicas(stream)."
)

_NOT_COUNTED = (
    "%s met a partial batch. Two different paddings gave the same result, but run could not check that "
    "the step counts no padding, as in a mean over all rows: %s. To check it, turn randomness off with "
    'model.eval() for one run, or feed no partial batches with InputOptions(partial="drop").'
)


def padding_not_counted(step: str, why: str) -> None:
    """Says that a padded step could only be checked in part; once, as it is checked once."""
    _log.warning(_NOT_COUNTED, step, why)


class Notices:
    """Remembers which notices were given."""

    def __init__(self) -> None:
        """Starts with none given."""
        self._given: set[tuple[str, int]] = set()

    def give(self, binding: Binding, program: Program) -> None:
        """Names the modules of a newly compiled step that make it differ from one device."""
        for text, name in _reasons(binding, program):
            owner, _, _ = name.rpartition(".")
            node = _node(binding, owner)
            if (text, id(node)) not in self._given:
                self._given.add((text, id(node)))
                _log.warning(text, owner, type(node).__name__)


def _reasons(binding: Binding, program: Program) -> Iterator[tuple[str, str]]:
    rules = iter(program.plan.combine)
    for index, size in zip(program.written, program.traced.written_sizes, strict=True):
        rule = [next(rules) for _ in range(size)]
        variable, name = binding.variables[index], binding.names[index]
        if Combine.MEAN in rule:
            yield _STATISTICS, name
        if isinstance(variable, nnx.RngCount):
            owner, _, _ = name.rpartition(".")
            if draws_its_own(variable, _node(binding, owner)):
                yield _RANDOM, name


def _node(binding: Binding, owner: str) -> Any:
    """Finds a node by its path."""
    nodes = zip(binding.node_names, binding.nodes, strict=True)
    return next((ref() for name, ref in nodes if name == owner), None)
