#!/usr/bin/env python3
"""Set up this repository and run it, with the standard library alone.

    python3 dev.py demo      the main job: train on handwritten digits over 8 replicas
    python3 dev.py test      lint, types and tests; with --sources, those of the libraries that
                             are optional
    python3 dev.py bench     the benchmarks: a quick look, or with --full all of them
    python3 dev.py pythons   the installed Pythons that can be used, newest first

The first run creates `.venv` and installs the tested versions (constraints/); later runs
find it ready and need no network. Environment variables:

    PYTHON   the Python to use: a path, a command or a version ("3.12"); default: the newest
    VENV     the folder of the environment; default: .venv; --sources adds "-sources" to it

The file must parse on Python 3.6, so that an old `python3` gets a message and not a
SyntaxError; the environment itself needs Python 3.11 or later.
"""

import argparse
import contextlib
import glob
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

try:
    import fcntl
except ImportError:  # Windows has no fcntl: there, two first runs at once are not kept apart.
    fcntl = None  # type: ignore[assignment]

ROOT = os.path.dirname(os.path.abspath(__file__))
MINIMUM = (3, 11)
SIMULATED_DEVICES = 8
EXTRAS = "test"
OPTIONAL = ["tensorflow", "torch", "datasets"]
DEMO_SCRIPTS = ["digits.py", "digits_fit.py"]
BUILD_TOOLS = ["hatchling", "editables"]
MARKER = "made-by-dev.py"
STAMP = "dev-stamp.json"
LOG = os.path.join(".cache", "install.log")
PYTHON_NAME = re.compile(r"python(3(\.\d+)?)?(\.exe)?$")

# Run by every candidate, so it stays with what all Pythons since 3.4 have.
PROBE = """
import importlib.util, json, platform, sys, sysconfig
print(json.dumps({
    "version": list(sys.version_info[:3]),
    "executable": getattr(sys, "_base_executable", None) or sys.executable,
    "stable": sys.version_info.releaselevel == "final"
    and platform.python_implementation() == "CPython"
    and not sysconfig.get_config_var("Py_GIL_DISABLED"),
    "venv": all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")),
}))
"""

TEST_HELP = """\
Without further arguments: ruff check, ruff format --check, codespell, mypy and pytest
(in parallel, without the tests marked slow or wide), each run even if one before it failed.
With arguments that dev.py does not know: only pytest, in one process, with exactly these
arguments, for example `python3 dev.py test tests/test_dev.py -k stamp`.

--sources runs tests/data/sources with TensorFlow, PyTorch and Hugging Face's datasets, which
the other tests do without, on Python 3.11 in an environment of their own. PyTorch's package on
PyPI brings several GB of CUDA with it on Linux; where pip knows no other one, type first
`export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu`."""

BENCH_HELP = """\
Without --full: few rounds, in less than five minutes on two cores. Writes a dated page with tables and
pictures, and prints a table of ratios. Arguments that dev.py does not know go on to the benchmarks, for
example `python3 dev.py bench --only memory fit`.

--peers measures beside hand-written JAX, Flax, Keras, TensorFlow and PyTorch, and makes an
environment for each of the last three. One that cannot be made is a row that says so: PyTorch is
only installed as a CPU build, since its package on PyPI brings several GB of CUDA with it on Linux;
where pip knows none, type first `export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu`."""

DEMO_HELP = """\
Trains with a loop of its own (examples/digits.py), compares with one device, and trains once more
with compile and fit (examples/digits_fit.py). Arguments that dev.py does not know go to both, for example
`python3 dev.py demo --epochs 3`; its own help: `python3 dev.py demo -- --help`."""


class SetupError(Exception):
    """A failure that the user can act on: what failed, what was found, what to type next."""


class Python(NamedTuple):
    """An interpreter that was run: its version, its own path, and what it can do."""

    version: Tuple[int, ...]
    executable: str
    stable: bool
    venv: bool

    @property
    def usable(self) -> bool:
        """Whether JAX's wheels exist for it: a released CPython with the GIL, new enough."""
        return self.stable and self.version >= MINIMUM

    @property
    def release(self) -> str:
        """The full version, such as "3.12.1"."""
        return dotted(self.version)

    @property
    def minor(self) -> str:
        """The version without its last part, such as "3.12"."""
        return dotted(self.version[:2])


