"""``strategy.create``: state is made where it is stored, so that no device holds the whole model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.extend.core as jex_core
from flax import nnx

from distribute_jax._errors import ArgumentError, ProcessesDifferError
from distribute_jax._messages import error_text
from distribute_jax.processes import job_of
from distribute_jax.program import Replicas, modules_of

M = TypeVar("M")


def create(make: Callable[[], M], replicas: Replicas) -> M:
    """Makes modules whose arrays are computed in one program that leaves each in its place."""
    parts: list[Any] = []

    def leaves() -> list[Any]:
        made = make()
        graph, state = nnx.split(made)
        roots = modules_of(made)
        flat, tree = jax.tree.flatten(state)
        pairs = jax.tree.leaves_with_path(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
        keys = [tuple(key.key for key in path) for path, _ in pairs]
        # Paths are those inside a module, whatever holds the modules.
        paths = [next(path[i:] for i in range(len(path) + 1) if path[:i] in roots) for path in keys]
        wanted = replicas.placement.shardings([variable for _, variable in pairs], lambda: paths)
        parts[:] = graph, tree, [to or replicas.state for to in wanted]
        return flat

    try:
        closed = jax.make_jaxpr(leaves)()
    except jax.errors.JAXTypeError as error:
        raise ArgumentError(_NOT_TRACED.format(reason=error_text(error))) from error
    graph, tree, shardings = parts
    lowered = jax.jit(jex_core.jaxpr_as_fun(closed), out_shardings=shardings).lower()
    _check_same(lowered, replicas)
    made: M = nnx.merge(graph, jax.tree.unflatten(tree, lowered.compile()()))
    return made


def _check_same(lowered: Any, replicas: Replicas) -> None:
    """Refuses processes that would each make another model, of which each would keep its part."""
    job = job_of(replicas.mesh)
    if job.is_alone:
        return
    digest = hashlib.sha256(lowered.as_text().encode()).hexdigest()
    if len(set(job.exchange("strategy.create", digest))) > 1:
        raise ProcessesDifferError(
            "The processes of the job make different models in strategy.create. Build the same model in "
            "every process, from the same seed, for example nnx.Rngs(0)."
        )


_NOT_TRACED = """\
strategy.create computes all state in one compiled program, and the function that makes the model reads \
numbers that are only known when it runs: {reason}
Make arrays with jax.numpy and nnx.Rngs, or make the model under strategy.scope(), whole on each device."""
