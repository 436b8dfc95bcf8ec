"""From one host batch to the devices: what is refused, what is converted, and where it is placed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from input_helpers import distribute, mesh_of, real_parts, values

import distribute_jax as dj
from distribute_jax._errors import ArgumentError
from distribute_jax._mesh import split_sharding
from distribute_jax._values import Layout


def first(batch: Any, replicas: int = 2, partial: str = "mask") -> Any:
    return next(iter(distribute([batch], replicas, partial)))


def message(batch: Any) -> str:
    with pytest.raises(ArgumentError) as error:
        first(batch)
    return str(error.value)


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("in_scope", [False, True])
def test_a_batch_becomes_a_committed_array_split_over_the_replicas(replicas: int, in_scope: bool):
    """Inside and outside of scope() each device holds its consecutive share, and nothing else."""
    mesh = mesh_of(replicas)
    with jax.set_mesh(mesh if in_scope else None):
        element = first(np.arange(24.0, dtype=np.float32).reshape(8, 3), replicas)
    array = element.global_array
    assert (element.layout, element.counts) == (Layout.JOINED, None)
    assert array.sharding == split_sharding(mesh)
    assert array.committed
    share = 8 // replicas
    for i, shard in enumerate(array.addressable_shards):
        assert shard.device == mesh.devices[i]
        np.testing.assert_array_equal(shard.data[:, 0], 3.0 * np.arange(i * share, (i + 1) * share))


def test_each_shard_is_read_from_the_host_separately():
    """No read exceeds the share of one replica, so the batch is never transferred as a whole."""
    read = []

    class Recorder(np.ndarray):
        def __getitem__(self, index: Any) -> Any:
            rows = super().__getitem__(index)
            read.append(len(rows))
            return rows

    element = first(np.zeros((8, 3), np.float32).view(Recorder), replicas=4)
    assert read == [2, 2, 2, 2]
    assert element.global_array.shape == (8, 3)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_loader_may_reuse_its_buffer(replicas: int):
    """Later writes of the source to its array do not change earlier elements."""
    memory = np.zeros(512 * 64 + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4  # JAX shares host memory that begins on a cache line
    buffer = memory[start : start + 512 * 64].reshape(512, 64)

    def reusing():
        for i in range(20):
            buffer[:] = i
            yield buffer

    elements = list(distribute(reusing, replicas))
    assert [np.unique(e.global_array).tolist() for e in elements] == [[i] for i in range(20)]


def test_a_small_batch_for_one_device_is_transferred_by_the_step_that_takes_it():
    """Repeated steps take the rows on the host in one program; reading it, or JAX's guard, places it."""
    strategy = dj.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        total = dj.Variable(jnp.zeros(2), aggregation=dj.VariableAggregation.SUM)

    def step(batch: dict[str, jax.Array]) -> jax.Array:
        total.assign_add(jnp.nan_to_num(batch["x"]).sum(0) + batch["z"].sum())
        return batch["y"] + 1

    rows = {"x": np.array([[np.nan, 1.0]] * 4), "y": np.arange(4), "z": np.ones((4, 0), np.int8)}
    elements = list(strategy.distribute_dataset([rows] * 6))
    for is_traced, guard in [(True, "allow"), *[(False, "allow")] * 2, (False, "disallow")]:
        element = elements.pop()
        with jax.transfer_guard(guard):
            got = strategy.run(step, args=(element,))
        assert isinstance(element["x"].array, jax.Array) == (is_traced or guard == "disallow")
        np.testing.assert_array_equal(got, [1, 2, 3, 4])
    strategy.run_steps(step, iter([elements.pop()]), 1)
    (left,) = elements
    assert {type(leaf.array) for leaf in left.values()} == {np.ndarray}
    assert total.numpy().tolist() == [0.0, 20.0]
    assert strategy._runner.programs() == 1
    assert left["x"].global_array.sharding == split_sharding(strategy.mesh)
    assert left["x"].array is left["x"].global_array


