"""GCE instance groups and Cloud TPUs, with requests to a server on loopback."""

from __future__ import annotations

import json
from types import SimpleNamespace

import jax
import pytest
from google.oauth2.credentials import Credentials

from distribute_jax.cluster_resolver import GCEClusterResolver, TPUClusterResolver

META = "/computeMetadata/v1"
GROUP = "/compute/v1/projects/p/zones/z/instanceGroups/g/listInstances"
INSTANCE = "/compute/v1/projects/p/zones/z/instances/"


@pytest.fixture
def google(server, monkeypatch):
    """A server in place of the metadata server and the APIs, with two running instances."""
    credentials = Credentials("secret")
    monkeypatch.setattr("google.auth.default", lambda scopes: (credentials, "project"))
    monkeypatch.setenv("GCE_METADATA_HOST", server.host)
    monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE", f"{server.url}/compute/v1/")
    server.answers[GROUP] = json.dumps(
        {"items": [{"instance": "https://x/instances/i2"}], "nextPageToken": "a/b"}
    )
    server.answers[f"{GROUP}?pageToken=a%2Fb"] = json.dumps(
        {"items": [{"instance": "https://x/i1"}]}
    )
    for name, ip in {"i1": "10.0.0.1", "i2": "10.0.0.2"}.items():
        server.answers[INSTANCE + name] = json.dumps({"networkInterfaces": [{"networkIP": ip}]})
    return server


def _group(**more):
    return GCEClusterResolver("p", "z", "g", 8470, **more)


def test_running_instances_are_workers_sorted_by_address(google):
    """Of all pages, requested with the token of this machine."""
    resolver = _group()
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.1:8470", "10.0.0.2:8470"]}
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert resolver.master() == "grpc://10.0.0.1:8470"
    assert resolver.master("worker", 1, "http") == "http://10.0.0.2:8470"
    listed = [(path, body) for method, path, _, body in google.asked if method == "POST"]
    assert listed[0] == (GROUP, '{"instanceState": "RUNNING"}')
    authorized = [
        h.get("authorization") for _, path, h, _ in google.asked if path.startswith("/compute/")
    ]
    assert set(authorized) == {"Bearer secret"}


def test_an_instance_finds_its_index_by_its_address(google):
    google.answers[f"{META}/instance/network-interfaces/0/ip"] = "10.0.0.2"
    resolver = _group(task_id=None)
    assert (resolver.task_id, resolver.process_id, resolver.num_processes) == (1, 1, 2)
    assert google.asked[0][2]["metadata-flavor"] == "Google"
    google.answers[f"{META}/instance/network-interfaces/0/ip"] = "10.0.0.9"
    with pytest.raises(RuntimeError, match=r"this instance, 10.0.0.9, is not in the group 'g'"):
        _ = resolver.process_id


@pytest.mark.parametrize(
    ("credentials", "header"),
    [(None, None), ("mine", "Bearer mine"), (Credentials("held"), "Bearer held")],
)
def test_credentials_may_be_none_a_token_or_an_object(google, credentials, header):
    _group(credentials=credentials).cluster_spec()
    assert {headers.get("authorization") for _, _, headers, _ in google.asked} == {header}


def test_gce_with_a_googleapiclient_service():
    """Pages included."""
    pages = iter([["i2"], ["i1"]])
    ips = {"i1": "10.0.0.1", "i2": "10.0.0.2"}

    def page():
        return SimpleNamespace(
            execute=lambda: {"items": [{"instance": f"x/{n}"} for n in next(pages)]}
        )

    follows = iter([page(), None])
    groups = SimpleNamespace(
        listInstances=lambda project, zone, instanceGroup, body: page(),  # noqa: N803  # Google's name
        listInstances_next=lambda previous_request, previous_response: next(follows),
    )
    instances = SimpleNamespace(
        get=lambda project, zone, instance: SimpleNamespace(
            execute=lambda: {"networkInterfaces": [{"networkIP": ips[instance]}]}
        )
    )
    service = SimpleNamespace(instanceGroups=lambda: groups, instances=lambda: instances)
    spec = _group(task_type="ps", service=service).cluster_spec()
    assert spec.as_dict() == {"ps": ["10.0.0.1:8470", "10.0.0.2:8470"]}


def test_unusable_groups_raise(google):
    google.answers[GROUP] = "{}"
    with pytest.raises(RuntimeError, match=r"no instance of the group 'g' .* is running"):
        _group().cluster_spec()
    google.answers[GROUP] = 403
    with pytest.raises(
        RuntimeError, match=r"listInstances answered 403 .*Check project, zone and name"
    ):
        _group().cluster_spec()


def _attributes(server, **values):
    for name, value in values.items():
        server.answers[f"{META}/instance/attributes/{name.replace('_', '-')}"] = value


def test_the_hosts_of_this_tpu_come_from_the_metadata_server(google):
    """They are requested once; a TPU without tpu-env is one slice."""
    _attributes(
        google, agent_worker_number="1", worker_network_endpoints="u:8470:10.0.0.2,u:8470:10.0.0.3"
    )
    resolver = TPUClusterResolver()
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.2:8470", "10.0.0.3:8470"]}
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert (resolver.num_processes, resolver.process_id) == (2, 1)
    assert resolver.coordinator_address == "10.0.0.2:8482"
    assert resolver.master() == resolver.get_master() == "grpc://10.0.0.2:8470"
    assert resolver.master("worker", 1, "http") == "http://10.0.0.3:8470"
    assert len(google.asked) == 3


