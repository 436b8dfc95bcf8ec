"""The options of ``strategy.run``."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from distribute_jax._checks import check_choice, refuse

Lowering = Literal["shard_map", "pmap"]
Verify = Literal["off", "auto", "first", "always"]

_ENVIRONMENT_VARIABLE = "DISTRIBUTE_JAX_VERIFY"


def _from_environment() -> Verify:
    value = os.environ.get(_ENVIRONMENT_VARIABLE) or "auto"
    check_choice(_ENVIRONMENT_VARIABLE, value, get_args(Verify))
    return cast("Verify", value)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How ``strategy.run`` compiles and checks a step.

    By default it proves that the replicas stay in sync, compares the first call of a training step with one
    device, and updates state in place.

    Example:
        >>> import distribute_jax as dj
        >>> dj.RunOptions(verify="first").check_sync
        True

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/RunOptions
    """

    lowering: Lowering = "shard_map"
    """The JAX transformation that the step is compiled with. ``"pmap"`` is for comparison: it donates
    nothing, and supports neither replicas of several cores nor sharded optimizer state."""
    check_sync: bool = True
    """Prove, when the step is traced, that it leaves state equal on all replicas; False trusts the step."""
    verify: Verify = field(default_factory=_from_environment)
    """When to run the step also on one device with the whole batch, from a copy of the state, and raise if
    the two differ by more than rounding. ``"auto"``, the default: at the first call, and the first with a
    partial batch unless the loss is by ``compute_average_loss``, if the step trains a model of less than
    256 MiB. Masks of dropout are then equal on all replicas; if the step draws other
    random numbers or keeps statistics of each replica's share, all get the examples of the first one. Only
    the new state is compared, and a step that cannot be compared is skipped silently. ``"first"`` and
    ``"always"``: at the first call or at every call, results included; also raises if the step cannot be
    compared, or if the replicas' copies of a value that is assumed to be mirrored, as by
    ``dj.assume_mirrored``, differ in any bit. ``"off"``: never. The environment variable
    ``DISTRIBUTE_JAX_VERIFY`` sets another default."""
    donate_state: bool = True
    """Update variables in place: their arrays from before the call are donated, and those that something
    else refers to are copied first, so that it can still read them."""
    donate_args: bool = False
    """Also donate the mirrored arrays among the arguments, such as those of a ``TrainState``."""

    def __post_init__(self) -> None:
        check_choice("RunOptions(lowering)", self.lowering, get_args(Lowering))
        check_choice("RunOptions(verify)", self.verify, get_args(Verify))


UNVERIFIED = RunOptions(verify="off")
"""The options of steps that are never compared."""


@functools.cache
def default_run_options() -> RunOptions:
    """Returns the default options; the environment is read once."""
    return RunOptions()


def library_options(verify: Verify | None = None) -> RunOptions:
    """Returns the options of the library's own steps, an object by which they are recognised.

    They are compared with one device only if the caller or the environment says so.
    """
    verify = verify or default_run_options().verify
    return UNVERIFIED if verify in ("auto", "off") else _verifying(verify)


@functools.cache
def _verifying(verify: Verify) -> RunOptions:
    return RunOptions(verify=verify)


def are_of_library(options: RunOptions) -> bool:
    """True for options that ``library_options`` returned."""
    return options is library_options(options.verify)


def checked_run_options(options: RunOptions | None) -> RunOptions:
    """Returns the options of a call; for None the default, which is always the identical object."""
    if options is None:
        return default_run_options()
    if not isinstance(options, RunOptions):
        refuse("strategy.run: options", "None or dj.RunOptions(...)", options)
    return options
