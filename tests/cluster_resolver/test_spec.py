"""``ClusterSpec``: the forms it accepts, and its answers."""

from __future__ import annotations

import pytest

import distribute_jax as dj
from distribute_jax.cluster_resolver import ClusterSpec


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
