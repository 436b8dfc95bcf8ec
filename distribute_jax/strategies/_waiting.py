"""What the strategy itself computes with all processes: whoever does not come is named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jax.sharding import Mesh

from distribute_jax._errors import DeadlineExceededError, StepFailedError
from distribute_jax._mesh import is_local
from distribute_jax._tree import error_text
from distribute_jax.processes import doing, roll_call
from distribute_jax.program import is_runtime_failure


@contextmanager
def with_all_processes(caller: str, mesh: Mesh) -> Iterator[None]:
    """For a ``with`` block that computes over the replicas of all processes.

    Args:
        caller: what the user called.
        mesh: the strategy's.

    Raises:
        DeadlineExceededError: a process has not come in time; the message says where each is.
        StepFailedError: it failed otherwise, such as with a process that is gone.
    """
    if is_local(mesh):
        yield
        return
    try:
        with doing(f"waiting for all processes at {caller}"):
            yield
    except Exception as error:
        if not (is_runtime_failure(error) or isinstance(error, StepFailedError)):
            raise
        reason = error_text(error.__cause__ or error)
        is_late = "timed out" in reason.lower() or "DEADLINE_EXCEEDED" in reason
        kind = DeadlineExceededError if is_late else StepFailedError
        raise kind(
            f"{caller} failed, which all processes have to call together, in the same order: "
            f"{reason}{roll_call()}"
        ) from error
