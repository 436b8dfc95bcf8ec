"""``LocalCluster``: real processes on this machine, and ``Fault``: failures injected into one."""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import importlib
import importlib.util
import multiprocessing  # noqa: F401  # calls the main program __mp_main__ too
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from distribute_jax._checks import check_choice, check_int, check_number, converting, refuse
from distribute_jax._errors import ArgumentError, ArgumentTypeError, ProcessFailedError
from distribute_jax._supervision import JOB_FOLDER, PROCESS_ID, read_status
from distribute_jax.launch._process import ChildProcess, ProcessGroup, ProcessSpec, Sink
from distribute_jax.launch._supervisor import PREFIX, LocalJob
from distribute_jax.launch._verdict import signal_name
from distribute_jax.processes import current_job
from distribute_jax.processes._status import status_writer

START = "start"
"""The phase in which each process begins, before the module of its function is imported."""

_FOREVER_SECONDS = 1e6


@dataclass(frozen=True)
class Fault:
    """A failure that is injected once into one process of a ``LocalCluster``.

    It happens when the process reaches a step or a phase: strategies and loops of this library report
    them; in your own loop call ``dj.report_step(n)``. Each process begins in the phase ``"start"``, before
    the module of the function is imported.

    Args:
        kind: what happens:
            ``"kill"``: SIGKILL, as by the kernel when memory runs out;
            ``"terminate"``: SIGTERM, as before a preemption;
            ``"stop"``: SIGSTOP, forever or for some seconds;
            ``"stall"``: Python sleeps, forever or for some seconds;
            ``"hold_gil"``: the same in C code that lets no other thread run Python;
            ``"delay"``: a sleep of some seconds;
            ``"raise"``: a ``RuntimeError`` from the line that reports the step.
        process: the number of the process.
        at_step: at the first reported step that is at least this one.
        at_phase: or at the beginning of this phase: ``"start"``; in a job of several processes also
            ``"compiling"`` and ``"restoring"``.
        seconds: how long; None means forever.

    Raises:
        ValueError: an argument is not one of these.

    Example:
        >>> import distribute_jax as dj
        >>> dj.testing.Fault("kill", process=1, at_step=7)
        Fault(kind='kill', process=1, at_step=7, at_phase=None, seconds=None)
    """

    kind: str
    process: int = dataclasses.field(kw_only=True)
    at_step: int | None = dataclasses.field(default=None, kw_only=True)
    at_phase: str | None = dataclasses.field(default=None, kw_only=True)
    seconds: float | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, tuple(_KINDS))
        if (self.at_step is None) == (self.at_phase is None):
            raise ArgumentError(f"{self!r} must have one of at_step and at_phase.")
        lasting = ("stop", "stall", "hold_gil", "delay")
        if self.seconds is not None and not (self.kind in lasting and self.seconds > 0):
            raise ArgumentError(
                f"seconds must be above 0, and only for {', '.join(lasting)}; got {self!r}."
            )
        if self.kind == "delay" and self.seconds is None:
            raise ArgumentError(f"{self!r} must have seconds.")

    def is_due(self, step: int | None, phase: str) -> bool:
        """Returns True if it happens now: at or after the step, or in the phase.

        Args:
            step: the last step that the process reported; None before the first.
            phase: the phase of the process.
        """
        if self.at_phase is not None:
            return phase == self.at_phase or phase.startswith(f"{self.at_phase} ")
        return step is not None and self.at_step is not None and step >= self.at_step


class Injector:
    def __init__(self, faults: Iterable[Fault]) -> None:
        self._pending = list(faults)

    def __call__(self, step: int | None, phase: str) -> None:
        for fault in [fault for fault in self._pending if fault.is_due(step, phase)]:
            self._pending.remove(fault)
            _KINDS[fault.kind](fault)


def _send(number: int) -> Callable[[Fault], None]:
    return lambda fault: os.kill(os.getpid(), number)


