"""InputOptions and InputContext: TensorFlow's fields, their defaults and what they refuse."""

import dataclasses
import re
from typing import Any

import pytest

import distribute_jax as dj
from distribute_jax._errors import ArgumentError
from distribute_jax.data import AutoShardPolicy, InputContext, InputOptions, InputReplicationMode

PER_REPLICA = InputReplicationMode.PER_REPLICA


def test_the_defaults_are_those_of_tensorflow_except_the_buffer():
    """Batches are prefetched, one dataset for each process; two global batches may be in flight."""
    options = InputOptions()
    assert dataclasses.asdict(options) == {
        "partial": dj.PartialPolicy.MASK,
        "auto_shard_policy": None,
        "experimental_fetch_to_device": True,
        "experimental_replication_mode": InputReplicationMode.PER_WORKER,
        "experimental_place_dataset_on_device": False,
        "experimental_per_replica_buffer_size": 2,
    }


@pytest.mark.parametrize("spelling", ["data", "DATA", AutoShardPolicy.DATA])
def test_a_policy_is_passed_by_name_or_as_a_member(spelling: Any):
    """Names in any letter case are converted to members."""
    assert InputOptions(auto_shard_policy=spelling).auto_shard_policy is AutoShardPolicy.DATA
    options = InputOptions(experimental_replication_mode="per_replica")
    assert options.experimental_replication_mode is PER_REPLICA


def test_the_members_of_a_policy_have_the_values_of_tensorflow():
    """Saved settings and comparisons by number keep their meaning."""
    numbers = {"OFF": -1, "AUTO": 0, "FILE": 1, "DATA": 2, "HINT": 3}
    assert {policy.name: policy.value for policy in AutoShardPolicy} == numbers


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"partial": "pad"}, "'mask', 'shrink', 'drop', 'error'"),
        ({"auto_shard_policy": "files"}, "'off', 'auto', 'file', 'data', 'hint'"),
        ({"auto_shard_policy": 2}, "or a member of AutoShardPolicy"),
        ({"experimental_replication_mode": "each"}, "'per_worker', 'per_replica'"),
        ({"experimental_fetch_to_device": "yes"}, "must be None or a bool"),
        ({"experimental_place_dataset_on_device": None}, "must be a bool"),
        ({"experimental_per_replica_buffer_size": -1}, "must be an integer >= 0"),
        ({"experimental_per_replica_buffer_size": True}, "must be an integer >= 0"),
        ({"experimental_per_replica_buffer_size": 1.5}, "must be an integer"),
    ],
)
def test_values_that_are_not_allowed_are_refused(fields: dict[str, Any], message: str):
    """The message shows the value and what is allowed."""
    with pytest.raises(ArgumentError, match=message) as error:
        InputOptions(**fields)
    ((name, value),) = fields.items()
    assert re.match(rf"InputOptions(\({name}\)|: {name}) must", str(error.value))
    assert str(error.value).endswith(f"got {value!r}.")


@pytest.mark.parametrize("spelling", ["hint", AutoShardPolicy.HINT])
def test_hint_is_refused_by_name(spelling: Any):
    """There is no graph with a placeholder; the message says how to shard instead."""
    with pytest.raises(ArgumentError, match=r"HINT.*context\.num_input_pipelines"):
        InputOptions(auto_shard_policy=spelling)


def test_placing_a_dataset_on_the_devices_needs_one_for_each_replica():
    """Acceptance 108: not without PER_REPLICA, and not together with fetching, the default."""
    on_device = {"experimental_place_dataset_on_device": True}
    with pytest.raises(ValueError, match="PER_WORKER"):
        InputOptions(**on_device)
    on_device["experimental_replication_mode"] = PER_REPLICA
    for fetch in (None, True):
        with pytest.raises(ValueError, match="experimental_fetch_to_device=True"):
            InputOptions(experimental_fetch_to_device=fetch, **on_device)
    placed = InputOptions(experimental_fetch_to_device=False, **on_device)
    assert placed.experimental_place_dataset_on_device


def test_a_context_divides_the_global_batch_among_all_replicas():
    """Acceptance 103: 12 over 6 replicas is 2; 13 is a ValueError with TensorFlow's words, 0 and -6 too."""
    context = InputContext(2, 1, 6)
    assert context.get_per_replica_batch_size(12) == 2
    words = "The `global_batch_size` 13 is not divisible by `num_replicas_in_sync` 6"
    with pytest.raises(ValueError, match=words):
        context.get_per_replica_batch_size(13)
    for size in (0, -6, True):
        with pytest.raises(
            ArgumentError, match=r"global_batch_size\) must be an integer >= 1; got"
        ):
            context.get_per_replica_batch_size(size)


@pytest.mark.parametrize("numbers", [(0, 0, 1), (1, 0, 0), (1, -1, 1), (2, 2, 2), (1, 0, 2.0)])
def test_an_invalid_context_is_refused(numbers: tuple[Any, ...]):
    """Counts are at least 1, and the id is below the number of pipelines."""
    with pytest.raises(ArgumentError, match="InputContext"):
        InputContext(*numbers)