class Contents(NamedTuple):
    """What an environment holds besides the project and its tools."""

    suffix: str
    """What its folder is called after VENV."""
    python: str
    """The only Python that it is tested with, or "" for any."""
    pins: str
    """A file with the packages that it adds and their versions, or ""."""
    cost: str
    """What making it takes."""
    command: str = ""
    """The command of this file that needs it."""
    alone: bool = False
    """Whether it holds only what is in ``pins``, without the project and its tools."""


SUITE = Contents("", "", "", "about 900 MB on disk, 1-3 minutes")
SOURCES = Contents(
    "-sources",
    "3.11",
    os.path.join("constraints", "sources-python-3.11.txt"),
    "about 3.4 GB on disk, 2-4 minutes",
    "test --sources",
)
PEERS = {
    name: Contents(
        "-peers-" + name,
        python,
        os.path.join("constraints", "peers-{}.txt".format(name)),
        cost,
        "bench --peers",
        alone=True,
    )
    for name, python, cost in [
        ("keras", "", "about 700 MB on disk, 1 minute"),
        ("tensorflow", "", "about 1.5 GB on disk, 1-2 minutes"),
        ("torch", "3.11", "about 1 GB on disk, 1 minute"),
    ]
}  # type: Dict[str, Contents]
"""The environments of the benchmarks' peers, by the package that each is about."""


def say(message: str) -> None:
    """Prints a line of progress at once, also into a pipe."""
    print("dev.py: " + message, flush=True)


def dotted(version: Tuple[int, ...]) -> str:
    """Spells a version with dots."""
    return ".".join(str(part) for part in version)


def quoted(path: str) -> str:
    """A path as one types it in a shell, relative to the repository where it lies in it."""
    if path.startswith(ROOT + os.sep):
        path = os.path.relpath(path, ROOT)
    return "'{}'".format(path) if " " in path else path


# Finding a Python


