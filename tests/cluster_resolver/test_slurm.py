"""Slurm: its grammars of hosts and tasks, the placement of ranks, and the GPUs of a task."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distribute_jax.cluster_resolver import SlurmClusterResolver
from distribute_jax.cluster_resolver._slurm import expand_hosts, expand_tasks


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node7", "node7"),
        ("t02n13,t02n41,t02n43", "t02n13 t02n41 t02n43"),
        ("n[1-2],m5,o[3-4,6,7-9]", "n1 n2 m5 o3 o4 o6 o7 o8 o9"),
        ("node[1-3,05-07,9],gpu-[a]", "node1 node2 node3 node05 node06 node07 node9 gpu-a"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[0]", "n0"),
        ("rack[0-1]n[1-2]-ib", "rack0n1-ib rack0n2-ib rack1n1-ib rack1n2-ib"),
        ("cn-0[1-2].site", "cn-01.site cn-02.site"),
        ("[1-2]", "1 2"),
    ],
)
def test_a_list_of_hosts_is_expanded_in_its_order(text, hosts):
    assert expand_hosts(text) == hosts.split()


@pytest.mark.parametrize(
    ("expand", "text"),
    [
        (expand_hosts, "n[0-99999][0-99999]"),
        (expand_hosts, "n[0-99999999999999]"),
        (expand_tasks, "1(x99999999999999)"),
    ],
)
def test_a_list_of_more_hosts_or_tasks_than_slurm_has_is_refused(expand, text):
    """It would fill the memory."""
    with pytest.raises(ValueError, match="stands for more than 1048576 hosts or tasks"):
        expand(text)


@pytest.mark.parametrize("text", ["", "n[1-", "n1-2]", "n[]", "n[3-1]", "a,,b", "n[1,]", "a b"])
def test_a_malformed_list_of_hosts_is_refused(text):
    with pytest.raises(ValueError, match="Invalid hostlist format"):
        expand_hosts(text)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", [4]), ("3(x2),2,1", [3, 3, 2, 1]), ("2(x3)", [2, 2, 2]), ("1, 2", [1, 2])],
)
def test_numbers_of_tasks_are_expanded(text, counts):
    assert expand_tasks(text) == counts


@pytest.mark.parametrize("text", ["", "x", "2(x)", "2(3)", "2,,3", "-1"])
def test_malformed_numbers_of_tasks_are_refused(text):
    with pytest.raises(ValueError, match="must be numbers separated by commas"):
        expand_tasks(text)


@pytest.fixture
def step(monkeypatch):
    """Makes this process a task of a Slurm step."""

    def play(rank, tasks, nodes, per_node, **more):
        variables = {
            "SLURM_PROCID": rank,
            "SLURM_STEP_NUM_TASKS": tasks,
            "SLURM_STEP_NODELIST": nodes,
            "SLURM_STEP_TASKS_PER_NODE": per_node,
            **more,
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return play


def test_tasks_of_several_jobs_are_placed_on_the_hosts_in_order(step):
    """TensorFlow's own example: one ps and four workers on three hosts with two GPUs each."""
    step(3, 5, "t02n13,t02n41,t02n43", "2(x2),1")
    resolver = SlurmClusterResolver({"ps": 1, "worker": 4}, gpus_per_node=2, gpus_per_task=1)
    assert resolver.cluster_spec().as_dict() == {
        "ps": ["t02n13:8888"],
        "worker": ["t02n13:8889", "t02n41:8888", "t02n41:8889", "t02n43:8888"],
    }
    assert resolver.get_task_info() == (resolver.task_type, resolver.task_id) == ("worker", 2)
    assert resolver.master() == "grpc://t02n41:8889"
    assert resolver.master("ps", 0, "http") == "http://t02n13:8888"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert resolver.num_accelerators() == {"GPU": 1}
    assert (resolver.num_processes, resolver.process_id) == (4, 2)
    assert resolver.coordinator_address == "t02n13:8889"


@pytest.mark.parametrize(
    ("nodes", "per_node", "distribution", "hosts"),
    [
        (
            "n[9-10]",
            "2(x2)",
            "block",
            ["n9", "n9", "n10", "n10"],
        ),  # not n10 first, as sorted text is
        ("n[9-10]", "2(x2)", "cyclic", ["n9", "n10", "n9", "n10"]),
        ("n[1-3]", "3,1,2", "cyclic:block", ["n1", "n2", "n3", "n1", "n3", "n1"]),
        ("n[1-2]", "1,2", "", ["n1", "n2", "n2"]),
    ],
)
def test_ranks_are_placed_on_the_hosts_as_slurm_fills_them(
    step, nodes, per_node, distribution, hosts
):
    step(1, len(hosts), nodes, per_node, SLURM_DISTRIBUTION=distribution, SLURMD_NODENAME=hosts[1])
    addresses = SlurmClusterResolver().cluster_spec().job_tasks("worker")
    assert [address.partition(":")[0] for address in addresses] == hosts
    assert len(set(addresses)) == len(addresses)


def test_a_rank_on_another_host_than_computed_is_an_error(step):
    """Of a distribution other than block and cyclic."""
    step(1, 4, "n[1-2]", "2(x2)", SLURMD_NODENAME="n2", SLURM_DISTRIBUTION="plane=1")
    with pytest.raises(RuntimeError, match=r"rank 1 runs on n2, and by its place .* on n1"):
        SlurmClusterResolver()


