"""dev.py, on pretended Pythons: shell scripts that answer as an interpreter would."""

import ast
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import dev
from benchmarks._peer_environments import PEERS, peer_arguments

REPOSITORY = Path(dev.__file__).parent
CONSTRAINTS = sorted((REPOSITORY / "constraints").glob("python-*.txt"))
SOURCES = REPOSITORY / "constraints" / "sources-python-3.11.txt"

# Answers the probe, makes "environments" whose Python is this script again, and notes every
# other call; `fail` in a file beside it makes the calls that contain that text fail.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
  "-c "*) echo '{answer}'; exit 0 ;;
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; exit 0 ;;
  "-m pip config list") echo ":env:.find-links='/wheels'
global.find-links='/others'"; exit 0 ;;
  "-m uv "*) echo "$UV_FIND_LINKS: $*" >> '{log}' ;;
  *) echo "$*" >> '{log}' ;;
esac
if [ -f '{log}.fail' ] && echo "$*" | grep -q -f '{log}.fail'; then echo "no network"; exit 1; fi
"""


def write_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


class FakeRepository:
    """A copy of dev.py's files in a path with a space, and a PATH with pretended Pythons only."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a repository"
        self.tools = folder / "tools"
        self.log = folder / "calls.txt"
        self.root.mkdir()
        self.tools.mkdir()
        shutil.copy(REPOSITORY / "pyproject.toml", self.root)
        shutil.copytree(REPOSITORY / "constraints", self.root / "constraints")

    def add_python(self, version: str, fault: str = "") -> Path:
        path = self.tools / ("python" + version.rpartition(".")[0])
        answer = json.dumps([version, str(path), fault])
        return write_script(path, FAKE_PYTHON.format(answer=answer, log=self.log))

    def fail_on(self, text: str) -> None:
        Path(f"{self.log}.fail").write_text(text + "\n")

    def calls(self) -> list[str]:
        """What the pretended Pythons were asked since the last call of this method."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRepository:
    fake = FakeRepository(tmp_path)
    monkeypatch.setattr(dev, "ROOT", str(fake.root))
    monkeypatch.setattr(sys, "executable", "")
    # The shell scripts need the system's tools, but none of its Pythons may be taken.
    for tool in ("sh", "mkdir", "cp", "grep"):
        (fake.tools / tool).symlink_to(shutil.which(tool) or pytest.skip(f"no {tool}"))
    monkeypatch.setenv("PATH", str(fake.tools))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("PYTHON", "VENV", "PYENV_ROOT", "UV_PYTHON_INSTALL_DIR"):
        monkeypatch.delenv(name, raising=False)
    return fake


# Choosing a Python


def test_parses_on_python_3_6() -> None:
    ast.parse((REPOSITORY / "dev.py").read_text(), feature_version=(3, 6))
    with pytest.raises(SyntaxError, match=r"3\.8"):  # This parser knows what is newer.
        ast.parse("(newer := 1)", feature_version=(3, 6))


def test_it_is_at_most_300_lines() -> None:
    assert len((REPOSITORY / "dev.py").read_text().splitlines()) <= 300


def test_probe_describes_this_python() -> None:
    version = ".".join(map(str, sys.version_info[:3]))
    assert dev.probe(sys.executable) == (version, sys._base_executable, "")


def test_the_newest_usable_python_is_taken_wherever_it_is(repository: FakeRepository) -> None:
    """On PATH or where pyenv keeps it; not one that is broken, unreleased or without venv."""
    repository.add_python("3.9.18", "older than 3.11")
    repository.add_python("3.11.7")
    repository.add_python("3.13.0", "without venv")
    write_script(repository.tools / "python3.14", "#!/bin/sh\nexit 127\n")
    write_script(repository.tools / "python3.13-config", "#!/bin/sh\nexit 1\n")
    kept = Path(os.environ["HOME"]) / ".pyenv" / "versions" / "3.12.1" / "bin"
    kept.mkdir(parents=True)
    repository.add_python("3.12.1").rename(kept / "python3.12")
    # A shim that starts a Python which is there already, by another name.
    alias = repository.tools / "alias"
    alias.symlink_to(repository.tools / "python3.11")
    shim = FAKE_PYTHON.format(answer=json.dumps(["3.11.7", str(alias), ""]), log=repository.log)
    write_script(repository.tools / "python3", shim)
    releases = [python.release for python in dev.installed()]
    assert releases == ["3.13.0", "3.12.1", "3.11.7", "3.9.18"]
    assert [python.release for python in dev.usable()] == ["3.12.1", "3.11.7"]


@pytest.mark.parametrize("wanted", ["python3.11", "{tools}/python3.11", "3.11"])
def test_python_variable_takes_a_command_a_path_and_a_version(
    repository: FakeRepository, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    for release in ("3.11.7", "3.13.0"):
        repository.add_python(release)
    monkeypatch.setenv("PYTHON", wanted.format(tools=repository.tools))
    assert [python.release for python in dev.usable()] == ["3.11.7"]


@pytest.mark.parametrize("wanted", ["", "3.14", "python3.9", "python3.77"])
def test_without_a_fitting_python_the_message_lists_the_others(
    repository: FakeRepository, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    path = repository.add_python("3.9.18", "older than 3.11")
    monkeypatch.setenv("PYTHON", wanted)
    with pytest.raises(SystemExit) as caught:
        dev.usable()
    message = str(caught.value)
    assert "needed is a released CPython 3.11 or later" in message
    assert ("and PYTHON=" + wanted in message) == bool(wanted)
    assert f"Python 3.9.18  {path}  older than 3.11" in message
    assert "Next, install one" in message


def test_pythons_lists_the_usable_ones(
    repository: FakeRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.add_python("3.9.18", "older than 3.11")
    paths = [repository.add_python(version) for version in ("3.13.0", "3.11.7")]
    assert dev.main(["pythons"]) == 0
    assert capsys.readouterr().out == f"3.13.0\t{paths[0]}\n3.11.7\t{paths[1]}\n"


# Constraints


@pytest.mark.parametrize(
    ("release", "name"),
    [
        ("3.11.7", "python-3.11.txt"),
        ("3.13.0", "python-3.13.txt"),
        ("3.99.0", CONSTRAINTS[-1].name),
    ],
)
def test_constraints_file(release: str, name: str) -> None:
    assert Path(dev.constraints_file(release)).name == name


def pins_of(path: Path) -> dict[str, str]:
    """The versions of a file, in which every line must be one exact version."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9.-]+==[0-9][0-9a-z.]*", line) for line in lines)
    return dict(line.split("==") for line in lines)


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.stem)
def test_constraints_pin_everything_that_the_project_names(path: Path) -> None:
    pinned = pins_of(path)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = [*project["dependencies"], *extras["examples"], *extras["test"], *dev.BUILD_TOOLS]
    names = {re.split(r"[\[>=<]", requirement)[0] for requirement in named}
    assert names - {project["name"]} <= set(pinned)
    # The suite does without the optional libraries.
    assert not set(pinned) & {"tensorflow", "tensorflow-cpu", "torch", "keras", "datasets"}


