"""``distribute-jax launch``, torchrun, Open MPI and SageMaker: the cluster from their variables."""

from __future__ import annotations

import pytest

import distribute_jax as dj
from distribute_jax import _supervision
from distribute_jax.cluster_resolver import (
    OpenMPIClusterResolver,
    SageMakerClusterResolver,
    TorchrunClusterResolver,
)
from distribute_jax.cluster_resolver._launchers import parse_launcher

TORCHRUN = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
URI = "1531576320.0;tcp://10.96.0.1,10.148.0.1,10.108.0.1:34911"


@pytest.fixture
def launched(monkeypatch):
    """Sets variables; None removes one."""

    def play(variables, **more):
        for name, value in (variables | more).items():
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(
                name, value
            )

    return play


def test_torchrun(launched):
    launched(TORCHRUN)
    resolver = TorchrunClusterResolver(rpc_layer="grpc")
    assert resolver.cluster_spec().as_dict() == {"worker": ["a:29500", "", "", ""]}
    assert (resolver.task_type, resolver.task_id, resolver.local_process_id) == ("worker", 2, 0)
    assert (resolver.num_processes, resolver.process_id) == (4, 2)
    assert resolver.coordinator_address == "a:29500"
    assert (resolver.master(), resolver.master("worker", 1)) == ("grpc://a:29500", "")


def test_if_torchrun_listens_on_the_port_process_0_takes_the_next(launched):
    launched(TORCHRUN, TORCHELASTIC_USE_AGENT_STORE="True", LOCAL_RANK=None)
    assert TorchrunClusterResolver().coordinator_address == "a:29501"
    assert TorchrunClusterResolver().local_process_id is None
    launched(TORCHRUN, TORCHELASTIC_USE_AGENT_STORE="False")
    assert TorchrunClusterResolver().coordinator_address == "a:29500"


@pytest.mark.parametrize("address", ["fd00::2", "[fd00::2]"])
def test_an_ipv6_address_of_torchrun_gets_brackets(launched, address):
    """JAX accepts no other form."""
    launched(TORCHRUN, MASTER_ADDR=address)
    assert TorchrunClusterResolver().coordinator_address == "[fd00::2]:29500"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"RANK": None}, "RANK not found in environment. Start the program with torchrun"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE='many'"),
        ({"RANK": "4"}, "RANK=4 must be below WORLD_SIZE=4"),
        ({"WORLD_SIZE": f"{10**20}"}, "WORLD_SIZE=100000000000000000000 must be at most 1048576"),
        ({"MASTER_PORT": "70000"}, "whose address is 'a:70000'"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is empty"),
    ],
)
def test_malformed_torchrun_variables_are_named(launched, change, says):
    launched(TORCHRUN, **change)
    with pytest.raises(RuntimeError, match=says):
        _ = TorchrunClusterResolver().coordinator_address


@pytest.mark.parametrize(
    ("uri", "address"),
    [
        (URI, "10.96.0.1:62624"),
        ("1531576320.0;tcp://10.96.0.1:34911", "10.96.0.1:62624"),
        (
            "4096.0;tcp6://[fe80::b9b:ac5d:9cf0:b858,2620:10d::2]:43370",
            "[fe80::b9b:ac5d:9cf0:b858]:61441",
        ),
    ],
)
def test_the_address_of_rank_0_under_open_mpi_4(uri, address):
    assert parse_launcher(uri) == address


@pytest.mark.parametrize("uri", ["", "x", "1.0;udp://a:1", "1;tcp://a:1"])
def test_a_malformed_launcher_uri_says_what_to_pass(uri):
    with pytest.raises(RuntimeError, match=r"Pass OpenMPIClusterResolver\(coordinator_address="):
        parse_launcher(uri)


def test_open_mpi_4(launched):
    launched(OPEN_MPI, OMPI_MCA_orte_hnp_uri=URI)
    resolver = OpenMPIClusterResolver()
    assert (resolver.num_processes, resolver.process_id, resolver.local_process_id) == (4, 3, 1)
    assert (resolver.coordinator_address, resolver.detection_method) == ("10.96.0.1:62624", None)
    assert resolver.master() == "10.96.0.1:62624"


def test_under_open_mpi_5_jax_finds_rank_0(launched):
    launched(OPEN_MPI)
    resolver = OpenMPIClusterResolver()
    assert (resolver.num_processes, resolver.process_id) == (4, 3)
    assert (resolver.coordinator_address, resolver.detection_method) == (None, "mpi4py")
    given = OpenMPIClusterResolver("a:1234")
    assert (given.coordinator_address, given.detection_method) == ("a:1234", None)
    launched({}, OMPI_COMM_WORLD_RANK="4")
    with pytest.raises(
        RuntimeError, match="OMPI_COMM_WORLD_RANK=4 must be below OMPI_COMM_WORLD_SIZE=4"
    ):
        resolver.cluster_spec()


def test_sage_maker_sorts_its_hosts_by_name(launched):
    launched({"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-1"})
    resolver = SageMakerClusterResolver()
    assert resolver.cluster_spec().as_dict() == {"worker": ["algo-1:2223", "algo-2:2223"]}
    assert (resolver.task_type, resolver.task_id, resolver.process_id) == ("worker", 0, 0)
    assert resolver.master() == "algo-1:2223"
    assert resolver.master("worker", 1, "grpc") == "grpc://algo-2:2223"
    assert SageMakerClusterResolver(port=1, task_id=1).master() == "algo-2:1"
    launched({"SM_HOSTS": '["algo-1"]'})
    assert resolver.master() == ""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"SM_HOSTS": None}, "SM_HOSTS not found"),
        ({"SM_HOSTS": "algo-1"}, "must be a JSON list of hosts"),
        ({"SM_HOSTS": "[" * 100_000}, "must be a JSON list of hosts"),
        ({"SM_CURRENT_HOST": None}, "SM_CURRENT_HOST not found"),
        ({"SM_CURRENT_HOST": "b"}, "SM_CURRENT_HOST must be one of the hosts in SM_HOSTS"),
    ],
)
def test_malformed_sage_maker_variables_are_named(launched, change, says):
    launched({"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-1"}, **change)
    with pytest.raises(dj.DistributeError, match=says):
        _ = SageMakerClusterResolver().process_id


def test_all_processes_get_the_address_that_the_launcher_picked(monkeypatch):
    for process in range(3):
        for name, value in {
            _supervision.NUM_PROCESSES: "3",
            _supervision.PROCESS_ID: str(process),
            _supervision.LOCAL_PROCESS_ID: str(process),
            _supervision.ADDRESS: "127.0.0.1:4242",
        }.items():
            monkeypatch.setenv(name, value)
        resolver = dj.cluster_resolver.LaunchedClusterResolver()
        assert (resolver.num_processes, resolver.process_id) == (3, process)
        assert resolver.local_process_id == process
        assert resolver.coordinator_address == resolver.master() == "127.0.0.1:4242"
        assert dj.cluster_resolver.detect().coordinator_address == "127.0.0.1:4242"