def probe(executable: str) -> Optional[Python]:
    """Runs an interpreter and returns what it is, or None where it does not run."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    try:
        done = subprocess.run(
            [executable, "-c", PROBE],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=30,
        )
        fields = json.loads(done.stdout.decode())
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    fields["version"] = tuple(fields["version"])
    return Python(**fields)


def search_folders() -> List[str]:
    """The folders that may hold Pythons: PATH, and where pyenv and uv keep theirs."""
    pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    uv = os.environ.get("UV_PYTHON_INSTALL_DIR") or os.path.expanduser("~/.local/share/uv/python")
    folders = os.environ.get("PATH", "").split(os.pathsep)
    for pattern in (os.path.join(pyenv, "versions", "*", "bin"), os.path.join(uv, "*", "bin")):
        folders += sorted(glob.glob(pattern))
    return [folder for folder in folders if os.path.isabs(folder) and os.path.isdir(folder)]


def candidates() -> List[str]:
    """Files that are called like a Python, the running one first, each file once."""
    paths = [sys.executable] if sys.executable else []
    for folder in search_folders():
        with contextlib.suppress(OSError):
            names = sorted(filter(PYTHON_NAME.match, os.listdir(folder)))
            paths += [os.path.join(folder, name) for name in names]
    unique = {os.path.realpath(path): path for path in reversed(paths)}
    return [path for path in reversed(list(unique.values())) if os.access(path, os.X_OK)]


def installed() -> List[Python]:
    """Every Python 3 of this machine that runs, newest first, each interpreter once."""
    found = {}  # type: Dict[str, Python]
    for path in candidates():
        python = probe(path)
        if python:
            found.setdefault(os.path.realpath(python.executable), python)
    return sorted(found.values(), key=lambda python: python.version, reverse=True)


def matches(version: Tuple[int, ...], wanted: str) -> bool:
    """Whether a version is the wanted one: "3.12" stands for every 3.12.x."""
    return (dotted(version) + ".").startswith(wanted + ".")


def is_version(wanted: str) -> bool:
    """Whether PYTHON holds a version and not a path or a command."""
    return re.match(r"\d+(\.\d+)*$", wanted) is not None


def named_python(wanted: str) -> Python:
    """The Python that PYTHON names by a path or a command."""
    python = probe(shutil.which(wanted) or os.path.abspath(wanted))
    if python is None:
        raise SetupError(
            "PYTHON={} does not run as a Python 3.\n".format(quoted(wanted))
            + "Next, list those that do: python3 dev.py pythons; a version works too: PYTHON=3.12"
        )
    if not python.usable:
        raise SetupError(
            "PYTHON={} is Python {}{}; this project needs a released CPython {} or later.\n".format(
                quoted(wanted),
                python.release,
                "" if python.stable else " (a pre-release or a special build)",
                dotted(MINIMUM),
            )
            + "Next, list those that fit: python3 dev.py pythons"
        )
    return python


def choose(pythons: List[Python], wanted: str) -> Python:
    """The newest usable Python that can make an environment, among those of the version wanted."""
    usable = [p for p in pythons if p.usable and (not wanted or matches(p.version, wanted))]
    if not usable:
        raise SetupError(missing_python(pythons, wanted))
    for python in usable:
        if venv_command(python, ""):
            return python
    raise SetupError(missing_venv(usable[0]))


def select(contents: Contents = SUITE) -> Python:
    """The Python for a new environment, from PYTHON or from a search."""
    wanted = os.environ.get("PYTHON") or contents.python
    if not wanted or is_version(wanted):
        python = choose(installed(), wanted)
    else:
        python = choose([named_python(wanted)], "")
    if contents.python and python.minor != contents.python:
        raise SetupError(
            "PYTHON={} is Python {}, but {} has the optional libraries for Python {} only.\n".format(
                quoted(wanted), python.release, contents.pins, contents.python
            )
            + "Next: PYTHON={} python3 dev.py {}".format(contents.python, contents.command)
        )
    return python


def missing_python(pythons: List[Python], wanted: str) -> str:
    """What to say where no installed Python fits."""
    found = ["  Python {}  {}".format(p.release, p.executable) for p in pythons]
    return "\n".join(
        ["No usable Python {}was found:".format(wanted + " " if wanted else "")]
        + ["this project needs a released CPython, {} or later. Found:".format(dotted(MINIMUM))]
        + (found or ["  no Python 3 that runs"])
        + ["Next, install one: " + install_line()]
        + ["or name one that is elsewhere: PYTHON=/path/to/python3 python3 dev.py demo"]
    )


def install_line() -> str:
    """The command that installs a Python with what this machine has."""
    lines = [
        ("uv", "uv python install 3.13"),
        ("pyenv", "pyenv install 3.13"),
        ("brew", "brew install python@3.13"),
        # The systems whose own Python is too old offer these as additional packages.
        ("dnf", "sudo dnf install python3.12"),
        ("apt-get", "sudo apt-get install python3.11 python3.11-venv"),
    ]
    for tool, line in lines:
        if shutil.which(tool):
            return line
    return "Python 3.13 from your system's packages or from python.org"


def missing_venv(python: Python) -> str:
    """What to say where the only Pythons that fit cannot make environments."""
    package = "python{}-venv".format(python.minor)
    return (
        "Python {} ({}) cannot make a virtual environment: its venv or ensurepip module is\n"
        "missing, and neither uv nor virtualenv is on PATH.\n"
        "Next: sudo apt-get install {}   (or install uv, or virtualenv)"
    ).format(python.release, python.executable, package)


def venv_command(python: Python, folder: str) -> List[str]:
    """The command that makes an environment with pip in it, or [] where nothing can."""
    if python.venv:
        return [python.executable, "-m", "venv", folder]
    if shutil.which("uv"):
        options = ["--quiet", "--seed", "--allow-existing", "--python", python.executable]
        return ["uv", "venv", *options, folder]
    if shutil.which("virtualenv"):
        return ["virtualenv", "--quiet", "--python", python.executable, folder]
    return []


# The environment


def venv_folder(contents: Contents = SUITE) -> str:
    """The environment's folder: VENV, relative to the repository, or .venv; then its suffix."""
    folder = os.path.normpath(os.path.join(ROOT, os.environ.get("VENV") or ".venv"))
    return folder + contents.suffix


def venv_python(folder: str) -> str:
    """The environment's interpreter."""
    windows = os.name == "nt"
    return os.path.join(folder, "Scripts" if windows else "bin", "python" + ".exe" * windows)


