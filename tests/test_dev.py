"""dev.py, on pretended Pythons: shell scripts that answer as an interpreter would."""

import ast
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
from typing import Any

import pytest

import dev

REPOSITORY = Path(dev.__file__).parent
CONSTRAINTS = sorted((REPOSITORY / "constraints").glob("python-*.txt"))
SOURCES = REPOSITORY / dev.SOURCES.pins

posix = pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")

# Answers the probe, makes "environments" whose Python is this script again, and notes every
# other call; `fail` in a file beside it makes the calls that contain that text fail.
FAKE_PYTHON = """#!/bin/sh
here=$(dirname "$0")
case "$*" in
  "-c import "*) ;;
  "-c "*) echo '{answer}'; exit 0 ;;
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; exit 0 ;;
esac
echo "$*" >> '{log}'
if [ -f '{log}.fail' ] && echo "$*" | grep -q -f '{log}.fail'; then echo "no network"; exit 1; fi
"""


def python(version: str = "3.12.1", *, stable: bool = True, venv: bool = True) -> dev.Python:
    parts = tuple(int(part) for part in version.split("."))
    return dev.Python(parts, f"/usr/bin/python{version}", stable, venv)


def write_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


class FakeRepository:
    """A copy of dev.py in a path with a space, and a PATH with pretended Pythons only."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a repository"
        self.tools = folder / "tools"
        self.log = folder / "calls.txt"
        self.home = folder / "home"
        (self.root / "examples").mkdir(parents=True)
        self.home.mkdir()
        for name in dev.DEMO_SCRIPTS:
            (self.root / "examples" / name).touch()
        shutil.copy(REPOSITORY / "pyproject.toml", self.root)
        shutil.copytree(REPOSITORY / "constraints", self.root / "constraints")

    def add_python(self, version: str, *, venv: bool = True) -> Path:
        path = self.tools / ("python" + version.rpartition(".")[0])
        fields = {
            "version": [int(part) for part in version.split(".")],
            "executable": str(path),
            "stable": True,
            "venv": venv,
        }
        return write_script(path, FAKE_PYTHON.format(answer=json.dumps(fields), log=self.log))

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
    # The shell scripts need the system's tools, but none of its Pythons may be found.
    for tool in ("sh", "dirname", "mkdir", "cp", "grep", "sleep"):
        fake.tools.mkdir(exist_ok=True)
        (fake.tools / tool).symlink_to(shutil.which(tool) or pytest.skip(f"no {tool}"))
    monkeypatch.setenv("PATH", str(fake.tools))
    monkeypatch.setenv("HOME", str(fake.home))
    for name in ("PYTHON", "VENV", "PYENV_ROOT", "UV_PYTHON_INSTALL_DIR"):
        monkeypatch.delenv(name, raising=False)
    return fake


# Finding a Python


def test_parses_on_python_3_6() -> None:
    ast.parse((REPOSITORY / "dev.py").read_text(), feature_version=(3, 6))


def test_probe_describes_this_python() -> None:
    found = dev.probe(sys.executable)
    assert found is not None
    assert found.version == sys.version_info[:3]
    assert found.usable


@pytest.mark.parametrize("executable", ["/no/such/python", "/bin/false", "/bin/echo"])
def test_probe_of_what_is_no_python_is_none(executable: str) -> None:
    assert dev.probe(executable) is None


@pytest.mark.parametrize(
    ("version", "wanted", "expected"),
    [
        ("3.12.1", "3.12", True),
        ("3.12.1", "3.12.1", True),
        ("3.12.1", "3", True),
        ("3.12.1", "3.1", False),  # not a prefix of the text, but of the version
        ("3.12.1", "3.12.10", False),
    ],
)
def test_matches(version: str, wanted: str, expected: bool) -> None:
    assert dev.matches(python(version).version, wanted) is expected


@pytest.mark.parametrize(
    ("pythons", "wanted", "chosen"),
    [
        ([python("3.13.0"), python("3.11.7")], "", "3.13.0"),
        ([python("3.13.0"), python("3.11.7"), python("3.11.2")], "3.11", "3.11.7"),
        ([python("3.15.0", stable=False), python("3.12.1")], "", "3.12.1"),
        ([python("3.13.0", venv=False), python("3.12.1")], "", "3.12.1"),
    ],
)
@pytest.mark.usefixtures("repository")
def test_choose(pythons: list[dev.Python], wanted: str, chosen: str) -> None:
    assert dev.choose(pythons, wanted).release == chosen


@pytest.mark.usefixtures("repository")
def test_without_a_fitting_python_the_message_lists_the_others() -> None:
    with pytest.raises(dev.SetupError) as caught:
        dev.choose([python("3.9.18")], "")
    message = str(caught.value)
    assert "No usable Python was found" in message
    assert "needs a released CPython, 3.11 or later" in message
    assert "Python 3.9.18  /usr/bin/python3.9.18" in message
    assert "Next, install one:" in message


@pytest.mark.usefixtures("repository")
def test_without_any_python_of_the_version_wanted() -> None:
    with pytest.raises(dev.SetupError, match=r"No usable Python 3\.14 was found"):
        dev.choose([python("3.13.0")], "3.14")


@pytest.mark.parametrize(
    ("tool", "line"),
    [
        ("uv", "uv python install 3.13"),
        ("pyenv", "pyenv install 3.13"),
        ("brew", "brew install python@3.13"),
        ("dnf", "sudo dnf install python3.12"),
        ("apt-get", "sudo apt-get install python3.11 python3.11-venv"),
    ],
)
@posix
def test_install_line_uses_what_is_there(repository: FakeRepository, tool: str, line: str) -> None:
    write_script(repository.tools / tool, "#!/bin/sh\n")
    assert dev.install_line() == line


@pytest.mark.usefixtures("repository")
def test_without_venv_the_message_names_the_package() -> None:
    with pytest.raises(dev.SetupError, match=r"sudo apt-get install python3\.12-venv"):
        dev.choose([python("3.12.1", venv=False)], "")


@pytest.mark.parametrize("tool", ["uv", "virtualenv"])
@posix
def test_without_venv_another_tool_makes_the_environment(
    repository: FakeRepository, tool: str
) -> None:
    write_script(repository.tools / tool, "#!/bin/sh\n")
    bare = python("3.12.1", venv=False)
    assert dev.choose([bare], "") is bare
    command = dev.venv_command(bare, "folder")
    assert (command[0], command[-1]) == (tool, "folder")
    assert bare.executable in command


@posix
def test_search_runs_every_candidate_and_sorts(repository: FakeRepository) -> None:
    repository.add_python("3.11.7")
    repository.add_python("3.13.0")
    write_script(repository.tools / "python3.14", "#!/bin/sh\nexit 127\n")
    write_script(repository.tools / "python3.13-config", "#!/bin/sh\nexit 1\n")
    assert [found.release for found in dev.installed()] == ["3.13.0", "3.11.7"]


@posix
def test_search_looks_where_pyenv_keeps_pythons(repository: FakeRepository) -> None:
    kept = repository.home / ".pyenv" / "versions" / "3.12.1" / "bin"
    kept.mkdir(parents=True)
    repository.add_python("3.12.1").rename(kept / "python3.12")
    assert [found.release for found in dev.installed()] == ["3.12.1"]


@posix
def test_python_variable_takes_a_command_and_a_path(
    repository: FakeRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = repository.add_python("3.11.7")
    repository.add_python("3.13.0")
    for wanted in ("python3.11", str(path), "3.11"):
        monkeypatch.setenv("PYTHON", wanted)
        assert dev.select().release == "3.11.7"


@posix
def test_python_variable_that_does_not_fit(
    repository: FakeRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.add_python("3.9.18")
    monkeypatch.setenv("PYTHON", "python3.9")
    with pytest.raises(dev.SetupError, match=r"PYTHON=python3.9 is Python 3\.9\.18; .* 3\.11"):
        dev.select()
    monkeypatch.setenv("PYTHON", "python3.77")
    with pytest.raises(dev.SetupError, match=r"PYTHON=.*python3.77 does not run"):
        dev.select()


# Constraints


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("3.11.7", "python-3.11.txt"),
        ("3.12.1", "python-3.12.txt"),
        ("3.13.0", "python-3.13.txt"),
        ("3.99.0", CONSTRAINTS[-1].name),
    ],
)
def test_constraints_file(version: str, name: str) -> None:
    assert Path(dev.constraints_file(python(version).version)).name == name


def test_constraints_file_of_an_old_python() -> None:
    with pytest.raises(dev.SetupError, match=r"no file for Python 3\.10\.2"):
        dev.constraints_file((3, 10, 2))


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


def test_the_suite_does_without_tensorflow_and_torch() -> None:
    names = {name for path in CONSTRAINTS for name in pins_of(path)}
    assert not names & {"tensorflow", "tensorflow-cpu", "torch", "keras", "datasets"}


def test_the_optional_libraries_are_pinned_as_cpu_builds() -> None:
    pinned = pins_of(SOURCES)
    assert {"tensorflow-cpu", "torch", "datasets"} <= set(pinned)
    assert not [name for name in pinned if name == "tensorflow" or name.startswith("nvidia")]
    # A package in both files could be asked for in two versions, which pip refuses.
    assert not set(pinned) & set(pins_of(dev.ROOT / Path("constraints/python-3.11.txt")))


@pytest.mark.parametrize("contents", dev.PEERS.values(), ids=dev.PEERS)
def test_the_peers_are_pinned_beside_the_constraints(contents: dev.Contents) -> None:
    lines = [
        line for line in (REPOSITORY / contents.pins).read_text().splitlines() if line[0] != "#"
    ]
    names = {re.split("[=;]", line)[0]: "==" in line for line in lines}
    assert not [name for name in names if name.startswith("nvidia") or name == "tensorflow"]
    # Without a version here there is one in the constraints, and the other way round.
    for path in CONSTRAINTS:
        pinned = pins_of(path)
        assert {name: name not in pinned for name in names} == names
    # Two tests of one library are of one version.
    elsewhere = pins_of(SOURCES)
    for line in lines:
        name, _, version = line.partition(";")[0].partition("==")
        assert version.removesuffix("+cpu") in ("", elsewhere.get(name, ""))


def test_torch_is_never_the_package_that_brings_cuda() -> None:
    lines = (REPOSITORY / dev.PEERS["torch"].pins).read_text().splitlines()
    asked = [line for line in lines if line.startswith("torch==")]
    assert [line for line in asked if 'sys_platform != "linux"' not in line] == [
        'torch==2.13.0+cpu; sys_platform == "linux"'
    ]


# The environment


@pytest.fixture
def finished(repository: FakeRepository) -> Path:
    folder = Path(dev.venv_folder())
    write_script(Path(dev.venv_python(str(folder))), "#!/bin/sh\n")
    (folder / dev.MARKER).touch()
    dev.write_stamp(str(folder), dev.stamp_for((3, 12, 1)))
    return folder


def test_a_stamped_environment_is_ready(finished: Path) -> None:
    assert dev.is_ready(str(finished))


def test_an_environment_without_a_stamp_is_not_ready(finished: Path) -> None:
    (finished / dev.STAMP).unlink()
    assert not dev.is_ready(str(finished))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"python": 3}', '{"python": "3.12.1"}'])
def test_a_damaged_stamp_is_not_ready(finished: Path, text: str) -> None:
    (finished / dev.STAMP).write_text(text)
    assert not dev.is_ready(str(finished))


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints/python-3.12.txt"])
def test_a_changed_input_makes_the_environment_stale(finished: Path, changed: str) -> None:
    with open(os.path.join(dev.ROOT, changed), "a") as file:
        file.write("# changed\n")
    assert not dev.is_ready(str(finished))


def test_another_pythons_constraints_do_not_matter(finished: Path) -> None:
    with open(os.path.join(dev.ROOT, "constraints/python-3.11.txt"), "a") as file:
        file.write("# changed\n")
    assert dev.is_ready(str(finished))


def test_a_moved_environment_is_not_ready(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = Path(dev.ROOT).with_name("elsewhere")
    Path(dev.ROOT).rename(moved)
    monkeypatch.setattr(dev, "ROOT", str(moved))
    assert not dev.is_ready(str(moved / finished.name))


def test_an_environment_whose_python_is_gone_is_not_ready(finished: Path) -> None:
    Path(dev.venv_python(str(finished))).unlink()
    assert not dev.is_ready(str(finished))


@pytest.mark.parametrize(("wanted", "ready"), [("3.12", True), ("3.12.1", True), ("3.11", False)])
def test_an_environment_of_another_python_is_not_ready(
    finished: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, ready: bool
) -> None:
    monkeypatch.setenv("PYTHON", wanted)
    assert dev.is_ready(str(finished)) is ready


def test_a_folder_that_dev_did_not_make_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "pyvenv.cfg").touch()
    with pytest.raises(dev.SetupError, match=r"was not made by dev\.py, so it is left alone"):
        dev.remove(str(tmp_path))
    assert (tmp_path / "pyvenv.cfg").exists()


def test_a_link_is_left_alone(tmp_path: Path, finished: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(finished)
    with pytest.raises(dev.SetupError, match="left alone"):
        dev.remove(str(link))
    assert finished.exists()


@posix
def test_the_first_run_installs_and_the_second_does_not(
    repository: FakeRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.add_python("3.11.7")
    repository.add_python("3.13.0")
    assert dev.main(["demo", "--epochs", "3"]) == 0
    tools, packages, job, fit = repository.calls()
    assert "constraints/python-3.13.txt hatchling" in tools
    assert "--no-build-isolation -e" in packages
    assert job.endswith("examples/digits.py --devices simulated --epochs 3")
    assert fit.endswith("examples/digits_fit.py --devices simulated --epochs 3")
    assert "creating .venv with Python 3.13.0" in capsys.readouterr().out
    assert dev.main(["demo"]) == 0
    assert len(repository.calls()) == 2
    assert capsys.readouterr().out == ""


@posix
def test_a_failed_installation_is_reported_and_redone(
    repository: FakeRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.add_python("3.13.0")
    repository.fail_on("no-build-isolation")
    assert dev.main(["demo"]) == 1
    error = capsys.readouterr().err
    assert "installing the packages failed (exit status 1, Python 3.13.0)" in error
    assert "no network" in error
    assert "Next, check the network" in error
    assert not dev.is_ready(dev.venv_folder())
    repository.fail_on("nothing")
    repository.calls()
    assert dev.main(["demo"]) == 0
    assert len(repository.calls()) == 4


@posix
def test_the_demo_ends_with_a_job_that_failed_and_shows_one_help(
    repository: FakeRepository,
) -> None:
    repository.add_python("3.13.0")
    assert dev.main(["demo", "--", "--help"]) == 0
    assert len(repository.calls()) == 2 + 1
    repository.fail_on("digits.py")
    assert dev.main(["demo"]) == 1
    assert len(repository.calls()) == 1


@posix
def test_the_benchmarks_get_what_was_asked_for(
    repository: FakeRepository, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Quick or full, a folder seen from where the user is, and what dev.py does not know."""
    repository.add_python("3.13.0")
    assert dev.main(["bench"]) == 0
    assert repository.calls()[-1] == "-m benchmarks --devices simulated"
    folder = os.path.relpath(tmp_path)
    asked = ["bench", "--full", "--report-dir", folder, "--devices", "real", "--only", "fit"]
    assert dev.main(asked) == 0
    assert repository.calls() == [
        f"-m benchmarks --full --devices real --only fit --report-dir {tmp_path}"
    ]
    assert "jax[cuda12]" in capsys.readouterr().out


