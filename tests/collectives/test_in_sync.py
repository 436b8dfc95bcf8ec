"""check_in_sync finds a copy that differs in one bit, and its device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import long
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from leaves import sum_on_read

import distribute_jax as dj

compilations: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: compilations.append(event) if "backend_compile" in event else None
)


def put_together(parts: list[Any], sharding: NamedSharding, shape: Any = None) -> jax.Array:
    """An array assembled by hand, with one part for each device in the order of the mesh."""
    devices = list(sharding.mesh.devices.flat)
    pieces = [jax.device_put(part, device) for part, device in zip(parts, devices, strict=True)]
    shape = pieces[0].shape if shape is None else shape
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces, dtype=pieces[0].dtype)


def copies(strategy: dj.Strategy, usual: Any, odd: Any, at: int) -> jax.Array:
    """A mirrored array that has another value on one device."""
    count = strategy.num_replicas_in_sync
    parts = [odd if i == at else usual for i in range(count)]
    return put_together(parts, NamedSharding(strategy.mesh, P()))


def corrupt(strategy: dj.Strategy, variable: nnx.Variable[Any], at: int) -> None:
    """Changes the last bit of the last number of a variable on one device."""
    value = np.asarray(variable[...])
    bits = value.copy().view(np.uint32)
    bits.flat[-1] ^= 1
    variable.set_raw_value(copies(strategy, value, bits.view(value.dtype), at))


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        linear = nnx.Linear(3, 4, kernel_init=nnx.initializers.zeros, rngs=rngs)
        self.layers = nnx.List([linear, nnx.Dropout(0.5, rngs=rngs)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)


def trained(strategy: dj.Strategy) -> tuple[Net, nnx.Optimizer]:
    with strategy.scope():
        net = Net()
        return net, nnx.Optimizer(net, optax.sgd(1e-3, momentum=0.9), wrt=nnx.Param)


def test_a_model_its_optimizer_and_trees_of_them_are_in_sync(strategy: dj.Strategy):
    net, optimizer = trained(strategy)
    dj.check_in_sync({"net": net, "rest": (optimizer, net.norm.mean)})
    with strategy.scope():
        dj.check_in_sync(optimizer)


def test_one_flipped_bit_of_one_copy_is_found_with_its_leaf_and_device(s4: dj.MirroredStrategy):
    net, optimizer = trained(s4)
    corrupt(s4, net.layers[0].kernel, at=2)
    with pytest.raises(ValueError, match=r"layers\[0\]\.kernel, float32\[3,4\]: cpu:2 ") as caught:
        dj.check_in_sync((optimizer, net))
    assert isinstance(caught.value, dj.OutOfSyncError)
    text = str(caught.value)
    assert "[1].layers[0].kernel, float32[3,4]: cpu:2 unequal to cpu:0, cpu:1, cpu:3" in text
    assert text.count("unequal to") == 1
    dj.check_in_sync(optimizer)


def test_a_copy_that_differs_on_the_first_device_is_named(s4: dj.MirroredStrategy):
    """The majority decides, not device 0."""
    with pytest.raises(ValueError, match="cpu:0 unequal to cpu:1, cpu:2, cpu:3"):
        dj.check_in_sync(copies(s4, np.ones(3), np.zeros(3), at=0))


def test_with_several_processes_the_process_of_a_device_is_named(
    s2: dj.MirroredStrategy, monkeypatch: pytest.MonkeyPatch
):
    broken = copies(s2, np.ones(3), np.zeros(3), at=1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="cpu:1 of process 0 unequal to cpu:0 of process 0"):
        dj.check_in_sync(broken)


def test_every_leaf_that_differs_is_named(strategy: dj.Strategy):
    if strategy.num_replicas_in_sync == 1:
        dj.check_in_sync(copies(strategy, np.ones(2), np.ones(2), at=0))
        return
    tree = {
        "a": copies(strategy, np.ones(2), np.zeros(2), at=1),
        "b": copies(strategy, np.ones(2), np.ones(2), at=1),
        "c": [copies(strategy, np.ones(()), np.zeros(()), at=0)],
    }
    with pytest.raises(ValueError, match="unequal to") as caught:
        dj.check_in_sync(tree)
    assert "['a'], float32[2]: cpu:1" in str(caught.value)
    assert "['c'][0], float32[]: cpu:" in str(caught.value)
    assert "['b']" not in str(caught.value)


def with_bit(dtype: Any, bit: int) -> Any:
    """Three numbers of a dtype, the last of which has one bit set."""
    bits = jnp.zeros(3, f"uint{with_bits(dtype)}").at[2].set(1 << bit if bit else 1)
    return jax.lax.bitcast_convert_type(bits, dtype)


def with_bits(dtype: Any) -> int:
    return (jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)).bits


EACH_WIDTH = (jnp.int4, jnp.float8_e5m2, jnp.bfloat16, jnp.float32)
OTHERS = (
    *(jnp.uint4, jnp.int8, jnp.uint8, jnp.int16, jnp.int32, jnp.uint32),
    *(jnp.float8_e4m3fn, jnp.float16),
)
DTYPES = [*EACH_WIDTH, *(long(dtype) for dtype in OTHERS)]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: jnp.dtype(dtype).name)
def test_every_bit_of_every_dtype_counts(s2: dj.MirroredStrategy, dtype: Any):
    zero = jnp.zeros(3, dtype)
    for bit in range(with_bits(dtype)):
        with pytest.raises(ValueError, match="cpu:1 unequal to cpu:0"):
            dj.check_in_sync(copies(s2, zero, with_bit(dtype, bit), at=1))


NAN = np.array([0x7FC00000, 0x7FC00001, 0xFFC00000], np.uint32).view(np.float32)
EQUAL_BUT_FOR_BITS = {
    "minus zero": (np.float32([0.0]), np.float32([-0.0])),
    "payload of a NaN": (NAN[:1], NAN[1:2]),
    "sign of a NaN": (NAN[:1], NAN[2:]),
    "denormal": (np.float32([0.0]), np.float32([1e-45])),
    "order": (np.float32([1, 2]), np.float32([2, 1])),
    "bool": (np.array([True, False]), np.array([True, True])),
    "imaginary part": (np.complex64([1]), np.complex64([1 + 1e-7j])),
    "real and imaginary": (np.complex64([1j]), np.complex64([1])),
    "bfloat16 NaN": (
        jnp.array([0x7FC0], jnp.uint16).view(jnp.bfloat16),
        jnp.array([0x7FC1], jnp.uint16).view(jnp.bfloat16),
    ),
    "key": (jax.random.key(0), jax.random.key(1)),
    "other generator": (jax.random.key(0, impl="rbg"), jax.random.key(1, impl="rbg")),
}


@pytest.mark.parametrize("case", EQUAL_BUT_FOR_BITS)
def test_values_are_compared_by_their_bits(s2: dj.MirroredStrategy, case: str):
    usual, odd = EQUAL_BUT_FOR_BITS[case]
    dj.check_in_sync(copies(s2, usual, usual, at=1))
    with pytest.raises(ValueError, match="cpu:1 unequal to cpu:0"):
        dj.check_in_sync(copies(s2, usual, odd, at=1))


def test_64_bit_numbers_are_compared_in_both_halves(s2: dj.MirroredStrategy):
    with jax.enable_x64(True):
        for odd in (np.int64(1), np.int64(2**40), np.float64(5e-324)):
            with pytest.raises(ValueError, match="cpu:1 unequal to cpu:0"):
                dj.check_in_sync(copies(s2, odd * 0, odd, at=1))


def test_an_empty_array_is_in_sync(s2: dj.MirroredStrategy):
    dj.check_in_sync(copies(s2, np.ones((0, 3)), np.ones((0, 3)), at=1))


def test_a_shard_is_compared_with_those_of_the_same_part():
    """Two devices have each half; the halves may differ, their copies may not."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    sharding = NamedSharding(mesh, P("model"))
    dj.check_in_sync(put_together([np.float32([x]) for x in (1, 2, 1, 2)], sharding, (2,)))
    with pytest.raises(ValueError, match="cpu:3 unequal to cpu:1"):
        dj.check_in_sync(put_together([np.float32([x]) for x in (1, 2, 1, 3)], sharding, (2,)))


