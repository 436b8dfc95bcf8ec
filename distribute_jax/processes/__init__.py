"""The processes of one job: how they start, meet, wait, notice what is wrong, and end.

``_start`` connects them after a roll call (``_roll_call`` on process 0, ``_answer_roll`` on the others);
``_job`` is who they are and how they talk, on the key-value store of the coordination service
(``_store``), never on the devices; ``_pulse`` says where this process is, ``_watchdog`` sees to it that
nobody waits for ever, and ``_end`` ends the process in order.
"""

from typing import TYPE_CHECKING

from distribute_jax._later import load_later
from distribute_jax.processes._found import (
    checked_cluster_options as checked_cluster_options,
    found_resolver as found_resolver,
)
from distribute_jax.processes._job import (
    Job as Job,
    checked_barrier as checked_barrier,
    is_chief as is_chief,
    job as job,
)
from distribute_jax.processes._notes import roll_call as roll_call
from distribute_jax.processes._options import ClusterOptions as ClusterOptions
from distribute_jax.processes._pulse import (
    COMPILING as COMPILING,
    RESTORING as RESTORING,
    doing as doing,
    pulse as pulse,
    stepped as stepped,
)

# What only a job of several processes needs.
if TYPE_CHECKING:
    from distribute_jax.processes._preemption import Preemption as Preemption
    from distribute_jax.processes._start import start as start
else:
    __getattr__ = load_later(globals(), {"_preemption": ("Preemption",), "_start": ("start",)})