@posix
def test_a_folder_that_cannot_be_written(
    repository: FakeRepository,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    repository.add_python("3.13.0")
    monkeypatch.setenv("VENV", "pyproject.toml/.venv")
    assert dev.main(["demo"]) == 1
    assert "Next, check that" in capsys.readouterr().err


@posix
def test_venv_variable_names_the_folder(
    repository: FakeRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.add_python("3.13.0")
    monkeypatch.setenv("VENV", ".venv-other")
    assert dev.main(["demo"]) == 0
    assert (repository.root / ".venv-other" / dev.STAMP).is_file()
    assert not (repository.root / ".venv").exists()


@posix
def test_a_second_run_waits_for_the_first(tmp_path: Path) -> None:
    script = (
        "import dev, sys\n"
        "with open(sys.argv[1], 'a') as file:\n"
        "    dev.lock(file, shared=False)\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "lock")]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        subprocess.Popen(command, cwd=REPOSITORY, **pipes) as first,
        subprocess.Popen(command, cwd=REPOSITORY, **pipes) as second,
    ):
        runs = [first, second]
        said = {run: run.stdout.readline() for run in runs}
        holder, waiter = sorted(runs, key=lambda run: said[run] != "held\n")
        assert said[holder] == "held\n"
        assert said[waiter].startswith("dev.py: waiting for another dev.py")
        holder.stdin.close()
        assert holder.wait(60) == 0
        waiter.stdin.close()
        assert waiter.stdout.read() == "held\n"


@posix
def test_the_sources_have_an_environment_of_their_own(
    repository: FakeRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in ("3.11.7", "3.13.0"):
        repository.add_python(version)
    assert dev.main(["test", "--sources"]) == 0
    _, packages, imports, tests = repository.calls()
    assert f"-r {repository.root}/constraints/sources-python-3.11.txt" in packages
    assert "constraints/python-3.11.txt" in packages
    assert imports == "-c import tensorflow, torch, datasets"
    assert tests == "-m pytest -m not exhaustive tests/data/sources"
    assert "creating .venv-sources with Python 3.11.7" in capsys.readouterr().out
    assert dev.main(["test", "--sources"]) == 0
    assert len(repository.calls()) == 2
    # The suite's environment is another one, and is made when it is needed.
    assert dev.main(["test", "--no-lint"]) == 0
    assert len(repository.calls()) == 3


@posix
def test_other_versions_of_the_optional_libraries_make_only_their_environment_stale(
    repository: FakeRepository,
) -> None:
    repository.add_python("3.11.7")
    assert dev.main(["test", "--sources"]) == dev.main(["test", "--no-lint"]) == 0
    repository.calls()
    with (repository.root / dev.SOURCES.pins).open("a") as file:
        file.write("another==1.0\n")
    assert dev.is_ready(dev.venv_folder())
    assert not dev.is_ready(dev.venv_folder(dev.SOURCES), dev.SOURCES)


@posix
def test_the_sources_without_their_libraries_fail_and_are_not_skipped(
    repository: FakeRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.add_python("3.11.7")
    repository.fail_on("constraints/sources")
    assert dev.main(["test", "--sources"]) == 1
    assert "installing the packages failed" in capsys.readouterr().err
    repository.fail_on("import tensorflow")
    assert dev.main(["test", "--sources"]) == 1
    line = "FAILED: import tensorflow, torch, datasets; to repeat it: .venv-sources/bin/python -c 'import"
    assert line in capsys.readouterr().out


@posix
def test_the_sources_on_another_python(
    repository: FakeRepository,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    repository.add_python("3.13.0")
    monkeypatch.setenv("PYTHON", "3.13")
    assert dev.main(["test", "--sources"]) == 1
    error = capsys.readouterr().err
    assert "PYTHON=3.13 is Python 3.13.0, but constraints/sources-python-3.11.txt" in error
    assert "Next: PYTHON=3.11 python3 dev.py test --sources" in error


@posix
def test_each_peer_has_an_environment_with_nothing_else(
    repository: FakeRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.add_python("3.11.7")
    assert dev.main(["bench", "--peers", "--only", "mlp"]) == 0
    *made, measured = repository.calls()[2:]
    assert [call.partition(" -r ")[2] for call in made] == [
        f"{repository.root}/constraints/peers-{name}.txt" for name in dev.PEERS
    ]
    pythons = " ".join(
        f"--python {name}={repository.root}/.venv-peers-{name}/bin/python" for name in dev.PEERS
    )
    start = "-m benchmarks.against_peers --report --quick"
    assert measured == f"{start} {pythons} --only mlp"
    assert "creating .venv-peers-torch with Python 3.11.7" in capsys.readouterr().out
    assert dev.main(["bench", "--peers", "--full"]) == 0
    assert repository.calls() == [f"-m benchmarks.against_peers --report {pythons}"]


@posix
def test_a_peer_that_cannot_be_installed_is_told_to_the_benchmark(
    repository: FakeRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.add_python("3.12.1")
    repository.fail_on("peers-keras")
    assert dev.main(["bench", "--peers"]) == 0
    output = capsys.readouterr().out
    assert "installing the packages failed" in output
    measured = repository.calls()[-1]
    assert (
        "--absent keras=installing the packages failed (exit status 1, Python 3.12.1)" in measured
    )
    assert "--absent torch=No usable Python 3.11 was found:" in measured
    assert "--python tensorflow=" in measured


# Running jobs

INHERITED = {
    "HOME": "/home/me",
    "JAX_PLATFORMS": "cuda",
    "PATH": "/bin",
    "PYTHONPATH": "/old",
    "SLURM_JOB_ID": "7",
    "TF_CONFIG": "{}",
    "XLA_FLAGS": "--own",
}


def test_simulated_job_environment() -> None:
    job = dev.job_environment(INHERITED, "/repo/.venv", simulated=True)
    assert job == {
        "HOME": "/home/me",
        "JAX_PLATFORMS": "cpu",
        "NPROC": "16",
        "PATH": os.path.dirname(dev.venv_python("/repo/.venv")) + os.pathsep + "/bin",
        "VIRTUAL_ENV": "/repo/.venv",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }


def test_real_devices_keep_what_chooses_them() -> None:
    job = dev.job_environment(INHERITED, "/repo/.venv", simulated=False)
    assert (job["JAX_PLATFORMS"], job["XLA_FLAGS"]) == ("cuda", "--own")
    assert not job.keys() & {"NPROC", "PYTHONPATH", "SLURM_JOB_ID", "TF_CONFIG"}


@pytest.mark.parametrize(
    ("arguments", "own", "passed_on"),
    [
        ([], [], []),
        (["demo", "--epochs", "3"], ["demo", "--epochs", "3"], []),
        (["demo", "--", "--help"], ["demo"], ["--help"]),
        (["demo", "--", "a", "--", "b"], ["demo"], ["a", "--", "b"]),
    ],
)
def test_split_arguments(arguments: list[str], own: list[str], passed_on: list[str]) -> None:
    assert dev.split_arguments(arguments) == (own, passed_on)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["ruff check", "ruff format --check", "codespell_lib", "mypy", "pytest -n"]),
        (["--lint"], ["ruff check", "ruff format --check", "codespell_lib", "mypy"]),
        (["--no-lint"], ["pytest -n"]),
        (["--no-lint", "--all"], ["pytest -m not exhaustive -n"]),
        (["tests/test_dev.py", "-k", "stamp"], ["pytest tests/test_dev.py -k stamp"]),
        (["--all", "-x"], ["pytest -m not exhaustive -x"]),
    ],
)
@posix
def test_steps_of_the_test_command(
    repository: FakeRepository, arguments: list[str], expected: list[str]
) -> None:
    repository.add_python("3.13.0")
    assert dev.main(["test", *arguments]) == 0
    steps = repository.calls()[2:]
    assert len(steps) == len(expected)
    for step, start in zip(steps, expected, strict=True):
        assert step.startswith(f"-m {start}")


@posix
def test_every_step_runs_and_the_failed_ones_are_named_last(
    repository: FakeRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.add_python("3.13.0")
    repository.fail_on("ruff check")
    assert dev.main(["test"]) == 1
    assert len(repository.calls()) == 2 + 5
    last = capsys.readouterr().out.splitlines()[-1]
    line = "FAILED: ruff check; to repeat it: .venv/bin/python -m ruff check"
    assert last == f"dev.py: {line}"


@posix
def test_missing_example(repository: FakeRepository, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(repository.root / "examples")
    assert dev.main(["demo"]) == 1
    assert "examples/digits.py is missing" in capsys.readouterr().err


@posix
def test_real_devices_say_how_to_install_for_an_accelerator(
    repository: FakeRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.add_python("3.12.1")
    assert dev.main(["demo", "--devices", "real"]) == 0
    line = ".venv/bin/python -m pip install -c constraints/python-3.12.txt 'jax[cuda12]'"
    assert line in capsys.readouterr().out


@posix
def test_pythons_lists_the_usable_ones(
    repository: FakeRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in ("3.9.18", "3.11.7", "3.13.0"):
        repository.add_python(version)
    assert dev.main(["pythons"]) == 0
    releases = [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()]
    assert releases == ["3.13.0", "3.11.7"]


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert dev.main([]) == 2
    assert "python3 dev.py demo" in capsys.readouterr().out


@posix
def test_termination_ends_the_job(tmp_path: Path) -> None:
    script = (
        "import dev, os, signal\n"
        "signal.signal(signal.SIGTERM, dev.stop)\n"
        f"dev.run(['sh', '-c', 'echo $$ > pid.part; mv pid.part {tmp_path}/pid; exec sleep 600'],"
        " dict(os.environ))\n"
    )
    script = script.replace("pid.part", f"{tmp_path}/pid.part")
    with subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY) as outer:
        deadline = time.monotonic() + 60
        while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        outer.send_signal(signal.SIGTERM)
        assert outer.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


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


@posix
def test_ci_runs_the_oldest_and_the_newest_python(tmp_path: Path) -> None:
    status, _, calls = run_ci(tmp_path, r"3.13.0\t/a\n3.12.1\t/b\n3.11.7\t/c\n3.11.2\t/d\n")
    assert status == 0
    assert sorted(calls[:3]) == [
        "3.11 .venv-oldest dev.py test --all",
        "3.11 .venv-oldest dev.py test --sources",
        "3.13 .venv dev.py test --lint",
    ]
    assert calls[3:] == ["3.13 .venv dev.py test --no-lint --again"]


@posix
def test_ci_on_one_python_says_what_it_skips(tmp_path: Path) -> None:
    status, output, calls = run_ci(tmp_path, r"3.12.1\t/b\n")
    assert status == 0
    assert "skipped: the suite on a newer Python (only 3.12 is installed)" in output
    assert "skipped: the sources of TensorFlow, PyTorch and Hugging Face (no Python 3.11)" in output
    assert calls == ["3.12 .venv-oldest dev.py test --all"]


@posix
def test_ci_fails_with_the_tests(tmp_path: Path) -> None:
    status, _, calls = run_ci(tmp_path, r"3.13.0\t/a\n3.11.7\t/c\n", status=1)
    assert status == 1
    assert "3.13 .venv dev.py test --no-lint --again" not in calls