def test_the_optional_libraries_are_pinned_as_cpu_builds() -> None:
    pinned = pins_of(SOURCES)
    assert {"tensorflow-cpu", "torch", "datasets"} <= set(pinned)
    assert not [name for name in pinned if name == "tensorflow" or name.startswith("nvidia")]
    # A package in both files could be asked for in two versions, which pip refuses.
    assert not set(pinned) & set(pins_of(CONSTRAINTS[0]))


def test_the_site_is_pinned_beside_the_constraints_of_every_python() -> None:
    pinned = pins_of(REPOSITORY / "constraints" / "docs.txt")
    assert {"sphinx", "myst-nb", "furo"} <= set(pinned)
    assert [path for path in CONSTRAINTS if set(pinned) & set(pins_of(path))] == []


@pytest.mark.parametrize("contents", PEERS.values(), ids=PEERS)
def test_the_peers_are_pinned_beside_the_constraints(contents: dev.Contents) -> None:
    text = (REPOSITORY / contents.packages[-1]).read_text()
    lines = [line for line in text.splitlines() if line[0] != "#"]
    names = {re.split("[=;]", line)[0]: "==" in line for line in lines}
    assert not [name for name in names if name.startswith("nvidia") or name == "tensorflow"]
    # Without a version here there is one in the constraints, and the other way round.
    for path in CONSTRAINTS:
        pinned = pins_of(path)
        assert {name: name not in pinned for name in names} == names
    # Two tests of one library are of one version, and PyTorch is never the package with CUDA.
    elsewhere = pins_of(SOURCES)
    for line in lines:
        name, _, version = line.partition(";")[0].partition("==")
        assert version.removesuffix("+cpu") in ("", elsewhere.get(name, ""))
        assert name != "torch" or "+cpu" in version or 'sys_platform != "linux"' in line


