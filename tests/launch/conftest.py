"""Launches programs without JAX, which takes a tenth of a second."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import pytest

from distribute_jax.cli import main

PREAMBLE = """
import os, signal, struct, sys, time
process = int(os.environ["DISTRIBUTE_JAX_PROCESS_ID"])
attempt = int(os.environ["DISTRIBUTE_JAX_ATTEMPT"])

def step(number):  # as StatusWriter.step writes it
    with open(os.environ["DISTRIBUTE_JAX_STATUS"], "wb") as file:
        file.write(struct.pack("=q", number + 1).ljust(4096, b"\\0"))

def all_of(number):  # waits until so many are there
    folder = os.environ["DISTRIBUTE_JAX_JOB_FOLDER"]
    open(os.path.join(folder, f"there-{attempt}-{process}"), "w").close()
    while sum(name.startswith(f"there-{attempt}-") for name in os.listdir(folder)) < number:
        time.sleep(0.005)

"""


class Launched(NamedTuple):
    """The result of a launch."""

    code: int
    out: list[str]
    err: list[str]
    said: list[str]
    """The lines of the supervisor."""
    seconds: float


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)


@pytest.fixture
def launch(tmp_path, capfd):
    """Launches a program, given as text, with options of the command."""

    def launched(program: str, *options: str) -> Launched:
        script = tmp_path / "program.py"
        script.write_text(PREAMBLE + program)
        began = time.monotonic()
        code = main(["launch", *options, str(script), "--flag", "argument"])
        seconds = time.monotonic() - began
        out, err = (text.splitlines() for text in capfd.readouterr())
        said = [line for line in err if line.startswith("distribute-jax: ")]
        return Launched(code, out, err, said, seconds)

    return launched
