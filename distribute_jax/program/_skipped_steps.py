"""Skipped steps: if a guard refuses a step, as for NaN gradients, all state keeps its old value."""

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
"""The indices of the counts of a guard."""

CHECK_DELAY = 4
"""The number of dispatches after which counts are read, so that reading them need not wait for a device."""

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
    """State that changes even in a skipped step."""


class StepCounts(Unconditional):
    """The counts of a guard, mirrored.

    They are the number of steps, of skipped steps, and of those that were skipped in a row; the replica that
    caused the last skipped step (-1 for none) and the number of that step; and whether the current step is
    sound so far. The metadata are ``what`` is wrong with a skipped step, and ``most``, how many may be
    skipped in a row.
    """


class Guard(nnx.Module):
    """Decides whether a step changes state; once more than ``most`` in a row were skipped, all are."""

    def __init__(self, what: str, most: int | None) -> None:
        self.counts = StepCounts(jnp.array([0, 0, 0, -1, -1, 1], jnp.int32), what=what, most=most)

    def judge(self, sound: jax.Array, replica: Any = -1) -> jax.Array:
        """Counts a step and returns whether it may change state; if not, ``run`` keeps the old state."""
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
        """The number of skipped steps."""
        return int(on_host(self.counts.get_raw_value())[SKIPPED])


def first_flagged_replica(flag: jax.Array) -> tuple[jax.Array, Any]:
    """Returns whether a flag is True on any replica, and the first such replica."""
    replica = current_replica()
    if replica is None:
        return flag, -1
    return first_marked(replica.all_reduce("sum", one_hot_flag(replica, flag, jnp.float32)))


def current_replica() -> Any:
    """Returns the replica context inside ``run``, else None."""
    frame = _frames.entered()
    return None if frame is None else frame.replica


def one_hot_flag(replica: Any, flag: jax.Array, dtype: Any) -> jax.Array:
    """Returns this replica's flag in a row for all replicas, so that a sum contains the flags of all."""
    replicas = jnp.arange(replica.num_replicas_in_sync)
    return jnp.asarray(flag & (replicas == replica.replica_id_in_sync_group), dtype)


def first_marked(marks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns whether any flag is set in a sum of ``one_hot_flag``, and the first replica, or -1."""
    any_set = jnp.any(marks > 0)
    return any_set, jnp.where(any_set, jnp.argmax(marks > 0), -1)


def counts_at_start(old: jax.Array) -> jax.Array:
    """Returns the counts at the start of a step, which is sound until a guard refuses it."""
    return old.at[SOUND].set(1)


def cond_if_sound(
    sound: jax.Array, update: Callable[..., Any], keep: Callable[..., Any], old: Any
) -> Any:
    """Runs ``lax.cond`` on the verdict of a guard, so that ``keep_old_if_unsound`` need not select again.

    An update inside a ``cond`` is made in place, while a select after it needs copies of the state, which
    took a fifth of the time of a small step.
    """

    def update_if_sound(sound: jax.Array, old: Any) -> Any:
        return jax.lax.cond(sound, update, keep, old)

    return jax.jit(update_if_sound)(sound, old)


def chosen_by_cond(jaxpr: Any, old: Sequence[int]) -> list[bool]:
    """Returns for each state output whether ``cond_if_sound`` selected between it and its ``old`` input."""
    selected = {
        id(new): before
        for eqn in jaxpr.eqns
        if eqn.params.get("name") == "update_if_sound"
        for new, before in zip(eqn.outvars, eqn.invars[-len(eqn.outvars) :], strict=True)
    }
    return [
        selected.get(id(new)) is jaxpr.invars[at]
        for new, at in zip(jaxpr.outvars, old, strict=False)
    ]


def keep_old_if_unsound(
    new: Sequence[Any], old: Sequence[Any], kinds: Sequence[type], selected: Sequence[bool]
) -> list[Any]:
    """Returns the state after a step: the old one if a guard among the variables refused the step.

    Where the step has one guard only, values that it ``selected`` before are right already.
    """
    counts = [x for x, kind in zip(new, kinds, strict=True) if issubclass(kind, StepCounts)]
    if not counts:
        return list(new)
    sound = jnp.stack([x[SOUND] for x in counts]).all()
    return [
        x
        if issubclass(kind, Unconditional) or (done and len(counts) == 1)
        else jnp.where(sound, x, before.astype(x.dtype))
        for x, before, kind, done in zip(new, old, kinds, selected, strict=True)
    ]


def copy_counts(counts: StepCounts) -> jax.Array:
    """Returns a copy of the counts, without waiting for it; the next step donates the counts."""
    raw = counts.get_raw_value()
    with outside_mesh():
        copied: jax.Array = _copy(raw.addressable_data(0) if raw.is_fully_replicated else raw)
        return copied


_copy = jax.jit(jnp.copy)


def check_counts(variable: Any, counts: jax.Array, steps: int) -> None:
    """Raises if too many steps in a row were skipped; logs a step that was, if it is one of the last."""
    total, _, row, replica, last, _ = map(int, on_host(counts))
    if last < total - steps:
        return
    what = variable.what.format(of=f" of replica {replica}" if replica >= 0 else "")
    if variable.most is not None and row > variable.most:
        raw = variable.get_raw_value()
        reset = on_host(raw).copy()
        reset[ROW] = 0  # a program that catches the error may go on
        variable.set_raw_value(put(np.asarray(reset), raw.sharding))
        text = _TOO_MANY.format(step=last, what=what, row=row, most=variable.most)
        raise StepsSkippedError(text)
    if is_chief():
        text = _SEEN if variable.most is None else _SKIPPED
        _log.warning(text.format(step=last, what=what, row=row, most=variable.most))
