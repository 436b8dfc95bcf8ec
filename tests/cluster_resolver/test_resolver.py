"""What ``ClusterSpec`` accepts, what resolvers derive from it and the task, and ``UnionResolver``."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import pytest

import distribute_jax as dj
from distribute_jax.cluster_resolver import ClusterSpec, SimpleClusterResolver, UnionResolver
from distribute_jax.cluster_resolver._base import count_by_kind

CHIEF = {"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["p:1"], "evaluator": ["e:1"]}
GAPS = {"worker": {2: "b:1", 0: "a:1"}}
IPV6 = {"worker": ["[::1]:2222", "[::1]:2223"]}


@pytest.mark.parametrize(
    ("cluster", "task", "answers"),
    [
        (CHIEF, ("chief", 0), (3, 0, "c:1")),
        (CHIEF, ("worker", 1), (3, 2, "c:1")),  # ps and evaluator are not counted
        (CHIEF, ("evaluator", 0), (1, 0, None)),  # stands alone
        ({"worker": ["a:1"]}, ("evaluator", 0), (1, 0, None)),
        ({"worker": ["a:1", "b:1"]}, ("worker", 0), (2, 0, "a:1")),
        (GAPS, ("worker", 2), (2, 1, "a:1")),  # process ids leave no gaps
        (IPV6, ("worker", 1), (2, 1, "[::1]:2222")),
        ({}, (None, None), (1, 0, None)),
    ],
)
def test_processes_follow_from_the_cluster_and_the_task(cluster, task, answers):
    resolver = SimpleClusterResolver(ClusterSpec(cluster), task_type=task[0], task_id=task[1])
    asked = (resolver.num_processes, resolver.process_id, resolver.coordinator_address)
    assert asked == answers


@pytest.mark.parametrize(
    ("cluster", "task", "says"),
    [
        ({"worker": ["a:1"]}, (None, None), "not which of its tasks this process is"),
        ({"worker": ["a:1"]}, ("worker", 1), r"\('worker', 1\) is not one of the 1 tasks"),
        (CHIEF, ("ps", 0), "Tasks of the jobs 'ps' and 'evaluator' do not train"),
        ({"ps": ["a:1"]}, ("ps", 0), "has no task that trains"),
        ({"worker": ["a:1", "a:1"]}, ("worker", 1), "the same address 'a:1'"),
    ],
)
def test_a_task_that_is_not_in_the_cluster_raises(cluster, task, says):
    resolver = SimpleClusterResolver(ClusterSpec(cluster), task_type=task[0], task_id=task[1])
    with pytest.raises(RuntimeError, match=says):
        _ = resolver.process_id


@pytest.mark.parametrize(
    "address", ["a", "a:", ":1", "a:0", "a:65536", "a:x", "", "::1:2222", "grpc://a:1"]
)
def test_the_address_of_process_0_must_be_host_and_port(address):
    """An IPv6 address without brackets is refused: JAX waits for it forever."""
    resolver = SimpleClusterResolver(ClusterSpec({"worker": [address, "b:1"]}))
    with pytest.raises(RuntimeError, match="must be host:port with a port from 1 to 65535"):
        _ = resolver.coordinator_address


def test_a_simple_resolver_returns_what_it_was_passed():
    spec = ClusterSpec({"worker": ["a:1", "b:1"]})
    resolver = SimpleClusterResolver(spec, "m", "worker", 1, "cloud", {"TPU": 8}, "grpc")
    assert resolver.cluster_spec() is spec
    assert (resolver.master(), resolver.master("worker", 0)) == ("m", "grpc://a:1")
    assert resolver.master("worker", 0, "http") == "http://a:1"
    assert (resolver.environment, resolver.rpc_layer) == ("cloud", "grpc")
    assert resolver.num_accelerators() == {"TPU": 8}
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "ps", 0, "http"
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("ps", 0, "http")
    with pytest.raises(TypeError, match=r"cluster_spec must be dj\.cluster_resolver\.ClusterSpec"):
        SimpleClusterResolver({"worker": ["a:1"]})


@dataclass
class Device:
    """As much of a device as is counted."""

    platform: str


@pytest.mark.parametrize(
    ("platforms", "counts"),
    [
        (["tpu", "tpu", "gpu", "gpu"], {"TPU": 2, "GPU": 2}),
        (["cuda", "rocm"], {"GPU": 2}),
        (["cpu", "cpu"], {}),
        ([], {}),
    ],
)
def test_accelerators_are_counted_by_kind(platforms, counts):
    assert count_by_kind(map(Device, platforms)) == counts


def test_accelerators_of_a_task_are_those_of_its_process():
    resolver = SimpleClusterResolver(ClusterSpec({"worker": ["a:1", "b:1"]}))
    assert resolver.num_accelerators() == count_by_kind(jax.devices())
    assert resolver.num_accelerators("worker", 0) == count_by_kind(jax.devices())
    with pytest.raises(ValueError, match=r"this is process 1, and JAX runs with 1 process"):
        resolver.num_accelerators("worker", 1)


# UnionResolver


def _simple(cluster, *rest, **more):
    return SimpleClusterResolver(ClusterSpec(cluster), *rest, **more)


@pytest.mark.parametrize(
    ("clusters", "joined"),
    [
        ([{"worker": ["a", "b"]}, {"worker": ["c"]}], {"worker": ["a", "b", "c"]}),
        ([{"worker": ["a"]}, {"ps": ["c"]}], {"ps": ["c"], "worker": ["a"]}),
        (
            [{"worker": {1: "a", 2: "b"}}, {"worker": {6: "c"}}],
            {"worker": {1: "a", 2: "b", 6: "c"}},
        ),
        ([{"worker": {2: "c"}}, {"worker": ["a", "b"]}], {"worker": ["a", "b", "c"]}),
        (
            [{"worker": ["a"]}, {"worker": {1: "b"}}, {"worker": {5: "c"}}],
            {"worker": {0: "a", 1: "b", 5: "c"}},
        ),
        ([{}, {"worker": ["a"]}], {"worker": ["a"]}),
    ],
)
def test_lists_are_appended_and_dicts_are_merged(clusters, joined):
    """A dict among lists makes them all dicts."""
    assert UnionResolver(*map(_simple, clusters)).cluster_spec().as_dict() == joined


def test_one_index_with_two_addresses_is_a_key_error():
    union = UnionResolver(_simple({"worker": ["a", "b"]}), _simple({"worker": {1: "x"}}))
    with pytest.raises(
        KeyError, match=r"job 'worker' has the tasks \[1\] in two clusters"
    ) as error:
        union.cluster_spec()
    assert str(error.value).startswith("UnionResolver: Duplicate keys")


def test_arguments_override_the_first_resolver():
    """Also a task_id of 0, which TensorFlow ignores."""
    first = _simple({"worker": ["a:1", "b:1"]}, "m", "worker", 1, "cloud", {"GPU": 2}, "grpc")
    other = _simple({"worker": ["c:1"]}, "n", "ps", 2)
    plain = UnionResolver(first, other)
    assert (plain.task_type, plain.task_id, plain.rpc_layer) == ("worker", 1, "grpc")
    assert (plain.master(), plain.environment, plain.num_accelerators()) == (
        "m",
        "cloud",
        {"GPU": 2},
    )
    assert plain.master("worker", 2) == "c:1"
    named = UnionResolver(first, other, task_type="worker", task_id=0, rpc_layer="http")
    assert (named.task_id, named.rpc_layer, named.process_id) == (0, "http", 0)
    assert named.master("worker", 2) == "http://c:1"
    named.task_id = 2
    assert (named.process_id, named.num_processes) == (2, 3)


def test_no_resolver_is_refused():
    with pytest.raises(ValueError, match="at least one ClusterResolver is required"):
        UnionResolver()


# ClusterSpec


def test_a_dense_dict_is_a_list_and_gaps_are_kept():
    spec = ClusterSpec({"worker": {1: "b:1", 0: "a:1"}, "ps": {3: "d:1", 1: "c:1"}})
    assert spec.as_dict() == {"ps": {1: "c:1", 3: "d:1"}, "worker": ["a:1", "b:1"]}
    assert spec.jobs == ["ps", "worker"]
    assert (spec.num_tasks("ps"), spec.task_indices("ps")) == (2, [1, 3])
    assert spec.job_tasks("ps") == [None, "c:1", None, "d:1"]
    assert spec.task_address("ps", 3) == "d:1"
    assert ClusterSpec({"none": []}).job_tasks("none") == []


def test_equal_clusters_are_equal_in_every_form():
    spec = ClusterSpec({"worker": ["a:1", "b:1"]})
    assert (
        spec == ClusterSpec(spec) == ClusterSpec(spec.as_dict()) == {"worker": {1: "b:1", 0: "a:1"}}
    )
    assert spec != ClusterSpec({"worker": ["b:1", "a:1"]})
    assert spec != {"worker": 3}
    assert spec != 3
    assert spec
    assert not ClusterSpec({})
    assert repr(spec) == "ClusterSpec({'worker': ['a:1', 'b:1']})"


def test_a_spec_does_not_change_with_the_dict_that_made_it():
    """Nor with a result of ``as_dict``."""
    given = {"worker": ["a:1"]}
    spec = ClusterSpec(given)
    given["worker"].append("b:1")
    spec.as_dict()["worker"].append("c:1")
    assert spec.num_tasks("worker") == 1


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        (["a:1"], "must be dj.cluster_resolver.ClusterSpec or a dict"),
        ({"worker": "a:1"}, "job 'worker': .* got 'a:1'"),
        ({"worker": 3}, "its tasks a list of addresses"),
        ({"worker": [1]}, "addresses such as 'host:2222'"),
        ({"worker": {"0": "a:1"}}, "the index of a task, an int >= 0"),
        ({"worker": {-1: "a:1"}}, "the index of a task, an int >= 0"),
        ({3: ["a:1"]}, "the name of a job must be a string"),
    ],
)
def test_a_malformed_cluster_is_a_type_error_that_names_the_part(cluster, says):
    with pytest.raises(TypeError, match=says) as error:
        ClusterSpec(cluster)
    assert isinstance(error.value, dj.DistributeError)


def test_unknown_jobs_and_tasks_raise():
    spec = ClusterSpec({"worker": ["a:1", "b:1"]})
    for ask in (spec.num_tasks, spec.task_indices, spec.job_tasks):
        with pytest.raises(
            ValueError, match=r"No such job in cluster: 'ps'. Its jobs are 'worker'"
        ):
            ask("ps")
    with pytest.raises(
        ValueError, match=r"No task with index 2 in job 'worker': its tasks are 0, 1"
    ):
        spec.task_address("worker", 2)