def constraints_file(version: Tuple[int, ...]) -> str:
    """The tested versions for a Python; a Python newer than the known ones takes the newest."""
    known = {}
    for path in glob.glob(os.path.join(glob.escape(ROOT), "constraints", "python-3.*.txt")):
        minor = re.search(r"python-3\.(\d+)\.txt$", path)
        if minor:
            known[3, int(minor.group(1))] = path
    fitting = [minor for minor in sorted(known) if minor <= tuple(version[:2])]
    if not fitting:
        raise SetupError("constraints/ has no file for Python {}.".format(dotted(version)))
    return known[fitting[-1]]


def digest(version: Tuple[int, ...], contents: Contents) -> str:
    """A hash of everything that decides what is installed."""
    total = hashlib.sha256(EXTRAS.encode())
    paths = [os.path.join(ROOT, "pyproject.toml"), constraints_file(version)]
    if contents.pins:
        paths.append(os.path.join(ROOT, contents.pins))
    for path in paths:
        with open(path, "rb") as file:
            total.update(hashlib.sha256(file.read()).digest())
    return total.hexdigest()


def stamp_for(version: Tuple[int, ...], contents: Contents = SUITE) -> Dict[str, str]:
    """The stamp of a finished environment; the folder is in it because a moved one is broken."""
    return {"python": dotted(version), "inputs": digest(version, contents), "root": ROOT}


def read_stamp(folder: str) -> Dict[str, str]:
    """The stamp of an environment, or {} where there is none that can be read."""
    try:
        with open(os.path.join(folder, STAMP), encoding="utf-8") as file:
            stamp = json.load(file)
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def stamped_version(folder: str) -> Tuple[int, ...]:
    """The Python of a finished environment, or () where there is none."""
    version = str(read_stamp(folder).get("python"))
    return tuple(int(part) for part in version.split(".")) if is_version(version) else ()


def write_stamp(folder: str, stamp: Dict[str, str]) -> None:
    """Writes the stamp in one step, so that it is never seen half written."""
    path = os.path.join(folder, STAMP)
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(stamp, file)
    os.replace(path + ".part", path)


def is_ready(folder: str, contents: Contents = SUITE) -> bool:
    """Whether an environment is finished, up to date, in its place, and of the Python wanted."""
    version = stamped_version(folder)
    if version < MINIMUM or read_stamp(folder) != stamp_for(version, contents):
        return False
    if not os.access(venv_python(folder), os.X_OK):
        return False
    wanted = os.environ.get("PYTHON") or contents.python
    if not wanted or is_version(wanted):
        return not wanted or matches(version, wanted)
    return named_python(wanted).version == version


def remove(folder: str) -> None:
    """Removes an environment that this file made, and nothing else."""
    if not os.path.lexists(folder) or (os.path.isdir(folder) and not os.listdir(folder)):
        return
    if os.path.islink(folder) or not os.path.isfile(os.path.join(folder, MARKER)):
        raise SetupError(
            "{0} is there already and was not made by dev.py, so it is left alone.\n"
            "Next, use another folder: VENV=.venv-dev python3 dev.py demo\n"
            "or move {0} out of the way.".format(quoted(folder))
        )
    shutil.rmtree(folder)


def create(folder: str, python: Python, contents: Contents) -> None:
    """Makes the environment anew: marked first, stamped last."""
    constraints = constraints_file(python.version)
    started = time.time()
    remove(folder)
    say(
        "creating {} with Python {} (once: {}) ...".format(
            quoted(folder), python.release, contents.cost
        )
    )
    os.makedirs(folder, exist_ok=True)
    open(os.path.join(folder, MARKER), "w").close()
    logged(venv_command(python, folder), "making the environment", python)
    pip = [venv_python(folder), "-m", "pip", "install", "-qq", "-c", constraints]
    editable = []  # type: List[str]
    if not contents.alone:
        logged(pip + BUILD_TOOLS, "installing the build tools", python)
        # Without isolation pip builds with the tools just installed: pinned, and found offline.
        editable = ["--no-build-isolation", "-e", "{}[{}]".format(ROOT, EXTRAS)]
    # Most of the optional libraries is never imported, and compiling it all takes half a minute.
    added = ["--no-compile", "-r", os.path.join(ROOT, contents.pins)] if contents.pins else []
    logged(pip + added + editable, "installing the packages", python)
    write_stamp(folder, stamp_for(python.version, contents))
    say("ready after {:.0f} s".format(time.time() - started))