def test_a_jax_array_that_is_already_placed_is_not_copied():
    """An array with the sharding of the strategy passes as the same object."""
    array = jax.device_put(jnp.arange(4), split_sharding(mesh_of(2)))
    assert first({"x": array})["x"].global_array is array


@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("in_scope", [False, True])
def test_jax_arrays_elsewhere_are_placed(rows: Any, in_scope: bool):
    """Uncommitted, one-device, replicated and sharded arrays are split, full and padded, also in scope."""
    mesh, explicit = mesh_of(4), jax.sharding.AxisType.Explicit
    own = jax.make_mesh((rows // 2,), ("x",), axis_types=(explicit,))
    array, others = jnp.arange(rows), [jax.devices()[5], jax.NamedSharding(mesh, jax.P())]
    others.append(jax.NamedSharding(own, jax.P("x" if rows == 8 else None)))
    batch = (array, *(jax.device_put(array, other) for other in others))
    with jax.set_mesh(mesh if in_scope else None):
        element = first(batch, replicas=4)
    for leaf in element:
        assert leaf.global_array.sharding == split_sharding(mesh)
        assert np.concatenate(list(real_parts(leaf))).tolist() == list(range(rows))


@pytest.mark.parametrize("is_per_replica", [False, True])
def test_random_keys_are_batches_too(is_per_replica: bool):
    """An array of PRNG keys is split and padded like any other JAX array, or joined."""
    keys = jax.random.split(jax.random.key(0), 3)
    element = first(keys)
    if is_per_replica:
        distribute_from = dj.MirroredStrategy([0, 1]).distribute_datasets_from_function
        (element,) = distribute_from(lambda context: [keys[:2], keys[2:]])
    assert element.counts == (2, 1)
    joined = jnp.concatenate([jax.random.key_data(part) for part in element.values])
    np.testing.assert_array_equal(joined, jax.random.key_data(keys))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *(("int64", "int32"), ("uint64", "uint32"), ("float64", "float32"), (">i4", "int32")),
        *(("complex128", "complex64"), (jnp.bfloat16, "bfloat16")),
        *((dtype, dtype) for dtype in ("int8", "float16", "bool")),
    ],
)
def test_64_bits_become_32_and_the_rest_stays(given: Any, expected: Any):
    """Dtypes change only as JAX changes them, including the byte order."""
    element = first(np.array([0, 1, 1]).astype(given))
    assert element.dtype == jnp.dtype(expected)
    assert values(element) == [[0, 1], [1]]


def test_64_bits_stay_if_x64_is_on():
    """With jax_enable_x64 large integers and doubles pass unchanged."""
    with jax.enable_x64(True):
        element = first((np.array([2**40, -1]), np.array([1e300, 0.1])))
        assert element[0].dtype == jnp.int64
        assert np.asarray(element[0].global_array).tolist() == [2**40, -1]
        assert np.asarray(element[1].global_array).tolist() == [1e300, 0.1]


def test_doubles_out_of_range_become_infinite_as_in_jax():
    """A double too large for float32 becomes inf without a warning, as with jnp.asarray."""
    assert values(first(np.array([1e300, 1.0]))) == [[float("inf")], [1.0]]


def test_integers_that_do_not_fit_are_named():
    """Every leaf with a value outside of 32 bits is listed; the others are not."""
    batch = {"id": np.array([2**31]), "hash": np.array([2**32], np.uint64), "ok": np.array([7])}
    text = message(batch)
    assert "batch['id']: int64[1]" in text
    assert "batch['hash']: uint64[1]" in text
    assert "'ok'" not in text
    assert "jax_enable_x64" in text
    assert first(np.array([2**31 - 1, -(2**31)])).dtype == jnp.int32


