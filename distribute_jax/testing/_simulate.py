"""Virtual CPU devices, so that every strategy runs on a laptop."""

from __future__ import annotations

import os

import jax

from distribute_jax._errors import ArgumentError, BackendStartedError

_STARTED = """\
dj.simulate({n}) came too late: JAX has already started with {found}. The number of devices is fixed at \
the first use of one. Call dj.simulate({n}) right after the imports, before any array, nnx.Rngs or \
jax.devices() (in a notebook: restart the kernel first), or start Python with
  XLA_FLAGS=--xla_force_host_platform_device_count={n}"""


def simulate(n: int) -> None:
    """Gives this process n virtual CPU devices, also on a machine with a GPU.

    Call it before JAX starts: right after the imports. The devices compute in turns on the cores
    there are, so they show that a program is right, not how fast it is on n real devices. JAX is not
    started by it: in a job of several processes each gets n devices, and meets the others when its
    ``MultiWorkerMirroredStrategy`` is made. Setting
    ``XLA_FLAGS=--xla_force_host_platform_device_count=n`` before Python starts works as well.

    Args:
        n: the number of devices, at least 1.

    Raises:
        ValueError: n is not a positive int.
        RuntimeError: JAX has started already with other devices; the message says what to do.

    Example:
        >>> import distribute_jax as dj
        >>> dj.simulate(8)  # doctest: +SKIP
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ArgumentError(f"dj.simulate({n!r}): the number of devices is an int of at least 1.")
    # On two cores, fewer pool threads than devices let collectives of unread steps deadlock.
    os.environ["NPROC"] = str(max(2 * n, int(os.environ.get("NPROC", "0") or 0)))
    try:
        jax.config.update("jax_num_cpu_devices", n)
        jax.config.update("jax_platforms", "cpu")
    except (
        RuntimeError
    ):  # JAX has started; elsewhere it is left to start later, as processes must meet before
        _check_as_wanted(n)


def _check_as_wanted(n: int) -> None:
    devices = jax.devices()
    if len(devices) != n or devices[0].platform != "cpu":
        kind = devices[0].platform.upper()
        raise BackendStartedError(_STARTED.format(n=n, found=f"{len(devices)} {kind} device(s)"))
