"""What each process of a ``LocalCluster`` runs, and how functions and values get there and back."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._errors import ArgumentError, ArgumentTypeError
from distribute_jax._messages import is_key
from distribute_jax._supervision import MEETING, PROCESS_ID
from distribute_jax.processes import current_job
from distribute_jax.processes._status import status_writer
from distribute_jax.testing._fault import START, Fault, Injector

CALL = "call.npz"
STACKS = signal.SIGURG
"""The signal at which a process prints the stacks of its threads; before it listens, nothing happens."""


def result_file(meeting: Path, process: int) -> Path:
    """Returns the file in which a process leaves what its function returned."""
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
        if not current_job().is_alone:
            raise  # the job tells the others, and leaves
        traceback.print_exc()
        status_writer().error("".join(traceback.format_exception_only(error)).strip())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _call(meeting: Path, process: int) -> None:
    call = read(meeting / CALL)
    faults = [Fault(**fields) for fields in call["faults"]]
    status_writer().listen(Injector(fault for fault in faults if fault.process == process))
    status_writer().phase(START)
    function = import_function(*call["function"])
    status_writer().phase("")
    value = function(*call["arguments"])
    root = f"what {call['function'][-1]} returned in process {process}"
    write(result_file(meeting, process), value, root)


_RULE = (
    "Between the processes go None, bool, int, float, str, NumPy and JAX arrays, and lists, tuples and dicts "
    "with keys of type str of these."
)
_TEXT = "json"


def write(path: Path, value: Any, root: str) -> None:
    """Writes a value into a file that nobody sees half written.

    Args:
        path: the file; the name ends in ``.npz``.
        value: plain data.
        root: how messages name the value.

    Raises:
        ArgumentTypeError: something in it is not plain data; the message says where.
    """
    arrays: dict[str, np.ndarray] = {}
    text = json.dumps(_encoded(value, root, arrays))
    part = path.with_name(f".part-{path.name}")
    arrays[_TEXT] = np.frombuffer(text.encode(), np.uint8)
    np.savez(part, allow_pickle=False, **arrays)
    part.replace(path)


def read(path: Path) -> Any:
    """Reads what ``write`` wrote; arrays are NumPy arrays."""
    with np.load(path, allow_pickle=False) as file:
        return _decoded(json.loads(file[_TEXT].tobytes()), file)


def _encoded(value: Any, where: str, arrays: dict[str, np.ndarray]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is tuple:
        return {"tuple": _encoded([*value], where, arrays)}
    if type(value) is list:
        return [_encoded(item, f"{where}[{i}]", arrays) for i, item in enumerate(value)]
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {k: _encoded(v, f"{where}[{k!r}]", arrays) for k, v in value.items()}}
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return _encoded_array(value, where, arrays)
    raise ArgumentTypeError(f"{where} is {value!r:.80} of type {type(value).__name__}. {_RULE}")


def _encoded_array(value: Any, where: str, arrays: dict[str, np.ndarray]) -> Any:
    if is_key(value):
        raise ArgumentTypeError(f"{where} holds random keys. Return jax.random.key_data of it.")
    if isinstance(value, jax.Array) and not (
        value.is_fully_addressable or value.is_fully_replicated
    ):
        raise ArgumentTypeError(
            f"{where} is an array of which other processes hold a part. Return the part of this process, "
            "[shard.data for shard in array.addressable_shards], or gather it first."
        )
    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.names:
        raise ArgumentTypeError(f"{where} is an array of dtype {array.dtype}. {_RULE}")
    name = str(len(arrays))
    # As bytes, since NumPy's files do not know JAX's own types, such as bfloat16.
    arrays[name] = np.frombuffer(array.tobytes(), np.uint8)
    return {
        "array": name,
        "dtype": array.dtype.name if array.dtype.kind == "V" else array.dtype.str,
        "shape": list(array.shape),
        "scalar": isinstance(value, np.generic),
    }


def _decoded(coded: Any, arrays: Any) -> Any:
    if isinstance(coded, list):
        return [_decoded(item, arrays) for item in coded]
    if not isinstance(coded, dict):
        return coded
    if "tuple" in coded:
        return tuple(_decoded(coded["tuple"], arrays))
    if "dict" in coded:
        return {key: _decoded(value, arrays) for key, value in coded["dict"].items()}
    flat = np.frombuffer(arrays[coded["array"]].tobytes(), jnp.dtype(coded["dtype"]))
    array = flat.reshape(coded["shape"]).copy()
    return array[()] if coded["scalar"] else array


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
