"""The files of docs/clusters do what the guides say, as far as one machine can show it."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from example_program import ROOT, job_environment

from distribute_jax._supervision import SAVED

FILES = ROOT / "docs" / "clusters"
LAST = re.compile(r"Weights after step \d+: [0-9a-f]{16}")


def executable(path: Path, text: str) -> None:
    """Writes a program of a test's own, in place of one that this machine lacks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


def with_programs(folder: Path) -> dict[str, str]:
    """Returns an environment in which programs in a folder come first; ``python`` is this one."""
    executable(folder / "bin" / "python", f'exec "{sys.executable}" "$@"')
    executable(folder / "bin" / "distribute-jax", f'exec "{sys.executable}" -m distribute_jax "$@"')
    environment = job_environment(folder.parent)
    return environment | {"PATH": f"{folder / 'bin'}:{environment['PATH']}"}


@pytest.mark.parametrize("file", ["digits.sbatch", "tpu_host.sh", "tpu_job.sh"])
def test_a_script_is_valid_for_bash(file: str):
    """As far as bash can tell without running it; it only warns of a here-document without an end."""
    done = subprocess.run(["bash", "-n", FILES / file], capture_output=True, text=True, timeout=10)
    assert (done.returncode, done.stderr) == (0, "")


# TPU


GCLOUD = """
echo "$*" >> "$CALLS"
case "$*" in
  *" describe "*) cat "$STATE" ;;
  *" create "*) echo READY > "$STATE" ;;
  *" delete "*) rm "$STATE" ;;
  *digits_job.py*) if [ ! -e "$TAKEN" ]; then echo PREEMPTED | tee "$STATE" > "$TAKEN"; exit 1; fi ;;
esac
"""


def test_a_tpu_that_is_taken_away_is_made_again_and_the_job_goes_on(tmp_path: Path):
    """With a gcloud that takes the first TPU away during the training: what the script asks it for."""
    executable(tmp_path / "bin" / "gcloud", GCLOUD)
    executable(tmp_path / "bin" / "git", "exit 0")
    files = {name: str(tmp_path / name.lower()) for name in ("CALLS", "STATE", "TAKEN")}
    environment = with_programs(tmp_path) | files | {"BUCKET": "my-bucket"}
    subprocess.run(
        ["bash", str(FILES / "tpu_job.sh")], env=environment, cwd=tmp_path, check=True, timeout=30
    )
    calls = Path(files["CALLS"]).read_text().split("compute tpus tpu-vm")
    asked = [line.split()[0] for line in calls[1:]]
    run = ["create", "scp", "ssh", "ssh"]
    assert [verb for verb in asked if verb != "describe"] == [*run, "delete", *run, "delete"]
    text = Path(files["CALLS"]).read_text()
    assert text.count("--worker=all") == 6
    assert "tpu_host.sh my-bucket" in text
    assert "--accelerator-type=v5litepod-16" in text


# Kubernetes


def job_of(file: str) -> tuple[dict[str, Any], str]:
    """Returns the Job of a manifest, and the name of its first pod."""
    parts = {part["kind"]: part for part in yaml.safe_load_all((FILES / file).read_text("utf-8"))}
    if "JobSet" not in parts:
        job, service = parts["Job"], parts["Service"]
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
        subdomain = job["spec"]["template"]["spec"]["subdomain"]
        assert subdomain == service["metadata"]["name"]
        return job["spec"], f"{job['metadata']['name']}-0.{subdomain}"
    name = parts["JobSet"]["metadata"]["name"]
    (replicated,) = parts["JobSet"]["spec"]["replicatedJobs"]
    return replicated["template"]["spec"], f"{name}-{replicated['name']}-0-0.{name}"


