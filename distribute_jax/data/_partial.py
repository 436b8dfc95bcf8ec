"""The partial-batch policies: from the size of a batch to its shares, or None."""

from __future__ import annotations

import warnings

from distribute_jax._errors import ArgumentError
from distribute_jax.data._options import PartialPolicy
from distribute_jax.data._split import Division, divide, share_of

_REMEDIES = (
    "Choose a global batch size that the number of replicas divides, or pass "
    "InputOptions(partial='mask') to strategy.distribute_dataset, which pads such batches and "
    "masks the padding."
)


class Divider:
    """Lays out the batches of one iteration; what it has seen decides what a full batch is."""

    def __init__(self, policy: PartialPolicy, replicas: int) -> None:
        self._policy = policy
        self._replicas = replicas
        self._first = 0
        self._largest = 0

    def divide(self, n: int, where: str) -> Division | None:
        """Lays out the batch of n examples or gives None where it is skipped."""
        if n == 0 and self._policy is not PartialPolicy.ERROR:
            return None
        is_first = self._first == 0
        self._first = self._first or n
        self._largest = max(self._largest, n)
        if self._policy is PartialPolicy.MASK:
            return divide(n, self._replicas, share_of(self._largest, self._replicas))
        if self._policy is PartialPolicy.SHRINK:
            return divide(n, self._replicas, share_of(n, self._replicas))
        if n > 0 and n >= self._first and n % self._replicas == 0:
            return divide(n, self._replicas, n // self._replicas)
        self._refuse(n, where, is_first)
        return None

    def _refuse(self, n: int, where: str, is_first: bool) -> None:
        name = self._policy.value
        what = f"{where} has {n} examples for {self._replicas} replicas"
        if self._policy is PartialPolicy.DROP:
            if is_first:
                raise ArgumentError(
                    f"{what}, and with partial={name!r} a batch that does not divide is skipped: "
                    f"this first batch is the measure, so no batch would be left.\n{_REMEDIES}"
                )
            return
        full = f", and the first batch has {self._first}" if self._first != n else ""
        raise ArgumentError(
            f"{what}{full}. With partial={name!r} every batch must be as large as the first one "
            f"and divide evenly.\n{_REMEDIES}"
        )


def warn_of_idle_replicas(n: int, replicas: int, stacklevel: int) -> None:
    """Warns that a full batch leaves replicas without any example."""
    warnings.warn(
        f"The global batch has {n} examples for {replicas} replicas, so {replicas - n} of them get "
        "only padding and their work is lost. distribute_dataset takes global batches: batch with "
        f"at least {replicas}, for example replicas × the batch size of one replica, or use fewer "
        "devices.",
        stacklevel=stacklevel + 1,
    )