def test_arrays_on_other_devices_and_in_another_order_are_compared_too(s2: dj.MirroredStrategy):
    backwards = dj.MirroredStrategy([3, 2, 1])
    dj.check_in_sync((s2.run(lambda: jnp.ones(2)), backwards.run(lambda: jnp.ones(2)), jnp.ones(2)))
    with pytest.raises(ValueError, match="cpu:3 unequal to cpu:1, cpu:2"):
        dj.check_in_sync((jnp.ones(2), copies(backwards, np.ones(3), np.zeros(3), at=0)))


def test_values_that_differ_by_design_are_ignored(s2: dj.MirroredStrategy):
    """Per-replica values, NumPy arrays and numbers; without other leaves there is nothing to compare."""
    rid = s2.run(lambda: dj.get_replica_context().replica_id_in_sync_group)
    dj.check_in_sync({"rid": rid, "step": 3, "rows": np.ones(2), "x": jnp.ones(2)})
    for tree in (rid, 3, np.ones(2), {}):
        with pytest.raises(ValueError, match=r"has no jax\.Array"):
            dj.check_in_sync(tree)


def test_an_on_read_variable_is_ignored(s2: dj.MirroredStrategy):
    """It differs between replicas by design; other state is compared."""
    with s2.scope():
        module = nnx.Module()
        module.seen = sum_on_read(5.0)  # replica 0 holds it, and the other 0
        module.weight = nnx.Param(jnp.zeros(2))
    dj.check_in_sync(module)
    module.weight.set_raw_value(copies(s2, np.ones(2), np.zeros(2), at=1))
    with pytest.raises(ValueError, match=r"weight, .* unequal to") as caught:
        dj.check_in_sync(module)
    assert "seen" not in str(caught.value)


