"""How ``run`` compiles and checks a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from distribute_jax._errors import ArgumentError

Lowering = Literal["shard_map", "vmap", "pmap"]
Verify = Literal["first", "always"]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How ``strategy.run`` compiles and checks a step.

    The defaults prove that the replicas stay in sync and update state in place, at the cost of a
    hand-written step.

    Example:
        >>> import distribute_jax as dj
        >>> dj.RunOptions(verify="first").check_sync
        True

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/RunOptions
    """

    __module__ = "distribute_jax"

    lowering: Lowering = "shard_map"
    """What the traced step is compiled through. ``"vmap"`` runs it as a ``vmap`` over the replicas in
    one program that XLA partitions, and keeps state sharded where it lies sharded over ``"data"``; it
    refuses by name the few operations that JAX cannot batch. ``"pmap"`` is for comparison, and gives
    away no array."""
    check_sync: bool = True
    """Prove when the step is traced that state ends equal on all replicas; False trusts the step."""
    verify: Verify | None = None
    """``"first"`` or ``"always"``: also run the step on one device with the whole batch, from a copy
    of the state, and raise where state or results differ by more than rounding, or where the replicas'
    copies of what is taken for mirrored, as by ``dj.assume_mirrored``, differ in any bit."""
    donate_state: bool = True
    """Update variables in place: the arrays they held before the call are given to it."""
    donate_args: bool = False
    """Also give away the arrays among the arguments that came in mirrored, as a ``TrainState``."""

    def __post_init__(self) -> None:
        """Refuses values that no lowering or check has."""
        if self.lowering not in get_args(Lowering):
            raise ArgumentError(
                f"RunOptions(lowering={self.lowering!r}) is not one of 'shard_map', 'vmap', 'pmap'."
            )
        if self.verify is not None and self.verify not in get_args(Verify):
            raise ArgumentError(
                f"RunOptions(verify={self.verify!r}) is not one of None, 'first', 'always'."
            )


_DEFAULT = RunOptions()


def checked_run_options(options: Any) -> RunOptions:
    """Gives the options of a call, the same defaults each time for None, or raises for another object."""
    if options is None:
        return _DEFAULT
    if not isinstance(options, RunOptions):
        raise ArgumentError(
            f"strategy.run(options={options!r:.80}): options must be None or dj.RunOptions(...), such as "
            'options=dj.RunOptions(verify="first").'
        )
    return options
