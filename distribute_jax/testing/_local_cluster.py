"""``LocalCluster``: real processes on this machine, for tests of communication and failures."""

from __future__ import annotations

import dataclasses
import os
import queue
import signal as signals
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distribute_jax._errors import ArgumentError, ProcessFailedError
from distribute_jax.launch._process import ChildProcess, ProcessGroup, ProcessSpec, Sink
from distribute_jax.launch._supervisor import PREFIX, LocalJob
from distribute_jax.processes._status import read_status
from distribute_jax.testing import _cluster_child
from distribute_jax.testing._cluster_child import name_of
from distribute_jax.testing._fault import Fault

Environment = Mapping[str, str] | Sequence[Mapping[str, str]] | None

_PRINTING = 0.5
"""How many seconds a process that ran out of time has to print its stacks."""


class LocalCluster:
    """Runs a function in several real processes on this machine, and gives what came of each.

    Each process has its simulated CPU devices. ``dj.cluster_resolver.detect()`` finds the cluster in
    each, as it finds any other, so that a strategy of many workers needs nothing more; with JAX alone:
    ``jax.distributed.initialize`` with the three answers of the resolver.

    Everything is bounded: no process outlives ``run``, nor this process, however it ends (on Linux), and
    what a process prints is kept. The function, its arguments and its result travel by name and as plain
    data, never by pickle.

    Args:
        processes: how many.
        devices_per_process: how many simulated devices each has.
        environment: variables that differ from those of this process: for all, or a list with one mapping
            for each process.
        timeout: after so many seconds the processes that still run print their stacks and are ended.
        grace: how many seconds the others have to end by themselves after one has failed; None for as many
            as the timeout leaves, to see what they do.

    Raises:
        ValueError: an argument is not as described.

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
        for name, count in (("processes", processes), ("devices_per_process", devices_per_process)):
            if type(count) is not int or count < 1:
                raise ArgumentError(f"LocalCluster({name}={count!r}): an int of at least 1.")
        for name, seconds in (("timeout", timeout), ("grace", grace)):
            if seconds is not None and not seconds > 0:
                raise ArgumentError(
                    f"LocalCluster({name}={seconds!r}): a number of seconds above 0."
                )
        self._processes = processes
        self._devices = devices_per_process
        self._environments = _each_environment(environment, processes)
        self._timeout = timeout
        self._grace = grace

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        faults: Iterable[Fault] = (),
        check: bool = True,
    ) -> list[ProcessResult]:
        """Calls a function once in every process, and waits until all have ended.

        Args:
            fn: a function at the top level of a module or a script.
            *args: its arguments: None, bool, int, float, str, arrays, and lists, tuples and dicts of these.
            faults: what goes wrong on purpose.
            check: whether to raise where a process failed; with False the results tell.

        Returns:
            How each process ended and what it gave, in the order of the processes. A value is of the
            same kinds as the arguments; arrays are NumPy arrays.

        Raises:
            ProcessFailedError: a process failed or ran out of time; the message has what each printed. A
                ``RuntimeError``.
            ArgumentError: the function cannot be found by its name, or a fault is for no process.
            ArgumentTypeError: an argument is not plain data; a ``TypeError``.
        """
        faults = [_checked(fault, self._processes) for fault in faults]
        call = {
            "function": name_of(fn),
            "arguments": args,
            "faults": [dataclasses.asdict(fault) for fault in faults],
        }
        with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
            path = Path(folder) / _cluster_child.CALL
            _cluster_child.write(path, call, f"LocalCluster.run({fn.__name__})")
            results = self._results(Path(folder))
        failed = [result for result in results if result.failed]
        if check and failed:
            raise ProcessFailedError(_failure(fn.__name__, failed, results, self._timeout))
        return results

    def _results(self, folder: Path) -> list[ProcessResult]:
        job = LocalJob(processes=self._processes, devices=self._devices, folder=folder)
        name = _cluster_child.__name__
        # Not with -m: importing the package imports the module before it would be run.
        command = [sys.executable, "-c", f"from {name} import main; main()"]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        base = {**os.environ, "PYTHONPATH": path}
        specs = [
            _changed(job.process(i, 0, command, {**base, **own}), own)
            for i, own in enumerate(self._environments)
        ]
        outputs = [(bytearray(), bytearray()) for _ in specs]
        ended: queue.SimpleQueue[ChildProcess] = queue.SimpleQueue()
        with ProcessGroup(specs, lambda spec: _kept(outputs[spec.index]), ended.put) as group:
            left = self._await(group, ended)
            _end(group)
        return [
            _result(child, output, child.spec.index in left)
            for child, output in zip(group.children, outputs, strict=True)
        ]

    def _await(self, group: ProcessGroup, ended: queue.SimpleQueue[ChildProcess]) -> set[int]:
        """Waits for the processes; gives those that did not end by themselves."""
        limit = time.monotonic() + self._timeout
        while group.running:
            try:
                child = ended.get(timeout=max(0.0, limit - time.monotonic()))
            except queue.Empty:
                break
            if child.code != 0 and self._grace is not None:
                limit = min(limit, time.monotonic() + self._grace)
        return {child.spec.index for child in group.running}


def _changed(spec: ProcessSpec, own: Mapping[str, str]) -> ProcessSpec:
    """Puts what was asked for over what a job sets, but for the flags, which the job has added to."""
    changes = {name: value for name, value in own.items() if name != "XLA_FLAGS"}
    return dataclasses.replace(spec, environment={**spec.environment, **changes})


def _end(group: ProcessGroup) -> None:
    """Has those that still run print their stacks, and ends them."""
    group.send(_cluster_child.STACKS)
    group.wait(_PRINTING)
    group.stop(grace=0)


def _kept(output: tuple[bytearray, bytearray]) -> tuple[Sink, Sink]:
    return output[0].extend, output[1].extend


def _result(
    child: ChildProcess, output: tuple[bytearray, bytearray], was_left: bool
) -> ProcessResult:
    spec = child.spec
    file = _cluster_child.result_file(spec.status.parent, spec.index)
    status = read_status(spec.status)
    exit_code, signal = ending(-9 if child.code is None else child.code)
    stdout, stderr = (text.decode(errors="replace") for text in output)
    return ProcessResult(
        process=spec.index,
        value=_cluster_child.read(file) if file.exists() else None,
        stdout=stdout,
        stderr=stderr,
        exit_code=exit_code,
        signal=signal,
        seconds=child.seconds,
        step=status.step,
        phase=status.phase,
        ended_by_cluster=was_left,
    )


def _each_environment(environment: Environment, processes: int) -> list[Mapping[str, str]]:
    if environment is None or isinstance(environment, Mapping):
        return [environment or {}] * processes
    each = list(environment)
    if len(each) != processes:
        raise ArgumentError(
            f"LocalCluster(environment=…): {len(each)} mappings for {processes} processes. Give one mapping "
            "for all, or a list with one for each process."
        )
    return each


def _checked(fault: Fault, processes: int) -> Fault:
    if not isinstance(fault, Fault) or not 0 <= fault.process < processes:
        raise ArgumentError(
            f"LocalCluster.run(faults=[… {fault!r} …]): a dj.testing.Fault whose process is from 0 to "
            f"{processes - 1}."
        )
    return fault


def _failure(
    name: str, failed: list[ProcessResult], results: list[ProcessResult], timeout: float
) -> str:
    by_itself = [result for result in failed if not result.ended_by_cluster]
    title = f"LocalCluster.run({name}): {len(failed)} of {len(results)} processes failed."
    if not by_itself:
        title = (
            f"LocalCluster.run({name}): {len(failed)} of {len(results)} processes still ran after "
            f"{timeout:g} s and were ended. Their stacks are the last of what they printed; where they only "
            "need longer, pass LocalCluster(timeout=…)."
        )
    ordered = sorted(results, key=lambda result: (result.ended_by_cluster, not result.failed))
    return "\n".join([title, *(result.report() for result in ordered)])


_SHOWN = 40


@dataclass(frozen=True, kw_only=True)
class ProcessResult:
    """How one process of a ``LocalCluster`` ended, and what it gave."""

    process: int
    """Which one, from 0."""
    value: Any
    """What the function returned, arrays as NumPy arrays; None where it did not return."""
    stdout: str
    """All that it printed."""
    stderr: str
    """All that it printed there, tracebacks and the stacks after a time-out among it."""
    exit_code: int | None
    """0 where all went well; None where a signal ended it."""
    signal: str | None
    """The name of the signal that ended it, such as ``"SIGKILL"``; None where none did."""
    seconds: float
    """How long it ran, the start of Python included."""
    step: int | None
    """The last step that it reported; None where it reported none."""
    phase: str
    """The last phase that it reported."""
    ended_by_cluster: bool
    """Whether the cluster ended it: it ran out of time, or another process had failed."""

    @property
    def failed(self) -> bool:
        """Whether it ended otherwise than with exit code 0."""
        return self.exit_code != 0

    def __str__(self) -> str:
        """Returns in one line how it ended."""
        how = f"ended by {self.signal}" if self.signal else f"exit code {self.exit_code}"
        by = ", sent by the cluster" if self.ended_by_cluster else ""
        at = "" if self.step is None else f" at step {self.step}"
        phase = f" in phase {self.phase!r}" if self.phase else ""
        return f"process {self.process}: {how}{by}{at}{phase} after {self.seconds:.1f} s"

    def report(self) -> str:
        """Returns how it ended and the last lines of what it printed.

        Returns:
            Some lines of text.
        """
        lines = [str(self)]
        for name, text in (("stdout", self.stdout), ("stderr", self.stderr)):
            lines += [f"  {name} | {line}" for line in text.splitlines()[-_SHOWN:]]
        return "\n".join(lines)


def ending(code: int) -> tuple[int | None, str | None]:
    """Returns the exit code, or the name of the signal that Python's subprocess shows as a negative one."""
    if code >= 0:
        return code, None
    try:
        return None, signals.Signals(-code).name
    except ValueError:
        return None, f"signal {-code}"
