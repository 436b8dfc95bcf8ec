"""Options of a distributed dataset."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from distribute_jax._errors import ArgumentError


class PartialPolicy(enum.Enum):
    """What becomes of a batch that does not fill every replica's share.

    Each is also accepted by its lower-case name, for example ``partial="drop"``.
    """

    __module__ = "distribute_jax"

    MASK = "mask"
    """Pad it to the shape of the full batches, and mask the padding: one more program in all."""
    SHRINK = "shrink"
    """Give shares of ceil(n / N), padded only where N does not divide n: one program per size."""
    DROP = "drop"
    """Skip it, so that every element has the same shape and no padding."""
    ERROR = "error"
    """Raise an ArgumentError."""


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """How a strategy's dataset distributes its batches.

    Attributes:
        partial: what becomes of a partial batch, a ``PartialPolicy`` or its lower-case name.

    Raises:
        ArgumentError: a value is none of those allowed.

    Example:
        >>> import distribute_jax as dj
        >>> dj.InputOptions(partial="drop").partial
        <PartialPolicy.DROP: 'drop'>

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/InputOptions
    """

    __module__ = "distribute_jax"

    partial: PartialPolicy | str = PartialPolicy.MASK
    """What becomes of a batch that does not fill every replica's share."""

    def __post_init__(self) -> None:
        """Turns names into members and refuses what is neither."""
        try:
            policy = PartialPolicy(self.partial)
        except ValueError:
            names = ", ".join(repr(policy.value) for policy in PartialPolicy)
            raise ArgumentError(
                f"InputOptions(partial={self.partial!r}): partial must be one of {names}, or a "
                "PartialPolicy. The default, partial='mask', pads partial batches and masks the "
                "padding."
            ) from None
        object.__setattr__(self, "partial", policy)
