"""Kubernetes: pods by their labels, Indexed Jobs and JobSets, and the API behind both."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from distribute_jax.cluster_resolver import (
    KubernetesClient,
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
)


def _pod(name, phase="Running", ip=None):
    return SimpleNamespace(
        metadata=SimpleNamespace(name=name),
        status=SimpleNamespace(phase=phase, pod_ip=ip, host_ip="192.168.0.1"),
    )


class Stub:
    """Answers as kubernetes.client.CoreV1Api does."""

    def __init__(self, **pods):
        self.pods = pods

    def list_pod_for_all_namespaces(self, label_selector):
        return SimpleNamespace(items=self.pods[label_selector.replace("=", "_").replace("-", "_")])


TWO = Stub(job_name_tensorflow=[_pod("b", ip="10.0.0.1"), _pod("a", ip="10.0.0.2")])


def test_pods_are_workers_in_the_order_of_their_names():
    """At their own addresses, not at their hosts'."""
    resolver = KubernetesClusterResolver(override_client=TWO)
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.2:8470", "10.0.0.1:8470"]}
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")
    assert resolver.master("worker", 1) == "grpc://10.0.0.1:8470"
    with pytest.raises(RuntimeError, match="which of its tasks this process is, is not"):
        _ = resolver.process_id
    resolver.task_type, resolver.task_id = "worker", 0
    assert (resolver.process_id, resolver.num_processes) == (0, 2)


def test_a_pod_finds_its_task_by_its_name(monkeypatch):
    """The host name of a pod is its name."""
    monkeypatch.setenv("HOSTNAME", "b")
    resolver = KubernetesClusterResolver(override_client=TWO)
    assert (resolver.task_type, resolver.task_id, resolver.process_id) == ("worker", 1, 1)


def test_jobs_have_selectors_of_their_own():
    """A pod that two selectors find is one pod."""
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
        ([_pod("a", "Running")], r'Pod "a" is running and has no address yet'),
        ([], "no pod of the job 'worker' has the labels"),
    ],
)
def test_all_pods_must_run(pods, says):
    """A cluster that is not whole is an error that names the pod."""
    with pytest.raises(RuntimeError, match=says):
        KubernetesClusterResolver(override_client=Stub(job_name_tensorflow=pods)).cluster_spec()


PODS = {
    "items": [
        {"metadata": {"name": "a"}, "status": {"phase": "Running", "podIP": "10.0.0.1"}},
        {"metadata": {"name": "b"}, "status": {"phase": "Running", "podIP": "10.0.0.2"}},
    ]
}


@pytest.fixture
def account(tmp_path):
    """The folder that Kubernetes puts into a pod."""
    for name, text in {"token": "secret\n", "namespace": "team"}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_api_is_asked_for_pods_page_by_page(server, account):
    """In the pod's namespace, with its token, which Kubernetes changes now and then."""
    place = "/api/v1/namespaces/team/pods?labelSelector=job-name%3Dtensorflow"
    page = {"items": PODS["items"][:1], "metadata": {"continue": "x/y="}}
    server.answers[place] = json.dumps(page)
    server.answers[f"{place}&continue=x%2Fy%3D"] = json.dumps({"items": PODS["items"][1:]})
    client = KubernetesClient(server.url, account=str(account))
    resolver = KubernetesClusterResolver(override_client=client)
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.1:8470", "10.0.0.2:8470"]}
    (account / "token").write_text("newer")
    resolver.cluster_spec()
    tokens = [headers.get("authorization") for _, _, headers, _ in server.asked]
    assert tokens == ["Bearer secret"] * 2 + ["Bearer newer"] * 2


