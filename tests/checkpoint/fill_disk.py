"""A program on a full or read-only disk; it prints what happened as JSON. Argument: a directory."""

from __future__ import annotations

import functools
import json
import os
import resource
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint  # noqa: F401  before rights are taken away

import distribute_jax as dj
from distribute_jax.checkpoint import load, save

LARGE = 3_000_000
"""Bytes that do not compress."""


def tree_of(seed: int, size: int = 100) -> dict[str, Any]:
    """Random bytes."""
    return {"x": np.frombuffer(np.random.default_rng(seed).bytes(size), np.uint8)}


@contextmanager
def full(directory: Path) -> Iterator[None]:
    """Limits files to 100 kB, which a program sees as a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """Removes the write permission of a directory, also for root."""
    directory.chmod(0o555)
    if os.getuid() == 0:
        os.setegid(65534)
        os.seteuid(65534)
    yield
    if os.getuid() == 0:
        os.seteuid(0)
        os.setegid(0)
    directory.chmod(0o755)


def outcome_of(call: Any) -> dict[str, Any]:
    """Returns what a call raised and warned."""
    found: dict[str, Any] = {"error": "", "types": []}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except Exception as error:
            found = {"error": str(error), "types": [c.__name__ for c in type(error).__mro__]}
    return found | {"warned": [str(w.message) for w in caught]}


def used(directory: Path) -> int:
    """The bytes of all files in a directory."""
    return sum(p.stat().st_size for p in directory.rglob("*") if p.is_file())


def steps_after(manager: dj.CheckpointManager, step: int) -> None:
    """Saves step by step, as a training run does, and waits at the end."""
    for i in (step, step + 1):
        manager.save(i, tree_of(i, LARGE))
    manager.wait()


def broken(directory: Path, disk: Callable[[Path], AbstractContextManager[None]]) -> dict[str, Any]:
    """Saves on a disk that fails, and returns the outcome."""
    before = used(directory)
    with disk(directory):
        results = {
            policy: outcome_of(
                functools.partial(steps_after, dj.CheckpointManager(directory, on_error=policy), 3)
            )
            for policy in ("raise", "warn")
        }
        results["save"] = outcome_of(lambda: save(directory.parent / "one", tree_of(8, LARGE)))
        same = [
            restored(lambda tree, i=i: dj.CheckpointManager(directory).restore(i, tree), i)
            for i in (1, 2)
        ]
        same.append(restored(lambda tree: load(directory.parent / "one", tree), 7))
    return {
        "results": results,
        "grown": used(directory) - before,
        "same": same,
        "names": sorted(p.name for p in directory.iterdir()),
        "beside": sorted(p.name for p in directory.parent.iterdir()),
    }


def restored(restore: Callable[[Any], Any], seed: int) -> bool:
    """Returns whether a checkpoint still holds what was saved before."""
    tree = tree_of(0)
    restore(tree)
    return bool((tree["x"] == tree_of(seed)["x"]).all())


def main(directory: Path) -> dict[str, Any]:
    """Saves two steps and one checkpoint, then breaks the disk in each way."""
    with dj.CheckpointManager(directory) as manager:
        for step in (1, 2):
            manager.save(step, tree_of(step))
    save(directory.parent / "one", tree_of(7))
    return {"full": broken(directory, full), "read-only": broken(directory, read_only)}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