# The environment


@pytest.fixture
def finished(repository: FakeRepository) -> Path:
    """An environment that is ready."""
    folder = repository.root / ".venv"
    write_script(folder / "bin" / "python", "#!/bin/sh\n")
    (folder / dev.STAMP).write_text(dev.stamp_for("3.12.1"))
    assert dev.is_ready(str(folder))
    return folder


@pytest.mark.parametrize("text", [None, "", "3.12.1", "3.12.1 0", "x y", "\udc80"])
def test_an_environment_without_a_whole_stamp_is_not_ready(
    finished: Path, text: str | None
) -> None:
    (finished / dev.STAMP).unlink()
    if text is not None:
        (finished / dev.STAMP).write_text(text, errors="surrogateescape")
    assert not dev.is_ready(str(finished))


@pytest.mark.parametrize(
    ("changed", "ready"),
    [
        ("pyproject.toml", False),
        ("constraints/python-3.12.txt", False),
        ("constraints/python-3.11.txt", True),
    ],
)
def test_a_changed_input_makes_the_environment_stale(
    finished: Path, changed: str, ready: bool
) -> None:
    with open(os.path.join(dev.ROOT, changed), "a") as file:
        file.write("# changed\n")
    assert dev.is_ready(str(finished)) is ready


def test_a_moved_environment_is_not_ready(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = Path(dev.ROOT).with_name("elsewhere")
    Path(dev.ROOT).rename(moved)
    monkeypatch.setattr(dev, "ROOT", str(moved))
    assert not dev.is_ready(str(moved / finished.name))


def test_an_environment_whose_python_is_gone_is_not_ready(finished: Path) -> None:
    (finished / "bin" / "python").unlink()
    assert not dev.is_ready(str(finished))


@pytest.mark.parametrize(
    ("wanted", "ready"), [("3.12", True), ("3.12.1", True), ("3.1", False), ("python3.9", False)]
)
def test_an_environment_of_another_python_is_not_ready(
    finished: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, ready: bool
) -> None:
    monkeypatch.setenv("PYTHON", wanted)
    assert dev.is_ready(str(finished)) is ready


@pytest.mark.parametrize("link", [False, True])
def test_a_folder_that_dev_did_not_make_is_left_alone(
    repository: FakeRepository, tmp_path: Path, link: bool
) -> None:
    """Nor is one that a link leads to, whoever made it."""
    repository.add_python("3.13.0")
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / (dev.STAMP if link else "pyvenv.cfg")).touch()
    if link:
        (repository.root / ".venv").symlink_to(folder)
    else:
        folder.rename(repository.root / ".venv")
    with pytest.raises(SystemExit, match=r"was not made by dev\.py, so it is left alone"):
        dev.main(["demo"])
    assert os.listdir(repository.root / ".venv")