def _certificate(folder: Path) -> tuple[str, str]:
    """Makes a certificate for loopback and its key, which end with the test."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    options = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -batch"
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    made = ["openssl", "req", *options.split(), *names, *files]
    subprocess.run(made, check=True, capture_output=True, timeout=60)
    return certificate.read_text(), key.read_text()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_in_a_pod_the_api_is_found_and_its_certificate_is_checked(
    server, account, monkeypatch, tmp_path
):
    """By the two variables; another certificate than the cluster's is refused."""
    certificate, key = _certificate(tmp_path)
    (account / "ca.crt").write_text(certificate)
    (tmp_path / "pem").write_text(certificate + key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.answers["/api/v1/namespaces/team/pods?labelSelector=a%3D1"] = json.dumps(PODS)
    host, port = server.host.split(":")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    client = KubernetesClient(account=str(account), timeout=5)
    assert [pod.metadata.name for pod in client.list_pod_for_all_namespaces("a=1").items] == [
        "a",
        "b",
    ]
    (account / "ca.crt").unlink()
    with pytest.raises(
        RuntimeError, match=r"no answer from https://127.0.0.1:\d+/.*(?i:certificate)"
    ):
        client.list_pod_for_all_namespaces("a=1")


def test_without_an_account_all_namespaces_are_listed(server, tmp_path):
    """As through kubectl proxy, which needs no token."""
    server.answers["/api/v1/pods?labelSelector=a%3D1"] = json.dumps({"items": []})
    client = KubernetesClient(server.url + "/", account=str(tmp_path))
    assert client.list_pod_for_all_namespaces("a=1").items == []
    assert "authorization" not in server.asked[0][2]


def test_outside_a_pod_the_api_is_not_found(tmp_path):
    """And the message says what to run."""
    with pytest.raises(RuntimeError, match=r"so this is no pod.*kubectl proxy"):
        KubernetesClient(account=str(tmp_path)).read_job("a")
    with pytest.raises(RuntimeError, match="so this is no pod"):
        KubernetesClusterResolver().cluster_spec()


def test_off_the_cluster_the_package_reads_the_kubeconfig(monkeypatch, tmp_path):
    """Only there, unlike in TensorFlow, and only then is it imported."""
    off = KubernetesClusterResolver(executable_location=KubernetesExecutableLocation.OFF_CLUSTER)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ImportError, match="pip install kubernetes"):
        off.cluster_spec()
    monkeypatch.delitem(sys.modules, "kubernetes")
    (tmp_path / "kubernetes").mkdir()
    (tmp_path / "kubernetes/__init__.py").write_text(
        "from types import SimpleNamespace as N\n"
        "loaded = []\n"
        "pod = N(metadata=N(name='a'), status=N(phase='Running', pod_ip='1'))\n"
        "config = N(load_kube_config=lambda: loaded.append(1))\n"
        "api = N(list_pod_for_all_namespaces=lambda label_selector: N(items=[pod]))\n"
        "client = N(CoreV1Api=lambda: api)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert off.cluster_spec().as_dict() == {"worker": ["1:8470"]}
    assert sys.modules.pop("kubernetes").loaded == [1]


def test_a_location_that_is_none_is_refused():
    """A bool is no place."""
    with pytest.raises(ValueError, match="WITHIN_CLUSTER or OFF_CLUSTER"):
        KubernetesClusterResolver(executable_location=True)


def _job(completions=4, parallelism=4, subdomain="pods", labels=None):
    pod = {"subdomain": subdomain} if subdomain else {}
    spec = {"completions": completions, "parallelism": parallelism, "template": {"spec": pod}}
    return json.dumps({"metadata": {"labels": labels}, "spec": spec})


@pytest.fixture
def pod(server, account, monkeypatch):
    """Plays a pod of a Job; gives its resolver."""

    def play(job, index, host, answer):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
        monkeypatch.setenv("HOSTNAME", host)
        server.answers[f"/apis/batch/v1/namespaces/team/jobs/{job}"] = answer
        client = KubernetesClient(server.url, account=str(account))
        return KubernetesClusterResolver(override_client=client, tf_server_port=1)

    return play


def test_the_pods_of_an_indexed_job_are_met_at_their_names(pod):
    """The API is asked for the Job alone: which pods run already does not matter."""
    resolver = pod("train", 2, "train-2", _job())
    names = ["train-0.pods:1", "train-1.pods:1", "train-2.pods:1", "train-3.pods:1"]
    assert resolver.cluster_spec().as_dict() == {"worker": names}
    assert (resolver.num_processes, resolver.process_id) == (4, 2)
    assert resolver.coordinator_address == "train-0.pods:1"


def test_the_jobs_of_a_job_set_are_one_cluster(pod):
    """Slice by slice, in the order of the Jobs."""
    key = "jobset.sigs.k8s.io/"
    labels = {f"{key}job-index": "1", f"{key}replicatedjob-replicas": "3"}
    resolver = pod("big-slice-1", 1, "big-slice-1-1", _job(2, 2, "big", labels))
    workers = resolver.cluster_spec().job_tasks("worker")
    assert workers[:3] == ["big-slice-0-0.big:1", "big-slice-0-1.big:1", "big-slice-1-0.big:1"]
    assert (resolver.num_processes, resolver.process_id) == (6, 3)
    assert resolver.coordinator_address == "big-slice-0-0.big:1"


@pytest.mark.parametrize(
    ("host", "answer", "says"),
    [
        ("train-2", _job(4, 2), "could never meet. Set spec.parallelism"),
        ("train-2", _job(2, 2), "JOB_COMPLETION_INDEX=2, and completions=2"),
        ("train-2", _job(subdomain=None), "Add a headless Service"),
        ("other", _job(), "does not end in -2"),
        ("train-2", 403, "answered 403 .* a Role with the verbs get and list"),
    ],
)
def test_a_job_whose_pods_cannot_meet_is_an_error(pod, host, answer, says):
    """Each with what to change in the manifest."""
    with pytest.raises(RuntimeError, match=says):
        pod("train", 2, host, answer).cluster_spec()


@pytest.mark.parametrize(
    ("variables", "answers"),
    [
        ({}, (4, 3, "train-0.pods:8470")),
        ({"COORDINATOR_ADDRESS": "train-0.pods:8476"}, (4, 3, "train-0.pods:8476")),
        ({"PROCESS_ID": "1"}, (4, 1, "train-0.pods:8470")),
    ],
)
def test_a_manifest_that_says_it_all_needs_no_api(monkeypatch, variables, answers):
    """Nor a service account that may ask."""
    told = {
        "JOB_COMPLETION_INDEX": "3",
        "NUM_PROCESSES": "4",
        "COORDINATOR_ADDRESS": "train-0.pods",
    }
    for name, value in (told | variables).items():
        monkeypatch.setenv(name, value)
    resolver = KubernetesClusterResolver()
    assert (resolver.num_processes, resolver.process_id, resolver.coordinator_address) == answers
    monkeypatch.setenv("NUM_PROCESSES", "1")
    with pytest.raises(RuntimeError, match="NUM_PROCESSES=1"):
        resolver.cluster_spec()
