"""What each process of a ``LocalCluster`` runs, and how functions and values get there and back."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import jax
import numpy as np

from distribute_jax._errors import ArgumentError
from distribute_jax._supervision import MEETING, PROCESS_ID
from distribute_jax.processes import current_job
from distribute_jax.processes._status import status_writer
from distribute_jax.testing._fault import START, Injector

CALL = "call.pickle"
STACKS = signal.SIGURG
"""The signal at which a process prints the stacks of its threads; before it listens, nothing happens."""


def result_file(meeting: Path, process: int) -> Path:
    """Returns the file in which a process leaves what its function returned."""
    return meeting / f"result-{process}.pickle"


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
        if not current_job().is_alone:
            raise  # the job tells the others, and leaves
        traceback.print_exc()
        status_writer().error("".join(traceback.format_exception_only(error)).strip())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _call(meeting: Path, process: int) -> None:
    call = read(meeting / CALL)
    faults = [fault for fault in call["faults"] if fault.process == process]
    status_writer().listen(Injector(faults))
    status_writer().phase(START)
    function = import_function(*call["function"])
    status_writer().phase("")
    value = function(*call["arguments"])
    write(result_file(meeting, process), value)


class _Pickler(pickle.Pickler):
    """Copies arrays of JAX as those of NumPy, which start no backend where they are read."""

    def reducer_override(self, value: Any) -> Any:
        return (
            (np.asarray, (np.asarray(value),)) if isinstance(value, jax.Array) else NotImplemented
        )


def write(path: Path, value: Any) -> None:
    """Writes a value into a file that nobody sees half written."""
    part = path.with_name(f".part-{path.name}")
    with part.open("wb") as file:
        _Pickler(file).dump(value)
    part.replace(path)


def read(path: Path) -> Any:
    """Reads what ``write`` wrote."""
    with path.open("rb") as file:
        return pickle.load(file)


_MAIN = "__main__"


def name_of(function: Any) -> tuple[str, str, str]:
    """Returns the module of a function, its file, and the function's name in it.

    Raises:
        ArgumentError: the name does not lead to the function.
    """
    module = getattr(function, "__module__", None) or ""
    name = getattr(function, "__qualname__", None) or ""
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        is_there = reduce(getattr, name.split("."), sys.modules[module]) is function
    except (AttributeError, KeyError):
        is_there = False
    if not is_there or (module == _MAIN and not file):
        raise ArgumentError(
            f"LocalCluster.run({function!r:.80}): the function must be defined at the top level of a module "
            f"or a script, from which the other processes import it; {module}:{name} does not lead to it."
        )
    return module, file or "", name


def import_function(module: str, file: str, name: str) -> Callable[..., Any]:
    """Imports the function that ``name_of`` has named."""
    function: Callable[..., Any] = reduce(getattr, name.split("."), _imported(module, file))
    return function


def _imported(module: str, file: str) -> Any:
    if module != _MAIN:
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module or not file:
                raise
    # Not as __main__, so that the part of the script that starts the cluster does not run again.
    name = "__cluster_main__" if module == _MAIN else module
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"no module can be loaded from {file}")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    spec.loader.exec_module(loaded)
    return loaded