def test_processes_are_numbered_slice_by_slice(google):
    env = "MEGASCALE_NUM_SLICES: '3'\nMEGASCALE_SLICE_ID: '1'\nMEGASCALE_COORDINATOR_ADDRESS: 'first:8080'"
    _attributes(google, agent_worker_number="1", worker_network_endpoints="a,b", tpu_env=env)
    resolver = TPUClusterResolver()
    workers = resolver.cluster_spec().job_tasks("worker")
    assert workers == ["first:8470", "", "a:8470", "b:8470", "", ""]
    assert (resolver.num_processes, resolver.process_id) == (6, 3)
    assert resolver.coordinator_address == "first:8482"


def test_the_environment_of_kubernetes_engine_needs_no_request(monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "big-0.big, big-1.big")
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    resolver = TPUClusterResolver(
        job_name="tpu_worker", coordinator_name="lead", coordinator_address="x:1"
    )
    spec = {"lead": ["x:1"], "tpu_worker": ["big-0.big:8470", "big-1.big:8470"]}
    assert resolver.cluster_spec() == spec
    assert (resolver.num_processes, resolver.process_id) == (2, 1)
    assert resolver.coordinator_address == "big-0.big:8482"
    assert resolver.get_job_name() == "tpu_worker"
    assert resolver.get_coordination_service_leader() == "/job:tpu_worker/replica:0/task:0"
    assert TPUClusterResolver.is_present()
    monkeypatch.setenv("TPU_WORKER_ID", "2")
    with pytest.raises(RuntimeError, match="this is host 2 of 2"):
        TPUClusterResolver().cluster_spec()
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "two")
    with pytest.raises(RuntimeError, match="MEGASCALE_NUM_SLICES='two'"):
        TPUClusterResolver().cluster_spec()


@pytest.mark.parametrize("tpu", ["local", ""])
def test_a_local_tpu_is_this_process_with_its_devices(tpu):
    resolver = TPUClusterResolver(tpu)
    assert not resolver.cluster_spec()
    assert (resolver.num_processes, resolver.process_id, resolver.coordinator_address) == (
        1,
        0,
        None,
    )
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", 0, "")
    assert resolver.num_accelerators() == {"TPU": jax.local_device_count()}
    metadata = resolver.get_tpu_system_metadata()
    assert (metadata.num_cores, metadata.num_hosts) == (jax.device_count(), 1)
    assert metadata.devices == tuple(jax.devices())
    assert metadata.num_of_cores_per_host == jax.local_device_count()


def test_a_tpu_by_its_addresses(google):
    _attributes(google, agent_worker_number="1", worker_network_endpoints="a,b")
    resolver = TPUClusterResolver("grpc://10.0.0.2:1,grpc://10.0.0.3:1")
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.2:1", "10.0.0.3:1"]}
    assert (resolver.process_id, resolver.coordinator_address) == (1, "10.0.0.2:8482")


NODE = "/v2/projects/p/locations/us-z/nodes/mine"
READY = {
    "state": "READY",
    "health": "HEALTHY",
    "networkEndpoints": [{"ipAddress": "10.0.0.2", "port": 8470}, {"ipAddress": "10.0.0.3"}],
}


def test_a_tpu_by_its_name(google):
    """Project and zone default to those of this machine."""
    google.answers[NODE] = json.dumps(READY)
    google.answers[f"{META}/project/project-id"] = "p"
    google.answers[f"{META}/instance/zone"] = "projects/123/zones/us-z"
    _attributes(google, agent_worker_number="1", worker_network_endpoints="a,b")
    resolver = TPUClusterResolver("mine", discovery_url=f"{google.url}/$discovery/rest?version=v2")
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.2:8470", "10.0.0.3:8470"]}
    assert resolver.process_id == 1
    assert google.asked[-1][0] == "GET"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"state": "PREEMPTED"}, "its state is PREEMPTED"),
        (
            {"health": "UNHEALTHY_TPU", "healthDescription": "hot"},
            r"its health UNHEALTHY_TPU \(hot\)",
        ),
    ],
)
def test_unusable_tpus_raise(google, monkeypatch, change, says):
    monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU", google.url)
    google.answers[NODE] = json.dumps(READY | change)
    with pytest.raises(RuntimeError, match=says):
        TPUClusterResolver.connect("mine", zone="us-z", project="p")
    google.answers[NODE] = json.dumps(READY)
    assert TPUClusterResolver.connect("mine", zone="us-z", project="p").num_processes == 2


def test_tpu_with_a_googleapiclient_service():
    asked = []

    def get(name):
        asked.append(name)
        return SimpleNamespace(execute=lambda: READY)

    nodes = SimpleNamespace(get=get)
    locations = SimpleNamespace(nodes=lambda: nodes)
    projects = SimpleNamespace(locations=lambda: locations)
    service = SimpleNamespace(projects=lambda: projects)
    resolver = TPUClusterResolver("mine", zone="us-z", project="p", service=service)
    assert resolver.num_processes == 2
    assert asked == ["projects/p/locations/us-z/nodes/mine"]


def test_a_coordinator_needs_name_and_address():
    with pytest.raises(ValueError, match="give both or neither"):
        TPUClusterResolver("local", coordinator_name="lead")