def _stop(fault: Fault) -> None:
    if fault.seconds is not None:
        wake = f"sleep {fault.seconds}; kill -CONT {os.getpid()}"
        subprocess.Popen(
            ["/bin/sh", "-c", wake], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    os.kill(os.getpid(), signal.SIGSTOP)


def _stall(fault: Fault) -> None:
    time.sleep(_FOREVER_SECONDS if fault.seconds is None else fault.seconds)


def _hold_gil(fault: Fault) -> None:
    microseconds = int(1e6 * (fault.seconds or 60.0))
    library: Any = ctypes.PyDLL(None)  # unlike CDLL, it holds the GIL during the call
    library.usleep(microseconds)
    while fault.seconds is None:
        library.usleep(microseconds)


def _raise(fault: Fault) -> None:
    raise RuntimeError(f"injected by {fault!r}")


_KINDS: dict[str, Callable[[Fault], None]] = {
    "kill": _send(signal.SIGKILL),
    "terminate": _send(signal.SIGTERM),
    "stop": _stop,
    "stall": _stall,
    "hold_gil": _hold_gil,
    "delay": _stall,
    "raise": _raise,
}


Environment = Mapping[str, str] | Sequence[Mapping[str, str]] | None

_CALL, _START = "call.pickle", "start.pickle"
_MAIN = "__main__"
_STACK_SIGNAL = signal.SIGURG
"""The signal at which a process prints the stacks of its threads; by default it is ignored."""
_STACK_SECONDS = 0.5
"""How long a process that ran out of time has to print its stacks."""


class LocalCluster:
    """Runs a function in several real processes on this machine, and returns how each ended.

    Each process has simulated CPU devices. ``dj.cluster_resolver.detect()`` finds the cluster in each, so
    a multi-worker strategy needs nothing more; with JAX alone, pass the address, number and id from the
    resolver to ``jax.distributed.initialize``.

    No process outlives ``run`` or (on Linux) this process, however that ends. All output is captured. The
    function is passed by name, its arguments and its result by ``pickle``, with JAX's arrays as NumPy's.

    Args:
        processes: how many.
        devices_per_process: how many simulated devices each has.
        environment: environment variables to change: one mapping for all processes, or a list with one
            for each.
        timeout: after so many seconds the processes that still run print their stacks and are killed.
        grace: how many seconds the others may continue after one has failed; None means until the
            timeout.

    Raises:
        ValueError: an invalid argument.

    Example:
        >>> import distribute_jax as dj, jax
        >>> def total():  # at the top level of a module
        ...     resolver = dj.cluster_resolver.detect()
        ...     jax.distributed.initialize(
        ...         resolver.coordinator_address,
        ...         resolver.num_processes,
        ...         resolver.process_id,
        ...         coordinator_bind_address=resolver.coordinator_address,
        ...     )
        ...     return jax.device_count()
        >>> cluster = dj.testing.LocalCluster(2, 2)
        >>> [result.value for result in cluster.run(total)]  # doctest: +SKIP
        [4, 4]
    """

    def __init__(
        self,
        processes: int,
        devices_per_process: int,
        *,
        environment: Environment = None,
        timeout: float = 120.0,
        grace: float | None = 5.0,
    ) -> None:
        processes = check_int("processes", processes, below=1 << 16)
        check_int("devices_per_process", devices_per_process)
        for name, seconds in (("timeout", timeout), ("grace", grace)):
            if seconds is not None:
                check_number(name, seconds)
        self._processes = processes
        self._devices = devices_per_process
        self._environments = _each_environment(environment, processes)
        self._timeout = timeout
        self._grace = grace

    def run(
        self, fn: Callable[..., Any], *args: Any, faults: Iterable[Fault] = (), check: bool = True
    ) -> list[ProcessResult]:
        """Calls a function once in every process, and waits until all have ended.

        Args:
            fn: a function at the top level of a module or a script.
            *args: its arguments, which are pickled.
            faults: failures to inject.
            check: whether to raise if a process failed.

        Returns:
            How each process ended and what the function returned, in the order of the processes.

        Raises:
            ProcessFailedError: a process failed or ran out of time; the message has their output. A
                ``RuntimeError``.
            ArgumentError: a fault is for a process that does not exist.
            ArgumentTypeError: the function or an argument cannot be pickled; a ``TypeError``.
        """
        faults = list(faults)
        for fault in faults:
            if not isinstance(fault, Fault) or not 0 <= fault.process < self._processes:
                expected = f"dj.testing.Fault with a process from 0 to {self._processes - 1}"
                refuse("LocalCluster.run: faults", expected, fault)
        module = str(getattr(fn, "__module__", ""))
        file = getattr(sys.modules.get(module), "__file__", None)
        with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
            _write(Path(folder) / _START, (faults, module, file))
            try:
                if module == _MAIN and not file:
                    raise pickle.PicklingError("a notebook has no file to import the function from")
                _write(Path(folder) / _CALL, (fn, args))
            except Exception as error:  # from pickle, or the arguments' __reduce__
                expected = (
                    "a function at the top level of a module or a script, and what pickle can copy"
                )
                name = "LocalCluster.run: fn and args"
                refuse(name, expected, (fn, *args), error, ArgumentTypeError)
            results = self._results(Path(folder))
        failed = [result for result in results if result.failed]
        if check and failed:
            raise ProcessFailedError(_failure(fn.__name__, failed, results, self._timeout))
        return results

    def _results(self, folder: Path) -> list[ProcessResult]:
        # Not with -m, which would import this module twice.
        command = [sys.executable, "-c", f"from {__name__} import run_in_child; run_in_child()"]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        environment = {**os.environ, "PYTHONPATH": path}
        job = LocalJob(self._processes, self._devices, command, environment, folder)
        specs = [job.process(i, 0, changes) for i, changes in enumerate(self._environments)]
        outputs = [(bytearray(), bytearray()) for _ in specs]
        ended: queue.SimpleQueue[ChildProcess] = queue.SimpleQueue()

        def sinks(spec: ProcessSpec) -> tuple[Sink, Sink]:
            stdout, stderr = outputs[spec.index]
            return stdout.extend, stderr.extend

        with ProcessGroup(specs, sinks, ended.put) as group:
            still_running = self._await(group, ended)
            group.send(_STACK_SIGNAL)
            group.wait(_STACK_SECONDS)
        return [
            _result(child, output, child.spec.index in still_running)
            for child, output in zip(group.children, outputs, strict=True)
        ]

    def _await(self, group: ProcessGroup, ended: queue.SimpleQueue[ChildProcess]) -> set[int]:
        """Waits for the processes to end; returns the indices of those that did not in time."""
        deadline = time.monotonic() + self._timeout
        while group.running:
            try:
                child = ended.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if child.code != 0 and self._grace is not None:
                deadline = min(deadline, time.monotonic() + self._grace)
        return {child.spec.index for child in group.running}


def _result(
    child: ChildProcess, output: tuple[bytearray, bytearray], ended_by_cluster: bool
) -> ProcessResult:
    spec = child.spec
    file = _result_file(spec.status.parent, spec.index)
    status = read_status(spec.status)
    code = -9 if child.code is None else child.code
    stdout, stderr = (text.decode(errors="replace") for text in output)
    return ProcessResult(
        process=spec.index,
        value=_read(file) if file.exists() else None,
        stdout=stdout,
        stderr=stderr,
        exit_code=code if code >= 0 else None,
        signal=signal_name(-code) if code < 0 else None,
        seconds=child.seconds,
        step=status.step,
        phase=status.phase,
        ended_by_cluster=ended_by_cluster,
    )


def _each_environment(environment: Environment, processes: int) -> list[Mapping[str, str]]:
    if environment is None or isinstance(environment, Mapping):
        return [environment or {}] * processes
    expected = "a mapping, or a list of one for each process"
    with converting("environment", environment, expected):
        each = list(environment)
    if len(each) != processes:
        refuse("environment", expected, environment)
    return each


def _failure(
    name: str, failed: list[ProcessResult], results: list[ProcessResult], timeout: float
) -> str:
    title = f"LocalCluster.run({name}): {len(failed)} of {len(results)} processes failed."
    if all(result.ended_by_cluster for result in failed):
        title = (
            f"LocalCluster.run({name}): {len(failed)} of {len(results)} processes still ran after "
            f"{timeout:g} s and were ended. Their stacks are the last of what they printed; where they only "
            "need longer, pass LocalCluster(timeout=…)."
        )
    ordered = sorted(results, key=lambda result: (result.ended_by_cluster, not result.failed))
    return "\n".join([title, *(result.report() for result in ordered)])


_MAX_LINES = 40


@dataclass(frozen=True, kw_only=True)
class ProcessResult:
    """How one process of a ``LocalCluster`` ended, and what it returned."""

    process: int
    """The number of the process, from 0."""
    value: Any
    """What the function returned, arrays as NumPy arrays; None if it did not return."""
    stdout: str
    """Its standard output."""
    stderr: str
    """Its standard error, including tracebacks and the stacks after a timeout."""
    exit_code: int | None
    """0 if it succeeded; None if a signal ended it."""
    signal: str | None
    """The name of the signal that ended it, such as ``"SIGKILL"``; None otherwise."""
    seconds: float
    """How long it ran, including the start of Python."""
    step: int | None
    """The last step that it reported; None if it reported none."""
    phase: str
    """The last phase that it reported."""
    ended_by_cluster: bool
    """True if the cluster killed it: it ran out of time, or another process had failed."""

    @property
    def failed(self) -> bool:
        """True if it did not end with exit code 0."""
        return self.exit_code != 0

    def __str__(self) -> str:
        how = f"ended by {self.signal}" if self.signal else f"exit code {self.exit_code}"
        by = ", sent by the cluster" if self.ended_by_cluster else ""
        at = "" if self.step is None else f" at step {self.step}"
        phase = f" in phase {self.phase!r}" if self.phase else ""
        return f"process {self.process}: {how}{by}{at}{phase} after {self.seconds:.1f} s"

    def report(self) -> str:
        """Returns how it ended, with the last lines of its output."""
        lines = [str(self)]
        for name, text in (("stdout", self.stdout), ("stderr", self.stderr)):
            lines += [f"  {name} | {line}" for line in text.splitlines()[-_MAX_LINES:]]
        return "\n".join(lines)


def _result_file(meeting: Path, process: int) -> Path:
    return meeting / f"result-{process}.pickle"


def run_in_child() -> None:
    """Calls the function in a child process, and writes its result into a file.

    An exception ends the process at once: if only JAX has connected the processes, a normal exit would
    wait for the others at JAX's shutdown barrier.
    """
    faulthandler.enable()
    faulthandler.register(_STACK_SIGNAL, all_threads=True)
    try:
        _call(Path(os.environ[JOB_FOLDER]), int(os.environ[PROCESS_ID]))
    except Exception as error:
        if not current_job().is_alone:
            raise  # the job notifies the other processes and exits
        traceback.print_exc()
        status_writer().error("".join(traceback.format_exception_only(error)).strip())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _call(meeting: Path, process: int) -> None:
    faults, module, file = _read(meeting / _START)
    status_writer().listen(Injector(fault for fault in faults if fault.process == process))
    status_writer().phase(START)
    _import(module, file)
    function, arguments = _read(meeting / _CALL)
    status_writer().phase("")
    _write(_result_file(meeting, process), function(*arguments))


class _Pickler(pickle.Pickler):
    """Pickles JAX arrays as NumPy arrays, whose unpickling starts no backend."""

    def reducer_override(self, value: Any) -> Any:
        return (
            (np.asarray, (np.asarray(value),)) if isinstance(value, jax.Array) else NotImplemented
        )


def _write(path: Path, value: Any) -> None:
    """Pickles a value into a file that is complete or absent."""
    part = path.with_name(f".part-{path.name}")
    with part.open("wb") as file:
        _Pickler(file).dump(value)
    part.replace(path)


def _read(path: Path) -> Any:
    with path.open("rb") as file:
        return pickle.load(file)


def _import(module: str, file: str) -> None:
    """Imports the module of the pickled function, by its name or else from its file.

    A script is imported as ``__mp_main__``, so that its ``if __name__ == "__main__"`` does not run again.
    """
    if module != _MAIN:
        try:
            importlib.import_module(module)
            return
        except ModuleNotFoundError as error:
            if error.name != module or not file:
                raise
    name = "__mp_main__" if module == _MAIN else module
    spec: Any = importlib.util.spec_from_file_location(name, file)
    sys.modules[module] = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[module])
