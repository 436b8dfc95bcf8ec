#!/usr/bin/env python3
"""Set up this repository and run it, with the standard library alone.

    python3 dev.py demo      the main job: train on handwritten digits over 8 replicas
    python3 dev.py test      lint, types and tests; with arguments of pytest, those tests alone
    python3 dev.py docs      the documentation site, into build/docs; a warning is an error
    python3 dev.py bench     the benchmarks: a quick look, or with --full all of them
    python3 dev.py pythons   the installed Pythons that can be used, newest first

The first run installs the tested versions (constraints/) into `.venv`; later runs need no network.
What dev.py does not know, and all after `--`, goes on to the job. Environment variables:

    PYTHON   the Python to use: a path, a command or a version ("3.12"); default: the newest
    VENV     the folder of the environment; default: .venv; docs and --sources add their names

--sources and --peers install PyTorch. On PyPI it brings several GB of CUDA on Linux; where pip knows
no other one, type first `export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu`.
It must parse on Python 3.6, so that an old `python3` gets a message and not a SyntaxError.
"""

import argparse
import contextlib
import fcntl
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
from typing import Dict, Iterator, List, NamedTuple, Optional

ROOT = os.path.dirname(os.path.abspath(__file__))
DEMO = [["examples/digits.py"], ["examples/digits_fit.py"]]
LINT = [["ruff", "check"], ["ruff", "format", "--check"], ["codespell_lib"], ["mypy"]]
SITE = ["sphinx", "-W", "--keep-going", "-q", "docs", "build/docs"]
BUILD_TOOLS = ["uv", "hatchling", "editables"]
# uv takes a tenth of pip's time; where it fails, pip installs. It calls pip's settings UV_...:
UV = {"index-url": "DEFAULT_INDEX", "extra-index-url": "INDEX", "find-links": "FIND_LINKS"}
STAMP = "made-by-dev.py"

# Run by every candidate, so it stays with what all Pythons since 3.4 have.
PROBE = """
import importlib.util, json, platform, sys, sysconfig
version = platform.python_version()
fault = "older than 3.11" if sys.version_info < (3, 11) else ""
if platform.python_implementation() != "CPython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
    fault = "not CPython with the GIL"
elif sys.version_info.releaselevel != "final":
    fault = "not released"
elif not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
    fault = "without venv: sudo apt-get install python%d.%d-venv" % sys.version_info[:2]
print(json.dumps([version, getattr(sys, "_base_executable", None) or sys.executable, fault]))
"""

# An interpreter that was run; ``fault`` is why it cannot be used, or "".
Python = NamedTuple("Python", [("release", str), ("executable", str), ("fault", str)])
# An environment: the end of its folder's name, what is installed, and its only Python or "".
Contents = NamedTuple("Contents", [("suffix", str), ("packages", List[str]), ("python", str)])
# The project is built with the tools that were installed before: pinned, and without network.
SUITE = Contents("", ["--no-build-isolation", "-e", ".[test]"], "")
OPTIONAL = ["-r", "constraints/sources-python-3.11.txt"]
SOURCES = Contents("-sources", OPTIONAL + SUITE.packages, "3.11")
DOCS = Contents("-docs", ["-r", "constraints/docs.txt", *SUITE.packages[:-1], ".[examples]"], "")


def numbers(release: str) -> List[int]:
    """Returns the numbers of a release, to compare it."""
    return list(map(int, re.findall(r"\d+", release)))


def matches(release: str, *wanted: str) -> bool:
    """True if a release is each one wanted; "3.12" stands for every 3.12.x, "" for all."""
    return all(not one or (release + ".").startswith(one + ".") for one in wanted)


