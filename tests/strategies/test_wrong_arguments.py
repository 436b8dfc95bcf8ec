"""Wrong arguments are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distribute_jax as dj

MASKED = np.ma.array([1, 2], mask=[0, 1])
Call = Callable[[dj.Strategy, Any], Any]
CALLS: dict[str, tuple[Call, str]] = {
    "options": (lambda s, v: s.run(f, options="x"), "run: options must be None or dj.RunOptions"),
    "update args": (lambda s, v: s.extended.update(v, f, args=3), r"update\(var, fn, args=int 3\)"),
    "update fn": (lambda s, v: s.extended.update(v, 5), "update: fn must be a function; got 5"),
    "merge args": (lambda s, v: merge(s, args=3), r"merge_call\(merge_fn, args=int 3\): args must be"),
    "gather": (lambda s, v: s.gather(v, axis=None), "gather: axis must be an integer; got None"),
    "devices": (lambda s, v: dj.MirroredStrategy(5.5), r"must be a list, such as.*got 5.5"),
    "value": (lambda s, v: values(s, lambda _: "a"), "returned str 'a', which no device can hold"),
    "dates": (lambda s, v: values(s, lambda _: np.array(["2020"], "M8[D]")), r"D\]\[1\], which no device"),
    "records": (lambda s, v: values(s, lambda _: np.zeros(2, [("a", "f4")])), "which no device can hold"),
    "masked": (lambda s, v: values(s, lambda _: MASKED), "^strategy.exp.*_function got .*no mask"),
    "masked argument": (lambda s, v: s.run(f, (MASKED,)), r"^strategy.run got a .* int64\[2\]. JAX arr"),
    "masked value": (lambda s, v: dj.Variable(MASKED, name="w"), "^dj.Variable 'w' got .*no mask"),
    "masked write": (lambda s, v: v.assign(MASKED), "^Variable 'Variable' got .*no mask"),
    "workers": (
        lambda s, v: dj.ParameterServerStrategy(workers=1).remove_workers(1),
        "number must be < strategy.workers = 1: the last one cannot be removed; got 1",
    ),
    "masked part": (lambda s, v: s.reduce("sum", MASKED), "^strategy.reduce got .*no mask"),
    "no context": (lambda s, v: values(s, lambda: 1), "calls .* with a dj.ValueContext"),
    "long": (lambda s, v: s.run(f, (np.zeros(2, "complex256"),)), r"got complex256\[2\] among its"),
    "model": (lambda s, v: dj.Optimizer(3, optax.sgd(0.1)), "model must be an nnx.Module, .*; got 3"),
    "tx": (lambda s, v: dj.Optimizer(nnx.Param(v[...]), 3), "tx must be an optax transformation"),
    "weights": (lambda s, v: average(jnp.ones(3)), r"weight of shape \(3,\) for losses of shape \(2,\)"),
    "batch size": (lambda s, v: average(None, 0), "global_batch_size must be a number above 0; got 0"),
    "batch sizes": (
        lambda s, v: s.run(lambda x: average(None, x), (v[...],)), r"must be a number above 0; got float32\[3"
    ),
    "no value": (lambda s, v: dj.Variable(None), "must be a number or an array; got None"),
    "created": (
        lambda s, v: s.extended.variable_created_in_scope(3), "takes an nnx.Variable or dj.Variable; got int"
    ),
    "float rows": (lambda s, v: v.scatter_add([0.5], [1.0]), "indices must be integers.*float64"),
    "no row": (lambda s, v: v.scatter_add([7], [1.0]), r"from 7 to 7, and the variable has 3 rows"),
    "updates": (
        lambda s, v: v.scatter_add([0], [1.0, 2.0]), r"an array that broadcasts to \(1,\); got float32\[2\]"
    ),
    "pairs": (
        lambda s, v: s.extended.batch_reduce_to("sum", [v]), "takes pairs of a value and its destinations"
    ),
    "swapped": (lambda s, v: s.run(swapped, (v[...],)), r"the first argument, must .* got float32\[3\]\.$"),
    "swapped, a dict": (lambda s, v: s.run(swapped, ({"x": v[...]},)), "the first argument.* got a dict.$"),
}  # fmt: skip


def swapped(value: Any) -> Any:
    return dj.get_replica_context().all_reduce(value, "sum")


def f(*_: Any) -> float:
    return 1.0


def merge(strategy: dj.Strategy, **given: Any) -> Any:
    return strategy.run(lambda: dj.get_replica_context().merge_call(lambda s: 1.0, **given))


def values(strategy: dj.Strategy, value_fn: Any) -> Any:
    return strategy.experimental_distribute_values_from_function(value_fn)


def average(weights: Any, size: Any = None) -> Any:
    return dj.compute_average_loss(jnp.ones(2), weights, size)


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_argument_is_refused_by_name(s2: dj.MirroredStrategy, call: str):
    with s2.scope():
        variable = dj.Variable([1.0, 2.0, 3.0])
    with pytest.raises(dj.ArgumentError, match=CALLS[call][1]):
        CALLS[call][0](s2, variable)
    assert variable.numpy().tolist() == [1.0, 2.0, 3.0]


def test_local_results_of_a_distributed_value_under_a_jit_are_refused(s2: dj.MirroredStrategy):
    own = s2.run(lambda: dj.get_replica_context().replica_id_in_sync_group)
    with pytest.raises(
        dj.ContextError, match=r"experimental_local_results was called inside a func"
    ):
        jax.jit(lambda: s2.experimental_local_results(own))()
    assert jax.jit(lambda x: s2.experimental_local_results(x)[0] + 1)(1.0) == 2.0


def test_devices_of_two_kinds_or_of_another_process_are_refused(monkeypatch: pytest.MonkeyPatch):
    cpu, gpu = jax.devices()[0], FakeDevice("gpu", 0)
    monkeypatch.setattr("distribute_jax.strategies._devices.find_device", lambda name: name)
    with pytest.raises(ValueError, match=r"of one platform; got \['cpu', 'gpu'\]"):
        dj.MirroredStrategy([cpu, gpu])
    monkeypatch.undo()
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(
        ValueError, match=r"belongs to process 0, and this is process 1.*choose from"
    ):
        dj.MirroredStrategy([cpu])


def test_no_devices_means_all_local_devices(monkeypatch: pytest.MonkeyPatch):
    four = jax.devices()[:4]
    monkeypatch.setattr(jax, "local_devices", lambda **_: four)
    for none in ([], None):
        strategy = dj.MirroredStrategy(none)
        assert strategy.num_replicas_in_sync == 4
        assert list(strategy.mesh.devices.flat) == four


class FakeDevice:
    """As much of a device as is looked at before a mesh is made."""

    def __init__(self, platform: str, process_index: int) -> None:
        self.platform, self.process_index = platform, process_index
