"""ClusterSpec: the forms it takes, and what it says."""

from __future__ import annotations

import pytest

import distribute_jax as dj
from distribute_jax.cluster_resolver import ClusterSpec


def test_lists_and_dicts_say_the_same_and_gaps_stay_gaps():
    """A dense dict equals a list; a dict with gaps keeps its indices in every answer."""
    spec = ClusterSpec({"worker": {1: "b:1", 0: "a:1"}, "ps": {3: "d:1", 1: "c:1"}})
    assert spec.as_dict() == {"ps": {1: "c:1", 3: "d:1"}, "worker": ["a:1", "b:1"]}
    assert spec.jobs == ["ps", "worker"]
    assert (spec.num_tasks("ps"), spec.task_indices("ps")) == (2, [1, 3])
    assert spec.job_tasks("ps") == [None, "c:1", None, "d:1"]
    assert spec.task_address("ps", 3) == "d:1"
    assert ClusterSpec({"none": []}).job_tasks("none") == []


def test_equal_clusters_are_equal_in_every_form():
    """A spec equals a copy of itself and the dict that made it, and no other."""
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
    """What was given, and what as_dict gives, may be changed without a trace."""
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
def test_a_cluster_of_another_form_is_a_type_error_that_names_the_part(cluster, says):
    """When the spec is made."""
    with pytest.raises(TypeError, match=says) as error:
        ClusterSpec(cluster)
    assert isinstance(error.value, dj.DistributeError)


def test_what_is_not_there_is_a_value_error_that_lists_what_is():
    """A wrong job or task is named, with the right ones beside it."""
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
