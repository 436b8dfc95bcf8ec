"""Every cross-device operation returns the same numbers, with the same bits on every replica."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithms import ALGORITHMS, OWN, context, on_replicas, strategy_with
from cases import long
from flax import nnx

import distribute_jax as dj
from distribute_jax.collectives._cross_device_ops import _default_group_size

REPLICAS = [4, *(long(n) for n in (1, 2, 8))]
SOME = ("default", "hierarchical, 1 packs", "ring, 1 packs", "to one")
every_algorithm = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in SOME else pytest.mark.exhaustive) for n in ALGORITHMS]
)
every_size = pytest.mark.parametrize("replicas", REPLICAS)


SHAPES: dict[str, tuple[int, ...]] = {"a": (7, 3), "b": (), "c": (0, 2), "d": (13,), "e": (1, 1)}


def random_nests(replicas: int) -> list[Any]:
    """Trees of three dtypes, with sizes that do not divide evenly, an empty array and scalars."""
    draw = np.random.default_rng(replicas)

    def nest():
        floats = {k: draw.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}
        return {
            "f32": floats,
            "bf16": jax.tree.map(lambda x: x.astype(jnp.bfloat16), floats),
            "i32": {
                k: draw.integers(-(2**31), 2**31, s).astype(np.int32) for k, s in SHAPES.items()
            },
        }

    return [nest() for _ in range(replicas)]


@functools.cache
def reduced(name: str, replicas: int) -> tuple[Any, list[Any]]:
    """The sums of random nests by one program, and the same as each replica holds them itself."""
    strategy = strategy_with(ALGORITHMS[name](), replicas)

    def step(nest: Any):
        return context().all_reduce("sum", nest)

    total = strategy.run(step, args=(on_replicas(strategy, random_nests(replicas)),))
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(total)), "not mirrored"
    parts = [jax.tree.map(lambda x, i=i: x.addressable_data(i), total) for i in range(replicas)]
    return total, parts


def in_high_precision(replicas: int) -> tuple[Any, Any]:
    """The sums over the replicas in float64, and the sums of magnitudes."""
    nests = random_nests(replicas)
    exact = jax.tree.map(lambda *x: np.stack([np.float64(v) for v in x]).sum(0), *nests)
    magnitude = jax.tree.map(lambda *x: np.stack([np.abs(np.float64(v)) for v in x]).sum(0), *nests)
    return exact, magnitude


@every_algorithm
@every_size
def test_sums_equal_those_in_high_precision(name: str, replicas: int):
    """int32 is equal (modulo 2**32), float32 within 1e-6, bfloat16 within one unit in the last place.

    Relative to the sum of magnitudes: where large terms cancel, no two orders of additions agree.
    """
    result, _ = reduced(name, replicas)
    exact, magnitude = in_high_precision(replicas)
    for key, shape in SHAPES.items():
        assert result["f32"][key].shape == shape
        error = np.abs(np.float64(result["f32"][key]) - exact["f32"][key])
        assert (error <= 1e-6 * magnitude["f32"][key]).all()
        error = np.abs(np.float64(result["bf16"][key]) - exact["bf16"][key])
        unit = 2.0**-8 * np.abs(exact["bf16"][key]) + 1e-6 * magnitude["bf16"][key]
        assert (error <= unit).all()
        wrapped = np.int64(exact["i32"][key]).astype(np.int32)
        np.testing.assert_array_equal(result["i32"][key], wrapped)


@every_algorithm
@every_size
def test_all_replicas_hold_the_same_bits(name: str, replicas: int):
    """Each element is summed on one replica and copied."""
    _, (first, *others) = reduced(name, replicas)
    assert len(others) == replicas - 1
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, first)


@pytest.mark.parametrize("name", ["default", *OWN])
def test_a_collective_that_not_every_replica_reaches_is_refused(name: str):
    strategy = strategy_with(ALGORITHMS[name](), 4)

    def step():
        rid = context().replica_id_in_sync_group
        return jax.lax.cond(
            rid == 0, lambda: context().all_reduce("sum", jnp.float32(1)), lambda: jnp.float32(0)
        )

    with pytest.raises(dj.DeadlockError, match=r"may hang.*\n.*test_cross_device\.py:\d+"):
        strategy.run(step)


def compiled_text(ops: dj.CrossDeviceOps | None, options: Any = None) -> str:
    """The compiled program of one all_reduce of three float and two integer arrays."""
    strategy = strategy_with(ops, 4)

    def step():
        rid = context().replica_id_in_sync_group
        nest = [rid * jnp.ones(n) for n in (8, 4, 2)] + [rid * jnp.ones(n, int) for n in (3, 5)]
        return context().all_reduce("sum", nest, options)

    strategy.run(step)
    (program,) = strategy._runner.cache.programs.values()
    return program.compiled.as_text()


def count(text: str, operation: str) -> int:
    """Counts an operation of a compiled program, asynchronous or not."""
    return len(re.findall(rf" {operation}(?:-start)?\(", text))


def test_the_default_uses_one_collective_for_each_dtype():
    """NcclAllReduce() is the default by name: the same program, without a copy for packing."""
    default, named = compiled_text(None), compiled_text(dj.NcclAllReduce())
    assert count(default, "all-reduce") == count(named, "all-reduce") == 2
    assert count(named, "concatenate") == count(default, "concatenate") == 0


@pytest.mark.parametrize(
    ("ops", "implementation", "operation"),
    [
        (None, "ring", "collective-permute"),
        (None, "auto", "all-reduce"),
        (dj.RingAllReduce(), "nccl", "all-reduce"),
        (dj.RingAllReduce(), "auto", "collective-permute"),
        (dj.HierarchicalCopyAllReduce(), "auto", "reduce-scatter"),
    ],
)
def test_the_options_of_a_call_choose_the_algorithm(ops: Any, implementation: str, operation: str):
    options = dj.experimental.CommunicationOptions(implementation=implementation)
    assert count(compiled_text(ops, options), operation) > 0


def test_options_of_another_type_are_refused(s2: dj.MirroredStrategy):
    for call in (
        lambda: context().all_reduce("sum", 1.0, options={"bytes_per_pack": 1}),
        lambda: context().all_gather(jnp.ones(1), 0, options=3),
    ):
        with pytest.raises(ValueError, match=r"options must be None or dj\.experimental"):
            s2.run(call)


@pytest.mark.parametrize(
    ("replicas", "processes", "size"),
    # One process: the divisor next above the square root. Several: the replicas of each.
    [
        *((1, 1, 1), (2, 1, 2), (4, 1, 2), (6, 1, 3), (7, 1, 7), (8, 1, 4), (16, 1, 4), (12, 1, 4)),
        *((8, 4, 2), (8, 2, 4), (6, 4, 3), (8, 8, 1)),
    ],
)
def test_the_default_group_is_a_process_or_about_the_square_root(
    replicas: int, processes: int, size: int
):
    assert _default_group_size(replicas, processes) == size


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sums_by_groups_of_any_size(size: int):
    strategy = strategy_with(dj.HierarchicalCopyAllReduce(group_size=size), 4)
    rows = [np.arange(5) * 10**r for r in range(4)]
    total = strategy.run(
        lambda x: context().all_reduce("sum", x), args=(on_replicas(strategy, rows),)
    )
    assert total.tolist() == [0, 1111, 2222, 3333, 4444]


def test_groups_that_do_not_divide_the_replicas_are_refused():
    strategy = strategy_with(dj.HierarchicalCopyAllReduce(group_size=3), 4)
    with pytest.raises(ValueError, match=r"group_size=3.* does not divide the 4 replicas"):
        strategy.run(lambda: context().all_reduce("sum", 1.0))


@pytest.mark.parametrize(("device", "root"), [(None, 0), ("cpu:2", 2), (1, 1)])
def test_reduction_to_one_device_adds_in_replica_order(device: Any, root: int):
    """1e8 + 1 - 1e8 + 1 is 1 in float32 only in this order; the sum comes from the chosen device."""
    if isinstance(device, int):
        device = jax.devices()[device]
    seen = []

    def accumulate(values: list[jax.Array]):
        seen.append(len(values))
        return values[0] + values[1] + values[2] + values[3] + 100 * context_id()

    def context_id():
        return jax.lax.axis_index("data").astype(jnp.float32)

    values = [np.float32(v) for v in (1e8, 1, -1e8, 1)]
    plain = strategy_with(dj.ReductionToOneDevice(device), 4)
    total = plain.run(lambda x: context().all_reduce("sum", x), args=(on_replicas(plain, values),))
    assert float(total) == 1.0
    marked = strategy_with(dj.ReductionToOneDevice(device, accumulate), 4)
    total = marked.run(
        lambda x: context().all_reduce("sum", x), args=(on_replicas(marked, values),)
    )
    assert float(total) == 1.0 + 100 * root
    assert set(seen) == {4}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dj.NcclAllReduce(num_packs=-1), r"e\(num_packs\) must be an integer >= 0; got -1"),
        (
            lambda: dj.HierarchicalCopyAllReduce(group_size=0),
            r"group_size\) must be .* >= 1; got 0",
        ),
        (lambda: dj.ReductionToOneDevice(accumulation_fn=3), "accumulation_fn .*function; got 3"),
        (lambda: strategy_with("nccl", 2), r"must be None or dj\.CrossDeviceOps; got 'nccl'"),
        (lambda: strategy_with(dj.ReductionToOneDevice(3), 2), "not one of the strategy's devices"),
        (lambda: strategy_with(dj.ReductionToOneDevice("gpu:7"), 2), "'gpu:7': JAX sees no GPU"),
    ],
)
def test_invalid_operations_are_refused(make: Any, message: str):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("wrong", [lambda values: values[0][0], lambda values: 3.0])
def test_an_accumulation_of_another_shape_or_type_is_refused(wrong: Any):
    strategy = strategy_with(dj.ReductionToOneDevice(accumulation_fn=wrong), 2)
    with pytest.raises(ValueError, match=r"accumulation_fn=\.\.\.\) returned .* float32\[2\]"):
        strategy.run(lambda: context().all_reduce("sum", jnp.ones(2)))


def test_a_collective_that_fails_leaves_the_strategy_usable():
    """TensorFlow refuses every later collective of the process; here the next call works."""
    fails = [True]

    def accumulate(values: list[jax.Array]):
        if fails:
            raise KeyError("boom")
        return sum(values)

    strategy = strategy_with(dj.ReductionToOneDevice(accumulation_fn=accumulate), 4)
    with strategy.scope():
        weight = nnx.Param(jnp.zeros(3))

    def step():
        weight[...] += context().all_reduce("sum", jnp.ones(3))

    with pytest.raises(KeyError, match="boom"):
        strategy.run(step)
    assert weight[...].tolist() == [0.0] * 3
    fails.clear()
    strategy.run(step)
    assert weight[...].tolist() == [4.0] * 3


def test_a_copied_strategy_keeps_its_operation():
    strategy = copy.deepcopy(strategy_with(dj.ReductionToOneDevice("cpu:1"), 2))
    assert isinstance(strategy._cross_device_ops, dj.ReductionToOneDevice)
    assert float(strategy.run(lambda: context().all_reduce("sum", 2.0))) == 4.0


def test_a_ring_under_a_vmap_that_hides_the_axis_is_an_error():
    """It would sum the rows of one replica, and the proof would consider that equal on all."""
    strategy = strategy_with(dj.RingAllReduce(), 2)
    hidden = jax.vmap(lambda v: context().all_reduce("sum", v), axis_name="data")
    with pytest.raises(ValueError, match="ppermute"):
        strategy.run(lambda: hidden(jnp.arange(3.0)))
