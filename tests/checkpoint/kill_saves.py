"""A program that is killed while it saves, again and again. Arguments: directory, kills, seed.

It forks a child for each trial, since importing everything again takes longer than a trial. The child
restores, checks what it got, and saves until it is killed. A line for each child says what it found.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import numpy as np
import orbax.checkpoint  # noqa: F401  before the fork

import distribute_jax as dj

BYTES = 400_000


def state_of(step: int) -> dict[str, np.ndarray]:
    """Returns what a step saves: incompressible numbers that identify the step."""
    numbers = np.random.default_rng(step).integers(0, 2**32, (4, BYTES // 16), np.uint32)
    return {str(i): part for i, part in enumerate(numbers)} | {"step": np.asarray(step)}


def checked(manager: dj.CheckpointManager) -> int:
    """Restores, checks the numbers, and returns the step."""
    tree = state_of(0)
    step = manager.restore_latest(tree) or 0
    wrong = [name for name, value in state_of(step).items() if (tree[name] != value).any()]
    if wrong:
        raise ValueError(f"step {step} has other numbers in {wrong}")
    return step


def child(directory: Path, report: int, parent: int) -> None:
    """Restores, reports, and saves until it is killed; reports the beginning of each save."""
    warnings.simplefilter("error")  # nothing may be damaged
    manager = dj.CheckpointManager(directory, max_to_keep=2)
    step = checked(manager)
    os.write(report, f"restored {step}\n".encode())
    while os.getppid() == parent:  # else its test has ended early
        step += 1
        state = state_of(step)
        os.write(report, f"saving {step}\n".encode())
        manager.save(step, state)


def trial(directory: Path, saves: int, part: float) -> str:
    """Lets a child begin so many saves, kills it a moment later, and returns what it reported and left.

    Args:
        directory: where it saves.
        saves: how many; a save waits for the one before it, so of three the first is on the disk.
        part: the moment, in the time that its last save took: a slow machine does as much as a fast one.
    """
    reader, writer = os.pipe()
    parent, process = os.getpid(), os.fork()
    if process == 0:
        try:
            child(directory, writer, parent)
        except BaseException:
            os.write(writer, traceback.format_exc().encode())
        os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as lines:
        found, times = [lines.readline().strip()], [time.monotonic()]
        for _ in range(saves if found[0].startswith("restored ") else 0):
            found.append(lines.readline().strip())
            times.append(time.monotonic())
        time.sleep(part * (times[-1] - times[len(times) - 2]))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        more = [line.strip() for line in lines]  # an error of the child, or one more save
    failed = not all(line.startswith(("restored ", "saving ")) for line in found + more)
    left = sum(path.name.endswith(".saving") for path in directory.iterdir())
    return f"failed: {' '.join(found + more)}" if failed else f"{found[0]} left {left}"


if __name__ == "__main__":
    moments = random.Random(int(sys.argv[3]))
    for _ in range(int(sys.argv[2])):
        saves, part = moments.randint(3, 5), moments.uniform(0.0, 2.0)
        print(trial(Path(sys.argv[1]), saves, part), flush=True)