def test_invalid_contexts_and_donated_arrays_are_refused(s2: dj.MirroredStrategy):
    net, _ = trained(s2)
    with pytest.raises(RuntimeError, match="check_in_sync was called inside a function given"):
        s2.run(lambda: dj.check_in_sync(net))
    with pytest.raises(RuntimeError, match="check_in_sync was called inside a function that JAX"):
        jax.jit(lambda x: dj.check_in_sync(x))(jnp.ones(2))
    kept = dj.snapshot(net.norm.mean[...])
    jax.jit(jnp.negative, donate_argnums=0)(kept)
    with pytest.raises(dj.DonatedError, match=r"\['mean'\]"):
        dj.check_in_sync({"mean": kept})


def test_a_second_check_compiles_nothing(s4: dj.MirroredStrategy):
    net, _ = trained(s4)
    compilations.clear()
    dj.check_in_sync(net)
    assert compilations, "the listener hears nothing"
    compilations.clear()
    dj.check_in_sync(net)
    assert not compilations


def test_state_that_diverged_is_found(s4: dj.MirroredStrategy):
    """With check_sync=False state may diverge."""
    with s4.scope():
        weight = nnx.Param(jnp.zeros(3))
    (batch,) = s4.distribute_dataset([np.arange(4.0, dtype=np.float32)])

    def step(x):
        weight[...] += x

    s4.run(step, args=(batch,), options=dj.RunOptions(check_sync=False))
    with pytest.raises(ValueError, match="cpu:1, cpu:2, cpu:3 unequal to cpu:0"):
        dj.check_in_sync(weight)
