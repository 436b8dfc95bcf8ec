"""What each process of a ``LocalCluster`` runs."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
from pathlib import Path

from distribute_jax.cluster._launched import MEETING, PROCESS_ID
from distribute_jax.cluster._status import own_status
from distribute_jax.processes import job
from distribute_jax.testing import _plain_data
from distribute_jax.testing._fault import START, Fault, Injector
from distribute_jax.testing._function_name import found_by

CALL = "call.npz"
STACKS = signal.SIGURG
"""The signal at which a process prints the stacks of its threads; before it listens, nothing happens."""


def result_file(meeting: Path, process: int) -> Path:
    """Gives the file in which a process leaves what its function returned."""
    return meeting / f"result-{process}.npz"


def main() -> None:
    """Calls the function, and leaves its value in a file.

    An exception ends the process at once: where JAX alone has connected the processes, an ordinary exit
    would wait for the others, at its barrier.
    """
    faulthandler.enable()
    faulthandler.register(STACKS, all_threads=True)
    try:
        _call(Path(os.environ[MEETING]), int(os.environ[PROCESS_ID]))
    except Exception as error:
        if job() is not None:
            raise  # the job tells the others, and leaves
        traceback.print_exc()
        own_status().error("".join(traceback.format_exception_only(error)).strip())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _call(meeting: Path, process: int) -> None:
    call = _plain_data.read(meeting / CALL)
    faults = [Fault(**fields) for fields in call["faults"]]
    own_status().listen(Injector(fault for fault in faults if fault.process == process))
    own_status().phase(START)
    function = found_by(*call["function"])
    own_status().phase("")
    value = function(*call["arguments"])
    root = f"what {call['function'][-1]} returned in process {process}"
    _plain_data.write(result_file(meeting, process), value, root)
