"""Mirrored by check: do the replicas hold the same bits of what the program takes for mirrored?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.extend.core as jex_core

from distribute_jax._errors import OutOfSyncError
from distribute_jax._tree import listed
from distribute_jax.collectives._in_sync import out_of_sync
from distribute_jax.collectives._mirrored import mirrored_p
from distribute_jax.program._entry import Entry
from distribute_jax.program.proof._marks import line

_DIFFER = """\
The step leaves these values, which are taken for the same on every replica, different:
{lines}
{why}
Make them the same with dj.get_replica_context().all_reduce(...), or leave them per replica. The state is \
as before the call."""

_ASSUMED = (
    "Where nothing is declared that is proved; here the step declares it, with dj.assume_mirrored at {at}, "
    "of a value that was not."
)

_UNPROVED = (
    "With RunOptions(check_sync=False) that is not proved. Otherwise the copies of the state differed before "
    "(dj.check_in_sync(model) tells), or a device is faulty."
)


def check_copies(entry: Entry, outs: Sequence[jax.Array]) -> None:
    """Raises where the devices' copies of mirrored state, or of a mirrored result, differ in any bit.

    Args:
        entry: the step.
        outs: all outputs of its program, state first.
    """
    mirrored = zip(entry.output_names(), outs, entry.program.ordered_lies.mirrored, strict=True)
    lines = out_of_sync([(name, array) for name, array, same in mirrored if same])
    if lines:
        at = list(dict.fromkeys(_declared(entry.program.traced.jaxpr.jaxpr)))
        why = _ASSUMED.format(at=" and ".join(at)) if at else _UNPROVED
        raise OutOfSyncError(_DIFFER.format(lines=listed(lines), why=why))


def _declared(jaxpr: jex_core.Jaxpr) -> Iterator[str]:
    """Gives the user's lines that declare a value mirrored."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is mirrored_p:
            yield line(eqn)
    for inner in jex_core.subjaxprs(jaxpr):
        yield from _declared(inner)
