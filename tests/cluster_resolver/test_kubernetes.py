"""Kubernetes: pods by label, Indexed Jobs, JobSets, and requests to the API."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

import distribute_jax as dj
from distribute_jax.cluster_resolver import (
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
    _kubernetes,
)


def _pod(name, phase="Running", ip=None):
    return SimpleNamespace(
        metadata=SimpleNamespace(name=name),
        status=SimpleNamespace(phase=phase, pod_ip=ip, host_ip="192.168.0.1"),
    )


class Stub:
    """A stand-in for ``kubernetes.client.CoreV1Api``."""

    def __init__(self, **pods):
        self.pods = pods

    def list_pod_for_all_namespaces(self, label_selector):
        return SimpleNamespace(items=self.pods[label_selector.replace("=", "_").replace("-", "_")])


TWO = Stub(job_name_tensorflow=[_pod("b", ip="10.0.0.1"), _pod("a", ip="10.0.0.2")])


def test_pods_are_workers_sorted_by_name():
    """At their own addresses, not those of their hosts."""
    resolver = KubernetesClusterResolver(override_client=TWO)
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.2:8470", "10.0.0.1:8470"]}
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")
    assert resolver.master("worker", 1) == "grpc://10.0.0.1:8470"
    with pytest.raises(RuntimeError, match="not which of its tasks this process is"):
        _ = resolver.process_id
    resolver.task_type, resolver.task_id = "worker", 0
    assert (resolver.process_id, resolver.num_processes) == (0, 2)


def test_the_ipv6_address_of_a_pod_gets_brackets():
    """JAX accepts no other form."""
    resolver = KubernetesClusterResolver(
        override_client=Stub(job_name_tensorflow=[_pod("a", ip="fd00::2")])
    )
    assert resolver.cluster_spec().as_dict() == {"worker": ["[fd00::2]:8470"]}


def test_a_pod_finds_its_task_by_its_name(monkeypatch):
    monkeypatch.setenv("HOSTNAME", "b")
    resolver = KubernetesClusterResolver(override_client=TWO)
    assert (resolver.task_type, resolver.task_id, resolver.process_id) == ("worker", 1, 1)


def test_each_job_has_its_selectors():
    """A pod that two selectors match counts once."""
    stub = Stub(
        a_1=[_pod("x", ip="1")], b_1=[_pod("x", ip="1"), _pod("y", ip="2")], c_1=[_pod("p", ip="3")]
    )
    labels = {"worker": ["a=1", "b=1"], "ps": ["c=1"]}
    resolver = KubernetesClusterResolver(
        labels, tf_server_port=1, rpc_layer=None, override_client=stub
    )
    assert resolver.cluster_spec().as_dict() == {"ps": ["3:1"], "worker": ["1:1", "2:1"]}
    assert resolver.master("ps", 0) == "3:1"


@pytest.mark.parametrize(
    ("pods", "says"),
    [
        ([_pod("a", "Failed", "1")], r'Pod "a" is not running; phase: "Failed"'),
        (
            [_pod("a", "Running", "1"), _pod("b", "Pending")],
            r'Pod "b" is not running; phase: "Pending"',
        ),
        ([_pod("a", "Running")], r'Pod "a" is not running; phase: "Running", address: None'),
        ([], "no pod of the job 'worker' has the labels"),
    ],
)
def test_pods_that_do_not_run_raise(pods, says):
    with pytest.raises(RuntimeError, match=says):
        KubernetesClusterResolver(override_client=Stub(job_name_tensorflow=pods)).cluster_spec()


@pytest.fixture
def pod(server, monkeypatch, tmp_path):
    """Makes this process a pod in the namespace ``team``, and the server its API."""

    def load(configuration):
        configuration.host = server.url
        configuration.api_key["BearerToken"] = "bearer secret"

    monkeypatch.setattr("kubernetes.config.load_incluster_config", load)
    (tmp_path / "namespace").write_text("team")
    monkeypatch.setattr(_kubernetes, "NAMESPACE", tmp_path / "namespace")


LABELLED = "?labelSelector=job-name%3Dtensorflow"
PODS = {
    "items": [
        {"metadata": {"name": name}, "status": {"phase": "Running", "podIP": ip}, "spec": None}
        for name, ip in (("a", "10.0.0.1"), ("b", "10.0.0.2"))
    ]
}


def test_a_pod_lists_those_of_its_namespace_with_its_token(server, pod):
    server.answers[f"/api/v1/namespaces/team/pods{LABELLED}"] = json.dumps(PODS)
    spec = KubernetesClusterResolver().cluster_spec()
    assert spec.as_dict() == {"worker": ["10.0.0.1:8470", "10.0.0.2:8470"]}
    assert server.asked[0][2]["authorization"] == "bearer secret"


def test_off_cluster_the_kubeconfig_file_has_address_and_token(server, monkeypatch, tmp_path):
    config = {
        "clusters": [{"name": "c", "cluster": {"server": server.url}}],
        "users": [{"name": "u", "user": {"token": "mine"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "config").write_text(json.dumps(config))
    monkeypatch.setattr(
        "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config")
    )
    server.answers[f"/api/v1/pods{LABELLED}"] = json.dumps(PODS)
    off = KubernetesClusterResolver(executable_location=KubernetesExecutableLocation.OFF_CLUSTER)
    assert off.cluster_spec().as_dict() == {"worker": ["10.0.0.1:8470", "10.0.0.2:8470"]}
    assert server.asked[0][2]["authorization"] == "Bearer mine"


def test_outside_a_pod_the_message_says_what_to_pass():
    with pytest.raises(RuntimeError, match=r"Outside of a pod pass executable_location="):
        KubernetesClusterResolver().cluster_spec()


def test_a_silent_api_times_out_without_a_retry(server, pod, monkeypatch):
    monkeypatch.setattr(_kubernetes, "_SECONDS", 0.3)
    server.answers[f"/api/v1/namespaces/team/pods{LABELLED}"] = "silence"
    with pytest.raises(dj.ServiceError, match=rf"no answer from {server.url} within 0.3 s"):
        KubernetesClusterResolver().cluster_spec()
    assert len(server.asked) == 1


def test_another_executable_location_is_refused():
    with pytest.raises(ValueError, match="'within_cluster', 'off_cluster'"):
        KubernetesClusterResolver(executable_location=True)


def _job(completions=4, parallelism=4, subdomain="pods", labels=None):
    pod = {"containers": [{"name": "train"}]} | ({"subdomain": subdomain} if subdomain else {})
    spec = {"completions": completions, "parallelism": parallelism, "template": {"spec": pod}}
    return json.dumps({"metadata": {"labels": labels}, "spec": spec})


@pytest.fixture
def indexed(server, pod, monkeypatch):
    """Makes this process a pod of a Job, and returns its resolver."""

    def play(job, index, host, answer):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
        monkeypatch.setenv("HOSTNAME", host)
        server.answers[f"/apis/batch/v1/namespaces/team/jobs/{job}"] = answer
        return KubernetesClusterResolver(tf_server_port=1)

    return play


def test_the_addresses_of_an_indexed_job_come_from_its_name(indexed):
    """Only the Job is requested: its pods need not run yet."""
    resolver = indexed("train", 2, "train-2", _job())
    names = ["train-0.pods:1", "train-1.pods:1", "train-2.pods:1", "train-3.pods:1"]
    assert resolver.cluster_spec().as_dict() == {"worker": names}
    assert (resolver.num_processes, resolver.process_id) == (4, 2)
    assert resolver.coordinator_address == "train-0.pods:1"


def test_the_jobs_of_a_job_set_are_one_cluster(indexed):
    key = "jobset.sigs.k8s.io/"
    labels = {f"{key}job-index": "1", f"{key}replicatedjob-replicas": "3"}
    resolver = indexed("big-slice-1", 1, "big-slice-1-1", _job(2, 2, "big", labels))
    workers = resolver.cluster_spec().job_tasks("worker")
    assert workers[:3] == ["big-slice-0-0.big:1", "big-slice-0-1.big:1", "big-slice-1-0.big:1"]
    assert (resolver.num_processes, resolver.process_id) == (6, 3)
    assert resolver.coordinator_address == "big-slice-0-0.big:1"


@pytest.mark.parametrize(
    ("host", "answer", "says"),
    [
        ("train-2", _job(4, 2), "never all run at once. Set spec.parallelism"),
        ("train-2", _job(subdomain=None), "Add a headless Service"),
        ("other", _job(), "does not end in -2"),
        ("train-2", 403, "answered 403 .* a Role with the verbs get and list"),
    ],
)
def test_an_unsuitable_job_says_what_to_change(indexed, host, answer, says):
    with pytest.raises(RuntimeError, match=says):
        indexed("train", 2, host, answer).cluster_spec()


@pytest.mark.parametrize(
    ("variables", "answers"),
    [
        ({}, (4, 3, "train-0.pods:8470")),
        ({"COORDINATOR_ADDRESS": "train-0.pods:8476"}, (4, 3, "train-0.pods:8476")),
        ({"PROCESS_ID": "1"}, (4, 1, "train-0.pods:8470")),
    ],
)
def test_variables_in_the_manifest_replace_the_api(monkeypatch, variables, answers):
    manifest = {
        "JOB_COMPLETION_INDEX": "3",
        "NUM_PROCESSES": "4",
        "COORDINATOR_ADDRESS": "train-0.pods",
    }
    for name, value in (manifest | variables).items():
        monkeypatch.setenv(name, value)
    resolver = KubernetesClusterResolver()
    assert (resolver.num_processes, resolver.process_id, resolver.coordinator_address) == answers
    monkeypatch.setenv("NUM_PROCESSES", "1")
    with pytest.raises(RuntimeError, match="NUM_PROCESSES=1"):
        resolver.cluster_spec()
