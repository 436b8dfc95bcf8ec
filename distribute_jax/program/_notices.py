"""Steps that cannot equal one device by their nature, or draw alike on all replicas, say so, once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from flax import nnx

from distribute_jax.program._program import Program
from distribute_jax.program.binding._aggregation import Combine
from distribute_jax.program.binding._bind import Binding
from distribute_jax.program.lowering._remarks import Notice
from distribute_jax.program.tracing._random import draws_its_own

_log = logging.getLogger("distribute_jax")

_STATISTICS = (
    "%s (%s) uses the statistics of each replica's share of the batch and averages its running "
    "statistics, so this step is not exactly that of one device. For statistics of the whole batch make "
    'it with axis_name="data".'
)
_MEAN = (
    "%s (%s) ends a step with the mean of what the replicas gave it, each from its share of the batch, so "
    "this step is not exactly that of one device. For the whole batch's, combine in the step what it is "
    'made of: dj.get_replica_context().all_reduce("mean", statistics).'
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
        self._given: set[tuple[str, Any]] = set()

    def give(self, binding: Binding, program: Program) -> None:
        """Names what makes a newly compiled step differ from one device, or its replicas agree."""
        for notice in _notices(binding, program):
            if notice.key not in self._given:
                self._given.add(notice.key)
                _log.warning(notice.text, *notice.named)


def _notices(binding: Binding, program: Program) -> Iterator[Notice]:
    rules = iter(program.plan.combine)
    for index, size in zip(program.written, program.traced.written_sizes, strict=True):
        rule = [next(rules) for _ in range(size)]
        variable, name = binding.variables[index], binding.names[index]
        owner = name.rpartition(".")[0]
        node = _node(binding, owner)
        # A variable may be captured by itself.
        whole, of = (owner, node) if node is not None else (name, variable)
        named = (whole, type(of).__name__)
        if Combine.MEAN in rule:
            yield Notice(_STATISTICS if hasattr(node, "axis_name") else _MEAN, named, of)
        if isinstance(variable, nnx.RngCount) and draws_its_own(variable, node):
            yield Notice(_RANDOM, named, of)
    yield from program.plan.notices


def _node(binding: Binding, owner: str) -> Any:
    """Finds a node by its path."""
    nodes = zip(binding.node_names, binding.nodes, strict=True)
    return next((ref() for name, ref in nodes if name == owner), None)
