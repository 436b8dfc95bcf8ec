"""The processes of a job start from the same values: those of process 0."""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from distribute_jax._errors import ProcessesDifferError
from distribute_jax._internals import read_raw, write_raw
from distribute_jax._mesh import is_local, mirrored_sharding, put
from distribute_jax._tree import is_key
from distribute_jax._warn import warn_user
from distribute_jax.processes import Job, is_chief, job
from distribute_jax.program.binding._aggregation import keeps_own_values
from distribute_jax.program.binding._bind import Binding


def agree_on_values(step: str, binding: Binding, mesh: Mesh) -> None:
    """Gives mirrored variables the values that process 0 has where they differ, with one warning.

    Two processes that seed differently build arrays that JAX takes for equal. Components that the
    replicas keep for themselves may differ, and what is divided among the replicas was compared before it
    was divided, or has no other copy. It is done each time that objects are bound to a step, since
    every process has to know, without talking, that the others do it too.
    """
    found = job()
    if found is None or is_local(mesh):
        return
    new = [
        (variable, name)
        for variable, name in zip(binding.variables, binding.names, strict=True)
        if not keeps_own_values(variable) and not _is_divided(variable)
    ]
    leaves = [jax.tree.leaves(raw) for raw in read_raw(variable for variable, _ in new)]
    digests = [
        f"{name} {_kind(of_variable)} {_digest(of_variable)}"
        for (_, name), of_variable in zip(new, leaves, strict=True)
    ]
    differing = _differing(found, digests, f"the first run of step {step}")
    if differing:
        _take_over([new[i][0] for i in differing], mesh)
        if is_chief():
            warn_user(_DIFFER.format(n=len(differing), name=new[differing[0]][1]))


def _is_divided(variable: nnx.Variable[Any]) -> bool:
    leaves = jax.tree.leaves(variable.get_raw_value())
    return any(isinstance(x, jax.Array) and not x.sharding.is_fully_replicated for x in leaves)


def _differing(found: Job, digests: list[str], place: str) -> list[int]:
    total = hashlib.sha256("".join(digests).encode()).hexdigest()
    if len(set(found.exchange("initial values", total, place=place))) == 1:
        return []
    said = [json.loads(one) for one in found.exchange("each initial value", json.dumps(digests))]
    _check_same_variables(said)
    return [i for i, of_variable in enumerate(zip(*said, strict=True)) if len(set(of_variable)) > 1]


def _check_same_variables(said: list[list[str]]) -> None:
    """Refuses models that differ in more than their values: their arrays could not even be sent."""
    for process, theirs in enumerate(said):
        for first, other in itertools.zip_longest(said[0], theirs, fillvalue="nothing "):
            if first.rpartition(" ")[0] != other.rpartition(" ")[0]:
                raise ProcessesDifferError(
                    "The processes of the job run a step with different variables:\n"
                    f"  {first.rpartition(' ')[0]} on process 0\n"
                    f"  {other.rpartition(' ')[0]} on process {process}\n"
                    "Build the same model and optimizer in every process."
                )


def _kind(leaves: list[Any]) -> str:
    return ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)


def _digest(leaves: list[Any]) -> str:
    total = hashlib.sha256()
    for leaf in leaves:
        total.update(_on_host(leaf).tobytes())
    return total.hexdigest()


def _on_host(leaf: Any) -> np.ndarray[Any, Any]:
    mine = leaf.addressable_data(0) if isinstance(leaf, jax.Array) else leaf
    return np.asarray(jax.random.key_data(mine) if is_key(mine) else mine)


def _take_over(variables: list[nnx.Variable[Any]], mesh: Mesh) -> None:
    to = mirrored_sharding(mesh)

    def take(leaf: Any) -> Any:
        value = jnp.asarray(np.asarray(multihost_utils.broadcast_one_to_all(_on_host(leaf))))
        if is_key(leaf):
            return put(jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf)), to)
        return put(value, to)

    raws = read_raw(variables)
    write_raw(variables, [jax.tree.map(take, raw) for raw in raws])


_DIFFER = """\
{n} variables did not have the same values on all processes, the first of them {name}. They now have \
those of process 0. Give every process the same seed, for example nnx.Rngs(0)."""