def container_of(job: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Returns the command of a Job's only container, and its environment."""
    (container,) = job["template"]["spec"]["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    return container["command"] + container["args"], environment


@pytest.mark.parametrize("file", ["jobset.yaml", "indexed_job.yaml"])
def test_the_parts_of_a_manifest_agree(file: str):
    """Number of pods, name of the first one, time to save in; the command is there."""
    job, first = job_of(file)
    command, environment = container_of(job)
    assert job["completionMode"] == "Indexed"
    assert int(environment["NUM_PROCESSES"]) == job["completions"] == job["parallelism"]
    assert environment["COORDINATOR_ADDRESS"].split(":")[0] == first
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] > 30
    assert (ROOT / command[1]).exists()
    if "podFailurePolicy" in job:
        assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [SAVED]
        assert job["template"]["spec"]["restartPolicy"] == "Never"


def as_pods(folder: Path) -> list[subprocess.Popen[str]]:
    """Starts the container of the JobSet as its pods do, here at an address of this machine."""
    command, given = container_of(job_of("jobset.yaml")[0])
    command = [part.replace("/checkpoints", str(folder)) for part in command]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        given["COORDINATOR_ADDRESS"] = f"127.0.0.1:{probe.getsockname()[1]}"
    given["KUBERNETES_SERVICE_HOST"] = "10.0.0.1"
    return [
        subprocess.Popen(
            command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=with_programs(folder) | given | {"JOB_COMPLETION_INDEX": str(index)},
        )
        for index in range(int(given["NUM_PROCESSES"]))
    ]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The last line of the job in the pods of the JobSet, which nobody disturbs."""
    pods = as_pods(tmp_path_factory.mktemp("pods"))
    printed = [pod.communicate(timeout=200)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], "\n".join(printed)
    assert "Resuming after step 0, on 2 replicas." in printed[0]
    return printed[0].splitlines()[-1]


@pytest.mark.exhaustive
def test_the_container_of_the_jobset_trains_in_two_pods(undisturbed: str):
    """Each finds the other by the environment of an Indexed Job; the first one prints."""
    assert LAST.fullmatch(undisturbed)


# Slurm


SRUN = """
while [ "${1#--}" != "$1" ]; do shift; done
for i in 0 1; do
  SLURM_PROCID=$i SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost \\
    SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_ID=0 "$@" &
  pids[i]=$!
done
echo "${pids[@]}" > tasks
highest=0
for pid in "${pids[@]}"; do
  wait "$pid"; code=$?
  if [ "$code" -gt "$highest" ]; then highest=$code; fi
done
exit "$highest"
"""
"""Two tasks on this machine, and the highest exit code of all, as Slurm's has it."""


def submitted(folder: Path) -> subprocess.Popen[str]:
    """Runs the body of the batch script, as Slurm does on the first node."""
    executable(folder / "bin" / "srun", SRUN)
    executable(folder / "bin" / "scontrol", 'echo "$@" >> asked')
    step = {"SLURM_JOB_ID": folder.name, "SLURM_SUBMIT_DIR": str(folder)}
    return subprocess.Popen(
        ["bash", str(FILES / "digits.sbatch")], text=True, stdout=subprocess.PIPE,
        env=with_programs(folder) | step | {"SLURM_CPUS_PER_TASK": "1"}, cwd="/",
    )  # fmt: skip


@pytest.mark.exhaustive
def test_a_slurm_job_whose_time_is_over_is_requeued_and_goes_on(tmp_path: Path, undisturbed: str):
    """SIGTERM to the tasks: exit code 42, requeued; in the end the weights of a job left alone."""
    folder = tmp_path / str(random.randrange(1, 10**6))  # makes the port
    executable(folder / ".venv" / "bin" / "python", f'exec "{sys.executable}" "$@"')
    (folder / "examples").symlink_to(ROOT / "examples")
    job = submitted(folder)
    assert job.stdout is not None
    for line in job.stdout:
        if line.startswith("step 50/"):
            break
    for task in (folder / "tasks").read_text().split():
        os.kill(int(task), signal.SIGTERM)
    rest, _ = job.communicate(timeout=100)
    assert job.returncode == SAVED, rest
    assert (folder / "asked").read_text() == f"requeue {folder.name}\n"
    again = submitted(folder)
    printed, _ = again.communicate(timeout=200)
    assert again.returncode == 0, printed
    done = re.search(r"^Resuming after step (\d+)", printed, re.MULTILINE)
    assert int(done[1] if done else 0) >= 50, printed
    assert printed.splitlines()[-1] == undisturbed
    assert (folder / "asked").read_text().count("requeue") == 1


# One machine


@pytest.mark.exhaustive
def test_the_commands_for_one_machine_train_and_go_on(tmp_path: Path):
    """Both of them, as they stand in the page, one after the other."""
    page = (ROOT / "docs" / "on_one_machine.md").read_text("utf-8")
    commands = re.findall(r"^distribute-jax launch --processes .*$", page, re.MULTILINE)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    printed = [
        subprocess.run(
            command.split(), env=with_programs(tmp_path), cwd=tmp_path, text=True,
            capture_output=True, check=True, timeout=200,
        ).stdout
        for command in commands
    ]  # fmt: skip
    assert len(printed) == 2
    assert "[0] Resuming after step 0, on 2 replicas." in printed[0]
    assert "[0] Resuming after step 60, on 2 replicas." in printed[1]
    assert LAST.search(printed[1])
