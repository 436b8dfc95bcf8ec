"""Contexts and scopes: which strategy and replica are current where, as in TensorFlow."""

from __future__ import annotations

import copy
import os
import signal
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribute_jax as dj


def where() -> tuple[bool, bool, bool]:
    """Returns has_strategy, in_cross_replica_context, and whether there is a replica context."""
    return dj.has_strategy(), dj.in_cross_replica_context(), dj.get_replica_context() is not None


def test_the_default_strategy_has_one_replica():
    assert where() == (False, False, True)
    assert dj.get_strategy().num_replicas_in_sync == 1
    assert dj.get_replica_context().replica_id_in_sync_group == 0


def test_one_scope_object_can_be_entered_again(s2: dj.MirroredStrategy):
    scope = s2.scope()
    for _ in range(2):
        with scope, scope:
            assert dj.get_strategy() is s2
    assert not dj.has_strategy()


@pytest.mark.parametrize("method", ["run", "reduce", "scope", "gather", "dataset", "values"])
def test_cross_replica_methods_raise_inside_run(s2: dj.MirroredStrategy, method: str):
    calls = {
        "run": lambda: s2.run(lambda: 1),
        "reduce": lambda: s2.reduce("sum", jnp.ones(()), axis=None),
        "scope": lambda: s2.scope().__enter__(),
        "gather": lambda: s2.gather(jnp.ones(2), axis=0),
        "dataset": lambda: s2.distribute_dataset([]),
        "values": lambda: s2.experimental_distribute_values_from_function(lambda _: 1),
    }
    wanted = "all_gather" if method == "gather" else "cross-replica context"
    with pytest.raises(RuntimeError, match=wanted):
        s2.run(calls[method])
    assert where() == (False, False, True)


def test_set_strategy_lasts_until_none(s2: dj.MirroredStrategy, s4: dj.MirroredStrategy):
    dj.experimental_set_strategy(s2)
    try:
        assert dj.get_strategy() is s2
        assert dj.in_cross_replica_context()
        assert jnp.zeros(3).sharding.is_fully_replicated
        assert len(jnp.zeros(3).sharding.device_set) == 2
        dj.experimental_set_strategy(s4)
        assert dj.get_strategy() is s4
    finally:
        dj.experimental_set_strategy(None)
    assert not dj.has_strategy()
    assert len(jnp.zeros(3).sharding.device_set) == 1


def test_set_strategy_is_for_one_thread(s2: dj.MirroredStrategy, s4: dj.MirroredStrategy):
    """Another thread has none, and one that it sets changes nothing here."""
    seen: list[bool] = []

    def other() -> None:
        seen.append(dj.has_strategy())
        dj.experimental_set_strategy(s4)

    dj.experimental_set_strategy(s2)
    try:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert seen == [False]
        assert dj.get_strategy() is s2
    finally:
        dj.experimental_set_strategy(None)
    assert not dj.has_strategy()


def test_set_strategy_inside_a_scope_or_run_raises(s2: dj.MirroredStrategy):
    with s2.scope(), pytest.raises(RuntimeError, match=r"Must not be called inside"):
        dj.experimental_set_strategy(s2)
    with pytest.raises(RuntimeError, match="inside a strategy scope"):
        s2.run(lambda: dj.experimental_set_strategy(None))


def test_merge_call_under_the_default_strategy_calls_the_function_with_it():
    def merged(strategy: dj.Strategy, text: str) -> str:
        assert where() == (False, True, False)
        assert strategy is dj.get_strategy()
        return "foo" + text

    assert dj.get_replica_context().merge_call(merged, args=("bar",)) == "foobar"


def test_collectives_under_the_default_strategy_return_the_value():
    context = dj.get_replica_context()
    assert float(context.all_reduce("mean", 3.0)) == 3.0
    assert context.all_gather(jnp.array([1, 2]), axis=0).tolist() == [1, 2]


def test_a_strategy_can_only_be_deep_copied(s2: dj.MirroredStrategy):
    with pytest.raises(RuntimeError, match=r"copy\.copy"):
        copy.copy(s2)
    other = copy.deepcopy(s2)
    assert other is not s2
    assert other.num_replicas_in_sync == 2
    assert [int(x) for x in other.experimental_local_results(other.run(replica_id))] == [0, 1]


def replica_id():
    return dj.get_replica_context().replica_id_in_sync_group


def test_another_thread_does_not_inherit_the_strategy(s2: dj.MirroredStrategy):
    seen = []
    with s2.scope():
        thread = threading.Thread(target=lambda: seen.append(dj.has_strategy()))
        thread.start()
        thread.join(10)
    assert seen == [False]


def test_run_is_refused_in_a_process_that_was_forked_after_jax_started(s2: dj.MirroredStrategy):
    """It would hang there, since JAX's threads do not exist in it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX and Python warn of the fork
        child = os.fork()
    if child == 0:
        try:
            signal.alarm(20)
            s2.run(lambda: jnp.ones(2))
        except dj.ContextError as error:
            os._exit(42 if "was forked from one in which JAX" in str(error) else 1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    assert s2.run(lambda: jnp.ones(()) * 3) == 3.0


def test_leaving_scopes_in_the_wrong_order_raises(s2: dj.MirroredStrategy):
    outer, inner = s2.scope(), s2.scope()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match="wrong order"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    assert not dj.has_strategy()


def test_scope_is_left_after_an_exception(s2: dj.MirroredStrategy):
    def failing():
        with s2.scope():
            raise KeyError("user")

    with pytest.raises(KeyError):
        failing()
    assert not dj.has_strategy()


def test_no_cluster_resolver_on_one_process(s2: dj.MirroredStrategy):
    assert s2.cluster_resolver is None
    assert dj.OneDeviceStrategy(0).cluster_resolver is None


@pytest.mark.parametrize(
    ("name", "index"),
    [
        (3, 3),
        (np.int64(3), 3),
        ("cpu:3", 3),
        ("CPU:3", 3),
        ("/cpu:3", 3),
        ("cpu", 0),
        ("/job:localhost/device:CPU:2", 2),
        ("/job:worker/replica:0/task:0/device:cpu:1", 1),
        ("device:cpu:1", 1),
    ],
)
def test_devices_by_index_and_by_tensorflow_name(name: object, index: int):
    assert dj.OneDeviceStrategy(name).mesh.devices.flat[0] == jax.devices()[index]


def test_a_gpu_that_jax_does_not_see_says_what_to_install():
    with pytest.raises(
        ValueError, match=r"'gpu:0': JAX sees no GPU\. Install JAX with GPU support, pip"
    ):
        dj.OneDeviceStrategy("gpu:0")


@pytest.mark.parametrize("name", ["cpu:99", 99, -1, "x:0", "", 1.5, True, "/task:1/cpu:0"])
def test_an_unknown_device_raises_and_lists_the_local_ones(name: object):
    with pytest.raises(ValueError, match="'cpu:0', 'cpu:1'"):
        dj.OneDeviceStrategy(name)


def test_mirrored_devices_default_to_all_and_must_be_distinct():
    for none in ([], iter([])):
        assert dj.MirroredStrategy(none).num_replicas_in_sync == len(jax.devices())
    assert dj.MirroredStrategy(iter([0, 1])).num_replicas_in_sync == 2
    assert dj.MirroredStrategy().num_replicas_in_sync == len(jax.devices())
    with pytest.raises(ValueError, match="same device"):
        dj.MirroredStrategy(["cpu:0", 0])
