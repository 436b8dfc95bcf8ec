"""Steps that are undone: where a guard refuses a step, all state stays as it was, on every replica."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from distribute_jax import _frames
from distribute_jax._errors import StepsSkippedError
from distribute_jax._mesh import on_host, outside_mesh, put
from distribute_jax.processes import is_chief

STEPS, SKIPPED, ROW, REPLICA, LAST, SOUND = range(6)
"""What the counts of a guard are, in this order."""

BEHIND = 4
"""Dispatches after which the counts are looked at: the devices have computed them by then, or soon."""

_TOO_MANY = """\
{row} steps in a row were skipped, and at most {most} may be. Of the last, step {step} counted from 0, \
{what}. None of them changed anything: the state is as before the first of them. Look at the batches, \
lower the learning rate, or clip the gradients: clip_global_norm=1.0."""

_SKIPPED = (
    "Step {step} was skipped: {what}. It changed nothing; more than {most} in a row are an error."
)
_SEEN = "At step {step} {what}."

_log = logging.getLogger("distribute_jax")


class Unconditional(nnx.OptState):
    """State that a step changes even where it is undone."""


class StepCounts(Unconditional):
    """The counts of a guard, the same on all replicas.

    They are the steps, those that were skipped, how many of these in a row, the replica that was to blame
    for the last (-1 for none), its number, and whether the step that runs is sound so far. Metadata are
    ``what`` is wrong with a step, and how many may be skipped in a row: ``most``.
    """


class Guard(nnx.Module):
    """Decides on each step whether it changes state; after ``most`` in a row that do not, none does."""

    def __init__(self, what: str, most: int | None) -> None:
        first = jnp.array([0, 0, 0, -1, -1, 1], jnp.int32)
        self.counts = StepCounts(first, what=what, most=most)

    def judge(self, sound: jax.Array, replica: Any = -1) -> jax.Array:
        """Counts a step, and returns whether it may change state; inside ``run`` it is undone if not."""
        old = self.counts[...]
        most = self.counts.most
        stopped = jnp.zeros((), bool) if most is None else old[ROW] > most
        steps, skipped, row, last_replica, last, so_far = old
        good = jnp.stack([steps + 1, skipped, jnp.zeros_like(row), last_replica, last, so_far])
        replica = jnp.asarray(replica, old.dtype)
        bad = jnp.stack(
            [steps + 1, skipped + 1, row + 1, replica, steps, jnp.where(most is None, so_far, 0)]
        )
        stays = old * jnp.array([1, 1, 1, 1, 1, 0], old.dtype)
        self.counts[...] = jnp.where(stopped, stays, jnp.where(sound, good, bad))
        return sound & ~stopped

    @property
    def skipped(self) -> int:
        """How many steps were skipped."""
        return int(on_host(self.counts.get_raw_value())[SKIPPED])


def first_replica_of(flag: jax.Array) -> tuple[jax.Array, Any]:
    """Returns whether a flag is True on any replica, and the first one where it is."""
    replica = replica_now()
    if replica is None:
        return flag, -1
    return first_of(replica.all_reduce("sum", mark_of(replica, flag, jnp.float32)))


def replica_now() -> Any:
    """Returns the replica context inside ``run``; None elsewhere."""
    frame = _frames.entered()
    return None if frame is None else frame.replica


def mark_of(replica: Any, flag: jax.Array, dtype: Any) -> jax.Array:
    """Returns one number for each replica, which add up to the flags of all of them."""
    replicas = jnp.arange(replica.num_replicas_in_sync)
    return jnp.asarray(flag & (replicas == replica.replica_id_in_sync_group), dtype)


def first_of(marks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns whether any of the marks that were added up is set, and the first one that is, or -1."""
    any_set = jnp.any(marks > 0)
    return any_set, jnp.where(any_set, jnp.argmax(marks > 0), -1)


def begun(old: jax.Array) -> jax.Array:
    """Returns the counts with which a step begins."""
    return old.at[SOUND].set(1)


def if_sound(
    sound: jax.Array, update: Callable[..., Any], keep: Callable[..., Any], old: Any
) -> Any:
    """``lax.cond`` with what the guard of a step judged: ``undone`` need not choose once more.

    An update inside a condition is made in place; one whose result is chosen later needs copies of the
    state, which took a fifth of the time of a small step.
    """

    def update_if_sound(sound: jax.Array, old: Any) -> Any:
        return jax.lax.cond(sound, update, keep, old)

    return jax.jit(update_if_sound)(sound, old)


def updated_if_sound(jaxpr: Any, old: Sequence[int]) -> list[bool]:
    """Returns for each output that is state whether ``if_sound`` chose between it and its ``old`` input."""
    kept = {
        id(new): before
        for eqn in jaxpr.eqns
        if eqn.params.get("name") == "update_if_sound"
        for new, before in zip(eqn.outvars, eqn.invars[-len(eqn.outvars) :], strict=True)
    }
    return [
        kept.get(id(new)) is jaxpr.invars[at] for new, at in zip(jaxpr.outvars, old, strict=False)
    ]


def undone(
    new: Sequence[Any], old: Sequence[Any], kinds: Sequence[type], decided: Sequence[bool]
) -> list[Any]:
    """Returns the state that a step leaves: the old one where a guard among the variables refused it.

    The one guard of a step has ``decided`` on some of it before.
    """
    counts = [x for x, kind in zip(new, kinds, strict=True) if issubclass(kind, StepCounts)]
    if not counts:
        return list(new)
    sound = jnp.stack([x[SOUND] for x in counts]).all()
    return [
        x
        if issubclass(kind, Unconditional) or (done and len(counts) == 1)
        else jnp.where(sound, x, before.astype(x.dtype))
        for x, before, kind, done in zip(new, old, kinds, decided, strict=True)
    ]


def copy_of(counts: StepCounts) -> jax.Array:
    """Returns the counts as they are now, when the devices have them; the next step takes their memory."""
    raw = counts.get_raw_value()
    with outside_mesh():
        copied: jax.Array = _copy(raw.addressable_data(0) if raw.is_fully_replicated else raw)
        return copied


_copy = jax.jit(jnp.copy)


def look(variable: Any, counts: jax.Array, steps: int) -> None:
    """Raises where too many steps in a row were skipped, and says which of so many last ones were."""
    total, _, row, replica, last, _ = map(int, on_host(counts))
    if last < total - steps:
        return
    what = variable.what.format(of=f" of replica {replica}" if replica >= 0 else "")
    if variable.most is not None and row > variable.most:
        raw = variable.get_raw_value()
        kept = on_host(raw).copy()
        kept[ROW] = 0  # who catches the error may go on
        variable.set_raw_value(put(np.asarray(kept), raw.sharding))
        text = _TOO_MANY.format(step=last, what=what, row=row, most=variable.most)
        raise StepsSkippedError(text)
    if is_chief():
        text = _SEEN if variable.most is None else _SKIPPED
        _log.warning(text.format(step=last, what=what, row=row, most=variable.most))