def test_the_first_run_installs_and_the_second_does_not(
    repository: FakeRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.add_python("3.11.7")
    repository.add_python("3.13.0")
    assert dev.main(["demo", "--epochs", "3"]) == 0
    tools, packages, job, fit = repository.calls()
    assert "constraints/python-3.13.txt uv hatchling" in tools
    assert re.fullmatch(r"/wheels: -m uv pip .* --no-build-isolation -e \.\[test\]", packages)
    assert job == "examples/digits.py --devices simulated --epochs 3"
    assert fit == "examples/digits_fit.py --devices simulated --epochs 3"
    assert "making " in capsys.readouterr().out
    assert dev.main(["demo"]) == 0
    assert len(repository.calls()) == 2
    assert capsys.readouterr().out == ""


def test_a_failed_installation_is_reported_and_redone(repository: FakeRepository) -> None:
    repository.add_python("3.13.0")
    repository.fail_on("no-build-isolation")
    with pytest.raises(SystemExit, match=r"Installing failed: .* -e .*\nNext, check the network"):
        dev.main(["demo"])
    repository.fail_on("nothing")
    repository.calls()
    assert dev.main(["demo"]) == 0
    assert len(repository.calls()) == 4


def test_pip_installs_where_uv_fails(repository: FakeRepository) -> None:
    repository.add_python("3.13.0")
    repository.fail_on("-m uv")
    assert dev.main(["test", "-x"]) == 0
    _, with_uv, with_pip, _ = repository.calls()
    assert "-m uv " in with_uv
    assert re.fullmatch(r"-m pip install .* --no-build-isolation -e \.\[test\]", with_pip)


def test_venv_variable_names_the_folder(
    repository: FakeRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.add_python("3.13.0")
    monkeypatch.setenv("VENV", ".venv-other")
    assert dev.main(["demo"]) == 0
    assert (repository.root / ".venv-other" / dev.STAMP).is_file()
    assert not (repository.root / ".venv").exists()


def test_of_two_first_runs_one_installs_and_the_other_waits(repository: FakeRepository) -> None:
    """Which is ready while the first one uses the environment; both wait for an earlier user."""
    repository.add_python("3.13.0")
    script = (
        f"import dev, signal, sys; signal.alarm(60); dev.ROOT = {str(repository.root)!r}\n"
        "with dev.environment_ready():\n    print('ready', flush=True)\n    sys.stdin.read()\n"
    )
    with (repository.root / ".venv.lock").open("a") as user:
        fcntl.flock(user, fcntl.LOCK_SH)
        runs = [
            subprocess.Popen(
                [sys._base_executable, "-c", script],
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        said = [run.stdout.readline() for run in runs]
        assert ["making" in line for line in said] == [True, True]
        assert not repository.calls()
    assert [run.stdout.readline() for run in runs] == ["ready\n", "ready\n"]
    for run in runs:
        run.communicate()
    assert [run.returncode for run in runs] == [0, 0]
    assert len(repository.calls()) == 2


def test_the_sources_have_a_separate_environment(repository: FakeRepository) -> None:
    """On Python 3.11, which alone has their versions; a change of those leaves the suite's as it is."""
    repository.add_python("3.11.7")
    repository.add_python("3.13.0")
    assert dev.main(["test", "--sources"]) == 0
    _, packages, tests = repository.calls()
    assert "-r constraints/sources-python-3.11.txt" in packages
    assert "constraints/python-3.11.txt" in packages
    assert tests == "-m pytest tests/data/sources tests/servers -k sources or ray"
    assert dev.main(["test", "-x"]) == 0
    assert len(repository.calls()) == 3
    with (repository.root / "constraints" / SOURCES.name).open("a") as file:
        file.write("another==1.0\n")
    assert dev.is_ready(str(repository.root / ".venv"))
    assert not dev.is_ready(str(repository.root / ".venv-sources"), dev.SOURCES)


def test_the_sources_on_another_python_are_refused(
    repository: FakeRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.add_python("3.13.0")
    monkeypatch.setenv("PYTHON", "3.13")
    with pytest.raises(SystemExit, match=r"a released CPython 3\.11, and PYTHON=3\.13"):
        dev.main(["test", "--sources"])


def test_each_peer_has_an_environment_with_nothing_else(repository: FakeRepository) -> None:
    """Or, where it cannot be made, the reason why not."""
    repository.add_python("3.12.1")
    repository.fail_on("peers-keras")
    with contextlib.ExitStack() as held:
        keras, absent, *others = peer_arguments(held)
    assert keras == "--absent"
    assert absent.startswith("keras=Installing failed")
    python = f"tensorflow={repository.root}/.venv-peers-tensorflow/bin/python"
    assert others[:3] == ["--python", python, "--absent"]
    assert others[3] == "torch=No usable Python was found; needed is a released CPython 3.11"
    installed = [call for call in repository.calls() if "-m uv " in call]
    files = ["constraints/peers-keras.txt", "constraints/peers-tensorflow.txt"]
    assert [call.partition(" -r ")[2] for call in installed] == files


# Running jobs


@pytest.mark.parametrize("devices", ["simulated", "real"])
def test_a_job_gets_a_clean_environment(monkeypatch: pytest.MonkeyPatch, devices: str) -> None:
    """Nothing of other jobs and clusters; with real devices what chooses them is kept."""
    inherited = {
        "HOME": "/home/me",
        "JAX_PLATFORMS": "cuda",
        "PATH": "/bin",
        "PYTHONPATH": "/old",
        "PYTHONUNBUFFERED": "1",
        "SLURM_JOB_ID": "7",
        "TF_CONFIG": "{}",
        "XLA_FLAGS": "--own",
    }
    monkeypatch.setattr(os, "environ", inherited)
    kept = {"HOME": "/home/me", "PATH": "/repo/.venv/bin:/bin", "PYTHONUNBUFFERED": "1"}
    kept["VIRTUAL_ENV"] = "/repo/.venv"
    if devices == "real":
        kept |= {"JAX_PLATFORMS": "cuda", "XLA_FLAGS": "--own"}
    else:
        flag = "--xla_force_host_platform_device_count=8"
        kept |= {"JAX_PLATFORMS": "cpu", "NPROC": "16", "XLA_FLAGS": flag}
    assert dev.job_environment("/repo/.venv/bin/python", devices) == kept


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["test"], ["ruff check", "ruff format --check", "codespell_lib", "mypy", "pytest -n"]),
        (["test", "-k", "stamp", "tests/test_dev.py"], ["pytest -k stamp tests/test_dev.py"]),
        (["test", "--sources", "-x"], ["pytest -x"]),
        (["docs", "-E"], ["sphinx -W --keep-going -q docs build/docs -E"]),
        (["bench"], ["benchmarks --devices simulated"]),
        (
            ["bench", "--full", "--only", "fit", "--devices", "real"],
            ["benchmarks --devices real --full --only fit"],
        ),
        (["bench", "--", "--sources"], ["benchmarks --devices simulated --sources"]),
    ],
)
def test_what_a_command_runs(
    repository: FakeRepository, arguments: list[str], expected: list[str]
) -> None:
    repository.add_python("3.11.7")
    assert dev.main(arguments) == 0
    steps = sorted(repository.calls()[2:])  # they run beside each other
    assert len(steps) == len(expected)
    for step, start in zip(steps, sorted(expected), strict=True):
        assert step.startswith(f"-m {start}")


def test_the_demo_ends_with_a_job_that_failed_and_shows_one_help(
    repository: FakeRepository,
) -> None:
    repository.add_python("3.13.0")
    assert dev.main(["demo", "--", "--help"]) == 0
    assert len(repository.calls()) == 2 + 1
    repository.fail_on("digits.py")
    assert dev.main(["demo"]) == 1
    assert len(repository.calls()) == 1


def test_every_step_runs_and_the_failed_ones_are_named_last(
    repository: FakeRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.add_python("3.13.0")
    repository.fail_on("ruff check")
    assert dev.main(["test"]) == 1
    assert len(repository.calls()) == 2 + 5
    last = capsys.readouterr().out.splitlines()[-1]
    python = f"'{repository.root}/.venv/bin/python'"
    assert last == f"dev.py: FAILED; to repeat it: {python} -m ruff check"


def test_termination_ends_the_job(tmp_path: Path) -> None:
    write_script(
        tmp_path / "python", f"#!/bin/sh\nsleep 0.5\necho $$ > {tmp_path}/pid\nexec sleep 600\n"
    )
    script = (
        "import contextlib, dev, sys\n"
        f"dev.environment_ready = lambda: contextlib.nullcontext('{tmp_path}/python')\n"
        "sys.exit(dev.main(['demo']))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY) as outer:
        deadline = time.monotonic() + 60
        pid = tmp_path / "pid"
        while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        outer.send_signal(signal.SIGTERM)
        assert outer.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


# .ci/run

FAKE_CI_PYTHON = """#!/bin/sh
if [ "$2" = pythons ]; then printf '{pythons}'; exit 0; fi
echo "$PYTHON $VENV $*" >> calls.txt
exit {status}
"""


def run_ci(folder: Path, pythons: str, status: int = 0) -> tuple[int, str, list[str]]:
    ci = folder / ".ci" / "run"
    ci.parent.mkdir()
    shutil.copy(REPOSITORY / ".ci" / "run", ci)
    write_script(folder / "bin" / "python3", FAKE_CI_PYTHON.format(pythons=pythons, status=status))
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    done = subprocess.run([ci], env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, (folder / "calls.txt").read_text().splitlines()


EXHAUSTIVE = (
    "dev.py test -n 3 -m exhaustive tests/docs tests/api/test_docstring_examples.py"
    " tests/processes/test_one_job.py::test_values_reductions_and_gathers_are_those_of_all_processes"
    " tests/processes/test_fit_together.py::test_every_process_has_the_numbers_of_one"
    " tests/processes/test_checkpoints.py::test_a_checkpoint_of_two_processes_is_loaded_by_four_and_back"
    " tests/processes/test_fully_sharded_together.py::test_every_device_keeps_its_share[2]"
    " tests/examples/test_parameter_server.py::test_it_learns_and_loses_no_update[options0]"
    " tests/examples/test_digits_fit.py::test_fit_learns_and_reports_exactly_the_images_of_the_data"
)


def test_ci_runs_the_oldest_and_the_newest_python(tmp_path: Path) -> None:
    status, _, calls = run_ci(tmp_path, r"3.13.0\t/a\n3.12.1\t/b\n3.11.7\t/c\n3.11.2\t/d\n")
    assert status == 0
    assert sorted(calls[:-1]) == [
        "3.11 .venv-oldest dev.py docs",
        "3.11 .venv-oldest dev.py test --sources",
        "3.11 .venv-oldest dev.py test -n 2 --dist worksteal --first-case",
        f"3.11 .venv-oldest {EXHAUSTIVE}",
        "3.13 .venv dev.py test --collect-only -qq",
    ]
    assert calls[-1] == "3.13 .venv dev.py test"


def test_of_a_test_with_parameters_the_first_case_is_kept(pytestconfig: pytest.Config) -> None:
    here = pytestconfig.pluginmanager.get_plugin(str(REPOSITORY / "tests" / "conftest.py"))
    names = ["a.py::f[1]", "a.py::f[2]", "a.py::g", "b.py::f[1]"]
    items = [SimpleNamespace(nodeid=name, path=here.TESTS / name[:4]) for name in names]
    for wanted, kept in [(False, names), (True, [name for name in names if name[-2] != "2"])]:
        config = SimpleNamespace(getoption={"--first-case": wanted}.get)
        marked = here.pytest_collection_modifyitems(config, items)
        assert [next(marked), next(marked, None)] == [None, None]
        assert [item.nodeid for item in items] == kept


def test_ci_on_one_python_says_what_it_skips(tmp_path: Path) -> None:
    status, output, calls = run_ci(tmp_path, r"3.12.1\t/b\n")
    assert status == 0
    assert "skipped: the tests on an older Python (only 3.12 is installed)" in output
    assert "skipped: the sources of TensorFlow, PyTorch and Hugging Face (no Python 3.11)" in output
    commands = ["dev.py docs", "dev.py test", EXHAUSTIVE]
    assert sorted(calls) == [f"3.12 .venv-oldest {command}" for command in commands]


def test_ci_fails_with_the_tests(tmp_path: Path) -> None:
    status, _, calls = run_ci(tmp_path, r"3.13.0\t/a\n3.11.7\t/c\n", status=1)
    assert status == 1
    assert "3.13 .venv dev.py test" not in calls
