"""TF_CONFIG: its cluster and task, what overrides it, and its malformed forms."""

from __future__ import annotations

import json

import pytest

import distribute_jax as dj
from distribute_jax.cluster_resolver import TFConfigClusterResolver

CLUSTER = {"ps": ["ps0:2222", "ps1:2222"], "worker": ["w0:2222", "w1:2222", "w2:2222"]}


@pytest.fixture
def tf_config(monkeypatch):
    """Sets the variable: to a str as it is, to anything else as JSON."""

    def set_variable(value):
        text = value if isinstance(value, str) else json.dumps(value)
        monkeypatch.setenv("TF_CONFIG", text)

    return set_variable


def test_the_task_and_its_address(tf_config):
    tf_config({"cluster": CLUSTER, "task": {"type": "ps", "index": 0}})
    resolver = TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)
    assert resolver.cluster_spec() == CLUSTER
    assert resolver.master() == "ps0:2222"
    assert resolver.master("worker", 1) == "w1:2222"
    assert resolver.master("worker", 1, "grpc") == "grpc://w1:2222"
    assert (resolver.rpc_layer, resolver.environment) == (None, "")


def test_arguments_override_the_variable(tf_config):
    tf_config(
        {
            "cluster": CLUSTER,
            "task": {"type": "ps", "index": "1"},
            "rpc_layer": "grpc",
            "environment": "google",
        }
    )
    resolver = TFConfigClusterResolver()
    assert (resolver.task_id, resolver.rpc_layer, resolver.environment) == (1, "grpc", "google")
    passed = TFConfigClusterResolver("worker", 2, "http", "mine")
    assert (passed.master(), passed.environment) == ("http://w2:2222", "mine")
    passed.task_id, passed.rpc_layer = 0, "grpc"
    assert passed.master() == "grpc://w0:2222"


def test_the_variable_is_read_at_each_call(tf_config):
    resolver = TFConfigClusterResolver()
    assert (resolver.num_processes, resolver.coordinator_address) == (1, None)
    tf_config({"cluster": CLUSTER, "task": {"type": "worker", "index": 2}})
    asked = (resolver.num_processes, resolver.process_id, resolver.coordinator_address)
    assert asked == (3, 2, "w0:2222")


@pytest.mark.parametrize(
    "text", ["", "{}", '{"task": {"type": "worker", "index": 3}}', '{"cluster": {}}']
)
def test_without_a_cluster_the_process_is_alone(tf_config, text):
    tf_config(text)
    resolver = TFConfigClusterResolver()
    assert (resolver.master(), resolver.cluster_spec().as_dict()) == ("", {})
    assert (resolver.num_processes, resolver.process_id) == (1, 0)


def test_the_master_of_a_single_task_and_a_session_master(tf_config):
    one = {"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}
    tf_config(one)
    assert TFConfigClusterResolver().master() == ""
    tf_config(one | {"session_master": "s:1"})
    assert TFConfigClusterResolver().master("worker", 0) == "s:1"


def test_a_cluster_without_a_task_says_what_to_add(tf_config):
    tf_config({"cluster": {"worker": ["a:1", "b:2"]}})
    with pytest.raises(dj.ClusterError, match=r'Add "task": \{"type": "worker", "index": 0\}'):
        _ = TFConfigClusterResolver().process_id


def test_a_cluster_by_index_keeps_its_indices(tf_config):
    """JSON has strings as keys."""
    tf_config({"cluster": {"worker": {"0": "a:1", "3": "b:1"}}})
    assert TFConfigClusterResolver().cluster_spec().as_dict() == {"worker": {0: "a:1", 3: "b:1"}}


def test_accelerators_are_those_of_this_task_by_default(tf_config):
    tf_config({"cluster": CLUSTER, "task": {"type": "worker", "index": 1}})
    with pytest.raises(ValueError, match="this is process 1"):
        TFConfigClusterResolver().num_accelerators()


MALFORMED = {
    "not JSON": ("{'cluster': {}}", "is not JSON"),
    "many brackets": ("[" * 100_000, "is not JSON"),
    "a list": ([], "the whole is"),
    "cluster is a list": ({"cluster": ["a:1"]}, "its 'cluster' is"),
    "job is an address": ({"cluster": {"worker": "a:1"}}, "job 'worker': the name of"),
    "address is a number": ({"cluster": {"worker": [2222]}}, "got [2222]"),
    "index in the cluster": ({"cluster": {"worker": {"x": "a:1"}}}, "an index in the job 'worker'"),
    "task is a list": ({"task": ["worker", 0]}, "its 'task' is"),
    "index is a word": ({"task": {"index": "one"}}, "its task's 'index' is 'one'"),
    "index is negative": ({"task": {"index": -1}}, "its task's 'index' is -1"),
    "index is a bool": ({"task": {"index": True}}, "its task's 'index' is True"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_variable_is_a_value_error_that_names_the_part(tf_config, case):
    value, says = MALFORMED[case]
    tf_config(value)
    with pytest.raises(ValueError, match="TF_CONFIG") as error:
        _ = TFConfigClusterResolver().process_id
    assert says in str(error.value)
    assert '"task": {"type": "worker", "index": 0}' in str(error.value)
    assert isinstance(error.value, dj.ArgumentError)


def test_text_that_is_not_json_is_a_json_decode_error(tf_config):
    tf_config('{"cluster": }')
    with pytest.raises(json.JSONDecodeError, match=r"line 1 column 13") as error:
        TFConfigClusterResolver().cluster_spec()
    assert error.value.pos == 12
    assert isinstance(error.value, dj.TFConfigError)