def test_the_port_of_process_0_depends_on_job_and_step(step):
    step(0, 2, "n[1-2]", "1(x2)", SLURM_JOB_ID=1234567)
    assert SlurmClusterResolver().coordinator_address == "n1:63111"
    step(0, 2, "n[1-2]", "1(x2)", SLURM_JOB_ID=1234568, SLURM_STEP_ID="batch")
    assert SlurmClusterResolver().coordinator_address == "n1:63112"


@pytest.mark.parametrize(
    ("tasks_per_node", "hosts"),
    [(2, ["a", "a", "b", "b"]), ({"n10": 1, "n2": 2, "m": 1}, ["m", "n2", "n2", "n10"])],
)
def test_tasks_per_node_may_be_passed(step, tasks_per_node, hosts):
    step(0, 4, "a,b", "wrong")
    addresses = (
        SlurmClusterResolver(tasks_per_node=tasks_per_node).cluster_spec().job_tasks("worker")
    )
    assert [address.partition(":")[0] for address in addresses] == hosts


GPUS = {  # visible, rank, tasks on the host, arguments: visible afterwards, accelerators, local id
    "an equal share": ("0,1,2,3", 1, 2, {}, "2,3", 2, None),
    "names are kept": ("GPU-a,GPU-b", 1, 2, {}, "GPU-b", 1, None),
    "numbers of the host are kept": ("4,5,6,7", 1, 2, {}, "6,7", 2, None),
    "none": ("", 1, 2, {}, "", 0, 1),
    "none, said so": ("", 1, 2, {"gpus_per_node": 0, "gpus_per_task": 0}, "", 0, 1),
    "hidden": ("-1", 1, 2, {}, "-1", 0, 1),
    "given": ("", 1, 2, {"gpus_per_node": 4, "gpus_per_task": 2}, "2,3", 2, None),
    "some are left": ("0,1,2,3", 1, 2, {"gpus_per_task": 1}, "1", 1, None),
    "not set": ("0,1,2,3", 1, 2, {"auto_set_gpu": False}, "0,1,2,3", 2, None),
    "divided by Slurm": ("3", 1, 2, {}, "3", 1, None),
    "one task": ("0,1", 0, 1, {}, "0,1", 2, None),
}


@pytest.mark.parametrize("case", GPUS)
def test_each_task_sees_its_gpus(step, monkeypatch, case):
    visible, rank, tasks, arguments, after, count, local = GPUS[case]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    step(rank, tasks, "n1", str(tasks))
    for _ in range(2):  # a second resolver divides the same GPUs, not the share of the first
        resolver = SlurmClusterResolver(**arguments)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == after
        assert resolver.num_accelerators("worker", 0) == {"GPU": count}
    if arguments.get("auto_set_gpu", True):
        assert resolver.local_process_id == local


def test_gpus_that_slurm_has_divided_stay(step, monkeypatch):
    """With --gpus-per-task every task's GPUs are numbered from 0."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    step(1, 2, "n1", "2", SLURM_GPUS_PER_TASK=2)
    assert SlurmClusterResolver().num_accelerators() == {"GPU": 2}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


@pytest.mark.parametrize(
    ("script", "after"), [("printf '0\\n1\\n2\\n3\\n'", "2,3"), ("exit 9", None), ("exit 0", None)]
)
def test_without_cuda_visible_devices_nvidia_smi_lists_the_gpus(
    step, monkeypatch, tmp_path, script, after
):
    program = Path(tmp_path, "nvidia-smi")
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    step(1, 2, "n1", "2")
    SlurmClusterResolver()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == after


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"jobs": {"worker": 3}}, "Requested 3 tasks but only 2 were assigned"),
        ({"gpus_per_node": 1, "gpus_per_task": 1}, "Requested more GPUs per node than available"),
        ({"tasks_per_node": 3}, "Requested 2 tasks but only 3"),
    ],
)
def test_more_tasks_or_gpus_than_slurm_assigned_are_refused(step, arguments, says):
    step(0, 2, "n1", "2")
    with pytest.raises(RuntimeError, match=says):
        SlurmClusterResolver(**arguments)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        (
            "SLURM_PROCID",
            None,
            "SLURM_PROCID not found in environment. Not running inside a Slurm step",
        ),
        ("SLURM_STEP_NODELIST", None, "SLURM_STEP_NODELIST not found"),
        ("SLURM_STEP_TASKS_PER_NODE", None, "SLURM_STEP_TASKS_PER_NODE not found"),
        ("SLURM_STEP_NUM_TASKS", None, "SLURM_STEP_NUM_TASKS not found"),
        ("SLURM_PROCID", "first", "SLURM_PROCID='first' must be an int >= 0"),
        ("SLURM_PROCID", "2", "SLURM_PROCID=2 must be below the number of tasks, 2"),
        ("SLURM_STEP_NODELIST", "n[1-3]", "names 3 host"),
    ],
)
def test_malformed_slurm_variables_are_named(step, monkeypatch, name, value, says):
    step(0, 2, "n1", "2")
    monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=says.replace("[", r"\[")):
        SlurmClusterResolver()
