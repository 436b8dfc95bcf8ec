"""Importing the package is cheap: no backend, no output, no optional dependency, no logging."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import long
from source_tree import OPTIONAL

import distribute_jax as dj

ROOT = Path(__file__).parents[2]
ABSENT = OPTIONAL | {"datasets", "google.auth", "hypothesis", "pytest", "tqdm"}
ABSENT |= {"distribute_jax.cluster_resolver._tpu"}  # a program without a cluster needs no resolver

# What builds on `run` and the strategies is loaded when one of its names is first read.
LATER = tuple(
    f"distribute_jax.{part}"
    for part in (
        *("callbacks", "checkpoint", "cli", "launch", "losses", "metrics", "summary", "testing"),
        "training",
    )
)

# What the required packages load by themselves is theirs, so they are imported first.
_PROBE = """
import contextlib, io, json, logging, os, sys, warnings
import jax, flax.nnx, numpy, optax
sys.path[:0] = {paths!r}
loaded, handlers = set(sys.modules), list(logging.root.handlers)
environment, filters = dict(os.environ), list(warnings.filters)
printed = io.StringIO()
with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
    exec({statement!r}, {{}})
try:
    jax.config.update("jax_num_cpu_devices", 3)  # refused once a backend has started
    started = jax.device_count() != 3
except RuntimeError:
    started = True
new = set(sys.modules) - loaded
new |= {{name.partition(".")[0] for name in new}}
print("report:" + json.dumps({{
    "started": started,
    "printed": printed.getvalue(),
    "loaded": sorted(new & {optional!r}),
    "logging": logging.root.handlers != handlers,
    "environment": dict(os.environ) != environment,
    "warnings": warnings.filters != filters,
}}))
"""

SILENT = {
    "started": False,
    "printed": "",
    "loaded": [],
    "logging": False,
    "environment": False,
    "warnings": False,
    "output": "",
}


def effects_of(statement: str, *paths: Path) -> dict[str, Any]:
    """Runs a statement in a new process and says what it started, printed, loaded and changed."""
    probe = _PROBE.format(
        statement=statement, paths=[str(p) for p in paths], optional={*ABSENT, *LATER}
    )
    environment = {k: v for k, v in os.environ.items() if k not in {"XLA_FLAGS", "NPROC"}}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    output, _, report = done.stdout.partition("report:")
    return {**json.loads(report), "output": output + done.stderr}


def test_importing_the_package_has_no_effect_but_the_import() -> None:
    statement = "import distribute_jax; distribute_jax.MirroredStrategy"
    assert effects_of(statement, ROOT) == SILENT


_ALL_IN_A_STEP = """
import sys, jax, distribute_jax as dj
jax.make_jaxpr(lambda: [getattr(dj, name) for name in dj.__all__] and ())()
ours = [vars(m) for name, m in sys.modules.items() if name.startswith("distribute_jax")]
assert not any(isinstance(value, jax.core.Tracer) for table in ours for value in table.values())
"""


@pytest.mark.exhaustive
def test_a_name_first_read_while_a_step_is_traced_loads_its_part_and_nothing_else() -> None:
    effects = effects_of(_ALL_IN_A_STEP, ROOT)
    assert set(effects["loaded"]) == set(LATER) - {"distribute_jax.cli"}
    assert {**effects, "loaded": []} == SILENT


def test_a_name_that_the_package_lacks_is_an_attribute_error() -> None:
    with pytest.raises(
        AttributeError, match="module 'distribute_jax' has no attribute 'Strategies'"
    ):
        _ = dj.Strategies
    assert sorted(dj.__all__) == dir(dj)


BROKEN = {
    "started": "import jax; jax.devices()",
    "printed": "print('hello')",
    "loaded": "import torch",
    "logging": "import logging; logging.basicConfig()",
    "environment": "import os; os.environ['XLA_FLAGS'] = ''",
    "warnings": "import warnings; warnings.simplefilter('ignore')",
    "output": "import os; os.write(2, b'from C')",
}


@pytest.mark.parametrize(
    "shown",
    [
        long(set(BROKEN), id="all"),
        *(long({name}, id=name) for name in BROKEN),
    ],
)
def test_a_package_with_an_effect_is_reported(shown: set[str], tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    (tmp_path / "loud.py").write_text("\n".join(BROKEN[name] for name in BROKEN if name in shown))
    effects = effects_of("import loud", tmp_path)
    assert {name for name in effects if effects[name] != SILENT[name]} == shown