def logged(command: List[str], purpose: str, python: Python) -> None:
    """Runs a step of the installation, silent unless it fails."""
    log = os.path.join(ROOT, LOG)
    os.makedirs(os.path.dirname(log), exist_ok=True)
    with open(log, "wb") as file:
        code = run(command, install_environment(), output=file)
    if code:
        with open(log, encoding="utf-8", errors="replace") as text:
            tail = "".join(text.readlines()[-20:]).strip()
        raise SetupError(
            "{} failed (exit status {}, Python {}). The end of {}:\n{}\n"
            "Next, check the network and the disk, then type the same command again; it starts\n"
            "afresh. Another Python: PYTHON=3.13 python3 dev.py demo".format(
                purpose, code, python.release, LOG, tail
            )
        )


def install_environment() -> Dict[str, str]:
    """The environment for pip: no settings that would install elsewhere than in the folder."""
    elsewhere = ("PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV")
    environment = {k: v for k, v in os.environ.items() if k not in elsewhere}
    for name in ("PYTHONPATH", "PYTHONHOME", "PYTHON", "VENV"):
        environment.pop(name, None)
    return environment


@contextlib.contextmanager
def environment_ready(contents: Contents = SUITE) -> Iterator[str]:
    """Yields a ready environment, which no other dev.py replaces meanwhile."""
    folder = venv_folder(contents)
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    with open(folder + ".lock", "a") as file:
        lock(file, shared=True)
        while not is_ready(folder, contents):
            lock(file, shared=False)
            if not is_ready(folder, contents):
                create(folder, select(contents), contents)
            lock(file, shared=True)
        yield folder


def lock(file: Any, shared: bool) -> None:
    """Holds the lock of an environment: shared to use it, alone to make it."""
    if fcntl is None:
        return
    mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        say("waiting for another dev.py that uses {}".format(quoted(file.name[: -len(".lock")])))
        fcntl.flock(file, mode)
    except OSError:
        pass  # A file system without locks: then the user keeps first runs apart.


# Running jobs


def job_environment(inherited: Dict[str, str], folder: str, simulated: bool) -> Dict[str, str]:
    """The environment of a job, cleared of what other jobs and clusters left in the shell."""
    names = {"TF_CONFIG", "PYTHONPATH", "PYTHONHOME", "PYTHON", "VENV"}
    prefixes = ("SLURM_", "JAX_") if simulated else ("SLURM_",)
    kept = {k: v for k, v in inherited.items() if k not in names and not k.startswith(prefixes)}
    kept["VIRTUAL_ENV"] = folder
    kept["PATH"] = os.path.dirname(venv_python(folder)) + os.pathsep + kept.get("PATH", os.defpath)
    if simulated:
        kept["JAX_PLATFORMS"] = "cpu"
        kept["XLA_FLAGS"] = "--xla_force_host_platform_device_count={}".format(SIMULATED_DEVICES)
        # XLA takes its number of pool threads from NPROC. With fewer threads than devices, a
        # loop of collectives that nobody reads can wait for itself for ever.
        kept["NPROC"] = str(2 * SIMULATED_DEVICES)
    return kept


