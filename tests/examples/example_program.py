"""Runs an example as a user does: a separate program, on a machine with no accelerator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def command(name: str, *arguments: object) -> list[str]:
    """Returns the command that runs an example."""
    return [sys.executable, str(ROOT / "examples" / f"{name}.py"), *map(str, arguments)]


def environment() -> dict[str, str]:
    """Returns an environment without the devices that these tests simulate for themselves."""
    kept = {k: v for k, v in os.environ.items() if k not in {"XLA_FLAGS", "NPROC"}}
    return {**kept, "PYTHONPATH": str(ROOT)}


def job_environment(folder: Path) -> dict[str, str]:
    """Returns an environment in which what one process has compiled, others find in a folder."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
    return {**cache, **environment(), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def output(name: str, *arguments: object, folder: Path) -> str:
    """Runs an example to its end in a folder, and gives what it printed."""
    done = subprocess.run(
        command(name, *arguments),
        env=environment(),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
