"""The processes of one job: how they start, meet, wait, notice what is wrong, and end.

``_connect`` connects them after a rendezvous (``_rendezvous``); ``_job`` is which process this is and how
they exchange text, on the key-value store of the coordination service, never on the devices;
``_status`` is what this process is doing; ``_liveness`` bounds every wait, and ends the process in order.
"""

from typing import TYPE_CHECKING

from distribute_jax._lazy import lazy_exports
from distribute_jax.processes._job import (
    ClusterOptions as ClusterOptions,
    Job as Job,
    check_barrier as check_barrier,
    current_job as current_job,
    is_chief as is_chief,
    job_of as job_of,
)
from distribute_jax.processes._liveness import describe_processes as describe_processes
from distribute_jax.processes._status import (
    COMPILING as COMPILING,
    RESTORING as RESTORING,
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