def run(command: List[str], environment: Dict[str, str], output: Any = None) -> int:
    """Runs a command in the repository and returns its status; never leaves it behind."""
    streams = {"stdout": output, "stderr": subprocess.STDOUT} if output else {}
    child = subprocess.Popen(command, cwd=ROOT, env=environment, **streams)
    try:
        return child.wait()
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(timeout=10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def demo(options: argparse.Namespace, rest: List[str]) -> int:
    """Runs the main job."""
    scripts = [os.path.join(ROOT, "examples", name) for name in DEMO_SCRIPTS]
    for script in scripts:
        if not os.path.isfile(script):
            text = "examples/{} is missing.\nNext: git checkout examples"
            raise SetupError(text.format(os.path.basename(script)))
    with environment_ready() as folder:
        environment = environment_on(options.devices, folder)
        for script in scripts:
            command = [venv_python(folder), script, "--devices", options.devices, *rest]
            status = run(command, environment)
            if status or {"-h", "--help"} & set(rest):
                break
        return status


def bench(options: argparse.Namespace, rest: List[str]) -> int:
    """Runs the benchmarks."""
    if options.peers:
        return bench_peers(options.full, rest)
    arguments = ["--devices", options.devices, *rest]
    if options.full:
        arguments.insert(0, "--full")
    if options.report_dir:
        arguments += ["--report-dir", os.path.abspath(options.report_dir)]
    with environment_ready() as folder:
        environment = environment_on(options.devices, folder)
        return run([venv_python(folder), "-m", "benchmarks", *arguments], environment)


def environment_on(devices: str, folder: str) -> Dict[str, str]:
    """The environment of a job on simulated or real devices."""
    if devices == "real":
        say(accelerator_hint(folder))
    return job_environment(dict(os.environ), folder, devices == "simulated")


def accelerator_hint(folder: str) -> str:
    """How to install JAX for an accelerator, which dev.py leaves to the user."""
    constraints = constraints_file(stamped_version(folder))
    return (
        "using the devices that JAX finds; if that is only the CPU, type\n"
        "  {} -m pip install -c {} 'jax[cuda12]'   (or cuda13, or tpu)"
    ).format(quoted(venv_python(folder)), quoted(constraints))


def lint_steps() -> List[Tuple[str, List[str]]]:
    """The checks that need no test: name and arguments to Python."""
    return [
        ("ruff check", ["-m", "ruff", "check"]),
        ("ruff format", ["-m", "ruff", "format", "--check"]),
        ("codespell", ["-m", "codespell_lib"]),
        ("mypy", ["-m", "mypy"]),
    ]


def source_steps() -> List[Tuple[str, List[str]]]:
    """The tests that need optional libraries; the first step fails where one is missing."""
    libraries = ", ".join(OPTIONAL)
    return [
        ("import " + libraries, ["-c", "import " + libraries]),
        (
            "pytest",
            ["-m", "pytest", "-m", "not exhaustive", os.path.join("tests", "data", "sources")],
        ),
    ]


def pytest_step(arguments: List[str], options: argparse.Namespace) -> Tuple[str, List[str]]:
    """The tests; on request the slow and wide ones too, or only what another JAX may change."""
    marks = []
    if options.all:
        marks = ["-m", "not exhaustive"]
    elif options.again:
        marks = ["-m", "not slow and not wide and not exhaustive and not once"]
    return "pytest", ["-m", "pytest", *marks, *arguments]


def in_parallel() -> List[str]:
    """The arguments that spread the suite over the processors, one more since some tests wait."""
    return ["-n", str(min(8, available_cores() + 1)), "--dist", "worksteal"]


def available_cores() -> int:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def test(options: argparse.Namespace, rest: List[str]) -> int:
    """Runs the checks and the tests, or pytest alone when it is given arguments."""
    steps = [] if options.no_lint or options.sources or rest else lint_steps()
    if options.sources:
        steps = source_steps() if not rest else [pytest_step(rest, options)]
    elif rest or not options.lint:
        steps.append(pytest_step(rest or in_parallel(), options))
    with environment_ready(SOURCES if options.sources else SUITE) as folder:
        environment = job_environment(dict(os.environ), folder, simulated=True)
        environment.update(compilation_cache())
        return run_steps(steps, venv_python(folder), environment)


def compilation_cache() -> Dict[str, str]:
    """JAX's settings for compiled programs that workers, and later runs, share."""
    return {
        "JAX_COMPILATION_CACHE_DIR": os.path.join(ROOT, ".cache", "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }


def bench_peers(full: bool, rest: List[str]) -> int:
    """Measures beside the peers; one whose environment cannot be made is a row that says so."""
    with contextlib.ExitStack() as held:
        folder = held.enter_context(environment_ready())
        arguments = ["--report"] if full else ["--report", "--quick"]
        for package, contents in PEERS.items():
            try:
                python = venv_python(held.enter_context(environment_ready(contents)))
                arguments += ["--python", "{}={}".format(package, python)]
            except SetupError as problem:
                say(str(problem))
                why = str(problem).splitlines()[0].partition(". ")[0]
                arguments += ["--absent", "{}={}".format(package, why)]
        environment = job_environment(dict(os.environ), folder, simulated=True)
        command = [venv_python(folder), "-m", "benchmarks.against_peers", *arguments, *rest]
        return run(command, environment)


def run_steps(steps: List[Tuple[str, List[str]]], python: str, environment: Dict[str, str]) -> int:
    """Runs every step, then says which failed and how to repeat it."""
    failed = []
    for name, arguments in steps:
        say(name)
        if run([python, *arguments], environment):
            failed.append((name, arguments))
    for name, arguments in failed:
        line = " ".join([quoted(python)] + [shlex.quote(argument) for argument in arguments])
        say("FAILED: {}; to repeat it: {}".format(name, line))
    if not failed:
        say("passed: " + ", ".join(name for name, _ in steps))
    return 1 if failed else 0


def pythons(options: argparse.Namespace, rest: List[str]) -> int:
    """Lists the Pythons that can be used: version and path, newest first."""
    if rest:
        raise SetupError("pythons takes no arguments, got: " + " ".join(rest))
    found = installed()
    usable = [python for python in found if python.usable and venv_command(python, "")]
    if not usable:
        choose(found, "")
    for python in usable:
        print("{}\t{}".format(python.release, python.executable))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line; what it does not know is passed on to the job."""
    top = argparse.ArgumentParser(
        prog="dev.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", metavar="{demo,test,bench,pythons}")

    def command(name: str, job: Any, text: str, more: str = "") -> argparse.ArgumentParser:
        raw = argparse.RawDescriptionHelpFormatter
        added = commands.add_parser(
            name, help=text, description=text, epilog=more, formatter_class=raw, allow_abbrev=False
        )
        added.set_defaults(job=job)
        return added

    demo_command = command("demo", demo, "train on handwritten digits over replicas", DEMO_HELP)
    bench_command = command("bench", bench, "measure", BENCH_HELP)
    bench_command.add_argument(
        "--full",
        action="store_true",
        help="every case, at least 30 paired rounds: more than an hour",
    )
    bench_command.add_argument(
        "--peers", action="store_true", help="beside other frameworks, on simulated devices"
    )
    bench_command.add_argument(
        "--report-dir", metavar="FOLDER", help="where the page is written (benchmarks/reports)"
    )
    for one in (demo_command, bench_command):
        one.add_argument(
            "--devices",
            choices=("simulated", "real"),
            default="simulated",
            help="8 simulated CPU devices (default), or those that JAX finds",
        )
    test_command = command("test", test, "lint, types and tests", TEST_HELP)
    which = test_command.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="the slow and wide tests too")
    which.add_argument(
        "--again", action="store_true", help="after another Python: only what its JAX may change"
    )
    only = test_command.add_mutually_exclusive_group()
    only.add_argument("--lint", action="store_true", help="only lint and types")
    only.add_argument("--no-lint", action="store_true", help="only the tests")
    only.add_argument(
        "--sources",
        action="store_true",
        help="only the tests that need TensorFlow, PyTorch, datasets",
    )
    command("pythons", pythons, "list the usable Pythons, newest first")
    return top


def split_arguments(arguments: List[str]) -> Tuple[List[str], List[str]]:
    """What may be dev.py's own, and what follows `--` and is the job's in any case."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def stop(number: int, frame: Any) -> None:
    """Turns a termination signal into an exit that ends the child first."""
    sys.exit(128 + number)


def main(arguments: List[str]) -> int:
    """Runs one command and returns the exit status."""
    ours, passed_on = split_arguments(arguments)
    options, rest = parser().parse_known_args(ours)
    if not options.command:
        parser().print_help()
        return 2
    signal.signal(signal.SIGTERM, stop)
    try:
        return int(options.job(options, rest + passed_on))
    except SetupError as problem:
        print("dev.py: {}".format(problem), file=sys.stderr, flush=True)
        return 1
    except OSError as error:
        text = "dev.py: {}\nNext, check that {} can be written to and that the disk has space."
        print(text.format(error, quoted(ROOT)), file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
