"""The processes of one job: how they connect, exchange texts, detect failures, and exit.

``_connect`` connects them after a rendezvous (``_rendezvous``). ``_job`` knows which process this is, and
exchanges texts through the key-value store of JAX's coordination service, never on devices. ``_status``
reports what this process is doing. ``_liveness`` has the heartbeats, the watchdog and an orderly exit,
``_divergence`` detects processes that run different steps, ``_preemption`` agrees on a step to stop at, and
``_signals`` has SIGTERM and exit codes.
"""

from typing import TYPE_CHECKING

from distribute_jax._lazy import lazy_exports
from distribute_jax.processes._job import (
    ClusterOptions as ClusterOptions,
    Job as Job,
    current_job as current_job,
    is_chief as is_chief,
    job_of as job_of,
)
from distribute_jax.processes._liveness import (
    describe_processes as describe_processes,
    naming_other_processes as naming_other_processes,
)
from distribute_jax.processes._status import (
    COMPILING as COMPILING,
    RESTORING as RESTORING,
    SAVING as SAVING,
    activity as activity,
    calling as calling,
    doing as doing,
    report_step as report_step,
    stepped as stepped,
)

# What only a job of several processes needs.
if TYPE_CHECKING:
    from distribute_jax.processes._connect import connect as connect
    from distribute_jax.processes._preemption import Preemption as Preemption
else:
    __getattr__ = lazy_exports(
        globals(), {"_preemption": ("Preemption",), "_connect": ("connect",)}
    )
