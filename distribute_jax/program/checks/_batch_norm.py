"""Batch norm on partial batches: Flax weighs the replicas alike, however many examples each has."""

from __future__ import annotations

from collections.abc import Sequence

from flax import nnx

from distribute_jax._errors import PaddingLeakError
from distribute_jax._tree import listed
from distribute_jax.program._entry import Entry

_UNEVEN = """\
The step updates the statistics of a batch norm from a partial batch whose replicas have {counts} real \
examples:
{lines}
nnx.BatchNorm averages the replicas as if each had the same number, also with mask=, and gives NaN where one \
has none, so the statistics would not be those of one device. The state is as before the call.
{cure}"""

CURE = (
    'Feed no partial batches to a step that trains: InputOptions(partial="drop"); or normalise by the '
    "running statistics: model.eval(), or BatchNorm(..., use_running_average=True)."
)


def check_batch_norms(entry: Entry, counts: Sequence[int]) -> None:
    """Refuses to update statistics from shares of different length.

    Raises:
        PaddingLeakError: names each ``nnx.BatchNorm`` whose statistics the step writes.
    """
    if len(set(counts)) == 1:
        return
    lines = written_batch_norms(entry)
    if lines:
        raise PaddingLeakError(_UNEVEN.format(counts=list(counts), lines=listed(lines), cure=CURE))


def written_batch_norms(entry: Entry) -> list[str]:
    """Names the batch norms whose statistics a step writes, and these statistics."""
    written = {id(variable) for variable in entry.outputs if isinstance(variable, nnx.BatchStat)}
    if not written:
        return []
    names = dict(zip(map(id, entry.binding.variables), entry.binding.names, strict=True))
    found = []
    for path, ref in zip(entry.binding.node_names, entry.binding.nodes, strict=True):
        node = ref()
        parts = [v for v in vars(node).values() if id(v) in written] if _is_norm(node) else []
        if parts:
            statistics = ", ".join(names[id(part)] for part in parts)
            found.append(f"{path} (BatchNorm): {statistics}")
    return found


def _is_norm(node: object) -> bool:
    return isinstance(node, nnx.BatchNorm)