def probe(executable: str) -> Optional[Python]:
    """Runs an interpreter and returns what it is, or None where it does not run."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    command, null = [executable, "-c", PROBE], subprocess.DEVNULL
    try:
        text = subprocess.check_output(command, stderr=null, env=environment, timeout=30)
        return Python(*json.loads(text.decode()))
    except (OSError, ValueError, TypeError, subprocess.SubprocessError):
        return None


def installed() -> List[Python]:
    """Returns the Pythons of PATH, pyenv and uv that run, newest first, each once."""
    pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    uv = os.environ.get("UV_PYTHON_INSTALL_DIR") or os.path.expanduser("~/.local/share/uv/python")
    folders = [glob.escape(folder) for folder in os.environ.get("PATH", "").split(os.pathsep)]
    paths = [sys.executable] if sys.executable else []
    for folder in [*folders, pyenv + "/versions/*/bin", uv + "/*/bin"]:
        paths += sorted(glob.glob(folder + "/python*"))
    paths = [p for p in paths if re.match(r"python(3(\.\d+)?)?$", os.path.basename(p))]
    once = {os.path.realpath(path): path for path in reversed(paths)}
    pythons = {os.path.realpath(p.executable): p for p in map(probe, once.values()) if p}
    return sorted(pythons.values(), key=lambda p: numbers(p.release), reverse=True)


def wanted() -> "tuple[str, Optional[Python]]":
    """Returns the release that PYTHON asks for, "" for any, and the interpreter if it names one."""
    text = os.environ.get("PYTHON", "")
    if re.match(r"(\d+(\.\d+)*)?$", text):
        return text, None
    python = probe(shutil.which(text) or os.path.abspath(text))
    return (python.release, python) if python else (text, None)


def usable(only: str = "") -> List[Python]:
    """Returns the Pythons that can make an environment, newest first, at least one."""
    release, named = wanted()
    found = [named] if named else installed()
    able = [p for p in found if matches(p.release, release, only) and not p.fault]
    if able:
        return able
    sys.exit(
        "dev.py: No usable Python was found; needed is a released CPython {}{}. Installed:{}\n"
        "Next, install one, such as with `uv python install 3.13` or your system's packages; or\n"
        "name one that is elsewhere: PYTHON=/path/to/python3 python3 dev.py demo".format(
            only or "3.11 or later",
            ", and PYTHON=" + os.environ["PYTHON"] if release else "",
            "".join("\n  Python {}  {}  {}".format(*python) for python in found) or " none",
        )
    )


def constraints_file(release: str) -> str:
    """Returns the tested versions for a Python; one newer than all takes the newest."""
    paths = glob.glob(os.path.join(glob.escape(ROOT), "constraints", "python-3.*.txt"))
    known = {tuple(numbers(os.path.basename(path))): path for path in paths}
    return known[max(version for version in known if list(version) <= numbers(release))]


def stamp_for(release: str, contents: Contents = SUITE) -> str:
    """Returns the stamp of a finished environment: its Python, and what it was made of and where."""
    total = hashlib.sha256(ROOT.encode())
    pins = [os.path.join(ROOT, name) for name in contents.packages if name.endswith(".txt")]
    for path in [os.path.join(ROOT, "pyproject.toml"), constraints_file(release), *pins]:
        with open(path, "rb") as file:
            total.update(hashlib.sha256(file.read()).digest())
    return release + " " + total.hexdigest()


def is_ready(folder: str, contents: Contents = SUITE) -> bool:
    """True if an environment is finished, up to date, in its place, and of the Python wanted."""
    try:
        with open(os.path.join(folder, STAMP), encoding="utf-8") as file:
            stamp = file.read()
        release = stamp.partition(" ")[0]
        fits = stamp == stamp_for(release, contents) and os.access(folder + "/bin/python", os.X_OK)
    except (OSError, ValueError):
        return False
    return fits and matches(release, wanted()[0], contents.python)


def create(folder: str, contents: Contents) -> None:
    """Makes an environment, marked first and stamped last, in place of one that was made here."""
    python = usable(contents.python)[0]
    if os.path.islink(folder) or (os.path.isdir(folder) and os.listdir(folder)):
        if os.path.islink(folder) or not os.path.isfile(os.path.join(folder, STAMP)):
            sys.exit(
                "dev.py: {} is there already and was not made by dev.py, so it is left alone.\n"
                "Next, use another folder: VENV=.venv-dev python3 dev.py demo".format(folder)
            )
        shutil.rmtree(folder)
    os.makedirs(folder, exist_ok=True)
    open(os.path.join(folder, STAMP), "w").close()  # Empty until all is installed.
    inside = os.path.join(folder, "bin", "python")
    pinned = ["-c", constraints_file(python.release)]
    venv = [python.executable, "-m", "venv", folder]
    pip = [inside, "-m", "pip", "install", "-qq", "--no-compile", *pinned]  # most is never imported
    uv = [inside, "-m", "uv", "pip", "install", "-q", *pinned, *contents.packages]
    for commands in ([venv], [pip + BUILD_TOOLS], [uv, pip + contents.packages]):
        listed = subprocess.getoutput(shlex.quote(inside) + " -m pip config list")
        settings = re.findall(r"\.([a-z-]+)='(.*)'", listed)[::-1]  # the environment's last
        known = {"UV_" + UV[key]: text.replace("\\n", " ") for key, text in settings if key in UV}
        known["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # as pip: the best of all indexes
        if all(any(run([command], {**known, **job_environment(inside)})) for command in commands):
            sys.exit(
                "dev.py: Installing failed: {}\nNext, check the network and the disk, then type the same"
                " command again; it starts afresh.".format(" ".join(map(shlex.quote, commands[-1])))
            )
    with open(os.path.join(folder, STAMP), "w", encoding="utf-8") as file:
        file.write(stamp_for(python.release, contents))


@contextlib.contextmanager
def environment_ready(contents: Contents = SUITE) -> Iterator[str]:
    """Yields the Python of a ready environment, which no other dev.py replaces meanwhile."""
    folder = os.path.join(ROOT, os.environ.get("VENV") or ".venv") + contents.suffix
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    with open(folder + ".lock", "a") as used:
        fcntl.flock(used, fcntl.LOCK_SH)
        if not is_ready(folder, contents):
            print("dev.py: making", folder, "(1-4 GB) when no other dev.py uses it", flush=True)
            fcntl.flock(used, fcntl.LOCK_UN)
            with open(folder + ".making.lock", "a") as making:  # who waits here waits for no user
                fcntl.flock(making, fcntl.LOCK_EX)
                if not is_ready(folder, contents):
                    fcntl.flock(used, fcntl.LOCK_EX)
                    create(folder, contents)
                fcntl.flock(used, fcntl.LOCK_SH)
        yield os.path.join(folder, "bin", "python")


def job_environment(python: str, devices: str = "simulated") -> Dict[str, str]:
    """Returns the variables of a job, cleared of what other jobs and clusters left in the shell."""
    cleared = r"(TF_CONFIG|PYTHON(PATH|HOME)?|VENV)$|SLURM_" + "|JAX_" * (devices == "simulated")
    kept = {k: v for k, v in os.environ.items() if not re.match(cleared, k)}
    kept["VIRTUAL_ENV"] = os.path.dirname(os.path.dirname(python))
    kept["PATH"] = os.path.dirname(python) + os.pathsep + kept.get("PATH", os.defpath)
    if devices == "simulated":
        kept.update(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=8")
        # XLA takes its number of pool threads from NPROC. With fewer threads than devices, a loop
        # of collectives that nobody reads can wait for itself for ever.
        kept["NPROC"] = "16"
    return kept


def run(commands: List[List[str]], environment: Dict[str, str]) -> List[int]:
    """Runs commands in the repository, all at once; returns their statuses and leaves none behind."""
    children = [subprocess.Popen(command, cwd=ROOT, env=environment) for command in commands]
    try:
        return [child.wait() for child in children]
    finally:
        for child in children:
            child.terminate()  # does nothing if it has ended
            child.wait()


def work(options: argparse.Namespace, rest: List[str]) -> int:
    """Runs the demo or the benchmarks, until a part of them fails or has shown its help."""
    with environment_ready() as python:
        environment = job_environment(python, options.devices)
        for part in DEMO if options.command == "demo" else [["-m", "benchmarks"]]:
            (status,) = run([[python, *part, "--devices", options.devices, *rest]], environment)
            if status or {"-h", "--help"} & set(rest):
                break
    return status


def test(options: argparse.Namespace, rest: List[str]) -> int:
    """Runs the checks and the tests, or pytest alone when it is given arguments; or builds the site."""
    workers = str(min(8, 1 + (os.cpu_count() or 1)))  # one more than cores, since some tests wait
    steps = [["pytest", *(rest or ["-n", workers, "--dist", "worksteal"])]]
    contents = SOURCES if options.sources else SUITE
    if options.command == "docs":
        steps, contents = [SITE + rest], DOCS
    elif options.sources and not rest:
        steps = [["pytest", "tests/data/sources", "tests/servers", "-k", "sources or ray"]]
    elif not rest:
        steps = LINT + steps
    with environment_ready(contents) as python:
        # Compiled programs and modules that workers, the processes of tests and later runs share.
        environment = dict(
            job_environment(python),
            JAX_COMPILATION_CACHE_DIR=os.path.join(ROOT, ".cache", "jax"),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
            PYTHONDONTWRITEBYTECODE="",
            PYTHONPYCACHEPREFIX=os.path.join(ROOT, ".cache", "pycache"),
        )
        print("dev.py:", ", ".join(map(" ".join, steps)), flush=True)
        statuses = run([[python, "-m", *step] for step in steps], environment)
    for number, step in enumerate(steps):
        if statuses[number]:
            print("dev.py: FAILED; to repeat it:", *map(shlex.quote, [python, "-m", *step]))
    return int(any(statuses))


def pythons(options: argparse.Namespace, rest: List[str]) -> int:
    """Lists the Pythons that can be used: version and path, newest first."""
    for python in usable():
        print(python.release + "\t" + python.executable)
    return 0


def main(arguments: List[str]) -> int:
    """Runs one command and returns the exit status."""
    jobs = {"demo": work, "test": test, "docs": test, "bench": work, "pythons": pythons}
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("dev.py", None, __doc__, formatter_class=raw)
    parser.add_argument("command", choices=list(jobs))
    text = "8 simulated CPU devices (default), or those that JAX finds"
    parser.add_argument("--devices", choices=["simulated", "real"], default="simulated", help=text)
    parser.add_argument("--sources", action="store_true", help="test: those of TensorFlow etc.")
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options, rest = parser.parse_known_args(arguments[:at])
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with contextlib.suppress(KeyboardInterrupt):
        return jobs[options.command](options, rest + arguments[at + 1 :])
    return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
