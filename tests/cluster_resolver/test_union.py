"""``UnionResolver``: how clusters are joined."""

from __future__ import annotations

import pytest

from distribute_jax.cluster_resolver import ClusterSpec, SimpleClusterResolver, UnionResolver


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