def test_an_integer_that_is_too_large_is_refused_in_a_later_batch():
    """Batches like the first one are compared with it at once, but their integers are still looked at."""
    ones = np.ones(2, np.int64)
    batches = iter(distribute([ones, ones, np.array([1, 2**31])], 2))
    assert next(batches).dtype == next(batches).dtype == jnp.int32
    with pytest.raises(ArgumentError, match="jax_enable_x64"):
        next(batches)


def test_leaves_of_other_lengths_are_all_listed():
    """Leaves with different dim 0 are listed with their shapes, and the rule."""
    text = message({"x": np.ones((4, 2), np.float32), "y": np.ones(3, np.float32)})
    assert "Batch 0 of the dataset cannot be divided" in text
    assert "batch['x']: float32[4,2]" in text
    assert "batch['y']: float32[3]" in text
    assert "same number of examples" in text


@pytest.mark.parametrize("batch", [np.float32(1), np.array(1), jnp.asarray(1), 3, 2.5, True])
def test_the_error_for_single_examples_says_how_to_batch(batch: Any):
    """A leaf without dim 0, such as a Python number, leads to advice with code."""
    text = message(batch)
    assert text.startswith("Batch 0 of the dataset cannot be divided")
    assert "Batch the source first" in text


@pytest.mark.parametrize(
    ("leaf", "shown"),
    [
        (np.array(["a", "b"]), "<U1[2]"),
        (np.array([b"a"]), "|S1[1]"),
        (np.array([object()]), "object[1]"),
        (np.array(["2020-01-01"], "M8[D]"), "datetime64[D][1]"),
        (np.zeros(2, [("a", "i4")]), "[2]"),
        (np.zeros(2, "float128"), "float128[2]"),
        ("text", "str 'text'"),
    ],
    ids=["strings", "bytes", "objects", "dates", "records", "long", "a string"],
)
def test_leaves_that_devices_cannot_hold_are_named(leaf: Any, shown: str):
    """Strings, objects, dates and records are refused, and the good leaf is not listed."""
    text = message({"good": np.ones(2, np.float32), "bad": leaf})
    assert f"batch['bad']: {shown}" in text or ("batch['bad']" in text and shown in text)
    assert "'good'" not in text
    assert "Encode strings" in text


def test_objects_that_are_not_arrays_are_named():
    """An unregistered class is a leaf; the message says how to make it a container."""
    text = message({"bad": slice(3)})
    assert "batch['bad']: slice" in text
    assert "register_dataclass" in text


def test_keys_that_cannot_be_sorted_are_refused():
    """JAX flattens dicts in the order of their keys, which must be comparable."""
    assert "Give the keys of every dict one type" in message({1: np.ones(2), "a": np.ones(2)})


def test_faults_of_different_kinds_are_reported_at_once():
    """One message lists a number, a string and a large integer, each with its own rule."""
    text = message({"a": 3, "b": "x", "c": np.array([2**40]), "d": np.ones(3)})
    for part in ("batch['a']: int 3", "batch['b']: str", "batch['c']: int64", "Batch the source"):
        assert part in text
    assert "batch['d']" not in text


def test_a_distributed_batch_is_not_distributed_again():
    """Elements of a distributed dataset are refused as batches, with what to do instead."""
    element = first(np.ones(4, np.float32))
    assert "distributed already" in message({"x": element})
    assert "distributed already" in message({"x": jax.tree.map(np.asarray, element)})


def test_donated_arrays_are_named():
    """Reading one fails inside JAX, and crashes some versions."""
    gone = jnp.ones(4)
    gone.delete()
    text = message({"x": gone, "y": np.ones(4)})
    assert "batch['x']: float32[4]" in text
    assert "batch['y']" not in text
    assert "dj.snapshot" in text


@pytest.mark.parametrize("batch", [(), {}, None, [None]])
def test_a_batch_without_arrays_is_refused(batch: Any):
    """An empty structure has no examples to divide."""
    assert "contains no array" in message(batch)
