"""``Topology`` and ``DeviceAssignment`` on grids of TPU hosts."""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np
import pytest
from devices import hosts, slices

import distribute_jax as dj

Topology, DeviceAssignment = dj.tpu.experimental.Topology, dj.tpu.experimental.DeviceAssignment


def test_the_topology_of_a_pod():
    """Four hosts of 2 × 2 chips with two cores each; the order of the devices does not matter."""
    devices = hosts(2, 2, "TPU v3", cores=2)
    topology = Topology(devices[::-1])
    assert (topology.mesh_shape.tolist(), topology.mesh_rank) == ([4, 4, 1, 2], 4)
    assert (topology.num_tasks, topology.num_tpus_per_task) == (4, 8)
    assert topology.device_coordinates.shape == (4, 8, 4)
    for device in devices:
        at = (*device.coords, device.core_on_chip)
        assert topology.device_at_coordinates(at) is device
        assert topology.task_ordinal_at_coordinates(at) == device.process_index
        assert topology.tpu_device_ordinal_at_coordinates(at) == device.id % 8


@pytest.mark.parametrize(
    ("count", "shape"),
    [(8, [2, 2, 1, 2]), (4, [2, 1, 1, 2]), (2, [1, 1, 1, 2]), (3, [1, 3, 1, 1]), (1, [1] * 4)],
)
def test_simulated_devices_have_the_coordinates_of_v3_chips(count, shape):
    assert Topology(jax.devices()[:count]).mesh_shape.tolist() == shape


def test_slices_are_placed_along_x():
    """Their coordinates repeat."""
    topology = Topology(slices(3))
    assert topology.mesh_shape.tolist() == [6, 2, 1, 1]
    assert topology.missing_devices.size == 0


def test_missing_devices_are_in_no_replica():
    """Two hosts at opposite corners of a square."""
    corners = [
        dataclasses.replace(c, process_index=c.process_index // 3)
        for c in hosts(2, 2)
        if c.process_index in {0, 3}
    ]
    topology = Topology(corners)
    assert topology.missing_devices.shape == (8, 4)
    assignment = DeviceAssignment.build(topology, [2, 2, 1, 1], num_replicas=2)
    assert [{d.process_index for d in replica} for replica in assignment.devices] == [{0}, {1}]
    with pytest.raises(ValueError, match="2 replicas"):
        DeviceAssignment.build(topology, [2, 2, 1, 1], num_replicas=3)
    with pytest.raises(ValueError, match="no device at the coordinates"):
        topology.task_ordinal_at_coordinates((3, 0, 0, 0))


@pytest.mark.parametrize(
    ("shape", "count"),
    [([1, 1, 1, 1], 32), ([1, 1, 1, 2], 16), ([2, 1, 1, 2], 8), ([2, 2, 1, 2], 4)],
)
def test_blocks_hold_neighbouring_cores_and_are_numbered_process_by_process(shape, count):
    topology = Topology(hosts(2, 2, "TPU v3", cores=2))
    assignment = DeviceAssignment.build(topology, shape, num_replicas=np.int64(count))
    cores = assignment.core_assignment
    assert cores.shape == (count, 32 // count, 4)
    assert len({tuple(core) for core in cores.reshape(-1, 4).tolist()}) == 32
    assert ((cores.max(1) - cores.min(1) + 1) == shape).all()
    owners = [replica[0].process_index for replica in assignment.devices]
    assert owners == sorted(owners)
    assert assignment.lookup_replicas(1, 0) == [i for i, owner in enumerate(owners) if owner == 1]
    assert assignment.coordinates(0, 0) == (0, 0, 0, 0)
    assert assignment.tpu_ordinal(count - 1, 32 // count - 1) == 7


def test_blocks_with_a_stride_interleave():
    assignment = DeviceAssignment.build(
        Topology(hosts(1, 1)), [2, 1, 1, 1], [1, 1, 1, 1], num_replicas=2
    )
    assert assignment.core_assignment[:, :, 1].tolist() == [[0, 0], [1, 1]]
    four = [dataclasses.replace(chip, process_index=0) for chip in hosts(2, 1)]
    woven = DeviceAssignment.build(Topology(four), [2, 1, 1, 1], [2, 1, 1, 1], num_replicas=4)
    assert woven.core_assignment[:, :, 0].tolist() == [[0, 2], [0, 2], [1, 3], [1, 3]]


TOPOLOGY = Topology(hosts(1, 1))
WRONG = {
    "no topology": (
        lambda: DeviceAssignment.build("topology"),
        "must be dj.tpu.experimental.Topology; got",
    ),
    "shape": (lambda: DeviceAssignment.build(TOPOLOGY, [1, 1]), "got [1, 1]"),
    "zero": (lambda: DeviceAssignment.build(TOPOLOGY, [1, 1, 1, 0]), "4 ints >= 1"),
    "stride": (
        lambda: DeviceAssignment.build(TOPOLOGY, None, [1.5] * 4),
        "computation_stride must be 4 ints",
    ),
    "large": (
        lambda: DeviceAssignment.build(TOPOLOGY, [1, 1, 1, 2]),
        "0 replicas of computation_shape=[1, 1, 1, 2]",
    ),
    "huge": (
        lambda: DeviceAssignment.build(TOPOLOGY, [10**6, 10**6, 1, 1]),
        "0 replicas of computation_shape=[1000000, 1000000, 1, 1]",
    ),
    "beyond int32": (
        lambda: DeviceAssignment.build(TOPOLOGY, [1, 1, 1, 2**32], [1, 1, 1, 2**32]),
        "0 replicas of computation_shape=[1, 1, 1, 4294967296]",
    ),
    "many": (lambda: DeviceAssignment.build(TOPOLOGY, num_replicas=5), "4 replicas"),
    "bool": (lambda: DeviceAssignment.build(TOPOLOGY, num_replicas=True), "num_replicas=True"),
    "none": (lambda: DeviceAssignment.build(TOPOLOGY, num_replicas=0), "num_replicas=0"),
    "rank": (lambda: DeviceAssignment(TOPOLOGY, [[0, 0, 0, 0]]), "got (1, 4)"),
    "twice": (lambda: DeviceAssignment(TOPOLOGY, [[[0] * 4], [[0] * 4]]), "more than once"),
    "absent": (lambda: DeviceAssignment(TOPOLOGY, [[[9, 0, 0, 0]]]), "coordinates (9, 0, 0, 0)"),
    "lookup": (
        lambda: DeviceAssignment(TOPOLOGY, [[[0] * 4]]).lookup_replicas(1, 0),
        "core 0 in process 1",
    ),
    "no devices": (lambda: Topology([]), "one at least"),
    "uneven": (lambda: Topology(hosts(2, 1)[:5]), "[1, 4]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_value_errors(case: str):
    call, wanted = WRONG[case]
    with pytest.raises(ValueError, match=re.escape(wanted)):
        call()


def test_the_start_of_a_ported_program_in_one_process():
    """Beside devices that are in use."""
    resolver = dj.cluster_resolver.TPUClusterResolver("local")
    assert dj.experimental_connect_to_cluster(resolver) is None
    topology = dj.tpu.experimental.initialize_tpu_system(resolver)
    assert repr(topology) == "Topology(mesh_shape=[2, 2, 1, 2], num_tasks=1, num_tpus_per_task=8)"
    strategy = dj.TPUStrategy(resolver)
    assert strategy.cluster_resolver is resolver
    assert list(np.ravel(strategy.mesh.devices)) == jax.devices()
    with pytest.raises(ValueError, match="ClusterResolver"):
        dj.experimental_connect_to_cluster({"worker": ["a:1"]})
